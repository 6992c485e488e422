"""BLIP-2 (Li et al. 2023) and InstructBLIP (Dai et al. 2023) with a decoder-only language model, such as OPT."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.families.base import Conventions, first_token, plain_tokens, tokens_cache


class Blip2:
    """The queries' states stand before BOS in the language model, in the places of the image tokens."""

    name = "BLIP-2"
    model_class = "Blip2ForConditionalGeneration"
    processor_class = "Blip2Processor"
    q_former_tokenizer = False
    cross_attention = False
    never_trained: tuple[str, ...] = ()
    frozen = ("vision_model.*",)
    lora_targets = r"language_model\..*\.(q_proj|v_proj)"

    def check(self, config: Any) -> None:
        """A language model with an encoder of its own (T5) is refused."""
        if not config.use_decoder_only_language_model:
            raise CaptionerError(
                f"this {self.name} has the encoder-decoder language model {config.text_config.model_type!r}: expected "
                "a decoder-only one, such as OPT (Salesforce/blip2-opt-2.7b)"
            )

    def prepare(self, model: Any) -> None:
        """Nothing is changed."""

    def conventions(self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str) -> Conventions:
        """BOS (</s> for OPT), the prompt; EOS is the configuration's, a line break where BLIP-2 was trained on OPT."""
        text = model.config.text_config
        eos = first_token("EOS (text_config.eos_token_id)", text.eos_token_id, tokenizer.eos_token_id)
        return self._conventions(model, tokenizer, prompt, eos)

    def _conventions(
        self, model: Any, tokenizer: Any, prompt: str, eos: int, **prompt_inputs: tuple[int, ...]
    ) -> Conventions:
        config = model.config
        start = tuple(tokenizer("")["input_ids"])[:1] or (
            first_token("BOS (text_config.bos_token_id)", config.text_config.bos_token_id, tokenizer.bos_token_id),
        )
        start += plain_tokens(tokenizer, prompt)
        positions = getattr(config.text_config, "max_position_embeddings", None)
        image_tokens = () if config.image_token_index is None else (config.image_token_index,)
        return Conventions(
            start=start,
            eos=eos,
            pad=first_token("pad_token_id", config.text_config.pad_token_id, tokenizer.pad_token_id, eos),
            vocab_size=config.text_config.vocab_size,
            forbidden=image_tokens if start[0] == eos else (start[0], *image_tokens),
            max_tokens=None if positions is None else positions - config.num_query_tokens - len(start) + 1,
            prompt_inputs=prompt_inputs,
        )

    def text_model(self, model: Any) -> Any:
        """The language model."""
        return model.language_model

    def cache(self, room: int | None) -> Cache:
        """Queries, then text."""
        return tokens_cache(room)

    def encode(self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor) -> Tensor:
        """The queries' states [B, Q, D], projected to the width of the language model."""
        return model.get_image_features(pixel_values, return_dict=True).pooler_output

    def decode(self, model: Any, states: Tensor, token_ids: Tensor, cache: Cache | None) -> Tensor:
        """The language model's logits of the text positions."""
        hidden = model.language_model.get_input_embeddings()(token_ids)
        if cache is None or cache.get_seq_length() == 0:
            hidden = torch.cat([states.to(hidden.dtype), hidden], dim=1)
        output = model.language_model(
            inputs_embeds=hidden,
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=token_ids.shape[1],
        )
        return output.logits


class InstructBlip(Blip2):
    """As BLIP-2, and the Q-Former reads the prompt, so what it takes from the image depends on it."""

    name = "InstructBLIP"
    model_class = "InstructBlipForConditionalGeneration"
    processor_class = "InstructBlipProcessor"
    q_former_tokenizer = True

    def conventions(self, model: Any, tokenizer: Any, q_former_tokenizer: Any, prompt: str) -> Conventions:
        """EOS is the tokenizer's: the token ids of InstructBLIP's configurations do not fit its tokenizers."""
        eos = first_token("EOS (eos_token_id)", tokenizer.eos_token_id, model.config.text_config.eos_token_id)
        reads = tuple(q_former_tokenizer(prompt)["input_ids"])
        return self._conventions(model, tokenizer, prompt, eos, qformer_input_ids=reads)

    def encode(self, model: Any, pixel_values: Tensor, **prompt_inputs: Tensor) -> Tensor:
        """The queries' states [B, Q, D] with the prompt ``qformer_input_ids`` [B, T], projected."""
        return model.get_image_features(pixel_values, **prompt_inputs, return_dict=True).pooler_output


BLIP2 = Blip2()
INSTRUCT_BLIP = InstructBlip()
