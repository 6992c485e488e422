"""Public sets of human judgements of captions, read from the files in which they are published.

A set is one function ``(files, ...) -> [JudgementSet]`` in ``SETS``. A file that is missing, wrong or incomplete is a
``DataError``.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_caption.data.base import DataError
from rl_caption.lab.meta_evaluation.sets import hub, pairs, rated, videos
from rl_caption.lab.meta_evaluation.sets.base import CaptionGroups, CaptionPairs, Files, JudgementSet, RatedCaptions
from rl_caption.runtime.options import wrong_arguments

__all__ = ["SETS", "CaptionGroups", "CaptionPairs", "JudgementSet", "RatedCaptions", "load"]

_READERS: Sequence[Callable[..., Sequence[JudgementSet]]] = (
    *(rated.flickr8k_expert, rated.flickr8k_crowdflower, rated.composite),
    *(pairs.pascal50s, pairs.abstract50s, pairs.foil, pairs.sugarcrepe, pairs.aro, pairs.valse),
    *(pairs.sugarcrepe_pp, pairs.winoground, pairs.aro_order),
    *(rated.icc_captions, rated.icc_words),
    *(videos.vatex_eval, videos.activitynet_foil),
    *(hub.polaris, hub.nebula, hub.longcap_arena, rated.thumb, rated.cxc, rated.ratings),
)
SETS = {read.__name__: read for read in _READERS}
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
    wrong = wrong_arguments(SETS[name], 1, name, kwargs or {}, lambda option: f"set_kwargs.{option}")
    if wrong:
        raise DataError("; ".join(wrong))
    path = Path(folder)
    if not path.exists():
        raise DataError(f"{name}: {str(path)!r} is not there: expected the folder of its files (docs/judging.md)")
    if images is not None and not Path(images).is_dir():
        raise DataError(f"images = {str(images)!r} is not a folder: expected the one with the set's images")
    return SETS[name](Files(name, path, None if images is None else Path(images), partial), **(kwargs or {}))
