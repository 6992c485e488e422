"""Captions of a scene: short references in different wordings, and one long description.

All are true of the scene. What a short caption leaves out is random, as people mention different things.
"""

import re
from collections.abc import Sequence

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
MIN_WORDS, MAX_WORDS = 5, 16
_GENERIC = re.compile(r"\b(shape|object)s?\b")


def references(scene: Scene, seed: int, count: int = 5) -> list[str]:
    """``count`` (1 to 20) different short captions of a scene, of 5 to 16 words each; a pure function.

    Each is true and tells some of the facts, usually about the most salient kinds. As with captions by people, most but
    not all have a capital and a full stop.
    """
    draws = Draws("references", seed, repr(scene))
    captions: list[str] = []
    told: set[str] = set()
    while len(captions) < count:
        sentence = _short_sentence(scene, draws)
        if (
            sentence is None
            or sentence in told
            or not MIN_WORDS <= len(sentence.split()) <= MAX_WORDS
        ):
            continue
        if _GENERIC.search(sentence) and any(_GENERIC.search(other) for other in told):
            continue  # one caption in five that names no shape is enough
        told.add(sentence)
        captions.append(vary_typing(sentence, draws))
    return captions


def long_reference(scene: Scene, seed: int) -> str:
    """A description of 3 to 6 sentences that tells every fact of the scene; a pure function."""
    draws = Draws("long", seed, repr(scene))
    kinds = scene.kinds
    first = [noun_phrase(category, ("size", "colour"), draws) for category in kinds]
    opening = draws.choice(("the picture shows", f"there {_be(kinds[0])}", "the picture shows"))
    sentences = [
        f"{opening} {_join_phrases(first)}",
        _join_phrases(
            [
                f"{_the(category)} {_be(category)} {_choose_synonym(category.texture, draws)}"
                for category in kinds
            ]
        ),
        draws.choice(
            (f"the background is {scene.background}", f"the picture has {_a_background(scene)}")
        ),
    ]
    for index, category in enumerate(kinds):
        related = [
            f"{draws.choice(RELATION_PHRASES[relations[0]])} {_the(other)}"
            for other in kinds[index + 1 :]
            if (relations := relations_between(category, other))
        ]
        if related:
            sentences.append(f"{_the(category)} {_be(category)} {' and '.join(related)}")
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def noun_phrase(category: Kind, attributes: Sequence[str], draws: Draws) -> str:
    """Name a kind: number or article, the given ``attributes`` (size, texture, colour), and shape."""
    words = [
        _choose_synonym(getattr(category, attribute), draws)
        for attribute in ("size", "texture", "colour")
        if attribute in attributes
    ]
    words.append(_shape(category))
    number = NUMBERS[len(category.things)] if len(category.things) > 1 else article(words[0])
    return " ".join([number, *words])


def plural(noun: str) -> str:
    """The plural of a noun of this world."""
    return noun + ("es" if noun.endswith("s") else "s")


def article(following: str) -> str:
    """The indefinite article before a word of this world."""
    return "an" if following[0] in "aeio" and following != "one" else "a"


def _choose_synonym(value: str, draws: Draws) -> str:
    return draws.choice(SYNONYMS.get(value, (value,)))


def _shape(category: Kind) -> str:
    return category.shape if len(category.things) == 1 else plural(category.shape)


def _the(category: Kind) -> str:
    return f"the {category.colour} {_shape(category)}"


def _be(category: Kind) -> str:
    return "is" if len(category.things) == 1 else "are"


def _a_background(scene: Scene) -> str:
    return f"{article(scene.background)} {scene.background} background"


def _join_phrases(phrases: Sequence[str]) -> str:
    return phrases[0] if len(phrases) == 1 else ", ".join(phrases[:-1]) + " and " + phrases[-1]


def vary_typing(sentence: str, draws: Draws) -> str:
    """Add a capital and a full stop, as most people do; sometimes leave out one or both."""
    if draws.chance(0.15):
        return sentence
    sentence = sentence[0].upper() + sentence[1:]
    return sentence + "." if draws.chance(0.8) else sentence


def _short_sentence(scene: Scene, draws: Draws) -> str | None:
    """Draw one candidate; None where its form does not fit the scene."""
    weights = ((4, 2, 0, 0, 1), (2, 2, 6, 4, 1), (2, 2, 6, 3, 2))[min(len(scene.kinds), 3) - 1]
    form = draws.choose_weighted(
        (_one_kind, _one_kind_on_background, _relation, _all, _shapes), weights
    )
    sentence = form(scene, draws)
    if sentence is not None and form in (_relation, _all, _one_kind) and draws.chance(0.3):
        sentence += " " + on_background(scene, draws)
    return sentence


def describe_kind(category: Kind, scene: Scene, draws: Draws) -> str:
    """Name a kind with random attributes; always with its colour where another kind has the same shape."""
    mentioned = []
    ambiguous = sum(other.shape == category.shape for other in scene.kinds) > 1
    if ambiguous or draws.chance(0.9):
        mentioned.append("colour")
    if draws.chance(0.45 if category.size == "large" else 0.4):
        mentioned.append("size")
    if draws.chance(0.08 if category.texture == "plain" else 0.5):
        mentioned.append("texture")
    return noun_phrase(category, mentioned, draws)


def on_background(scene: Scene, draws: Draws) -> str:
    return f"{draws.choose_weighted(('on', 'against', 'in front of'), (4, 1, 1))} {_a_background(scene)}"


def _salient(scene: Scene, draws: Draws) -> Kind:
    return scene.kinds[0] if draws.chance(0.85) else draws.choice(scene.kinds)


def _one_kind(scene: Scene, draws: Draws) -> str:
    category = _salient(scene, draws)
    return f"{draws.choice((f'there {_be(category)}', 'the picture shows'))} {describe_kind(category, scene, draws)}"


def _one_kind_on_background(scene: Scene, draws: Draws) -> str:
    name = describe_kind(_salient(scene, draws), scene, draws)
    return (
        f"{_a_background(scene)} with {name}"
        if draws.chance(0.3)
        else f"{name} {on_background(scene, draws)}"
    )


def _shapes(scene: Scene, draws: Draws) -> str:
    total = len(scene.things)
    noun = draws.choice(("shape", "object"))
    name = f"{NUMBERS[total]} {plural(noun) if total > 1 else noun}"
    form = draws.below(3)
    if form == 1:
        return f"{_a_background(scene)} with {name}"
    there = f"there {'are' if total > 1 else 'is'} " if form == 0 else ""
    return f"{there}{name} {on_background(scene, draws)}"


def _all(scene: Scene, draws: Draws) -> str:
    kinds = scene.kinds if draws.chance(0.6) else scene.kinds[:2]
    names = _join_phrases([describe_kind(category, scene, draws) for category in kinds])
    return (
        draws.choose_weighted(("", f"there {_be(kinds[0])} ", "the picture shows "), (3, 1, 1))
        + names
    )


def _relation(scene: Scene, draws: Draws) -> str | None:
    first, second = scene.kinds[:2] if draws.chance(0.8) else draws.permute(scene.kinds)[:2]
    relations = relations_between(first, second)
    if not relations:
        return None
    phrase = draws.choice(RELATION_PHRASES[relations[0]])
    one, other = describe_kind(first, scene, draws), describe_kind(second, scene, draws)
    if draws.chance(0.25):
        back = draws.choice(RELATION_PHRASES[relations_between(second, first)[0]])
        return f"{one} with {other} {back} {'it' if len(first.things) == 1 else 'them'}"
    be = _be(first)
    forms = (
        f"{one} {phrase} {other}",
        f"{one} {be} {phrase} {other}",
        f"{phrase} {other} {be} {one}",
    )
    return draws.choose_weighted(forms, (5, 2, 1))
