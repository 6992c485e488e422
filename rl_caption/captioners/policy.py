"""A captioning model of Transformers as one module: an image and its prompt are
computed once for all captions, in the fastest way that is exact for the model
(``Mode``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rl_caption.captioners.base import Inputs
from rl_caption.captioners.decoding import select_rows
from rl_caption.captioners.hf_families import packing_cache
from rl_caption.captioners.packed import PreallocatedLayer, PromptLayer, State
from rl_caption.captioners.vlm_families import ENCODED
from rl_caption.runtime.engines import dropout_off

IMAGES = "images"
FEATURES = "features"
"""Keys of model inputs: the processor's output for the images of each row, and their
visual tokens.
"""
UNREAD = (
    "last_hidden_state",
    "hidden_states",
    "attentions",
    "vision_outputs",
    "qformer_outputs",
)
"""Fields of a vision tower's output that most text models do not read."""


class Mode(NamedTuple):
    """Way of scoring and sampling captions; ``self_check`` finds the fastest exact one.

    Attributes:
        prefix: how captions share the computation of image and prompt: for a batch at
            once (``batch``), for one row after the other (``rows``), or not at all
            (``none``), where Transformers' own ``generate`` samples.
        features: whether the model takes visual tokens in place of pixels.
        padded: whether images of a batch may be padded to one size.
    """

    prefix: str = "batch"
    features: bool = True
    padded: bool = True


@dataclass
class Nested:
    """Lists and dictionaries of tensors among the inputs of a batch.

    ``keys`` name each row's visual tokens if they are kept (``KeptTokens``); each row
    is then encoded alone, also by a reference policy.
    """

    value: Any
    keys: Sequence[str] | None = None

    def to(self, *where: Any, **how: Any) -> Nested:
        """As ``Tensor.to``."""
        moved = tree_map_only(Tensor, lambda t: t.to(*where, **how), self.value)
        return Nested(moved, self.keys)

    def pin_memory(self) -> Nested:
        """As ``Tensor.pin_memory``."""
        return Nested(tree_map_only(Tensor, Tensor.pin_memory, self.value), self.keys)

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor requires a gradient."""
        leaves = tree_leaves(self.value)
        return any(getattr(leaf, "requires_grad", False) for leaf in leaves)

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


class Policy(nn.Module):
    """A model of Transformers with its family and its special tokens.

    Image and prompt are computed once where ``mode`` says so: a decode copies their
    keys and values for each caption, and scoring lets the captions read them, with
    gradient. With cross-attention, captions share the keys and values of their image.
    Nothing depends on what the module remembers of other batches (``rope_deltas`` of
    Qwen's models). All passes go through ``forward``, so that wrappers of the module
    (DDP, FSDP, ZeRO) see them.
    """

    start: Tensor
    encoder_prompt: Tensor

    def __init__(self, model: Any, family: Any, conventions: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.family = family
        self.conventions = conventions
        if family.cross_attention:
            family.prepare(model)
        self.mode = Mode()
        self.image_inputs = family.image_inputs(model)
        """Names of the inputs that visual tokens are made of; empty if the model takes
        no visual tokens.
        """
        self.visual_names: frozenset[str] | None = None
        """Names of the parameters that encoded images depend on, from ``self_check``;
        None stands for all.
        """
        self.kept = KeptTokens()
        """Visual tokens of rows, kept while the vision tower is frozen."""
        for name in ("start", "encoder_prompt"):
            ids = torch.tensor([getattr(conventions, name)], dtype=torch.long)
            self.register_buffer(name, ids, persistent=False)

    @property
    def text_model(self) -> Any:
        """The submodule that reads tokens; its output layer makes the logits."""
        return self.model.get_submodule(self.family.text_model)

    @property
    def takes_features(self) -> bool:
        """Whether images can be encoded before captions are read."""
        return bool(self.image_inputs) and self.mode.features

    def forward(
        self,
        token_ids: Tensor | None = None,
        mask: Tensor | None = None,
        encode: bool = False,
        max_tokens: int = 0,
        state: State | None = None,
        prefixes: Any = None,
        **inputs: Any,
    ) -> Any:
        """Encode images, score captions, start a decode, or continue it.

        Args:
            inputs: output of ``Captioner.preprocess`` for B rows, perhaps with encoded
                images.
            encode: only encode the images.
            token_ids: captions [B, K, L] to score.
            mask: [B, K, L], True for the positions to score; all by default.
            max_tokens: length limit of a decode that is started; the cache gets memory for it.
            state, prefixes: the decode to continue, and its M next ``Prefixes``.

        Returns:
            Encode: inputs with encoded images. Score: logits [B, K, L, V], or [P, V] of
                the P positions where ``mask`` is True. Start: logits [B, V] of the
                first token, and a ``State``. Continue: logits [M, V] of the next
                tokens.
        """
        if state is not None:
            state.select(prefixes)
            return self.family.read(self, state, prefixes.tokens.unsqueeze(1))[:, -1]
        if self.takes_features and not {"states", FEATURES} & inputs.keys():
            inputs = self.encode(inputs)
        if encode:
            return inputs
        if token_ids is not None:
            return self._score(inputs, token_ids, mask)
        layer = partial(PreallocatedLayer, max_tokens)
        with output_of(self.text_model, lambda hidden: hidden[:, -1:]):
            return self.family.begin(self, self.arguments(inputs), layer)

    # Encoded images

    def trains_images(self) -> bool:
        """Whether encoded images depend on a trained parameter."""
        return any(parameter.requires_grad for parameter in self._visual_parameters())

    def _visual_parameters(self) -> list[nn.Parameter]:
        names = self.visual_names
        parameters = self.model.named_parameters()
        return [value for name, value in parameters if names is None or name in names]

    def keeps_tokens(self) -> bool:
        """Whether the images of each row are encoded alone, so that kept visual tokens
        are the same in any batch.

        It needs visual tokens whose parameters are frozen and not sharded (ZeRO-3
        gathers shards of weights in every pass, in which all processes take part).
        """
        return (
            self.takes_features
            and not self.trains_images()
            and not any(hasattr(tensor, "ds_id") for tensor in self.parameters())
        )

    def encode(self, inputs: Inputs, alone: bool = False) -> Inputs:
        """The inputs with encoded images in place of pixels; with ``alone``, rows are
        encoded one by one.
        """
        if IMAGES not in inputs:
            pixels = inputs["pixel_values"]
            prompt = self.encoder_prompt.expand(len(pixels), -1)
            return {"states": self.family.encode(self.model, pixels, prompt)}
        images = inputs[IMAGES]
        if not alone and images.keys is None and self.joins(inputs):
            features: Any = self.read_images(self.arguments(inputs))
        else:
            keys = images.keys or [None] * len(images.value)
            rows = [self.arguments(row) for _, row in by_rows(inputs)]
            features = list(map(self._read_kept, rows, keys))
        others = [
            {name: t for name, t in row.items() if not t.is_floating_point()}
            for row in images.value
        ]
        return {**inputs, IMAGES: Nested(others), FEATURES: Nested(features)}

    def _read_kept(self, row: Inputs, name: str | None) -> Inputs:
        """Visual tokens of a row: from ``kept`` or computed, and then kept if there is
        room.
        """
        if name is None or not self.keeps_tokens():
            return self.read_images(row)
        device = row["input_ids"].device
        cast = torch.is_autocast_enabled(device.type)
        precision = cast and torch.get_autocast_dtype(device.type)
        version = sum(parameter._version for parameter in self._visual_parameters())
        key = (name, precision, version)
        if key not in self.kept:
            with torch.no_grad(), dropout_off(self.model):  # for all later steps
                tokens = self.read_images(row)
            size = sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves(tokens))
            if size > self.kept.room:
                return tokens
            self.kept.room -= size
            self.kept[key] = Nested(tokens).to("cpu")
        return self.kept[key].to(device).value

    def read_images(self, arguments: Inputs) -> Inputs:
        """The fields of the vision tower's output that the text model may read."""
        tower_inputs = {
            name: arguments[name] for name in self.image_inputs & arguments.keys()
        }
        output = self.model.base_model.get_image_features(
            **tower_inputs, return_dict=True
        )
        return {key: value for key, value in output.items() if key not in UNREAD}

    # Arguments of the model

    def joins(self, inputs: Inputs) -> bool:
        """Whether the rows of a batch are one pass; else they are read one by one."""
        if IMAGES not in inputs or len(inputs[IMAGES].value) == 1:
            return True
        shapes = [
            {name: self.mode.padded or value.shape[1:] for name, value in row.items()}
            for row in inputs[IMAGES].value
        ]
        return self.mode.prefix == "batch" and all(row == shapes[0] for row in shapes)

    def parts(self, inputs: Inputs) -> list[tuple[Any, Inputs]]:
        """The passes over a batch, (index of the rows, their inputs): the whole batch,
        or each row.
        """
        if self.joins(inputs):
            return [(slice(None), inputs)]
        return by_rows(inputs)

    def arguments(self, inputs: Inputs) -> Inputs:
        """Arguments of the model for rows that are one pass. Visual tokens are wrapped
        in an output of the model; a row alone loses its padding.
        """
        model_inputs: Inputs = {
            name: value for name, value in inputs.items() if isinstance(value, Tensor)
        }
        if IMAGES not in inputs:
            return model_inputs
        rows = inputs[IMAGES].value
        if len(rows) == 1:
            length = int(model_inputs["attention_mask"].sum())
            model_inputs = {
                name: value[:, -length:] for name, value in model_inputs.items()
            }
        model_inputs |= {name: join([row[name] for row in rows]) for name in rows[0]}
        if FEATURES in inputs:
            features = inputs[FEATURES].value
            if isinstance(features, list):
                features = join_features(features)
            output: Any = BaseModelOutputWithPooling()
            for name, value in {**dict.fromkeys(UNREAD), **features}.items():
                setattr(output, name, value)
            model_inputs[ENCODED] = {"image": output}
        return model_inputs

    # Passes over text

    def _score(self, inputs: Inputs, token_ids: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = torch.ones_like(token_ids, dtype=torch.bool)
            return self._score(inputs, token_ids, mask).unflatten(0, token_ids.shape)
        logits = []
        for rows, part_inputs in self.parts(inputs):
            chosen = mask[rows].flatten(0, 1)
            captions = chosen.any(-1).nonzero().squeeze(-1)
            if len(captions):
                image = captions // token_ids.shape[1]
                ids = token_ids[rows].flatten(0, 1)[captions, :-1]
                arguments = self.arguments(part_inputs)
                logits.append(self._score_part(arguments, ids, image, chosen[captions]))
        return torch.cat(logits)

    def _score_part(
        self, arguments: Inputs, ids: Tensor, image: Tensor, scored: Tensor
    ) -> Tensor:
        """Logits [P, V] of the positions ``scored`` [M, L] of M captions. ``ids`` [M, L
        - 1] are their tokens but the last, ``image`` [M] their images.
        """
        length = scored.shape[1]
        if self.family.cross_attention:
            # Prompt and caption in one pass, which the backward pass frees layer by layer.
            states = arguments["states"]
            ids = torch.cat([self.start.expand(len(ids), -1), ids], dim=1)
            with output_of(self.text_model, lambda hidden: hidden[:, -length:][scored]):
                state = State(packing_cache(image, len(states)), states)
                return self.family.read(self, state, ids)
        if self.mode.prefix == "none":
            return self._score_plainly(arguments, ids, scored)
        first: list[Tensor] = []  # hidden states before the captions' first tokens

        def last_kept(hidden: Tensor) -> Tensor:
            """Keep the last hidden state of each row, and compute its logits alone."""
            first.append(hidden[:, -1:])
            return first[0]

        with output_of(self.text_model, last_kept):
            logits, state = self.family.begin(self, arguments, PromptLayer)
        if length == 1:
            return logits[image]
        with output_of(
            self.text_model,
            lambda hidden: torch.cat([first[0][image], hidden], 1)[scored],
        ):
            return self.family.read(self, state.of_captions(image), ids)

    def _score_plainly(self, row: Inputs, ids: Tensor, scored: Tensor) -> Tensor:
        """Score each caption by a pass over image, prompt and caption, as the model
        itself does.
        """
        prompt = row["input_ids"]
        length = scored.shape[1]
        texts = {}
        logits = []
        for name, value in row.items():
            if isinstance(value, Tensor) and value.shape == prompt.shape:
                padding = int(name == "attention_mask")  # other types are the text's
                texts[name] = nn.functional.pad(value, (0, length - 1), value=padding)
        for caption, some in zip(ids, scored, strict=True):
            texts["input_ids"] = torch.cat([prompt, caption[None]], dim=1)
            with output_of(self.text_model, lambda h, own=some: h[:, -length:][:, own]):  # type: ignore[misc]
                logits.append(self.model(**row | texts, use_cache=False).logits[0])
        return torch.cat(logits)


def by_rows(inputs: Inputs) -> list[tuple[Tensor, Inputs]]:
    """Each row of a batch, with its index [1]."""
    rows = torch.arange(len(next(iter(inputs.values())))).split(1)
    return [(row, select_rows(inputs, row)) for row in rows]


def output_of(text_model: Any, chosen: Callable[[Tensor], Tensor]) -> Any:
    """Context in which the output layer computes logits of ``chosen(hidden)`` and not
    of all hidden states [N, T, D].
    """

    def choose(_: nn.Module, arguments: Any) -> Any:
        """Forward pre-hook that leaves the chosen hidden states."""
        return chosen(arguments[0]), *arguments[1:]

    return text_model.get_output_embeddings().register_forward_pre_hook(choose)


def collate(
    prompts: Sequence[Inputs], pad: int, keys: Sequence[str] | None = None
) -> Inputs:
    """Collate the inputs of B prompts to one batch.

    Inputs of the shape of ``input_ids`` [1, P] are text: they are padded on the left
    and joined, ``input_ids`` first. Inputs made from images stay a list by row: they
    may hold indices into their row, and rows may have different ones.
    """
    names = [
        name
        for name in prompts[0]
        if all(prompt[name].shape == prompt["input_ids"].shape for prompt in prompts)
    ]
    batch: Inputs = {}
    for name in sorted(names, key="input_ids".__ne__):
        texts = [prompt[name].squeeze(0) for prompt in prompts]
        value = pad if name == "input_ids" else 0
        batch[name] = pad_sequence(texts, True, value, padding_side="left")
    images = [
        {name: value for name, value in prompt.items() if name not in batch}
        for prompt in prompts
    ]
    return {**batch, IMAGES: Nested(images, keys)}


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [N, ...] joined along their first dimension, padded with zeros to the largest."""
    sizes = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]
    padded = [tensor.new_zeros(len(tensor), *sizes) for tensor in tensors]
    for whole, tensor in zip(padded, tensors, strict=True):
        whole[tuple(map(slice, tensor.shape))] = tensor
    return torch.cat(padded)


def join_features(rows: Sequence[Inputs]) -> Inputs:
    """Join the visual tokens of rows to one batch.

    ``pooler_output`` is a tensor or a list with an entry for each image; other lists
    have an entry for each layer. ``self_check`` finds models that differ.
    """

    fields: dict[str, Any] = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if name == "pooler_output" and not isinstance(first, Tensor):
            fields[name] = list(chain(*values))
        else:
            fields[name] = tree_map(lambda *some: torch.cat(some), *values)
    return fields
