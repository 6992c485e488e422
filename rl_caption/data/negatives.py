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
from functools import cached_property, partial
from itertools import chain, combinations
from typing import Protocol

import numpy as np

from rewards.text.detail_units import default_tagger, word_class
from rl_caption.data.base import DataError, Row
from rl_caption.data.plain_files import progress

NUMBERS = (
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
)
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
_RELATION = re.compile(rf"(?<!\S)(?:{'|'.join(_RELATIONS)})(?!\S)")
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
    [
        "front",
        "top",
        "left",
        "right",
        "side",
        "middle",
        "background",
        "foreground",
        "picture",
    ]
)
"""Nouns that are parts of relations, such as "in front of"."""
_LEFT_OUT = {"N": _NOT_SWAPPED, "J": _NO_ATTRIBUTES}


class NegativeSource(Protocol):
    """A source of hard negatives: rules, a language model, a column of the data."""

    def __call__(
        self,
        row: Row,
        caption: str,
        generator: np.random.Generator,
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

    @cached_property
    def lower(self) -> tuple[str, ...]:
        """The words in lower case."""
        return tuple(word.lower() for word in self.words)

    def of(self, letter: str) -> list[int]:
        """Positions of the words of one class."""
        return [at for at, kind in enumerate(self.classes) if kind == letter]

    def replace_words(self, edits: Mapping[int, str]) -> str:
        """The caption with the words at some positions replaced; articles are made to agree."""
        words = [edits.get(at, word) for at, word in enumerate(self.words)]
        # "a" and "an" agree with the word after them, so that grammar does not give the negative
        # away.
        for at, following in enumerate(words[1:]):
            is_near = at in edits or at + 1 in edits
            if is_near and following and words[at].lower() in ("a", "an"):
                words[at] = _like(_article(following), words[at])
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


def _article(word: str) -> str:
    return "an" if word[0].lower() in "aeiou" else "a"


def tag_words(caption: str) -> Tagged:
    """Tag a caption by ``default_tagger``; verbs after an article count as nouns."""
    words = tuple(_WORD.findall(caption))
    tags = default_tagger()([words])[0] if words else []
    return Tagged(words, tuple(map(word_class, tags)))


def word_pool(captions: Sequence[str]) -> dict[str, tuple[list[str], np.ndarray]]:
    """Nouns and adjectives of captions, with the cumulative relative frequencies from which they
    are drawn.

    Of more than ``POOLED`` captions, an evenly spaced subset is read.
    """
    chosen = captions[:: max(1, len(captions) // POOLED)]
    counts: dict[str, Counter[str]] = {"N": Counter(), "J": Counter()}
    for caption in progress(chosen, "words of captions", "caption"):
        tagged = tag_words(caption)
        for word, letter in zip(tagged.lower, tagged.classes, strict=True):
            if letter in counts and word.isalpha() and word not in _LEFT_OUT[letter]:
                counts[letter][word] += 1
    pool = {}
    for letter, words in counts.items():
        shares = np.array([*words.values()]) / max(1, words.total())
        pool[letter] = ([*words], np.cumsum(shares))
    return pool


def _is_plural(noun: str) -> bool:
    return noun in _IRREGULAR_PLURALS or (
        noun.endswith("s") and not noun.endswith(("ss", "us", "is"))
    )


def _drawn(
    pool: Pool,
    letter: str,
    present: Tagged,
    generator: np.random.Generator,
    plural: bool | None = None,
) -> str | None:
    """Draw a word of a class by frequency, which the caption has not; None after ten failed draws.

    ``plural`` restricts nouns to plurals (True) or singulars (False).
    """
    words, shares = pool[letter]
    for _ in range(10 if words else 0):
        place = int(np.searchsorted(shares, generator.random(), side="right"))
        word = words[min(place, len(words) - 1)]
        if word not in present.lower and plural in (None, _is_plural(word)):
            return word
    return None


def _swappable(caption: Tagged, letter: str) -> list[int]:
    """Positions of the words of a class that are no parts of relations."""
    return [at for at in caption.of(letter) if caption.lower[at] not in _NOT_SWAPPED]


def _replace_word(
    caption: Tagged,
    pool: Pool,
    generator: np.random.Generator,
    letter: str,
) -> str | None:
    """Replace one word by another of its class."""
    positions = _swappable(caption, letter)
    if not positions:
        return None
    at = int(generator.choice(positions))
    plural = _is_plural(caption.lower[at]) if letter == "N" else None
    word = _drawn(pool, letter, caption, generator, plural)
    if word is None:
        return None
    return caption.replace_words({at: _like(word, caption.words[at])})


def _replace_relation(
    caption: Tagged, pool: Pool, generator: np.random.Generator
) -> str | None:
    text = " ".join(caption.lower)
    found = list(_RELATION.finditer(text))
    if not found:
        return None
    found.sort(key=lambda match: _RELATIONS.index(match[0]))
    match = found[int(generator.integers(len(found)))]
    at = text[: match.start()].count(" ")
    rest = dict.fromkeys(range(at + 1, at + len(match[0].split())), "")
    return caption.replace_words({at: _OPPOSITE[match[0]], **rest})


def _replace_count(
    caption: Tagged, pool: Pool, generator: np.random.Generator
) -> str | None:
    # Not "one": the noun after it would have to become plural.
    positions = [at for at, word in enumerate(caption.lower) if word in NUMBERS[1:]]
    if not positions:
        return None
    at = int(generator.choice(positions))
    others = [number for number in NUMBERS[1:] if number != caption.lower[at]]
    other = others[int(generator.integers(len(others)))]
    return caption.replace_words({at: _like(other, caption.words[at])})


def _swap(
    caption: Tagged,
    pool: Pool,
    generator: np.random.Generator,
    letter: str,
) -> str | None:
    """Exchange two words of the class."""
    pairs = []
    for first, second in combinations(_swappable(caption, letter), 2):
        # Words without others between them form one phrase ("tennis ball", "black and white").
        between = caption.classes[first + 1 : second]
        if caption.lower[first] != caption.lower[second] and any(
            c not in "NJC" for c in between
        ):
            pairs.append((first, second))
    if not pairs:
        return None
    first, second = pairs[int(generator.integers(len(pairs)))]
    one, other = caption.words[first], caption.words[second]
    return caption.replace_words({first: _like(other, one), second: _like(one, other)})


def _add_object(
    caption: Tagged, pool: Pool, generator: np.random.Generator
) -> str | None:
    word = _drawn(pool, "N", caption, generator)
    ends = [at for at in caption.of("N") if caption.classes[at + 1 : at + 2] != ("N",)]
    if not ends or word is None:
        return None
    at = int(generator.choice(ends))
    article = "" if _is_plural(word) else f"{_article(word)} "
    return caption.replace_words({at: f"{caption.words[at]} and {article}{word}"})


def _add_attribute(
    caption: Tagged, pool: Pool, generator: np.random.Generator
) -> str | None:
    word = _drawn(pool, "J", caption, generator)
    bare = [
        at for at in caption.of("N") if at == 0 or caption.classes[at - 1] not in "NJ"
    ]
    if not bare or word is None:
        return None
    at = int(generator.choice(bare))
    described = f"{_like(word, caption.words[at])} {caption.words[at]}"
    return caption.replace_words({at: described})


def _shuffle(
    caption: Tagged,
    pool: Pool,
    generator: np.random.Generator,
    nouns: bool,
) -> str | None:
    """Shuffle nouns and adjectives, or all other words, among their positions."""
    positions = [
        at
        for at, letter in enumerate(caption.classes)
        if caption.words[at].isalnum() and (letter in "NJ") == nouns
    ]
    shuffled = generator.permutation(positions)
    words = {
        at: caption.words[other] for at, other in zip(positions, shuffled, strict=True)
    }
    return _join_words(words.get(at, word) for at, word in enumerate(caption.words))


def _shuffle_trigrams(
    caption: Tagged,
    pool: Pool,
    generator: np.random.Generator,
    within: bool,
) -> str | None:
    """Cut the words into triples and shuffle these, or the words ``within`` each; drop punctuation."""
    words = [word for word in caption.words if word[0].isalnum()]
    triples = [words[start : start + 3] for start in range(0, len(words), 3)]
    if within:
        triples = [
            [triple[n] for n in generator.permutation(len(triple))]
            for triple in triples
        ]
    else:
        triples = [triples[index] for index in generator.permutation(len(triples))]
    return _join_words(chain(*triples))


def _like(word: str, original: str) -> str:
    """``word`` with the capitalisation of ``original``."""
    if original[:1].isupper():
        return word.capitalize()
    return word.lower() if word.istitle() else word


Edit = Callable[[Tagged, Pool, np.random.Generator], str | None]
"""A false caption, or None where the rule does not apply."""
EDITS: dict[str, Edit] = {
    "replace_object": partial(_replace_word, letter="N"),
    "replace_attribute": partial(_replace_word, letter="J"),
    "replace_relation": _replace_relation,
    "replace_count": _replace_count,
    "swap_object": partial(_swap, letter="N"),
    "swap_attribute": partial(_swap, letter="J"),
    "add_object": _add_object,
    "add_attribute": _add_attribute,
    "shuffle_nouns_adjectives": partial(_shuffle, nouns=True),
    "shuffle_all_but_nouns_adjectives": partial(_shuffle, nouns=False),
    "shuffle_within_trigrams": partial(_shuffle_trigrams, within=True),
    "shuffle_trigrams": partial(_shuffle_trigrams, within=False),
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
        self,
        row: Row,
        caption: str,
        generator: np.random.Generator,
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
        self,
        row: Row,
        caption: str,
        generator: np.random.Generator,
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
        return [
            ("data", entries[index]) for index in generator.permutation(len(entries))
        ]


NEGATIVES = {
    "rules": "rl_caption.data.negatives:RuleNegatives",
    "scenes": "rl_caption.data.scenes.negatives:SceneNegatives",
    "data": "rl_caption.data.negatives:ColumnNegatives",
}
"""Name of a ``NegativeSource`` -> ``module:Name``."""
