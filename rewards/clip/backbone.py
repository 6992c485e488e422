"""Frozen dual encoders, loaded by name: open_clip models, L-CLIP students, and duals of
pretrained encoders.

Captions are tokenised by the model's own tokenizer: CLIP's BPE of 49,408 tokens for
CLIP models and students, the text encoder's for a ``PretrainedDual``.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

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
    causal_features,
    embed_by_length,
    is_causal,
    open_clip_tokenizer,
    pixels,
    preprocessing_of,
)
from rewards.clip.pretrained import UNLOADABLE, ClipText, Texts
from rewards.clip.student import LCLIP
from rewards.devices import DTYPES, chunks, default_device
from rewards.images import ImageSource
from rewards.model_files import (
    ask_hub,
    check_folder,
    check_open_clip,
    fingerprint,
    has_model_type,
)
from rewards.registry import ADDRESSES, CHECKPOINTS

WEIGHT_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
SORTED_BATCHES = 16
"""Captions tokenised and sorted by length at a time, over ``batch_size``. They are then
encoded in batches of as many tokens as ``batch_size`` captions of full length have.
"""


@dataclass
class Network:
    """A dual encoder's network with its preprocessing, its tokenizer and its encoding
    functions.
    """

    model: nn.Module
    preprocessing: Preprocessing
    texts: Texts
    architecture: str
    encode_text: Callable[[Tensor], Tensor]
    """Ids [N, L] -> embeddings [N, D]."""
    encode_tokens: Callable[[Tensor], Tensor] | None = None
    """Ids [N, L] -> embeddings of their tokens [N, L, D]; None if the text tower gives
    no token embeddings.
    """
    note: str = ""
    """Note for the signature, after the name of the weights."""


class FrozenEncoder:
    """A frozen dual encoder that was loaded by name.

    Raises:
        ValueError: the weights cannot be found, downloaded or loaded, or an option does
            not go with them.
    """

    def __init__(self, options: EncoderOptions) -> None:
        self.name = str(options.backbone)
        self.pretrained = options.pretrained
        self.device = default_device(options.device)
        self._options = options
        self.network = network = _load(options, self.device)
        self.model = network.model
        self.preprocessing = network.preprocessing
        self.texts = network.texts
        self.context_length = network.texts.context_length
        self.long_layout = getattr(network.model, "long_layout", False)
        """Whether the file has the layout of Long-CLIP's and SPECS's released weights."""
        self.has_tokens = network.encode_tokens is not None
        """Whether the text tower gives an embedding of every token (``encode_tokens``)."""
        self.fingerprint = fingerprint(
            network.model.state_dict(),
            network.architecture,
            network.preprocessing,
            options.precision,
        )
        path = Path(self.name)
        label = path.name if path.is_dir() else self.name
        if self.pretrained:
            label += f"/{Path(self.pretrained).name}"
        cut = "" if options.truncate else "no truncation"
        fields = [label, self.fingerprint[:12], options.precision, network.note, cut]
        self.signature = ",".join(filter(None, fields))

    def encode_images(
        self, images: Sequence[ImageSource], normalize: bool = True
    ) -> Tensor:
        """Embed N images: [N, D], float32, on the CPU, of length 1 if ``normalize``.

        Images are read or drawn batch by batch.

        Raises:
            RewardError: an image is missing or unreadable; the message names it.
        """
        batches = []
        for batch in chunks(images, self._options.batch_size, "embedding images"):
            squares = [pixels(source, self.preprocessing) for source in batch]
            stacked = torch.stack(squares)
            batches.append(self.encode_pixels(stacked, normalize).cpu())
        return torch.cat(batches) if batches else torch.zeros(0, 0)

    def _embed(
        self, encode: Callable[[Tensor], Tensor], inputs: Tensor, normalize: bool = True
    ) -> Tensor:
        """Embed inputs by ``encode``: float32, without gradients or the caller's
        autocast, because cached embeddings and signatures name one precision.
        """
        device = torch.device(self.device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            features = encode(inputs.to(device)).float()
        return nn.functional.normalize(features, dim=-1) if normalize else features

    def encode_pixels(self, pixels: Tensor, normalize: bool = True) -> Tensor:
        """Embed pixels [N, 3, S, S] as [N, D], float32, on the model's device."""
        model: Any = self.model
        dtype = getattr(torch, DTYPES[self._options.precision])
        return self._embed(model.encode_image, pixels.to(dtype), normalize)

    def encode_texts(self, texts: Sequence[str], normalize: bool = True) -> Tensor:
        """Embed N captions: [N, D], float32, on the CPU, of length 1 if ``normalize``.

        Captions above ``context_length`` tokens are truncated at the end, as in CLIPScore.

        Raises:
            RewardError: a caption is too long and ``truncate`` is off.
        """
        groups = []
        batch_size = self._options.batch_size
        encode = partial(self._embed, self.network.encode_text, normalize=normalize)
        for group in chunks(texts, SORTED_BATCHES * batch_size, "embedding captions"):
            ids = self.token_ids(list(group))
            lengths = torch.full((len(ids),), ids.shape[1])
            if self.texts.trims:
                lengths = self.texts.encoder.lengths(ids)
            most = batch_size * self.context_length
            groups.append(embed_by_length(encode, ids, lengths, most).cpu())
        return torch.cat(groups) if groups else torch.zeros(0, 0)

    def count_tokens(self, text: str) -> int:
        """See ``DualEncoder.count_tokens``; by the model's own tokenizer."""
        return self.texts.encoder.count_tokens(text)

    def encode_tokens(self, texts: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
        """Return token ids [L] and token embeddings [L, D] of each caption: float32, on
        the CPU, of length 1.

        L includes start and end. The state of a token goes through the same layers as
        the caption's pooled state, so the embedding of the pooled token is the
        caption's embedding. Raises as ``encode_texts``.
        """
        encode: Any = self.network.encode_tokens
        embedded = []
        for batch in chunks(texts, self._options.batch_size, "embedding tokens"):
            ids = self.token_ids(list(batch))
            lengths = self.texts.encoder.lengths(ids)
            rows = self._embed(encode, ids).cpu()
            for tokens, row, end in zip(ids, rows, lengths.tolist(), strict=True):
                embedded.append((tokens[:end], row[:end]))
        return embedded

    def token_ids(self, texts: list[str]) -> Tensor:
        """Token ids [N, L] of N captions, padded; L is at most ``context_length``.
        Raises as ``encode_texts``.
        """
        if not self._options.truncate:
            for text in texts:
                count = self.count_tokens(text)
                if count > self.context_length:
                    raise RewardError(
                        f"caption {text!r:.80} has {count} tokens, {self.name} reads "
                        f"{self.context_length}: shorten it, or score with truncate=True"
                    )
        return self.texts(texts)


def load_frozen_encoder(
    name: str, pretrained: str | None = None, device: str = "cpu", **options: Any
) -> FrozenEncoder:
    """Load a ``FrozenEncoder`` of ``EncoderOptions(name, pretrained, device,
    **options)``. Raises ``ValueError`` as they do.
    """
    return FrozenEncoder(EncoderOptions(name, pretrained, device, **options))


def load_encoder(options: EncoderOptions) -> CachedEncoder:
    """Load the encoder of a score, unless ``options.backbone`` is a loaded one already,
    and open its cache.

    Raises:
        ValueError: the weights cannot be found, downloaded or loaded, or an option does
            not go with them.
    """
    encoder = options.backbone
    if isinstance(encoder, CachedEncoder):
        return encoder
    if isinstance(encoder, str | Path):
        encoder = FrozenEncoder(options)
    return CachedEncoder(encoder, options.cache_dir, options.cache_images)


def _load(options: EncoderOptions, device: str) -> Network:
    name = str(options.backbone)
    label = f"backbone {name!r} with pretrained {options.pretrained!r}"
    has_weights = Path(name).is_dir() or name.startswith("hf-hub:")
    try:
        if has_weights == bool(options.pretrained):
            raise ValueError(
                "an architecture needs 'pretrained', a tag of open_clip or a file; a folder and a "
                "model of the hub have their own weights: leave 'pretrained' out"
            )
        if Path(name).is_dir() and not Path(name, "open_clip_config.json").is_file():
            loaded = _load_folder(name)
        else:
            loaded = _load_open_clip(name, options)
        dtype = getattr(torch, DTYPES[options.precision])
        loaded.model.requires_grad_(False).eval().to(device=device, dtype=dtype)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{label} needs {error.name}: pip install 'rl-caption[clip]'"
        ) from error
    except (*UNLOADABLE, EOFError, AssertionError, UnpicklingError) as error:
        raise ValueError(f"{label} cannot be loaded: {error}") from error
    return loaded


def _load_folder(folder: str) -> Network:
    """A model of this package: a dual of pretrained encoders, or a student."""
    is_dual = has_model_type(folder, MODEL_TYPE)
    model: Any = (PretrainedDual if is_dual else LCLIP).from_pretrained(folder)
    return Network(
        model,
        model.preprocessing,
        model.texts,
        repr(model.config),
        model.encode_text,
        model.encode_tokens,
    )


def ask_for_weights(name: str, tag: str) -> None:
    """Check with one request that the hub or its cache has the weights of an
    architecture under open_clip's ``tag``; a ``tag`` that is a file is not checked.

    Raises:
        OSError: there is neither a connection nor a copy. Without this check libraries
            try again for a minute.
    """
    import open_clip
    from huggingface_hub import try_to_load_from_cache

    address = open_clip.get_pretrained_cfg(name, tag).get("hf_hub", "")
    owner, _, file = address.rpartition("/")
    if not owner or Path(tag).is_file():
        return
    files = [file] if file else WEIGHT_FILES
    if not any(isinstance(try_to_load_from_cache(owner, one), str) for one in files):
        ask_hub(owner, file or "open_clip_config.json")


def _load_open_clip(name: str, options: EncoderOptions) -> Network:
    import open_clip

    if Path(name).is_dir():
        check_folder(Path(name))
        name = f"local-dir:{name}"
    model, note = _open_clip_model(name, options)
    config = open_clip.get_model_config(name) or {}
    tokenizer = open_clip_tokenizer(name)
    # A text tower of Transformers was trained on fewer tokens than it has positions, and may not
    # say how many it has.
    limited = tokenizer if config.get("text_cfg", {}).get("hf_model_name") else model
    context_length = int(getattr(limited, "context_length", 77))
    causal = isinstance(model, open_clip.CLIP) and is_causal(model)
    network = Network(
        model=model,
        preprocessing=preprocessing_of(model.visual),
        texts=Texts(ClipText(tokenizer, context_length), context_length, causal),
        architecture=repr(model) + json.dumps(config, sort_keys=True),
        encode_text=model.encode_text,
        note=note,
    )
    if causal:
        network.encode_text = partial(causal_features, model)
        network.encode_tokens = partial(causal_features, model, pooled=False)
    return network


def _open_clip_model(name: str, options: EncoderOptions) -> tuple[Any, str]:
    """A model of open_clip, and a note for signatures."""
    import open_clip

    pretrained = options.pretrained
    tuned_from = options.tuned_from
    if pretrained is None:
        if name.startswith("hf-hub:"):
            ask_hub(name.removeprefix("hf-hub:"), "open_clip_config.json")
        config = open_clip.get_model_config(name) or {}
        check_open_clip(config, f"open_clip_config.json of {name}")
        return open_clip.create_model(name, require_pretrained=True), ""
    file = Path(pretrained)
    if file.suffix in CHECKPOINTS and not file.is_file():
        address = ADDRESSES.get(file.name)
        download = f": download it from {address}" if address else ""
        raise ValueError(f"there is no file {pretrained}{download}")
    architecture, start = RELEASED.get(file.name, (None, None))
    if tuned_from is None and architecture == name and file.is_file():
        tuned_from = start  # for any score: the architecture may have another activation and mean
    if tuned_from is not None:
        return load_tuned(name, file, tuned_from), f"tuned from {tuned_from}"
    if file.is_file():
        return load_file(name, file), ""
    ask_for_weights(name, pretrained)
    # The tag tells the activation; the architecture ViT-B-32 alone would run OpenAI's weights with
    # another one.
    quick_gelu = open_clip.get_pretrained_cfg(name, pretrained).get("quick_gelu", False)
    model = open_clip.create_model(
        name, pretrained, force_quick_gelu=quick_gelu, require_pretrained=True
    )
    return model, ""
