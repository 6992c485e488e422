"""Skeleton of programs that compute new columns of a data set's rows, part by part.

A part is a file of JSON lines with the new columns of each row. A stopped run, started
again, makes only the missing parts. The rows with their new columns are written when
all parts exist.
"""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from rewards.base import naming
from rewards.files import atomic_write, remove_leftovers
from rl_caption.data.base import DataError, Row, load_image
from rl_caption.data.files import write_json, write_json_lines, write_text
from rl_caption.data.fingerprint import TIMES, fingerprint
from rl_caption.data.formats import build_data
from rl_caption.data.plain_files import json_lines, progress, read_json
from rl_caption.evaluation.metrics import check_one_row_each
from rl_caption.lab.config import PartsConfig
from rl_caption.runtime.errors import ConfigError

COPIED = (
    "image_id",
    "references",
    "split",
    "prompt",
    "long_reference",
    "positive_captions",
    "negatives",
    "questions",
)
"""Columns that are written where a row has them, beside ``image`` and
``positive_images``.
"""
SETTINGS = "parts.json"
"""File of the settings that made the parts in a folder."""
Columns = Mapping[str, Sequence[Any]]
"""Name of a new column -> its values for some rows."""
Rows = list[dict[str, Any]]
"""Rows with their new columns and their ``split``."""


class Report(NamedTuple):
    """Output of a program: a table in Markdown, and the rows with their new columns."""

    table: str
    rows: Rows


def add_columns(
    config: PartsConfig,
    name: str,
    made_by: Mapping[str, Any],
    columns: Callable[[str, Sequence[Row]], Columns],
    report: Callable[[Rows], Report],
    ids_differ: bool = True,
) -> str:
    """Make the missing parts, and write ``NAME.jsonl`` and ``report.md`` when all parts
    exist; return the table, or for a worker a sentence that counts its parts.

    ``NAME.jsonl`` is a data set of ``data.format: jsonl``: rows with their new columns,
    and the rows of other splits unchanged. Images that are not files are written to
    ``OUT/images/SPLIT``.

    Args:
        config: the program's configuration.
        name: name of the file.
        made_by: settings that the new columns depend on; noted in ``report.md``.
        columns: makes the new columns of some rows of a split.
        report: makes the output from all rows with their new columns.
        ids_differ: whether image ids must be unique in a split. They must be, in any
            case, where images are in memory.

    Raises:
        ConfigError: the images are videos, or ``out`` has parts of other settings or
            other data.
        DataError: the data cannot be read, or have no such split; a part is damaged.
        EvaluationError: an image id that must be unique is in several rows of a split.
    """
    data = build_data(config.data)
    for split, split_rows in data.items():
        if ids_differ or not all(
            isinstance(row["image"], str | Path) for row in split_rows
        ):
            check_one_row_each(split_rows, f"split {split!r}")
    names = dict.fromkeys(config.splits or data)
    splits = {split: list(data[split]) for split in names}
    out, size = Path(config.out), config.part_rows
    parts = []
    for split, split_rows in splits.items():
        if any(isinstance(row.get("image"), list | tuple) for row in split_rows):
            raise ConfigError(
                f"images of {data.source} are videos: expected one image each"
            )
        parts += [
            (split, split_rows[at : at + size])
            for at in range(0, len(split_rows), size)
        ]
    files = [out / "parts" / f"{number:06d}.jsonl" for number in range(len(parts))]
    _check_settings(out, {"part_rows": size, **fingerprint(splits), **made_by})
    first, step = map(int, (config.worker or "0/1").split("/"))
    own_parts = range(first, len(files), step)
    missing = [number for number in own_parts if not files[number].exists()]
    for number in progress(missing, name):
        split, split_rows = parts[number]
        new = columns(split, split_rows)
        places = range(len(split_rows))
        lines = [{key: new[key][place] for key in new} for place in places]
        write_json_lines(files[number], lines)
    if config.worker is not None:
        there = len(own_parts) - len(missing)
        return f"{len(missing)} parts made, {there} were there; {len(files)} in all"
    new_rows = []
    for file, (split, split_rows) in zip(files, parts, strict=True):
        with naming(f"{file} lacks rows: delete it and run again", error=DataError):
            for row, (*_, line) in zip(split_rows, json_lines(file), strict=True):
                new_rows.append({**row, **line, "split": split})
    output = report(new_rows)
    rows = list(output.rows)
    for split in data.keys() - splits.keys():
        rows += [{**row, "split": split} for row in data[split]]
    written = [_line(row, out) for row in rows]
    write_json_lines(out / f"{name}.jsonl", written)
    count = f"{name}.jsonl: {len(written):,} rows"
    made_of = [f"{key}: {value}" for key, value in made_by.items() if value]
    notes = [f"- {note}" for note in (*made_of, count)]
    blocks = [f"# {name.capitalize()}", "", output.table, "", *notes, ""]
    write_text(out / "report.md", "\n".join(blocks))
    return f"{output.table}\n\nwrote {out}/{count}, and report.md"


def _line(row: dict[str, Any], out: Path) -> dict[str, Any]:
    """A row for ``data.format: jsonl``; writes its image to a file if it is not one."""
    image = row["image"]
    if not isinstance(image, str | Path):
        folder = out / "images" / file_name(row["split"])
        image = folder / f"{file_name(row['image_id'])}.png"
        write_image(image, row["image"])
    line = {key: row[key] for key in COPIED if key in row}
    files = row.get("positive_images", [])
    if files and all(isinstance(file, str | Path) for file in files):
        line["positive_images"] = list(map(os.path.abspath, files))
    return line | {"image": os.path.abspath(image)}


def write_image(file: Path, image: Any) -> None:
    """Write an image as PNG unless the file exists."""
    if not file.exists():
        opened = load_image(image)
        with atomic_write(file) as written:
            opened.save(written, "PNG")


def file_name(text: str) -> str:
    """Name of a file or folder for an id or a split, with special characters and dots
    percent-encoded (``%2F``).

    A long name ends in a hash: file systems allow 255 bytes.
    """
    quoted = quote(text, safe="").replace(".", "%2E")
    if len(quoted) > 200:
        return f"{quoted[:160]}-{hashlib.blake2b(quoted.encode(), digest_size=16).hexdigest()}"
    return quoted


def _check_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Record the settings in ``out``. Raises ``ConfigError`` where it has files of
    other settings.

    Times of files may differ.
    """
    record = out / SETTINGS
    kept = {name: settings[name] for name in settings if not name.endswith(TIMES)}
    if record.exists() and any(
        path.is_file() and path != record for path in out.rglob("*")
    ):
        stored = read_json(record, ConfigError)
        changed = []
        for name in kept:
            if stored.get(name) != kept[name]:
                told = f"{name} was {stored.get(name)!r}, is now {kept[name]!r}"
                changed.append(told)
        if changed:
            raise ConfigError(
                f"{out} has parts that were written with other settings or from other data: "
                f"{'; '.join(changed)}; name another out"
            )
    write_json(record, kept)
    remove_leftovers(out / "parts")
