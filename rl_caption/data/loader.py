"""Batches for training: rows in the order of ``order.py``, preprocessed by the captioner in loader workers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rl_caption.captioners.base import Captioner
from rl_caption.data.augment import AUGMENTATIONS, augment
from rl_caption.data.base import Row
from rl_caption.data.order import row_generator
from rl_caption.launch import STOP_SIGNALS
from rl_caption.types import Batch, CaptionBatch


class Collate:
    """Rows to a ``CaptionBatch``, on the CPU.

    Args:
        captioner: does the preprocessing and knows the tokens.
        max_target_tokens: longest reference in tokens, EOS included; None makes no targets.
        captions_per_image: references that one step learns, another choice at every step; None takes all.
        augmentations: names of ``augment``: another random view of an image at every step. Only views of which its
            captions stay true (aerial photos may be mirrored, scenes with a left and a right may not).
        seed: of these choices.
    """

    def __init__(
        self,
        captioner: Captioner,
        max_target_tokens: int | None = None,
        captions_per_image: int | None = None,
        augmentations: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        unknown = sorted(set(augmentations) - set(AUGMENTATIONS))
        if unknown:
            raise ValueError(f"data.augment has {unknown}: expected some of {list(AUGMENTATIONS)}")
        self.augmentations = tuple(augmentations)
        self.captioner = captioner
        self.max_target_tokens = max_target_tokens
        self.captions_per_image = captions_per_image
        self.seed = seed

    def __call__(self, items: Sequence[tuple[Row, int]]) -> CaptionBatch:
        """Make a batch of (row, step) pairs."""
        rows = [row for row, _ in items]
        inputs = self.captioner.preprocess(rows)
        if self.augmentations and "pixel_values" in inputs:
            views = zip(inputs["pixel_values"], items, strict=True)
            inputs["pixel_values"] = torch.stack(
                [augment(pixels, self.augmentations, self.seed, step, row["image_id"]) for pixels, (row, step) in views]
            )
        if self.max_target_tokens is None:
            return CaptionBatch(rows, inputs)
        chosen = [self._choose(row["references"], step) for row, step in items]
        targets, mask = encode_targets(self.captioner, chosen, self.max_target_tokens, rows)
        return CaptionBatch(rows, inputs, targets, mask)

    def _choose(self, references: list[str], step: int) -> list[str]:
        wanted = self.captions_per_image
        if wanted is None or len(references) <= wanted:
            return references
        order = row_generator(self.seed, step, references[0]).permutation(len(references))
        return [references[index] for index in order[:wanted]]


def encode_targets(
    captioner: Captioner, references: list[list[str]], max_tokens: int, rows: Sequence[Row] | None = None
) -> tuple[Tensor, Tensor]:
    """References of B images to token ids [B, C, L] and the mask [B, C, L] of the tokens to learn.

    An image with fewer than C references has rows of padding only. ``rows`` [B] are where prompts come from.
    """
    owners = rows if rows is not None else [None] * len(references)
    encoded = [captioner.encode(captions, max_tokens, row) for captions, row in zip(references, owners, strict=True)]
    captions = max(map(len, encoded))
    length = max(len(ids) for found in encoded for ids in found)
    targets = torch.full((len(encoded), captions, length), captioner.pad_token_id)
    mask = torch.zeros(targets.shape, dtype=torch.bool)
    for image, found in enumerate(encoded):
        for caption, ids in enumerate(found):
            targets[image, caption, : len(ids)] = torch.tensor(ids)
            mask[image, caption, : len(ids)] = True
    return targets, mask & ~torch.isin(targets, torch.tensor(captioner.forbidden))


class _Rows(Dataset):
    """Rows addressed by (index, step), so that the collate function knows the step."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Row, int]:
        return self.rows[key[0]], key[1]


def row_loader(
    rows: Sequence[Row],
    collate: Callable[[Sequence[tuple[Row, int]]], Batch],
    order: Iterator[list[tuple[int, int]]],
    num_workers: int,
) -> DataLoader:
    """A loader of what ``collate`` makes that follows ``order`` (micro-batches of (row index, step))."""
    return DataLoader(
        _Rows(rows),
        batch_sampler=order,
        collate_fn=collate,
        num_workers=num_workers,
        # A generator of its own: otherwise every new iterator would draw from, and so shift, the global random state.
        generator=torch.Generator(),
        persistent_workers=False,
        worker_init_fn=_leave_signals_to_the_training if num_workers else None,
        pin_memory=torch.cuda.is_available(),
    )


def _leave_signals_to_the_training(worker: int) -> None:
    """A signal to the whole job must not take the workers away from a training that still saves; they end with it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
