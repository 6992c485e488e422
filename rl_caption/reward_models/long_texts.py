"""Texts that training on long captions makes of them: a short caption, and triplets of growing captions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rewards.text.detail_units import detail_units_of
from rl_caption.data.base import Row
from rl_caption.data.loader import row_generator, step_indices
from rl_caption.reward_models.batch import Captions, choose_caption
from rl_caption.reward_models.triplets import Donor, Per, Triplet, make_triplets

ShortSource = Literal["first_sentence", "references"]
_SEEDS = 2**31


def first_sentence(caption: str) -> str:
    """The part of a long caption before the first full stop and space, as in Long-CLIP's code, with the full stop."""
    head, stop, _ = caption.partition(". ")
    return head + stop.strip()


def short_caption(row: Row, caption: str, step: int, source: ShortSource, seed: int) -> str:
    """The short caption of a row in a step: a pure function of (seed, step, image id).

    Args:
        row: with ``short_references`` where ``source`` is ``references``.
        caption: the long one that the step learns.
        step, seed: of the draw.
        source: see ``RewardModelTrainConfig.short_captions``.
    """
    if source == "first_sentence":
        return first_sentence(caption)
    references = row["short_references"]
    return references[int(row_generator(seed, step, f"short/{row['image_id']}").integers(len(references)))]


class StepTriplets:
    """Triplets of the global batch of a step, by image id.

    False details come from the whole global batch, or from ``donors``, so every process and micro-batch that makes a
    part of it has the same ones, however the batch is split.

    Args:
        rows: of the training split.
        batch_size: images of one optimizer step.
        seed: of the data order and of all draws.
        captions: which reference a step learns.
        shuffle_rate, per, donors: as for ``make_triplets``.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        batch_size: int,
        seed: int,
        captions: Captions,
        shuffle_rate: float,
        per: Per,
        donors: Sequence[Donor] | None = None,
    ) -> None:
        self.rows, self.batch_size, self.seed, self.captions = rows, batch_size, seed, captions
        self.shuffle_rate, self.per, self.donors = shuffle_rate, per, donors
        self._step = -1
        self._made: dict[str, Triplet | None] = {}

    def __call__(self, step: int) -> dict[str, Triplet | None]:
        """Image id -> its triplet; None where its caption has fewer than two details."""
        if step != self._step:
            order = step_indices(len(self.rows), self.batch_size, step, self.seed)
            batch = list({row["image_id"]: row for row in (self.rows[index] for index in order)}.values())
            ids = [row["image_id"] for row in batch]
            chosen = [choose_caption(row, self.captions, self.seed, step) for row in batch]
            seed = int(row_generator(self.seed, step, "triplets").integers(_SEEDS))
            made = make_triplets(chosen, seed, self.shuffle_rate, self.per, image_ids=ids, donors=self.donors)
            self._step, self._made = step, dict(zip(ids, made, strict=True))
        return self._made


def donors_of(rows: Sequence[Row]) -> list[Donor]:
    """The detail units of the first reference of each row, to take false details from."""
    units = detail_units_of([row["references"][0] for row in rows])
    return [Donor(row["image_id"], own) for row, own in zip(rows, units, strict=True)]


def validation_triplets(rows: Sequence[Row], seed: int) -> list[Triplet | None]:
    """A triplet of each row's first reference, the same at every validation; false details keep their word order."""
    captions = [row["references"][0] for row in rows]
    return make_triplets(captions, seed, shuffle_rate=0.0, image_ids=[row["image_id"] for row in rows])
