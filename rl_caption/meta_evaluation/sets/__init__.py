"""Public sets of human judgements of captions, read from the files in which they are published.

``load`` reads one by its name. A set is one function ``(folder, images, partial, ...) -> [RatedCaptions |
CaptionPairs]`` and one line in ``SETS``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_caption.meta_evaluation.sets.base import CaptionPairs, JudgedSet, JudgingSetError, RatedCaptions

__all__ = ["SETS", "CaptionPairs", "JudgedSet", "JudgingSetError", "RatedCaptions", "load"]

SETS: dict[str, str] = {
    "flickr8k_expert": "rl_caption.meta_evaluation.sets.flickr8k:flickr8k_expert",
    "flickr8k_crowdflower": "rl_caption.meta_evaluation.sets.flickr8k:flickr8k_crowdflower",
    "composite": "rl_caption.meta_evaluation.sets.composite:composite",
    "pascal50s": "rl_caption.meta_evaluation.sets.consensus:pascal50s",
    "abstract50s": "rl_caption.meta_evaluation.sets.consensus:abstract50s",
    "foil": "rl_caption.meta_evaluation.sets.foil:foil",
    "sugarcrepe": "rl_caption.meta_evaluation.sets.compositional:sugarcrepe",
    "aro": "rl_caption.meta_evaluation.sets.compositional:aro",
    "polaris": "rl_caption.meta_evaluation.sets.polaris:polaris",
    "nebula": "rl_caption.meta_evaluation.sets.polaris:nebula",
    "thumb": "rl_caption.meta_evaluation.sets.thumb:thumb",
    "cxc": "rl_caption.meta_evaluation.sets.cxc:cxc",
    "ratings": "rl_caption.meta_evaluation.sets.ratings:ratings",
}
"""Name -> ``module:function``."""


def load(
    name: str,
    folder: str | Path,
    images: str | Path | None = None,
    partial: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> Sequence[JudgedSet]:
    """Read a set of judgements.

    Args:
        name: one of ``SETS``.
        folder: of its files.
        images: folder of its images; None looks below ``folder``, and a set without images is none the less read.
        partial: accept other numbers of judgements than the published ones.
        kwargs: what else the set takes, such as ``aspect`` of Composite.

    Returns:
        The set, in one part or several.

    Raises:
        JudgingSetError: an unknown name or argument, or files that are missing, wrong or incomplete.
    """
    if name not in SETS:
        raise JudgingSetError(f"{name!r} is not a set of judgements: expected one of {', '.join(SETS)}")
    module, _, function = SETS[name].partition(":")
    read: Callable[..., Sequence[JudgedSet]] = getattr(importlib.import_module(module), function)
    options = [key for key in inspect.signature(read).parameters if key not in ("folder", "images", "partial")]
    unknown = sorted(set(kwargs or {}) - set(options))
    if unknown:
        raise JudgingSetError(f"{name} does not take {', '.join(unknown)}; it takes: {', '.join(options) or 'nothing'}")
    place = Path(folder)
    if not place.exists():
        raise JudgingSetError(
            f"{name}: {str(place)!r} is not there: expected the folder of its files (docs/judging.md)"
        )
    return read(place, None if images is None else Path(images), partial, **(kwargs or {}))
