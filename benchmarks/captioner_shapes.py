"""Pretrained captioners in their real shapes, with random weights.

    python -m benchmarks.captioner_shapes

Does scoring by teacher forcing give the log-probabilities that captions were sampled with, and does the image matter?
One line a family. Needs 2 GB of memory and no network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from rl_caption.captioners.decoding import Prefixes
from rl_caption.captioners.families import family_of
from rl_caption.captioners.families.base import Conventions
from rl_caption.captioners.hf_policy import HuggingFacePolicy

SAMPLES, TOKENS = 3, 8


def blip() -> Any:
    """BLIP base. Its own initialisation, 1e-10, would leave it blind."""
    config = transformers.BlipConfig(vision_config={"image_size": 384, "initializer_range": 0.02})
    return transformers.BlipForConditionalGeneration(config)


def git() -> Any:
    """GIT base."""
    return transformers.GitForCausalLM(transformers.GitConfig())


def vit_gpt2() -> Any:
    """ViT base and GPT-2."""
    decoder = transformers.GPT2Config(add_cross_attention=True, is_decoder=True)
    pair = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(transformers.ViTConfig(), decoder)
    return transformers.VisionEncoderDecoderModel(pair)


FAMILIES: dict[str, tuple[str, Callable[[], Any], int, int]] = {
    "BLIP base": ("blip", blip, 384, 30522),
    "GIT base": ("git", git, 224, 101),
    "ViT + GPT-2": ("vision-encoder-decoder", vit_gpt2, 224, 50256),
}
"""Name to ``model_type``, model, side of its images, BOS."""


def scores(policy: HuggingFacePolicy, pixel_values: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities [1, K, L] of ``token_ids`` [1, K, L] by teacher forcing."""
    logprobs = policy(pixel_values=pixel_values, token_ids=token_ids).log_softmax(-1)
    return logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def sample(policy: HuggingFacePolicy, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
    """K captions of L tokens of one image, token by token: ids and their log-probabilities, both [1, K, L]."""
    logits, memory = policy(pixel_values=pixel_values, max_tokens=TOKENS)
    logits = logits.expand(SAMPLES, -1)
    image = torch.zeros(SAMPLES, dtype=torch.long)
    tokens, found = [], []
    for position in range(TOKENS):
        logprobs = logits.log_softmax(-1)
        tokens.append(torch.multinomial(logprobs.exp(), 1)[:, 0])
        found.append(logprobs.gather(1, tokens[-1].unsqueeze(1))[:, 0])
        origin = image if position == 0 else None  # all go on from the one image
        logits = policy(prefixes=Prefixes(tokens[-1], origin, image), memory=memory)
    return torch.stack(tokens, 1)[None], torch.stack(found, 1)[None]


@torch.no_grad()
def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    print("family         weights  largest difference of log-probabilities  the same captions, another image  seconds")
    for name, (kind, make, side, bos) in FAMILIES.items():
        model = make()
        conventions = Conventions(start=(bos,), eos=0, pad=0, vocab_size=bos + 2)
        policy = HuggingFacePolicy(model, family_of(kind), conventions).eval()
        started = time.perf_counter()
        pixel_values, other = torch.randn(2, 1, 3, side, side)
        token_ids, sampled = sample(policy, pixel_values)
        difference = (scores(policy, pixel_values, token_ids) - sampled).abs().max()
        moved = (scores(policy, other, token_ids) - sampled).abs().max()
        weights = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        seconds = time.perf_counter() - started
        print(f"{name:12} {weights:7.0f} M {difference:40.1e} {moved:33.2f} {seconds:8.1f}", flush=True)


if __name__ == "__main__":
    main()
