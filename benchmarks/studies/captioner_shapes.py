"""Pretrained captioners in their real shapes, with random weights (docs/captioners.md).

    python -m benchmarks.studies.captioner_shapes

One line for each family: does scoring by teacher forcing give the log-probabilities that captions were sampled with,
and does the image matter? Needs 2 GB of memory and no network.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

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


@torch.no_grad()
def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    print(
        "family         weights  largest difference of log-probabilities  the same captions, another image  seconds"
    )
    for name, (kind, make, side, bos) in FAMILIES.items():
        model = make()
        conventions = Conventions(start=(bos,), eos=0, pad=0, vocab_size=bos + 2)
        policy = HuggingFacePolicy(model, hf_families.FAMILIES[kind], conventions).eval()
        started = time.perf_counter()
        images = torch.randn(2, 1, 3, side, side)
        logits, state = policy(pixel_values=images[0], max_tokens=TOKENS)
        logits, image = logits.expand(SAMPLES, -1), torch.zeros(SAMPLES, dtype=torch.long)
        tokens, sampled = [], []
        for position in range(TOKENS):
            logprobs = logits.log_softmax(-1)
            tokens.append(torch.multinomial(logprobs.exp(), 1))
            sampled.append(logprobs.gather(1, tokens[-1]))
            origin = image if position == 0 else None  # all continue the one prompt
            logits = policy(prefixes=Prefixes(tokens[-1][:, 0], origin, image), decode_state=state)
        token_ids = torch.cat(tokens, 1)[None]
        moved = [
            policy(pixel_values=pixels, token_ids=token_ids)
            .log_softmax(-1)
            .gather(-1, token_ids.unsqueeze(-1))
            for pixels in images
        ]
        difference, other = (
            (found.squeeze(-1) - torch.cat(sampled, 1)).abs().max() for found in moved
        )
        weights = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        seconds = time.perf_counter() - started
        print(
            f"{name:12} {weights:7.0f} M {difference:40.1e} {other:33.2f} {seconds:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
