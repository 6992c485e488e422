"""Image and text encoders with their pretrained weights: from Transformers, open_clip,
or a user's own class.

An encoder is named by a library and a model of it, or by a class:

- ``transformers:NAME``: a vision or text model of Transformers by hub id or folder (ViT, DINOv2,
  ConvNeXt, BERT, GPT-2, Llama, ...). A dual encoder such as CLIP gives the tower that is asked for,
  a language model all but its output layer.
- ``open_clip:ARCHITECTURE/TAG``, an image encoder, such as ``open_clip:ViT-B-32/openai``; the tag
  may be a checkpoint file.
- ``package.module:Class``: constructed as ``Class(**kwargs)``; it has to satisfy ``ImageEncoder``
  or ``TextEncoder``.

Shapes: B batch, S pixels of a side, H x W cells of a grid, L tokens, D width of the encoder.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from PIL import Image
from torch import Tensor, nn

from rewards.base import naming
from rewards.clip.preprocessing import (
    Preprocessing,
    clip_tokenizer,
    preprocessing_of,
)
from rewards.frozen_model import most_tokens
from rewards.model_files import transformers_options
from rewards.options import load_target
from rewards.trust import check_trusted

UNLOADABLE = (
    OSError,
    ValueError,
    RuntimeError,
    KeyError,
    AttributeError,
    TypeError,
)
"""Exceptions of loading: a failed download, an unknown name, weights of another shape,
...
"""


@runtime_checkable
class ImageEncoder(Protocol):
    """A network (``nn.Module``) from pixels to a grid of features."""

    preprocessing: Preprocessing
    """Preprocessing from an image to the pixels that the network reads."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, S, S] -> features [B, H, W, D]."""
        ...


@runtime_checkable
class TextEncoder(Protocol):
    """A network (``nn.Module``) from token ids to a state of every token."""

    context_length: int
    """Longest caption in tokens, special ones included."""

    def tokenize(self, texts: Sequence[str], context_length: int) -> Tensor:
        """N captions -> ids [N, L], padded; L is at most ``context_length``, and longer
        captions are truncated.
        """
        ...

    def count_tokens(self, text: str) -> int:
        """Tokens of a caption that is not truncated, special ones included."""
        ...

    def lengths(self, ids: Tensor) -> Tensor:
        """Ids [B, L] -> number of tokens [B] before the padding."""
        ...

    def forward(self, ids: Tensor) -> Tensor:
        """Ids [B, L] -> states [B, L, D]. States of padding have no meaning; states of
        tokens do not depend on it.
        """
        ...


class TransformersImage(nn.Module):
    """A vision model of Transformers: ``last_hidden_state`` as a grid, without class
    and register tokens.
    """

    def __init__(self, name: str, pretrained: bool) -> None:
        from transformers import AutoImageProcessor

        super().__init__()
        options = transformers_options(name)
        self.model = _transformers(name, "vision_config", pretrained, options)
        if self.model.config.model_type == "vit_mae":
            raise ValueError(
                "a ViTMAEModel masks patches at random, also in evaluation"
            )
        processor = AutoImageProcessor.from_pretrained(name, backend="pil", **options)
        self.preprocessing = preprocessing_from(processor)
        self.built_from = (self.model.config, processor)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, H, W, D]."""
        return as_grid(self.model(pixel_values=pixels).last_hidden_state)


class OpenClipImage(nn.Module):
    """The image tower of an open_clip model: its last feature map, normalised, before
    pooling and projection.

    Args:
        name: ``ARCHITECTURE/TAG``; the tag names pretrained weights.
        pretrained: False leaves the weights random.
        vision_cfg: entries that replace entries of the architecture's ``vision_cfg`` in
            open_clip, such as ``{image_size: 64}``; only with random weights.
    """

    def __init__(
        self, name: str, pretrained: bool, vision_cfg: Mapping[str, Any] | None = None
    ) -> None:
        import open_clip

        super().__init__()
        architecture, _, tag = name.partition("/")
        config = open_clip.get_pretrained_cfg(architecture, tag)
        options: dict[str, Any] = {}
        if vision_cfg:
            shape = open_clip.get_model_config(architecture) or {}
            options["vision_cfg"] = {**shape.get("vision_cfg", {}), **vision_cfg}
        clip: Any = open_clip.create_model(
            architecture,
            tag if pretrained else None,
            require_pretrained=pretrained,
            force_quick_gelu=config.get("quick_gelu", False),
            **options,
        )
        self.model = clip.visual
        self.preprocessing = preprocessing_of(self.model)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, S, S] -> [B, H, W, D]."""
        features = self.model.forward_intermediates(
            pixels,
            indices=1,
            normalize_intermediates=True,
            intermediates_only=True,
            output_fmt="NCHW",
        )
        return as_grid(features["image_intermediates"][-1])


class TransformersText(nn.Module):
    """A text encoder or decoder language model of Transformers with its tokenizer.

    If the tokenizer has no padding token, its EOS is used for padding. If it adds no
    special token to a caption, as GPT-2's does not, EOS is appended, so that every
    caption has at least one token.

    Args:
        name: hub id or folder.
        pretrained: False leaves the weights random.
        bidirectional_blocks: number of last blocks of a decoder language model whose
            causal mask is removed, so that a token attends to all tokens of its
            caption. Captions are then cut to the model's sliding window.

    Raises:
        ValueError: the model is no text model, or one of these blocks has no causal
            self-attention or stays causal.
    """

    def __init__(
        self, name: str, pretrained: bool, bidirectional_blocks: int = 0
    ) -> None:
        from transformers import AutoTokenizer

        super().__init__()
        options = transformers_options(name)
        self.model = model = _transformers(name, "text_config", pretrained, options)
        if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
            raise ValueError(
                f"it is a {type(model).__name__}: expected an encoder of text"
            )
        tokenizer: Any = AutoTokenizer.from_pretrained(name, **options)
        self.tokenizer = tokenizer
        self.built_from = (model.config, tokenizer)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if not tokenizer("")["input_ids"]:
            tokenizer.add_eos_token = True
        if not tokenizer("")["input_ids"]:
            raise ValueError(
                "its tokenizer adds no special token to a caption: expected one"
            )
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        self.context_length = most_tokens(model.config, tokenizer)
        # CLIP pads with its end of text, which stands after every caption.
        self.ends_with_padding = int(
            tokenizer("a")["input_ids"][-1] == tokenizer.pad_token_id
        )
        if bidirectional_blocks:
            _attend_both_ways(model, bidirectional_blocks)
            for key in ("sliding_window", "attention_chunk_size"):
                window = getattr(model.config, key, None) or self.context_length
                self.context_length = min(self.context_length, window)

    def tokenize(self, texts: Sequence[str], context_length: int) -> Tensor:
        """Token ids [N, L] of texts, padded on the right, L <= ``context_length``."""
        return self.tokenizer(
            list(texts),
            padding=True,
            padding_side="right",
            truncation=True,
            max_length=context_length,
            return_tensors="pt",
        )["input_ids"]

    def count_tokens(self, text: str) -> int:
        return len(self.tokenizer(text)["input_ids"])

    def lengths(self, ids: Tensor) -> Tensor:
        # The padding token may also start a caption (GPT-2), so the last other token counts.
        numbers = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        last = (numbers * (ids != self.tokenizer.pad_token_id)).amax(dim=1)
        return (last + self.ends_with_padding).clamp(1, ids.shape[1])

    def forward(self, ids: Tensor) -> Tensor:
        """[B, L] -> [B, L, D]."""
        places = torch.arange(ids.shape[1], device=ids.device)
        mask = (places < self.lengths(ids)[:, None]).long()
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


class ClipText(nn.Module):
    """Tokens of a ``TextEncoder`` with a tokenizer of open_clip: start, tokens, end
    (the largest id), padding.
    """

    def __init__(self, tokenizer: Any, context_length: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.context_length = context_length

    def tokenize(self, texts: Sequence[str], context_length: int) -> Tensor:
        return self.tokenizer(list(texts), context_length=context_length)

    def count_tokens(self, text: str) -> int:
        if hasattr(self.tokenizer, "encode"):
            return len(self.tokenizer.encode(text)) + 2
        # open_clip's wrapper of one of Transformers
        cleaned = self.tokenizer.clean_fn(text)
        return len(self.tokenizer.tokenizer(cleaned)["input_ids"])

    def lengths(self, ids: Tensor) -> Tensor:
        return ids.argmax(dim=1) + 1


@dataclass(frozen=True)
class Texts:
    """Turns captions into the token ids that a text tower reads.

    Args:
        encoder: ``TextEncoder`` or ``ClipText`` whose tokenizer is used.
        context_length: longest caption in tokens, special ones included; longer ones are truncated.
        trims: pad to the longest caption of a batch; else to ``context_length``.
    """

    encoder: Any
    context_length: int
    trims: bool = True

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Ids [B, L]."""
        ids = self.encoder.tokenize(captions, self.context_length)
        return ids[:, : int(self.encoder.lengths(ids).max())] if self.trims else ids

    def too_long(self, captions: Sequence[str]) -> int:
        """Number of captions that are truncated."""
        counts = map(self.encoder.count_tokens, captions)
        return sum(count > self.context_length for count in counts)


def clip_texts(context_length: int, trims: bool) -> Texts:
    """The texts of a model with CLIP's tokenizer."""
    return Texts(ClipText(clip_tokenizer(), context_length), context_length, trims)


def as_grid(features: Tensor) -> Tensor:
    """Turn a feature map [B, D, H, W] or tokens [B, N, D] into a grid [B, H, W, D].

    Of N tokens the last H² are taken as a square grid, with the largest H that fits;
    the tokens before them are class and register tokens.
    """
    if features.ndim == 4:
        return features.permute(0, 2, 3, 1)
    side = math.isqrt(features.shape[1])
    return features[:, features.shape[1] - side * side :].unflatten(1, (side, side))


def load_part(
    protocol: type,
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    pretrained: bool = True,
) -> Any:
    """Load an ``ImageEncoder`` or a ``TextEncoder``, in evaluation mode, on the CPU.

    Args:
        protocol: ``ImageEncoder`` or ``TextEncoder``.
        name: as described at the top of this module.
        kwargs: arguments of the class. A text model of Transformers takes
            ``bidirectional_blocks`` (see ``TransformersText``), an image model of
            open_clip ``vision_cfg`` (see ``OpenClipImage``); other models of a library
            take none.
        pretrained: False leaves the weights random if the library allows it, for
            weights that are loaded later.

    Raises:
        ValueError: there is no such model, its library is not installed, or it does not
            satisfy ``protocol``.
    """
    libraries: dict[str, Any] = {"transformers": TransformersText}
    if protocol is ImageEncoder:
        libraries = {"transformers": TransformersImage, "open_clip": OpenClipImage}
    library, _, model = name.partition(":")
    what = f"{protocol.__name__} {name!r}"
    with naming(f"{what} cannot be loaded", UNLOADABLE):
        if library in libraries:
            encoder: Any = libraries[library](model, pretrained, **kwargs or {})
        else:
            encoder = load_target(name, what)(**kwargs or {})
    if not (isinstance(encoder, nn.Module) and isinstance(encoder, protocol)):
        needed = ", ".join(protocol.__annotations__)
        raise ValueError(
            f"{what} is a {type(encoder).__name__}: expected an nn.Module with {needed}"
        )
    return encoder.eval()


def save_encoder_config(encoder: Any, folder: Path) -> None:
    """Save configuration and tokenizer or processor of a model of Transformers, without weights."""
    for component in getattr(encoder, "built_from", ()):
        component.save_pretrained(folder)


def local_encoder(name: str, folder: Path) -> str:
    """Name that builds an encoder of a saved model again: from ``folder`` if
    ``save_encoder_config`` wrote it there.

    The name comes with the saved model, often from other people. It may be an
    architecture of open_clip, or what the user trusts (``rewards.trust``).

    Raises:
        ValueError: the name is anything else.
    """
    library = name.partition(":")[0]
    if library == "transformers":
        return f"transformers:{folder}"
    if library != "open_clip":
        check_trusted(name, f"{folder.name} in {folder.parent / 'config.json'}")
    return name


def _transformers(
    name: str, tower: str, pretrained: bool, options: Mapping[str, Any]
) -> Any:
    """Load a model or, from a dual encoder, its ``tower`` (``vision_config``,
    ``text_config``).
    """
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    config = AutoConfig.from_pretrained(name, **options)
    config = getattr(config, tower, config)
    dtype_options: Any = {"dtype": torch.float32}
    if not pretrained:
        return AutoModel.from_config(config, trust_remote_code=False, **dtype_options)
    level = logging.get_verbosity()
    # it warns of the other tower's weights, and of missing weights, which are checked below
    logging.set_verbosity_error()
    try:
        model, info = AutoModel.from_pretrained(
            name, config=config, output_loading_info=True, **dtype_options, **options
        )
    finally:
        logging.set_verbosity(level)
    absent = sorted(key for key in info["missing_keys"] if not _is_pooler(key))
    if absent:
        raise ValueError(
            f"its weights lack {len(absent)} of the {type(model).__name__}: {', '.join(absent[:3])}"
        )
    # Not random, so that the weights of two loads are equal.
    for key in info["missing_keys"]:
        nn.init.zeros_(model.get_parameter(key))
    return model


@torch.no_grad()
def _attend_both_ways(model: Any, count: int) -> None:
    """Take the causal mask from the attention of the last ``count`` blocks; padding stays masked.

    Raises:
        ValueError: there are fewer blocks, or a token in one of them still does not see
            later tokens.
    """
    for prefix in _last_blocks(model, count):
        for attention in model.get_submodule(prefix.rstrip(".")).modules():
            if getattr(attention, "is_causal", False) is True:
                # Decides where there is no mask, as without padding.
                attention.is_causal = False
                attention.register_forward_pre_hook(
                    _padding_mask_alone, with_kwargs=True
                )
    # Some models, such as GPT-Neo, have a causal mask of their own in the attention, besides the
    # one they are given.
    ids = torch.tensor([[0, 1, 0], [0, 2, 0]])
    mask = torch.tensor([[1, 1, 0]]).expand(2, 3)
    states = model.eval()(input_ids=ids, attention_mask=mask).last_hidden_state
    if torch.equal(states[0, 0], states[1, 0]):
        raise ValueError(
            f"the attention of a {type(model).__name__} stays causal: bidirectional_blocks cannot "
            f"be set"
        )


def _padding_mask_alone(
    attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give every query of a causal mask [B, 1, L, L] the row of the last query, which
    masks nothing but padding.
    """
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 4:
        kwargs["attention_mask"] = mask[:, :, -1:].expand_as(mask)
    return args, kwargs


@dataclass(frozen=True)
class ProcessorPixels(Preprocessing):
    """Pixels that an image processor of Transformers makes of RGB images."""

    settings: str = ""
    """All settings of the processor, as text."""
    processor: Any = field(default=None, repr=False, compare=False)

    def square(self, image: Image.Image) -> Tensor:
        rgb = image.convert("RGB")
        batch = self.processor(rgb, do_rescale=False, do_normalize=False)
        return torch.from_numpy(batch["pixel_values"][0])


def preprocessing_from(processor: Any) -> Preprocessing:
    """The preprocessing of an image processor. Raises ``ValueError`` if its output is not square."""
    settings = str(processor.to_dict())
    example = Image.new("RGB", (64, 48))
    _, height, width = ProcessorPixels(processor=processor).square(example).shape
    if height != width:
        raise ValueError(f"its image processor makes no square images: {settings}")
    # ``normalise`` divides by 255 first.
    scale = 255 * processor.rescale_factor if processor.do_rescale else 255
    channels = [[0.0] * 3, [1.0] * 3]
    if processor.do_normalize:
        channels = [processor.image_mean, processor.image_std]
    mean, std = (tuple(value / scale for value in values) for values in channels)
    return ProcessorPixels(height, mean, std, settings=settings, processor=processor)


@torch.enable_grad()
def open_blocks(encoder: Any, blocks: int | None) -> list[str]:
    """Freeze an encoder except for its last ``blocks`` blocks; return the names of the
    parameters that are trained.

    Blocks are the entries of the list of modules that has most of the encoder's weights
    (the layers of a Transformer, the stages of a ConvNet). Parameters registered after
    them, such as a final norm's, are trained as well. With 0 everything is frozen, with
    None nothing. Parameters that the output does not depend on, such as a pooler's,
    always stay frozen, because several processes would wait for their gradients.

    Raises:
        ValueError: the encoder has fewer blocks.
    """
    encoder.requires_grad_(blocks is None)
    if blocks:
        first = _last_blocks(encoder, blocks)[0]
        is_open = False
        for name, parameter in encoder.named_parameters():
            is_open |= name.startswith(first)
            parameter.requires_grad_(is_open)
    opened = [weight for weight in encoder.parameters() if weight.requires_grad]
    if opened:
        output = example_output(encoder).sum()
        gradients = torch.autograd.grad(output, opened, allow_unused=True)
        for weight, gradient in zip(opened, gradients, strict=True):
            weight.requires_grad_(gradient is not None)
    return [name for name, weight in encoder.named_parameters() if weight.requires_grad]


def _is_pooler(name: str) -> bool:
    """Whether a parameter is a pooler's or an open_clip projection's, on which no grid
    and no state depends.
    """
    owners = f".{name}"
    return ".pooler." in owners or ".attnpool." in owners or name == "model.proj"


def _last_blocks(encoder: nn.Module, count: int) -> list[str]:
    """Prefixes of the parameters of the last ``count`` blocks, in order. ``ValueError``
    where there are fewer.
    """

    def size(module: nn.Module) -> int:
        """Number of parameters without vocabularies, which outweigh all layers."""
        layers = [own for own in module.modules() if not isinstance(own, nn.Embedding)]
        return sum(
            own.numel() for layer in layers for own in layer.parameters(recurse=False)
        )

    sizes = {"": 0}
    for name, module in encoder.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            sizes[name] = size(module)
    parent = max(sizes, key=sizes.__getitem__)
    blocks = []
    if 4 * sizes[parent] > size(encoder):
        for name, child in encoder.get_submodule(parent).named_children():
            names = [f"{name}.{own}" for own, _ in child.named_parameters()]
            if not all(map(_is_pooler, names)):
                blocks.append(f"{parent}.{name}.")
    if len(blocks) < count:
        raise ValueError(f"it has {len(blocks)} blocks, not {count}")
    return blocks[-count:]


def example_output(encoder: Any) -> Tensor:
    """Output of an image encoder for a blank image, [1, H, W, D], or of a text encoder
    for one word, [1, L, D].
    """
    if isinstance(encoder, ImageEncoder):
        side = encoder.preprocessing.size
        example = torch.zeros(1, 3, side, side)
    else:
        example = encoder.tokenize(["a"], encoder.context_length)
    return encoder(example.to(next(encoder.parameters()).device))
