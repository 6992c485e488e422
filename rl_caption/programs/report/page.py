"""The report program: one self-contained HTML page about a run, an evaluation, or several of them."""

import base64
import io
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from rewards.base import RewardError
from rewards.images import frames_of
from rewards.text.cider import CIDER_DIFFERENCES
from rewards.text.tokenize import TOKENIZER
from rl_caption.config.build import ConfigError, build_data
from rl_caption.config.commands import ReportConfig
from rl_caption.data.base import DataError, Row, load_image
from rl_caption.data.files import write_text
from rl_caption.data.plain_files import read_json
from rl_caption.evaluation import format_table
from rl_caption.evaluation.metrics import words_tokenizer
from rl_caption.evaluation.results import (
    COMPARISON,
    difference_rows,
    factor_of,
    folder_of,
    unique_names,
)
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.programs.report.read import (
    ReportError,
    RunFolder,
    read_evaluation,
    read_run,
    received_data,
    shown_key,
)

logger = logging.getLogger(__name__)
REPORT = "report.html"
CIDER = "CIDEr-D (x100)"
MAX_IMAGES = 200
THUMBNAIL = 176
"""Longest side of an image in the gallery, in pixels."""

Captions = Mapping[str, Mapping[str, str]]
"""System -> image id -> caption."""
Scores = Mapping[str, Mapping[str, float]]
"""System -> image id -> score of the caption."""


def make_page(
    paths: Sequence[Path], rows: Sequence[Row] | None = None, images: int = MAX_IMAGES
) -> str:
    """HTML page of a run (finished or not), of evaluations, or of a comparison. Style,
    charts and images are inside; it has no scripts and loads nothing.

    Args:
        paths: one folder, or several folders of evaluations.
        rows: references and images (``image`` may be missing); None takes the data that
            the folders name.
        images: largest number of images in the gallery.

    Raises:
        ReportError, DataError, OSError: a folder holds nothing to report on, or a file is damaged.
    """
    comparison, differences = paths[0] / COMPARISON, []
    if comparison.is_file():
        content = read_json(comparison, ReportError)
        names = content["systems"]
        paths = [paths[0] / folder_of(name) for name in names]
        differences = difference_rows(content["differences"])
    elif len(paths) == 1 and (paths[0] / "config.yaml").is_file():
        return run_page(read_run(paths[0]), rows, images)
    else:
        names = unique_names(paths)
    systems = dict(zip(names, map(read_evaluation, paths), strict=True))
    captions = {name: one.captions for name, one in systems.items()}
    scores = {name: one.scores for name, one in systems.items()}
    return _render(
        title=" / ".join(names),
        subtitle="Evaluation of captions",
        differences=differences,
        table_text=format_table(scores),
        **gallery(captions, systems[names[0]].settings, rows, images),
    )


def run_page(run: RunFolder, rows: Sequence[Row] | None, images: int) -> str:
    """HTML page of a run: alarms, validations, charts and settings, and the captions of
    its first, best and last validation.
    """
    steps = run.shown_steps()
    captions = {name: run.predictions(step) for name, step in steps.items()}
    split = run.config.get("eval", {}).get("split", "val")
    settings = {"data": run.config.get("data", {}), "split": split}
    rewards = {*run.terms, *(term.get("target") for term in run.terms.values())}
    names = run.path.resolve().parts
    about = {"environment": dict(run.env), "configuration": dict(run.config)}
    return _render(
        run=run,
        title="/".join(names[-3:-1]) if names[-1] == "run" else names[-1],
        remark=CIDER_DIFFERENCES if "cider" in rewards else "",
        charts=charts(run),
        command=shlex.join(run.env.get("command", [])),
        settings=yaml.safe_dump(about, sort_keys=False, allow_unicode=True),
        **gallery(captions, settings, rows, images),
    )


def _render(**values: Any) -> str:
    """The template with these values; whatever is not marked as HTML is escaped."""
    environment = Environment(
        loader=PackageLoader("rl_caption.programs.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(values)


def charts(run: RunFolder) -> list[Markup]:
    """A chart for each logged key and its ``val/`` key, as SVG by matplotlib; alarms of
    the monitor are dashed lines, the best validation is a dotted one.
    """
    import matplotlib
    from matplotlib.figure import Figure

    groups: dict[str, list[str]] = {}
    for key in run.keys:
        groups.setdefault(shown_key(key.removeprefix("val/")), []).append(key)
    figures = []
    for title, keys in groups.items():
        # The salt gives the same bytes for the same values, and other ids to each chart of a page.
        style: Any = {"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 8}
        with matplotlib.rc_context(style | {"text.parse_math": False}):
            figure = Figure(figsize=(3.6, 2.4), layout="constrained")
            axes = figure.subplots()
            axes.set_title(title, loc="left")
            for key in keys:
                steps, values = zip(*run.series(key), strict=True)
                scaled = [factor_of(key) * value for value in values]
                has_dots = key.startswith("val/") or len(scaled) < 3
                label = f"{key} {scaled[-1]:.4g}"
                axes.plot(steps, scaled, "o-" if has_dots else "-", label=label)
            for step in run.alarms:
                axes.axvline(step, color="red", linestyle="--")
            if run.best_step is not None:
                axes.axvline(run.best_step, color="black", linestyle=":")
            axes.legend()
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        svg = buffer.getvalue()
        figures.append(Markup(svg[svg.index("<svg") :]))
    return figures


def gallery(
    systems: Captions,
    settings: Mapping[str, Any],
    rows: Sequence[Row] | None,
    limit: int,
) -> dict[str, Any]:
    """Values of the template for images with the captions of several systems: ``note``,
    and ``cards``, one for each image; empty where no captions were kept.

    ``settings`` has the data, the split and the tokenizer of an evaluation. If ``rows``
    is None, rows are read from this data; if that fails, the note says why.
    """
    systems = {name: captions for name, captions in systems.items() if captions}
    if not systems:
        return {}
    data, note = settings.get("data") or {}, ""
    if rows is None:
        rows = []
        try:
            rows = build_data(received_data(data))[settings.get("split", "test")]
        except (DataError, ConfigError, OSError, TypeError) as error:
            note = f"No references and images are shown: the data cannot be read from {Path.cwd()} ({error})"
    by_id = {row["image_id"]: row for row in rows}
    words = data.get("tokenizer", TOKENIZER)
    words = words_tokenizer(settings.get("tokenizer", "auto"), words)
    scores = reference_scores(systems, by_id, words)
    cards = []
    for image_id in select_images(systems, scores, limit):
        row: Any = by_id.get(image_id, {})
        captions = []
        for name, texts in systems.items():
            score = scores.get(name, {}).get(image_id)
            caption_scores = {} if score is None else {CIDER: score}
            captions.append((name, texts.get(image_id), caption_scores))
        card = {"id": image_id, "image": _picture(row), "captions": captions}
        cards.append(card | {"references": row.get("references", [])})
    return {"cards": cards, "note": f"{len(cards):,} images. {note}"}


def reference_scores(
    systems: Captions, rows: Mapping[str, Row], tokenizer: str
) -> Scores:
    """CIDEr-D of every caption, times 100: 0 to 1000.

    Document frequencies are counted in the captioned images' references, without EOS,
    as for ``val/cider``. Captions of images without references get no score; the result
    is empty if fewer than two images have references.
    """
    references = {
        image_id: rows[image_id]["references"]
        for captions in systems.values()
        for image_id in captions
        if image_id in rows and rows[image_id]["references"]
    }
    if len(references) < 2:
        return {}
    corpus = list(references.values())
    judges = build_judges({"cider": JudgeConfig()}, None, corpus, tokenizer=tokenizer)
    scores: dict[str, dict[str, float]] = {}
    for system, captions in systems.items():
        ids = [image_id for image_id in captions if image_id in references]
        texts = [captions[image_id] for image_id in ids]
        reference_lists = [references[image_id] for image_id in ids]
        values = judges["cider"](None, texts, references=reference_lists)
        scaled = [factor_of("cider") * value for value in values]
        scores[system] = dict(zip(ids, scaled, strict=True))
    return scores


def select_images(systems: Captions, scores: Scores, limit: int) -> list[str]:
    """Ids of the images to show: an even sample of at most ``limit``, the images whose
    scores differ most among the systems first.
    """
    ids = list(dict.fromkeys(i for captions in systems.values() for i in captions))

    def change(image_id: str) -> float:
        """Difference of the largest and the smallest score of an image's captions."""
        values = [
            by_image[image_id] for by_image in scores.values() if image_id in by_image
        ]
        return max(values, default=0) - min(values, default=0)

    count = min(limit, len(ids))
    chosen = [ids[index * len(ids) // count] for index in range(count)]
    return sorted(chosen, key=change, reverse=True)


def _picture(row: Mapping[str, Any]) -> str | None:
    """Data URI of a WebP thumbnail of an image, or of a video's first frame; None
    without an image.
    """
    if row.get("image", "") == "":
        return None
    try:
        image = load_image(frames_of(row["image"])[0])
    except DataError:  # captioners over region features do without the pictures
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "webp", quality=85)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def write_report(folder: Path, rows: Sequence[Row]) -> None:
    """Write ``report.html`` into the folder of a finished program, and print its path.

    An error is logged as a warning: the results are there, and ``rl-caption report``
    makes the page again.
    """
    try:
        write_text(folder / REPORT, make_page([folder], rows))
        print(f"wrote {folder / REPORT}", file=sys.stderr)
    except (ReportError, DataError, RewardError, OSError) as error:
        logger.warning("WARNING: no %s for %s: %s", REPORT, folder, error)


def main(config: ReportConfig) -> int:
    """Write a page and print its path."""
    folders = [Path(folder) for folder in config.folders]
    out = Path(config.out or folders[0]) / REPORT
    write_text(out, make_page(folders, images=config.images))
    print(out)
    return 0
