"""Evaluations as tables and as files: ``predictions.json``, ``scores.json``, ``comparison.json``."""

import hashlib
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NotRequired

from typing_extensions import TypedDict

from rl_caption.data.files import PREDICTIONS, write_json
from rl_caption.evaluation.confidence import Difference, Interval
from rl_caption.evaluation.metrics import (
    JUDGE,
    METRIC_KEYS,
    Evaluation,
    EvaluationError,
)

COMPARISON = "comparison.json"
SETTINGS = "settings.json"
"""File that says what was evaluated, and whose captions they are: ``weights``,
``predictions`` (docs/evaluation.md).
"""
LEFT_OUT = "–"


class Column(NamedTuple):
    """Format of a printed metric: heading, factor, decimals."""

    heading: str
    factor: float = 100.0
    decimals: int = 2


def _shares(headings: Mapping[str, str]) -> dict[str, Column]:
    """Columns of shares, printed as percentages."""
    return {
        key: Column(f"{heading}, %", decimals=1) for key, heading in headings.items()
    }


CAPTION_COLUMNS = {key: Column(key) for keys in METRIC_KEYS.values() for key in keys}
GROUPS = (
    CAPTION_COLUMNS,
    {
        "length/mean": Column("length, tokens", 1.0, 2),
        "vocabulary/size": Column("vocabulary, words", 1.0, 0),
        **_shares(
            {
                "captions/novel": "novel",
                "captions/bad_endings": "bad endings",
                "captions/repeated_ngrams": "repeated n-grams",
            }
        ),
    },
    _shares(
        {
            "oracle/precision": "oracle precision",
            "oracle/recall": "oracle recall",
            "oracle/f1": "oracle F1",
            "oracle/unparsed": "oracle unparsed",
        }
    ),
)
"""Columns of the tables of an evaluation, before the judges' columns."""
COLUMNS = _shares({"captions/duplicates": "duplicates", "captions/empty": "empty"})
COLUMNS |= {key: column for group in GROUPS for key, column in group.items()}
"""Columns of all metric keys but judges'; the tables leave out duplicate and empty
captions.
"""


def factor_of(key: str) -> float:
    """Factor by which a logged key or a judge is multiplied for display: 100 for
    CIDEr-D, as papers print it, else 1.
    """
    return 100.0 if key.rpartition("/")[2] == "cider" else 1.0


def column_of(key: str) -> Column:
    """Format of a metric outside the tables: judges with 4 decimals; a factor of 100 is
    named in the heading.
    """
    name, factor = key.removeprefix(JUDGE), factor_of(key)
    column = COLUMNS.get(key, Column(name, factor, 4 if factor == 1 else 2))
    if column.factor == 100 and "%" not in column.heading:
        return column._replace(heading=f"{column.heading} (x100)")
    return column


def format_table(rows: Mapping[str, Evaluation]) -> str:
    """Return evaluations (system -> evaluation) as Markdown, one table for each group of metrics.

    The groups are caption metrics, signs of bad captions, oracle and judges. Caption
    metrics are multiplied by 100, as papers print them, and the first line says so;
    other headings name their unit. Judges are printed as computed, but for CIDEr-D,
    which is multiplied by 100, too. Intervals stand in brackets behind their values. A
    value that could not be computed is "–", and the reason stands below the tables,
    with the signatures.
    """
    judges = [key for row in rows.values() for key in row.metrics if JUDGE in key]
    judged = {key: column_of(key) for key in judges}
    present = {key for row in rows.values() for key in (*row.metrics, *row.left_out)}
    blocks: list[str] = []
    table_columns: dict[str, Column] = {}
    for columns in (*GROUPS, judged):
        group = {key: columns[key] for key in columns if key in present}
        if group:
            head = ["system", "n", *(column.heading for column in group.values())]
            lines = []
            for name, row in rows.items():
                cells = [_cell(row, key, column) for key, column in group.items()]
                lines.append([name, str(row.n), *cells])
            blocks.append(markdown(head, lines))
            table_columns |= group
    notes = _reasons(rows, table_columns)
    for name, row in rows.items():
        empty = round(row.metrics.get("captions/empty", 0) * row.n)
        if empty:
            notes.append(f"{name}: {empty} of {row.n} captions have no word")
    if any(factor_of(key) != 1 for key in judges):
        notes.append(
            f"{JUDGE}cider and CIDEr may differ in document frequencies and in EOS: see the "
            f"signature"
        )
    for what, key in (("intervals", "interval"), ("decoding", "decoding")):
        told = dict.fromkeys(getattr(row, key) for row in rows.values())
        notes += [f"{what}: {text}" for text in told if text]
    signatures = {name: row.signature for name, row in rows.items()}
    if len(set(signatures.values())) == 1:
        notes.append(f"signature: {next(iter(signatures.values()))}")
    else:
        notes.append("signatures differ:")
        notes += [f"  {name}: {signature}" for name, signature in signatures.items()]
    line = " ".join(key for key in CAPTION_COLUMNS if key in present)
    if line:
        blocks.insert(0, f"x100: {line} (CIDEr of 1.0 is printed as 100.00)")
    return "\n\n".join([*blocks, "\n".join(notes)])


def format_value(value: float, column: Column, sign: str = "") -> str:
    """A metric's value as papers print it; ``sign`` is a sign of a format
    specification, such as ``+``.
    """
    return f"{value * column.factor:{sign}.{column.decimals}f}"


def _cell(row: Evaluation, key: str, column: Column) -> str:
    """A value and its interval."""
    if key not in row.metrics:
        return LEFT_OUT
    value = format_value(row.metrics[key], column)
    ends = [format_value(end, column) for end in row.intervals.get(key, ())]
    return f"{value} [{', '.join(ends)}]" if ends else value


def _reasons(
    rows: Mapping[str, Evaluation], columns: Mapping[str, Column]
) -> list[str]:
    """A note for each reason why metrics lack a value, with the metrics and, if not
    all, the systems.
    """
    reasons: dict[str, list[str]] = {}
    for key, column in columns.items():
        missing: dict[str, list[str]] = {}
        for name, row in rows.items():
            if key not in row.metrics:
                reason = row.left_out.get(key, "not asked for")
                missing.setdefault(reason, []).append(name)
        for reason, names in missing.items():
            systems = f" ({', '.join(names)})" if len(names) < len(rows) else ""
            heading = column.heading.removesuffix(", %") if key in COLUMNS else key
            reasons.setdefault(reason, []).append(heading.removeprefix(JUDGE) + systems)
    return [
        f"{LEFT_OUT} {', '.join(headings)}: {reason}"
        for reason, headings in reasons.items()
    ]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Lay a Markdown table out: the first column to the left, numbers to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])


def format_differences(
    differences: Mapping[str, Difference], names: Sequence[str], resamples: int
) -> str:
    """Return the result of ``confidence.compare`` of two systems as Markdown, a line
    for each metric.
    """
    first, second = names
    head = ["metric", first, second, "difference", "95 % interval", "p"]
    note = (
        f"difference: {second} minus {first}; interval: paired bootstrap over images; p: two-sided "
        f"permutation test; {resamples} resamples each; not corrected for the number of metrics"
    )
    return f"{markdown(head, difference_rows(differences))}\n\n{note}"


def difference_rows(differences: Mapping[str, Difference]) -> list[list[str]]:
    """A line for each metric: heading, both systems, difference, interval, p, as papers
    print them.
    """
    lines = []
    for key, gain in differences.items():
        column = column_of(key)
        values = [
            format_value(value, column) for value in (gain["first"], gain["second"])
        ]
        moved = format_value(gain["difference"], column, "+")
        ends = [format_value(end, column, "+") for end in gain["interval"]]
        p = f"{gain['p']:.4f}"
        lines.append([column.heading, *values, moved, " to ".join(ends), p])
    return lines


def folder_of(name: str) -> str:
    """Name of the folder of a compared system's own results, next to ``comparison.json``."""
    return name.replace("/", "-")


def unique_names(paths: Sequence[Path]) -> list[str]:
    """A short name for each path: its last part or, if two are equal, the fewest last
    parts that differ.
    """
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(folders[-depth:]) for folders in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def check_writable(out_dir: str | Path) -> Path:
    """Create a folder and write a byte into it, so that a long computation does not end
    in an error. ``OSError`` where that fails.
    """
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(b"\n")
    return folder


def check_writable_file(path: str | Path) -> None:
    """Check that a file can be written, as ``check_writable`` does for a folder."""
    if Path(path).is_dir():
        raise EvaluationError(
            f"results cannot be written to {str(path)!r}: it is a folder"
        )
    check_writable(Path(path).parent)


def write_evaluation(
    evaluation: Evaluation, captions: Mapping[str, str], out_dir: str | Path
) -> tuple[Path, Path]:
    """Write ``predictions.json`` and ``scores.json``, each complete or not at all;
    return their paths.

    ``predictions.json`` is in COCO result format, ``[{"image_id", "caption"}]``;
    captions that were read by ``image_name`` are written with it instead. Ids are
    integers where all of them are decimal numbers of up to 18 digits without leading
    zeros, as in COCO, else strings. ``scores.json`` has ``metrics``, ``signature``,
    ``n``, ``left_out`` and, where they are known, ``intervals`` (key -> [low, high]),
    ``interval`` (how these were made) and ``decoding``.
    """
    path = write_predictions(captions, out_dir)
    content = {}
    for key in ScoresFile.__annotations__:
        if (value := getattr(evaluation, key)) or key == "left_out":
            content[key] = value
    scores = path.with_name("scores.json")
    write_json(scores, content)
    return path, scores


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, as ``sha256sum`` prints it."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def write_predictions(captions: Mapping[str, str], out_dir: str | Path) -> Path:
    """Write ``predictions.json`` as ``write_evaluation`` does; scores and settings of
    earlier captions are removed.
    """
    folder, ids = check_writable(out_dir), result_ids(captions)
    for stale in ("scores.json", SETTINGS):
        (folder / stale).unlink(missing_ok=True)
    key = getattr(captions, "by", "image_id")
    rows = [
        {key: ids[image_id], "caption": caption}
        for image_id, caption in captions.items()
    ]
    write_json(folder / PREDICTIONS, rows)
    return folder / PREDICTIONS


def result_ids(image_ids: Iterable[str]) -> dict[str, int | str]:
    """Image id -> its id in result files (see ``write_evaluation``)."""
    ids = list(image_ids)
    plain = all(re.fullmatch("0|[1-9][0-9]{0,17}", image_id) for image_id in ids)
    return {image_id: int(image_id) if plain else image_id for image_id in ids}


class ScoresFile(TypedDict):
    """``scores.json``; intervals are (low, high), and ``interval`` says how they were made."""

    metrics: dict[str, float]
    n: int
    signature: str
    left_out: NotRequired[dict[str, str]]
    intervals: NotRequired[dict[str, Interval]]
    interval: NotRequired[str]
    decoding: NotRequired[str]
