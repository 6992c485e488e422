"""A decoder-only vision-language model as one module: an image and its prompt are computed once for all captions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rl_caption.captioners.decoding import Prefixes
from rl_caption.captioners.hf_families import Conventions
from rl_caption.captioners.hf_policy import last_hidden, output_of, scored_rows
from rl_caption.captioners.packed import CACHE, preallocated_cache
from rl_caption.captioners.vlm_families import VisionLanguageFamily

FEATURES = "features/"
"""Prefix of the names of visual tokens among the inputs of a batch."""
ENCODED = "mm_encoder_outputs"
"""Argument by which Transformers' models take visual tokens in place of pixels; older versions and some models have
none, and encode their images in every pass."""
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Inputs [B, P] with a column for each token of the prompt."""


class PromptLayer(DynamicLayer):
    """Keys and values [B, H, P, D/H] of the prompts in one layer.

    They are kept with their gradient, and once: with recomputed activations the layer runs again in the backward pass.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        return key_states, value_states


class CaptionLayer(DynamicLayer):
    """Lets M captions read the keys and values of their prompts, ``prompt`` [M]; stores nothing."""

    def __init__(self, prompts: DynamicLayer, prompt: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.prompt, self.is_initialized = prompts.keys, prompts.values, prompt, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        keys, values = self.keys.index_select(0, self.prompt), self.values.index_select(0, self.prompt)
        return torch.cat([keys, key_states], dim=-2), torch.cat([values, value_states], dim=-2)


@dataclass
class PromptState:
    """What N rows have read so far: first the prompts of B images, then also tokens of captions.

    Attributes:
        cache: keys and values.
        mask: [N, S], False where a prompt is padded.
        position: [N] of the next token.
    """

    cache: Any
    mask: Tensor
    position: Tensor

    def select(self, parent: Tensor | None) -> None:
        """Reorder the rows to the parents [M] of the next ones; None leaves them."""
        if parent is not None:
            self.cache.batch_select_indices(parent)
            self.mask, self.position = self.mask[parent], self.position[parent]

    def captions(self, prompt: Tensor) -> PromptState:
        """The state of M captions, which read the prompts ``prompt`` [M]; several passes may share this one."""
        layers: list[Any] = [CaptionLayer(layer, prompt) for layer in self.cache.layers]
        return PromptState(Cache(layers=layers), self.mask[prompt], self.position[prompt])


class VisionLanguagePolicy(nn.Module):
    """A decoder-only model of Transformers with its family and its special tokens.

    Image and prompt are computed once: a decode copies their keys and values for each caption, and scoring lets the
    captions read them, with gradient. Positions and masks are passed to every call, so that nothing depends on what
    the module remembers of other batches (``rope_deltas`` of Qwen's models). All passes go through ``forward``, so that
    wrappers of the module (DDP, FSDP, ZeRO) see them.
    """

    def __init__(self, model: Any, family: VisionLanguageFamily, conventions: Conventions) -> None:
        super().__init__()
        self.model: Any = model
        self.family, self.conventions = family, conventions
        self.share_prefix = True
        """As in ``HuggingFacePolicy``; recomputed activations change nothing here."""
        self.takes_features = hasattr(model.base_model, "get_image_features") and all(
            ENCODED in inspect.signature(module.forward).parameters for module in (model, model.base_model)
        )
        """Whether the model takes visual tokens in place of pixels."""

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    def forward(
        self,
        token_ids: Tensor | None = None,
        mask: Tensor | None = None,
        encode: bool = False,
        max_tokens: int = 0,
        decode_state: PromptState | None = None,
        prefixes: Prefixes | None = None,
        **inputs: Tensor,
    ) -> Any:
        """Encode images, score captions, start a decode, or continue it.

        Args:
            inputs: of B images and prompts; prompts are padded on the left. Visual tokens, as ``encode`` returns them,
                stand in place of pixels.
            encode: only encode the images.
            token_ids: captions [B, K, L] to score.
            mask: [B, K, L], True for the positions to score; all by default.
            max_tokens: length limit of a decode that is started; the cache gets memory for it.
            decode_state, prefixes: the decode to continue, and its M prefixes.

        Returns:
            Encode: the visual tokens, by names that ``inputs`` takes. Score: logits [B, K, L, V], or [P, V] of the P
            positions where ``mask`` is True. Start: logits [B, V] of the first token, and a ``PromptState``. Continue:
            logits [M, V] of the next tokens.
        """
        if decode_state is not None:
            assert prefixes is not None
            decode_state.select(prefixes.parent)
            return self._read(decode_state, prefixes.tokens.unsqueeze(1))[:, -1]
        if encode:
            return self._encode(inputs)
        if token_ids is None:
            with output_of(self.model, last_hidden):
                return self._begin(inputs, preallocated_cache(inputs["input_ids"].shape[1] + max_tokens))
        return self._score(inputs, token_ids, mask)

    def _encode(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        read = self.model.base_model.get_image_features
        names = inspect.signature(read).parameters.keys() & inputs.keys()
        output = read(**{name: inputs[name] for name in names}, return_dict=True)
        features: dict[str, Tensor] = {}
        for name in ("pooler_output", "deepstack_features"):
            tensors = getattr(output, name, None)
            if isinstance(tensors, Tensor):
                features[f"{FEATURES}{name}"] = tensors
            elif tensors is not None:
                features |= {f"{FEATURES}{name}.{number}": tensor for number, tensor in enumerate(tensors)}
        return features

    def _begin(self, inputs: dict[str, Tensor], cache: Cache) -> tuple[Tensor, PromptState]:
        """Logits [B, V] after the prompts, whose keys and values go into ``cache``."""
        positions = self.family.positions(self.model, inputs)
        features = dict(_features(inputs))
        arguments: dict[str, Any] = {name: inputs[name] for name in inputs if not name.startswith(FEATURES)}
        if features:
            arguments = {name: value for name, value in arguments.items() if not name.startswith("pixel_")}
            output: Any = BaseModelOutputWithPooling()
            for name, value in features.items():
                setattr(output, name, value)
            arguments[ENCODED] = {"image": output}
        output = self.model(**arguments, position_ids=positions, use_cache=True, **{CACHE: cache})
        following = positions.amax(-1) if positions.ndim == 2 else positions.amax((0, 2))
        return output.logits[:, -1], PromptState(cache, inputs["attention_mask"].bool(), following + 1)

    def _read(self, state: PromptState, token_ids: Tensor) -> Tensor:
        """Logits [N, T, V] after each of the next tokens [N, T]; ``state`` goes on to the token after them."""
        length = token_ids.shape[1]
        state.mask = torch.cat([state.mask, state.mask.new_ones(token_ids.shape)], dim=1)
        positions = state.position.unsqueeze(1) + torch.arange(length, device=token_ids.device)
        state.position = state.position + length
        output = self.model(
            input_ids=token_ids,
            attention_mask=state.mask,
            position_ids=self.family.text_positions(self.model, positions),
            use_cache=True,
            **{CACHE: state.cache},
        )
        return output.logits

    def _score(self, inputs: dict[str, Tensor], token_ids: Tensor, mask: Tensor | None) -> Tensor:
        captions, length = token_ids.shape[1:]
        flat, scored, rows = scored_rows(token_ids, mask)
        image = rows // captions
        first: list[Tensor] = []

        def keep_last(hidden: Tensor) -> Tensor:
            first.append(last_hidden(hidden))
            return first[0]

        def of_captions(hidden: Tensor) -> Tensor:
            hidden = torch.cat([first[0][image], hidden], dim=1)
            return hidden if scored is None else hidden[scored]

        with output_of(self.model, keep_last):
            logits, state = self._begin(inputs, Cache(layer_class_to_replicate=PromptLayer))
        if length == 1:
            logits = logits.unsqueeze(1).expand(-1, captions, -1).unsqueeze(2)
            return logits if mask is None else logits[mask]
        with output_of(self.model, of_captions):
            logits = self._read(state.captions(image), flat[rows, :-1])
        return logits if mask is not None else logits.unflatten(0, token_ids.shape[:2])


def _features(inputs: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """Visual tokens as the attributes of Transformers' output: a tensor, or a list of one for each image or layer."""
    lists: dict[str, list[Tensor]] = {}
    for key, tensor in inputs.items():
        if key.startswith(FEATURES):
            name, _, number = key.removeprefix(FEATURES).partition(".")
            if number:
                lists.setdefault(name, []).append(tensor)
            else:
                yield name, tensor
    yield from lists.items()
