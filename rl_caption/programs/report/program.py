"""The report program: one self-contained HTML page about a run, an ablation, or several runs or evaluations."""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewards.base import RewardError
from rewards.trust import trust
from rl_caption.config.shipped import find_config
from rl_caption.data.base import DataError, Row
from rl_caption.data.files import IdKey, find_images, read_captions, read_references, write_text
from rl_caption.evaluation.results import unique_names
from rl_caption.programs.report import pages
from rl_caption.programs.report.gallery import MAX_IMAGES, Source, rows_of_config, source_of
from rl_caption.programs.report.read import (
    ReportError,
    kind_of,
    read_ablation,
    read_comparison,
    read_evaluation,
    read_run,
)
from rl_caption.runtime.options import add_trust, class_names
from rl_caption.training.run_folder import read_config

logger = logging.getLogger(__name__)
REPORT = "report.html"


def make_page(
    paths: Sequence[Path], source: Source | None = None, images: int = MAX_IMAGES
) -> pages.Page:
    """The report of a run, an evaluation, an ablation or a comparison, or of several runs or evaluations.

    Args:
        paths: their folders.
        source: references and images; None takes the data that the folders name.
        images: most images of the gallery.

    Raises:
        ReportError, DataError: a folder holds nothing to report on, kinds are mixed, or a file is damaged.
    """
    kinds = {path: kind_of(path) for path in paths}
    content = kinds[paths[0]]
    if len(set(kinds.values())) > 1:
        contents = ", ".join(f"{path} ({content})" for path, content in kinds.items())
        raise ReportError(f"only folders of the same kind can be compared, got: {contents}")
    if content in ("ablation", "comparison") and len(paths) > 1:
        raise ReportError(
            f"a page shows only one {content}, got {len(paths)}: {', '.join(map(str, paths))}"
        )
    names = dict(zip(unique_names(paths), paths, strict=True))
    if content == "run":
        return pages.runs_page(
            {name: read_run(path) for name, path in names.items()}, source, images
        )
    if content == "evaluation":
        return pages.evaluations_page(
            {name: read_evaluation(path) for name, path in names.items()}, source, images
        )
    if content == "comparison":
        return pages.comparison_page(*read_comparison(paths[0]), source, images)
    return pages.ablation_page(paths[0].resolve().name, *read_ablation(paths[0]), source, images)


def write_report(folder: Path, rows: Sequence[Any]) -> Path | None:
    """Write ``report.html`` into a run, an evaluation or an ablation, at the end of the program behind it.

    References and images are those of ``rows``, whose ``image`` may be missing. What keeps the page from being written
    is a warning: the results are there, and ``python -m rl_caption report`` makes it again.
    """
    try:
        write_text(folder / REPORT, pages.render(make_page([folder], source_of(rows))))
    except (ReportError, DataError, RewardError, OSError) as error:
        logger.warning("WARNING: no %s for %s: %s", REPORT, folder, error)
        return None
    return folder / REPORT


def main(argv: Sequence[str] | None = None) -> int:
    """Write a page and print its path."""
    parser = argparse.ArgumentParser(
        prog="rl-caption report", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="a run, an evaluation, a comparison or an ablation",
    )
    parser.add_argument(
        "--out", type=Path, help=f"HTML file to write (default: {REPORT} in the folder)"
    )
    parser.add_argument(
        "--images",
        type=int,
        default=MAX_IMAGES,
        help=f"maximum number of images in the gallery (default: {MAX_IMAGES})",
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="YAML file whose data section says where references and images are",
    )
    parser.add_argument(
        "--split", help="split of the data of --config (default: test, or val for runs)"
    )
    parser.add_argument(
        "--references", type=Path, help="file with the references, instead of --config"
    )
    parser.add_argument(
        "--image_folder", type=Path, help="folder with the images, together with --references"
    )
    add_trust(parser)
    chosen = parser.parse_args(argv)
    if chosen.images < 1:
        parser.error(f"--images is {chosen.images}: expected 1 or more")
    if chosen.out is None and len(chosen.folders) > 1:
        parser.error("several folders are compared in one page: set its file with --out FILE")
    if chosen.references is not None and (chosen.config is not None or chosen.split is not None):
        parser.error(
            "--references cannot be combined with --config or --split: use one or the other"
        )
    if chosen.image_folder is not None and chosen.references is None:
        parser.error(
            "--image_folder needs --references; with --config, the images are those of its data section"
        )
    if chosen.split is not None and chosen.config is None:
        parser.error("--split selects a split of the data of --config: set --config, too")
    source = None
    if chosen.references is not None:
        files = [file for folder in chosen.folders for file in folder.rglob("predictions.json")]
        captions = [read_captions(file, allow_empty=True) for file in files]
        by: IdKey = captions[0].by if captions else "image_id"
        captioned = set[str]().union(*captions)
        references = read_references(chosen.references, by=by)
        texts_by_id = {
            i: texts for i, texts in references.items() if i in captioned or not captions
        }
        images = (
            find_images(chosen.image_folder, texts_by_id)
            if chosen.image_folder
            else [""] * len(texts_by_id)
        )
        pairs = zip(texts_by_id.items(), images, strict=True)
        source = source_of(
            [Row(image_id=i, image=file, references=texts) for (i, texts), file in pairs]
        )
    elif chosen.config is not None:
        split = chosen.split or ("val" if kind_of(chosen.folders[0]) == "run" else "test")
        data = read_config(find_config(chosen.config)).get("data")
        trust(class_names(data))
        source = rows_of_config(data, split)
        if not source.rows:
            raise ReportError(f"--config {chosen.config}: {source.missing}")
    out = chosen.out or chosen.folders[0] / REPORT
    write_text(out, pages.render(make_page(chosen.folders, source, chosen.images)))
    print(out)
    return 0
