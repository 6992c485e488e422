"""Evaluations as a table for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_caption.evaluation.judge import JUDGE, Evaluation, EvaluationError

LEFT_OUT = "–"


@dataclass(frozen=True)
class Column:
    """How a metric is printed: heading, factor, decimals."""

    heading: str
    factor: float = 100.0
    decimals: int = 2


CAPTION_COLUMNS: dict[str, Column] = {
    "BLEU-1": Column("BLEU-1"),
    "BLEU-2": Column("BLEU-2"),
    "BLEU-3": Column("BLEU-3"),
    "BLEU-4": Column("BLEU-4"),
    "METEOR": Column("METEOR"),
    "ROUGE-L": Column("ROUGE-L"),
    "CIDEr": Column("CIDEr"),
    "SPICE": Column("SPICE"),
}
TEXT_COLUMNS: dict[str, Column] = {
    "length/mean": Column("length, tokens", 1.0, 2),
    "vocabulary/size": Column("vocabulary, words", 1.0, 0),
    "captions/novel": Column("novel, %", decimals=1),
    "captions/bad_endings": Column("bad endings, %", decimals=1),
    "captions/repeated_ngrams": Column("repeated n-grams, %", decimals=1),
}
ORACLE_COLUMNS: dict[str, Column] = {
    "oracle/precision": Column("oracle precision, %", decimals=1),
    "oracle/recall": Column("oracle recall, %", decimals=1),
    "oracle/f1": Column("oracle F1, %", decimals=1),
    "oracle/unparsed": Column("oracle unparsed, %", decimals=1),
}
COLUMNS: dict[str, Column] = {
    **CAPTION_COLUMNS,
    **TEXT_COLUMNS,
    "captions/duplicates": Column("duplicates, %", decimals=1),
    "captions/empty": Column("empty, %", decimals=1),
    **ORACLE_COLUMNS,
}
"""Every metric key but those of judges; the default tables show all but duplicates and empty captions."""


def format_table(
    rows: Mapping[str, Evaluation], columns: Sequence[str] | None = None, *, markdown: bool = False
) -> str:
    """Return evaluations as text, one line per system.

    Metrics are multiplied by 100, as papers print them, and the first line says so; the other headings name their
    unit, or the range of a judge, whose values are as computed. A value that could not be computed is "–", with its
    reason below. Intervals stand below their values. The signatures are printed below too.

    Args:
        rows: name of a system -> its evaluation.
        columns: metric keys, in order, for one table. By default four tables (caption metrics, signs of bad
            captions, oracle, judges), with the columns that at least one system has or left out.
        markdown: write Markdown tables.

    Raises:
        EvaluationError: no rows, or a column that is not a metric key.
    """
    if not rows:
        raise EvaluationError("there are no evaluations to print")
    judges = _judge_columns(rows)
    every = COLUMNS | judges
    if columns is not None:
        unknown = [key for key in columns if key not in every]
        if unknown:
            raise EvaluationError(f"unknown columns {unknown}: known are {list(every)}")
        groups = [list(columns)]
    else:
        known = {key for row in rows.values() for key in (*row.metrics, *row.left_out)}
        wanted = (CAPTION_COLUMNS, TEXT_COLUMNS, ORACLE_COLUMNS, judges)
        groups = [[key for key in group if key in known] for group in wanted]
    groups = [group for group in groups if group]
    blocks = [_block(rows, {key: every[key] for key in group}, markdown) for group in groups]
    notes = [*_reasons(rows, [key for group in groups for key in group]), *_intervals(rows), *_signatures(rows)]
    shown = " ".join(key for key in CAPTION_COLUMNS if any(key in group for group in groups))
    title = [f"x100: {shown} (CIDEr of 1.0 is printed as 100.00)"] if shown else []
    return "\n\n".join(["\n".join(part) for part in (title, *blocks) if part] + _paragraphs(notes, markdown))


def _judge_columns(rows: Mapping[str, Evaluation]) -> dict[str, Column]:
    """A column for each judge, with its range in the heading, as in ``L-CLIPS, 0 to 2.5``."""
    keys = dict.fromkeys(key for row in rows.values() for key in row.metrics if key.startswith(JUDGE))
    found = {}
    for key in keys:
        ranges = {_range(row.bounds[key]) for row in rows.values() if key in row.bounds}
        heading = key.removeprefix(JUDGE)
        if ranges:
            heading += f", {ranges.pop() if len(ranges) == 1 else 'ranges differ'}"
        found[key] = Column(heading, 1.0, 4)
    return found


def _range(bounds: tuple[float, float]) -> str:
    low, high = bounds
    if math.isinf(low) and math.isinf(high):
        return "no bounds"
    if math.isinf(high):
        return f"from {low:.3g}"
    return f"up to {high:.3g}" if math.isinf(low) else f"{low:.3g} to {high:.3g}"


def _block(rows: Mapping[str, Evaluation], columns: Mapping[str, Column], markdown: bool) -> list[str]:
    cells = [["system", "n", *(column.heading for column in columns.values())]]
    for name, row in rows.items():
        cells.append([name, str(row.n), *(_cell(row, key, column) for key, column in columns.items())])
        if row.intervals.keys() & columns.keys():
            cells.append(["", "", *(_interval(row, key, column) for key, column in columns.items())])
    if markdown:
        rule = ["---", *["---:"] * (len(columns) + 1)]
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in cells]
        return [f"| {' | '.join(line)} |" for line in (escaped[0], rule, *escaped[1:])]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = []
    for name, *values in cells:
        padded = [value.rjust(width) for value, width in zip(values, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _cell(row: Evaluation, key: str, column: Column) -> str:
    if key not in row.metrics:
        return LEFT_OUT
    return f"{row.metrics[key] * column.factor:.{column.decimals}f}"


def _interval(row: Evaluation, key: str, column: Column) -> str:
    if key not in row.intervals:
        return ""
    low, high = (f"{value * column.factor:.{column.decimals}f}" for value in row.intervals[key])
    return f"{low} to {high}"


def _intervals(rows: Mapping[str, Evaluation]) -> list[str]:
    """One note for each way in which the intervals were made."""
    found = dict.fromkeys(row.interval for row in rows.values() if row.intervals)
    return [f"intervals: {how}" for how in found]


def _reasons(rows: Mapping[str, Evaluation], keys: Sequence[str]) -> list[str]:
    """One note for each reason, naming the metrics, and the systems where it does not hold for all of them."""
    found: dict[str, dict[str, list[str]]] = {}
    for key in keys:
        for name, row in rows.items():
            if key not in row.metrics:
                found.setdefault(row.left_out.get(key, "not asked for"), {}).setdefault(key, []).append(name)
    notes = []
    for reason, missing in found.items():
        named = [
            (COLUMNS[key].heading.split(",")[0] if key in COLUMNS else key.removeprefix(JUDGE))
            + (f" ({', '.join(names)})" if len(names) < len(rows) else "")
            for key, names in missing.items()
        ]
        notes.append(f"{LEFT_OUT} {', '.join(named)}: {reason}")
    return notes


def _signatures(rows: Mapping[str, Evaluation]) -> list[str]:
    signatures = {name: row.signature for name, row in rows.items()}
    if len(set(signatures.values())) == 1:
        return [f"signature: {next(iter(signatures.values()))}"]
    return ["signatures differ:", *(f"  {name}: {signature}" for name, signature in signatures.items())]


def _paragraphs(notes: Sequence[str], markdown: bool) -> list[str]:
    if not markdown:
        return ["\n".join(notes)]
    return ["\n".join(f"- {note.strip()}" for note in notes)]
