"""The report program: one self-contained HTML page about a run, an evaluation, or several of them."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewards.base import RewardError
from rl_caption.config.commands import ReportConfig
from rl_caption.data.base import DataError
from rl_caption.data.files import write_text
from rl_caption.data.plain_files import read_json
from rl_caption.evaluation.results import COMPARISON, folder_of, unique_names
from rl_caption.programs.report import pages
from rl_caption.programs.report.gallery import MAX_IMAGES, Source, source_of
from rl_caption.programs.report.read import ReportError, read_evaluation, read_run

logger = logging.getLogger(__name__)
REPORT = "report.html"


def make_page(
    paths: Sequence[Path], source: Source | None = None, images: int = MAX_IMAGES
) -> pages.Page:
    """The report of a run, of evaluations, or of a comparison.

    Args:
        paths: folders: one, or several of evaluations.
        source: references and images; None takes the data that the folders name.
        images: most images of the gallery.

    Raises:
        ReportError, DataError: a folder holds nothing to report on, or a file is damaged.
    """
    comparison = paths[0] / COMPARISON
    if comparison.is_file():
        found = read_json(comparison, ReportError)
        systems = {
            name: read_evaluation(paths[0] / folder_of(name))
            for name in found["systems"]
        }
        return pages.evaluations_page(systems, source, images, found["differences"])
    if len(paths) == 1 and (paths[0] / "config.yaml").is_file():
        return pages.run_page(read_run(paths[0]), source, images)
    named = zip(unique_names(paths), paths, strict=True)
    evaluations = {name: read_evaluation(path) for name, path in named}
    return pages.evaluations_page(evaluations, source, images)


def write_report(
    folder: Path, rows: Sequence[Any], page: pages.Page | None = None
) -> Path | None:
    """Write ``report.html`` into a folder, at the end of the program that wrote its results.

    References and images are those of ``rows``, whose ``image`` may be missing. What keeps the page
    from being written is a warning: the results are there, and ``rl-caption report`` makes it again.
    """
    try:
        page = page or make_page([folder], source_of(rows))
        write_text(folder / REPORT, pages.render(page))
    except (ReportError, DataError, RewardError, OSError) as error:
        logger.warning("WARNING: no %s for %s: %s", REPORT, folder, error)
        return None
    return folder / REPORT


def main(config: ReportConfig) -> int:
    """Write a page and print its path."""
    folders = [Path(folder) for folder in config.folders]
    out = Path(config.out or folders[0]) / REPORT
    write_text(out, pages.render(make_page(folders, images=config.images)))
    print(out)
    return 0
