"""The from-scratch Transformer behind the ``Captioner`` seam: pixels or region features
in, captions out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from rewards.model_files import (
    check_folder,
    check_state,
    read_object,
    read_weights,
)
from rewards.text.tokenize import TOKENIZER, join_cjk, tokenizer_of
from rl_caption.captioners.base import Captioner, Inputs, reading
from rl_caption.captioners.decoding import NextLogits, Prefixes
from rl_caption.captioners.modeling import (
    NAMES,
    SHAPE,
    CaptionTransformer,
    CaptionTransformerConfig,
)
from rl_caption.captioners.packed import PreallocatedLayer
from rl_caption.captioners.tokens import forbid, unique_prefixes
from rl_caption.data.base import DataError, Row, load_image, pixel_key
from rl_caption.data.features import as_image_features, pad_features

PIXEL_MEAN = 0.5
PIXEL_STD = 0.5
PAD = "<pad>"
BOS = "<bos>"
EOS = "<eos>"
UNK = "<unk>"
SPLIT_BY = "caption_tokenizer"
"""Key of ``tokenizer_config.json``: the tokeniser that splits captions into words; if
absent, ``ptb``.
"""


class TransformerCaptioner(Captioner):
    """A ``CaptionTransformer`` with its vocabulary and preprocessing."""

    def __init__(
        self,
        policy: CaptionTransformer,
        tokenizer: PreTrainedTokenizerFast,
        cache_bytes: int = 0,
    ) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.cache_bytes = cache_bytes
        self.cached: dict[Any, np.ndarray] = {}
        self.split_by = tokenizer.init_kwargs.get(SPLIT_BY, TOKENIZER)
        self.words = list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
        for number in tokenizer.all_special_ids:
            self.words[number] = ""
        config = policy.config
        if len(tokenizer) != config.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}"
            )
        self.eos_token_id = config.eos_token_id
        self.pad_token_id = config.pad_token_id
        self.bos_token_id = config.bos_token_id
        self.max_tokens = config.max_positions
        self.input_kind = config.input_kind
        self.forbidden = config.forbidden_token_ids

    @classmethod
    def from_scratch(
        cls,
        references: Sequence[list[str]],
        min_count: int = 5,
        cache_bytes: int = 0,
        split_by: str = TOKENIZER,
        **shape: Any,
    ) -> TransformerCaptioner:
        """A captioner with random weights.

        Args:
            references: captions of every training image, whose words are the vocabulary
                (``build_vocabulary``).
            min_count: words that occur less often become UNK.
            cache_bytes: memory for decoded, resized images.
            split_by: one of ``rewards.text.tokenize.TOKENIZERS``, which splits captions into words.
            **shape: arguments of ``CaptionTransformerConfig``.

        Raises:
            ValueError: an unknown argument, a value out of range, or the model does not
                fit into memory.
        """
        if unknown := sorted(set(shape) - SHAPE):
            raise ValueError(
                f"{unknown} are no options of the model: expected {sorted(SHAPE)}"
            )
        words = build_vocabulary(references, min_count, split_by)
        if split_by != TOKENIZER:
            words.init_kwargs[SPLIT_BY] = split_by
        config = CaptionTransformerConfig(
            vocab_size=len(words),
            pad_token_id=words.pad_token_id,
            bos_token_id=words.bos_token_id,
            eos_token_id=words.eos_token_id,
            unk_token_id=words.unk_token_id,
            **shape,
        )
        return cls(CaptionTransformer(config), words, cache_bytes)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, cache_bytes: int = 0
    ) -> TransformerCaptioner:
        """Load a folder that ``save_pretrained`` wrote.

        Raises:
            CaptionerError: a file is missing, changed, damaged or of something else;
                the message names it.
        """
        folder = Path(path)
        with reading(folder):
            check_folder(folder)
            values = read_object(folder / "config.json")
            if missing := [name for name in NAMES if name not in values]:
                raise ValueError(f"config.json has no {', '.join(missing)}")
            config = CaptionTransformerConfig(**{name: values[name] for name in NAMES})
            file = folder / "model.safetensors"
            read = read_weights(file)
            weights = {name: value.float() for name, value in read.items()}
            with torch.device("meta"):  # the weights come from the file
                policy = CaptionTransformer(config)
            expected = policy.state_dict()
            expected.pop("lm_head.weight")  # is the token embedding
            check_state(weights, expected, f"the weights in {file}")
            policy.load_state_dict(weights, strict=False, assign=True)
            policy.tie_weights()
            return cls(policy.eval(), _read_tokenizer(folder, config), cache_bytes)

    def save_pretrained(self, policy: Any, path: Path) -> None:
        policy.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    def preprocess(self, rows: Sequence[Row]) -> Inputs:
        """``pixel_values`` [B, 3, S, S] in [-1, 1]; resized to squares (bicubic).

        Over region features, ``region_features`` [B, R, F] with ``region_mask`` [B, R] instead.
        """
        for row in rows:
            self.max_tokens_of(row)
        if self.input_kind == "pixels":
            return {"pixel_values": torch.stack([self._pixels(row) for row in rows])}
        width = self.policy.config.feature_dim
        regions = []
        for row in rows:
            name = row["image_id"]
            if row.get("features") is None:
                raise DataError(
                    f"image {name!r} has no region features: set data.features_root"
                )
            regions.append(as_image_features(row["features"], name).load(width))
        features, mask = pad_features(regions)
        return {"region_features": features, "region_mask": mask}

    def _pixels(self, row: Row) -> Tensor:
        name = row["image_id"]
        image = row["image"]
        if isinstance(image, list | tuple):
            raise DataError(f"{name!r} is a video: this captioner reads single images")
        key = pixel_key(name, image)
        array = self.cached.get(key)
        if array is None:
            size = (self.policy.config.image_size,) * 2
            image = load_image(image).resize(size, Image.Resampling.BICUBIC)
            array = np.asarray(image, dtype=np.uint8)  # [S, S, 3]
            if (len(self.cached) + 1) * array.nbytes <= self.cache_bytes:
                self.cached[key] = array
        pixels = (array.astype(np.float32) / 255.0 - PIXEL_MEAN) / PIXEL_STD
        return torch.from_numpy(pixels).movedim(-1, -3)

    def encode(
        self, texts: Sequence[str], max_tokens: int, row: Row | None = None
    ) -> list[list[int]]:
        """Token ids of texts, with EOS, cut off at ``max_tokens``."""
        split = tokenizer_of(self.split_by)
        prepared = [" ".join(split(text)) for text in texts]
        encoded = self.tokenizer(prepared, add_special_tokens=False)["input_ids"]
        return [[*ids, self.eos_token_id][:max_tokens] for ids in encoded]

    def image_states(self, policy: Any, inputs: Inputs) -> Inputs:
        """States if gradients are enabled, as the encoder is always trained; else ``inputs``."""
        if not torch.is_grad_enabled():
            return inputs
        states = policy.encoder(**inputs).last_hidden_state
        return {**inputs, "states": states}

    def next_logits(
        self, policy: Any, inputs: Inputs, max_new_tokens: int
    ) -> NextLogits:
        """See ``Captioner.next_logits``; uses a preallocated KV cache."""
        states = inputs.get("states")
        if states is None:
            states = policy.encoder(**inputs).last_hidden_state
        layer: Any = partial(PreallocatedLayer, max_new_tokens)
        tokens = Cache(layer_class_to_replicate=layer)
        cache = EncoderDecoderCache(tokens, DynamicCache())

        def next_logits(prefixes: Prefixes | None) -> Tensor:
            """Logits [P, V] after the newest token of each of P prefixes."""
            if prefixes is None:
                images = torch.arange(len(states), device=states.device)
                tokens = torch.full_like(images, self.bos_token_id)
                prefixes = Prefixes(tokens, None, images)
            if prefixes.parent is not None:
                cache.self_attention_cache.batch_select_indices(prefixes.parent)
            output = policy(
                region_mask=inputs.get("region_mask"),
                states=states,
                decoder_input_ids=prefixes.tokens.unsqueeze(1),
                cache=cache,
                use_cache=True,
                image=prefixes.image,
            )
            return output.logits.flatten(0, 1)

        return next_logits

    def token_logits(
        self,
        model: nn.Module,
        inputs: Inputs,
        token_ids: Tensor,
        mask: Tensor | None = None,
        node: Tensor | None = None,
    ) -> Tensor:
        """See ``Captioner``. ``mask`` and ``node`` are as from ``unique_prefixes``;
        without ``node``, ``mask`` is True for the first tokens of each caption.
        """
        flat = token_ids.flatten(0, 1)
        start = torch.full_like(flat[:, :1], self.bos_token_id)
        before = torch.cat([start, flat[:, :-1]], dim=1)
        output = model(
            **inputs, decoder_input_ids=before, token_mask=mask, token_node=node
        )
        logits = forbid(output.logits, self.forbidden)
        return logits if mask is not None else logits.unflatten(0, token_ids.shape[:2])

    def prefix_logits(
        self, model: nn.Module, inputs: Inputs, token_ids: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        first, node = unique_prefixes(token_ids, mask)
        logits = self.token_logits(model, inputs, token_ids, first, node)
        return logits, node[mask]

    def decode(self, token_ids: Tensor) -> list[str]:
        """See ``Captioner.decode``."""
        # Ten times as fast as the tokenizer, which shows in a step on a GPU.
        join = join_cjk if self.split_by == "char" else " ".join
        return [
            join(filter(None, map(self.words.__getitem__, ids)))
            for ids in token_ids.tolist()
        ]


def _read_tokenizer(
    folder: Path, config: CaptionTransformerConfig
) -> PreTrainedTokenizerFast:
    """The tokenizer, checked against the model: without its second file it would not
    know its special tokens.
    """
    what = f"the tokenizer in {folder} (tokenizer.json, tokenizer_config.json)"
    with reading(what):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(tokenizer, name) != getattr(config, name):
                raise ValueError(f"its {name} is not that of config.json")
        return tokenizer


def build_vocabulary(
    references: Iterable[list[str]], min_count: int, split_by: str = TOKENIZER
) -> PreTrainedTokenizerFast:
    """Word-level tokenizer of the words that occur at least ``min_count`` times in the
    training references.

    Captions are split into words by ``split_by``, one of
    ``rewards.text.tokenize.TOKENIZERS``. Ids 0 to 3 are padding, BOS, EOS and UNK;
    words follow by falling count, ties in alphabetical order. Rarer words become UNK,
    which no caption may contain; so does an ``<unk>`` in the references.

    Raises:
        ValueError: no word occurs often enough.
    """
    split = tokenizer_of(split_by)
    counts = Counter(
        word
        for captions in references
        for caption in captions
        for word in split(caption)
    )
    special = [PAD, BOS, EOS, UNK]
    words = [word for word in counts if counts[word] >= min_count]
    words = sorted(set(words) - {*special}, key=lambda word: (-counts[word], word))
    if not words:
        raise ValueError(
            f"no word occurs {min_count} times in the training references: lower model.min_count"
        )
    vocabulary = {token: index for index, token in enumerate([*special, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
    )
