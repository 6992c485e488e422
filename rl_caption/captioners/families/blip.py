"""BLIP (Li et al. 2022): a ViT and a BERT-like decoder with cross-attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from rl_caption.captioners.families.base import Conventions, first_token, plain_tokens, same_token, tokens_cache
from rl_caption.captioners.families.blip_attention import fuse_attention
from rl_caption.captioners.side_by_side import SharedImageCache, share_images


class Blip:
    """``BlipForConditionalGeneration``: captions start with [DEC], not with [CLS], and end with [SEP]."""

    name = "BLIP"
    model_class = "BlipForConditionalGeneration"
    processor_class = "BlipProcessor"
    q_former_tokenizer = False
    cross_attention = True
    never_trained = ()
    frozen = ()
    lora_targets = r"text_decoder\..*\.(query|value)"

    def check(self, config: Any) -> None:
        """Every BLIP captioner is known."""

    def prepare(self, model: Any) -> None:
        """Captions share an image; attention is fused."""
        share_images(model.text_decoder)
        fuse_attention(model)

    def conventions(self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str) -> Conventions:
        """[DEC] (``bos_token_id``, beyond BERT's vocabulary), the prompt; EOS is ``sep_token_id``.

        ``eos_token_id`` (2) of BLIP's configurations is an unused token, as in Transformers' own ``generate``.
        """
        text = model.config.text_config
        start = (first_token("BOS (text_config.bos_token_id)", text.bos_token_id), *plain_tokens(tokenizer, prompt))
        return Conventions(
            start=start,
            eos=same_token("EOS (text_config.sep_token_id)", text.sep_token_id, tokenizer.sep_token_id),
            pad=first_token("padding (text_config.pad_token_id)", text.pad_token_id, tokenizer.pad_token_id),
            vocab_size=text.vocab_size,
            forbidden=(start[0],),
            max_tokens=text.max_position_embeddings - len(start) + 1,
        )

    def text_model(self, model: Any) -> Any:
        """The decoder."""
        return model.text_decoder

    def cache(self, room: int | None) -> Cache:
        """Self-attention, and the image's keys and values for cross-attention."""
        return SharedImageCache(tokens_cache(room), DynamicCache())

    def encode(self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor) -> Tensor:
        """States of the ViT."""
        return model.vision_model(pixel_values=pixel_values).last_hidden_state

    def decode(self, model: Any, states: Tensor, token_ids: Tensor, cache: Cache | None) -> Tensor:
        """The text decoder's logits."""
        output = model.text_decoder(
            input_ids=token_ids, encoder_hidden_states=states, past_key_values=cache, use_cache=cache is not None
        )
        return output.logits


BLIP = Blip()
