"""One decode for the K samples and the greedy caption of every image, with a KV cache and the image encoded once."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_caption.captioners.base import Decoding, forbid, sample_tokens
from rl_caption.captioners.modeling import CaptionTransformer


@torch.no_grad()
def decode_captions(
    policy: CaptionTransformer, inputs: dict[str, Tensor], decoding: Decoding, noise: Tensor | None
) -> Tensor:
    """Sample K captions and decode the greedy one of each of B images, side by side.

    Args:
        policy: the model, in eval mode if dropout is to be off.
        inputs: the encoder's inputs, B rows.
        decoding: K, temperature, length limit L.
        noise: [B, K, L] uniform numbers in [0, 1), one for each token that is sampled.

    Returns:
        Token ids [B, K (+ 1), T], T <= L: samples, then the greedy caption; padded after EOS.
    """
    config = policy.config
    if decoding.num_samples and noise is None:
        raise ValueError("sampling needs noise [B, K, L]: one uniform number for each token")
    encoded = policy.encoder(**inputs)
    batch, samples, rows = encoded[0].shape[0], decoding.num_samples, decoding.captions_per_image
    tokens = torch.full((batch * rows, 1), config.bos_token_id, device=encoded[0].device)
    finished = torch.zeros(batch * rows, dtype=torch.bool, device=tokens.device)
    cache, generated = None, []
    for position in range(decoding.max_new_tokens):
        output = policy(
            region_mask=inputs.get("region_mask"),
            encoder_outputs=encoded,
            decoder_input_ids=tokens,
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        logits = forbid(output.logits[:, -1], config.forbidden_token_ids).unflatten(0, (batch, rows))
        chosen = logits.argmax(-1)
        if noise is not None and samples:
            drawn = sample_tokens(
                logits[:, :samples].flatten(0, 1), noise[:, :, position].flatten(), decoding.temperature
            )
            chosen[:, :samples] = drawn.unflatten(0, (batch, samples))
        flat = chosen.flatten().masked_fill(finished, config.pad_token_id)
        generated.append(flat)
        finished = finished | (flat == config.eos_token_id)
        if finished.all():
            break
        tokens = flat.unsqueeze(1)
    return torch.stack(generated, -1).unflatten(0, (batch, rows))
