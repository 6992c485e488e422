"""A captioning model of Transformers as one module: an image and its prompt are computed once for
all captions, in the fastest way that is exact for the model (``Mode``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rl_caption.captioners.decoding import Prefixes, select_rows
from rl_caption.captioners.hf_attention import packing_cache
from rl_caption.captioners.packed import PreallocatedLayer
from rl_caption.captioners.state import PromptLayer, State
from rl_caption.captioners.vlm_families import ENCODED
from rl_caption.runtime.engines import dropout_off

IMAGES, FEATURES = "images", "features"
"""Names of what the processor made of the images of each row, and of their visual tokens."""
UNREAD = (
    "last_hidden_state",
    "hidden_states",
    "attentions",
    "vision_outputs",
    "qformer_outputs",
)
"""Fields of a vision tower's output that most text models do not read."""


@dataclass(frozen=True)
class Mode:
    """How captions are scored and sampled; ``self_check`` finds the fastest way that is exact.

    Attributes:
        prefix: whether captions share what is computed of image and prompt: of a batch at once
            (``batch``), of one row after the other (``rows``), or not at all (``none``), where
            Transformers' own ``generate`` samples.
        features: visual tokens that the model takes in place of pixels: what most models read of
            them (``tokens``), the tower's whole output (``whole``), or none.
        padded: whether images of a batch may be padded to one size.
        caption_type: token type of captions in a pass over prompt and caption.
    """

    prefix: Literal["batch", "rows", "none"] = "batch"
    features: Literal["tokens", "whole", ""] = "tokens"
    padded: bool = True
    caption_type: int = 0


class Nested:
    """Lists and dictionaries of tensors among the inputs of a batch.

    ``keys`` of images name each row's visual tokens, where these are kept; each row is encoded
    alone then, by a reference policy, too.
    """

    def __init__(self, value: Any, keys: Sequence[str] | None = None) -> None:
        self.value, self.keys = value, keys

    def _with(self, change: Callable[[Tensor], Tensor]) -> Nested:
        return Nested(tree_map_only(Tensor, change, self.value), self.keys)

    def to(self, *where: Any, **how: Any) -> Nested:
        """As ``Tensor.to``."""
        return self._with(lambda tensor: tensor.to(*where, **how))

    def pin_memory(self) -> Nested:
        """As ``Tensor.pin_memory``."""
        return self._with(Tensor.pin_memory)

    @property
    def requires_grad(self) -> bool:
        """Whether one of the tensors does."""
        leaves = tree_leaves(self.value)
        return any(leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor))

    def __getitem__(self, rows: Tensor) -> Nested:
        if not isinstance(self.value, list):  # visual tokens of a batch
            return self
        numbers = rows.tolist()
        keys = None if self.keys is None else [self.keys[row] for row in numbers]
        return Nested([self.value[row] for row in numbers], keys)


class KeptTokens(dict[Any, Any]):
    """Visual tokens of rows on the CPU, up to ``room`` bytes; copies of a policy share them.

    A full cache evicts nothing (``rewards.clip.encoder.EmbeddingCache`` says why).
    """

    room = 0

    def __deepcopy__(self, memo: Any) -> KeptTokens:
        return self

    def keep(self, key: Any, tokens: Any) -> None:
        """Keep tokens where there is room."""
        size = sum(
            leaf.nbytes for leaf in tree_leaves(tokens) if isinstance(leaf, Tensor)
        )
        if size <= self.room:
            self.room -= size
            self[key] = tree_map_only(Tensor, Tensor.cpu, tokens)


class Policy(nn.Module):
    """A model of Transformers with its family and its special tokens.

    Image and prompt are computed once where ``mode`` says so: a decode copies their keys and values
    for each caption, and scoring lets the captions read them, with gradient. With cross-attention,
    captions share the keys and values of their image. Nothing depends on what the module remembers
    of other batches (``rope_deltas`` of Qwen's models). All passes go through ``forward``, so that
    wrappers of the module (DDP, FSDP, ZeRO) see them.
    """

    start: Tensor
    encoder_prompt: Tensor

    def __init__(self, model: Any, family: Any, conventions: Any) -> None:
        super().__init__()
        self.model: Any = model
        self.family, self.conventions = family, conventions
        family.prepare(model)
        self.mode = Mode()
        self.image_inputs: frozenset[str] = family.image_inputs(model)
        """Names of the inputs that visual tokens are made of; empty where the model takes none."""
        self.visual_names: frozenset[str] | None = None
        """Names of the parameters that encoded images depend on, of ``self_check``."""
        self.kept = KeptTokens()
        """Visual tokens of rows whose vision tower is frozen."""
        for name in ("start", "encoder_prompt"):
            ids = torch.tensor([getattr(conventions, name)], dtype=torch.long)
            self.register_buffer(name, ids, persistent=False)

    @property
    def config(self) -> Any:
        """The model's configuration."""
        return self.model.config

    @property
    def text_model(self) -> Any:
        """The submodule that reads tokens; its output layer makes the logits."""
        return self.model.get_submodule(self.family.text_model)

    @property
    def takes_features(self) -> bool:
        """Whether images can be encoded before captions are read."""
        return bool(self.image_inputs) and bool(self.mode.features)

    def forward(
        self,
        token_ids: Tensor | None = None,
        mask: Tensor | None = None,
        encode: bool = False,
        max_tokens: int = 0,
        state: State | None = None,
        prefixes: Prefixes | None = None,
        **inputs: Any,
    ) -> Any:
        """Encode images, score captions, start a decode, or continue it.

        Args:
            inputs: what ``Captioner.preprocess`` made of B rows, or what encoding made of that.
            encode: only encode the images.
            token_ids: captions [B, K, L] to score.
            mask: [B, K, L], True for the positions to score; all by default.
            max_tokens: length limit of a decode that is started; the cache gets memory for it.
            state, prefixes: the decode to continue, and its M prefixes.

        Returns:
            Encode: inputs with encoded images. Score: logits [B, K, L, V], or [P, V] of the P
                positions where ``mask`` is True. Start: logits [B, V] of the first token, and a
                ``State``. Continue: logits [M, V] of the next tokens.
        """
        if state is not None:
            assert prefixes is not None
            state.select(prefixes)
            return self.family.read(self, state, prefixes.tokens.unsqueeze(1))[:, -1]
        if self.takes_features and not {"states", FEATURES} & inputs.keys():
            inputs = self.encode(inputs)
        if encode:
            return inputs
        if token_ids is not None:
            return self._score(inputs, token_ids, mask)
        with output_of(self.text_model, last_hidden):
            return self._begin(inputs, max_tokens)

    # Encoded images

    def trains_images(self) -> bool:
        """Whether a trained parameter is among those that encoded images depend on."""
        return any(parameter.requires_grad for parameter in self._visual_parameters())

    def _visual_parameters(self) -> list[nn.Parameter]:
        names = self.visual_names
        parameters = self.model.named_parameters()
        return [value for name, value in parameters if names is None or name in names]

    def keeps_tokens(self) -> bool:
        """Whether the images of each row are encoded alone, so that visual tokens that are kept are
        those of any batch.

        So it is where what visual tokens depend on is frozen and whole (ZeRO-3 gathers shards of
        weights in every pass, in which all processes take part).
        """
        return (
            self.takes_features
            and not self.trains_images()
            and not any(hasattr(tensor, "ds_id") for tensor in self.parameters())
        )

    def encode(self, inputs: dict[str, Any], by_rows: bool = False) -> dict[str, Any]:
        """The inputs with encoded images in place of pixels."""
        if IMAGES not in inputs:
            pixels = inputs["pixel_values"]
            prompt = self.encoder_prompt.expand(len(pixels), -1)
            return {"states": self.family.encode(self.model, pixels, prompt)}
        images = inputs[IMAGES]
        features: Any
        if not by_rows and images.keys is None and self.joins(inputs):
            features = self.read_images(self.arguments(inputs))
        else:
            keys = images.keys or [None] * len(images.value)
            rows = self.rows(inputs)
            features = [
                self._read_kept(row, key) for row, key in zip(rows, keys, strict=True)
            ]
        others = [
            {
                name: value
                for name, value in row.items()
                if not value.is_floating_point()
            }
            for row in images.value
        ]
        return {**inputs, IMAGES: Nested(others), FEATURES: Nested(features)}

    def _read_kept(self, row: dict[str, Any], name: str | None) -> dict[str, Any]:
        """Visual tokens of a row, from those that are kept if its are."""
        if name is None or not self.keeps_tokens():
            return self.read_images(row)
        device = row["input_ids"].device
        enabled = torch.is_autocast_enabled(device.type)
        precision = torch.get_autocast_dtype(device.type) if enabled else None
        version = sum(parameter._version for parameter in self._visual_parameters())
        key = (name, precision, version)
        with torch.no_grad(), dropout_off(self.model):  # what is kept has no dropout
            if key not in self.kept:
                tokens = self.read_images(row)
                self.kept.keep(key, tokens)
                return tokens
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), self.kept[key])

    def read_images(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The fields of the vision tower's output that the text model may read."""
        given = {name: arguments[name] for name in self.image_inputs & arguments.keys()}
        output = self.model.base_model.get_image_features(**given, return_dict=True)
        unread = UNREAD if self.mode.features == "tokens" else ()
        return {key: value for key, value in output.items() if key not in unread}

    # Arguments of the model

    def joins(self, inputs: dict[str, Any]) -> bool:
        """Whether the rows of a batch are one pass; else they are read one by one."""
        if IMAGES not in inputs:
            return True
        images = inputs[IMAGES].value
        if len(images) == 1 or self.mode.prefix != "batch":
            return len(images) == 1
        shapes = [
            {
                name: not self.mode.padded and value.shape[1:]
                for name, value in row.items()
            }
            for row in images
        ]
        return all(row == shapes[0] for row in shapes)

    def arguments(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the model for rows that are joined: visual tokens in an output."""
        given: dict[str, Any] = {
            name: value for name, value in inputs.items() if isinstance(value, Tensor)
        }
        if IMAGES not in inputs:
            return given
        rows = inputs[IMAGES].value
        given |= {name: join([row[name] for row in rows]) for name in rows[0]}
        if FEATURES in inputs:
            features = inputs[FEATURES].value
            output: Any = BaseModelOutputWithPooling()
            if isinstance(features, list):
                features = join_features(features)
            for name, value in {**dict.fromkeys(UNREAD), **features}.items():
                setattr(output, name, value)
            given[ENCODED] = {"image": output}
        return given

    def rows(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Arguments of the model for each row alone, without padding."""
        rows = []
        for number in range(len(next(iter(inputs.values())))):
            row = self.arguments(select_rows(inputs, torch.tensor([number])))
            if IMAGES in inputs:
                shape, length = row["input_ids"].shape, int(row["attention_mask"].sum())
                for name, value in row.items():
                    if isinstance(value, Tensor) and value.shape == shape:
                        row[name] = value[:, -length:]
            rows.append(row)
        return rows

    # Passes over text

    def _begin(self, inputs: dict[str, Any], max_tokens: int) -> tuple[Tensor, State]:
        """Logits [B, V] after BOS and prompt, whose cache has memory for ``max_tokens`` more."""
        layer = partial(PreallocatedLayer, max_tokens)
        return self.family.begin(self, self.arguments(inputs), layer)

    def _score(
        self, inputs: dict[str, Any], token_ids: Tensor, mask: Tensor | None
    ) -> Tensor:
        if self.family.cross_attention:
            return self._score_at_once(inputs["states"], token_ids, mask)
        if self.mode.prefix == "none":
            return self._score_plainly(inputs, token_ids, mask)
        if self.joins(inputs):
            return self._score_after_prompt(self.arguments(inputs), token_ids, mask)
        logits = []
        for number, row in enumerate(self.rows(inputs)):
            some = None if mask is None else mask[number, None]
            if some is None or some.any():
                logits.append(
                    self._score_after_prompt(row, token_ids[number, None], some)
                )
        return torch.cat(logits)

    def _score_after_prompt(
        self, arguments: dict[str, Any], token_ids: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Score captions after one pass over image and prompt, whose keys and values they share."""
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

        with output_of(self.text_model, keep_last):
            logits, state = self.family.begin(self, arguments, PromptLayer)
        if length == 1:
            logits = logits.unsqueeze(1).expand(-1, captions, -1).unsqueeze(2)
            return logits if mask is None else logits[mask]
        with output_of(self.text_model, of_captions):
            logits = self.family.read(self, state.of_captions(image), flat[rows, :-1])
        return logits if mask is not None else logits.unflatten(0, token_ids.shape[:2])

    def _score_at_once(
        self, states: Tensor, token_ids: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Score prompt and caption in one pass, where captions share their image in it; the
        backward pass frees it layer by layer.
        """
        captions, length = token_ids.shape[1:]
        flat, scored, rows = scored_rows(token_ids, mask)
        ids = torch.cat([self.start.expand(len(rows), -1), flat[rows, :-1]], dim=1)
        state = State(packing_cache(rows // captions, len(states)), states)

        def of_captions(hidden: Tensor) -> Tensor:
            hidden = hidden[:, -length:]
            return hidden if scored is None else hidden[scored]

        with output_of(self.text_model, of_captions):
            logits = self.family.read(self, state, ids)
        return logits if mask is not None else logits.unflatten(0, token_ids.shape[:2])

    def _score_plainly(
        self, inputs: dict[str, Any], token_ids: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Score each caption by a pass over image, prompt and caption, as the model alone makes it."""
        captions, length = token_ids.shape[1:]
        flat, scored, numbers = scored_rows(token_ids, mask)
        rows, logits = self.rows(inputs), []
        for caption, number in enumerate(numbers.tolist()):
            row = dict(rows[number // captions])
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


@contextmanager
def output_of(text_model: Any, chosen: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, the output layer computes logits of ``chosen(hidden)`` and not of all hidden states
    [N, T, D].
    """
    layer = text_model.get_output_embeddings()
    hook = layer.register_forward_pre_hook(
        lambda _, arguments: (chosen(arguments[0]), *arguments[1:])
    )
    try:
        yield
    finally:
        hook.remove()


def last_hidden(hidden: Tensor) -> Tensor:
    """Hidden states [N, 1, D] of the last of T tokens, from [N, T, D]."""
    return hidden[:, -1:]


def scored_rows(
    token_ids: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """All captions [B·K, L]; the mask [M, L] of the M that have positions to score (or None); their
    rows [M].
    """
    flat = token_ids.flatten(0, 1)
    if mask is None:
        return flat, None, torch.arange(len(flat), device=flat.device)
    scored = mask.flatten(0, 1)
    rows = scored.any(-1).nonzero().squeeze(-1)
    return flat, scored[rows], rows


def collate(
    prompts: Sequence[dict[str, Tensor]], pad: int, keys: Sequence[str] | None = None
) -> dict[str, Any]:
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
            padded = nn.functional.pad(
                prompt[name], (longest - shape[1], 0), value=value
            )
            texts.setdefault(name, []).append(padded)
    batch: dict[str, Any] = {
        name: torch.cat(tensors) for name, tensors in texts.items()
    }
    return {**batch, IMAGES: Nested(images, keys)}


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
