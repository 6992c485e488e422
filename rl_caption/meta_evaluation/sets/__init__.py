"""Public sets of human judgements of captions, read from the files in which they are published.

A set is one function ``(folder, images, partial, ...) -> [RatedCaptions | CaptionPairs]`` and one line in ``SETS``.
``folder`` has its files, ``images`` its photos (None looks below ``folder``), and ``partial`` accepts other numbers of
judgements than the published ones. A file that is missing, wrong or incomplete is a ``DataError``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from rewards.images import ImageSource
from rl_caption.data.base import DataError

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


@dataclass(frozen=True)
class RatedCaptions:
    """N judgements, each a rating of one caption of one image. Several ratings of a caption are several judgements."""

    name: str
    captions: Sequence[str]
    """[N] as written."""
    ratings: Sequence[float]
    """[N], higher is better."""
    image_ids: Sequence[str]
    """[N]"""
    images: Sequence[ImageSource] | None
    """[N], not opened; None where the set was found without its images."""
    references: Sequence[Sequence[str]] | None
    """[N] lists, or None where the set has none."""
    published: Literal["tau_b", "tau_c", "pearson", "spearman"] | None
    """Which correlation papers print for this set; None where nobody does. ``spearman`` is that of CxC's protocol."""
    convention: str
    """What is compared with what, in a line."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    """Why judgements of the files are not among the N -> how many."""
    within_images: bool = False
    """Whether the captions of one image are compared with each other, too."""


@dataclass(frozen=True)
class CaptionPairs:
    """P pairs of captions of one image each, and which of the two is better."""

    name: str
    first: Sequence[str]
    second: Sequence[str]
    preference: Sequence[float]
    """[P] 1 where the first is better, 0 where the second is, 0.5 where people are divided evenly."""
    kinds: Sequence[str]
    """[P] category of each pair."""
    image_ids: Sequence[str]
    images: Sequence[ImageSource] | None
    references: Mapping[str, Sequence[Sequence[str]]]
    """Condition, such as ``4 references`` or ``draw 1`` -> [P] lists. Empty where the set has no references."""
    convention: str
    """What counts as right, in a line."""
    excluded: Mapping[str, int] = field(default_factory=dict)
    averaged: bool = False
    """Whether the conditions are draws of one experiment, whose accuracies are averaged; else each is reported."""
    ties: Literal["wrong", "half"] = "wrong"
    """What a pair with two equal scores counts."""
    shown_kinds: bool = True
    """Whether each kind is a figure; without, only the summary is."""
    summary: Literal["pairs", "kinds"] = "pairs"
    """What the summary averages over: all pairs alike, or the accuracies of the kinds."""


JudgementSet = RatedCaptions | CaptionPairs


def load(
    name: str,
    folder: str | Path,
    images: str | Path | None = None,
    partial: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> Sequence[JudgementSet]:
    """Read the set ``name`` of ``SETS``, in one part or several; ``kwargs`` is what else it takes, such as ``aspect``.

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
    path = Path(folder)
    if not path.exists():
        raise DataError(f"{name}: {str(path)!r} is not there: expected the folder of its files (docs/judging.md)")
    parts: Sequence[JudgementSet] = read(path, None if images is None else Path(images), partial, **(kwargs or {}))
    return parts
