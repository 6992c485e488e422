"""Are the region features of a dataset there, and of one shape? In parallel, from headers, or with all values."""

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
    features: Sequence[ImageFeatures],
    num_workers: int = 4,
    cache: str | Path | None = None,
    check_values: bool = False,
) -> list[str | None]:
    """Check every image's features.

    Args:
        features: of N images.
        num_workers: threads, where files are many.
        cache: the file that remembers good images; good features are remembered beside it, as ``NAME.features.json``,
            by place, size and time of change, so that a second run reads only what is new.
        check_values: read the values, too: that they are finite and, where boxes are read, that these lie in the image.
            False reads headers alone.

    Returns:
        N times what is wrong, naming image, file and shape, or None. Where most images have D features, another
        number is wrong.
    """
    memory = None if cache is None else Path(cache).with_suffix(".features.json")
    known = {} if memory is None else _read(memory)
    stamps = [None if memory is None else _stamp(item) for item in features]
    outcomes: list[int | str | None] = [_remembered(known, stamp, check_values) for stamp in stamps]
    unseen = [index for index, outcome in enumerate(outcomes) if outcome is None]
    threads = num_workers if all(item.store.parallel for item in features) else 1
    title = "reading features" if check_values else "checking features"
    found = in_parallel(lambda index: _width(features[index], check_values), unseen, threads, title)
    for index, verdict in zip(unseen, found, strict=True):
        outcomes[index] = verdict
    if memory is not None and unseen:
        good = {}
        for index in unseen:
            stamp, outcome = stamps[index], outcomes[index]
            if stamp is not None and isinstance(outcome, int):
                good[stamp[0]] = [stamp[1], outcome, check_values]
        write_text(memory, json.dumps(known | good))
    usual = Counter(outcome for outcome in outcomes if isinstance(outcome, int)).most_common(1)
    return [_error(item, outcome, usual) for item, outcome in zip(features, outcomes, strict=True)]


def _error(item: ImageFeatures, outcome: int | str | None, usual: Sequence[tuple[int, int]]) -> str | None:
    if not isinstance(outcome, int):
        return outcome
    if outcome == usual[0][0]:
        return None
    return f"{item.where}: D is {outcome}, others have {usual[0][0]}"


def _width(item: ImageFeatures, check_values: bool) -> int | str:
    try:
        return item.load().shape[1] if check_values else item.check()
    except DataError as error:
        return str(error)


def _remembered(
    known: dict[str, list[Any]], stamp: tuple[str, list[Any]] | None, check_values: bool
) -> int | str | None:
    """D, where the features have not changed since they were found to be good; values that were read count twice."""
    entry = known.get(stamp[0]) if stamp is not None else None
    if stamp is None or entry is None or len(entry) != 3 or entry[0] != stamp[1]:
        return None
    return entry[1] if entry[2] or not check_values else None


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
