"""Training batches: the order of the images, their augmentation, and collation for the captioner.

Order and augmentation are pure functions of (seed, step), so that a run resumes, even
with another number of processes, without any state of a loader or sampler.
"""

from __future__ import annotations

import hashlib
import itertools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from rewards.base import TARGETS, RewardError
from rl_caption.data.base import DataError, Row
from rl_caption.runtime.errors import ConfigError, UserError, errors_of_user_code
from rl_caption.runtime.launch import STOP_SIGNALS
from rl_caption.runtime.types import Batch, CaptionBatch

if TYPE_CHECKING:
    from rl_caption.captioners.base import Captioner

SMALLEST_CROP = 0.75
"""Side of the smallest crop, as a fraction of the image's side."""


def step_indices(num_rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Row indices of the global batch of optimizer step ``step`` (counted from 0).

    Epochs are independent permutations, one after another: every image is seen once per
    epoch, none is dropped, and a batch may span two epochs.
    """
    start = step * batch_size
    indices: list[int] = []
    while len(indices) < batch_size:
        epoch, offset = divmod(start + len(indices), num_rows)
        order = _permutation(num_rows, seed, epoch)
        indices.extend(order[offset : offset + batch_size - len(indices)].tolist())
    return indices


def row_generator(seed: int, step: int, key: str) -> np.random.Generator:
    """Random numbers for one image at one step, a pure function of the arguments.

    The counter-based generator Philox (Salmon et al. 2011, "Parallel random numbers: as
    easy as 1, 2, 3"), keyed by a hash of the arguments.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{key}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(
        num_rows
    )


def micro_batches(
    num_rows: int,
    batch_size: int,
    micro_batch_size: int,
    rank: int,
    processes: int,
    seed: int,
    first_step: int,
) -> Iterator[list[tuple[int, int]]]:
    """Yield the micro-batches of one process, as (row index, step) pairs, step after
    step without end.

    Each process takes ``batch_size / processes`` consecutive rows of the global batch
    and cuts them into micro-batches.
    """
    size = batch_size // processes
    for step in itertools.count(first_step):
        indices = step_indices(num_rows, batch_size, step, seed)
        pairs = [(index, step) for index in indices[rank * size : (rank + 1) * size]]
        for start in range(0, size, micro_batch_size):
            yield pairs[start : start + micro_batch_size]


def micro_batch_size(
    batch_size: int, micro_batch_size: int | None, processes: int
) -> int:
    """Images per forward pass of one process. Raises ``ConfigError`` where they do not divide."""
    images, rest = divmod(batch_size, processes)
    size = micro_batch_size or images
    if rest or images % size:
        raise ConfigError(
            f"train.batch_size {batch_size} is not a multiple of {processes} processes times "
            f"train.micro_batch_size {size}"
        )
    return size


def augment(
    pixels: Tensor,
    names: Sequence[str],
    seed: int,
    step: int,
    image_id: str,
) -> Tensor:
    """Augment an image, ``pixels`` [C, S, S] with any number of channels: returns a new
    tensor of the same shape.

    A pure function of the arguments. ``names`` are among these:

    - ``horizontal``, ``vertical``: mirror with probability 1/2.
    - ``transpose``: swap the axes with probability 1/2 (with both mirrors: all eight symmetries of
      a square).
    - ``crop``: cut out a square of 0.75 to 1 of the side and scale it back (bilinear).
    """
    # Not the key of ``scst.rollout.sampling_noise``: sampled captions must not depend on
    # the augmentation.
    generator = row_generator(seed, step, f"augment/{image_id}")
    horizontal, vertical, transpose, crop = generator.random(4)
    if "horizontal" in names and horizontal < 0.5:
        pixels = pixels.flip(-1)
    if "vertical" in names and vertical < 0.5:
        pixels = pixels.flip(-2)
    if "transpose" in names and transpose < 0.5:
        pixels = pixels.transpose(-1, -2)
    if "crop" in names:
        side = pixels.shape[-1]
        size = round(side * (SMALLEST_CROP + (1 - SMALLEST_CROP) * crop))
        top, left = generator.integers(0, side - size + 1, 2)
        window = pixels[None, :, top : top + size, left : left + size]
        (pixels,) = torch.nn.functional.interpolate(
            window, (side, side), mode="bilinear"
        )
    return pixels.clone()


@dataclass
class Collate:
    """Collate rows to a ``CaptionBatch`` on the CPU.

    Args:
        captioner: preprocesses the images and tokenises the references.
        max_target_tokens: length limit of the targets made of the references, EOS
            included; None makes no targets.
        captions_per_image: references per image and step, drawn anew at every step; None takes all.
        augmentations: names of ``augment``, drawn anew at every step. Captions must
            stay true: aerial photos may be mirrored, scenes with a left and a right may
            not.
        seed: random seed of the draws.
    """

    captioner: Captioner
    max_target_tokens: int | None = None
    captions_per_image: int | None = None
    augmentations: Sequence[str] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if "rand_augment" in self.augmentations:
            raise ConfigError("data.augment: rand_augment is for reward models only")
        if self.augmentations and not self.captioner.augmentable:
            raise ConfigError(
                "data.augment is set, and the model's processor cuts images into patches or crops, "
                "which cannot be augmented: leave it out"
            )

    def __call__(self, items: Sequence[tuple[Row, int]]) -> CaptionBatch:
        """Make a batch from (row, step) pairs."""
        rows = [row for row, _ in items]
        inputs = self.captioner.preprocess(rows)
        if self.augmentations and "pixel_values" in inputs:
            augmented = []
            for pixels, (row, step) in zip(inputs["pixel_values"], items, strict=True):
                # The frames of a video become channels, so that all are augmented alike.
                channels = pixels.flatten(0, -3)
                view = augment(
                    channels, self.augmentations, self.seed, step, row["image_id"]
                )
                augmented.append(view.view_as(pixels))
            inputs["pixel_values"] = torch.stack(augmented)
        if self.max_target_tokens is None:
            return CaptionBatch(rows, inputs)
        chosen = [self._choose(row["references"], step) for row, step in items]
        targets = encode_targets(self.captioner, chosen, self.max_target_tokens, rows)
        return CaptionBatch(rows, inputs, *targets)

    def _choose(self, references: list[str], step: int) -> list[str]:
        count = self.captions_per_image
        if count is None or len(references) <= count:
            return references
        order = row_generator(self.seed, step, references[0]).permutation(
            len(references)
        )
        return [references[index] for index in order[:count]]


def encode_targets(
    captioner: Captioner,
    references: list[list[str]],
    max_tokens: int,
    rows: Sequence[Row],
) -> tuple[Tensor, Tensor]:
    """Encode the references of B images: token ids, int64 [B, C, L], and the mask of
    the tokens to learn, bool [B, C, L].

    C is the largest number of references of an image; shorter lists are filled with
    padding. ``rows`` [B] have the prompts.
    """
    encoded = [
        captioner.encode(captions, max_tokens, row)
        for captions, row in zip(references, rows, strict=True)
    ]
    count = max(map(len, encoded))
    flat: list[Tensor] = []
    for sequences in encoded:
        padded = [*sequences, *[[]] * (count - len(sequences))]
        flat += [torch.tensor(ids, dtype=torch.long) for ids in padded]
    shape = (len(encoded), count, -1)
    targets = pad_sequence(flat, True, captioner.pad_token_id).view(shape)
    mask = pad_sequence([ids >= 0 for ids in flat], True).view(shape)
    return targets, mask & ~torch.isin(targets, torch.tensor(captioner.forbidden))


@dataclass
class _MicroBatches(Dataset):
    """Makes a micro-batch of (row index, step) pairs, in a worker or not.

    An error that a user can mend is returned: a ``DataLoader`` would put the traceback
    of the worker into its message.
    """

    rows: Sequence[Row]
    collate: Callable[[Sequence[tuple[Row, int]]], Batch]
    targets: Mapping[str, str]
    """``TARGETS`` of the main process, which a worker may not have."""

    def __getitem__(self, keys: Sequence[tuple[int, int]]) -> Batch | Exception:
        try:
            with errors_of_user_code(self.targets):
                return self.collate([(self.rows[index], step) for index, step in keys])
        except (UserError, RewardError) as error:
            return error
        except OSError as error:  # its class need not survive the way out of a worker
            return DataError(str(error))


@contextmanager
def row_loader(
    rows: Sequence[Row],
    collate: Callable[[Sequence[tuple[Row, int]]], Batch],
    order: Iterator[list[tuple[int, int]]],
    num_workers: int,
) -> Iterator[Iterator[Batch]]:
    """Context manager of an iterator over micro-batches: the (row index, step) pairs of
    ``order``, collated by ``collate`` in ``num_workers`` processes (0: in this one). An
    error of a worker that a user can mend is raised as it is.
    """
    batches: Any = iter(
        DataLoader(
            _MicroBatches(rows, collate, TARGETS),
            batch_size=None,
            sampler=order,  # type: ignore[arg-type]
            num_workers=num_workers,
            # A generator of its own: otherwise every new iterator would advance the global random
            # state.
            generator=torch.Generator(),
            worker_init_fn=_leave_signals_to_the_training,
            pin_memory=torch.cuda.is_available(),
        )
    )
    try:
        yield map(_raise_errors, batches)
    finally:
        if num_workers:
            # They ignore signals: after an error, Python would wait for them for ever.
            batches._shutdown_workers()


def _raise_errors(batch: Batch | Exception) -> Batch:
    if isinstance(batch, Exception):
        raise batch
    return batch


def _leave_signals_to_the_training(worker: int) -> None:
    """Ignore stop signals in workers: a signal to the whole job must not end them while
    the training still saves.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
