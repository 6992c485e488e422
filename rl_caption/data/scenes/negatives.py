"""Exact hard negatives of captions of generated scenes, one edit away from a caption,
verified by the oracle.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product

import numpy as np

from rl_caption.data.base import DataError, Row
from rl_caption.data.scenes.language import NUMBERS, article, plural
from rl_caption.data.scenes.oracle import (
    ADJECTIVES,
    NOUNS,
    Chunk,
    cut_chunks,
    oracle,
    parse,
    tokens,
)
from rl_caption.data.scenes.world import (
    ATTRIBUTES,
    BACKGROUNDS,
    RELATIONS,
    SHAPES,
    Draws,
    Scene,
)

_TO_THE = {"left of": "to the left of", "right of": "to the right of"}
NEGATIVE_KINDS = (
    "replace_object",
    "replace_attribute",
    "replace_background",
    "replace_relation",
    "replace_count",
    "swap_object",
    "swap_attribute",
    "swap_relation",
    "swap_count",
    "word_order",
)
"""Kinds of hard negatives, in the order in which ``hard_negatives`` returns them."""
_VALUES = {
    "object": [SHAPES],
    "attribute": [*ATTRIBUTES.values()],
    "background": [BACKGROUNDS],
}
"""What is replaced or swapped -> lists of values that may stand for each other."""
Edit = Mapping[Chunk, list[str]]
"""A chunk -> its new tokens."""


def hard_negatives(scene: Scene, caption: str, seed: int) -> list[tuple[str, str]]:
    """Edit a true caption (short or long) into false ones; a pure function of the arguments.

    Returns:
        Pairs (kind, text), at most one per kind that applies, in the order of ``NEGATIVE_KINDS``.
        The oracle's precision of every text is below 1; only ``word_order`` is broken instead: the
        same words in another order, with more unparsed words or a lower F1 than the caption.
    """
    draws = Draws("negatives", seed, caption, repr(scene))
    words, capital = tokens(caption), caption[:1].isupper()
    chunks = parse(caption)
    negatives: list[tuple[str, str]] = []
    for name in NEGATIVE_KINDS[:-1]:
        change, _, what = name.partition("_")
        edits = _replacements if change == "replace" else _swaps
        for edit in draws.permute(edits(what, chunks)):
            text = _text(_agreeing(chunks, edit), capital)
            if oracle(text, scene).precision < 1:
                negatives.append((name, text))
                break
    original = oracle(caption, scene)
    for _ in range(10):
        shuffled = [word for word in draws.permute(words) if word not in ".,;:!?"]
        text = _text(shuffled, capital)
        broken = oracle(text, scene)
        if broken.unparsed > original.unparsed or broken.f1 < original.f1:
            negatives.append(("word_order", text + "." * caption.endswith(".")))
            break
    return negatives


def _replacements(what: str, chunks: Sequence[Chunk]) -> Iterator[Edit]:
    """Every edit that replaces an object, attribute, background, relation or count by another."""
    for chunk in chunks:
        for at, value, values in _slots(what, chunk):
            for other in values:
                if other != value:
                    yield {chunk: _put(chunk.words, at, other)}


def _swaps(what: str, chunks: Sequence[Chunk]) -> Iterator[Edit]:
    """Every edit that gives each of two things what the other has."""
    if what == "relation":
        for chunk in chunks:
            if chunk.kind == "relation" and chunk.used:
                subject, other = chunk.about
                yield {subject: other.words, other: subject.words}
    things = [chunk for chunk in chunks if chunk.kind == "thing"]
    for one, two in combinations(things, 2):
        first, second = one.words, two.words
        slots = product(_slots(what, one), _slots(what, two))
        for (a, value, values), (b, other_value, others) in slots:
            if values == others and value != other_value:
                yield {one: _put(first, a, second[b]), two: _put(second, b, first[a])}


def _slots(what: str, chunk: Chunk) -> Iterator[tuple[int, str, Sequence[str]]]:
    """Words of a chunk that may be replaced: position, value, and the values it may have."""
    if what == chunk.kind == "relation":
        yield 0, chunk.relation, RELATIONS
    if what == "count" and chunk.kind == "thing" and not chunk.definite:
        count = chunk.number or int(not chunk.several)
        if count:  # "circles" introduces no number
            yield 0, NUMBERS[count], NUMBERS[1:]
    for at, word in enumerate(chunk.words):
        _, value = ADJECTIVES.get(word, ("", NOUNS.get(word, "")))
        for values in _VALUES.get(what, ()):
            if value in values:
                yield at, value, values


def _put(words: list[str], at: int, new: str) -> list[str]:
    """Put a relation, a number or article, a noun or an adjective in the place of another."""
    if new in RELATIONS:
        return _TO_THE.get(new, new).split()
    if new in (*NUMBERS, "a", "an"):
        noun = NOUNS[words[-1]]
        adjectives = [word for word in words if word in ADJECTIVES]
        one = new in ("one", "a", "an")
        return [new, *adjectives, noun if one else plural(noun)]
    if new in NOUNS:  # in the number of the noun that it replaces
        shape = NOUNS[new]
        new = shape if words[at] in SHAPES else plural(shape)
    return [*words[:at], new, *words[at + 1 :]]


def _agreeing(chunks: Sequence[Chunk], edit: Edit) -> Iterator[str]:
    """The tokens after an edit; verbs, pronouns and articles agree, so that grammar
    does not reveal the negative.
    """
    words = chain.from_iterable(edit.get(chunk, chunk.words) for chunk in chunks)
    now = [*cut_chunks(words), Chunk("stop", [], {})]
    several = [chunk.several for chunk in now if chunk.kind == "thing"]
    for at, chunk in enumerate(now):
        if chunk.kind in ("be", "there"):
            ahead = chunk.kind == "there" or now[at - 2].kind == "relation"
            subject = now[at + 1 if ahead else at - 1]
            if subject.kind == "thing":
                chunk.words[-1] = "are" if subject.several else "is"
        elif chunk.words[:1] in (["a"], ["an"]):
            chunk.words[0] = article(chunk.words[1])
        elif chunk.kind == "pronoun":
            chunk.words[:] = ["them" if any(several[:1]) else "it"]
    return chain.from_iterable(chunk.words for chunk in now)


def _text(words: Iterable[str], capital: bool) -> str:
    """Join tokens to text: no space before punctuation; with ``capital``, sentences start with one."""
    text = re.sub(r" ([.,;:!?])", r"\1", " ".join(words))
    if capital:
        text = re.sub(r"(^|[.!?] )\w", lambda start: start[0].upper(), text)
    return text


class SceneNegatives:
    """Exact hard negatives of generated scenes, a ``NegativeSource``."""

    def __call__(
        self, row: Row, caption: str, generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        """The negatives that apply, in random order. Raises ``DataError`` where the row
        has no scene.
        """
        if row.get("scene") is None:
            raise DataError(
                f"image {row['image_id']!r} is no generated scene, which negatives.source scenes "
                f"needs"
            )
        pairs = hard_negatives(row["scene"], caption, int(generator.integers(2**31)))
        return [pairs[index] for index in generator.permutation(len(pairs))]
