"""CIDEr-D from the token ids of a word-level captioner, on the device where they are: no strings, one transfer back.

Scores equal those from text to the bit, on a CPU and on a GPU: every sum is taken in the order of ``cider.similarity``.
On a CPU the arrays of ``packed_cider`` do the work, which look at the n-grams that are there; ``device_scores`` looks
at every position of every order, so that no shape depends on the data and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rewards.text.ngram_table import WORD_BITS, Array
from rewards.text.packed_cider import Captions, PackedCiderD, TokensOf
from rewards.text.reference_bank import IMAGE_BITS, Bank
from rewards.text.tokenize import is_plain

if TYPE_CHECKING:
    import torch
    from torch import Tensor


MOST_PAIRS = 1 << 26
"""Pairs of positions that ``device_scores`` compares at once, a byte each."""
MORE_TOKENS = 32
"""Tables for captions of a length hold captions of up to so many more tokens: lengths differ from step to step."""


@dataclass(frozen=True)
class WordVocabulary:
    """The tokens of a word-level captioner.

    Attributes:
        words: the word of each token id; of padding and the like, anything that is no plain word.
        eos_token_id: ends a caption; what follows is padding.
    """

    words: tuple[str, ...]
    eos_token_id: int


class TokenCiderD:
    """Scores token ids against references.

    A caption is scored from its ids if all its words are plain ones, which the tokeniser leaves as they are whatever
    stands beside them, because then its text has these very tokens.

    Args:
        packed: document frequencies and references.
        vocabulary: what the ids mean.
    """

    def __init__(self, packed: PackedCiderD, vocabulary: WordVocabulary) -> None:
        self.packed = packed
        self.eos_token_id = vocabulary.eos_token_id
        size, known = len(vocabulary.words), packed.known_words
        self.not_plain = known + 1 + size
        numbers = np.full(size + 1, self.not_plain)  # last: of ids that are no token's
        for token, word in enumerate(vocabulary.words):
            if is_plain(word):  # what df lacks equals itself alone
                numbers[token] = packed.plain_words.get(word, known + 1 + token)
        self.numbers, self.eos_word = numbers, packed.plain_words[None]
        self._on_device: dict[Any, DeviceTables] = {}

    def scores(self, ids: Tensor, ended: Array, owner: Array, bank: Bank, tokens_of: TokensOf) -> Array:
        """Score N captions.

        Args:
            ids: [N, L] token ids, anything after EOS; on any device.
            ended: [N] whether ``<eos>`` is the last word.
            owner: [N] row of its image in the bank.
            bank: references of B images, all of whose n-grams have document frequencies.
            tokens_of: the tokens of the texts of some rows, with ``<eos>``: of captions with other than plain words.

        Returns:
            [N] scores in [0, 10] but for rounding.
        """
        if ids.device.type == "cuda":
            scores = self.on_device(ids, ended, owner, bank).cpu().numpy()
            (rest,) = np.nonzero(np.isnan(scores))
            if len(rest):
                others = self.packed.numbers(tokens_of(rest.tolist()))
                scores[rest] = self.packed.scores(others, owner[rest], bank)
            return scores
        captions, plain = self.captions(ids.cpu().numpy().astype(np.int64, copy=False), ended)
        (rest,) = np.nonzero(~plain)
        if len(rest):
            captions = captions.replaced(rest, self.packed.numbers(tokens_of(rest.tolist())))
        return self.packed.scores(captions, owner, bank)

    def captions(self, ids: Array, ended: Array) -> tuple[Captions, Array]:
        """Word numbers of token ids [N, L], with ``<eos>`` where a caption ``ended`` [N]; whether all are plain [N].

        Captions of other than plain words are left empty.
        """
        count, longest = ids.shape
        inside = np.zeros((count, longest + 1), bool)
        np.logical_and.accumulate(ids != self.eos_token_id, axis=1, out=inside[:, :-1])
        lengths = np.count_nonzero(inside, axis=1)
        words = np.empty((count, longest + 1), np.int64)
        words[:, :-1] = self.numbers.take(ids.view(np.uint64), mode="clip")
        plain = ~((words == self.not_plain) & inside).any(axis=1)
        inside &= plain[:, None]
        ended, lengths = ended & plain, lengths * plain
        (rows,) = np.nonzero(ended)
        inside[rows, lengths[rows]], words[rows, lengths[rows]] = True, self.eos_word
        return Captions(words[inside], lengths + ended), plain

    def on_device(self, ids: Tensor, ended: Array, owner: Array, bank: Bank) -> Tensor:
        """What ``scores`` returns (NaN where words are not plain), made by ``device_scores`` where ``ids`` are."""
        import torch

        device = ids.device
        tables = self._tables(device, ids.shape[1] + 1)
        longest = max(ids.shape[1] + 1, int(bank.lengths.max(initial=0)))
        length_penalties = _on(self.packed.penalty_table(longest), device)
        references = DeviceReferences(*(_on(getattr(bank, field.name), device) for field in fields(bank)))
        rows = max(1, MOST_PAIRS // (ids.shape[1] + 1) ** 2)
        parts = zip(ids.split(rows), _on(ended, device).split(rows), _on(owner, device).split(rows), strict=True)
        return torch.cat([device_scores(*part, references, length_penalties, tables) for part in parts])

    def _tables(self, device: torch.device, most: int) -> DeviceTables:
        """What captions of up to ``most`` tokens look up on ``device``."""
        tables, packed = self._on_device.get(device), self.packed
        if tables is None:
            tables = DeviceTables(
                keys=_on(packed.keys, device), kinds=_on(packed.kinds, device),
                inverses=_on(packed.inverses, device), squares=_on(packed.square_table(most + MORE_TOKENS), device),
                numbers=_on(self.numbers, device), known_words=packed.known_words, n=packed.n,
                eos_token_id=self.eos_token_id, eos_word=self.eos_word, not_plain=self.not_plain,
            )  # fmt: skip
        elif tables.squares.shape[1] <= most:
            tables = replace(tables, squares=_on(packed.square_table(most + MORE_TOKENS), device))
        self._on_device[device] = tables
        return tables


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """What ``device_scores`` looks up, whatever the captions. V words, P places, T tokens."""

    keys: Tensor
    """[P - V] int64, ascending, see ``NGramTable``."""
    kinds: Tensor
    """[P + 1] int32: the index of a place's inverse document frequency; the last one is of what is not there."""
    inverses: Tensor
    """[D] float64, the different inverse document frequencies."""
    squares: Tensor
    """[D, C] float64: squared weights of n-grams that a caption has 0 to C - 1 times, more than it has tokens."""
    numbers: Tensor
    """[T + 1] int64: word numbers by token; ``not_plain`` for other than plain words, and for what is no token."""
    known_words: int
    """V; n-grams of one word have its number as place."""
    n: int
    eos_token_id: int
    eos_word: int
    not_plain: int


@dataclass(frozen=True, eq=False)
class DeviceReferences:
    """A ``Bank`` on the device."""

    keys: Tensor
    counts: Tensor
    norms: Tensor
    lengths: Tensor
    references: Tensor


def device_scores(
    ids: Tensor, ended: Tensor, owner: Tensor, references: DeviceReferences, penalties: Tensor, tables: DeviceTables
) -> Tensor:
    """CIDEr-D of token ids by dense operations; nothing waits for the device.

    Args:
        ids: [N, L] int64 token ids, anything after EOS.
        ended: [N] whether ``<eos>`` is the last word.
        owner: [N] row of the image among ``references``.
        references: of B images.
        penalties: length penalties by the absolute difference in tokens.
        tables: document frequencies and vocabulary.

    Returns:
        [N] float64 scores in [0, 10]; NaN where a word is not plain.
    """
    import torch

    words, length, plain = _words(ids, ended, tables)
    counts, places = _counted(words, length, tables)  # [n, N, W]
    kinds = tables.kinds[torch.where(places < 0, len(tables.kinds) - 1, places)].long()
    inverse, squares = tables.inverses[kinds], tables.squares[kinds, counts]
    weights = counts * inverse
    shared = _shared(places, owner, references) * inverse.unsqueeze(-1)  # [n, N, W, R]
    clipped = torch.minimum(weights.unsqueeze(-1), shared) * shared
    sums = _sum_in_order(torch.cat([clipped, squares.unsqueeze(-1)], -1).movedim(2, -1))
    products, norms = sums[..., :-1], _root(sums[..., -1:])  # [n, N, R], [n, N, 1]
    scale = norms * references.norms[:, owner]
    values = torch.where(scale != 0, products / scale, products)
    apart = ((length - 1).clamp(min=0).unsqueeze(-1) - references.lengths[owner]).abs()
    per_order = _sum_in_order(values * penalties[apart])  # [n, N]
    total = _sum_in_order(per_order.T) / tables.n / references.references[owner] * 10.0
    return torch.where(plain, total, torch.nan)


def _words(ids: Tensor, ended: Tensor, tables: DeviceTables) -> tuple[Tensor, Tensor, Tensor]:
    """Word numbers [N, W] (W = L + 1, or n where that is more), lengths [N], whether all words are plain [N]."""
    import torch

    inside = (ids == tables.eos_token_id).cumsum(1) == 0
    length = inside.sum(1)
    unknown = len(tables.numbers) - 1
    words = tables.numbers[torch.where(ids < 0, unknown, ids.clamp(max=unknown))]
    plain = ~((words == tables.not_plain) & inside).any(1)
    words = torch.nn.functional.pad(words, (0, max(1, tables.n - ids.shape[1])))
    at_end = torch.arange(words.shape[1], device=ids.device) == length.unsqueeze(1)
    return torch.where(at_end, tables.eos_word, words), length + ended, plain


def _counted(words: Tensor, length: Tensor, tables: DeviceTables) -> tuple[Tensor, Tensor]:
    """How often the n-gram that begins at a position is in the caption, 0 where it stood before; places: [n, N, W]."""
    import torch

    width = words.shape[1]
    positions = torch.arange(width, device=words.device)
    valid = positions < length.unsqueeze(1)
    same = (words.unsqueeze(2) == words.unsqueeze(1)) & valid.unsqueeze(2) & valid.unsqueeze(1)
    before = positions.unsqueeze(1) > positions  # [p, q]: q stands before p
    equal, place = same, torch.where(words < tables.known_words, words, -1)
    counts, places = [], []
    for order in range(tables.n):
        if order:
            equal = equal[:, :-1, :-1] & same[:, order:, order:]
            place = _longer(place[:, :-1], words[:, order:], tables)
        left = width - order
        first = valid[:, order:] & ~(equal & before[:left, :left]).any(2)
        counts.append(torch.nn.functional.pad(torch.where(first, equal.sum(2), 0), (0, order)))
        places.append(torch.nn.functional.pad(torch.where(first, place, -1), (0, order), value=-1))
    return torch.stack(counts), torch.stack(places)


def _longer(prefix: Tensor, last: Tensor, tables: DeviceTables) -> Tensor:
    """Places of n-grams from those of all their words but the last, -1 for what is not there."""
    import torch

    if not len(tables.keys):
        return torch.full_like(prefix, -1)
    found, there = _find(tables.keys, prefix << WORD_BITS | last)
    return torch.where(there & (prefix >= 0), found + tables.known_words, -1)


def _find(keys: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``wanted`` would stand among ascending ``keys``, and whether it does."""
    import torch

    found = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return found, keys[found] == wanted


def _shared(places: Tensor, owner: Tensor, references: DeviceReferences) -> Tensor:
    """How often the n-grams at ``places`` [n, N, W] are in each reference of the caption's own image: [n, N, W, R]."""
    if not len(references.keys):  # no reference has a word
        return references.counts.new_zeros(*places.shape, references.counts.shape[1])
    found, there = _find(references.keys, owner.view(1, -1, 1) << IMAGE_BITS | places)
    return references.counts[found] * (there & (places >= 0)).unsqueeze(-1)


def _sum_in_order(values: Tensor) -> Tensor:
    """Sum over the last axis from its first entry to its last: [..., W] -> [...]."""
    total = values[..., 0]
    for number in range(1, values.shape[-1]):
        total = total + values[..., number]
    return total


def _root(values: Tensor) -> Tensor:
    """Square root, rounded as IEEE 754 says; on a CPU torch's may be off in the last digit, on a GPU it is exact."""
    import torch

    return torch.from_numpy(np.sqrt(values.numpy())) if values.device.type == "cpu" else values.sqrt()


def _on(array: Array, device: torch.device) -> Tensor:
    """A copy on ``device``, sent without waiting."""
    import torch

    tensor = torch.tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
