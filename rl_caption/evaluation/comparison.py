"""Two systems compared: the table, and ``comparison.json``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rl_caption.data.files import write_json
from rl_caption.evaluation.confidence import Difference
from rl_caption.evaluation.errors import EvaluationError
from rl_caption.evaluation.judge import JUDGE
from rl_caption.evaluation.table import COLUMNS, Column

COMPARISON = "comparison.json"


def folder_of(name: str) -> str:
    """Folder of a system's own results, beside ``comparison.json``."""
    return name.replace("/", "-")


def unique_names(paths: Sequence[Path]) -> list[str]:
    """A short name for each folder: its own or, where two are the same, with as many parents as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(found[-depth:]) for found in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def check_same_images(first: Collection[str], second: Collection[str], sources: Sequence[str]) -> None:
    """See to it that two files have captions of the same images, before anything long starts.

    Raises:
        EvaluationError: they do not; with counts and examples.
    """
    for here, there, (name, other) in ((first, second, sources), (second, first, sources[::-1])):
        known = set(there)
        lost = [image_id for image_id in here if image_id not in known]
        if lost:
            raise EvaluationError(
                f"{len(lost)} of {len(here)} images of {name} have no caption in {other}, such as {lost[:3]}: systems "
                "are compared on the same images"
            )


def format_differences(differences: Mapping[str, Difference], names: Sequence[str], resamples: int) -> str:
    """The differences as text, a line for each metric, in the units of the other tables.

    Args:
        differences: of ``confidence.compare``.
        names: of the first system and of the second.
        resamples: of the test.
    """
    first, second = names
    lines = [["metric", first, second, "difference", "95 % interval", "p"]]
    for key, found in differences.items():
        column = column_of(key)

        def shown(value: float, sign: str = "", column: Column = column) -> str:
            return f"{value * column.factor:{sign}.{column.decimals}f}"

        interval = f"{shown(found.low, '+')} to {shown(found.high, '+')}"
        cells = [shown(found.first), shown(found.second), shown(found.value, "+"), interval, f"{found.p:.4f}"]
        lines.append([column.heading, *cells])
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    rows = [
        "  ".join(cell.ljust(width) if not place else cell.rjust(width) for place, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    note = (
        f"difference: {second} minus {first}; interval: paired bootstrap over images; p: two-sided approximate "
        f"randomisation, {resamples} resamples each, smallest possible {1 / (resamples + 1):.4f}; not corrected for "
        "the number of metrics"
    )
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:], "", note])


def column_of(key: str) -> Column:
    """How the metric ``key`` is printed; judges with 4 decimals, others as in tables, x100 named in the heading."""
    if key.startswith(JUDGE):
        return Column(key.removeprefix(JUDGE), 1.0, 4)
    column = COLUMNS.get(key, Column(key, 1.0, 4))
    in_percent = column.factor == 100 and "%" not in column.heading
    return Column(f"{column.heading} (x100)", column.factor, column.decimals) if in_percent else column


def write_comparison(
    differences: Mapping[str, Difference], names: Sequence[str], resamples: int, seed: int, folder: Path
) -> Path:
    """Write ``comparison.json``: names of the systems, resamples, seed, and by metric key what was found, not x100.

    Returns:
        Its path.

    Raises:
        EvaluationError: the folder cannot be written to.
    """
    path = folder / COMPARISON
    content = {
        "systems": list(names),
        "resamples": resamples,
        "seed": seed,
        "interval": "95 % paired bootstrap over images",
        "p": "two-sided approximate randomisation",
        "differences": {
            key: {
                "first": found.first,
                "second": found.second,
                "difference": found.value,
                "interval": [found.low, found.high],
                "p": found.p,
            }
            for key, found in differences.items()
        },
    }
    try:
        write_json(path, content)
    except OSError as error:
        raise EvaluationError(f"results cannot be written to {str(folder)!r}: {error}") from error
    return path
