"""The ``Captioner`` protocol: the seam between the training loop and a captioning
model.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from rl_caption.captioners.config import Decoding
from rl_caption.captioners.decoding import (
    NextLogits,
    beam_search,
    decode_tree,
    logits_without_cache,
)
from rl_caption.captioners.tokens import Generated, unique_prefixes
from rl_caption.data.base import DataError, Row
from rl_caption.runtime.errors import CaptionerError as CaptionerError

FROM_SCRATCH = "caption_transformer"
"""``model_type`` of the Transformer of this package."""
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
"""Patterns of the names of weight files in the folder of a saved captioner."""


@contextmanager
def reading(what: str | Path) -> Iterator[None]:
    """Context that turns what libraries raise on a damaged or foreign file into a
    ``CaptionerError`` that names it.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, CaptionerError) and str(what) in str(error):
            raise
        raise CaptionerError(f"{what} cannot be loaded: {error}") from error


Inputs: TypeAlias = dict[str, Any]
"""Model inputs of B rows: name -> tensor [B, ...], or a captioner's own type."""


class Captioner(Protocol):
    """What the programs need from a captioning model. B images, K captions each, L
    tokens, vocabulary size V.

    A captioner inherits from this class, sets the attributes that have no value here
    and implements the abstract methods. The other methods have defaults that are slower
    and give the same numbers. A complete example is
    ``tests/core/extensions/test_captioner.py``.

    An argument ``model`` may be the policy wrapped for distributed training; ``policy``
    is always the module itself.
    """

    policy: nn.Module
    eos_token_id: int
    pad_token_id: int
    forbidden: tuple[int, ...] = ()
    """Ids of tokens that are never generated (padding, BOS, UNK); in references they
    are left out of the loss.
    """
    max_tokens: int | None = None
    """Length of the longest caption that the model has positions for, in tokens with
    EOS; None without a limit.
    """
    input_kind: str = "pixels"
    """``pixels``; or ``regions``, if ``preprocess`` reads the rows' ``features``
    instead of their images.
    """
    row_prompts: bool = False
    """Whether rows may have prompts of their own."""
    augmentable: bool = True
    """Whether ``pixel_values`` of ``preprocess`` are images, which ``data.augment`` may
    mirror, cut or turn.
    """

    @classmethod
    def from_scratch(cls, references: Sequence[list[str]], **options: Any) -> Captioner:
        """A captioner with random weights.

        ``references`` are the captions of every training image; ``options`` are
        ``model.kwargs``, checked against the annotations of this method. By default it
        raises ``CaptionerError``.
        """
        raise CaptionerError(
            f"{cls.__name__} has no from_scratch: set model.init to one that is saved"
        )

    @classmethod
    @abstractmethod
    def from_pretrained(cls, path: str | Path) -> Captioner:
        """Load a folder that ``save_pretrained`` wrote."""

    @abstractmethod
    def save_pretrained(self, policy: nn.Module, path: Path) -> None:
        """Write ``model.safetensors``, ``config.json``, vocabulary and preprocessing;
        make the folder if need be.

        ``model_type`` in ``config.json`` says what loads it; for a class outside this
        package it is ``package.module:Class``.
        """

    @abstractmethod
    def preprocess(self, rows: Sequence[Row]) -> Inputs:
        """Model inputs of B rows, on the CPU (called in loader workers). Raises
        ``DataError`` for an unusable row.
        """

    @abstractmethod
    def encode(
        self, texts: Sequence[str], max_tokens: int, row: Row | None = None
    ) -> list[list[int]]:
        """Token ids of reference captions, with EOS. A longer caption is cut to
        ``max_tokens`` and then lacks EOS.

        The captions continue the prompt of ``row``, if it has one of its own.
        """

    @abstractmethod
    def decode(self, token_ids: Tensor) -> list[str]:
        """Texts of N captions ``token_ids`` [N, L], without special tokens."""

    @abstractmethod
    def token_logits(
        self,
        model: nn.Module,
        inputs: Inputs,
        token_ids: Tensor,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Teacher forcing: float32 logits [B, K, L, V], from which each token of
        ``token_ids`` [B, K, L] is drawn.

        With ``mask`` [B, K, L] only the logits [P, V] of the P positions where it is
        True, in order. Tokens in ``forbidden`` get ``FORBIDDEN_LOGIT`` (``forbid``).
        """

    def max_tokens_of(self, row: Row) -> int | None:
        """``max_tokens`` after the row's own prompt, if it has one.

        Raises:
            DataError: the row has a prompt and the captioner reads none.
        """
        if row.get("prompt") and not self.row_prompts:
            raise DataError(
                f"image {row['image_id']!r} has the prompt {row['prompt']!r:.80}: this captioner "
                f"reads none of rows; leave it out, or take a vision-language model"
            )
        return self.max_tokens

    def image_states(self, policy: nn.Module, inputs: Inputs) -> Inputs:
        """The image encoder's outputs, in the form that ``generate`` and
        ``token_logits`` take in place of ``inputs``.

        With them a step encodes each image once. They hold until the weights change.
        Where gradients are disabled and weights of the encoder are trained, this
        returns ``inputs``: states without gradient would be of no use to the loss. By
        default it always returns ``inputs``.
        """
        return inputs

    def generate(
        self,
        policy: nn.Module,
        inputs: Inputs,
        decoding: Decoding,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Token ids [B, ``captions_per_image``, <= L] of new captions, padded after
        EOS; without gradient.

        Samples come first, the greedy caption last. ``noise`` [B, K, L] holds uniform
        numbers in [0, 1): token t of sample k is drawn by inverting the cumulative
        distribution at noise[b, k, t], so the samples of an image do not depend on what
        else is in the batch.
        """
        return self.generate_with_scores(policy, inputs, decoding, noise).token_ids

    def generate_with_scores(
        self,
        policy: nn.Module,
        inputs: Inputs,
        decoding: Decoding,
        noise: Tensor | None = None,
    ) -> Generated:
        """``generate``, with the scores of beam search; by default with
        ``next_logits``, up to ``max_tokens``.
        """
        limit = min(decoding.max_new_tokens, self.max_tokens or sys.maxsize)
        decoding = decoding.replace(max_new_tokens=limit)
        with torch.no_grad():
            next_logits = self.next_logits(policy, inputs, limit)
            if decoding.num_beams > 1:
                return beam_search(self, next_logits, decoding)
            share = not policy.training
            ids = decode_tree(self, next_logits, decoding, noise, share)
        return Generated(ids, None)

    def next_logits(
        self, policy: nn.Module, inputs: Inputs, max_new_tokens: int
    ) -> NextLogits:
        """Return a function from prefixes to the logits of their next tokens, for
        decoding captions of B images.

        It may keep a KV cache for ``max_new_tokens`` tokens. By default it calls
        ``token_logits`` on whole prefixes.
        """
        return logits_without_cache(self, policy, inputs)

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, for comparing a run with its checkpoint; by default the
        vocabulary of ``tokenizer``, if there is one.
        """
        tokenizer = getattr(self, "tokenizer", None)
        return tokenizer.get_vocab() if tokenizer else {}

    def prefix_logits(
        self,
        model: nn.Module,
        inputs: Inputs,
        token_ids: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """``token_logits``, computed once for each prefix that captions of an image
        share; not with dropout.

        Returns:
            Logits [U, V] of the U different prefixes, and the row [P] of the logits of
            each of the P tokens of ``mask``, which are the first tokens of each
            caption.
        """
        first, node = unique_prefixes(token_ids, mask)
        return self.token_logits(model, inputs, token_ids, first), node[mask]
