"""Captions of a scene: short references in different wordings, and one long description.

All are true of the scene. What a short caption leaves out is random, as people mention different
things.
"""

import re
from collections.abc import Sequence
from itertools import combinations

from rl_caption.data.scenes.world import Draws, Kind, Scene, relations_between

NUMBERS = ("no", "one", "two", "three", "four")
SYNONYMS = {
    "large": ("large", "large", "big"),
    "small": ("small", "small", "little"),
    "dotted": ("dotted", "dotted", "spotted"),
}
"""Wordings of an attribute's value, repeated by weight; other values have one wording."""
RELATION_PHRASES = {
    "left of": ("left of", "to the left of", "to the left of"),
    "right of": ("right of", "to the right of", "to the right of"),
    "above": ("above", "above", "over"),
    "below": ("below", "below", "beneath", "under"),
}
_GENERIC = re.compile(r"\b(shape|object)s?\b")


def references(scene: Scene, seed: int, count: int = 5) -> list[str]:
    """``count`` (1 to 20) different short captions of a scene, of 5 to 16 words each; a pure
    function.

    Each is true and tells some of the facts, usually about the most salient kinds. As with captions
    by people, most but not all have a capital and a full stop. At most one names no shape.
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
    first = _join_phrases(
        [noun_phrase(kind, ("size", "colour"), draws) for kind in kinds]
    )
    there = f"there {_be(kinds[0])}"
    sentences = [
        f"{draws.choice(('the picture shows', there, 'the picture shows'))} {first}"
    ]
    textures = [
        f"{_the(kind)} {_be(kind)} {_choose_synonym(kind.texture, draws)}"
        for kind in kinds
    ]
    sentences.append(_join_phrases(textures))
    background = (
        f"the background is {scene.background}",
        f"the picture has {_a_background(scene)}",
    )
    sentences.append(draws.choice(background))
    related: dict[Kind, list[str]] = {}
    for kind, other in combinations(kinds, 2):
        if relations := relations_between(kind, other):
            phrase = draws.choice(RELATION_PHRASES[relations[0]])
            related.setdefault(kind, []).append(f"{phrase} {_the(other)}")
    for kind, phrases in related.items():
        sentences.append(f"{_the(kind)} {_be(kind)} {' and '.join(phrases)}")
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def noun_phrase(kind: Kind, attributes: Sequence[str], draws: Draws) -> str:
    """Name a kind: number or article, the given ``attributes`` (size, texture, colour), and shape."""
    told = [name for name in ("size", "texture", "colour") if name in attributes]
    words = [_choose_synonym(getattr(kind, name), draws) for name in told]
    words.append(_shape(kind))
    number = NUMBERS[len(kind.things)] if kind.several else article(words[0])
    return " ".join([number, *words])


def plural(noun: str) -> str:
    """The plural of a noun of this world."""
    return noun + ("es" if noun.endswith("s") else "s")


def article(following: str) -> str:
    """The indefinite article before a word of this world."""
    return "an" if following[0] in "aeio" and following != "one" else "a"


def _choose_synonym(value: str, draws: Draws) -> str:
    return draws.choice(SYNONYMS.get(value, (value,)))


def _shape(kind: Kind) -> str:
    return plural(kind.shape) if kind.several else kind.shape


def _the(kind: Kind) -> str:
    return f"the {kind.colour} {_shape(kind)}"


def _be(kind: Kind) -> str:
    return "are" if kind.several else "is"


def _a_background(scene: Scene) -> str:
    return f"{article(scene.background)} {scene.background} background"


def _join_phrases(phrases: Sequence[str]) -> str:
    return ", ".join(phrases[:-1]) + " and " * (len(phrases) > 1) + phrases[-1]


def _vary_typing(sentence: str, draws: Draws) -> str:
    """Add a capital and a full stop, as most people do; sometimes leave out one or both."""
    if draws.chance(0.15):
        return sentence
    sentence = sentence[0].upper() + sentence[1:]
    return sentence + "." if draws.chance(0.8) else sentence


def _short_sentence(scene: Scene, draws: Draws) -> str:
    """Draw one candidate; empty where its form does not fit the scene."""
    forms = (_one_kind, _one_kind_on_background, _relation, _all, _shapes)
    weights = ((4, 2, 0, 0, 1), (2, 2, 6, 4, 1), (2, 2, 6, 3, 2))[
        min(len(scene.kinds), 3) - 1
    ]
    form = draws.choose_weighted(forms, weights)
    sentence = form(scene, draws)
    if sentence and form in (_relation, _all, _one_kind) and draws.chance(0.3):
        sentence += " " + _on_background(scene, draws)
    return sentence


def _describe(kind: Kind, scene: Scene, draws: Draws) -> str:
    """Name a kind with random attributes; always with its colour where another kind has the same
    shape.
    """
    mentioned = []
    ambiguous = sum(other.shape == kind.shape for other in scene.kinds) > 1
    if ambiguous or draws.chance(0.9):
        mentioned.append("colour")
    if draws.chance(0.45 if kind.size == "large" else 0.4):
        mentioned.append("size")
    if draws.chance(0.08 if kind.texture == "plain" else 0.5):
        mentioned.append("texture")
    return noun_phrase(kind, mentioned, draws)


def _on_background(scene: Scene, draws: Draws) -> str:
    preposition = draws.choose_weighted(("on", "against", "in front of"), (4, 1, 1))
    return f"{preposition} {_a_background(scene)}"


def _salient(scene: Scene, draws: Draws) -> Kind:
    return scene.kinds[0] if draws.chance(0.85) else draws.choice(scene.kinds)


def _one_kind(scene: Scene, draws: Draws) -> str:
    kind = _salient(scene, draws)
    opening = draws.choice((f"there {_be(kind)}", "the picture shows"))
    return f"{opening} {_describe(kind, scene, draws)}"


def _one_kind_on_background(scene: Scene, draws: Draws) -> str:
    name = _describe(_salient(scene, draws), scene, draws)
    if draws.chance(0.3):
        return f"{_a_background(scene)} with {name}"
    return f"{name} {_on_background(scene, draws)}"


def _shapes(scene: Scene, draws: Draws) -> str:
    total = len(scene.things)
    noun = draws.choice(("shape", "object"))
    name = f"{NUMBERS[total]} {plural(noun) if total > 1 else noun}"
    form = draws.below(3)
    if form == 1:
        return f"{_a_background(scene)} with {name}"
    there = f"there {'are' if total > 1 else 'is'} " if form == 0 else ""
    return f"{there}{name} {_on_background(scene, draws)}"


def _all(scene: Scene, draws: Draws) -> str:
    kinds = scene.kinds if draws.chance(0.6) else scene.kinds[:2]
    names = _join_phrases([_describe(kind, scene, draws) for kind in kinds])
    openings = ("", f"there {_be(kinds[0])} ", "the picture shows ")
    return draws.choose_weighted(openings, (3, 1, 1)) + names


def _relation(scene: Scene, draws: Draws) -> str:
    first, second = (
        scene.kinds[:2] if draws.chance(0.8) else draws.permute(scene.kinds)[:2]
    )
    relations = relations_between(first, second)
    if not relations:
        return ""
    phrase = draws.choice(RELATION_PHRASES[relations[0]])
    one, other = _describe(first, scene, draws), _describe(second, scene, draws)
    if draws.chance(0.25):
        back = draws.choice(RELATION_PHRASES[relations_between(second, first)[0]])
        return f"{one} with {other} {back} {'them' if first.several else 'it'}"
    forms = (
        f"{one} {phrase} {other}",
        f"{one} {_be(first)} {phrase} {other}",
        f"{phrase} {other} {_be(first)} {one}",
    )
    return draws.choose_weighted(forms, (5, 2, 1))
