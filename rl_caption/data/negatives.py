"""Hard negatives: false captions one edit away from a true one, made by rules over part-of-speech
tags.

The edits are those of SugarCrepe (Hsieh et al. 2023: replace, swap, add) and of ARO's order task
(Yuksekgonul et al. 2023). Rules do not see the image, so some of the captions are true
nevertheless. For generated scenes, ``rl_caption.data.scenes.negatives`` makes exact ones.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rewards.text.detail_units import default_tagger, word_class
from rl_caption.data.base import DataError, Row
from rl_caption.data.file_checks import progress

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
OPPOSITES = (
    *(
        ("left", "right"),
        ("above", "below"),
        ("over", "under"),
        ("inside", "outside"),
        ("into", "out of"),
    ),
    *(("in front of", "behind"), ("on top of", "underneath"), ("up", "down")),
    *(("with", "without"), ("near", "far from")),
)
"""Pairs of relations that exclude each other."""
POOLED = 20_000
"""Largest number of captions that new words are drawn from: about a minute of tagging."""
_OPPOSITE = dict(OPPOSITES) | {second: first for first, second in OPPOSITES}
_RELATIONS = sorted(_OPPOSITE, key=len, reverse=True)
_WORD = re.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
_NO_ATTRIBUTES = frozenset(
    [
        "next",
        "other",
        "several",
        "same",
        "many",
        "few",
        "such",
        "own",
        "last",
        "first",
        "public",
        "couple",
    ]
)
_IRREGULAR_PLURALS = frozenset(
    ["people", "men", "women", "children", "feet", "teeth", "geese", "mice", "police"]
)
_NOT_SWAPPED = frozenset(
    ["front", "top", "left", "right", "side", "middle", "background", "foreground", "picture"]
)
"""Nouns that are parts of relations, such as "in front of"."""


class NegativeSource(Protocol):
    """A source of hard negatives: rules, a language model, a column of the data."""

    def __call__(
        self, row: Row, caption: str, generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        """Return pairs (kind, false caption), the preferred ones first; a pure function of the
        arguments.
        """
        ...


@dataclass(frozen=True)
class Tagged:
    """Words of a caption, each with its ``word_class``: N noun, J adjective, I preposition, ..."""

    words: tuple[str, ...]
    classes: tuple[str, ...]

    def of(self, letter: str) -> list[int]:
        """Positions of the words of one class."""
        return [at for at, word_class in enumerate(self.classes) if word_class == letter]

    def replace_words(self, edits: Mapping[int, str]) -> str:
        """The caption with the words at some positions replaced; articles are made to agree."""
        words = [edits.get(at, word) for at, word in enumerate(self.words)]
        # "a" and "an" agree with the word after them, so that grammar does not give the negative
        # away.
        for at in range(len(words) - 1):
            if edits.keys() & {at, at + 1} and words[at].lower() in ("a", "an") and words[at + 1]:
                article = "an" if words[at + 1][0].lower() in "aeiou" else "a"
                words[at] = article.capitalize() if words[at][0].isupper() else article
        return _join_words(words)


def one_form(caption: str) -> str:
    """The caption in the form of the edits: words and punctuation of ``_WORD``, no space before the
    latter.
    """
    return _join_words(_WORD.findall(caption))


def _join_words(words: Iterable[str]) -> str:
    return re.sub(r" (?=[.,;:!?])", "", " ".join(word for word in words if word))


Pool = Mapping[str, tuple[Sequence[str], np.ndarray]]
"""Word class -> words of a dataset, and their cumulative relative frequencies."""


def tag_words(caption: str) -> Tagged:
    """Tag a caption by ``default_tagger``; verbs after an article count as nouns."""
    words = tuple(_WORD.findall(caption))
    tags = default_tagger()([words])[0] if words else []
    return Tagged(words, tuple(word_class(tag) for tag in tags))


def word_pool(captions: Sequence[str]) -> dict[str, tuple[list[str], np.ndarray]]:
    """Nouns and adjectives of captions, with the cumulative relative frequencies from which they
    are drawn.

    Of more than ``POOLED`` captions, an evenly spaced subset is read.
    """
    chosen = captions[:: max(1, len(captions) // POOLED)]
    counts: dict[str, Counter[str]] = {"N": Counter(), "J": Counter()}
    for caption in progress(chosen, "words of captions", "caption"):
        words_of_caption = tag_words(caption)
        for letter, counter in counts.items():
            counter.update(
                words_of_caption.words[at].lower()
                for at in words_of_caption.of(letter)
                if words_of_caption.words[at].isalpha()
            )
    for letter, words in (("J", _NO_ATTRIBUTES), ("N", _NOT_SWAPPED)):
        for word in words:
            del counts[letter][word]
    return {
        letter: ([*counter], np.cumsum(np.array([*counter.values()]) / max(1, counter.total())))
        for letter, counter in counts.items()
    }


def _is_plural(noun: str) -> bool:
    return noun in _IRREGULAR_PLURALS or (
        noun.endswith("s") and not noun.endswith(("ss", "us", "is"))
    )


def _drawn(
    pool: Pool,
    letter: str,
    present: set[str],
    generator: np.random.Generator,
    plural: bool | None = None,
) -> str | None:
    """Draw a word of a class by frequency, not among ``known``; None after ten failed draws.

    ``plural`` restricts nouns to plurals (True) or singulars (False).
    """
    words, shares = pool[letter]
    for _ in range(10 if words else 0):
        word = words[
            min(int(np.searchsorted(shares, generator.random(), side="right")), len(words) - 1)
        ]
        if word not in present and plural in (None, _is_plural(word)):
            return word
    return None


def _replace_word(letter: str) -> Edit:
    def edit(caption: Tagged, pool: Pool, generator: np.random.Generator) -> str | None:
        """Replace one word by another of its class."""
        positions = [
            at for at in caption.of(letter) if caption.words[at].lower() not in _NOT_SWAPPED
        ]
        if not positions:
            return None
        at = int(generator.choice(positions))
        plural = _is_plural(caption.words[at].lower()) if letter == "N" else None
        word = _drawn(pool, letter, {word.lower() for word in caption.words}, generator, plural)
        if word is None:
            return None
        return caption.replace_words({at: _like(word, caption.words[at])})

    return edit


def _replace_relation(caption: Tagged, pool: Pool, generator: np.random.Generator) -> str | None:
    lower = [word.lower() for word in caption.words]
    relations = [
        (at, len(relation.split()), relation)
        for relation in _RELATIONS
        for at in range(len(lower))
        if lower[at : at + len(relation.split())] == relation.split()
    ]
    longest = [
        one
        for one in relations
        if not any(o[0] <= one[0] < o[0] + o[1] and o[1] > one[1] for o in relations)
    ]
    if not longest:
        return None
    at, length, relation = longest[int(generator.integers(len(longest)))]
    return caption.replace_words(
        {at: _OPPOSITE[relation]} | dict.fromkeys(range(at + 1, at + length), "")
    )


def _replace_count(caption: Tagged, pool: Pool, generator: np.random.Generator) -> str | None:
    # Not "one": the noun after it would have to become plural.
    positions = [at for at, word in enumerate(caption.words) if word.lower() in NUMBERS[1:]]
    if not positions:
        return None
    at = int(generator.choice(positions))
    others = [number for number in NUMBERS[1:] if number != caption.words[at].lower()]
    return caption.replace_words(
        {at: _like(others[int(generator.integers(len(others)))], caption.words[at])}
    )


def _swap(letter: str) -> Edit:
    def edit(caption: Tagged, pool: Pool, generator: np.random.Generator) -> str | None:
        """Exchange two words of the class."""
        positions = [
            at for at in caption.of(letter) if caption.words[at].lower() not in _NOT_SWAPPED
        ]
        pairs = [
            (first, second)
            for index, first in enumerate(positions)
            for second in positions[index + 1 :]
            # Words without others between them form one phrase ("tennis ball", "black and white").
            if caption.words[first].lower() != caption.words[second].lower()
            and any(caption.classes[at] not in "NJC" for at in range(first + 1, second))
        ]
        if not pairs:
            return None
        first, second = pairs[int(generator.integers(len(pairs)))]
        one, other = caption.words[first], caption.words[second]
        return caption.replace_words({first: _like(other, one), second: _like(one, other)})

    return edit


def _add_object(caption: Tagged, pool: Pool, generator: np.random.Generator) -> str | None:
    word = _drawn(pool, "N", {word.lower() for word in caption.words}, generator)
    ends = [
        at
        for at in caption.of("N")
        if at + 1 == len(caption.words) or caption.classes[at + 1] != "N"
    ]
    if not ends or word is None:
        return None
    at = int(generator.choice(ends))
    article = "" if _is_plural(word) else "an " if word[0] in "aeiou" else "a "
    return caption.replace_words({at: f"{caption.words[at]} and {article}{word}"})


def _add_attribute(caption: Tagged, pool: Pool, generator: np.random.Generator) -> str | None:
    word = _drawn(pool, "J", {word.lower() for word in caption.words}, generator)
    bare = [at for at in caption.of("N") if at == 0 or caption.classes[at - 1] not in "NJ"]
    if not bare or word is None:
        return None
    at = int(generator.choice(bare))
    return caption.replace_words({at: f"{_like(word, caption.words[at])} {caption.words[at]}"})


def _shuffle(chosen: Callable[[str], bool]) -> Edit:
    """An edit that shuffles the words of the ``chosen`` classes among their positions."""

    def edit(caption: Tagged, pool: Pool, generator: np.random.Generator) -> str | None:
        positions = [
            at
            for at, letter in enumerate(caption.classes)
            if caption.words[at].isalnum() and chosen(letter)
        ]
        shuffled = generator.permutation(positions)
        words = {at: caption.words[other] for at, other in zip(positions, shuffled, strict=True)}
        return _join_words(words.get(at, word) for at, word in enumerate(caption.words))

    return edit


def _shuffle_trigrams(within: bool) -> Edit:
    """An edit that cuts the words into triples and shuffles these, or the words ``within`` each;
    drops punctuation.
    """

    def edit(caption: Tagged, pool: Pool, generator: np.random.Generator) -> str | None:
        words = [word for word in caption.words if word[0].isalnum()]
        triples = [words[start : start + 3] for start in range(0, len(words), 3)]
        if within:
            return _join_words(
                triple[index] for triple in triples for index in generator.permutation(len(triple))
            )
        return _join_words(
            word for index in generator.permutation(len(triples)) for word in triples[index]
        )

    return edit


def _like(word: str, original: str) -> str:
    """``word`` with the capitalisation of ``original``."""
    return word.capitalize() if original[:1].isupper() else word.lower() if word.istitle() else word


Edit = Callable[[Tagged, Pool, np.random.Generator], str | None]
"""A false caption, or None where the rule does not apply."""
EDITS: dict[str, Edit] = {
    "replace_object": _replace_word("N"),
    "replace_attribute": _replace_word("J"),
    "replace_relation": _replace_relation,
    "replace_count": _replace_count,
    "swap_object": _swap("N"),
    "swap_attribute": _swap("J"),
    "add_object": _add_object,
    "add_attribute": _add_attribute,
    "shuffle_nouns_adjectives": _shuffle(lambda letter: letter in "NJ"),
    "shuffle_all_but_nouns_adjectives": _shuffle(lambda letter: letter not in "NJ"),
    "shuffle_within_trigrams": _shuffle_trigrams(within=True),
    "shuffle_trigrams": _shuffle_trigrams(within=False),
}
"""Kind of hard negative -> the rule that makes it; the last four are ARO's perturbations of word
order.
"""


@dataclass
class RuleNegatives:
    """Hard negatives by rules, a ``NegativeSource``.

    New objects and attributes are drawn from ``captions``, by frequency. ``kinds`` are names of
    ``EDITS`` (None: all); each caption gets those that apply, in random order. Raises
    ``ValueError`` for an unknown kind, and ``RewardError`` where the package ``textblob`` is not
    installed.
    """

    captions: Sequence[str]
    kinds: Sequence[str] | None = None
    pool: Pool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.kinds or ()) - set(EDITS))
        if unknown:
            raise ValueError(f"kinds has {unknown}: expected some of {list(EDITS)}")
        self.pool = word_pool(self.captions)

    def __call__(
        self, row: Row, caption: str, generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        """False captions; none equals a reference of the row up to case and white space."""
        entries, kinds = tag_words(caption), list(self.kinds or EDITS)
        true = {_plain(text) for text in (*row["references"], caption)}
        false = []
        for index in generator.permutation(len(kinds)):
            text = EDITS[kinds[index]](entries, self.pool, generator)
            if text is not None and _plain(text) not in true:
                false.append((kinds[index], text))
        return false


def _plain(caption: str) -> str:
    return " ".join(_WORD.findall(caption.lower()))


@dataclass(frozen=True)
class ColumnNegatives:
    """Hard negatives of the dataset itself, a ``NegativeSource``: the column ``negatives``, one
    list per reference.
    """

    def __call__(
        self, row: Row, caption: str, generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        """The negatives of the reference, in random order. Raises ``DataError`` where the row has
        none for it.
        """
        column = row.get("negatives")
        if column is None or caption not in row["references"]:
            raise DataError(
                f"image {row['image_id']!r} has no negatives for {caption!r}: expected that column"
            )
        entries = column[row["references"].index(caption)]
        return [("data", entries[index]) for index in generator.permutation(len(entries))]


NEGATIVES = {
    "rules": "rl_caption.data.negatives:RuleNegatives",
    "scenes": "rl_caption.data.scenes.negatives:SceneNegatives",
    "data": "rl_caption.data.negatives:ColumnNegatives",
}
"""Name of a ``NegativeSource`` -> ``module:Name``."""
