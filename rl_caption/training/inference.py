"""Captions for the rows of a split, over one or several processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from tqdm import tqdm

from rl_caption.captioners.base import Captioner, Decoding
from rl_caption.data.base import Row
from rl_caption.training.accumulation import dropout_off
from rl_caption.training.distributed.engines import autocast


def caption_rows(
    captioner: Captioner,
    policy: nn.Module,
    rows: Sequence[Row],
    decoding: Decoding,
    batch_size: int,
    accelerator: Accelerator,
    progress: str | None = None,
) -> dict[str, str]:
    """The captions of ``decode_rows``: image id -> caption."""
    decoded = decode_rows(captioner, policy, rows, decoding, batch_size, accelerator, progress)
    return {image_id: caption for image_id, (caption, _) in decoded.items()}


def decode_rows(
    captioner: Captioner,
    policy: nn.Module,
    rows: Sequence[Row],
    decoding: Decoding,
    batch_size: int,
    accelerator: Accelerator,
    progress: str | None = None,
) -> dict[str, tuple[str, bool]]:
    """Decode one caption for each row: greedy, or by beam search where ``decoding.num_beams`` is above 1.

    Every process decodes its share and gets all captions back, ordered as ``rows``.

    Args:
        captioner: the seam to the model.
        policy: the model itself.
        rows: what to caption.
        decoding: ``num_samples`` must be 0.
        batch_size: images at a time, in each process.
        accelerator: tells the device and the processes.
        progress: description of a progress bar, shown on a terminal.

    Returns:
        image id -> caption, and whether it ended with EOS before the length limit.
    """
    if decoding.num_samples:
        raise ValueError("decoding.num_samples must be 0: one caption for each image")
    mine = range(accelerator.process_index, len(rows), accelerator.num_processes)
    starts = range(0, len(mine), batch_size)
    bar = tqdm(
        starts,
        desc=progress,
        unit="batch",
        disable=progress is None or not accelerator.is_main_process or not sys.stderr.isatty(),
    )
    pairs: list[tuple[str, tuple[str, bool]]] = []
    with torch.no_grad(), dropout_off(policy), autocast(accelerator):
        for start in bar:
            batch = [rows[index] for index in mine[start : start + batch_size]]
            inputs = {key: value.to(accelerator.device) for key, value in captioner.preprocess(batch).items()}
            token_ids = captioner.generate(policy, inputs, decoding, None)
            captions = captioner.decode(token_ids[:, 0])
            finished = (token_ids[:, 0] == captioner.eos_token_id).any(-1).tolist()
            decoded = zip(captions, finished, strict=True)
            pairs += [(row["image_id"], pair) for row, pair in zip(batch, decoded, strict=True)]
    gathered = dict(gather_object(pairs) if accelerator.num_processes > 1 else pairs)
    return {row["image_id"]: gathered[row["image_id"]] for row in (rows[i] for i in range(len(rows)))}
