"""Configuration of ``recaption.py`` and ``positives.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl_caption.config.schema import DataConfig
from rl_caption.options import BatchSize, Range


@dataclass
class RecaptionerConfig:
    """Who writes the captions.

    Args:
        target: ``captioner`` (one of ours), ``vision_language`` (Transformers), ``scenes`` (exact descriptions of
            generated scenes), or ``package.module:Class`` of a ``Recaptioner``; null, of ``positives.py``, writes none.
        kwargs: arguments of it (docs/recaptioning.md).
    """

    target: str | None = "captioner"
    kwargs: dict = field(default_factory=dict)


@dataclass
class TextToImageConfig:
    """What makes images of captions.

    Args:
        target: ``diffusers:NAME`` (a pipeline of that package), ``scenes`` (drawings of the generated world), or
            ``package.module:Class`` of a ``TextToImage``; null makes none.
        kwargs: arguments of it (docs/pac.md).
        captions: an image of ``all`` references of a photo, or of the ``first`` alone (``train.captions: first``).
        batch_size: captions at a time.
    """

    target: str | None = None
    kwargs: dict = field(default_factory=dict)
    captions: Literal["all", "first"] = "all"
    batch_size: BatchSize = 16


@dataclass
class PartsConfig:
    """A program that writes a data set anew, part by part.

    Args:
        data: images and their captions.
        splits: those that are worked on; the others are kept as they are. Empty takes all.
        part_rows: rows that are worked on at a time, and kept on disk as one part.
        worker: ``K/N``: only work on every N-th part from part K (0 to N - 1) on; a run without it goes on from what
            such runs left, also when they were stopped.
        out: folder for what is written; it refuses parts that were made by other settings.
    """

    data: DataConfig = field(default_factory=DataConfig)
    splits: list[str] = field(default_factory=lambda: ["train"])
    part_rows: Annotated[int, Range(min=1, max=10**7)] = 512
    worker: str | None = None
    out: str = "out"


@dataclass
class RecaptionConfig(PartsConfig):
    """``recaption.py``: write a new, long caption of every image of a data set (docs/recaptioning.md).

    Args:
        recaptioner: who writes the captions.
        language_model: folder or hub name of a causal language model, by which captions before and after are compared;
            null compares their lengths alone.
        out: folder for ``captions.jsonl``, ``report.md`` and ``parts``.
    """

    recaptioner: RecaptionerConfig = field(default_factory=RecaptionerConfig)
    language_model: str | None = None
    out: str = "recaptioned"


@dataclass
class PositivesConfig(PartsConfig):
    """``positives.py``: generated captions of images, and images of captions, as PAC-S learns from (docs/pac.md).

    Args:
        captions: who writes ``positive_captions`` of each image.
        images: what makes ``positive_images``, one of each reference.
        out: folder for ``positives.jsonl``, ``report.md``, ``positive_images`` and ``parts``.
    """

    captions: RecaptionerConfig = field(default_factory=lambda: RecaptionerConfig(target=None))
    images: TextToImageConfig = field(default_factory=TextToImageConfig)
    out: str = "positives"
