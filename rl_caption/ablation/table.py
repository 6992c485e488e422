"""Outcomes of a grid as a table: mean over seeds, standard deviation, number of seeds. Pure text in and out."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_caption.ablation.outcome import JUDGE, Outcome
from rl_caption.evaluation.table import COLUMNS, LEFT_OUT, Column

PAPER_KEYS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
"""Columns of the L-CLIPScore paper's tables; the judges follow."""
TEXT_KEYS = ("captions/repeated_ngrams", "captions/bad_endings", "length/mean", "vocabulary/size")
ORACLE_KEYS = ("oracle/f1", "oracle/precision", "oracle/recall", "oracle/unparsed")
ALARM_HEADING = "first alarm, step"


@dataclass(frozen=True)
class Group:
    """The outcomes of one row: a starting policy, or all seeds of a cell."""

    system: str
    base: str
    alpha: float | None
    outcomes: tuple[Outcome, ...]

    def values(self, key: str) -> list[float]:
        """The metric in every seed that has it."""
        return [outcome.evaluation.metrics[key] for outcome in self.outcomes if key in outcome.evaluation.metrics]

    @property
    def seeds(self) -> int:
        """Number of seeds; 0 for a starting policy, which has none of this grid."""
        return sum(outcome.seed is not None for outcome in self.outcomes)


def grouped(outcomes: Sequence[Outcome]) -> list[Group]:
    """Outcomes by system, in the order in which the systems first occur."""
    systems: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        systems.setdefault(outcome.system, []).append(outcome)
    return [Group(name, found[0].base, found[0].alpha, tuple(found)) for name, found in systems.items()]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and the standard deviation of a sample (n - 1), which is None for one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def columns_of(groups: Sequence[Group], judges: Mapping[str, tuple[float, float]]) -> list[dict[str, Column]]:
    """Two tables' columns, those of the paper and those that show hacking, each metric key -> how it is printed.

    Args:
        groups: a metric is shown where one of them has it.
        judges: name -> bounds.
    """
    found = {key for group in groups for outcome in group.outcomes for key in outcome.evaluation.metrics}
    paper = {key: Column(f"{key} (x100)") for key in PAPER_KEYS if key in found}
    for name, (low, high) in judges.items():
        if JUDGE + name in found:
            paper[JUDGE + name] = Column(f"{name} [{low:g}, {high:g}]", 1.0, 4)
    hacking = {key: COLUMNS[key] for key in (*TEXT_KEYS, *ORACLE_KEYS) if key in found}
    return [paper, hacking]


def markdown_tables(groups: Sequence[Group], judges: Mapping[str, tuple[float, float]]) -> str:
    """Two Markdown tables, a row for each group: the paper's columns, then the signs of hacking.

    Cells are means over seeds, with ± the standard deviation where there are at least two.
    """
    paper, hacking = columns_of(groups, judges)
    with_alarm = any(outcome.watched for group in groups for outcome in group.outcomes)
    tables = []
    for columns, alarm in ((paper, False), (hacking, with_alarm)):
        if not columns and not alarm:
            continue
        head = ["system", "seeds", *(column.heading for column in columns.values())] + [ALARM_HEADING] * alarm
        lines = [head, ["---", *["---:"] * (len(head) - 1)]]
        for group in groups:
            cells = [group.system, str(group.seeds) if group.seeds else LEFT_OUT]
            cells += [_cell(group.values(key), column) for key, column in columns.items()]
            lines.append(cells + [alarm_text(group)] * alarm)
        tables.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(tables)


def alarm_text(group: Group) -> str:
    """``none``, or the earliest step with an alarm and how many watched seeds had one, as in ``60 (2 of 3)``."""
    watched = [outcome for outcome in group.outcomes if outcome.watched]
    steps = [outcome.alarm_step for outcome in watched if outcome.alarm_step is not None]
    if not watched:
        return LEFT_OUT
    return f"{min(steps)} ({len(steps)} of {len(watched)})" if steps else "none"


def notes(groups: Sequence[Group]) -> list[str]:
    """What has to be known to read the tables: what was left out and why, and the signatures of the metrics."""
    wanted = {*PAPER_KEYS, *TEXT_KEYS, *ORACLE_KEYS}
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    reasons = {
        f"{key} is left out: {reason}": None
        for outcome in outcomes
        for key, reason in outcome.evaluation.left_out.items()
        if key in wanted
    }
    signatures = list(dict.fromkeys(outcome.evaluation.signature for outcome in outcomes))
    kind = "signature" if len(signatures) == 1 else "the signatures differ, so the rows do not compare"
    return [*reasons, f"{kind}: {'; '.join(signatures)}"]


def summary_csv(groups: Sequence[Group], judges: Mapping[str, tuple[float, float]]) -> str:
    """CSV, a row for each group: every column's mean and ``KEY.std`` (empty for fewer than two seeds), as computed."""
    keys = [key for columns in columns_of(groups, judges) for key in columns]
    head = ["system", "base", "alpha", "seeds", *(name for key in keys for name in (key, f"{key}.std"))]
    lines: list[list[object]] = [[*head, "alarms", "first_alarm"]]
    for group in groups:
        line: list[object] = [group.system, group.base, _or_empty(group.alpha), group.seeds]
        for key in keys:
            values = group.values(key)
            line += [_or_empty(value) for value in mean_and_deviation(values)] if values else ["", ""]
        steps = [outcome.alarm_step for outcome in group.outcomes if outcome.alarm_step is not None]
        watched = any(outcome.watched for outcome in group.outcomes)
        lines.append([*line, len(steps) if watched else "", min(steps, default="")])
    return _csv(lines)


def runs_csv(groups: Sequence[Group]) -> str:
    """CSV, a row for each run: every metric as computed (not times 100)."""
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    keys = list(dict.fromkeys(key for outcome in outcomes for key in outcome.evaluation.metrics))
    lines: list[list[object]] = [["system", "base", "alpha", "seed", *keys, "first_alarm"]]
    for outcome in outcomes:
        values = [_or_empty(outcome.evaluation.metrics.get(key)) for key in keys]
        place = [outcome.system, outcome.base, _or_empty(outcome.alpha), _or_empty(outcome.seed)]
        lines.append([*place, *values, _or_empty(outcome.alarm_step)])
    return _csv(lines)


def _cell(values: Sequence[float], column: Column) -> str:
    if not values:
        return LEFT_OUT
    mean, deviation = mean_and_deviation(values)
    text = f"{mean * column.factor:.{column.decimals}f}"
    return text if deviation is None else f"{text} ± {deviation * column.factor:.{column.decimals}f}"


def _or_empty(value: object) -> object:
    return "" if value is None else value


def _csv(lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
