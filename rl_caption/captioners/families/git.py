"""GIT (Wang et al. 2022): one Transformer over image patches and text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.families.base import Conventions, first_token, plain_tokens, same_token, tokens_cache


class Git:
    """``GitForCausalLM``: captions start with [CLS] and end with [SEP].

    Transformers' forward pass encodes the image anew for every row and has no way to hand it image states, so its parts
    are called one by one: projected patches, then text; patches see each other, text sees patches and earlier text.
    """

    name = "GIT"
    model_class = "GitForCausalLM"
    processor_class = "GitProcessor"
    q_former_tokenizer = False
    cross_attention = False
    never_trained = ("git.img_temporal_embedding.*",)
    frozen = ()
    lora_targets = r"git\.encoder\..*\.(query|value)"

    def check(self, config: Any) -> None:
        """Every image captioner is known; one of videos is refused."""
        if config.num_image_with_embedding is not None:
            raise CaptionerError(
                f"this GIT reads videos of {config.num_image_with_embedding} frames (num_image_with_embedding): "
                "expected one that reads images"
            )

    def prepare(self, model: Any) -> None:
        """Nothing is changed."""

    def conventions(self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str) -> Conventions:
        """[CLS], the prompt; EOS is [SEP]."""
        config = model.config
        start = (
            first_token("BOS (bos_token_id)", config.bos_token_id, tokenizer.cls_token_id),
            *plain_tokens(tokenizer, prompt),
        )
        return Conventions(
            start=start,
            eos=same_token("EOS (eos_token_id)", config.eos_token_id, tokenizer.sep_token_id),
            pad=first_token("padding (pad_token_id)", config.pad_token_id, tokenizer.pad_token_id),
            vocab_size=config.vocab_size,
            forbidden=(start[0],),
            max_tokens=config.max_position_embeddings - len(start) + 1,
        )

    def text_model(self, model: Any) -> Any:
        """The whole model: it has one Transformer."""
        return model

    def cache(self, room: int | None) -> Cache:
        """Patches, then text."""
        return tokens_cache(room)

    def encode(self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor) -> Tensor:
        """Patches projected to the width of the text."""
        return model.git.visual_projection(model.git.image_encoder(pixel_values).last_hidden_state)

    def decode(self, model: Any, states: Tensor, token_ids: Tensor, cache: Cache | None) -> Tensor:
        """Logits of the text positions."""
        length, patches = token_ids.shape[1], states.shape[1]
        past = cache.get_seq_length() if cache is not None else 0
        first = max(past - patches, 0)  # text is numbered from 0, patches are not
        positions = torch.arange(first, first + length, device=token_ids.device).unsqueeze(0)
        hidden = model.git.embeddings(input_ids=token_ids, position_ids=positions)
        if past == 0:
            hidden = torch.cat([states.to(hidden.dtype), hidden], dim=1)
        new, total = hidden.shape[1], past + hidden.shape[1]
        seen = torch.ones(new, total, dtype=torch.bool, device=hidden.device).tril(total - new)
        seen[:, :patches] = True
        mask = torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device)
        mask = mask.masked_fill(~seen, torch.finfo(hidden.dtype).min)[None, None]
        output = model.git.encoder(hidden, attention_mask=mask, past_key_values=cache, use_cache=cache is not None)
        return model.output(output.last_hidden_state[:, -length:])


GIT = Git()
