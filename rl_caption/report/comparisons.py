"""Report of a comparison: what ``evaluate.py --compare`` wrote, as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from rl_caption.data.plain_files import read_json
from rl_caption.evaluation.comparison import COMPARISON, column_of, folder_of
from rl_caption.evaluation.table import Column
from rl_caption.report.errors import ReportError
from rl_caption.report.folders import EvaluationFolder, read_evaluation
from rl_caption.report.gallery import MAX_IMAGES
from rl_caption.report.markup import Markup, table
from rl_caption.report.page import Page, Section
from rl_caption.report.sources import Source
from rl_caption.report.system_pages import evaluations_page


class _Difference(TypedDict):
    first: float
    second: float
    difference: float
    interval: tuple[float, float]
    p: float


class _ComparisonFile(TypedDict):
    systems: tuple[str, str]
    resamples: int
    differences: dict[str, _Difference]


@dataclass(frozen=True)
class Comparison:
    """What ``evaluate.py --compare`` wrote.

    Attributes:
        systems: names of the first and of the second.
        resamples: of the test.
        differences: metric key -> ``first``, ``second``, ``difference``, ``interval``, ``p``.
        evaluations: by name.
    """

    systems: tuple[str, str]
    resamples: int
    differences: Mapping[str, Mapping[str, Any]]
    evaluations: Mapping[str, EvaluationFolder]


def read_comparison(path: Path) -> Comparison:
    """Read ``comparison.json`` and the folders of both systems.

    Raises:
        ReportError: one of them is not there or damaged.
        DataError: a damaged ``predictions.json``.
    """
    content = read_json(path / COMPARISON, ReportError, _ComparisonFile)
    first, second = content["systems"]
    found = {name: read_evaluation(path / folder_of(name)) for name in (first, second)}
    return Comparison((first, second), content["resamples"], content["differences"], found)


def comparison_page(comparison: Comparison, source: Source | None = None, images: int = MAX_IMAGES) -> Page:
    """Two systems with a paired test: differences, tables, and captions of the same images.

    Args:
        comparison, source, images: as for ``evaluations_page``.
    """
    page = evaluations_page(comparison.evaluations, source, images)
    first, second = comparison.systems
    found = comparison.differences
    tiles = []
    for key in ("CIDEr", "BLEU-4", "METEOR", "SPICE"):
        if key in found:
            low, high = found[key]["interval"]
            value = f"{100 * found[key]['difference']:+.2f}".replace("-", "−")
            note = f"{100 * low:+.2f} to {100 * high:+.2f}, p {found[key]['p']:.4f}".replace("-", "−")
            tiles.append((f"{key} (x100)", value, note))
    return replace(
        page,
        title=f"{first} / {second}",
        subtitle=f"Comparison: {second} against {first}",
        tiles=tiles,
        sections=[Section("Difference", differences_table(comparison)), *page.sections],
    )


def differences_table(comparison: Comparison) -> Markup:
    """Metric by metric: both systems, the second less the first, its interval and p-value."""
    first, second = comparison.systems
    head = ["metric", first, second, "difference", "95 % interval", "p"]
    rows = []
    for key, found in comparison.differences.items():
        column = column_of(key)

        def shown(value: float, sign: str = "", column: Column = column) -> str:
            return f"{value * column.factor:{sign}.{column.decimals}f}".replace("-", "−")

        low, high = found["interval"]
        cells = [shown(found["first"]), shown(found["second"]), shown(found["difference"], "+")]
        rows.append([column.heading, *cells, f"{shown(low, '+')} to {shown(high, '+')}", f"{found['p']:.4f}"])
    note = (
        f"Difference: {second} minus {first}. Interval: paired bootstrap over images; p: two-sided approximate "
        f"randomisation; {comparison.resamples:,} resamples each, not corrected for the number of metrics"
    )
    return table(head, rows, note)
