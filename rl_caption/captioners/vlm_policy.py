"""A decoder-only vision-language model as one module: an image and its prompt are computed once for
all captions.
"""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rewards.files import CheckedFiles
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.decoding import Prefixes
from rl_caption.captioners.hf_families import Conventions
from rl_caption.captioners.hf_policy import last_hidden, output_of, score_after_prompt
from rl_caption.captioners.packed import CACHE, preallocated_cache
from rl_caption.captioners.vlm_families import VisionLanguageFamily
from rl_caption.runtime.engines import dropout_off

FEATURES = "features/"
"""Prefix of the names of visual tokens among the inputs of a batch."""
ENCODED = "mm_encoder_outputs"
"""Argument by which Transformers' models take visual tokens in place of pixels; older versions and
some models have none, and encode their images in every pass.
"""
TOKENS, LAYERS = "pooler_output", "deepstack_features"
"""Names in Transformers' output: visual tokens, a tensor or a list with one for each image; and
those of several layers of the tower, a list with one for each layer, or with a list for each layer.
"""
IMAGE = "image/"
"""Prefix of the names of the inputs of one row's images, ``image/ROW/NAME``, where rows are encoded
one by one.
"""
IMAGE_KEY = "image_key"
"""Name of [B, 2]: 128 bits for each row, a hash of the inputs of its images."""
PIXELS = "pixel_"
"""Prefix of the names of inputs that only the vision tower reads."""
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Inputs [B, P] with a column for each token of the prompt."""


class PromptLayer(DynamicLayer):
    """Keys and values [B, H, P, D/H] of the prompts in one layer.

    They are kept with their gradient, and once: with recomputed activations the layer runs again in
    the backward pass.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
        return key_states, value_states


class CaptionLayer(DynamicLayer):
    """Lets M captions read the keys and values of their prompts, ``prompt`` [M]; stores nothing."""

    def __init__(self, prompts: DynamicLayer, prompt: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.prompt, self.is_initialized = (
            prompts.keys,
            prompts.values,
            prompt,
            True,
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        keys, values = (
            self.keys.index_select(0, self.prompt),
            self.values.index_select(0, self.prompt),
        )
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
        """The state of M captions, which read the prompts ``prompt`` [M]; several passes may share
        this one.
        """
        layers: list[Any] = [CaptionLayer(layer, prompt) for layer in self.cache.layers]
        return PromptState(Cache(layers=layers), self.mask[prompt], self.position[prompt])


class TensorCache:
    """Named tensors by key: in memory up to ``room`` bytes, and on disk those that ``keep_on_disk``
    is for.

    A full cache evicts nothing (``rewards.clip.encoder.EmbeddingCache`` says why). Copies of a
    policy share it.
    """

    def __init__(self) -> None:
        self.room = 0
        self.entries: dict[str, dict[str, Tensor]] = {}
        self.files: CheckedFiles | None = None

    def __deepcopy__(self, memo: Any) -> TensorCache:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the tensors in memory."""
        return {**self.__dict__, "entries": {}}

    @property
    def enabled(self) -> bool:
        """Whether anything is ever kept."""
        return self.room > 0 or bool(self.entries) or self.files is not None

    def keep_on_disk(self, folder: Path, max_bytes: int) -> None:
        """Use a folder, too, for what is written with ``on_disk``."""
        self.files = CheckedFiles(folder, "visual token", ".tokens", max_bytes)

    def read(self, key: str, on_disk: bool = False) -> dict[str, Tensor] | None:
        """The tensors of a key, on the CPU, or None."""
        tensors = self.entries.get(key)
        if tensors is None and on_disk and self.files is not None:
            content = self.files.read(_file_key(key))
            if content is not None:
                tensors = load(content)
                self._remember(key, tensors)
        return tensors

    def write(self, key: str, tensors: dict[str, Tensor], on_disk: bool = False) -> None:
        """Keep tensors that are on the CPU, where there is room."""
        self._remember(key, tensors)
        if on_disk and self.files is not None:
            self.files.write(
                _file_key(key),
                save({name: tensor.contiguous() for name, tensor in tensors.items()}),
            )

    def _remember(self, key: str, tensors: dict[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size <= self.room and key not in self.entries:
            self.room -= size
            self.entries[key] = tensors


def _token_key(fingerprint: str, precision: str, image_key: Tensor) -> str:
    return f"{fingerprint} {precision} {image_key.tolist()}"


def _file_key(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


class VisionLanguagePolicy(nn.Module):
    """A decoder-only model of Transformers with its family and its special tokens.

    Image and prompt are computed once: a decode copies their keys and values for each caption, and
    scoring lets the captions read them, with gradient. Positions and masks are passed to every
    call, so that nothing depends on what the module remembers of other batches (``rope_deltas`` of
    Qwen's models). All passes go through ``forward``, so that wrappers of the module (DDP, FSDP,
    ZeRO) see them.
    """

    def __init__(self, model: Any, family: VisionLanguageFamily, conventions: Conventions) -> None:
        super().__init__()
        self.model: Any = model
        self.family, self.conventions = family, conventions
        self.share_prefix = True
        """As in ``HuggingFacePolicy``; recomputed activations change nothing here."""
        self.takes_features = hasattr(model.base_model, "get_image_features") and all(
            ENCODED in inspect.signature(module.forward).parameters
            for module in (model, model.base_model)
        )
        """Whether the model takes visual tokens in place of pixels."""
        self.image_inputs: frozenset[str] = frozenset()
        """Names of the inputs that visual tokens are made of."""
        if self.takes_features:
            self.image_inputs = frozenset(
                inspect.signature(model.base_model.get_image_features).parameters
            )
        self.cache = TensorCache()
        """Visual tokens of rows whose vision tower is frozen, and prepared rows."""
        self._fingerprint: tuple[tuple[int, ...], str] | None = None
        self._precisions: set[str] = set()

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
            inputs: of B images and prompts; prompts are padded on the left. Visual tokens, as
                ``encode`` returns them, stand in place of pixels.
            encode: only encode the images.
            token_ids: captions [B, K, L] to score.
            mask: [B, K, L], True for the positions to score; all by default.
            max_tokens: length limit of a decode that is started; the cache gets memory for it.
            decode_state, prefixes: the decode to continue, and its M prefixes.

        Returns:
            Encode: the visual tokens, by names that ``inputs`` takes. Score: logits [B, K, L, V],
                or [P, V] of the P
            positions where ``mask`` is True. Start: logits [B, V] of the first token, and a
            ``PromptState``. Continue: logits [M, V] of the next tokens.
        """
        if decode_state is not None:
            assert prefixes is not None
            decode_state.select(prefixes.parent)
            return self._read(decode_state, prefixes.tokens.unsqueeze(1))[:, -1]
        if encode:
            return self._encode(inputs)
        if any(name.startswith(IMAGE) or name == IMAGE_KEY for name in inputs):
            inputs = states_of(inputs) | self._encode(inputs)
        if token_ids is None:
            with output_of(self.model, last_hidden):
                return self._begin(
                    inputs, preallocated_cache(inputs["input_ids"].shape[1] + max_tokens)
                )
        return self._score(inputs, token_ids, mask)

    def visual_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers that visual tokens depend on: those of the vision tower and the
        projector.
        """
        text = {
            id(tensor)
            for tensor in (
                *self.model.get_decoder().parameters(),
                *self.model.get_decoder().buffers(),
            )
        }
        text.add(id(self.model.get_output_embeddings().weight))
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: tensor for name, tensor in tensors if id(tensor) not in text}

    def trained_visual_parameter(self) -> str | None:
        """Name of a trained parameter that visual tokens depend on; None where they are frozen."""
        return next(
            (name for name, tensor in self.visual_tensors().items() if tensor.requires_grad), None
        )

    def encodes_rows(self) -> bool:
        """Whether the images of each row are encoded alone, so that visual tokens that are kept are
        those of any batch.

        So it is where vision tower and projector are frozen and whole (ZeRO-3 gathers shards of
        weights in every pass, in which all processes take part).
        """
        return (
            self.takes_features
            and self.trained_visual_parameter() is None
            and not any(hasattr(tensor, "ds_id") for tensor in self.parameters())
        )

    def knows_images(self, image_keys: Tensor, fingerprint: str) -> bool:
        """Whether the visual tokens of all images with the keys [N, 2] are kept, under
        ``fingerprint()``.
        """
        keys = [
            _token_key(fingerprint, precision, key)
            for precision in self._precisions
            for key in image_keys
        ]
        return bool(keys) and all(self.cache.read(key, on_disk=True) is not None for key in keys)

    def fingerprint(self) -> str:
        """Hash of all that visual tokens depend on besides pixels: weights of vision tower and
        projector, configuration, attention, type of the device, versions of libraries. It is
        computed again when a weight has changed.
        """
        tensors = self.visual_tensors()
        versions = tuple(tensor._version for tensor in tensors.values())
        if self._fingerprint is None or self._fingerprint[0] != versions:
            digest = hashlib.blake2b(
                f"{torch.__version__} {transformers.__version__}".encode(), digest_size=16
            )
            digest.update(
                f"{self.config.to_json_string()} {self.config._attn_implementation}".encode()
            )
            for name, tensor in tensors.items():
                update(digest, f"{name} {tensor.device.type}", tensor)
            self._fingerprint = versions, digest.hexdigest()
        return self._fingerprint[1]

    @torch.no_grad()
    def _encode_row(
        self, inputs: dict[str, Tensor], row: int, fingerprint: str
    ) -> dict[str, Tensor]:
        """Visual tokens of a row's images, from the cache where they are in it."""
        images = {
            name.split("/")[2]: inputs[name] for name in inputs if name.startswith(f"{IMAGE}{row}/")
        }
        if IMAGE_KEY not in inputs:
            return self._read_images(images)
        device = inputs["input_ids"].device
        enabled = torch.is_autocast_enabled(device.type)
        precision = str(torch.get_autocast_dtype(device.type)) if enabled else "its own"
        self._precisions.add(precision)
        key = _token_key(fingerprint, precision, inputs[IMAGE_KEY][row])
        tokens = self.cache.read(key, on_disk=True)
        if tokens is None:
            if not images:
                folder = self.cache.files and self.cache.files.folder
                raise CaptionerError(
                    f"images were prepared without pixels, and there are no visual tokens of them "
                    f"in {precision}: they "
                    f"were prepared for another precision, or files were removed from or damaged "
                    f"in {folder} "
                    "(model.cache_dir) since; prepare them again (resume the run)"
                )
            tokens = {name: tensor.cpu() for name, tensor in self._read_images(images).items()}
            self.cache.write(key, tokens, on_disk=True)
        return {name: tensor.to(device) for name, tensor in tokens.items()}

    def _encode(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if not any(name.startswith(IMAGE) or name == IMAGE_KEY for name in inputs):
            return self._read_images(inputs)
        fingerprint = self.fingerprint() if IMAGE_KEY in inputs else ""
        with dropout_off(self.model):  # what is kept has no dropout
            rows = [
                self._encode_row(inputs, row, fingerprint)
                for row in range(len(inputs["input_ids"]))
            ]
        return join_rows(rows)

    def _read_images(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        read = self.model.base_model.get_image_features
        output = read(
            **{name: inputs[name] for name in self.image_inputs & inputs.keys()}, return_dict=True
        )
        features: dict[str, Tensor] = {}
        for name in (TOKENS, LAYERS):
            features |= _flat(f"{FEATURES}{name}", getattr(output, name, None))
        return features

    def _begin(self, inputs: dict[str, Tensor], cache: Cache) -> tuple[Tensor, PromptState]:
        """Logits [B, V] after the prompts, whose keys and values go into ``cache``."""
        positions = self.family.positions(self.model, inputs)
        features = _features(inputs)
        arguments: dict[str, Any] = {
            name: inputs[name] for name in inputs if not name.startswith(FEATURES)
        }
        if features:
            arguments = {
                name: value for name, value in arguments.items() if not name.startswith(PIXELS)
            }
            output: Any = BaseModelOutputWithPooling()
            for name, value in features.items():
                setattr(output, name, value)
            arguments[ENCODED] = {"image": output}
        output = self.model(**arguments, position_ids=positions, use_cache=True, **{CACHE: cache})
        following = positions.amax(-1) if positions.ndim == 2 else positions.amax((0, 2))
        return output.logits[:, -1], PromptState(
            cache, inputs["attention_mask"].bool(), following + 1
        )

    def _read(self, state: PromptState, token_ids: Tensor) -> Tensor:
        """Logits [N, T, V] after each of the next tokens [N, T]; ``state`` goes on to the token
        after them.
        """
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
        begin = partial(self._begin, inputs, Cache(layer_class_to_replicate=PromptLayer))
        return score_after_prompt(
            token_ids,
            mask,
            self.model,
            begin,
            lambda state, image, ids: self._read(state.captions(image), ids),
        )


def _flat(name: str, tensors: Any) -> dict[str, Tensor]:
    """A tensor, or lists of tensors, by name and number: ``NAME``, ``NAME.0``, ``NAME.0.1``."""
    if tensors is None or isinstance(tensors, Tensor):
        return {} if tensors is None else {name: tensors}
    flat: dict[str, Tensor] = {}
    for number, entry in enumerate(tensors):
        flat |= _flat(f"{name}.{number}", entry)
    return flat


def _features(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Visual tokens as the attributes of Transformers' output, the inverse of ``_flat``."""
    features: dict[str, Any] = {}
    for key, tensor in inputs.items():
        if key.startswith(FEATURES):
            name, *numbers = key.removeprefix(FEATURES).split(".")
            entry: Any = tensor
            if numbers:
                entry = features.get(name, [])
                entries = entry if len(numbers) == 1 else _entry(entry, int(numbers[0]))
                entries.append(tensor)
            features[name] = entry
    return features


def _entry(lists: list[list[Tensor]], number: int) -> list[Tensor]:
    """The list of that number, which is made where it is the next one."""
    if number == len(lists):
        lists.append([])
    return lists[number]


def states_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of a batch without what only the vision tower reads."""
    return {
        name: value
        for name, value in inputs.items()
        if not name.startswith((PIXELS, IMAGE)) and name != IMAGE_KEY
    }


def join_rows(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Visual tokens of a batch from those of its rows: images are numbered on, tensors are joined."""
    joined: dict[str, list[Tensor]] = {}
    images = 0
    for tokens in rows:
        for key, tensor in tokens.items():
            name, *numbers = key.split(".")
            if len(numbers) == (1 if name == f"{FEATURES}{TOKENS}" else 2):
                key = ".".join([name, *numbers[:-1], str(images + int(numbers[-1]))])
            joined.setdefault(key, []).append(tensor)
        images += sum(key.startswith(f"{FEATURES}{TOKENS}.") for key in tokens)
    return {name: torch.cat(tensors) for name, tensors in joined.items()}


def update(digest: Any, name: str, tensor: Tensor) -> None:
    """Add a tensor and its name to a hash."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
