"""Writes captions of a scene: short references in different wordings, and one long description.

Every sentence is true of its scene. What a caption leaves out is drawn at random, as people leave out different things.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rl_caption.data.base import DataError
from rl_caption.data.scenes.draws import Draws
from rl_caption.data.scenes.world import Kind, Scene, relations_between

NUMBERS = ("no", "one", "two", "three", "four")
SYNONYMS = {
    "large": ("large", "large", "big"),
    "small": ("small", "small", "little"),
    "dotted": ("dotted", "dotted", "spotted"),
}
"""Wordings of an attribute's value, the usual one more often; other values have one."""
RELATION_PHRASES = {
    "left of": ("left of", "to the left of", "to the left of"),
    "right of": ("right of", "to the right of", "to the right of"),
    "above": ("above", "above", "over"),
    "below": ("below", "below", "beneath", "under"),
}
MIN_WORDS, MAX_WORDS = 5, 16
_GENERIC = re.compile(r"\b(shape|object)s?\b")


def references(scene: Scene, seed: int, count: int = 5) -> list[str]:
    """Write ``count`` different short captions of a scene, of 5 to 16 words each.

    Args:
        scene: what to describe.
        seed: which wordings; the result is a pure function of the scene, the seed and the count.
        count: how many captions, 1 to 20.

    Returns:
        Captions as people write them: most with a capital and a full stop, some without. Each is true and mentions
        some of the facts, usually about the salient kinds.

    Raises:
        DataError: ``count`` is not within 1 .. 20.
    """
    if not 1 <= count <= 20:
        raise DataError(f"{count} captions per image: expected 1 to 20")
    draws = Draws("references", seed, repr(scene))
    captions: list[str] = []
    told: set[str] = set()
    while len(captions) < count:
        sentence = _short_sentence(scene, draws)
        if sentence is None or sentence in told or not MIN_WORDS <= len(sentence.split()) <= MAX_WORDS:
            continue
        if _GENERIC.search(sentence) and any(_GENERIC.search(other) for other in told):
            continue  # one caption in five that names no shape is enough
        told.add(sentence)
        captions.append(_typed(sentence, draws))
    return captions


def long_reference(scene: Scene, seed: int) -> str:
    """Write one description of 3 to 6 sentences that mentions every fact of the scene; a pure function."""
    draws = Draws("long", seed, repr(scene))
    kinds = scene.kinds
    first = [noun_phrase(kind, ("size", "colour"), draws) for kind in kinds]
    opening = draws.choice(("the picture shows", _there(kinds[0]), "the picture shows"))
    ground = f"{scene.background} background"
    sentences = [
        f"{opening} {_listed(first)}",
        _listed([f"{_the(kind)} {_be(kind)} {_worded(kind.texture, draws)}" for kind in kinds]),
        draws.choice((f"the background is {scene.background}", f"the picture has {article(ground)} {ground}")),
    ]
    for index, kind in enumerate(kinds):
        places = [
            f"{draws.choice(RELATION_PHRASES[related[0]])} {_the(other)}"
            for other in kinds[index + 1 :]
            if (related := relations_between(kind, other))
        ]
        if places:
            sentences.append(f"{_the(kind)} {_be(kind)} {' and '.join(places)}")
    return " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences)


def noun_phrase(kind: Kind, attributes: Sequence[str], draws: Draws | None = None) -> str:
    """Name a kind: its number or article, the attributes asked for, and its shape ("two large red circles").

    Args:
        kind: what to name.
        attributes: any of size, texture and colour.
        draws: chooses between synonyms; None takes the first.
    """
    words = []
    for attribute in ("size", "texture", "colour"):
        if attribute in attributes:
            words.append(_worded(getattr(kind, attribute), draws))
    words.append(kind.shape if len(kind.things) == 1 else plural(kind.shape))
    number = NUMBERS[len(kind.things)] if len(kind.things) > 1 else article(words[0])
    return " ".join([number, *words])


def _worded(value: str, draws: Draws | None) -> str:
    synonyms = SYNONYMS.get(value, (value,))
    return draws.choice(synonyms) if draws else synonyms[0]


def plural(noun: str) -> str:
    """Return the plural of a noun of this world."""
    return noun + ("es" if noun.endswith("s") else "s")


def article(following: str) -> str:
    """Return the indefinite article before a word of this world."""
    return "an" if following[0] in "aeio" and following != "one" else "a"


def _the(kind: Kind) -> str:
    return "the " + kind.colour + " " + (kind.shape if len(kind.things) == 1 else plural(kind.shape))


def _be(kind: Kind) -> str:
    return "is" if len(kind.things) == 1 else "are"


def _there(kind: Kind) -> str:
    return f"there {_be(kind)}"


def _listed(phrases: Sequence[str]) -> str:
    return phrases[0] if len(phrases) == 1 else ", ".join(phrases[:-1]) + " and " + phrases[-1]


def _typed(sentence: str, draws: Draws) -> str:
    """Most people type a capital and a full stop; some leave out one or both."""
    if draws.chance(0.15):
        return sentence
    sentence = sentence[0].upper() + sentence[1:]
    return sentence + "." if draws.chance(0.8) else sentence


_Form = Callable[[Scene, Draws], str | None]


def _short_sentence(scene: Scene, draws: Draws) -> str | None:
    """Write one candidate; None where the form that was drawn does not fit the scene."""
    weights = ((4, 2, 0, 0, 1), (2, 2, 6, 4, 1), (2, 2, 6, 3, 2))[min(len(scene.kinds), 3) - 1]
    forms: tuple[_Form, ...] = (_alone, _on_ground, _related, _all, _shapes)
    form = draws.weighted(forms, weights)
    sentence = form(scene, draws)
    if sentence is not None and form in (_related, _all, _alone) and draws.chance(0.3):
        sentence += " " + _ground(scene, draws)
    return sentence


def _named(kind: Kind, scene: Scene, draws: Draws) -> str:
    """Name a kind by what one person might mention; where the shape is shared, colour tells the kinds apart."""
    mentioned = []
    shared = sum(other.shape == kind.shape for other in scene.kinds) > 1
    if shared or draws.chance(0.9):
        mentioned.append("colour")
    if draws.chance(0.45 if kind.size == "large" else 0.4):
        mentioned.append("size")
    if draws.chance(0.08 if kind.texture == "plain" else 0.5):
        mentioned.append("texture")
    return noun_phrase(kind, mentioned, draws)


def _ground(scene: Scene, draws: Draws) -> str:
    before = draws.weighted(("on", "against", "in front of"), (4, 1, 1))
    return f"{before} {article(scene.background)} {scene.background} background"


def _salient(scene: Scene, draws: Draws) -> Kind:
    return scene.kinds[0] if draws.chance(0.85) else draws.choice(scene.kinds)


def _alone(scene: Scene, draws: Draws) -> str:
    kind = _salient(scene, draws)
    return f"{draws.choice((_there(kind), 'the picture shows'))} {_named(kind, scene, draws)}"


def _on_ground(scene: Scene, draws: Draws) -> str:
    name = _named(_salient(scene, draws), scene, draws)
    if draws.chance(0.3):
        return f"{article(scene.background)} {scene.background} background with {name}"
    return f"{name} {_ground(scene, draws)}"


def _shapes(scene: Scene, draws: Draws) -> str:
    total = len(scene.things)
    noun = draws.choice(("shape", "object"))
    name = f"{NUMBERS[total]} {plural(noun) if total > 1 else noun}"
    form = draws.below(3)
    if form == 0:
        return f"there {'are' if total > 1 else 'is'} {name} {_ground(scene, draws)}"
    if form == 1:
        return f"{article(scene.background)} {scene.background} background with {name}"
    return f"{name} {_ground(scene, draws)}"


def _all(scene: Scene, draws: Draws) -> str:
    kinds = scene.kinds if draws.chance(0.6) else scene.kinds[:2]
    names = _listed([_named(kind, scene, draws) for kind in kinds])
    return draws.weighted(("", f"{_there(kinds[0])} ", "the picture shows "), (3, 1, 1)) + names


def _related(scene: Scene, draws: Draws) -> str | None:
    first, second = scene.kinds[:2] if draws.chance(0.8) else draws.shuffled(scene.kinds)[:2]
    related = relations_between(first, second)
    if not related:
        return None
    phrase = draws.choice(RELATION_PHRASES[related[0]])
    one, other = _named(first, scene, draws), _named(second, scene, draws)
    if draws.chance(0.25):
        back = draws.choice(RELATION_PHRASES[relations_between(second, first)[0]])
        return f"{one} with {other} {back} {'it' if len(first.things) == 1 else 'them'}"
    form = draws.weighted(_RELATION_FORMS, (5, 2, 1))
    return form(one, phrase, other, first)


_RELATION_FORMS: tuple[Callable[[str, str, str, Kind], str], ...] = (
    lambda one, phrase, other, kind: f"{one} {phrase} {other}",
    lambda one, phrase, other, kind: f"{one} {_be(kind)} {phrase} {other}",
    lambda one, phrase, other, kind: f"{phrase} {other} {_be(kind)} {one}",
)
