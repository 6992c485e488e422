"""The reproduce program: a table of a paper, published value, measured value and difference side by
side.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from statistics import fmean

from tqdm.auto import tqdm

from rewards.base import RewardError
from rl_caption.config.build import quiet_libraries
from rl_caption.data.files import write_json, write_text
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.results import LEFT_OUT, markdown
from rl_caption.lab.config import ReproduceConfig
from rl_caption.lab.reproduce.measures import Measures
from rl_caption.lab.reproduce.tables import (
    PAPERS,
    Paper,
    Table,
    data_of_table,
    describe_data,
    find_table,
    load_paper,
)
from rl_caption.runtime.errors import ConfigError, UserError


@dataclass
class Cell:
    """One value of a table: published (None in extra rows), and measured, or why it is not."""

    row: str
    column: str
    published: Decimal | None
    measured: float | None = None
    reason: str | None = None

    @property
    def as_printed(self) -> Decimal | None:
        """The measured value with as many decimals as the published one; with four where nothing is
        published.
        """
        if self.measured is None:
            return None
        decimals = self.published or Decimal("0.0001")
        return Decimal(repr(self.measured)).quantize(decimals)

    @property
    def difference(self) -> Decimal | None:
        """Measured less published, both as printed."""
        if self.as_printed is None or self.published is None:
            return None
        return self.as_printed - self.published


def main(config: ReproduceConfig) -> int:
    """Make a table, or list what there is."""
    if len(config.which) < 2:
        for name in config.which or PAPERS:
            print("\n".join(list_tables(load_paper(name))))
        return 0
    table = find_table(config.which[0], config.which[1], config.rows)
    print(reproduce(table, config))
    return 0


def reproduce(table: Table, config: ReproduceConfig) -> str:
    """Measure what can be measured of a table, and return it as Markdown.

    A cell that cannot be measured says why, and the others are measured.

    Raises:
        ConfigError: nothing of the table can be measured, because of what was not named; the
            message says what. This is found before any work.
    """
    quiet_libraries()
    folder = None if config.out is None else check_writable(config.out)
    measures = Measures(table, config)
    cells = make_cells(table, measures)
    columns, rows = table.columns, {row.name: row for row in table.rows}
    todo = [c for c in cells if c.reason is None and "mean" not in columns[c.column]]
    if not todo:
        reasons = "\n".join(f"  {line}" for line in _reasons(cells))
        raise ConfigError(
            f"no row of {table.paper} {table.key} ({table.title}) can be made:\n{reasons}"
        )
    for cell in tqdm(todo, desc="cells", unit="cell", delay=2, disable=None):
        try:
            cell.measured = measures.measure(rows[cell.row], columns[cell.column])
        except (UserError, RewardError, ModuleNotFoundError) as error:
            cell.reason = str(error)
    _fill_means(table, cells)
    text = as_markdown(table, cells)
    if folder is not None:
        write_text(folder / "reproduce.md", text)
        content = [asdict(cell) | {"difference": cell.difference} for cell in cells]
        for row in content:
            for key in ("published", "difference"):
                row[key] = None if row[key] is None else float(row[key])
        values = {"paper": table.paper, "table": table.key, "cells": content}
        write_json(folder / "reproduce.json", values | {"notes": list(table.notes)})
        print(f"wrote reproduce.md and reproduce.json in {folder}", file=sys.stderr)
    return text


def make_cells(table: Table, measures: Measures) -> list[Cell]:
    """The cells of a table, with the reasons why some cannot be measured."""
    cells = []
    for row in table.rows:
        for (name, column), published in zip(
            table.columns.items(), row.values, strict=True
        ):
            if published is not None or row.extra:
                reason = None if "mean" in column else measures.obstacle(row, column)
                cells.append(Cell(row.name, name, published, reason=reason))
    return cells


def _fill_means(table: Table, cells: Sequence[Cell]) -> None:
    """Columns that are means of others, in the rows in which all of these are measured."""
    for cell in cells:
        names = table.columns[cell.column].get("mean", ())
        others = [
            other
            for other in cells
            if other.row == cell.row
            and other is not cell
            and (names == "all" or other.column in names)
        ]
        values = [other.measured for other in others if other.measured is not None]
        if values and len(values) == len(others):
            cell.measured = fmean(values)
        elif names:
            reasons = [other.reason for other in others if other.reason]
            cell.reason = (reasons or ["not all of its columns are"])[0]


def _reasons(cells: Sequence[Cell]) -> list[str]:
    """Each reason once, with the rows and columns that it is of."""
    missing: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        if cell.reason is not None:
            rows = missing.setdefault(cell.reason, {})
            rows.setdefault(cell.row, []).append(cell.column)
    whole = Counter(cell.row for cell in cells)
    lines = []
    for reason, rows in missing.items():
        names = []
        for name, columns in rows.items():
            shown = f" ({', '.join(columns)})" if len(columns) < whole[name] else ""
            names.append(name + shown)
        lines.append(f"- {'; '.join(names)}: {reason}")
    return lines


def as_markdown(table: Table, cells: Sequence[Cell]) -> str:
    """A line for each cell that was measured; then the rows that were not, with the reasons, and
    notes.
    """
    lines, equal = [], []
    for cell in cells:
        if cell.measured is None:
            continue
        printed = [LEFT_OUT, str(cell.as_printed), LEFT_OUT]
        if cell.difference is not None:
            sign = "+" if cell.difference > 0 else ""
            printed = [str(cell.published), printed[1], f"{sign}{cell.difference}"]
            equal.append(cell.difference == 0)
        lines.append([cell.row, cell.column, *printed])
    blocks = [
        f"## {load_paper(table.paper).title}, Table {table.key}: {table.title}",
        markdown(["row", "column", "published", "measured", "difference"], lines),
    ]
    if equal:
        blocks.append(
            f"{sum(equal)} of {len(equal)} measured values are the published ones."
        )
    notes = [f"- {note}" for note in table.notes]
    for title, items in (("Not measured:", _reasons(cells)), ("Notes:", notes)):
        if items:
            blocks.append("\n".join([title, "", *items]))
    return "\n\n".join(blocks) + "\n"


def list_tables(paper: Paper) -> Iterator[str]:
    """Say for each table which data and weights it needs, which rows can be made, and why the
    others cannot.
    """
    yield f"# {paper.name}: {paper.title}"
    for table in paper.tables.values():
        yield f"\n## rl-caption reproduce {paper.name} {table.key}: {table.title}\n"
        measures = Measures(table, ReproduceConfig())
        for name in data_of_table(table):
            yield f"- data: {describe_data(name)}"
            measures.data[name] = Path(name)
        cells = make_cells(table, measures)
        cells = [cell for cell in cells if "mean" not in table.columns[cell.column]]
        yield from _reasons(cells)
        made = dict.fromkeys(cell.row for cell in cells if cell.reason is None)
        if made:
            yield f"- {'; '.join(made)}: from the data alone"
