"""Captions of a scene: short references in different wordings, and one long description.

All are true of the scene. What a short caption leaves out is random, as people mention
different things.
"""

import re
from collections.abc import Sequence

from rl_caption.data.scenes.world import Draws, Kind, Scene, relations_between

NUMBERS = ("no", "one", "two", "three", "four")
_WORDINGS = {
    "large": "large|large|big",
    "small": "small|small|little",
    "dotted": "dotted|dotted|spotted",
    "left of": "left of|to the left of|to the left of",
    "right of": "right of|to the right of|to the right of",
    "above": "above|above|over",
    "below": "below|below|beneath|under",
}
_GENERIC = re.compile(r"\b(shape|object)s?\b")


def references(scene: Scene, seed: int, count: int = 5) -> list[str]:
    """``count`` (1 to 20) different short captions of a scene, of 5 to 16 words each; a
    pure function.

    Each is true and tells some of the facts, usually about the most salient kinds. As
    with captions by people, most but not all have a capital and a full stop. At most
    one names no shape.
    """
    draws = Draws("references", seed, repr(scene))
    told: dict[str, str] = {}
    while len(told) < count:
        sentence = _short_sentence(scene, draws)
        if sentence in told or not 5 <= len(sentence.split()) <= 16:
            continue
        if not (_GENERIC.search(sentence) and any(map(_GENERIC.search, told))):
            told[sentence] = _vary_typing(sentence, draws)
    return list(told.values())


def long_reference(scene: Scene, seed: int) -> str:
    """A description of 3 to 6 sentences that tells every fact of the scene; a pure function."""
    draws = Draws("long", seed, repr(scene))
    kinds = scene.kinds
    names = [noun_phrase(kind, ("size", "colour"), draws) for kind in kinds]
    shows = "the picture shows"
    opening = draws.choice((shows, f"there {_be(kinds[0])}", shows))
    textures = [f"{_the_is(kind)} {_word(kind.texture, draws)}" for kind in kinds]
    sentences = [f"{opening} {_join_phrases(names)}", _join_phrases(textures)]
    ground = f"the background is {scene.background}"
    sentences.append(draws.choice((ground, f"the picture has {_ground(scene)}")))
    for index, kind in enumerate(kinds):
        related = [
            f"{_word(relation, draws)} {_the(other)}"
            for other in kinds[index + 1 :]
            for relation in relations_between(kind, other)[:1]
        ]
        if related:
            sentences.append(f"{_the_is(kind)} {' and '.join(related)}")
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def noun_phrase(kind: Kind, attributes: Sequence[str], draws: Draws) -> str:
    """Name a kind: number or article, the given ``attributes`` (size, texture, colour), and shape."""
    words = []
    for name in ("size", "texture", "colour"):
        if name in attributes:
            words.append(_word(getattr(kind, name), draws))
    words.append(_noun(kind))
    number = NUMBERS[len(kind.things)] if kind.several else article(words[0])
    return f"{number} {' '.join(words)}"


def plural(noun: str) -> str:
    """The plural of a noun of this world."""
    return noun + ("es" if noun.endswith("s") else "s")


def article(following: str) -> str:
    """The indefinite article before a word of this world."""
    return "an" if following[0] in "aeio" and following != "one" else "a"


def wordings(value: str) -> list[str]:
    """The wordings of an attribute's value or of a relation, repeated by weight."""
    return _WORDINGS.get(value, value).split("|")


def _word(value: str, draws: Draws) -> str:
    return draws.choice(wordings(value))


def _noun(kind: Kind) -> str:
    return plural(kind.shape) if kind.several else kind.shape


def _the(kind: Kind) -> str:
    return f"the {kind.colour} {_noun(kind)}"


def _be(kind: Kind) -> str:
    return "are" if kind.several else "is"


def _the_is(kind: Kind) -> str:
    return f"{_the(kind)} {_be(kind)}"


def _ground(scene: Scene) -> str:
    return f"{article(scene.background)} {scene.background} background"


def _join_phrases(phrases: Sequence[str]) -> str:
    *first, last = phrases
    return f"{', '.join(first)} and {last}" if first else last


def _vary_typing(sentence: str, draws: Draws) -> str:
    """Add a capital and a full stop, as most people do; sometimes leave out one or both."""
    if draws.chance(0.15):
        return sentence
    sentence = f"{sentence[0].upper()}{sentence[1:]}"
    return sentence + "." if draws.chance(0.8) else sentence


def _short_sentence(scene: Scene, draws: Draws) -> str:
    """Draw one candidate; empty where its form does not fit the scene."""
    kinds = scene.kinds
    weights = ((4, 2, 0, 0, 1), (2, 2, 6, 4, 1), (2, 2, 6, 3, 2))[
        min(len(kinds), 3) - 1
    ]
    forms = ("kind", "kind on", "relation", "all", "number on")
    form = draws.choose_weighted(forms, weights)
    if form == "number on":
        total = len(scene.things)
        noun = draws.choice(("shape", "object"))
        name = f"{NUMBERS[total]} {plural(noun) if total > 1 else noun}"
        place = draws.below(3)
        if place == 0:
            name = f"there {'are' if total > 1 else 'is'} {name}"
        return _with_ground(name, place == 1, scene, draws)
    if form == "relation":
        sentence = _relation(scene, draws)
    elif form == "all":
        several = kinds if draws.chance(0.6) else kinds[:2]
        names = [_describe(kind, scene, draws) for kind in several]
        openings = ("", f"there {_be(kinds[0])} ", "the picture shows ")
        sentence = draws.choose_weighted(openings, (3, 1, 1)) + _join_phrases(names)
    else:
        kind = kinds[0] if draws.chance(0.85) else draws.choice(kinds)
        if form == "kind on":
            name = _describe(kind, scene, draws)
            return _with_ground(name, draws.chance(0.3), scene, draws)
        opening = draws.choice((f"there {_be(kind)}", "the picture shows"))
        sentence = f"{opening} {_describe(kind, scene, draws)}"
    if sentence and draws.chance(0.3):
        return _with_ground(sentence, False, scene, draws)
    return sentence


def _with_ground(name: str, first: bool, scene: Scene, draws: Draws) -> str:
    """Say what is on the background, which is named first or last."""
    ground = _ground(scene)
    if first:
        return f"{ground} with {name}"
    preposition = draws.choose_weighted(("on", "against", "in front of"), (4, 1, 1))
    return f"{name} {preposition} {ground}"


def _describe(kind: Kind, scene: Scene, draws: Draws) -> str:
    """Name a kind with random attributes; always with its colour where another kind has
    the same shape.
    """
    mentioned = []
    shapes = [other.shape for other in scene.kinds]
    if shapes.count(kind.shape) > 1 or draws.chance(0.9):
        mentioned.append("colour")
    if draws.chance(0.45 if kind.size == "large" else 0.4):
        mentioned.append("size")
    if draws.chance(0.08 if kind.texture == "plain" else 0.5):
        mentioned.append("texture")
    return noun_phrase(kind, mentioned, draws)


def _relation(scene: Scene, draws: Draws) -> str:
    kinds = scene.kinds if draws.chance(0.8) else draws.permute(scene.kinds)
    first, second = kinds[:2]
    relations = relations_between(first, second)
    if not relations:
        return ""
    phrase = _word(relations[0], draws)
    one, other = _describe(first, scene, draws), _describe(second, scene, draws)
    if draws.chance(0.25):
        back = _word(relations_between(second, first)[0], draws)
        return f"{one} with {other} {back} {'them' if first.several else 'it'}"
    forms = (
        f"{one} {phrase} {other}",
        f"{one} {_be(first)} {phrase} {other}",
        f"{phrase} {other} {_be(first)} {one}",
    )
    return draws.choose_weighted(forms, (5, 2, 1))
