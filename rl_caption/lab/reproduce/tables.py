"""The published tables, ``PAPER.yaml``, and the data that they are measured on, ``data.yaml``.

A paper's file has its ``tables``: the columns with their measurements, and the rows
with their published values and the sources of their scores. ``metrics`` name the source
of a row in any table, ``default`` the source of all other rows; a table's own
``metrics`` and ``default`` come first. A source is one of

- ``name``: a metric of ``judge``;
- ``reward`` (with ``kwargs``) and ``model``: a reward, and a name of the paper's ``models``, whose
  weights the user names; a model ``row`` has the row's name;
- ``captions``: captions that the user evaluates, and ``how`` to make them;
- ``why``: the reason why the row cannot be made.

A column is measured by one of ``set`` (with its ``options`` and a ``figure``: agreement
with people or accuracy on hard negatives), ``retrieval``, ``zero_shot``,
``specificity``, ``captions`` (a metric of captions), ``size`` (the cost of a model), or
``mean`` (of other columns).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rl_caption.runtime.errors import ConfigError

FOLDER = Path(__file__).parent
PAPERS = ("l_clipscore", "pac_s", "specs", "icc", "semantic_guidance")
ROW = "row"
"""Name of a model that stands for the name of its row."""


@dataclass
class Cell:
    """One published value of a table, and the measured value, or why there is none."""

    row: str
    column: str
    published: Decimal
    """Published value, with the printed digits."""
    how: Mapping[str, Any]
    """How it is measured: the entries of its row and column."""
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


class Table(NamedTuple):
    """A table of a paper."""

    paper: str
    key: str
    """Its number, as the paper writes it."""
    title: str
    cells: Sequence[Cell]
    """The cells, row by row, without empty ones."""
    models: Mapping[str, str]
    """Name of a model -> its weights, their source and their size."""
    notes: Sequence[str]

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(cell.row for cell in self.cells))

    @property
    def data(self) -> list[str]:
        """The data sets that it is measured on."""
        return list(dict.fromkeys(filter(None, (c.how["data"] for c in self.cells))))


class Paper(NamedTuple):
    """A paper's tables by their numbers."""

    name: str
    title: str
    tables: Mapping[str, Table]


def load_paper(name: str) -> Paper:
    """Read the tables of one of ``PAPERS``. Raises ``ConfigError`` for another name."""
    if name not in PAPERS:
        raise ConfigError(f"paper is {name!r}: expected one of {', '.join(PAPERS)}")
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    as_printed = yaml.load(text, yaml.BaseLoader)["tables"]  # makes texts only
    tables = {}
    for key, table in content["tables"].items():
        tables[key] = _table(
            name,
            key,
            content,
            table,
            as_printed[key]["rows"],
        )
    cited = yaml.safe_load((FOLDER.parent / "papers.yaml").read_text(encoding="utf-8"))
    title = "{authors}, {title}, {venue} {year}"
    title = title.format_map({"venue": ""} | cited[name])
    return Paper(name, " ".join(title.split()), tables)


def _table(
    paper: str, key: str, content: Any, table: Any, printed: Mapping[str, Sequence[str]]
) -> Table:
    # A table's own sources come before the paper's.
    sources, default = table.get("metrics", {}), table.get("default")
    models = dict(content["models"])
    cells = []
    for row, texts in printed.items():
        source = sources.get(row) or default or content["metrics"].get(row)
        source = source or content.get("default", {})
        if source.get("model") == ROW:
            models[row] = source["how"]
            source = source | {"model": row}
        columns = table["columns"].items()
        for text, (name, column) in zip(texts, columns, strict=True):
            how = {"data": column.get("set") or column.get("zero_shot")}
            if text != "null":
                cells.append(
                    Cell(
                        row,
                        name,
                        Decimal(text),
                        how | source | column,
                    )
                )
    return Table(
        paper,
        key,
        table["title"],
        cells,
        models,
        table.get("notes", ()),
    )


def find_table(paper: str, key: str, names: Sequence[str] | None = None) -> Table:
    """A table by its paper and number, with all or some of its rows. Raises
    ``ConfigError``, which lists the known tables or rows.
    """
    tables = load_paper(paper).tables
    if key.upper() not in tables:
        raise ConfigError(f"table is {key!r}: {paper} has {', '.join(tables)}")
    table = tables[key.upper()]
    unknown = set(names or ()) - {*table.rows}
    if unknown:
        listed = "; ".join(table.rows)
        raise ConfigError(f"rows has {unknown}: {paper} {table.key} has {listed}")
    chosen = [cell for cell in table.cells if cell.row in (names or table.rows)]
    return table._replace(cells=chosen)


@cache
def data_sets() -> Mapping[str, Mapping[str, Any]]:
    """Name of a data set -> its entry in ``data.yaml``."""
    content: Any = yaml.safe_load((FOLDER / "data.yaml").read_text(encoding="utf-8"))
    return dict(content)


def describe_data(name: str) -> str:
    """The files of a data set, their source and their size, in words."""
    entry = data_sets()[name]
    files = " or ".join(map(", ".join, entry.get("files", [["its images"]])))
    return f"{name} ({files}), from {entry['from']}; {entry['cost']}"


def find_data(table: Table, folders: Sequence[str]) -> dict[str, Path]:
    """Find the data sets of a table in folders and their subfolders: data set ->
    folder.

    Raises:
        ConfigError: a folder has none of the files that the table needs.
    """
    places: dict[str, Path] = {}
    for text in folders:
        name, named, path = text.partition("=")
        matches = {name: Path(path)} if named else {}
        below = [] if named else [Path(text), *sorted(Path(text).iterdir())]
        for place, data in product(below, table.data):
            for files in data_sets()[data].get("files", ()):
                if all((place / file).exists() for file in files):
                    matches.setdefault(data, place)
        if not matches.keys() & {*table.data}:
            described = "; ".join(map(describe_data, table.data))
            raise ConfigError(
                f"--data {text!r} has none of the data of the table: {described}"
            )
        places = matches | places
    return places
