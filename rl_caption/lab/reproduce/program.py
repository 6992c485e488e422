"""The reproduce program: a table of a paper, published value, measured value and difference side by
side.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path

from rewards.base import RewardError
from rl_caption.config.build import quiet_libraries
from rl_caption.data.files import write_json, write_text
from rl_caption.data.plain_files import progress
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import ReproduceConfig
from rl_caption.lab.reproduce.measures import Measures
from rl_caption.lab.reproduce.tables import (
    PAPERS,
    Paper,
    Table,
    describe_data,
    find_table,
    load_paper,
)
from rl_caption.runtime.errors import ConfigError, UserError


@dataclass
class Cell:
    """One published value of a table, and what was measured, or why nothing was."""

    row: str
    column: str
    published: Decimal
    measured: float | None = None
    reason: str | None = None

    @property
    def as_printed(self) -> Decimal:
        """The measured value with as many decimals as the published one."""
        return Decimal(repr(self.measured)).quantize(self.published)

    @property
    def difference(self) -> Decimal | None:
        """Measured less published, both as printed; None where nothing was measured."""
        return None if self.measured is None else self.as_printed - self.published


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
    cells = make_cells(measures)
    todo = [cell for cell in cells if cell.reason is None]
    if not todo:
        reasons = "\n".join(f"  {line}" for line in _reasons(cells))
        raise ConfigError(
            f"no row of {table.paper} {table.key} ({table.title}) can be made:\n{reasons}"
        )
    for cell in progress(todo, "cells", "cell"):
        try:
            cell.measured = measures.measure(cell.row, cell.column)
        except (UserError, RewardError, ModuleNotFoundError) as error:
            cell.reason = str(error)
    text = as_markdown(table, cells)
    if folder is not None:
        write_text(folder / "reproduce.md", text)
        content = []
        for cell in cells:
            told = asdict(cell) | {"published": float(cell.published)}
            gain = cell.difference
            content.append(told | {"difference": None if gain is None else float(gain)})
        values = {"paper": table.paper, "table": table.key, "cells": content}
        write_json(folder / "reproduce.json", values | {"notes": list(table.notes)})
        print(f"wrote reproduce.md and reproduce.json in {folder}", file=sys.stderr)
    return text


def make_cells(measures: Measures) -> list[Cell]:
    """The cells of a table, with the reasons why some cannot be measured."""
    cells = []
    for row in measures.table.rows.values():
        for column, published in row.values.items():
            reason = measures.obstacle(row.name, column)
            cells.append(Cell(row.name, column, published, reason=reason))
    return cells


def _reasons(cells: Sequence[Cell]) -> list[str]:
    """Each reason once, with the rows and columns that it is of."""
    missing = defaultdict[str, dict[str, list[str]]](dict)
    for cell in cells:
        if cell.reason is not None:
            missing[cell.reason].setdefault(cell.row, []).append(cell.column)
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
        if cell.difference is not None:
            difference = f"{'+' if cell.difference > 0 else ''}{cell.difference}"
            values = str(cell.published), str(cell.as_printed), difference
            lines.append([cell.row, cell.column, *values])
            equal.append(cell.difference == 0)
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
        for name in table.data:
            yield f"- data: {describe_data(name)}"
            measures.data[name] = Path(name)
        cells = make_cells(measures)
        yield from _reasons(cells)
        made = dict.fromkeys(cell.row for cell in cells if cell.reason is None)
        if made:
            yield f"- {'; '.join(made)}: from the data alone"
