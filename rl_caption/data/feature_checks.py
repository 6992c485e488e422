"""Are the region features of a dataset there, and of one shape? From headers, in parallel, without reading values."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from rl_caption.data.base import DataError
from rl_caption.data.features import ImageFeatures
from rl_caption.data.files import write_text
from rl_caption.data.image_files import in_parallel


def check_features(
    features: Sequence[ImageFeatures], num_workers: int = 4, cache: str | Path | None = None
) -> list[str | None]:
    """Check every image's features by their headers.

    Args:
        features: of N images.
        num_workers: threads, where files are many.
        cache: the file that remembers good images; good features are remembered beside it, as ``NAME.features.json``,
            by place, size and time of change, so that a second run reads only what is new.

    Returns:
        N times what is wrong, naming image, file and shape, or None. Where most images have D features, another
        number is wrong.
    """
    memory = None if cache is None else Path(cache).with_suffix(".features.json")
    known = {} if memory is None else _read(memory)
    stamps = [None if memory is None else _stamp(item) for item in features]
    outcomes: list[int | str | None] = [
        known[stamp[0]][1] if stamp is not None and known.get(stamp[0], [None])[0] == stamp[1] else None
        for stamp in stamps
    ]
    unseen = [index for index, outcome in enumerate(outcomes) if outcome is None]
    threads = num_workers if all(item.store.parallel for item in features) else 1
    found = in_parallel(lambda index: _width(features[index]), unseen, threads, "checking features")
    for index, outcome in zip(unseen, found, strict=True):
        outcomes[index] = outcome
    if memory is not None and unseen:
        good = {
            stamp[0]: [stamp[1], outcome]
            for stamp, outcome in zip(stamps, outcomes, strict=True)
            if stamp is not None and isinstance(outcome, int)
        }
        write_text(memory, json.dumps(known | good))
    usual = Counter(outcome for outcome in outcomes if isinstance(outcome, int)).most_common(1)
    return [_error(item, outcome, usual) for item, outcome in zip(features, outcomes, strict=True)]


def _error(item: ImageFeatures, outcome: int | str | None, usual: Sequence[tuple[int, int]]) -> str | None:
    if not isinstance(outcome, int):
        return outcome
    if outcome == usual[0][0]:
        return None
    return f"{item.where}: D is {outcome}, others have {usual[0][0]}"


def _width(item: ImageFeatures) -> int | str:
    try:
        return item.check()
    except DataError as error:
        return str(error)


def _stamp(item: ImageFeatures) -> tuple[str, list[Any]] | None:
    """A name of the features, and everything that the verdict depends on."""
    stamp = item.store.stamp(item.place)
    if stamp is None:
        return None
    return stamp[0], [stamp[1], stamp[2], repr((item.place, astuple(item.options), item.size))]


def _read(memory: Path) -> dict[str, list[Any]]:
    try:
        content = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
