"""Public sets of human judgements of captions, read from the files in which they are published.

``load`` reads one by its name. A set is one function ``(folder, images, partial, ...) -> [RatedCaptions |
CaptionPairs]`` and one line in ``SETS``. Its arguments, unless it says otherwise:

    folder: of its files.
    images: folder of its photos; None looks below ``folder``.
    partial: accept other numbers of judgements than the published ones.

A file that is missing, wrong or incomplete is a ``DataError``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rl_caption.data.base import DataError
from rl_caption.meta_evaluation.sets.base import CaptionPairs, JudgementSet, RatedCaptions

__all__ = ["SETS", "CaptionPairs", "JudgementSet", "RatedCaptions", "load"]

SETS: dict[str, str] = {
    "flickr8k_expert": "rated",
    "flickr8k_crowdflower": "rated",
    "composite": "rated",
    "pascal50s": "pairs",
    "abstract50s": "pairs",
    "foil": "pairs",
    "sugarcrepe": "pairs",
    "aro": "pairs",
    "polaris": "rated",
    "nebula": "rated",
    "thumb": "rated",
    "cxc": "rated",
    "ratings": "rated",
}
"""Name -> module of this package that has the function of this name."""


def load(
    name: str,
    folder: str | Path,
    images: str | Path | None = None,
    partial: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> Sequence[JudgementSet]:
    """Read a set of judgements, in one part or several.

    Args:
        name: one of ``SETS``.
        folder: of its files.
        images: folder of its images; None looks below ``folder``, and a set without images is none the less read.
        partial: accept other numbers of judgements than the published ones.
        kwargs: what else the set takes, such as ``aspect`` of Composite.

    Raises:
        DataError: an unknown name or argument, or files that are missing, wrong or incomplete.
    """
    if name not in SETS:
        raise DataError(f"{name!r} is not a set of judgements: expected one of {', '.join(SETS)}")
    read = getattr(import_module(f"{__name__}.{SETS[name]}"), name)
    options = [key for key in inspect.signature(read).parameters if key not in ("folder", "images", "partial")]
    unknown = sorted(set(kwargs or {}) - set(options))
    if unknown:
        raise DataError(f"{name} does not take {', '.join(unknown)}; it takes: {', '.join(options) or 'nothing'}")
    place = Path(folder)
    if not place.exists():
        raise DataError(f"{name}: {str(place)!r} is not there: expected the folder of its files (docs/judging.md)")
    parts: Sequence[JudgementSet] = read(place, None if images is None else Path(images), partial, **(kwargs or {}))
    return parts
