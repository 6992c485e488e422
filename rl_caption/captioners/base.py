"""The seam between the training loop and a captioning model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rewards.base import reason
from rl_caption.data.base import DataError, Row
from rl_caption.errors import UserError
from rl_caption.options import Range, Temperature, wrong_values

if TYPE_CHECKING:
    from rl_caption.captioners.decoding import NextLogits

FROM_SCRATCH = "caption_transformer"
"""``model_type`` of the Transformer of this package."""
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
"""Patterns of the names of weight files in the folder of a saved captioner."""
FORBIDDEN_LOGIT = -1e9
"""Logit of tokens that a caption may not contain: probability 0 in float32 at any ``Temperature``, yet finite, so that
entropy is defined."""


class CaptionerError(UserError, ValueError):
    """A saved captioner cannot be used; the message names the folder and what is wrong with it."""


@contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Turn what a library raises on a damaged or foreign file into a ``CaptionerError`` that names ``what``."""
    try:
        yield
    except Exception as error:  # the tokenizers library, written in Rust, raises ``Exception`` itself
        if isinstance(error, CaptionerError) and str(what) in str(error):
            raise
        name = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        raise CaptionerError(f"{what} cannot be loaded: {name}{reason(error)}") from error


@dataclass(frozen=True)
class Decoding:
    """How captions are decoded. Nothing is inherited from a model's own generation settings.

    Options that Transformers' ``generate`` also has mean the same here. Lengths count the captioner's tokens of the
    caption alone, without the prompt. docs/evaluation.md gives the sources and what each option was compared with.

    Args:
        num_samples: number K of captions to sample for each image, from the full distribution at ``temperature`` unless
            ``top_k``, ``top_p`` or ``typical_p`` truncates it.
        with_greedy: add a caption of the likeliest tokens (arg max), as the last row.
        max_new_tokens: length limit L in tokens, EOS included.
        num_beams: beam width; above 1, captions are searched for instead of sampled, and ``num_samples`` must be 0.
        length_penalty: beam search compares log-probabilities / length**length_penalty; 0 compares plain sums.
        fixed_shapes: decode every caption to the length limit, so that shapes do not depend on values (CUDA graphs).
            The captions are the same. Not for beam search.
        num_return_sequences: number of captions that beam search returns for each image, best first.
        num_beam_groups: above 1, diverse beam search with ``num_beams`` / ``num_beam_groups`` beams in each group.
        diversity_penalty: subtracted from a token's log-probability for each beam of an earlier group that chose it.
        top_k: sample from this many of the likeliest tokens; 0 means all.
        top_p: sample from the smallest set of likeliest tokens with this total probability (nucleus); 1 means all.
        typical_p: sample from the tokens whose surprise is nearest to the entropy, up to this total probability; 1
            means all.
        no_repeat_ngram_size: size n of the n-grams of tokens that no caption may contain twice; 0 means no such limit.
        block_trigrams: α; a token that would repeat a trigram loses 0.693 α of log-probability for each earlier
            occurrence.
        remove_bad_endings: EOS never follows one of ``rewards.text.degeneration.BAD_ENDINGS``. A caption that the
            length limit cuts off may still end in one.

    Temperature is applied first, then top-k, top-p and typical sampling, each to what the one before left.
    """

    num_samples: Annotated[int, Range(min=0)] = 0
    with_greedy: bool = True
    temperature: Temperature = 1.0
    max_new_tokens: Annotated[int, Range(min=1)] = 24
    num_beams: Annotated[int, Range(min=1)] = 1
    length_penalty: float = 1.0
    fixed_shapes: bool = False
    num_return_sequences: Annotated[int, Range(min=1)] = 1
    num_beam_groups: Annotated[int, Range(min=1)] = 1
    diversity_penalty: Annotated[float, Range(min=0)] = 0.0
    top_k: Annotated[int, Range(min=0)] = 0
    top_p: Annotated[float, Range(above=0, max=1)] = 1.0
    typical_p: Annotated[float, Range(above=0, max=1)] = 1.0
    no_repeat_ngram_size: Annotated[int, Range(min=0)] = 0
    block_trigrams: Annotated[float, Range(min=0)] = 0.0
    remove_bad_endings: bool = False

    def __post_init__(self) -> None:
        beams, groups = self.num_beams, self.num_beam_groups
        for wrong in wrong_values(self, Decoding):
            raise ValueError(wrong)
        if beams > 1 and self.num_samples:
            raise ValueError(
                f"num_samples is {self.num_samples} and num_beams {beams}: beam search does not sample, set "
                "num_samples to 0"
            )
        if beams == 1 and not self.num_samples and not self.with_greedy:
            raise ValueError("nothing to decode: num_samples is 0 and with_greedy is False")
        if self.num_return_sequences > beams:
            raise ValueError(f"num_return_sequences is {self.num_return_sequences}: expected 1 to num_beams, {beams}")
        if beams % groups:
            raise ValueError(f"num_beam_groups is {groups}: expected a number that divides num_beams, {beams}")
        if (self.diversity_penalty > 0) != (groups > 1):
            raise ValueError(
                f"diversity_penalty is {self.diversity_penalty} and num_beam_groups {groups}: groups need a penalty "
                "above 0, and a penalty needs at least 2 groups"
            )
        truncated = [name for name, off in _TRUNCATIONS.items() if getattr(self, name) != off]
        if truncated and not self.num_samples:
            raise ValueError(f"{truncated[0]} is {getattr(self, truncated[0])}: it is for samples; set num_samples")
        if self.fixed_shapes and (truncated or beams > 1 or self.constrained):
            raise ValueError("fixed_shapes must be off: it is for greedy captions and samples of the full distribution")

    @property
    def constrained(self) -> bool:
        """Whether the tokens that may come next depend on those before."""
        return bool(self.no_repeat_ngram_size or self.block_trigrams or self.remove_bad_endings)

    @property
    def captions_per_image(self) -> int:
        """Number of captions of each image: K samples and the greedy caption, or what beam search returns."""
        if self.num_beams > 1:
            return self.num_return_sequences
        return self.num_samples + int(self.with_greedy)

    def describe(self) -> str:
        """Every option in use, such as ``beam search of width 5, length penalty 0, at most 20 tokens``."""
        parts = []
        if self.num_beams > 1:
            parts = [f"beam search of width {self.num_beams}", f"length penalty {self.length_penalty:g}"]
        elif self.with_greedy:
            parts = ["greedy"]
        if self.num_beam_groups > 1:
            parts.append(f"{self.num_beam_groups} groups with diversity penalty {self.diversity_penalty:g}")
        if self.num_samples:
            parts.append(f"{self.num_samples} sampled at temperature {self.temperature:g}")
        parts += [f"{name} {getattr(self, name):g}" for name, off in _TRUNCATIONS.items() if getattr(self, name) != off]
        if self.no_repeat_ngram_size:
            parts.append(f"no repeated {self.no_repeat_ngram_size}-grams")
        if self.block_trigrams:
            parts.append(f"block_trigrams {self.block_trigrams:g}")
        if self.remove_bad_endings:
            parts.append("no bad endings")
        return ", ".join([*parts, f"at most {self.max_new_tokens} tokens"])


_TRUNCATIONS: dict[str, float] = {"top_k": 0, "top_p": 1, "typical_p": 1}
"""Options that truncate the distribution of samples, and the value that does not."""


class Generated(NamedTuple):
    """R captions for each of B images.

    Attributes:
        token_ids: [B, R, T], padded after EOS.
        scores: [B, R] float32, by which beam search orders the captions: the sum of their log-probabilities, less the
            penalties of ``diversity_penalty`` and ``block_trigrams``, / length**length_penalty. Where it found fewer
            than R captions, the rest are all padding with the score -inf. None without beam search.
    """

    token_ids: Tensor
    scores: Tensor | None


Generate = Callable[[Any, dict[str, Tensor], Decoding, Tensor | None], Tensor]
"""``Captioner.generate``."""


class Captioner(Protocol):
    """What the programs need from a captioning model. B images, K captions each, L tokens, vocabulary size V.

    A captioner inherits from this class, sets the attributes that have no value here and implements the abstract
    methods. The other methods have defaults that are slower and give the same numbers. A complete example is
    ``tests/core/extensions/test_captioner.py``.

    An argument ``model`` may be the policy wrapped for distributed training; ``policy`` is always the module itself.
    """

    policy: nn.Module
    eos_token_id: int
    pad_token_id: int
    forbidden: tuple[int, ...] = ()
    """Ids of tokens that are never generated (padding, BOS, UNK); in references they are left out of the loss."""
    max_tokens: int | None = None
    """Length of the longest caption that the model has positions for, in tokens with EOS; None without a limit."""
    input_kind: str = "pixels"
    """``pixels``; or ``regions``, if ``preprocess`` reads the rows' ``features`` instead of their images."""

    @classmethod
    def from_scratch(cls, references: Sequence[list[str]], **options: Any) -> Captioner:
        """A captioner with random weights.

        ``references`` are those of every training image; ``options`` are ``model.kwargs``, checked against the
        annotations of this method. By default it raises ``CaptionerError``.
        """
        raise CaptionerError(f"{cls.__name__} has no from_scratch: set model.init to one that is saved")

    @classmethod
    @abstractmethod
    def from_pretrained(cls, path: str | Path) -> Captioner:
        """Load a folder that ``save_pretrained`` wrote."""

    @abstractmethod
    def save_pretrained(self, policy: nn.Module, path: Path) -> None:
        """Write ``model.safetensors``, ``config.json``, vocabulary and preprocessing; make the folder if need be.

        ``model_type`` in ``config.json`` says what loads it; for a class outside this package it is
        ``package.module:Class``.
        """

    @abstractmethod
    def preprocess(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Model inputs of B rows, on the CPU (called in loader workers). Raises ``DataError`` for an unusable row."""

    @abstractmethod
    def encode(self, texts: Sequence[str], max_tokens: int, row: Row | None = None) -> list[list[int]]:
        """Token ids of reference captions, with EOS. A longer one is cut to ``max_tokens`` and then lacks EOS.

        The captions continue the prompt of ``row``, if it has one of its own.
        """

    @abstractmethod
    def decode(self, token_ids: Tensor) -> list[str]:
        """Texts of N captions ``token_ids`` [N, L], without special tokens."""

    @abstractmethod
    def token_logits(
        self, model: nn.Module, inputs: dict[str, Tensor], token_ids: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Teacher forcing: float32 logits [B, K, L, V], from which each token of ``token_ids`` [B, K, L] is drawn.

        With ``mask`` [B, K, L], True for the first tokens of each caption, only the logits [P, V] of the P positions
        where it is True, in order. Tokens in ``forbidden`` get ``FORBIDDEN_LOGIT`` (``forbid``).
        """

    def max_tokens_of(self, row: Row) -> int | None:
        """``max_tokens`` after the row's own prompt, if it has one.

        Raises:
            DataError: the row has a prompt that the captioner cannot read; by default it can read none.
        """
        if row.get("prompt"):
            raise DataError(
                f"image {row['image_id']!r} has the prompt {row['prompt']!r:.80}: a captioner from scratch takes none; "
                "leave it out, or take a model of Transformers (model.name huggingface)"
            )
        return self.max_tokens

    def image_states(self, policy: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The image encoder's outputs, in the form that ``generate`` and ``token_logits`` take in place of ``inputs``.

        With them a step encodes each image once. They hold until the weights change. Where gradients are disabled and
        weights of the encoder are trained, this returns ``inputs``: states without gradient would be of no use to the
        loss. By default it always returns ``inputs``.
        """
        return inputs

    def generate(
        self, policy: nn.Module, inputs: dict[str, Tensor], decoding: Decoding, noise: Tensor | None = None
    ) -> Tensor:
        """Token ids [B, ``captions_per_image``, <= L] of new captions, padded after EOS; without gradient.

        Samples come first, the greedy caption last. ``noise`` [B, K, L] holds uniform numbers in [0, 1): token t of
        sample k is drawn by inverting the cumulative distribution at noise[b, k, t], so the samples of an image do not
        depend on what else is in the batch.
        """
        return self.generate_with_scores(policy, inputs, decoding, noise).token_ids

    def generate_with_scores(
        self, policy: nn.Module, inputs: dict[str, Tensor], decoding: Decoding, noise: Tensor | None = None
    ) -> Generated:
        """``generate``, with the scores of beam search; by default with ``next_logits``, up to ``max_tokens``."""
        return self._decoded(policy, inputs, decoding, noise, self.max_tokens)

    def _decoded(
        self,
        policy: nn.Module,
        inputs: dict[str, Tensor],
        decoding: Decoding,
        noise: Tensor | None,
        longest: int | None,
    ) -> Generated:
        """Captions of at most ``longest`` tokens, decoded with ``next_logits``."""
        from rl_caption.captioners.decoding import decode_with_scores  # imports this module

        if longest is not None and longest < decoding.max_new_tokens:
            decoding = replace(decoding, max_new_tokens=longest)
        images = len(next(iter(inputs.values())))
        with torch.no_grad():
            next_logits = self.next_logits(policy, inputs, decoding.max_new_tokens)
            return decode_with_scores(self, next_logits, images, decoding, noise, share_prefixes=not policy.training)

    def next_logits(self, policy: nn.Module, inputs: dict[str, Tensor], max_new_tokens: int) -> NextLogits:
        """A function of prefixes to the logits of their next tokens, for decoding captions of B images.

        It may keep a KV cache for ``max_new_tokens`` tokens. By default it calls ``token_logits`` on whole prefixes.
        """
        from rl_caption.captioners.decoding import logits_without_cache

        return logits_without_cache(self, policy, inputs)

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, for comparing members of an ensemble, and a run with its checkpoint; empty if unknown."""
        return {}

    def prefix_logits(
        self, model: nn.Module, inputs: dict[str, Tensor], token_ids: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``token_logits``, computed once for a prefix that several captions of an image share; not with dropout.

        Returns:
            Logits [U, V] of the U different prefixes, and for each of the P tokens of ``mask`` the row [P] of its
            logits. By default nothing is shared and every token has a row.
        """
        logits = self.token_logits(model, inputs, token_ids, mask)
        return logits, torch.arange(len(logits), device=logits.device)


def caption_mask(token_ids: Tensor, eos_token_id: int) -> Tensor:
    """True up to and including the first EOS: [..., L] -> [..., L]."""
    is_eos = token_ids == eos_token_id
    return (is_eos.cumsum(-1) - is_eos.long()) == 0


def forbid(logits: Tensor, token_ids: Sequence[int]) -> Tensor:
    """Float32 logits [..., V] with ``FORBIDDEN_LOGIT`` at ``token_ids``."""
    filled = logits.float()
    if not logits.requires_grad:  # by slices: a tensor of token ids would have to be sent to the device every time
        filled = filled.clone() if filled is logits else filled  # never into the model's own tensor
        for start, end in _ranges(tuple(token_ids)):
            filled[..., start:end] = FORBIDDEN_LOGIT
        return filled
    index = torch.tensor(list(token_ids), dtype=torch.long, device=logits.device)
    return (filled.index_fill if filled is logits else filled.index_fill_)(-1, index, FORBIDDEN_LOGIT)


@cache
def _ranges(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Begin and end of every run of consecutive numbers."""
    starts = sorted(set(numbers) - {number + 1 for number in numbers})
    ends = sorted({number + 1 for number in numbers} - set(numbers))
    return list(zip(starts, ends, strict=True))


def sample_tokens(logits: Tensor, noise: Tensor, temperature: float, best: Tensor | None = None) -> Tensor:
    """Draw K tokens [N, K] from each softmax(logits [N, V] / temperature) by inverting its cumulative distribution.

    ``noise`` [N, K] is uniform in [0, 1). A token of probability 0 is never drawn; from logits of NaN any token may be.
    ``best`` [N, 1] is the arg max of the logits, if the caller has it.
    """
    best = logits.argmax(-1, keepdim=True) if best is None else best
    scaled = logits if temperature == 1 else logits / temperature
    probabilities = scaled.softmax(-1)
    cumulative = probabilities.cumsum(-1)
    # Float32 sums end a little off 1, and noise * total may round up to the total: stay strictly inside.
    drawn = torch.searchsorted(cumulative, noise * (1 - 1e-6) * cumulative[:, -1:], right=True)
    # A GPU adds up in parallel: the sum up to a token of probability 0 may round to another number than the one before.
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)
    return torch.where(probabilities.gather(-1, drawn) > 0, drawn, best)
