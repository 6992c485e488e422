"""Exact hard negatives of captions of generated scenes, one edit away from a caption, verified by
the oracle.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product

import numpy as np

from rl_caption.data.base import DataError, Row
from rl_caption.data.scenes.language import NUMBERS, article, plural
from rl_caption.data.scenes.oracle import (
    ADJECTIVES,
    NOUNS,
    PUNCTUATION,
    Chunk,
    cut_chunks,
    oracle,
    pair_things,
    tokens,
)
from rl_caption.data.scenes.oracle import NUMBERS as NUMBER_VALUES
from rl_caption.data.scenes.world import (
    BACKGROUNDS,
    COLOURS,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    Draws,
    Scene,
)

_VALUES = {"colour": COLOURS, "size": SIZES, "texture": TEXTURES}
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
Edit = Mapping[int, list[str]]
"""Index of a chunk -> its new tokens."""


def hard_negatives(scene: Scene, caption: str, seed: int) -> list[tuple[str, str]]:
    """Edit a true caption (short or long) into false ones; a pure function of the arguments.

    Returns:
        Pairs (kind, text), at most one per kind that applies, in the order of ``NEGATIVE_KINDS``.
        The oracle's precision of every text is below 1; only ``word_order`` is broken instead: the
        same words in another order, with more unparsed words or a lower F1 than the caption.
    """
    draws = Draws("negatives", seed, caption, repr(scene))
    words, capital = tokens(caption), caption[:1].isupper()
    chunks = cut_chunks(words)
    negatives: list[tuple[str, str]] = []
    for name in NEGATIVE_KINDS[:-1]:
        for edit in draws.permute(list(_edits(name, chunks, scene))):
            text = _text(_agreeing(chunks, edit), capital)
            if text != _text(words, capital) and oracle(text, scene).precision < 1:
                negatives.append((name, text))
                break
    original = oracle(caption, scene)
    for _ in range(10):
        shuffled = [word for word in draws.permute(words) if word not in PUNCTUATION]
        text = _text(shuffled, capital)
        broken = oracle(text, scene)
        if broken.unparsed > original.unparsed or broken.f1 < original.f1:
            negatives.append(("word_order", text + "." * (words[-1:] == ["."])))
            break
    return negatives


def _edits(name: str, chunks: Sequence[Chunk], scene: Scene) -> Iterator[Edit]:
    """Every edit of a kind of hard negatives."""
    change, _, what = name.partition("_")
    if change == "replace":
        for chunk in chunks:
            for new in _replacements(what, chunk, scene):
                yield {chunk.position: new}
    elif what == "relation":
        for subject, _, other in pair_things(chunks):
            yield {subject.position: other.words, other.position: subject.words}
    else:
        things = [chunk for chunk in chunks if chunk.kind == "thing"]
        for one, two in combinations(things, 2):
            for first, second in _swaps(what, one, two):
                yield {one.position: first, two.position: second}


def _replacements(what: str, chunk: Chunk, scene: Scene) -> Iterator[list[str]]:
    """Other tokens for a chunk."""
    words = chunk.words
    match what, chunk.kind:
        case "object", "thing" if chunk.shape is not None:
            for shape in _others(SHAPES, chunk.shape):
                yield _rename_shape(words, shape)
        case "attribute", "thing" | "adjectives":
            for at, attribute, value in _attributes(words):
                if value in _VALUES[attribute]:  # no background's colour
                    for other in _others(_VALUES[attribute], value):
                        yield _replace_word(words, at, other)
        case "background", "ground" | "adjectives":
            for at, word in enumerate(words):
                if word == scene.background:
                    for other in _others(BACKGROUNDS, word):
                        yield _replace_word(words, at, other)
        case "relation", "relation":
            for relation in _others(RELATIONS, chunk.value):
                yield _TO_THE.get(relation, relation).split()
        case "count", "thing" if _count(chunk):
            # "a circle" is not false of two circles, so nothing is replaced by a bare article.
            for number in range(1, len(NUMBERS)):
                if number != _count(chunk):
                    yield _change_number(words, number, "one")


def _swaps(what: str, one: Chunk, two: Chunk) -> Iterator[tuple[list[str], list[str]]]:
    """Other tokens for two things, each with what the other had."""
    first, second = one.words, two.words
    low, high = sorted((_count(one), _count(two)))
    if what == "object" and one.shape and two.shape and one.shape != two.shape:
        yield _rename_shape(first, two.shape), _rename_shape(second, one.shape)
    elif what == "attribute":
        pairs = product(_attributes(first), _attributes(second))
        for (a, attribute, value), (b, other, other_value) in pairs:
            if attribute == other and value != other_value:
                yield (
                    _replace_word(first, a, second[b]),
                    _replace_word(second, b, first[a]),
                )
    elif what == "count" and 0 < low < high < len(NUMBERS):
        changed = _change_number(first, _count(two), "a")
        yield changed, _change_number(second, _count(one), "a")


def _others(values: Sequence[str], value: str) -> list[str]:
    return [other for other in values if other != value]


def _replace_word(words: list[str], at: int, word: str) -> list[str]:
    return [*words[:at], word, *words[at + 1 :]]


def _rename_shape(words: list[str], shape: str) -> list[str]:
    return [*words[:-1], plural(shape) if NOUNS[words[-1]][1] else shape]


def _attributes(words: list[str]) -> list[tuple[int, str, str]]:
    """(position, attribute, value) of the adjectives of a chunk."""
    return [
        (at, *ADJECTIVES[word]) for at, word in enumerate(words) if word in ADJECTIVES
    ]


def _count(chunk: Chunk) -> int:
    """The number that a thing introduces; 0 where it introduces none ("the circle", "circles")."""
    return 0 if chunk.definite else chunk.number or int(not chunk.plural)


def _change_number(words: list[str], count: int, one: str) -> list[str]:
    rest = [
        word
        for word in words[:-1]
        if word not in NUMBER_VALUES and word not in ("a", "an")
    ]
    noun = NOUNS[words[-1]][0] or words[-1].removesuffix("s")
    if count == 1:
        return [one, *rest, noun]
    return [NUMBERS[count], *rest, plural(noun)]


def _agreeing(chunks: Sequence[Chunk], edit: Edit) -> Iterable[str]:
    """The tokens after an edit; verbs, pronouns and articles agree, so that grammar does not reveal
    the negative.
    """
    words = [list(edit.get(chunk.position, chunk.words)) for chunk in chunks]
    now = cut_chunks(list(chain(*words)))
    if len(now) != len(words):
        return chain(*words)
    things = {chunk.position: chunk for chunk in now if chunk.kind == "thing"}
    for at, (chunk, own) in enumerate(zip(now, words, strict=True)):
        if chunk.kind in ("be", "there"):
            ahead = chunk.kind == "there" or (at > 1 and now[at - 2].kind == "relation")
            subject = things.get(at + 1 if ahead else at - 1)
            if subject is not None:
                verb = "are" if subject.plural else "is"
                own[:] = [verb if word in ("is", "are") else word for word in own]
        elif (
            chunk.kind in ("thing", "ground") and len(own) > 1 and own[0] in ("a", "an")
        ):
            own[0] = article(own[1])
        elif chunk.kind == "pronoun":
            several = bool(things) and next(iter(things.values())).plural
            own[:] = ["them" if several else "it"]
    return chain(*words)


def _text(words: Iterable[str], capital: bool) -> str:
    """Join tokens to text: no space before punctuation; with ``capital``, sentences start with one."""
    text, starts = "", capital
    for word in words:
        if word in PUNCTUATION:
            text += word
            starts = starts or (capital and word in ".!?")
        else:
            text += " " * bool(text) + (word[0].upper() + word[1:] if starts else word)
            starts = False
    return text


class SceneNegatives:
    """Exact hard negatives of generated scenes, a ``NegativeSource``.

    ``kinds`` are among ``NEGATIVE_KINDS``; None takes all. Raises ``ValueError`` for others.
    """

    def __init__(self, kinds: Sequence[str] | None = None) -> None:
        unknown = sorted(set(kinds or ()) - set(NEGATIVE_KINDS))
        if unknown:
            raise ValueError(
                f"kinds has {unknown}: expected some of {list(NEGATIVE_KINDS)}"
            )
        self.kinds = tuple(kinds or NEGATIVE_KINDS)

    def __call__(
        self,
        row: Row,
        caption: str,
        generator: np.random.Generator,
    ) -> list[tuple[str, str]]:
        """The negatives that apply, in random order. Raises ``DataError`` where the row has no
        scene.
        """
        if row.get("scene") is None:
            raise DataError(
                f"image {row['image_id']!r} is no generated scene, which negatives.source scenes "
                f"needs"
            )
        pairs = hard_negatives(row["scene"], caption, int(generator.integers(2**31)))
        chosen = [pair for pair in pairs if pair[0] in self.kinds]
        return [chosen[index] for index in generator.permutation(len(chosen))]
