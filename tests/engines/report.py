"""Input and reports of the scripts in this folder; needs the standard library alone."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("ENGINE_FOLDER", "."))
RESULTS = "results.jsonl"


def cases() -> list[dict[str, Any]]:
    """Rows ``{caption, image, references}``; ``image`` is an absolute path."""
    rows: list[dict[str, Any]] = json.loads((FOLDER / "cases.json").read_text())
    return rows


def scored(
    what: str,
    captions: Sequence[str],
    scores: Sequence[float],
    **columns: Sequence[Any],
) -> None:
    """Report an engine's scores of N captions; ``columns`` are for the reward in
    process.
    """
    _write(
        {
            "what": what,
            "captions": list(captions),
            "scores": [float(score) for score in scores],
            "columns": {name: list(rows) for name, rows in columns.items()},
        }
    )


def compared(what: str, count: int, difference: float, tolerance: float) -> None:
    """Report the largest difference of ``count`` numbers that the script compared by itself."""
    _write(
        {"what": what, "count": count, "difference": difference, "tolerance": tolerance}
    )


def _write(result: dict[str, Any]) -> None:
    with (FOLDER / RESULTS).open("a") as file:
        file.write(json.dumps(result) + "\n")
