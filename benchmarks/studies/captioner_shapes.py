"""Pretrained captioners in their real shapes, with random weights (docs/captioners.md).

    python -m benchmarks.studies.captioner_shapes

One line for each family: does scoring by teacher forcing give the log-probabilities that captions were sampled with,
and does the image matter? Needs 2 GB of memory and no network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.hf_step import blip, vit_gpt2
from rl_caption.captioners import hf_families
from rl_caption.captioners.decoding import Prefixes
from rl_caption.captioners.hf_families import Conventions
from rl_caption.captioners.hf_policy import HuggingFacePolicy

SAMPLES, TOKENS = 3, 8


def git() -> Any:
    """GIT base."""
    return transformers.GitForCausalLM(transformers.GitConfig())


FAMILIES: dict[str, tuple[str, Callable[[], Any], int, int]] = {
    "BLIP base": ("blip", blip, 384, 30522),
    "GIT base": ("git", git, 224, 101),
    "ViT + GPT-2": ("vision-encoder-decoder", vit_gpt2, 224, 50256),
}
"""Name -> ``model_type``, model, pixels of an image's side, BOS."""


def teacher_forced(policy: HuggingFacePolicy, pixel_values: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probabilities [1, K, L] of ``token_ids`` [1, K, L]."""
    logprobs = policy(pixel_values=pixel_values, token_ids=token_ids).log_softmax(-1)
    return logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def sample(policy: HuggingFacePolicy, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
    """K captions of L tokens of one image, token by token: ids and their log-probabilities, both [1, K, L]."""
    logits, state = policy(pixel_values=pixel_values, max_tokens=TOKENS)
    logits = logits.expand(SAMPLES, -1)
    image = torch.zeros(SAMPLES, dtype=torch.long)
    tokens, found = [], []
    for position in range(TOKENS):
        logprobs = logits.log_softmax(-1)
        tokens.append(torch.multinomial(logprobs.exp(), 1)[:, 0])
        found.append(logprobs.gather(1, tokens[-1].unsqueeze(1))[:, 0])
        origin = image if position == 0 else None  # all continue the one prompt
        logits = policy(prefixes=Prefixes(tokens[-1], origin, image), decode_state=state)
    return torch.stack(tokens, 1)[None], torch.stack(found, 1)[None]


@torch.no_grad()
def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    print("family         weights  largest difference of log-probabilities  the same captions, another image  seconds")
    for name, (kind, make, side, bos) in FAMILIES.items():
        model = make()
        policy = HuggingFacePolicy(
            model, hf_families.FAMILIES[kind], Conventions(start=(bos,), eos=0, pad=0, vocab_size=bos + 2)
        )
        policy.eval()
        started = time.perf_counter()
        pixel_values, other = torch.randn(2, 1, 3, side, side)
        token_ids, sampled = sample(policy, pixel_values)
        difference = (teacher_forced(policy, pixel_values, token_ids) - sampled).abs().max()
        moved = (teacher_forced(policy, other, token_ids) - sampled).abs().max()
        weights = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        seconds = time.perf_counter() - started
        print(f"{name:12} {weights:7.0f} M {difference:40.1e} {moved:33.2f} {seconds:8.1f}", flush=True)


if __name__ == "__main__":
    main()
