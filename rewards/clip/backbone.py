"""Frozen dual encoders, loaded by name: open_clip models, L-CLIP students, and duals of pretrained
encoders.

Captions are tokenised by the model's own tokenizer: CLIP's BPE of 49,408 tokens for CLIP models and
students, that of the text encoder for a ``PretrainedDual``.
"""

from __future__ import annotations

import json
import logging
import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rewards.base import RewardError
from rewards.clip.checkpoints import load_file, load_tuned, stretch_student, stretch_text_tower
from rewards.clip.dual import MODEL_TYPE, PretrainedDual
from rewards.clip.encoder import RELEASED, CachedEncoder, EncoderOptions
from rewards.clip.preprocessing import (
    Preprocessing,
    causal_text_features,
    causal_token_features,
    clip_tokenizer,
    embed_by_length,
    open_clip_tokenizer,
    pixels,
    preprocessing_of,
)
from rewards.clip.student import LCLIP
from rewards.devices import DTYPES, chunks, default_device, is_main_process
from rewards.images import ImageSource
from rewards.model_files import (
    ask_hub,
    check_folder,
    check_open_clip,
    fingerprint,
    has_model_type,
)
from rewards.trust import trust, trusted_names

logger = logging.getLogger(__name__)
T = TypeVar("T")
SORTED_BATCHES = 16
"""Captions tokenised and sorted by length at a time, over ``batch_size``. They are then encoded in
batches of as many tokens as ``batch_size`` captions of full length have.
"""
_UNLOADABLE = (
    *(
        OSError,
        EOFError,
        ValueError,
        RuntimeError,
        KeyError,
        AttributeError,
        TypeError,
        AssertionError,
    ),
    pickle.UnpicklingError,
)
"""What loading raises: a failed download, an unknown name, weights of another shape, a damaged
file, no such device.
"""


@dataclass
class _Network:
    """A network with its tokenizer and preprocessing."""

    model: nn.Module
    tokenize: Callable[
        [list[str]], Tensor
    ]  # captions -> ids [N, L], padded, truncated at ``context_length``
    count_tokens: Callable[[str], int]  # of a caption that is not truncated, special ones included
    preprocessing: Preprocessing
    context_length: int
    architecture: str
    # whether text embeddings do not depend on padding, so that ids may be cut after the longest
    # caption
    trims: bool
    encode_text: Callable[[Tensor], Tensor]
    # Ids [N, L] -> numbers of tokens [N] before the padding; EOT is the largest id.
    lengths: Callable[[Tensor], Tensor] = lambda ids: ids.argmax(dim=1) + 1
    # Ids [N, L] -> embeddings of their tokens [N, L, D]; None where the text tower tells none.
    encode_tokens: Callable[[Tensor], Tensor] | None = None
    note: str = ""  # for the signature, after the name of the weights
    long_layout: bool = False


def _in_own_precision(method: Callable[..., T]) -> Callable[..., T]:
    """Without gradients or the caller's autocast: embeddings are cached, and scores signed, as of
    one precision.
    """

    @wraps(method)
    def embed(self: FrozenEncoder, *positional: Any, **named: Any) -> T:
        with torch.no_grad(), torch.autocast(torch.device(self.device).type, enabled=False):
            return method(self, *positional, **named)

    return embed


class FrozenEncoder:
    """A frozen dual encoder that was loaded by name. It is pickled without its weights and loads
    them again.

    Raises:
        ValueError: the weights cannot be found, downloaded or loaded, or an option does not go with
            them.
    """

    def __init__(self, options: EncoderOptions) -> None:
        device = default_device(options.device)
        self.name, self.pretrained, self.device = str(options.backbone), options.pretrained, device
        self._options = replace(options, backbone=self.name, device=device)
        self._loaded: _Network | None = _load(self._options)
        self.context_length = self._loaded.context_length
        self.long_layout = self._loaded.long_layout
        """Whether the file has the layout of Long-CLIP's and SPECS's released weights."""
        self.fingerprint = _fingerprint(self._loaded, options.precision)
        source = Path(self.name).name if Path(self.name).is_dir() else self.name
        label = f"{source}/{Path(self.pretrained).name}" if self.pretrained else source
        notes = [self._loaded.note, "" if options.truncate else "no truncation"]
        notes.append("" if options.context_length is None else f"{options.context_length} tokens")
        self.signature = ",".join(
            [label, self.fingerprint[:12], options.precision, *filter(None, notes)]
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the network, and with what the user trusts: it is loaded again in another
        process.
        """
        return {**self.__dict__, "_loaded": None, "_trusted": trusted_names()}

    @property
    def model(self) -> nn.Module:
        """The network itself."""
        return self._network().model

    @property
    def preprocessing(self) -> Preprocessing:
        """From an image to the pixels that the image encoder reads."""
        return self._network().preprocessing

    def _network(self) -> _Network:
        if self._loaded is None:
            trust(self.__dict__.get("_trusted", ()))
            try:
                loaded = _load(self._options)
            except (ValueError, OSError) as error:
                raise RewardError(str(error)) from error
            if _fingerprint(loaded, self._options.precision) != self.fingerprint:
                raise RewardError(
                    f"the weights of {self.signature} have changed since it was pickled: scores "
                    f"would not be comparable"
                )
            self._loaded = loaded
        return self._loaded

    def encode_images(self, images: Sequence[ImageSource], normalize: bool = True) -> Tensor:
        """Embed N images: [N, D], float32, on the CPU, of length 1 if ``normalize``.

        Images are read or drawn batch by batch.

        Raises:
            RewardError: an image is missing or unreadable; the message names it.
        """
        preprocessing = self._network().preprocessing
        batches = []
        for batch in chunks(images, self._options.batch_size, "embedding images"):
            stacked = torch.stack([pixels(source, preprocessing) for source in batch])
            batches.append(self.encode_pixels(stacked, normalize).cpu())
        return torch.cat(batches) if batches else torch.zeros(0, 0)

    @_in_own_precision
    def encode_pixels(self, pixels: Tensor, normalize: bool = True) -> Tensor:
        """Embed pixels [N, 3, S, S] as [N, D], float32, on the model's device."""
        encode: Any = self._network().model.encode_image
        return _features(
            encode(pixels.to(self.device, getattr(torch, DTYPES[self._options.precision]))),
            normalize,
        )

    @_in_own_precision
    def encode_texts(self, texts: Sequence[str], normalize: bool = True) -> Tensor:
        """Embed N captions: [N, D], float32, on the CPU, of length 1 if ``normalize``.

        Captions above ``context_length`` tokens are truncated at the end, as in CLIPScore.

        Raises:
            RewardError: a caption is too long and ``truncate`` is off.
        """
        network, groups, batch_size = self._network(), [], self._options.batch_size
        for group in chunks(texts, SORTED_BATCHES * batch_size, "embedding captions"):
            ids = self.token_ids(list(group))
            lengths = (
                network.lengths(ids) if network.trims else torch.full((len(ids),), ids.shape[1])
            )
            features = embed_by_length(
                network.encode_text, ids, lengths, batch_size * ids.shape[1], self.device
            )
            groups.append(_features(features, normalize).cpu())
        return torch.cat(groups) if groups else torch.zeros(0, 0)

    def count_tokens(self, text: str) -> int:
        """See ``DualEncoder.count_tokens``; by the model's own tokenizer."""
        return self._network().count_tokens(text)

    def too_long(self, texts: Sequence[str]) -> int:
        """Number of captions that have more tokens than ``context_length``, so that their end is
        cut.
        """
        return sum(self.count_tokens(text) > self.context_length for text in texts)

    @property
    def has_tokens(self) -> bool:
        """Whether the text tower gives an embedding of every token (``encode_tokens``)."""
        return self._network().encode_tokens is not None

    @_in_own_precision
    def encode_tokens(self, texts: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
        """Return token ids [L] and token embeddings [L, D] of each caption: float32, on the CPU, of
        length 1.

        L includes start and end. The state of a token goes through the same layers as the caption's
        pooled state, so the embedding of the token that is pooled is the embedding of the caption.
        Raises as ``encode_texts``.
        """
        network, embedded = self._network(), []
        assert network.encode_tokens is not None, "has_tokens is asked first"
        for batch in chunks(texts, self._options.batch_size, "embedding tokens"):
            ids = self.token_ids(list(batch))
            lengths = self.token_lengths(ids)
            if network.trims:
                ids = ids[:, : int(lengths.max())]
            rows = _features(network.encode_tokens(ids.to(self.device)), True).cpu()
            ends = lengths.tolist()
            embedded += [
                (tokens[:end], row[:end]) for tokens, row, end in zip(ids, rows, ends, strict=True)
            ]
        return embedded

    def token_lengths(self, ids: Tensor) -> Tensor:
        """Numbers of tokens [N] of ids [N, L], before the padding."""
        return self._network().lengths(ids)

    def token_ids(self, texts: list[str]) -> Tensor:
        """Token ids [N, L] of N captions, padded; L is at most ``context_length``. Raises as
        ``encode_texts``.
        """
        network = self._network()
        if not self._options.truncate:
            for text in texts:
                count = self.count_tokens(text)
                if count > self.context_length:
                    raise RewardError(
                        f"caption {text!r:.80} has {count} tokens, {self.name} reads "
                        f"{self.context_length}: "
                        "shorten it, or score with truncate=True"
                    )
        return network.tokenize(texts)


def load_frozen_encoder(
    name: str, pretrained: str | None = None, device: str = "cpu", **options: Any
) -> FrozenEncoder:
    """Load a ``FrozenEncoder`` of ``EncoderOptions(name, pretrained, device, **options)``. Raises
    as these do.
    """
    return FrozenEncoder(EncoderOptions(name, pretrained, device, **options))


def load_encoder(options: EncoderOptions) -> CachedEncoder:
    """Load the encoder of a score, unless ``options.backbone`` is a loaded one already, and open
    its cache.

    Raises:
        ValueError: the weights cannot be found, downloaded or loaded, or an option does not go with
            them.
    """
    encoder = options.backbone
    if isinstance(encoder, CachedEncoder):
        return encoder
    if isinstance(encoder, str | Path):
        encoder = FrozenEncoder(options)
    return CachedEncoder(encoder, options.cache_dir, options.cache_images)


def _load(options: EncoderOptions) -> _Network:
    name, pretrained = str(options.backbone), options.pretrained
    label = f"{name!r}" + (f" with weights {pretrained!r}" if pretrained else "")
    try:
        if not Path(name).is_dir():
            loaded = _load_open_clip(name, options)
        elif (Path(name) / "open_clip_config.json").is_file():
            check_folder(Path(name))
            loaded = _load_open_clip(f"local-dir:{name}", options)
        elif has_model_type(name, "clip"):
            raise ValueError(
                f"it is a CLIP of Transformers: name the architecture in open_clip "
                f"(ViT-B-32-quickgelu for OpenAI's), "
                f"and set 'pretrained' to {str(Path(name) / 'model.safetensors')!r}"
            )
        else:
            is_dual = has_model_type(name, MODEL_TYPE)
            is_stretched = is_dual and options.context_length is not None
            if pretrained is not None or options.tuned_from is not None or is_stretched:
                raise ValueError(
                    "a folder has its own weights, and a dual encoder its own positions: "
                    "leave 'pretrained', 'tuned_from' and 'context_length' out"
                )
            loaded = _load_dual(name) if is_dual else _load_student(name, options)
        dtype = getattr(torch, DTYPES[options.precision])
        loaded.model.requires_grad_(False).eval().to(device=options.device, dtype=dtype)
    except ModuleNotFoundError as error:
        raise ValueError(f"{label} needs {error.name}: pip install 'rl-caption[clip]'") from error
    except _UNLOADABLE as error:
        raise ValueError(f"backbone {label} cannot be loaded: {error}") from error
    return loaded


def _load_dual(folder: str) -> _Network:
    model = PretrainedDual.from_pretrained(folder)
    return _Network(
        model=model,
        tokenize=model.tokenize,
        count_tokens=model.text_encoder.count_tokens,
        preprocessing=model.preprocessing,
        context_length=model.context_length,
        architecture=repr(model.config),
        trims=True,
        encode_text=model.encode_text,
        lengths=model.text_encoder.lengths,
        encode_tokens=lambda ids: model.text_head(model.text_encoder(ids)),
    )


def _load_student(folder: str, options: EncoderOptions) -> _Network:
    model = LCLIP.from_pretrained(folder)
    if options.context_length is not None:
        stretch_student(model, options.context_length)
    config = model.config
    tokenize, count_tokens = _tokenizer(clip_tokenizer(), config.context_length)
    return _Network(
        model=model,
        tokenize=tokenize,
        count_tokens=count_tokens,
        preprocessing=model.image.preprocessing,
        context_length=config.context_length,
        architecture=repr(config) + (config.image_encoder or ""),
        trims=config.pad_attention == "masked",
        encode_text=model.encode_text,
        encode_tokens=lambda ids: model.text.head(model.text.norm(model.text.states(ids))),
    )


def _load_open_clip(name: str, options: EncoderOptions) -> _Network:
    import open_clip

    pretrained, tuned_from = options.pretrained, options.tuned_from
    has_weights = name.startswith(("hf-hub:", "local-dir:"))
    if has_weights == (pretrained is not None):
        raise ValueError(
            "it has its own weights: leave 'pretrained' out"
            if has_weights
            else "an architecture needs 'pretrained': a tag of open_clip (see open_clip.list_pretrained()) or a file"
        )
    if name.startswith("hf-hub:"):
        ask_hub(name.removeprefix("hf-hub:"), "open_clip_config.json")
    if has_weights:
        check_open_clip(open_clip.get_model_config(name) or {}, f"open_clip_config.json of {name}")
    tag: dict[str, Any] = open_clip.get_pretrained_cfg(name, pretrained) if pretrained else {}
    # The tag tells the activation; the architecture ViT-B-32 alone would run OpenAI's weights with
    # another one.
    quick_gelu, note, layout = bool(tag and tag.get("quick_gelu")), "", None
    released = RELEASED.get(Path(pretrained or "").name)
    if (
        tuned_from is None
        and released is not None
        and released[0] == name
        and Path(str(pretrained)).is_file()
    ):
        tuned_from = released[
            1
        ]  # for any score: the architecture alone may have another activation and mean
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="QuickGELU mismatch")
        if pretrained is not None and tuned_from is not None:
            model, note = load_tuned(name, Path(pretrained), tuned_from, options.mlp_deltas)
        elif pretrained is not None and Path(pretrained).is_file():
            model, layout = load_file(name, Path(pretrained), quick_gelu)
        else:
            model = open_clip.create_model(
                name, pretrained, force_quick_gelu=quick_gelu, require_pretrained=True
            )
    preprocessing = preprocessing_of(model.visual)
    if layout == "plain" and is_main_process():
        logger.info(
            "%s does not record activation and preprocessing. Those of %s are used: %s and mean "
            "%s. OpenAI's weights "
            "need QuickGELU (ViT-B-32-quickgelu)",
            pretrained, name, "QuickGELU" if (open_clip.get_model_config(name) or {}).get("quick_gelu") else "GELU",
            preprocessing.mean,
        )  # fmt: skip
    if options.context_length is not None:
        stretch_text_tower(model, options.context_length)
    native = isinstance(model, open_clip.CLIP)
    causal = native and model.attn_mask is not None and model.text_pool_type == "argmax"
    config, tokenizer = open_clip.get_model_config(name) or {}, open_clip_tokenizer(name)
    # A text tower of Transformers was trained on fewer tokens than it has positions, and may not
    # say how many it has.
    limited = tokenizer if config.get("text_cfg", {}).get("hf_model_name") else model
    context_length = int(getattr(limited, "context_length", 77))
    tokenize, count_tokens = _tokenizer(tokenizer, context_length)
    return _Network(
        model=model,
        tokenize=tokenize,
        count_tokens=count_tokens,
        preprocessing=preprocessing,
        context_length=context_length,
        architecture=repr(model) + json.dumps(config, sort_keys=True),
        trims=causal,
        encode_text=(lambda ids: causal_text_features(model, ids)) if causal else model.encode_text,
        encode_tokens=(lambda ids: causal_token_features(model, ids)) if causal else None,
        note=note,
        long_layout=layout == "long",
    )


def _tokenizer(
    tokenizer: Any, context_length: int
) -> tuple[Callable[[list[str]], Tensor], Callable[[str], int]]:
    """``tokenize`` and ``count_tokens`` of an open_clip tokenizer."""
    tokenize = partial(tokenizer, context_length=context_length)
    if hasattr(tokenizer, "encode"):
        return tokenize, lambda text: len(tokenizer.encode(text)) + 2  # start and end
    return tokenize, lambda text: len(
        tokenizer.tokenizer(tokenizer.clean_fn(text))["input_ids"]
    )  # one of Transformers


def _fingerprint(loaded: _Network, precision: str) -> str:
    return fingerprint(
        loaded.model.state_dict(), loaded.architecture, loaded.preprocessing, precision
    )


def _features(features: Tensor, normalize: bool) -> Tensor:
    return nn.functional.normalize(features.float(), dim=-1) if normalize else features.float()
