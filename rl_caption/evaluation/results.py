"""The files of an evaluation: ``predictions.json`` and ``scores.json``."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rl_caption.data.files import write_json
from rl_caption.evaluation.judge import Evaluation, EvaluationError


def check_writable(out_dir: str | Path) -> Path:
    """Create ``out_dir`` and write a byte into it, so that a long computation does not end in an error.

    Returns:
        The folder.

    Raises:
        EvaluationError: it cannot be created, is not a folder, or cannot be written to.
    """
    folder = Path(out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise EvaluationError(f"results cannot be written to {str(folder)!r}: {reason}; give another folder") from error
    return folder


def check_writable_file(path: str | Path) -> None:
    """See to it that a file can be written, as ``check_writable`` does for a folder.

    Raises:
        EvaluationError: it is a folder, or its folder cannot be written to.
    """
    if Path(path).is_dir():
        raise EvaluationError(f"results cannot be written to {str(path)!r}: it is a folder; name a file")
    check_writable(Path(path).parent)


def write_evaluation(evaluation: Evaluation, captions: Mapping[str, str], out_dir: str | Path) -> tuple[Path, Path]:
    """Write ``predictions.json`` and ``scores.json``, each at once or not at all.

    ``predictions.json`` is in COCO result format, ``[{"image_id", "caption"}]``; the ids are integers when all of
    them are decimal numbers of up to 18 digits without leading zeros, as in COCO, and strings otherwise.
    ``scores.json`` is ``{"metrics", "signature", "n", "left_out"}`` and, where there are intervals, ``"intervals"``
    (key -> [low, high]) and ``"interval"`` (how they were made).

    Returns:
        The paths of the two files.

    Raises:
        EvaluationError: the folder cannot be written to.
    """
    folder = check_writable(out_dir)
    predictions, scores = folder / "predictions.json", folder / "scores.json"
    ids = _result_ids(captions)
    rows = [{"image_id": ids[image_id], "caption": caption} for image_id, caption in captions.items()]
    content: dict[str, Any] = {
        "metrics": evaluation.metrics,
        "signature": evaluation.signature,
        "n": evaluation.n,
        "left_out": evaluation.left_out,
    }
    if evaluation.intervals:
        content["intervals"] = {key: list(bounds) for key, bounds in evaluation.intervals.items()}
        content["interval"] = evaluation.interval
    try:
        write_json(predictions, rows)
        write_json(scores, content)
    except OSError as error:
        raise EvaluationError(f"results cannot be written to {str(folder)!r}: {error}") from error
    return predictions, scores


def _result_ids(image_ids: Iterable[str]) -> dict[str, int | str]:
    ids = list(image_ids)
    if all(re.fullmatch("0|[1-9][0-9]{0,17}", image_id) for image_id in ids):
        return {image_id: int(image_id) for image_id in ids}
    return {image_id: image_id for image_id in ids}
