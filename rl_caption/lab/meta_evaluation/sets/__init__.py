"""Public sets of human judgements of captions, read from the files in which they are published.

A set is one function ``(files, ...) -> [JudgementSet]`` in ``SETS``. A file that is missing, wrong or incomplete is a
``DataError``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_caption.data.base import DataError, Row, Splits
from rl_caption.lab.meta_evaluation.sets import hub, pairs, rated, videos
from rl_caption.lab.meta_evaluation.sets.base import (
    CaptionGroups,
    CaptionPairs,
    Files,
    JudgementSet,
    RatedCaptions,
)
from rl_caption.runtime.options import wrong_arguments

__all__ = [
    "SETS",
    "CaptionGroups",
    "CaptionPairs",
    "JudgementSet",
    "RatedCaptions",
    "load",
    "rated_images",
]

SETS: dict[str, Callable[..., Sequence[JudgementSet]]] = {
    "flickr8k_expert": rated.flickr8k_expert,
    "flickr8k_crowdflower": rated.flickr8k_crowdflower,
    "composite": rated.composite,
    "pascal50s": pairs.pascal50s,
    "abstract50s": pairs.abstract50s,
    "foil": pairs.foil,
    "sugarcrepe": pairs.sugarcrepe,
    "aro": pairs.aro,
    "sugarcrepe_pp": pairs.sugarcrepe_pp,
    "aro_order": pairs.aro_order,
    "icc_captions": rated.icc_captions,
    "icc_words": rated.icc_words,
    "vatex_eval": videos.vatex_eval,
    "activitynet_foil": videos.activitynet_foil,
    "polaris": hub.test_split,
    "nebula": hub.test_split,
    "longcap_arena": hub.longcap_arena,
    "ratings": rated.ratings,
}
"""Name of a set -> its function."""


def load(
    name: str,
    folder: str | Path,
    images: str | Path | None = None,
    partial: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> Sequence[JudgementSet]:
    """Read the set ``name`` of ``SETS``, in one part or several; ``kwargs`` is what else it takes, such as ``aspect``.

    ``folder`` has its files, ``images`` its photos (None looks below ``folder``), and ``partial`` accepts other numbers
    of judgements than the published ones.

    Raises:
        DataError: an unknown name or argument, or files that are missing, wrong or incomplete.
    """
    if name not in SETS:
        raise DataError(f"{name!r} is not a set of judgements: expected one of {', '.join(SETS)}")
    wrong = wrong_arguments(
        SETS[name], 1, name, kwargs or {}, lambda option: f"set_kwargs.{option}"
    )
    if wrong:
        raise DataError("; ".join(wrong))
    files = Files(name, Path(folder), None if images is None else Path(images), partial)
    return SETS[name](files, **(kwargs or {}))


def rated_images(
    name: str,
    path: str,
    image_root: str | None = None,
    partial: bool = False,
    set_kwargs: dict[str, Any] | None = None,
) -> Splits:
    """The images of a set of rated captions, a data set of ``data.target``, so that questions are written about them.

    A row is an image with the id that the set has for it, and all references of its judgements; the split is ``test``.
    Where the set was found without its images, ids stand for their files.

    Args:
        name, path, image_root, partial, set_kwargs: as ``name``, ``folder``, ``images``, ``partial``, ``kwargs`` of
            ``load``.

    Raises:
        DataError: the set cannot be read, or has no references or no rated captions.
    """
    rows: dict[str, Row] = {}
    for judgements in load(name, path, image_root, partial, set_kwargs):
        if not isinstance(judgements, RatedCaptions) or judgements.references is None:
            raise DataError(f"{judgements.name} is no set of rated captions with references")
        images = judgements.image_ids if judgements.images is None else judgements.images
        for image_id, image, references in zip(
            judgements.image_ids, images, judgements.references, strict=True
        ):
            row = rows.setdefault(
                image_id, {"image_id": image_id, "image": image, "references": []}
            )
            row["references"] += [text for text in references if text not in row["references"]]
    return Splits({"test": list(rows.values())}, path)
