"""The report program: one self-contained HTML page about a run, an evaluation, or several of them."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewards.base import RewardError
from rewards.trust import trust
from rl_caption.config.commands import ReportConfig
from rl_caption.config.shipped import find_config
from rl_caption.data.base import DataError
from rl_caption.data.files import write_text
from rl_caption.evaluation.results import unique_names
from rl_caption.programs.report import pages
from rl_caption.programs.report.gallery import MAX_IMAGES, Source, rows_of_config, source_of
from rl_caption.programs.report.read import (
    ReportError,
    kind_of,
    read_comparison,
    read_evaluation,
    read_run,
)
from rl_caption.runtime.options import class_names
from rl_caption.training.run_folder import read_config

logger = logging.getLogger(__name__)
REPORT = "report.html"


def make_page(
    paths: Sequence[Path], source: Source | None = None, images: int = MAX_IMAGES
) -> pages.Page:
    """The report of a run, of evaluations, or of a comparison.

    Args:
        paths: their folders, all of one kind.
        source: references and images; None takes the data that the folders name.
        images: most images of the gallery.

    Raises:
        ReportError, DataError: a folder holds nothing to report on, kinds are mixed, or a file is
            damaged.
    """
    kinds = {kind_of(path) for path in paths}
    if len(paths) > 1 and kinds != {"evaluation"}:
        raise ReportError(
            f"{', '.join(map(str, paths))}: expected one folder, or several of evaluations"
        )
    if kinds == {"run"}:
        return pages.run_page(read_run(paths[0]), source, images)
    if kinds == {"comparison"}:
        return pages.comparison_page(*read_comparison(paths[0]), source, images)
    named = zip(unique_names(paths), paths, strict=True)
    return pages.evaluations_page(
        {name: read_evaluation(path) for name, path in named}, source, images
    )


def write_report(folder: Path, rows: Sequence[Any], page: pages.Page | None = None) -> Path | None:
    """Write ``report.html`` into a folder, at the end of the program that wrote its results.

    References and images are those of ``rows``, whose ``image`` may be missing. What keeps the page
    from being written
    is a warning: the results are there, and ``rl-caption report`` makes it again.
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
    source = None
    if config.data is not None:
        data = read_config(find_config(config.data)).get("data")
        trust(class_names(data))
        source = rows_of_config(data, config.split)
        if not source.rows:
            raise ReportError(f"data is {config.data}: {source.missing}")
    out = Path(config.out or folders[0] / REPORT)
    write_text(out, pages.render(make_page(folders, source, config.images)))
    print(out)
    return 0
