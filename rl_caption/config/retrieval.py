"""Configuration of ``retrieval.py``."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_caption.config.schema import DataConfig, RetrievalConfig
from rl_caption.options import Resamples, Seed, Steps


@dataclass
class CompareRetrievalConfig:
    """``retrieval.py``: image-text retrieval by dual encoders, side by side (docs/judging.md).

    Args:
        models: heading to a dual encoder.
        data: images and their captions; where rows have ``long_reference``, these are a second set of texts.
        split: of ``data``.
        max_images: the first so many images; null takes all.
        bootstrap: resamples of images for the 95 % intervals; 0 computes none.
        seed: of the resamples.
        out: folder for ``retrieval.md`` and ``retrieval.json``.
    """

    models: dict[str, RetrievalConfig] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    split: str = "test"
    max_images: Steps | None = None
    bootstrap: Resamples = 1000
    seed: Seed = 0
    out: str = "retrieval"
