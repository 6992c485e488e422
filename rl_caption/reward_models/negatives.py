"""Hard negatives, captions that are made from those of the data: their sources and their section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from rl_caption.data.base import DataError, Row
from rl_caption.data.loader import row_generator
from rl_caption.data.negatives import NEGATIVES, NegativeSource
from rl_caption.reward_models.batch import Addition, chance
from rl_caption.runtime.errors import ConfigError, errors_of_user_code, naming
from rl_caption.runtime.options import Fraction, Section, check_type, load_target


class NegativesConfig(Section):
    """Hard negatives: false captions of an image, in addition to those of the other images of the
    batch (NegCLIP).
    """

    count: Annotated[int, Field(ge=0, le=64)] = 0
    """Hard negatives per caption; 0 uses none."""
    source: str = "rules"
    """``rules`` (part-of-speech tags), ``scenes`` (exact, of generated scenes), ``data`` (the
    column ``negatives`` of JSON lines), or ``package.module:Class`` of a ``NegativeSource``.
    """
    kwargs: dict = {}
    """Options of the source, such as ``{kinds: [replace_relation, swap_attribute]}``."""
    share: Fraction = 1.0
    """Fraction of the captions of a step that get negatives."""


@dataclass(frozen=True)
class HardNegatives:
    """Adds the texts ``text_false0`` and so on to a batch, and the target ``false`` [B, ``count``]:
    1 for each of them.

    Args:
        source: gives the false captions of a row.
        count: false captions of each caption.
        share: fraction of (image, step) that have negatives.
        seed: of all draws.
    """

    source: NegativeSource
    count: int
    share: float = 1.0
    seed: int = 0

    def __call__(
        self, items: Sequence[tuple[Row, int]], captions: list[str]
    ) -> Addition:
        drawn = []
        for (row, step), caption in zip(items, captions, strict=True):
            is_drawn = chance(self.share, "has negatives", row, self.seed, step)
            drawn.append(self.of(row, caption, step) if is_drawn else [])
        texts, counts = {}, []
        for n in range(self.count):
            texts[f"text_false{n}"] = [
                false[n] if n < len(false) else "" for false in drawn
            ]
            counts.append([float(n < len(false)) for false in drawn])
        return Addition(texts, {"false": torch.tensor(counts).T.contiguous()})

    def of(self, row: Row, caption: str, step: int) -> list[str]:
        """At most ``count`` false captions of a row."""
        generator = row_generator(self.seed, step, f"negatives/{row['image_id']}")
        return [text for _, text in self.source(row, caption, generator)[: self.count]]


def build_negatives(
    config: NegativesConfig, rows: Sequence[Row], seed: int
) -> HardNegatives | None:
    """Hard negatives of the training rows; None where ``count`` is 0. Raises as ``caption_source``."""
    if not config.count:
        return None
    kwargs = dict(config.kwargs)
    if config.source == "rules":
        kwargs["captions"] = [caption for row in rows for caption in row["references"]]
    source = caption_source(config.source, kwargs, rows)
    return HardNegatives(source, config.count, config.share, seed)


def validation_negatives(
    negatives: HardNegatives | None, rows: Sequence[Row], best_by: str | None
) -> list[tuple[int, str, str]]:
    """Index of a row, its first caption and a false caption; the same at every validation."""
    if negatives is None:
        return []
    false_captions = []
    for index, row in enumerate(rows):
        caption = row["references"][0]
        for text in negatives.of(row, caption, -1):
            false_captions.append((index, caption, text))
    if best_by == "val/hard_negatives" and not false_captions:
        raise ConfigError(
            f"eval.best_by is {best_by!r}, but negatives.source has none for the first captions of "
            "the validation split"
        )
    return false_captions


def caption_source(name: str, kwargs: Mapping[str, Any], rows: Sequence[Row]) -> Any:
    """The source that ``negatives.source`` names, tried on the first row; a column of the data on
    all rows.

    Raises:
        ConfigError: there is no such source, or it cannot be made.
        DataError: it cannot make captions of a row.
    """
    key = "negatives.source"
    target = load_target(name, key, NEGATIVES)
    cannot = naming(f"{key}: {name} cannot be made", (TypeError, ValueError))
    with cannot, errors_of_user_code(f"{key} {name}"):
        source = target(**kwargs)
    if ":" in name:
        source = _UserSource(source, f"{key} {name}")
    generator = np.random.default_rng(0)
    # A column that is absent, or scenes that are none.
    for row in rows if name == "data" else rows[:1]:
        source(row, row["references"][0], generator)
    return source


@dataclass(frozen=True)
class _UserSource:
    """A source of captions from outside: what it returns is checked, and errors in its code name
    it.
    """

    source: Any
    name: str

    def __call__(self, row: Row, caption: str, generator: np.random.Generator) -> Any:
        with errors_of_user_code(self.name, error=DataError):
            captions = self.source(row, caption, generator)
        what = f"{self.name}: what it returned of image {row['image_id']!r}"
        check_type(captions, list[tuple[str, str]], what, DataError)
        return captions
