"""The report program: one self-contained page of a run, of an ablation, or of several runs or evaluations."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from rewards.base import RewardError
from rl_caption.data.base import DataError
from rl_caption.data.files import read_references, write_text
from rl_caption.evaluation.results import unique_names
from rl_caption.report import pages
from rl_caption.report.gallery import MAX_IMAGES, Source, rows_of_config, rows_of_references
from rl_caption.report.read import ReportError, kind_of, read_folder
from rl_caption.training.run_folder import read_config

logger = logging.getLogger(__name__)
REPORT = "report.html"


def make_page(paths: Sequence[Path], source: Source | None = None, images: int = MAX_IMAGES) -> pages.Page:
    """The report of one folder, or of several runs or evaluations side by side.

    Args:
        paths: folders of runs, of evaluations, or one of an ablation or of a comparison.
        source: references and images; None takes the data that the folders name.
        images: most images of the gallery.

    Raises:
        ReportError: a folder holds nothing to report on, kinds are mixed, or a file is damaged.
        DataError: captions are damaged.
    """
    kinds = {path: kind_of(path) for path in paths}
    kind = kinds[paths[0]]
    if len(set(kinds.values())) > 1:
        found = ", ".join(f"{path} ({kind})" for path, kind in kinds.items())
        raise ReportError(f"folders of one kind are compared: {found}")
    if kind in ("ablation", "comparison") and len(paths) > 1:
        raise ReportError(f"one {kind} makes a page, got {len(paths)}: {', '.join(map(str, paths))}")
    folders = {name: read_folder(path) for name, path in zip(unique_names(paths), paths, strict=True)}
    if kind == "evaluation":
        return pages.evaluations_page(folders, source, images)
    if len(paths) > 1:
        return pages.compared_runs_page(folders, source, images)
    (folder,) = folders.values()
    if kind == "run":
        return pages.run_page(folder, source, images)
    if kind == "comparison":
        return pages.comparison_page(folder, source, images)
    return pages.ablation_page(folder, source, images)


def write_report(folder: Path, source: Source | None = None, images: int = MAX_IMAGES) -> Path | None:
    """Write ``report.html`` into a run, an evaluation or an ablation, at the end of the program behind it.

    What keeps it from being written is a warning: the results are there, and ``python -m rl_caption report`` makes
    the page again.

    Args:
        folder: what to report on.
        source: references and images; None takes the data that the folder names.
        images: most images of the gallery.
    """
    try:
        write_text(folder / REPORT, pages.render(make_page([folder], source, images)))
    except (ReportError, DataError, RewardError, OSError) as error:
        logger.warning("WARNING: no %s for %s: %s", REPORT, folder, error)
        return None
    return folder / REPORT


def main(argv: Sequence[str] | None = None) -> int:
    """Write a page and print its path."""
    parser = argparse.ArgumentParser(prog="report", description=__doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="of a run, an evaluation, a comparison, an ablation"
    )
    parser.add_argument("--out", type=Path, help=f"the page (default: {REPORT} in the folder)")
    parser.add_argument("--images", type=int, default=MAX_IMAGES, help=f"most images of the gallery ({MAX_IMAGES})")
    parser.add_argument("--config", type=Path, help="YAML file whose section data names the references and images")
    parser.add_argument("--split", help="of that data (default: test, or val for runs)")
    parser.add_argument("--references", type=Path, help="file of references, in place of --config")
    parser.add_argument("--image_folder", type=Path, help="folder of images, beside --references")
    chosen = parser.parse_args(argv)
    if chosen.images < 1:
        parser.error(f"--images is {chosen.images}: expected 1 or more")
    if chosen.out is None and len(chosen.folders) > 1:
        parser.error("several folders are compared in one page: name it with --out FILE")
    out = chosen.out or chosen.folders[0] / REPORT
    write_text(out, pages.render(make_page(chosen.folders, _source(chosen), chosen.images)))
    print(out)
    return 0


def _source(chosen: argparse.Namespace) -> Source | None:
    if chosen.references is not None:
        return rows_of_references(read_references(chosen.references), chosen.image_folder)
    if chosen.config is None:
        return None
    split = chosen.split or ("val" if kind_of(chosen.folders[0]) == "run" else "test")
    found = rows_of_config(read_config(chosen.config).get("data"), split)
    if found.missing:
        raise ReportError(f"--config {chosen.config}: {found.missing}")
    return found
