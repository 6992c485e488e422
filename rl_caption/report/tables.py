"""Tables of a report: validations of a run, and systems side by side."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rl_caption.evaluation.judge import JUDGE
from rl_caption.evaluation.table import CAPTION_COLUMNS, COLUMNS, LEFT_OUT, ORACLE_COLUMNS, TEXT_COLUMNS, Column
from rl_caption.report.chart import number
from rl_caption.report.folders import EvaluationFolder, RunFolder
from rl_caption.report.glossary import define, definitions
from rl_caption.report.markup import Markup, element, join, table
from rl_caption.report.panels import same, title_of

HIGHER_IS_BETTER = {*CAPTION_COLUMNS, "oracle/precision", "oracle/f1"}


@dataclass(frozen=True)
class Cell:
    """A value of a table, with the standard deviation over seeds or a confidence interval where there is one."""

    value: float
    deviation: float | None = None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class System:
    """A row: its name, what stands below it, and its cells by metric key."""

    name: str
    note: str
    cells: Mapping[str, Cell]


def run_results(run: RunFolder, steps: Mapping[str, int]) -> Markup:
    """Validation metrics as rows; the columns are the shown validations and the change between first and last.

    Args:
        run: with at least one validation, else the result is empty.
        steps: name -> step, as of ``RunFolder.shown_steps``.
    """
    by_step = {line["step"]: line for line in run.validations}
    steps = steps or ({"last": max(by_step)} if by_step else {})
    lines = [by_step[step] for step in steps.values()]
    if not lines:
        return Markup("")
    keys = [key for key in lines[-1] if key.startswith("val/") and key != "val/seconds"]
    terms = run.config.get("reward", {}).get("terms", {})
    keys = [key for key in keys if key.removeprefix("val/reward/") not in terms or not same(run, key, "val/reward")]
    keys = [key for key in keys if not key.startswith("val/judge/") or not same(run, key, "val/cider")]
    head = ["validation", *(f"{name}, step {step}" for name, step in steps.items())]
    if len(lines) > 1:
        head.append("change")
    rows: list[list[str]] = []
    for key in keys:
        found = define(key, definitions())
        about = (
            f"{found.unit}, {found.range}".removeprefix("1, ").replace("the judge's, the", "its own unit and")
            if found
            else ""
        )
        cells: list[str] = [join(title_of(key), element("small", about) if about else "")]
        spacing = _spacing([line[key] for line in lines if key in line])
        cells += [number(line[key], spacing) if key in line else LEFT_OUT for line in lines]
        if len(lines) > 1:
            cells.append(_change(lines[0].get(key), lines[-1].get(key), spacing))
        rows.append(cells)
    what = "The model on" if "task" in run.config else "Greedy captions of"
    return table(head, rows, f"{what} the validation split, as logged; change: from the first to the last")


def every_validation(run: RunFolder) -> Markup:
    """All validations, folded away: steps down, keys across, in full precision."""
    lines = run.validations
    keys = list(dict.fromkeys(key for line in lines for key in line if key != "step"))
    if not lines:
        return Markup("")
    head = ["step", *(key.removeprefix("val/") for key in keys)]
    rows = [[str(line["step"]), *(repr(line[key]) if key in line else LEFT_OUT for key in keys)] for line in lines]
    summary = element("summary", f"All {len(lines)} validations, as logged")
    return element("details", summary, table(head, rows, "as in metrics.jsonl"), class_="block")


def systems_tables(systems: Sequence[System]) -> Markup:
    """Systems down, metrics across: captions and judges, then signs of bad captions, then the oracle's.

    Metrics are printed as papers do (the heading says x100 or %); the best value of a metric where more is better is
    bold.
    """
    keys = list(dict.fromkeys(key for system in systems for key in system.cells))
    judges = {key: Column(key.removeprefix(JUDGE), 1.0, 4) for key in keys if key.startswith(JUDGE)}
    papers = {key: replace(column, heading=f"{column.heading} (x100)") for key, column in CAPTION_COLUMNS.items()}
    others = {key: COLUMNS.get(key, Column(key, 1.0, 4)) for key in keys if key not in papers and key not in judges}
    first = {key: column for key, column in papers.items() if key in keys} | judges
    parts = []
    known = [*TEXT_COLUMNS, *(key for key in others if key not in TEXT_COLUMNS)]
    second = {key: others[key] for key in known if key in others and key not in ORACLE_COLUMNS}
    third = {key: column for key, column in others.items() if key in ORACLE_COLUMNS}
    for columns, caption in (
        (first, "Metrics; the highest value of a column is bold"),
        (second, "Signs of bad captions"),
        (third, "Oracle"),
    ):
        if columns:
            head = ["system", *(column.heading for column in columns.values())]
            best = {key: _best(systems, key) for key in columns}
            rows = [
                [_label(system), *(_cell(system.cells.get(key), column, best[key]) for key, column in columns.items())]
                for system in systems
            ]
            parts.append(table(head, rows, caption))
    return join(*parts)


def one_evaluation(evaluation: EvaluationFolder, name: str) -> System:
    """A row of its own."""
    cells = {key: Cell(value, None, evaluation.intervals.get(key)) for key, value in evaluation.metrics.items()}
    return System(name, f"{evaluation.n:,} captions", cells)


def over_seeds(name: str, evaluations: Sequence[EvaluationFolder]) -> System:
    """A row of means and sample standard deviations (n - 1) over seeds."""
    if len(evaluations) == 1:
        return one_evaluation(evaluations[0], name)
    cells = {}
    for key in dict.fromkeys(key for evaluation in evaluations for key in evaluation.metrics):
        values = [evaluation.metrics[key] for evaluation in evaluations if key in evaluation.metrics]
        cells[key] = Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
    return System(name, f"{len(evaluations)} seeds", cells)


def evaluation_notes(evaluations: Mapping[str, EvaluationFolder]) -> Markup:
    """What was left out and why, and the signatures, or that they differ."""
    reasons = {
        f"{key} is left out: {reason}": None for found in evaluations.values() for key, reason in found.left_out.items()
    }
    signatures = {name: found.signature for name, found in evaluations.items()}
    if len(set(signatures.values())) == 1:
        lines = [join("Signature: ", element("code", next(iter(signatures.values()))))]
    else:
        lines = [Markup("<strong>The signatures differ, so the rows may not compare.</strong>")]
        lines += [join(f"{name}: ", element("code", signature)) for name, signature in signatures.items()]
    intervals = dict.fromkeys(f"Intervals: {found.interval}" for found in evaluations.values() if found.interval)
    return element("ul", *(element("li", line) for line in [*reasons, *intervals, *lines]), class_="note")


def _label(system: System) -> Markup:
    return join(system.name, element("small", system.note) if system.note else "")


def _cell(cell: Cell | None, column: Column, best: float | None) -> Markup:
    if cell is None:
        return join(LEFT_OUT)

    def shown(value: float) -> str:
        return f"{value * column.factor:.{column.decimals}f}".replace("-", "−")

    text = element("b", shown(cell.value)) if best is not None and cell.value == best else join(shown(cell.value))
    if cell.deviation is not None:
        return join(text, element("small", f"± {shown(cell.deviation)}"))
    if cell.interval is not None:
        return join(text, element("small", f"{shown(cell.interval[0])} to {shown(cell.interval[1])}"))
    return text


def _best(systems: Sequence[System], key: str) -> float | None:
    values = [system.cells[key].value for system in systems if key in system.cells]
    if len(values) < 2 or not (key in HIGHER_IS_BETTER or key.startswith(JUDGE)):
        return None
    return max(values)


def _spacing(values: Sequence[float]) -> float:
    """What the last decimal of a row stands for: four digits of its largest value, or 1 for whole numbers."""
    finite = [abs(value) for value in values if math.isfinite(value)]
    if all(value == round(value) for value in finite):
        return 1.0
    return 10.0 ** (math.floor(math.log10(max(finite))) - 3)


def _change(first: float | None, last: float | None, spacing: float) -> Markup:
    if first is None or last is None:
        return join(LEFT_OUT)
    change = last - first
    text = ("+" if change > 0 else "") + number(change, spacing)
    share = f"{change / abs(first):+.1%}".replace("-", "−") if first else ""
    return join(text, element("small", share) if share else "")
