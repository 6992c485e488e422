"""The report of a grid: tables over seeds, the plot over alpha, captions of the same images."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rewards.files import atomic_write
from rl_caption.config.schema import RewardTerm
from rl_caption.data.base import DataError, Row, thumbnail
from rl_caption.data.files import write_text
from rl_caption.evaluation.metrics import JUDGE
from rl_caption.evaluation.results import (
    COLUMNS,
    LEFT_OUT,
    Column,
    csv_text,
    format_value,
    markdown,
)
from rl_caption.programs.ablation.config import AblateConfig
from rl_caption.programs.ablation.plan import Cell, Plan, as_argument
from rl_caption.programs.report.charts import image
from rl_caption.programs.report.pages import alpha_series
from rl_caption.programs.report.program import write_report as write_page_of
from rl_caption.programs.report.read import Member, by_system, over_seeds

Systems = Mapping[str, Sequence[Member]]
"""``by_system``."""
Bounds = Mapping[str, tuple[float, float]]
"""Judge -> range of its scores."""
PAPER_KEYS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
"""Columns of the L-CLIPScore paper's tables; the judges follow."""
TEXT_KEYS = ("captions/repeated_ngrams", "captions/bad_endings", "length/mean", "vocabulary/size")
HACKING_KEYS = (*TEXT_KEYS, "oracle/f1", "oracle/precision", "oracle/recall", "oracle/unparsed")
IMAGE_SIZE = 256
"""Longest side of the pictures in ``captions.md``, in pixels."""


def write_report(
    members: Sequence[Member],
    plan: Plan,
    config: AblateConfig,
    failures: Sequence[str],
    bounds: Bounds,
) -> list[Path]:
    """Write ``table.md``, ``table.csv``, ``runs.csv``, ``captions.md``, ``report.html``, and ``alpha.svg`` for alphas.

    ``members`` begins with the starting policies; ``failures`` are sentences about missing cells. Returns the paths.
    """
    out, systems, rows = Path(config.out), by_system(members), next(iter(plan.bases.values())).rows
    tables = markdown_tables(systems, bounds)
    print(f"\n{tables}\n")
    policies = "after the last step" if config.policy == "last" else "best by validation"
    lines = [
        f"Means over seeds ± standard deviation, split {config.split!r}; policies {policies}. "
        "`start` is the policy that all cells start from.",
        *dict.fromkeys(f"{cell.system}: {formula(cell)}" for cell in plan.cells),
        *notes(members),
        *(f"missing: {failure}" for failure in failures),
    ]
    remarks = "\n".join(f"- {line}" for line in lines)
    written = {
        "table.md": f"# {out.name}\n\n{tables}\n\n{remarks}\n",
        "table.csv": summary_csv(systems, bounds),
        "runs.csv": runs_csv(systems),
    }
    if config.show_images:
        captions = {name: members[0].evaluation.captions for name, members in systems.items()}
        written["captions.md"] = captions_page(rows[: config.show_images], captions, out / "images")
    if any(one.alpha is not None for one in members):
        written["alpha.svg"] = alpha_image(systems, bounds)
    for name, text in written.items():
        write_text(out / name, text)
    files = [out / name for name in written]
    page = write_page_of(out, rows) if config.report else None
    return files if page is None else [*files, page]


def formula(cell: Cell) -> str:
    """A cell's reward, with options that differ from the defaults, and its overrides, as one line of text:
    ``0.3 rouge_l + 0.7 cider; train.lr = 1e-05``.
    """
    plain, terms = asdict(RewardTerm()), []
    for name, term in cell.terms.items():
        options = {
            key: value
            for key, value in asdict(term).items()
            if key != "weight" and value != plain[key]
        }
        terms.append(f"{term.weight:g} {name}" + (f" {json.dumps(options)}" if options else ""))
    return "; ".join(
        [
            " + ".join(terms),
            *(f"{key} = {as_argument(value)}" for key, value in cell.overrides.items()),
        ]
    )


def columns_of(systems: Systems, bounds: Bounds) -> list[dict[str, Column]]:
    """The computed columns of the two tables: those of the L-CLIPScore paper, and signs of reward hacking."""
    keys = {
        key
        for members in systems.values()
        for one in members
        for key in one.evaluation.scores["metrics"]
    }
    paper = {key: Column(f"{key} (x100)") for key in PAPER_KEYS if key in keys}
    paper |= {
        JUDGE + name: Column(f"{name} [{low:g}, {high:g}]", 1.0, 4)
        for name, (low, high) in bounds.items()
    }
    return [paper, {key: COLUMNS[key] for key in HACKING_KEYS if key in keys}]


def alarms_of(members: Sequence[Member]) -> tuple[int, list[int]]:
    """How many seeds the monitor watched, and the step of the first alarm of each seed that had one."""
    watched = [one.run for one in members if one.run is not None and one.run.has_monitor]
    return len(watched), [run.alarms[0] for run in watched if run.alarms]


def markdown_tables(systems: Systems, bounds: Bounds) -> str:
    """Two Markdown tables, a row for each system: mean over seeds ± standard deviation."""
    paper, hacking = columns_of(systems, bounds)
    means = {
        name: over_seeds([one.evaluation for one in members]) for name, members in systems.items()
    }
    watched = any(alarms_of(members)[0] for members in systems.values())
    tables = []
    for columns, with_alarm in ((paper, False), (hacking, watched)):
        lines = []
        for name, members in systems.items():
            line = [name, LEFT_OUT if members[0].seed is None else str(len(members))]
            for key, column in columns.items():
                numbers = [
                    format_value(number, column)
                    for number in means[name].get(key, ())
                    if number is not None
                ]
                line.append(" ± ".join(numbers) or LEFT_OUT)
            if with_alarm:
                count, steps = alarms_of(members)
                first_alarm = f"{min(steps)} ({len(steps)} of {count})" if steps else "none"
                line.append(first_alarm if count else LEFT_OUT)
            lines.append(line)
        if columns or with_alarm:
            head = ["system", "seeds", *(column.heading for column in columns.values())]
            tables.append(markdown(head + ["first alarm, step"] * with_alarm, lines))
    return "\n\n".join(tables)


def notes(members: Sequence[Member]) -> list[str]:
    """What was left out of the tables and why, the decoding, and the signatures of the metrics."""
    left_out = [
        item for one in members for item in one.evaluation.scores.get("left_out", {}).items()
    ]
    reasons = [
        f"{key} is left out: {reason}"
        for key, reason in left_out
        if key in PAPER_KEYS + HACKING_KEYS
    ]
    signatures = list(dict.fromkeys(one.evaluation.scores["signature"] for one in members))
    heading = (
        "signature" if len(signatures) == 1 else "the signatures differ, so the rows do not compare"
    )
    decoding = dict.fromkeys(
        how for one in members if (how := one.evaluation.scores.get("decoding"))
    )
    return [
        *dict.fromkeys(reasons),
        *(f"decoding: {how}" for how in decoding),
        f"{heading}: {'; '.join(signatures)}",
    ]


def summary_csv(systems: Systems, bounds: Bounds) -> str:
    """CSV, a row for each system: every column's mean and ``KEY.std``, as computed; empty where there is none."""
    keys = [key for columns in columns_of(systems, bounds) for key in columns]
    head = [
        "system",
        "base",
        "alpha",
        "seeds",
        *(name for key in keys for name in (key, f"{key}.std")),
    ]
    lines: list[list[Any]] = [[*head, "alarms", "first_alarm"]]
    for name, members in systems.items():
        means, (watched, steps) = (
            over_seeds([one.evaluation for one in members]),
            alarms_of(members),
        )
        values = [value for key in keys for value in means.get(key, (None, None))]
        seeds = sum(one.seed is not None for one in members)
        alarms = [len(steps) if watched else None, min(steps, default=None)]
        lines.append([name, members[0].base, members[0].alpha, seeds, *values, *alarms])
    return csv_text(lines)


def runs_csv(systems: Systems) -> str:
    """CSV, a row for each run: every metric as computed."""
    ordered = [one for members in systems.values() for one in members]
    keys = list(dict.fromkeys(key for one in ordered for key in one.evaluation.scores["metrics"]))
    lines: list[list[Any]] = [["system", "base", "alpha", "seed", *keys, "first_alarm"]]
    for one in ordered:
        values = [one.evaluation.scores["metrics"].get(key) for key in keys]
        lines.append(
            [
                one.system,
                one.base,
                one.alpha,
                one.seed,
                *values,
                next(iter(alarms_of([one])[1]), None),
            ]
        )
    return csv_text(lines)


def captions_page(
    rows: Sequence[Row], systems: Mapping[str, Mapping[str, str]], folder: Path
) -> str:
    """Markdown with the captions of each row by every system; ``systems`` maps a name to image id -> caption.

    Pictures are written to ``folder``. An image that cannot be read, such as region features, has no picture.
    """
    blocks = [
        "# Captions of the same images",
        "One seed a cell. The first line of an image is one of its references.",
    ]
    for index, row in enumerate(rows):
        blocks.append(f"## {_escape_markdown(row['image_id'])}")
        with suppress(DataError):
            image = thumbnail(row["image"], IMAGE_SIZE)
            with atomic_write(folder / f"{index}.png") as file:
                image.save(file, "PNG")
            blocks.append(f"![image {index}]({folder.name}/{index}.png)")
        lines = ["| system | caption |", "|---|---|"]
        lines += [
            f"| reference | {_escape_markdown(reference)} |" for reference in row["references"][:1]
        ]
        for name, captions in systems.items():
            caption = captions.get(row["image_id"])
            lines.append(
                f"| {name} | {LEFT_OUT if caption is None else _escape_markdown(caption) or '(empty)'} |"
            )
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _escape_markdown(text: str) -> str:
    """Text as it stands, on one line of a Markdown table."""
    return re.sub(r"([\\|*_`<>\[\]#])", r"\\\1", " ".join(text.split()))


def alpha_image(systems: Systems, bounds: Bounds) -> str:
    """CIDEr (x100) and the first judge over alpha as SVG, a line for each base.

    Error bars are standard deviations over seeds; dashed lines are the starting policies.
    """
    columns, _ = columns_of(systems, bounds)
    keys = ["CIDEr", *[key for key in columns if key.startswith(JUDGE)][:1]]
    return image(
        {columns[key].heading: alpha_series(systems, key) for key in keys if key in columns},
        "alpha",
    )
