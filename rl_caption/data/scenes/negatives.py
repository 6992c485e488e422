"""Hard negatives: captions one edit away from a given one, and false (or broken) by the oracle's judgement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from rl_caption.data.scenes.draws import Draws
from rl_caption.data.scenes.grammar import ADJECTIVES, NOUNS, Chunk, chunked, related, tokens
from rl_caption.data.scenes.grammar import NUMBERS as NUMBER_VALUES
from rl_caption.data.scenes.language import NUMBERS, article, plural
from rl_caption.data.scenes.oracle import oracle
from rl_caption.data.scenes.world import BACKGROUNDS, COLOURS, RELATIONS, SHAPES, SIZES, TEXTURES, Scene

_VALUES = {"colour": COLOURS, "size": SIZES, "texture": TEXTURES}
_RELATION_WORDS = {"left of": "to the left of", "right of": "to the right of", "above": "above", "below": "below"}

Pieces = list[list[str]]
"""A caption cut into chunks, each a list of lower-case tokens."""


def hard_negatives(scene: Scene, caption: str, seed: int) -> list[tuple[str, str]]:
    """Edit a true caption into false ones, at most one of each kind.

    Args:
        scene: the scene that the caption describes.
        caption: a short or long caption in the language of this world.
        seed: which edits; the result is a pure function of all three.

    Returns:
        Pairs (kind, text) for the kinds that apply, in the order of ``NEGATIVE_KINDS``. Every text but ``word_order``
        has oracle precision below 1; ``word_order`` has the same words in another order, and more unparsed words or a
        lower F1 than the caption.
    """
    draws = Draws("negatives", seed, caption, repr(scene))
    words = tokens(caption)
    chunks = chunked(words)
    pieces = [words[chunk.start : chunk.end] for chunk in chunks]
    capital = caption[:1].isupper()
    found: list[tuple[str, str]] = []
    for kind, edits in _EDITS.items():
        for edited in draws.shuffled(list(edits(chunks, pieces, scene))):
            text = _joined(_agreeing(edited), capital)
            if text != _joined(pieces, capital) and oracle(text, scene).precision < 1:
                found.append((kind, text))
                break
    original = oracle(caption, scene)
    for _ in range(10):
        text = _joined([[word for word in draws.shuffled(words) if word not in ".,;:!?"]], capital)
        broken = oracle(text, scene)
        if broken.unparsed > original.unparsed or broken.f1 < original.f1:
            found.append(("word_order", text + ("." if words[-1:] == ["."] else "")))
            break
    return found


def _things(chunks: list[Chunk]) -> list[int]:
    return [index for index, chunk in enumerate(chunks) if chunk.kind == "thing"]


def _with(pieces: Pieces, *changes: tuple[int, list[str]]) -> Pieces:
    edited = list(pieces)
    for index, words in changes:
        edited[index] = words
    return edited


def _replace_object(chunks: list[Chunk], pieces: Pieces, scene: Scene) -> Iterator[Pieces]:
    for index in _things(chunks):
        for shape in SHAPES:
            if chunks[index].shape not in (None, shape):
                yield _with(pieces, (index, _renamed(pieces[index], shape)))


def _renamed(words: list[str], shape: str) -> list[str]:
    return [*words[:-1], plural(shape) if NOUNS[words[-1]][1] else shape]


def _replace_attribute(chunks: list[Chunk], pieces: Pieces, scene: Scene) -> Iterator[Pieces]:
    for index, chunk in enumerate(chunks):
        if chunk.kind not in ("thing", "adjectives"):
            continue
        for at, word in enumerate(pieces[index]):
            attribute, value = ADJECTIVES.get(word, ("", ""))
            for other in _VALUES.get(attribute, ()):
                if other != value and value in _VALUES[attribute]:
                    yield _with(pieces, (index, [*pieces[index][:at], other, *pieces[index][at + 1 :]]))


def _replace_background(chunks: list[Chunk], pieces: Pieces, scene: Scene) -> Iterator[Pieces]:
    for index, words in enumerate(pieces):
        for at, word in enumerate(words):
            if chunks[index].kind in ("ground", "adjectives") and word == scene.background:
                for other in BACKGROUNDS:
                    if other != word:
                        yield _with(pieces, (index, [*words[:at], other, *words[at + 1 :]]))


def _replace_relation(chunks: list[Chunk], pieces: Pieces, scene: Scene) -> Iterator[Pieces]:
    for index, chunk in enumerate(chunks):
        if chunk.kind == "relation":
            for relation in RELATIONS:
                if relation != chunk.value:
                    yield _with(pieces, (index, _RELATION_WORDS[relation].split()))


def _replace_count(chunks: list[Chunk], pieces: Pieces, scene: Scene) -> Iterator[Pieces]:
    for index in _things(chunks):
        count = _count(chunks[index])
        for other in range(1, len(NUMBERS)):
            # "a circle" is not false of two circles, so nothing is replaced by a bare article.
            if other != count and count:
                yield _with(pieces, (index, _recounted(pieces[index], other, "one")))


def _count(chunk: Chunk) -> int:
    """Return the number that a mention introduces; 0 where it introduces none ("the circle", "circles")."""
    return 0 if chunk.definite else chunk.number or int(not chunk.plural)


def _recounted(words: list[str], count: int, one: str = "a") -> list[str]:
    rest = [word for word in words[:-1] if word not in NUMBER_VALUES and word not in ("a", "an")]
    shape, _ = NOUNS[words[-1]]
    noun = shape or words[-1].removesuffix("s")
    return [one if count == 1 else NUMBERS[count], *rest, noun if count == 1 else plural(noun)]


def _swap_object(chunks: list[Chunk], pieces: Pieces, scene: Scene) -> Iterator[Pieces]:
    for first, second in combinations(_things(chunks), 2):
        one, other = chunks[first].shape, chunks[second].shape
        if one and other and one != other:
            yield _with(pieces, (first, _renamed(pieces[first], other)), (second, _renamed(pieces[second], one)))


def _swap_attribute(chunks: list[Chunk], pieces: Pieces, scene: Scene) -> Iterator[Pieces]:
    for first, second in combinations(_things(chunks), 2):
        for a, word in enumerate(pieces[first]):
            for b, other in enumerate(pieces[second]):
                attribute, value = ADJECTIVES.get(word, ("", ""))
                if attribute and ADJECTIVES.get(other, ("", value))[0] == attribute and ADJECTIVES[other][1] != value:
                    yield _with(
                        pieces,
                        (first, [*pieces[first][:a], other, *pieces[first][a + 1 :]]),
                        (second, [*pieces[second][:b], word, *pieces[second][b + 1 :]]),
                    )


def _swap_relation(chunks: list[Chunk], pieces: Pieces, scene: Scene) -> Iterator[Pieces]:
    places = {id(chunk): index for index, chunk in enumerate(chunks)}
    for subject, _, other in related(chunks):
        first, second = places[id(subject)], places[id(other)]
        yield _with(pieces, (first, pieces[second]), (second, pieces[first]))


def _swap_count(chunks: list[Chunk], pieces: Pieces, scene: Scene) -> Iterator[Pieces]:
    for first, second in combinations(_things(chunks), 2):
        one, other = _count(chunks[first]), _count(chunks[second])
        if one and other and one != other and max(one, other) < len(NUMBERS):
            yield _with(pieces, (first, _recounted(pieces[first], other)), (second, _recounted(pieces[second], one)))


_EDITS: dict[str, Callable[[list[Chunk], Pieces, Scene], Iterator[Pieces]]] = {
    "replace_object": _replace_object,
    "replace_attribute": _replace_attribute,
    "replace_background": _replace_background,
    "replace_relation": _replace_relation,
    "replace_count": _replace_count,
    "swap_object": _swap_object,
    "swap_attribute": _swap_attribute,
    "swap_relation": _swap_relation,
    "swap_count": _swap_count,
}
NEGATIVE_KINDS = (*_EDITS, "word_order")
"""Kinds of hard negatives, in the order in which ``hard_negatives`` returns them."""


def _agreeing(pieces: Pieces) -> list[list[str]]:
    """Make verbs, pronouns and articles agree after an edit, so that grammar does not give the negative away."""
    chunks = chunked([word for words in pieces for word in words])
    edited = [list(words) for words in pieces]
    if len(chunks) != len(pieces):
        return edited
    for index, chunk in enumerate(chunks):
        if chunk.kind in ("be", "there"):
            ahead = chunk.kind == "there" or (index > 1 and chunks[index - 2].kind == "relation")
            at = index + 1 if ahead else index - 1
            if 0 <= at < len(chunks) and chunks[at].kind == "thing":
                word = "are" if chunks[at].plural else "is"
                edited[index] = [word if token in ("is", "are") else token for token in edited[index]]
        elif chunk.kind in ("thing", "ground") and len(edited[index]) > 1 and edited[index][0] in ("a", "an"):
            edited[index][0] = article(edited[index][1])
        elif chunk.kind == "pronoun":
            first = next((other for other in chunks if other.kind == "thing"), chunk)
            edited[index] = ["them" if first.plural else "it"]
    return edited


def _joined(pieces: Pieces, capital: bool) -> str:
    """Write tokens as a text: no space before punctuation, and capitals at the start of sentences if asked for."""
    text = ""
    start = True
    for word in (word for words in pieces for word in words):
        if word in ".,;:!?":
            text += word
            start = start or word in ".!?"
        else:
            text += (" " if text else "") + (word[0].upper() + word[1:] if start and capital else word)
            start = False
    return text
