"""Skeleton of programs that compute new columns of a data set's rows, part by part.

A part is a file of JSON lines with the new columns of each row. A run that was stopped makes only
the parts that are missing. The rows are written with their new columns when all parts are there.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rewards.files import atomic_write
from rl_caption.data.base import DataError, DataModule, Row, load_image
from rl_caption.data.file_checks import progress
from rl_caption.data.files import write_json_lines, write_text
from rl_caption.data.fingerprint import fingerprint
from rl_caption.data.formats import build_data
from rl_caption.data.parts import missing_parts, own_parts
from rl_caption.data.plain_files import json_lines
from rl_caption.evaluation.metrics import check_one_row_each
from rl_caption.lab.config import PartsConfig
from rl_caption.runtime.errors import ConfigError

TEXTS = ("prompt", "long_reference", "positive_captions", "negatives", "questions")
"""Columns that are copied where a row has them; so is ``positive_images``."""
Rows = Sequence[tuple[str, Row]]
"""Rows, each with the name of its split."""
Columns = Mapping[str, Any]
"""New columns of a row."""


def selected_rows(
    config: PartsConfig, ids_differ: bool = True
) -> tuple[DataModule, list[tuple[str, Row]]]:
    """Read the data of a configuration: all of it, and the rows of the ``splits`` that are worked
    on.

    Raises:
        ConfigError: a split is unknown, ``worker`` is not K/N, or the images are videos.
        DataError: the data cannot be read.
        EvaluationError: an image id is in several rows of a split where files or captions go by it:
            where images are in memory, and with ``ids_differ``.
    """
    data = build_data(config.data)
    unknown = sorted(set(config.splits) - set(data.splits))
    if unknown:
        raise ConfigError(f"splits has {unknown}: expected some of {', '.join(data.splits)}")
    own_parts(config.worker, 1)
    for name in data.splits:
        rows = data.split(name)
        if ids_differ or not all(isinstance(row["image"], str | Path) for row in rows):
            check_one_row_each(rows, f"split {name!r}")
    names = dict.fromkeys(config.splits or data.splits)
    selected = [(name, row) for name in names for row in data.split(name)]
    if any(isinstance(row.get("image"), list | tuple) for _, row in selected):
        place = config.data.path or config.data.format
        raise ConfigError(f"images of {place} are videos: expected one image each")
    return data, selected


def make_parts(
    config: PartsConfig,
    rows: Rows,
    made_by: Mapping[str, Any],
    columns: Callable[[Rows], Sequence[Columns]],
    what: str,
) -> tuple[str, list[dict[str, Any]]]:
    """Write the worker's missing parts of ``rows``.

    Returns a sentence that counts them and, without ``worker``, the new columns of all rows.

    Args:
        config: the program's configuration.
        rows: all rows that are worked on.
        made_by: what the new columns depend on, beside the data.
        columns: makes the new columns of each of some rows.
        what: title of the progress bar.

    Raises:
        ConfigError: ``out`` has parts that were made by others, or of other settings or data.
        DataError: a part is damaged; the message names it.
    """
    out, size = Path(config.out), config.part_rows
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    files = [out / "parts" / f"{number:06d}.jsonl" for number in range(len(batches))]
    by_split = {split: [row for _, row in group] for split, group in groupby(rows, itemgetter(0))}
    settings: dict[str, Any] = {"rows": len(rows), "captions_before": _fingerprint(rows)}
    settings |= {"part_rows": size, "data": fingerprint(by_split)}
    missing, summary = missing_parts(out, files, config.worker, {**settings, **made_by})
    for number in progress(missing, what, "part"):
        write_json_lines(files[number], columns(batches[number]))
    made: list[dict[str, Any]] = []
    if config.worker is None:
        for file, batch in zip(files, batches, strict=True):
            lines = [line for _, _, line in json_lines(file)]
            if len(lines) != len(batch):
                count = f"{len(lines)} of {len(batch)} rows"
                raise DataError(f"{file} has {count}: delete it and run again to recreate it")
            made += lines
    return summary, made


def _fingerprint(rows: Rows) -> str:
    """A hash of the images' ids and texts in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for split, row in rows:
        texts = [row.get(key) for key in ("references", *TEXTS) if key != "questions" or key in row]
        digest.update(json.dumps([split, row["image_id"], *texts]).encode())
    return digest.hexdigest()


def with_columns(rows: Rows, made: Sequence[Columns]) -> list[tuple[str, Row, Columns]]:
    """Each row with its split and its new columns."""
    return [(split, row, new) for (split, row), new in zip(rows, made, strict=True)]


def write_result(
    config: PartsConfig,
    data: DataModule,
    rows: Iterable[tuple[str, Row, Columns]],
    name: str,
    table: str,
    notes: Sequence[str],
    examples: Sequence[str] = (),
) -> str:
    """Write ``NAME.jsonl`` and ``report.md``; return the table and what was written.

    ``rows`` are those that were worked on, each with its split and its new columns; rows of other
    splits follow as they are. ``examples`` are further lines of the report.
    """
    out = Path(config.out)
    written = [_line(split, row, out) | dict(new) for split, row, new in rows]
    for split in data.splits:
        if config.splits and split not in config.splits:
            written += [_line(split, row, out) for row in data.split(split)]
    file, report = out / f"{name}.jsonl", out / "report.md"
    write_json_lines(file, written)
    listed = [f"- {note}" for note in (*notes, f"`{file.name}`: {len(written):,} rows")]
    text = "\n".join([f"# {name.capitalize()}", "", table, "", *listed, *examples])
    write_text(report, text + "\n")
    return f"{table}\n\nwrote {file} ({len(written):,} rows) and {report}"


def _line(split: str, row: Row, out: Path) -> dict[str, Any]:
    """A row as ``data.format: jsonl`` reads it; its image is written to a file if it is none."""
    image: Any = row["image"]
    if not isinstance(image, str | Path):
        image = out / "images" / file_name(split) / f"{file_name(row['image_id'])}.png"
        if not image.exists():
            with atomic_write(image) as file:
                load_image(row["image"]).save(file, "PNG")
    line: dict[str, Any] = {"image_id": row["image_id"], "image": os.path.abspath(image)}
    line |= {"references": row["references"], "split": split}
    line |= {key: row[key] for key in TEXTS if key in row}  # type: ignore[literal-required]
    files: Any = row.get("positive_images", [])
    if files and all(isinstance(file, str | Path) for file in files):
        line["positive_images"] = [os.path.abspath(file) for file in files]
    return line


def file_name(text: str) -> str:
    """A file's or folder's name for an id or a split: other characters as ``%2F``, and also the
    dots of ``..``.

    Of a long id the end is a fingerprint: file systems allow 255 bytes.
    """
    quoted = quote(text, safe="")
    if len(quoted) > 200:
        return f"{quoted[:160]}-{hashlib.blake2b(quoted.encode(), digest_size=16).hexdigest()}"
    return quoted.replace(".", "%2E") if quoted in ("", ".", "..") else quoted
