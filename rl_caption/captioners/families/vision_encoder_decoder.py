"""``VisionEncoderDecoderModel``: an image encoder (ViT, ...) and a language model with cross-attention (GPT-2, ...)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from rl_caption.captioners.families.base import Conventions, first_token, plain_tokens, tokens_cache
from rl_caption.captioners.side_by_side import SharedImageCache, share_images


class VisionEncoderDecoder:
    """Captions start with ``decoder_start_token_id``; GPT-2 starts, ends and pads with one and the same token."""

    name = "VisionEncoderDecoder"
    model_class = "VisionEncoderDecoderModel"
    processor_class = None
    q_former_tokenizer = False
    cross_attention = True
    never_trained = ("encoder.pooler.*",)
    frozen = ()
    lora_targets = r"decoder\..*\.(c_attn|q_attn|query|value|q_proj|v_proj)"

    def check(self, config: Any) -> None:
        """Every pair of encoder and decoder is taken."""

    def prepare(self, model: Any) -> None:
        """Captions share an image."""
        share_images(model.decoder)

    def conventions(self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str) -> Conventions:
        """What the pair's configuration says, then its generation settings, its decoder, its tokenizer."""
        sources = (model.config, model.generation_config, model.config.decoder)

        def named(key: str) -> list[int | list[int] | None]:
            return [getattr(source, key, None) for source in sources]

        bos = first_token(
            "decoder_start_token_id", *named("decoder_start_token_id"), *named("bos_token_id"), tokenizer.bos_token_id
        )
        eos = first_token("eos_token_id", *named("eos_token_id"), tokenizer.eos_token_id)
        start = (bos, *plain_tokens(tokenizer, prompt))
        positions = getattr(model.config.decoder, "max_position_embeddings", None)
        return Conventions(
            start=start,
            eos=eos,
            pad=first_token("pad_token_id", *named("pad_token_id"), tokenizer.pad_token_id, eos),
            vocab_size=model.config.decoder.vocab_size,
            forbidden=() if bos == eos else (bos,),
            max_tokens=None if positions is None else positions - len(start) + 1,
        )

    def text_model(self, model: Any) -> Any:
        """The decoder."""
        return model.decoder

    def cache(self, room: int | None) -> Cache:
        """Self-attention, and the image's keys and values for cross-attention."""
        return SharedImageCache(tokens_cache(room), DynamicCache())

    def encode(self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor) -> Tensor:
        """States of the encoder, projected to the decoder's width where the two differ."""
        states = model.encoder(pixel_values=pixel_values).last_hidden_state
        return model.enc_to_dec_proj(states) if hasattr(model, "enc_to_dec_proj") else states

    def decode(self, model: Any, states: Tensor, token_ids: Tensor, cache: Cache | None) -> Tensor:
        """The decoder's logits."""
        output = model.decoder(
            input_ids=token_ids, encoder_hidden_states=states, past_key_values=cache, use_cache=cache is not None
        )
        return output.logits


VISION_ENCODER_DECODER = VisionEncoderDecoder()
