"""Public sets of human judgements of captions, read from the files in which they are published.

A set is one function ``(files, ...) -> [JudgementSet]`` in ``SETS``. A file that is
missing, wrong or incomplete is a ``DataError`` that names it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_caption.data.base import DataError
from rl_caption.lab.meta_evaluation.sets import pairs, rated, scenes, videos
from rl_caption.lab.meta_evaluation.sets.base import (
    READING,
    Files,
    Judged,
    JudgementSet,
)
from rl_caption.runtime.options import check_options

__all__ = ["SETS", "Judged", "JudgementSet", "load"]

SETS: dict[str, Callable[..., Sequence[JudgementSet]]] = {
    read.__name__: read
    for read in (
        rated.flickr8k_expert,
        rated.flickr8k_crowdflower,
        rated.composite,
        pairs.pascal50s,
        pairs.abstract50s,
        pairs.foil,
        videos.vatex_eval,
        videos.activitynet_foil,
        pairs.sugarcrepe,
        pairs.aro,
        pairs.sugarcrepe_pp,
        rated.icc_captions,
        rated.icc_words,
        rated.ratings,
        scenes.scenes,
    )
}
"""Name of a set -> its function."""


def load(
    name: str,
    folder: str | Path | None = None,
    images: str | Path | None = None,
    partial: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> Sequence[JudgementSet]:
    """Read the set ``name`` of ``SETS``, in one part or several; ``kwargs`` are further
    arguments, such as ``aspect``.

    ``folder`` has its files (None: the current folder), ``images`` its photos (None
    looks below ``folder``), and ``partial`` accepts other numbers of judgements than
    the published ones.

    Raises:
        ConfigError: the set does not take an argument.
        DataError: the name is unknown, or files are missing, wrong or incomplete.
    """
    if name not in SETS:
        raise DataError(
            f"{name!r} is not a set of judgements: expected one of {', '.join(SETS)}"
        )
    options = kwargs or {}
    check_options(SETS[name], 1, name, options, "set_kwargs")
    opened = [Path(folder or ".")]
    files = Files(
        name,
        opened[0],
        Path(images) if images else None,
        partial,
        opened,
    )
    try:
        return SETS[name](files, **options)
    except DataError:
        raise
    except READING as error:
        raise DataError(f"{opened[-1]}: {type(error).__name__}: {error}") from error
