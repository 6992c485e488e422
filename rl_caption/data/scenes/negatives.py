"""Exact hard negatives and paraphrases of captions of generated scenes, verified by the oracle.

Hard negatives are one edit away from a caption and false (or broken). Paraphrases say the same in other words:
synonyms, and relations told from the other end.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

from rl_caption.data.base import DataError, Row
from rl_caption.data.scenes.language import NUMBERS, RELATION_PHRASES, SYNONYMS, article, plural
from rl_caption.data.scenes.moving import (
    DIRECTIONS,
    OTHER_WORD,
    MovingScene,
    phrase_at,
    verb_phrase,
)
from rl_caption.data.scenes.oracle import (
    ADJECTIVES,
    NOUNS,
    PUNCTUATION,
    Chunk,
    claims,
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
_INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_RELATION_WORDS = {
    "left of": "to the left of",
    "right of": "to the right of",
    "above": "above",
    "below": "below",
}

NEGATIVE_KINDS = (
    *(f"replace_{what}" for what in ("object", "attribute", "background", "relation", "count")),
    *(f"swap_{what}" for what in ("object", "attribute", "relation", "count")),
    "word_order",
)
"""Kinds of hard negatives, in the order in which ``hard_negatives`` returns them."""
MOVING_KINDS = (
    "replace_object",
    "replace_attribute",
    "replace_background",
    "replace_direction",
    "replace_verb",
)
"""Kinds for moving scenes; ``direction`` becomes the opposite, ``verb`` another of moves, enters, leaves, stays."""
Words = list[list[str]]
"""The lower-case tokens of a caption, chunk by chunk."""
Edit = dict[int, list[str]]
"""Index of a chunk -> its new tokens."""


def hard_negatives(scene: Scene | MovingScene, caption: str, seed: int) -> list[tuple[str, str]]:
    """Edit a true caption (short or long) into false ones; a pure function of the arguments.

    Returns:
        Pairs (kind, text), at most one per kind that applies, in the order of ``NEGATIVE_KINDS`` (moving scenes:
        ``MOVING_KINDS``). The oracle's precision of every text is below 1; only ``word_order`` is broken instead: the
        same words in another order, with more unparsed words or a lower F1 than the caption.
    """
    draws = Draws("negatives", seed, caption, repr(scene))
    flat, chunks, words = _cut(caption)
    capital = caption[:1].isupper()
    negatives: list[tuple[str, str]] = []
    is_moving = isinstance(scene, MovingScene)
    for change in MOVING_KINDS if is_moving else NEGATIVE_KINDS[:-1]:
        for edit in draws.permute(list(_edits(change, chunks, words, scene))):
            text = _text(
                _agreeing(
                    [edit.get(index, chunk_words) for index, chunk_words in enumerate(words)]
                ),
                capital,
            )
            if text != _text(words, capital) and oracle(text, scene).precision < 1:
                negatives.append((change, text))
                break
    original = oracle(caption, scene)
    for _ in range(0 if is_moving else 10):
        text = _text([[word for word in draws.permute(flat) if word not in PUNCTUATION]], capital)
        broken = oracle(text, scene)
        if broken.unparsed > original.unparsed or broken.f1 < original.f1:
            negatives.append(("word_order", text + ("." if flat[-1:] == ["."] else "")))
            break
    return negatives


def paraphrases(scene: Scene, caption: str, seed: int) -> list[str]:
    """Other wordings of a true caption that tell the same facts; a pure function of the arguments.

    Attributes, relations and "on" get a synonym, and at most one relation is told from its other end ("A left of B",
    "B right of A"), so that paraphrases differ from the caption where hard negatives do.
    """
    draws = Draws("paraphrases", seed, caption, repr(scene))
    _, chunks, words = _cut(caption)
    synonyms = {
        index: options
        for index, chunk in enumerate(chunks)
        if (options := _synonyms(chunk, words[index]))
    }
    capital, told = caption[:1].isupper(), _told(caption, scene)
    texts, none = [_text(words, capital)], Edit()
    for turned in draws.permute([none, *_turn_relations(chunks, words, draws)]):
        sites = [index for index in synonyms if index not in turned]
        sure = draws.choice(sites) if sites and not turned else None
        chosen = [index for index in sites if index == sure or draws.chance(0.5)]
        edit = turned | {index: draws.choice(synonyms[index]) for index in chosen}
        text = _text(
            _agreeing([edit.get(index, chunk_words) for index, chunk_words in enumerate(words)]),
            capital,
        )
        if text not in texts and _told(text, scene) == told:
            texts.append(text)
    return texts[1:]


def _cut(caption: str) -> tuple[list[str], list[Chunk], Words]:
    """The tokens of a caption, its chunks, and the tokens of each chunk."""
    flat = tokens(caption)
    chunks = cut_chunks(flat)
    return flat, chunks, [flat[chunk.start : chunk.end] for chunk in chunks]


def _told(caption: str, scene: Scene) -> tuple[frozenset[str], float]:
    """What a caption tells: its true facts and other claims as text, and its fraction of unparsed words."""
    facts = {
        str(claim.fact if claim.true and claim.fact else claim.text)
        for claim in claims(caption, scene)
    }
    return frozenset(facts), oracle(caption, scene).unparsed


def _synonyms(chunk: Chunk, words: list[str]) -> list[list[str]]:
    """Other tokens for a chunk with the same meaning."""
    if chunk.kind == "relation":
        return [
            other
            for text in dict.fromkeys(RELATION_PHRASES[chunk.value])
            if (other := text.split()) != words
        ]
    if chunk.kind == "on":
        return [
            other for text in ("on", "against", "in front of") if (other := text.split()) != words
        ]
    return [
        _replace_word(words, at, other)
        for at, _, value in _attributes(words)
        for other in sorted(set(SYNONYMS.get(value, ())) - {words[at]})
    ]


def _turn_relations(chunks: list[Chunk], words: Words, draws: Draws) -> Iterator[Edit]:
    """An edit for each relation of two things that tells it from the other end."""
    for subject, relation, other in pair_things(chunks):
        first, second = subject.position, other.position
        if chunks[second - 1].kind == "relation" and not subject.definite and not other.definite:
            back = draws.choice(RELATION_PHRASES[_INVERSE[relation]])
            yield {first: words[second], second: words[first], second - 1: back.split()}


def _replace_word(words: list[str], at: int, word: str) -> list[str]:
    return [*words[:at], word, *words[at + 1 :]]


def _rename_shape(words: list[str], shape: str) -> list[str]:
    return [*words[:-1], plural(shape) if NOUNS[words[-1]][1] else shape]


def _attributes(words: list[str]) -> list[tuple[int, str, str]]:
    """(position, attribute, value) of the adjectives of a chunk."""
    return [(at, *ADJECTIVES[word]) for at, word in enumerate(words) if word in ADJECTIVES]


def _count(chunk: Chunk) -> int:
    """The number that a thing introduces; 0 where it introduces none ("the circle", "circles")."""
    return 0 if chunk.definite else chunk.number or int(not chunk.plural)


def _change_number(words: list[str], count: int, one: str) -> list[str]:
    rest = [word for word in words[:-1] if word not in NUMBER_VALUES and word not in ("a", "an")]
    noun = NOUNS[words[-1]][0] or words[-1].removesuffix("s")
    return [one if count == 1 else NUMBERS[count], *rest, noun if count == 1 else plural(noun)]


def _replacements(
    what: str, chunk: Chunk, words: list[str], scene: Scene | MovingScene
) -> Iterator[list[str]]:
    """Other tokens for a chunk."""
    match what, chunk.kind:
        case "object", "thing":
            yield from (
                _rename_shape(words, shape) for shape in SHAPES if chunk.shape not in (None, shape)
            )
        case "attribute", "thing" | "adjectives":
            for at, attribute, value in _attributes(words):
                others = [other for other in _VALUES[attribute] if other != value]
                if value in _VALUES[attribute]:  # no background's colour
                    yield from (_replace_word(words, at, other) for other in others)
        case "background", "ground" | "adjectives":
            for at in [at for at, word in enumerate(words) if word == scene.background]:
                yield from (
                    _replace_word(words, at, other)
                    for other in BACKGROUNDS
                    if other != scene.background
                )
        case "relation", "relation":
            yield from (
                _RELATION_WORDS[relation].split()
                for relation in RELATIONS
                if relation != chunk.value
            )
        case "count", "thing" if _count(chunk):
            # "a circle" is not false of two circles, so nothing is replaced by a bare article.
            numbers = [number for number in range(1, len(NUMBERS)) if number != _count(chunk)]
            yield from (_change_number(words, number, "one") for number in numbers)


def _swaps(
    what: str, one: Chunk, two: Chunk, first: list[str], second: list[str]
) -> Iterator[tuple[list[str], ...]]:
    """Other tokens for two things, each with what the other had."""
    counts = _count(one), _count(two)
    if what == "object" and one.shape and two.shape and one.shape != two.shape:
        yield _rename_shape(first, two.shape), _rename_shape(second, one.shape)
    elif what == "attribute":
        for (a, attribute, value), (b, other, other_value) in product(
            _attributes(first), _attributes(second)
        ):
            if attribute == other and value != other_value:
                yield _replace_word(first, a, second[b]), _replace_word(second, b, first[a])
    elif what == "count" and 0 < min(counts) < max(counts) < len(NUMBERS):
        yield _change_number(first, counts[1], "a"), _change_number(second, counts[0], "a")


def _motion_edits(what: str, chunks: list[Chunk], words: Words) -> Iterator[Edit]:
    """Every edit of a phrase of motion, whose words are chunks of their own."""
    flat = [word for chunk_words in words for word in chunk_words]
    index_of = {chunk.start: index for index, chunk in enumerate(chunks)}
    at = 0
    while at < len(flat):
        match = phrase_at(flat, at)
        if match is None or any(start not in index_of for start in range(at, at + match[0])):
            at += 1
            continue
        length, phrase = match
        indices = [index_of[start] for start in range(at, at + length)]
        if what == "direction" and phrase.direction in DIRECTIONS:
            yield {index: [OTHER_WORD.get(words[index][0], words[index][0])] for index in indices}
        elif what == "verb" and phrase.event != "collides":
            before = ["is"] if phrase.form == "third" and flat[at] == "is" else []
            form = "participle" if before else phrase.form
            verb, direction = phrase.event or "moves", phrase.direction
            if direction == "none":
                verb, direction = "stays", ""
            draws = Draws("verb", *flat)
            for other in ("moves", "enters", "leaves", "stays"):
                if other != verb:
                    told = verb_phrase(
                        other, direction or draws.choice(DIRECTIONS), form, draws
                    ).split()
                    yield {indices[0]: [*before, *told], **{index: [] for index in indices[1:]}}
        at += length


def _edits(
    change_name: str, chunks: list[Chunk], words: Words, scene: Scene | MovingScene
) -> Iterator[Edit]:
    """Every edit of a kind."""
    change, _, what = change_name.partition("_")
    if what in ("direction", "verb"):
        yield from _motion_edits(what, chunks, words)
    elif change == "replace":
        for index, chunk in enumerate(chunks):
            yield from ({index: new} for new in _replacements(what, chunk, words[index], scene))
    elif what == "relation":
        for subject, _, other in pair_things(chunks):
            yield {subject.position: words[other.position], other.position: words[subject.position]}
    else:
        for one, two in combinations([chunk for chunk in chunks if chunk.kind == "thing"], 2):
            swaps = _swaps(what, one, two, words[one.position], words[two.position])
            yield from ({one.position: new, two.position: other} for new, other in swaps)


class SceneNegatives:
    """Exact hard negatives of generated scenes, a ``NegativeSource``.

    ``kinds`` are among ``NEGATIVE_KINDS`` and ``MOVING_KINDS``; None takes all. Raises ``ValueError`` for others.
    """

    def __init__(self, kinds: Sequence[str] | None = None) -> None:
        names = list(dict.fromkeys([*NEGATIVE_KINDS, *MOVING_KINDS]))
        unknown = sorted(set(kinds or ()) - set(names))
        if unknown:
            raise ValueError(f"kinds has {unknown}: expected some of {names}")
        self.kinds = tuple(kinds or names)

    def __call__(
        self, row: Row, caption: str, generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        """The negatives that apply, in random order. Raises ``DataError`` where the row has no scene."""
        pairs = hard_negatives(
            _scene_of(row, "negatives.source"), caption, int(generator.integers(2**31))
        )
        chosen = [pair for pair in pairs if pair[0] in self.kinds]
        return [chosen[index] for index in generator.permutation(len(chosen))]


class ScenePositives:
    """Exact paraphrases of captions of generated scenes, a ``PositiveSource``."""

    def __call__(self, row: Row, caption: str, generator: np.random.Generator) -> list[str]:
        """The ``paraphrases`` of a caption. Raises ``DataError`` where the row has no scene."""
        return paraphrases(
            _scene_of(row, "negatives.positive_source"), caption, int(generator.integers(2**31))
        )


def _scene_of(row: Row, key: str) -> Any:
    scene = row.get("scene")
    if scene is None:
        raise DataError(
            f"image {row['image_id']!r} is not a generated scene, which {key} scenes needs"
        )
    return scene


def _agreeing(words: Words) -> Words:
    """Make verbs, pronouns and articles agree after an edit, so that grammar does not reveal the negative."""
    chunks = cut_chunks([word for chunk_words in words for word in chunk_words])
    edited = [list(chunk_words) for chunk_words in words]
    if len(chunks) != len(words):
        return edited
    for index, chunk in enumerate(chunks):
        if chunk.kind in ("be", "there"):
            ahead = chunk.kind == "there" or (index > 1 and chunks[index - 2].kind == "relation")
            at = index + 1 if ahead else index - 1
            if 0 <= at < len(chunks) and chunks[at].kind == "thing":
                verb = "are" if chunks[at].plural else "is"
                edited[index] = [verb if word in ("is", "are") else word for word in edited[index]]
        elif (
            chunk.kind in ("thing", "ground")
            and len(edited[index]) > 1
            and edited[index][0] in ("a", "an")
        ):
            edited[index][0] = article(edited[index][1])
        elif chunk.kind == "pronoun":
            first = next((other for other in chunks if other.kind == "thing"), chunk)
            edited[index] = ["them" if first.plural else "it"]
    return edited


def _text(words: Words, capital: bool) -> str:
    """Join tokens to text: no space before punctuation; with ``capital``, sentences start with one."""
    text, start = "", True
    for word in (word for chunk_words in words for word in chunk_words):
        if word in PUNCTUATION:
            text += word
            start = start or word in ".!?"
        else:
            text += (" " if text else "") + (
                word[0].upper() + word[1:] if start and capital else word
            )
            start = False
    return text
