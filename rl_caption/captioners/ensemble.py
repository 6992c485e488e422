"""An ensemble: captioners with one vocabulary whose next-token distributions are averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rl_caption.captioners.base import Captioner, CaptionerError
from rl_caption.captioners.decoding import NextLogits
from rl_caption.captioners.tokens import forbid
from rl_caption.data.base import DataError, Row

Average = Literal["probabilities", "log_probabilities"]


class Ensemble(Captioner):
    """A captioner that decodes from the mean of the next-token distributions of several others; not
    for training.

    Args:
        captioners: name -> captioner, at least two. Each preprocesses the images in its own way.
        average: ``probabilities`` takes the arithmetic mean of the distributions, as
            self-critical.pytorch's ``AttEnsemble`` does; ``log_probabilities`` the geometric mean,
            normalised.

    Raises:
        CaptionerError: there is only one captioner, or two differ in vocabulary or special tokens;
            the message says how.
    """

    def __init__(
        self, captioners: dict[str, Captioner], average: Average = "probabilities"
    ) -> None:
        if len(captioners) < 2:
            raise CaptionerError(
                f"an ensemble of {list(captioners)}: expected at least two captioners"
            )
        (first_name, first), *others = captioners.items()
        for name, other in others:
            difference = vocabulary_difference(first_name, first, name, other)
            if difference is not None:
                raise CaptionerError(f"an ensemble needs one vocabulary: {difference}")
        self.captioners, self.average = list(captioners.values()), average
        self.policy = nn.ModuleList(captioner.policy for captioner in self.captioners)
        self.eos_token_id, self.pad_token_id, self.forbidden = (
            first.eos_token_id,
            first.pad_token_id,
            first.forbidden,
        )
        limits = [
            captioner.max_tokens
            for captioner in self.captioners
            if captioner.max_tokens is not None
        ]
        self.max_tokens = min(limits, default=None)
        kinds = {captioner.input_kind for captioner in self.captioners}
        self.input_kind = kinds.pop() if len(kinds) == 1 else "pixels and regions"

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Ensemble:
        raise CaptionerError("an ensemble cannot be loaded: load each captioner")

    def save_pretrained(self, policy: nn.Module, path: Path) -> None:
        raise CaptionerError("an ensemble cannot be saved: save each captioner")

    def preprocess(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """The inputs of all captioners; the name of each is preceded by its captioner's number,
        ``0/pixel_values``.
        """
        return {
            f"{number}/{name}": tensor
            for number, captioner in enumerate(self.captioners)
            for name, tensor in captioner.preprocess(rows).items()
        }

    def try_row(self, row: Row) -> None:
        for captioner in self.captioners:
            captioner.try_row(row)

    def encode(
        self, texts: Sequence[str], max_tokens: int, row: Row | None = None
    ) -> list[list[int]]:
        return self.captioners[0].encode(texts, max_tokens, row)

    def decode(self, token_ids: Tensor) -> list[str]:
        return self.captioners[0].decode(token_ids)

    def vocabulary(self) -> dict[str, int]:
        return self.captioners[0].vocabulary()

    def max_tokens_of(self, row: Row) -> int | None:
        """Raises ``DataError`` for a row with its own prompt: prompts of a batch may differ in
        length.
        """
        if row.get("prompt") is not None:
            raise DataError(
                f"image {row['image_id']!r} has the prompt {row['prompt']!r:.80}: an ensemble "
                f"takes none"
            )
        return self.max_tokens

    def token_logits(
        self, model: Any, inputs: dict[str, Tensor], token_ids: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Mean of the captioners' logits, or of their probabilities."""
        members = zip(self.captioners, model, self._split(inputs), strict=True)
        return self._mean(
            [
                captioner.token_logits(policy, member_inputs, token_ids, mask)
                for captioner, policy, member_inputs in members
            ]
        )

    def next_logits(
        self, policy: Any, inputs: dict[str, Tensor], max_new_tokens: int
    ) -> NextLogits:
        members = zip(self.captioners, policy, self._split(inputs), strict=True)
        functions = [
            captioner.next_logits(member, member_inputs, max_new_tokens)
            for captioner, member, member_inputs in members
        ]
        return lambda prefixes: self._mean([member(prefixes) for member in functions])

    def _split(self, inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        split: list[dict[str, Tensor]] = [{} for _ in self.captioners]
        for key, tensor in inputs.items():
            number, _, name = key.partition("/")
            split[int(number)][name] = tensor
        return split

    def _mean(self, logits: Sequence[Tensor]) -> Tensor:
        """Logits [..., V] of the mean of the distributions that N ``logits`` [..., V] give to
        allowed tokens.
        """
        logprobs = torch.stack(
            [forbid(member_logits, self.forbidden).log_softmax(-1) for member_logits in logits]
        )
        if self.average == "probabilities":
            return forbid(logprobs.logsumexp(0) - math.log(len(logits)), self.forbidden)
        return forbid(logprobs.mean(0), self.forbidden)


def vocabulary_difference(
    first_name: str, first: Captioner, name: str, other: Captioner
) -> str | None:
    """Describe the first difference between the tokens of two captioners; None if there is none."""
    one, two = first.vocabulary(), other.vocabulary()
    if not one or not two:
        return f"{name if one else first_name!r} does not list its tokens"
    for token in sorted(
        one.keys() | two.keys(), key=lambda token: one.get(token, two.get(token, 0))
    ):
        if one.get(token) != two.get(token):
            ids = [f"{owner!r} has {token!r} " + ("not" if token not in ids else f"as {ids[token]}")
                   for owner, ids in ((first_name, one), (name, two))]  # fmt: skip
            return f"{', '.join(ids)} ({len(one)} and {len(two)} tokens)"
    for key in ("eos_token_id", "pad_token_id", "forbidden"):
        if getattr(first, key) != getattr(other, key):
            values = [
                f"{owner!r} {getattr(model, key)!s:.80}"
                for owner, model in ((first_name, first), (name, other))
            ]
            return f"{key} of {' and of '.join(values)}"
    return None
