"""The reproduce program: a table of a paper, published value, measured value and difference side by
side.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from rewards.base import RewardError
from rl_caption.config.build import quiet_libraries
from rl_caption.data.files import write_json, write_text
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.results import LEFT_OUT, markdown
from rl_caption.lab.config import ReproduceConfig
from rl_caption.lab.reproduce.measures import Inputs, Measures, describe_data
from rl_caption.lab.reproduce.tables import (
    PAPERS,
    Paper,
    Row,
    Table,
    data_of,
    data_sets,
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
        return Decimal(repr(self.measured)).quantize(self.published or Decimal("0.0001"))

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
    print(reproduce(table, read_inputs(table, config), config.out))
    return 0


def read_inputs(table: Table, config: ReproduceConfig) -> Inputs:
    """Check what the user names against what the table can use.

    Raises:
        ConfigError: a folder with nothing that the table needs, or a model, captions or scores that
            it does not have.
    """
    rows = [row.name for row in table.rows]
    pairs: dict[str, dict[str, str]] = {}
    for option, names in (("model", list(table.models)), ("captions", rows), ("scores", rows)):
        pairs[option] = {}
        for text in getattr(config, option):
            name, _, value = text.partition("=")
            if not value or name not in names:
                expected = f"NAME=VALUE with a name of {', '.join(names) or 'none'}"
                raise ConfigError(f"--{option} is {text!r}: expected {expected}")
            if option != "model" and not Path(value).exists():
                raise ConfigError(f"--{option} {name!r}: {value!r} is not there")
            pairs[option][name] = value
    if config.images is not None and not Path(config.images).is_dir():
        raise ConfigError(f"--images {config.images!r} is not a folder")
    return Inputs(
        find_data(table, config.data),
        pairs["model"],
        {name: Path(file) for name, file in pairs["captions"].items()},
        {name: Path(file) for name, file in pairs["scores"].items()},
        None if config.images is None else Path(config.images),
        config.partial,
    )


def find_data(table: Table, folders: Sequence[str]) -> dict[str, Path]:
    """Find the data sets of a table in folders and the folders below them: data set -> its folder.

    Raises:
        ConfigError: a folder is not there, or has none of the files that the table needs.
    """
    needed = list(dict.fromkeys(filter(None, map(data_of, table.columns.values()))))
    places: dict[str, Path] = {}
    for text in folders:
        name, named, path = text.partition("=")
        folder = Path(path if named else text)
        if not folder.is_dir():
            raise ConfigError(f"--data {text!r} is not a folder")
        if named and name not in needed:
            raise ConfigError(f"--data is {text!r}: the table is measured on {', '.join(needed)}")
        found = {name: folder} if named else _data_below(folder, needed)
        if not found.keys() - places.keys():
            described = "; ".join(describe_data(data) for data in needed if data not in places)
            raise ConfigError(
                f"--data {text!r} has none of the data that are still needed: {described or 'none'}"
            )
        places = found | places
    return places


def _data_below(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """Data sets whose files are in a folder, or in a folder in it."""
    candidates = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    found: dict[str, Path] = {}
    for name in names:
        for place in candidates:
            for files in data_sets()[name].get("files", ()):
                if all((place / file).exists() for file in files):
                    found.setdefault(name, place)
    return found


def reproduce(table: Table, inputs: Inputs, out: str | None = None) -> str:
    """Measure what can be measured of a table, and return it as Markdown; ``out`` is a folder for
    it and its JSON.

    A cell that cannot be measured says why, and the others are measured.

    Raises:
        ConfigError: nothing of the table can be measured, because of what was not named; the
            message says what. This is found before any work.
    """
    quiet_libraries()
    folder = None if out is None else check_writable(out)
    cells: list[Cell] = []
    measurable: list[tuple[Cell, Row]] = []
    for row in table.rows:
        for name, published in zip(table.columns, row.values, strict=True):
            if published is None and not row.extra:
                continue
            cells.append(Cell(row.name, name, published))
            if "mean" not in table.columns[name]:
                cells[-1].reason = inputs.obstacle(table, row, table.columns[name])
                measurable += [] if cells[-1].reason else [(cells[-1], row)]
    if not measurable:
        reasons = "\n".join(f"  {line}" for line in _reasons(cells))
        raise ConfigError(
            f"no row of {table.paper} {table.key} ({table.title}) can be made:\n{reasons}"
        )
    measures = Measures(inputs)
    for cell, row in tqdm(measurable, desc="cells", unit="cell", delay=2, disable=None):
        try:
            cell.measured = measures.measure(row, table.columns[cell.column])
        except (UserError, RewardError, ModuleNotFoundError) as error:
            cell.reason = str(error)
    _fill_means(table, cells)
    text = as_markdown(table, cells)
    if folder is not None:
        write_text(folder / "reproduce.md", text)
        write_json(folder / "reproduce.json", as_json(table, cells))
        print(f"wrote {folder / 'reproduce.md'}, {folder / 'reproduce.json'}", file=sys.stderr)
    return text


def _fill_means(table: Table, cells: Sequence[Cell]) -> None:
    """Columns that are means of others, in the rows in which all of these are measured."""
    for cell in cells:
        names = table.columns[cell.column].get("mean")
        if names is None:
            continue
        others = [
            other
            for other in cells
            if other.row == cell.row
            and (other.column in names or (names == "all" and other != cell))
        ]
        values = [other.measured for other in others if other.measured is not None]
        if others and len(values) == len(others):
            cell.measured = sum(values) / len(values)
        else:
            reasons = [other.reason for other in others if other.reason]
            cell.reason = next(iter(reasons), "not all of its columns are")


def _reasons(cells: Sequence[Cell]) -> list[str]:
    """Each reason once, with the rows and columns that it is of."""
    rows: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        if cell.reason is not None:
            rows.setdefault(cell.reason, {}).setdefault(cell.row, []).append(cell.column)
    whole = {cell.row: sum(other.row == cell.row for other in cells) for cell in cells}
    lines = []
    for reason, columns in rows.items():
        names = [
            name if len(missing) == whole[name] else f"{name} ({', '.join(missing)})"
            for name, missing in columns.items()
        ]
        lines.append(f"- {'; '.join(names)}: {reason}")
    return lines


def as_markdown(table: Table, cells: Sequence[Cell]) -> str:
    """A line for each cell that was measured; then the rows that were not, with the reasons, and
    notes.
    """
    lines = [
        [
            cell.row,
            cell.column,
            *map(_format, (cell.published, cell.as_printed)),
            _format(cell.difference, signed=True),
        ]
        for cell in cells
        if cell.measured is not None
    ]
    differences = [abs(cell.difference) for cell in cells if cell.difference is not None]
    equal = sum(difference == 0 for difference in differences)
    blocks = [
        f"## {load_paper(table.paper).title}, Table {table.key}: {table.title}",
        markdown(["row", "column", "published", "measured", "difference"], lines),
    ]
    if differences:
        blocks.append(f"{equal} of {len(differences)} measured values are the published ones.")
    reasons = _reasons(cells)
    if reasons:
        blocks.append("\n".join(["Not measured:", "", *reasons]))
    if table.notes:
        blocks.append("\n".join(["Notes:", "", *(f"- {note}" for note in table.notes)]))
    return "\n\n".join(blocks) + "\n"


def _format(value: Decimal | None, signed: bool = False) -> str:
    if value is None:
        return LEFT_OUT
    return f"{value:+}" if signed and value else f"{value}"


def as_json(table: Table, cells: Sequence[Cell]) -> Mapping[str, Any]:
    """All cells, measured ones unrounded."""
    rows = [
        {
            "row": cell.row,
            "column": cell.column,
            "published": None if cell.published is None else float(cell.published),
            "measured": cell.measured,
            "difference": None if cell.difference is None else float(cell.difference),
            "reason": cell.reason,
        }
        for cell in cells
    ]
    return {"paper": table.paper, "table": table.key, "cells": rows, "notes": list(table.notes)}


def list_tables(paper: Paper) -> Iterator[str]:
    """Say for each table which data and weights it needs, which rows can be made, and why the
    others cannot.
    """
    yield f"# {paper.name}: {paper.title}"
    for table in paper.tables.values():
        yield f"\n## rl-caption reproduce {paper.name} {table.key}: {table.title}\n"
        columns = table.columns.values()
        for name in dict.fromkeys(filter(None, map(data_of, columns))):
            yield f"- data: {describe_data(name)}"
        kinds: dict[str, list[str]] = {}
        for row in table.rows:
            kinds.setdefault(_requirement(table, row), []).append(row.name)
        yield from (f"- {'; '.join(names)}: {text}" for text, names in kinds.items())
        models = {column["model"] for column in columns if {"captions", "model"} <= column.keys()}
        yield from (f"- --model {name}: {table.models[name]}" for name in sorted(models))


def _requirement(table: Table, row: Row) -> str:
    """What a row takes besides the data."""
    if "why" in row.source:
        return f"not made: {row.source['why']}"
    if row.source.get("captions"):
        return f"--captions, {row.source['how']}"
    if row.model is not None:
        released = "; without it, the scores that are released with the data"
        given = released if "released" in row.source else ""
        return f"--model '{row.model}', {table.models[row.model]}{given}"
    return "from the data alone" + (" (not in the paper)" if row.extra else "")
