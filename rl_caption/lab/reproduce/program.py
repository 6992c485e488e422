"""The reproduce program: a table of a paper, published value, measured value and
difference side by side.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
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
    Cell,
    Paper,
    Table,
    describe_data,
    find_table,
    load_paper,
)
from rl_caption.runtime.errors import ConfigError, UserError


def main(config: ReproduceConfig) -> int:
    """Make a table, or list the tables."""
    if len(config.which) < 2:
        for name in config.which or PAPERS:
            print("\n".join(list_tables(load_paper(name))))
        return 0
    table = find_table(
        config.which[0],
        config.which[1],
        config.rows,
    )
    print(reproduce(table, config))
    return 0


def reproduce(table: Table, config: ReproduceConfig) -> str:
    """Measure the measurable cells of a table, and return it as Markdown.

    A cell that cannot be measured gets a reason; the other cells are measured.

    Raises:
        ConfigError: no cell can be measured, because data or models were not named; the
            message names them. Raised before anything is measured.
    """
    quiet_libraries()
    folder = None if config.out is None else check_writable(config.out)
    measures = Measures(table, config)
    for cell in table.cells:
        cell.reason = measures.obstacle(cell)
    todo = [cell for cell in table.cells if cell.reason is None]
    if not todo:
        reasons = "\n".join(f"  {line}" for line in _reasons(table.cells))
        raise ConfigError(
            f"no row of {table.paper} {table.key} ({table.title}) can be made:\n{reasons}"
        )
    for cell in progress(todo, "cells"):
        try:
            cell.measured = measures.measure(cell)
        except (UserError, RewardError, ModuleNotFoundError) as error:
            cell.reason = str(error)
    text = as_markdown(table)
    if folder is not None:
        write_text(folder / "reproduce.md", text)
        cells = []
        for cell in table.cells:
            published = float(cell.published)
            told = {"row": cell.row, "column": cell.column, "published": published}
            told |= {"measured": cell.measured, "reason": cell.reason}
            cells.append(told)
        about = {
            "paper": table.paper,
            "table": table.key,
            "notes": list(table.notes),
        }
        write_json(folder / "reproduce.json", about | {"cells": cells})
        print(f"wrote reproduce.md and reproduce.json in {folder}", file=sys.stderr)
    return text


def _reasons(cells: Sequence[Cell]) -> list[str]:
    """Each reason once, with its rows and columns."""
    missing = defaultdict[str, dict[str, list[str]]](dict)
    for cell in cells:
        if cell.reason is not None:
            missing[cell.reason].setdefault(cell.row, []).append(cell.column)
    whole = Counter(cell.row for cell in cells)
    lines = []
    for reason, rows in missing.items():
        names = []
        for name, columns in rows.items():
            suffix = f" ({', '.join(columns)})" if len(columns) < whole[name] else ""
            names.append(name + suffix)
        lines.append(f"- {'; '.join(names)}: {reason}")
    return lines


def as_markdown(table: Table) -> str:
    """A line for each measured cell; then the rows that were not measured, with the
    reasons, and notes.
    """
    lines, equal = [], []
    for cell in table.cells:
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
    for title, items in (("Not measured:", _reasons(table.cells)), ("Notes:", notes)):
        if items:
            blocks.append("\n".join([title, "", *items]))
    return "\n\n".join(blocks) + "\n"


def list_tables(paper: Paper) -> Iterator[str]:
    """Yield for each table the data and weights that it needs, the rows that can be
    made, and why other rows cannot.
    """
    yield f"# {paper.name}: {paper.title}"
    for table in paper.tables.values():
        yield f"\n## rl-caption reproduce {paper.name} {table.key}: {table.title}\n"
        measures = Measures(table, ReproduceConfig())
        for name in table.data:
            yield f"- data: {describe_data(name)}"
            measures.data[name] = Path(name)
        for cell in table.cells:
            cell.reason = measures.obstacle(cell)
        yield from _reasons(table.cells)
        rows = dict.fromkeys(cell.row for cell in table.cells if cell.reason is None)
        if rows:
            yield f"- {'; '.join(rows)}: from the data alone"
