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
from rewards.clip.checkpoints import load_file, load_tuned
from rewards.clip.dual import MODEL_TYPE, PretrainedDual
from rewards.clip.encoder import (
    RELEASED,
    CachedEncoder,
    EncoderOptions,
)
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
from rewards.clip.pretrained import ClipText
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
from rewards.registry import ADDRESSES, CHECKPOINTS
from rewards.trust import trust, trusted_names

logger = logging.getLogger(__name__)
T = TypeVar("T")
WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
SORTED_BATCHES = 16
"""Captions tokenised and sorted by length at a time, over ``batch_size``. They are then encoded in
batches of as many tokens as ``batch_size`` captions of full length have.
"""
_UNLOADABLE = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    KeyError,
    AttributeError,
    TypeError,
    AssertionError,
    pickle.UnpicklingError,
)
"""What loading raises: a failed download, an unknown name, weights of another shape, a damaged
file, no such device.
"""


@dataclass
class _Network:
    """A network with its tokenizer and preprocessing."""

    model: nn.Module
    tokenizer: Any
    """Has ``tokenize``, ``count_tokens`` and ``lengths`` of a ``TextEncoder``."""
    preprocessing: Preprocessing
    context_length: int
    architecture: str
    encode_text: Callable[[Tensor], Tensor]
    """Ids [N, L] -> embeddings [N, D]."""
    encode_tokens: Callable[[Tensor], Tensor] | None
    """Ids [N, L] -> embeddings of their tokens [N, L, D]; None where the text tower tells none."""
    trims: bool
    """Text embeddings do not depend on padding: ids may be cut after the longest caption."""
    note: str = ""
    """For the signature, after the name of the weights."""
    long_layout: bool = False


def _in_own_precision(method: Callable[..., T]) -> Callable[..., T]:
    """Without gradients or the caller's autocast: embeddings are cached, and scores signed, as of
    one precision.
    """

    @wraps(method)
    def embed(self: FrozenEncoder, *positional: Any, **named: Any) -> T:
        with (
            torch.no_grad(),
            torch.autocast(torch.device(self.device).type, enabled=False),
        ):
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
        self.name, self.pretrained, self.device = (
            str(options.backbone),
            options.pretrained,
            device,
        )
        self._options = replace(options, backbone=self.name, device=device)
        self._loaded: _Network | None = _load(self._options)
        self.context_length = self._loaded.context_length
        self.long_layout = self._loaded.long_layout
        """Whether the file has the layout of Long-CLIP's and SPECS's released weights."""
        self.fingerprint = _fingerprint(self._loaded, options.precision)
        label = Path(self.name).name if Path(self.name).is_dir() else self.name
        if self.pretrained:
            label += f"/{Path(self.pretrained).name}"
        parts = [label, self.fingerprint[:12], options.precision, self._loaded.note]
        if not options.truncate:
            parts.append("no truncation")
        self.signature = ",".join(filter(None, parts))

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
                    f"the weights of {self.signature} changed since it was pickled"
                )
            self._loaded = loaded
        return self._loaded

    def encode_images(
        self, images: Sequence[ImageSource], normalize: bool = True
    ) -> Tensor:
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
        dtype = getattr(torch, DTYPES[self._options.precision])
        return _features(encode(pixels.to(self.device, dtype)), normalize)

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
            lengths = torch.full((len(ids),), ids.shape[1])
            if network.trims:
                lengths = self.token_lengths(ids)
            features = embed_by_length(
                network.encode_text,
                ids,
                lengths,
                batch_size * ids.shape[1],
                self.device,
            )
            groups.append(_features(features, normalize).cpu())
        return torch.cat(groups) if groups else torch.zeros(0, 0)

    def count_tokens(self, text: str) -> int:
        """See ``DualEncoder.count_tokens``; by the model's own tokenizer."""
        return self._network().tokenizer.count_tokens(text)

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
            for tokens, row, end in zip(ids, rows, lengths.tolist(), strict=True):
                embedded.append((tokens[:end], row[:end]))
        return embedded

    def token_lengths(self, ids: Tensor) -> Tensor:
        """Numbers of tokens [N] of ids [N, L], before the padding."""
        return self._network().tokenizer.lengths(ids)

    def token_ids(self, texts: list[str]) -> Tensor:
        """Token ids [N, L] of N captions, padded; L is at most ``context_length``. Raises as
        ``encode_texts``.
        """
        if not self._options.truncate:
            for text in texts:
                count = self.count_tokens(text)
                if count > self.context_length:
                    raise RewardError(
                        f"caption {text!r:.80} has {count} tokens, {self.name} reads "
                        f"{self.context_length}: shorten it, or score with truncate=True"
                    )
        return self._network().tokenizer.tokenize(texts, self.context_length)


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
        if Path(name).is_dir() and not Path(name, "open_clip_config.json").is_file():
            loaded = _load_folder(name, options)
        else:
            loaded = _load_open_clip(name, options)
        dtype = getattr(torch, DTYPES[options.precision])
        loaded.model.requires_grad_(False).eval().to(device=options.device, dtype=dtype)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{label} needs {error.name}: pip install 'rl-caption[clip]'"
        ) from error
    except _UNLOADABLE as error:
        raise ValueError(f"backbone {label} cannot be loaded: {error}") from error
    return loaded


def _load_folder(folder: str, options: EncoderOptions) -> _Network:
    """A model of this package: a dual of pretrained encoders, or a student."""
    if options.pretrained or options.tuned_from:
        raise ValueError(
            "a folder has its own weights: leave 'pretrained' and 'tuned_from' out"
        )
    if has_model_type(folder, MODEL_TYPE):
        return _dual_network(PretrainedDual.from_pretrained(folder))
    return _student_network(LCLIP.from_pretrained(folder))


def _dual_network(model: PretrainedDual) -> _Network:
    return _Network(
        model=model,
        tokenizer=model.text_encoder,
        preprocessing=model.preprocessing,
        context_length=model.context_length,
        architecture=repr(model.config),
        encode_text=model.encode_text,
        encode_tokens=lambda ids: model.text_head(model.text_encoder(ids)),
        trims=True,
    )


def _student_network(model: LCLIP) -> _Network:
    config, text = model.config, model.text
    return _Network(
        model=model,
        tokenizer=ClipText(clip_tokenizer(), config.context_length),
        preprocessing=model.image.preprocessing,
        context_length=config.context_length,
        architecture=repr(config) + (config.image_encoder or ""),
        encode_text=model.encode_text,
        encode_tokens=lambda ids: text.head(text.norm(text.states(ids))),
        trims=config.pad_attention == "masked",
    )


def ask_for_weights(name: str, tag: str) -> None:
    """Check with one request that the weights of an architecture can be had: by open_clip's tag
    from the hub or its cache; a file is on this machine.

    Raises:
        OSError: there is neither a connection nor a copy. Without this check libraries try again
            for a minute.
    """
    import open_clip
    from huggingface_hub import try_to_load_from_cache

    owner, _, file = (
        open_clip.get_pretrained_cfg(name, tag).get("hf_hub", "").rpartition("/")
    )
    files = [file] if file else WEIGHT_FILES
    cached = any(
        isinstance(try_to_load_from_cache(owner, one), str) for one in files if owner
    )
    if owner and not Path(tag).is_file() and not cached:
        ask_hub(owner, file or "open_clip_config.json")


def _load_open_clip(name: str, options: EncoderOptions) -> _Network:
    import open_clip

    if Path(name).is_dir():
        check_folder(Path(name))
        name = f"local-dir:{name}"
    model, note, layout = _open_clip_model(name, options)
    preprocessing = preprocessing_of(model.visual)
    config = open_clip.get_model_config(name) or {}
    if layout == "plain" and is_main_process():
        logger.info(
            "%s does not record activation and preprocessing. Those of %s are used: %s and mean "
            "%s. OpenAI's weights need QuickGELU (ViT-B-32-quickgelu)",
            options.pretrained,
            name,
            "QuickGELU" if config.get("quick_gelu") else "GELU",
            preprocessing.mean,
        )
    is_native = isinstance(model, open_clip.CLIP)
    causal = (
        is_native and model.attn_mask is not None and model.text_pool_type == "argmax"
    )
    tokenizer = open_clip_tokenizer(name)
    # A text tower of Transformers was trained on fewer tokens than it has positions, and may not
    # say how many it has.
    limited = tokenizer if config.get("text_cfg", {}).get("hf_model_name") else model
    context_length = int(getattr(limited, "context_length", 77))
    return _Network(
        model=model,
        tokenizer=ClipText(tokenizer, context_length),
        preprocessing=preprocessing,
        context_length=context_length,
        architecture=repr(model) + json.dumps(config, sort_keys=True),
        trims=causal,
        encode_text=partial(causal_text_features, model)
        if causal
        else model.encode_text,
        encode_tokens=partial(causal_token_features, model) if causal else None,
        note=note,
        long_layout=layout == "long",
    )


def _open_clip_model(name: str, options: EncoderOptions) -> tuple[Any, str, str | None]:
    """A model of open_clip; a note for signatures; the layout of a file that is no tuned one."""
    import open_clip

    pretrained, tuned_from = options.pretrained, options.tuned_from
    has_weights = name.startswith(("hf-hub:", "local-dir:"))
    if has_weights == (pretrained is not None):
        raise ValueError(
            "it has its own weights: leave 'pretrained' out"
            if has_weights
            else "an architecture needs 'pretrained': a tag of open_clip or a file"
        )
    if name.startswith("hf-hub:"):
        ask_hub(name.removeprefix("hf-hub:"), "open_clip_config.json")
    if has_weights:
        check_open_clip(
            open_clip.get_model_config(name) or {}, f"open_clip_config.json of {name}"
        )
    tag: dict[str, Any] = (
        open_clip.get_pretrained_cfg(name, pretrained) if pretrained else {}
    )
    # The tag tells the activation; the architecture ViT-B-32 alone would run OpenAI's weights with
    # another one.
    quick_gelu = bool(tag and tag.get("quick_gelu"))
    file = Path(pretrained or "")
    if file.suffix in CHECKPOINTS and not file.is_file():
        address = ADDRESSES.get(file.name)
        download = f": download it from {address}" if address else ""
        raise ValueError(f"there is no file {pretrained}{download}")
    architecture, start = RELEASED.get(file.name, (None, None))
    if tuned_from is None and architecture == name and file.is_file():
        tuned_from = start  # for any score: the architecture may have another activation and mean
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="QuickGELU mismatch")
        if pretrained is not None and tuned_from is not None:
            return load_tuned(name, file, tuned_from), f"tuned from {tuned_from}", None
        if pretrained is not None and file.is_file():
            model, layout = load_file(name, file, quick_gelu)
            return model, "", layout
        if pretrained is not None:
            ask_for_weights(name, pretrained)
        model = open_clip.create_model(
            name, pretrained, force_quick_gelu=quick_gelu, require_pretrained=True
        )
    return model, "", None


def _fingerprint(loaded: _Network, precision: str) -> str:
    return fingerprint(
        loaded.model.state_dict(), loaded.architecture, loaded.preprocessing, precision
    )


def _features(features: Tensor, normalize: bool) -> Tensor:
    return (
        nn.functional.normalize(features.float(), dim=-1)
        if normalize
        else features.float()
    )
