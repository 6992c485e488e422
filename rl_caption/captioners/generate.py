"""Sampling by Transformers' own ``generate``; this module chooses the tokens."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from rl_caption.captioners.base import Captioner, Inputs
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.decoding import constrain, draw_tokens
from rl_caption.captioners.tokens import forbid


@torch.no_grad()
def generate(model: Any, row: Inputs, options: Mapping[str, Any], **how: Any) -> Any:
    """Call the model's ``generate`` for several captions of one image.

    ``options`` are number and length of the captions, and special tokens; ``how`` are
    arguments that leave one token at each step. Nothing is taken from the model's
    generation settings, and no random number from torch's generators.
    """
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    devices = [model.device] if model.device.type == "cuda" else []
    saved = model.generation_config
    model.generation_config = GenerationConfig()
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices):
            return model.generate(**row, generation_config=config, **how)
    finally:
        model.generation_config = saved
        transformers.logging.set_verbosity(level)


def sample(
    captioner: Captioner, row: Inputs, decoding: Decoding, noise: Tensor | None
) -> Tensor:
    """Captions [1, R, T] of one image by ``generate``: K samples by ``noise`` [1, K,
    L], and the greedy caption.
    """
    policy: Any = captioner.policy
    drawn = decoding.num_samples
    steps = itertools.count()

    def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
        """Leave one token of each caption. Every token is drawn with its own random
        number, as in ``decoding``: so samples are a function of (seed, step, image)
        here, too.
        """
        step = next(steps)
        logits = forbid(scores, captioner.forbidden)
        tokens = input_ids[:, input_ids.shape[1] - step :]
        logits = constrain(captioner, decoding, tokens, logits)
        chosen = logits.argmax(-1, keepdim=True)
        if noise is not None:
            numbers = noise[0, :, step, None]
            best = chosen[:drawn]
            chosen[:drawn] = draw_tokens(logits[:drawn], numbers, decoding, best)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)

    options = {
        "num_return_sequences": decoding.captions_per_image,
        "max_new_tokens": decoding.max_new_tokens,
        "eos_token_id": captioner.eos_token_id,
        "pad_token_id": captioner.pad_token_id,
    }
    chosen_here = LogitsProcessorList([choose])
    output = generate(policy.model, row, options, logits_processor=chosen_here)
    length = len(output.logits)
    assert next(steps) == length, "its generate takes no logits_processor"
    captions: Tensor = output.sequences[None, :, -length:]
    return captions
