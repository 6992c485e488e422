"""A decoder-only vision-language model as one module: an image and its prompt are computed once for
all captions, in the fastest way that is exact for the model (``Mode``).
"""

from __future__ import annotations

import hashlib
import inspect
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rewards.files import CheckedFiles
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.decoding import Prefixes, select_rows
from rl_caption.captioners.hf_families import Conventions
from rl_caption.captioners.hf_policy import last_hidden, output_of, score_after_prompt, scored_rows
from rl_caption.captioners.packed import CACHE, PreallocatedLayer
from rl_caption.captioners.vlm_families import VisionLanguageFamily
from rl_caption.runtime.engines import dropout_off

ENCODED = "mm_encoder_outputs"
"""Argument by which Transformers' models take visual tokens in place of pixels; older versions and
some models have none, and encode their images in every pass.
"""
IMAGES, FEATURES = "images", "features"
"""Names of what the processor made of the images of each row, and of their visual tokens."""
IMAGE_KEY = "image_key"
"""Name of a row's 128 bits [1, 2]: a hash of what its visual tokens are made of."""
UNREAD = ("last_hidden_state", "hidden_states", "attentions", "vision_outputs", "qformer_outputs")
"""Fields of a vision tower's output that most text models do not read."""


@dataclass(frozen=True)
class Mode:
    """How captions are scored and sampled; ``self_check`` finds the fastest way that is exact.

    Attributes:
        prefix: whether captions share what is computed of image and prompt: of a batch at once
            (``batch``), of one row after the other (``rows``), or not at all (``none``).
        features: visual tokens that the model takes in place of pixels: what most models read of
            them (``tokens``), the tower's whole output (``whole``), or none.
        decode: by the keys and values of the prefix (``cache``), by Transformers' ``generate`` for
            all captions of an image, or for each alone.
        padded: whether images of a batch may be padded to one size.
        caption_type: token type of captions in a pass over prompt and caption.
    """

    prefix: Literal["batch", "rows", "none"] = "batch"
    features: Literal["tokens", "whole", ""] = "tokens"
    decode: Literal["cache", "generate", "alone"] = "cache"
    padded: bool = True
    caption_type: int = 0


class Nested:
    """Lists and dictionaries of tensors among the inputs of a batch.

    ``apart`` says of images that each row is encoded alone, by a reference policy, too.
    """

    def __init__(self, value: Any, apart: bool = False) -> None:
        self.value, self.apart = value, apart

    def _with(self, change: Callable[[Tensor], Tensor]) -> Nested:
        return Nested(tree_map_only(Tensor, change, self.value), self.apart)

    def to(self, *where: Any, **how: Any) -> Nested:
        """As ``Tensor.to``."""
        return self._with(lambda tensor: tensor.to(*where, **how))

    def pin_memory(self) -> Nested:
        """As ``Tensor.pin_memory``."""
        return self._with(Tensor.pin_memory)

    @property
    def requires_grad(self) -> bool:
        """Whether one of the tensors does."""
        return any(
            leaf.requires_grad for leaf in tree_leaves(self.value) if isinstance(leaf, Tensor)
        )

    def __getitem__(self, rows: Tensor) -> Nested:
        numbers = rows.tolist()
        if not isinstance(self.value, list):  # visual tokens of a batch
            return self
        return Nested([self.value[row] for row in numbers], self.apart)


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
        self.prompt, self.is_initialized = prompt, True
        self.keys, self.values = prompts.keys, prompts.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        keys = torch.cat([self.keys.index_select(0, self.prompt), key_states], dim=-2)
        values = torch.cat([self.values.index_select(0, self.prompt), value_states], dim=-2)
        return keys, values


@dataclass
class PromptState:
    """What N rows have read so far: first the prompts of B images, then also tokens of captions.

    Attributes:
        cache: keys and values.
        mask: [N, S], False where a prompt is padded.
        position: [N] of the next token.
        channels: number of positions of a token, with M-RoPE (time, height, width, ...).
    """

    cache: Any
    mask: Tensor
    position: Tensor
    channels: int | None = None

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
        return PromptState(
            Cache(layers=layers), self.mask[prompt], self.position[prompt], self.channels
        )


class TensorCache:
    """Nested tensors by key: in memory up to ``room`` bytes, and on disk those that
    ``keep_on_disk`` is for.

    A full cache evicts nothing (``rewards.clip.encoder.EmbeddingCache`` says why). Copies of a
    policy share it.
    """

    def __init__(self) -> None:
        self.room = 0
        self.entries: dict[str, Any] = {}
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

    def read(self, key: str, on_disk: bool = False) -> Any:
        """The tensors of a key, on the CPU, or None."""
        if key not in self.entries and on_disk and self.files is not None:
            content = self.files.read(_file_key(key))
            if content is None:
                return None
            tensors = torch.load(io.BytesIO(content), weights_only=True)
            self._remember(key, tensors)
            return tensors
        return self.entries.get(key)

    def write(self, key: str, tensors: Any, on_disk: bool = False) -> None:
        """Keep tensors that are on the CPU, where there is room."""
        self._remember(key, tensors)
        if on_disk and self.files is not None:
            content = io.BytesIO()
            torch.save(tensors, content)
            self.files.write(_file_key(key), content.getvalue())

    def _remember(self, key: str, tensors: Any) -> None:
        size = sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))
        if size <= self.room and key not in self.entries:
            self.room -= size
            self.entries[key] = tensors


def _file_key(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


class VisionLanguagePolicy(nn.Module):
    """A decoder-only model of Transformers with its family and its special tokens.

    Image and prompt are computed once where ``mode`` says so: a decode copies their keys and values
    for each caption, and scoring lets the captions read them, with gradient. Positions and masks
    are passed to every call, so that nothing depends on what the module remembers of other batches
    (``rope_deltas`` of Qwen's models). All passes go through ``forward``, so that wrappers of the
    module (DDP, FSDP, ZeRO) see them.
    """

    def __init__(self, model: Any, family: VisionLanguageFamily, conventions: Conventions) -> None:
        super().__init__()
        self.model: Any = model
        self.family, self.conventions = family, conventions
        self.mode = Mode()
        self.share_prefix = True
        """As in ``HuggingFacePolicy``; recomputed activations change nothing here."""
        self.image_inputs: frozenset[str] = frozenset()
        """Names of the inputs that visual tokens are made of; empty where the model takes none."""
        reads = getattr(model.base_model, "get_image_features", None)
        if reads is not None and all(
            ENCODED in inspect.signature(module.forward).parameters
            for module in (model, model.base_model)
        ):
            self.image_inputs = frozenset(inspect.signature(reads).parameters)
        self.visual_names: frozenset[str] | None = None
        """Names of the parameters that visual tokens depend on, of ``self_check``."""
        self.cache = TensorCache()
        """Visual tokens of rows whose vision tower is frozen, and prepared rows."""
        self._fingerprint: tuple[tuple[int, ...], str] | None = None
        self._precisions: set[str] = set()

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    @property
    def takes_features(self) -> bool:
        """Whether visual tokens take the place of pixels."""
        return bool(self.image_inputs) and bool(self.mode.features)

    def forward(
        self,
        token_ids: Tensor | None = None,
        mask: Tensor | None = None,
        encode: bool = False,
        max_tokens: int = 0,
        decode_state: PromptState | None = None,
        prefixes: Prefixes | None = None,
        **inputs: Any,
    ) -> Any:
        """Encode images, score captions, start a decode, or continue it.

        Args:
            inputs: of B images and prompts, as ``preprocess`` makes them, or as ``encode`` returns
                them.
            encode: only encode the images.
            token_ids: captions [B, K, L] to score.
            mask: [B, K, L], True for the positions to score; all by default.
            max_tokens: length limit of a decode that is started; the cache gets memory for it.
            decode_state, prefixes: the decode to continue, and its M prefixes.

        Returns:
            Encode: the inputs with visual tokens in place of pixels. Score: logits [B, K, L, V], or
                [P, V] of the P positions where ``mask`` is True.
            Start: logits [B, V] of the first token, and a ``PromptState``. Continue: logits [M, V]
                of the next tokens.
        """
        if decode_state is not None:
            assert prefixes is not None
            decode_state.select(prefixes.parent)
            return self._read(decode_state, prefixes.tokens.unsqueeze(1))[:, -1]
        if self.takes_features and FEATURES not in inputs:
            inputs = self.encode(inputs, by_rows=inputs[IMAGES].apart)
        if encode:
            return inputs
        if token_ids is None:
            capacity = inputs["input_ids"].shape[1] + max_tokens
            with output_of(self.model, last_hidden):
                return self._begin(self.arguments(inputs), lambda: PreallocatedLayer(capacity))
        if self.mode.prefix == "none":
            return self._score_plainly(inputs, token_ids, mask)
        if self.joins(inputs):
            return self._score(self.arguments(inputs), token_ids, mask)
        logits = [
            self._score(row, token_ids[number, None], None if mask is None else mask[number, None])
            for number, row in enumerate(self.rows(inputs))
            if mask is None or mask[number].any()
        ]
        return torch.cat(logits)

    # Arguments of the model

    def joins(self, inputs: dict[str, Any]) -> bool:
        """Whether the rows of a batch are one pass; else they are read one by one."""
        images = inputs[IMAGES].value
        if len(images) == 1 or self.mode.prefix != "batch":
            return len(images) == 1
        shapes = [
            {name: not self.mode.padded and value.shape[1:] for name, value in row.items()}
            for row in images
        ]
        return all(row == shapes[0] for row in shapes)

    def arguments(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the model for rows that are joined."""
        given: dict[str, Any] = {
            name: value for name, value in inputs.items() if isinstance(value, Tensor)
        }
        images = inputs[IMAGES].value
        for name in images[0]:
            if name != IMAGE_KEY:
                given[name] = join([row[name] for row in images])
        if FEATURES in inputs:
            features = inputs[FEATURES].value
            given[ENCODED] = join_features(features) if isinstance(features, list) else features
        return given

    def rows(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Arguments of the model for each row alone, without padding."""
        rows = []
        for number, length in enumerate(inputs["attention_mask"].sum(-1).tolist()):
            row = self.arguments(select_rows(inputs, torch.tensor([number])))
            shape = row["input_ids"].shape
            for name, value in row.items():
                if isinstance(value, Tensor) and value.shape == shape:
                    row[name] = value[:, -length:]
            rows.append(row)
        return rows

    def given(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the model takes them: visual tokens in an output, without pixels."""
        if ENCODED not in arguments:
            return arguments
        output: Any = BaseModelOutputWithPooling()
        for name, value in arguments[ENCODED].items():
            setattr(output, name, value)
        return {
            name: {"image": output} if name == ENCODED else value
            for name, value in arguments.items()
            if name == ENCODED or not value.is_floating_point()
        }

    # Visual tokens

    def visual_tensors(self) -> dict[str, Tensor]:
        """Parameters that visual tokens depend on, and buffers outside the text model."""
        tensors = dict(self.model.named_parameters())
        names = tensors.keys() if self.visual_names is None else self.visual_names
        text = {id(buffer) for buffer in self.model.get_decoder().buffers()}
        visual = {name: tensors[name] for name in sorted(names)}
        for name, buffer in self.model.named_buffers():
            if id(buffer) not in text:
                visual[name] = buffer
        return visual

    def trained_visual_parameter(self) -> str | None:
        """Name of a trained parameter that visual tokens depend on; None where they are frozen."""
        tensors = self.visual_tensors()
        return next((name for name, tensor in tensors.items() if tensor.requires_grad), None)

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

    def knows_images(self, image_key: Tensor, fingerprint: str) -> bool:
        """Whether the visual tokens of the images with the key are kept, under ``fingerprint()``."""
        keys = [f"{fingerprint} {precision} {image_key.tolist()}" for precision in self._precisions]
        return bool(keys) and all(self.cache.read(key, on_disk=True) is not None for key in keys)

    def fingerprint(self) -> str:
        """Hash of all that visual tokens depend on besides pixels: weights of vision tower and
        projector, configuration, attention, type of the device, versions of libraries. It is
        computed again when a weight has changed.
        """
        tensors = self.visual_tensors()
        versions = tuple(tensor._version for tensor in tensors.values())
        if self._fingerprint is None or self._fingerprint[0] != versions:
            digest = hashlib.blake2b(digest_size=16)
            libraries = f"{torch.__version__} {transformers.__version__} {self.mode.features}"
            config = f"{self.config.to_json_string()} {self.config._attn_implementation}"
            digest.update(f"{libraries} {config}".encode())
            for name, tensor in tensors.items():
                update(digest, f"{name} {tensor.device.type}", tensor)
            self._fingerprint = versions, digest.hexdigest()
        return self._fingerprint[1]

    def encode(self, inputs: dict[str, Any], by_rows: bool) -> dict[str, Any]:
        """The inputs with visual tokens in place of pixels."""
        images = inputs[IMAGES].value
        features: Any
        if not by_rows and self.mode.decode == "cache" and self.joins(inputs):
            features = self.read_images(self.arguments(inputs))
        else:
            features = [
                self._read_kept(row, image)
                for row, image in zip(self.rows(inputs), images, strict=True)
            ]
        others = [
            {name: value for name, value in row.items() if not value.is_floating_point()}
            for row in images
        ]
        return {**inputs, IMAGES: Nested(others), FEATURES: Nested(features)}

    def _read_kept(self, row: dict[str, Any], image: dict[str, Tensor]) -> dict[str, Any]:
        """Visual tokens of a row, from the cache where they are in it."""
        if not self.encodes_rows():
            return self.read_images(row)
        with torch.no_grad(), dropout_off(self.model):  # what is kept has no dropout
            if IMAGE_KEY not in image:
                return self.read_images(row)
            device = row["input_ids"].device
            enabled = torch.is_autocast_enabled(device.type)
            precision = str(torch.get_autocast_dtype(device.type)) if enabled else "its own"
            self._precisions.add(precision)
            key = f"{self.fingerprint()} {precision} {image[IMAGE_KEY].tolist()}"
            tokens = self.cache.read(key, on_disk=True)
            if tokens is None:
                if not any(value.is_floating_point() for value in row.values()):
                    folder = self.cache.files and self.cache.files.folder
                    raise CaptionerError(
                        f"images were prepared without pixels, and there are no visual tokens of "
                        f"them in {precision}: they were prepared for another precision, or files "
                        f"were removed from or damaged in {folder} (model.cache_dir) since; prepare "
                        f"them again (resume the run)"
                    )
                tokens = tree_map_only(Tensor, Tensor.cpu, self.read_images(row))
                self.cache.write(key, tokens, on_disk=True)
            return tree_map_only(Tensor, lambda tensor: tensor.to(device), tokens)

    def read_images(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The fields of the vision tower's output that the text model may read."""
        given = {name: arguments[name] for name in self.image_inputs & arguments.keys()}
        output = self.model.base_model.get_image_features(**given, return_dict=True)
        unread = UNREAD if self.mode.features == "tokens" else ()
        return {key: value for key, value in output.items() if key not in unread}

    # Passes over text

    def _score(self, arguments: dict[str, Any], token_ids: Tensor, mask: Tensor | None) -> Tensor:
        return score_after_prompt(
            token_ids,
            mask,
            self.model,
            lambda: self._begin(arguments, PromptLayer),
            lambda state, image, ids: self._read(state.captions(image), ids),
        )

    def _begin(
        self, arguments: dict[str, Any], new_layer: Callable[[], Any]
    ) -> tuple[Tensor, PromptState]:
        """Logits [B, V] after the prompts, whose keys and values go into layers ``new_layer``."""
        positions = self.family.positions(self.model, arguments)
        cache = Cache(layer_class_to_replicate=new_layer)  # type: ignore[arg-type]
        given = self.given(arguments)
        output = self.model(**given, position_ids=positions, use_cache=True, **{CACHE: cache})
        channels = None if positions.ndim == 2 else len(positions)
        following = positions.amax(-1) if channels is None else positions.amax((0, 2))
        mask = arguments["attention_mask"].bool()
        return output.logits[:, -1], PromptState(cache, mask, following + 1, channels)

    def _read(self, state: PromptState, token_ids: Tensor) -> Tensor:
        """Logits [N, T, V] after each of the next tokens [N, T]; ``state`` goes on to the token
        after them.
        """
        length = token_ids.shape[1]
        state.mask = torch.cat([state.mask, state.mask.new_ones(token_ids.shape)], dim=1)
        positions = state.position.unsqueeze(1) + torch.arange(length, device=token_ids.device)
        state.position = state.position + length
        if state.channels is not None:
            positions = positions.expand(state.channels, -1, -1)
        output = self.model(
            input_ids=token_ids,
            attention_mask=state.mask,
            position_ids=positions,
            use_cache=True,
            **{CACHE: state.cache},
        )
        return output.logits

    def _score_plainly(
        self, inputs: dict[str, Any], token_ids: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Logits of captions by a pass over image, prompt and caption for each, as the model alone
        makes it; arguments and result as ``score_after_prompt``.
        """
        captions, length = token_ids.shape[1:]
        flat, scored, numbers = scored_rows(token_ids, mask)
        rows, logits = self.rows(inputs), []
        for caption, number in enumerate(numbers.tolist()):
            row = dict(self.given(rows[number // captions]))
            prompt = row["input_ids"]
            for name, value in row.items():
                if isinstance(value, Tensor) and value.shape == prompt.shape:
                    kind = 1 if name == "attention_mask" else self.mode.caption_type
                    row[name] = nn.functional.pad(value, (0, length - 1), value=kind)
            row["input_ids"] = torch.cat([prompt, flat[number, None, :-1]], dim=1)
            some = slice(None) if scored is None else scored[caption]

            def of_caption(hidden: Tensor, some: Any = some) -> Tensor:
                return hidden[:, -length:][:, some]

            with output_of(self.model, of_caption):
                logits.append(self.model(**row, use_cache=False).logits[0])
        joined = torch.cat(logits)
        return joined if mask is not None else joined.unflatten(0, token_ids.shape)


def collate(prompts: Sequence[dict[str, Tensor]], pad: int, apart: bool = False) -> dict[str, Any]:
    """One batch of the inputs of B prompts.

    What has the shape of ``input_ids`` [1, P] is text: it is padded on the left and joined, and
    ``input_ids`` come first. What was made of the images stays apart: it may hold indices into its
    row, and not every row has the same.
    """
    texts: dict[str, list[Tensor]] = {"input_ids": []}
    images: list[dict[str, Tensor]] = []
    longest = max(prompt["input_ids"].shape[1] for prompt in prompts)
    for prompt in prompts:
        shape = prompt["input_ids"].shape
        images.append({name: t for name, t in prompt.items() if t.shape != shape})
        for name in prompt.keys() - images[-1].keys():
            value = pad if name == "input_ids" else 0
            padded = nn.functional.pad(prompt[name], (longest - shape[1], 0), value=value)
            texts.setdefault(name, []).append(padded)
    batch: dict[str, Any] = {name: torch.cat(tensors) for name, tensors in texts.items()}
    return {**batch, IMAGES: Nested(images, apart)}


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [N, ...] joined along their first dimension, padded with zeros to the largest."""
    sizes = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        margins: list[int] = []
        for size, now in zip(reversed(sizes), reversed(tensor.shape[1:]), strict=True):
            margins += [0, size - now]
        padded.append(nn.functional.pad(tensor, margins) if any(margins) else tensor)
    return torch.cat(padded)


def join_features(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Visual tokens of a batch from those of its rows.

    ``pooler_output`` is a tensor or a list with an entry for each image; other lists have an entry
    for each layer. Where a model has it otherwise, ``self_check`` finds out.
    """

    def joined(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Tensor):
            return torch.cat(list(values))
        return [entry for value in values for entry in value]

    fields: dict[str, Any] = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if name != "pooler_output" and isinstance(first, list | tuple):
            fields[name] = [joined(layer) for layer in zip(*values, strict=True)]
        else:
            fields[name] = joined(values)
    return fields


def update(digest: Any, name: str, tensor: Tensor) -> None:
    """Add a tensor and its name to a hash."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
