"""Sampling: K captions of each image, and the greedy one where the baseline needs it, in one decode."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rl_caption.captioners.base import Captioner, Decoding, Generate, caption_mask
from rl_caption.data.order import row_generator
from rl_caption.types import CaptionBatch, Rollout


def sampling_noise(seed: int, step: int, image_ids: Sequence[str], num_samples: int, length: int) -> Tensor:
    """Uniform numbers in [0, 1) for the samples of each image: [B, K, L] float32.

    A pure function of (seed, step, image id): the same captions are sampled however the images are spread over
    micro-batches and processes, and a resumed run needs no random state for them.
    """
    noise = np.empty((len(image_ids), num_samples, length), dtype=np.float32)
    for row, image_id in enumerate(image_ids):
        noise[row] = row_generator(seed, step, image_id).random((num_samples, length), dtype=np.float32)
    return torch.from_numpy(noise)


@torch.no_grad()
def sample_captions(
    captioner: Captioner,
    policy: nn.Module,
    batch: CaptionBatch,
    decoding: Decoding,
    seed: int,
    step: int,
    generate: Generate | None = None,
) -> Rollout:
    """Draw K captions of each of B images (and the greedy ones, if ``decoding`` asks for them) from ``policy``.

    Args:
        generate: in place of the captioner's own, such as ``captioners.replay.ReplayedGenerate``.

    Returns:
        A ``Rollout`` whose tensors lie on the device of ``batch``.
    """
    samples = decoding.num_samples
    noise = sampling_noise(seed, step, batch.image_ids, samples, decoding.max_new_tokens)
    device = next(iter(batch.inputs.values())).device
    token_ids = (generate or captioner.generate)(policy, batch.inputs, decoding, noise.to(device))
    finished = (token_ids == captioner.eos_token_id).any(-1)
    texts = captioner.decode(token_ids.flatten(0, 1))
    rows = decoding.captions_per_image
    grouped = [texts[start : start + rows] for start in range(0, len(texts), rows)]
    sampled = token_ids[:, :samples]
    return Rollout(
        token_ids=sampled,
        mask=caption_mask(sampled, captioner.eos_token_id),
        finished=finished[:, :samples],
        texts=[group[:samples] for group in grouped],
        greedy_texts=[group[samples] for group in grouped] if decoding.with_greedy else None,
        greedy_finished=finished[:, samples] if decoding.with_greedy else None,
    )
