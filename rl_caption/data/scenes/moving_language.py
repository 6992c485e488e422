"""Captions of moving scenes, and the phrases in which they say what a thing does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from rl_caption.data.base import DataError
from rl_caption.data.scenes.language import MAX_WORDS, MIN_WORDS, named, on_background, typed
from rl_caption.data.scenes.moving import MovingScene
from rl_caption.data.scenes.world import Draws, Kind

FORMS = ("third", "plural", "participle")
"""Of a verb: moves, move, moving."""
_MOVE = (("moves", "move", "moving"), ("goes", "go", "going"))
_ENTER = (("enters", "enter", "entering"), ("comes in", "come in", "coming in"))
_LEAVE = (("leaves", "leave", "leaving"), ("exits", "exit", "exiting"))
_STAY = (("stays still", "stay still", "staying still"), ("does not move", "do not move", "not moving"))
_COLLIDE = (("collides with", "collide with", "colliding with"), ("hits", "hit", "hitting"))
_WHERE: dict[str, dict[str, tuple[str, ...]]] = {
    "moves": {
        "left": ("left", "to the left"),
        "right": ("right", "to the right"),
        "up": ("up", "upwards"),
        "down": ("down", "downwards"),
    },
    # By the direction of the thing, which comes from the other side.
    "enters": {
        "left": ("from the right",),
        "right": ("from the left",),
        "up": ("from the bottom", "from below"),
        "down": ("from the top", "from above"),
    },
    "leaves": {
        "left": ("to the left",),
        "right": ("to the right",),
        "up": ("at the top",),
        "down": ("at the bottom",),
    },
}
"""Verb -> direction -> wordings."""
_VERBS = {"moves": _MOVE, "enters": _ENTER, "leaves": _LEAVE}
_MORE_VERBS = {
    "moves": (("slides", "slide", "sliding"), ("travels", "travel", "travelling")),
    "enters": (("appears", "appear", "appearing"), ("comes", "come", "coming")),
    "leaves": (("disappears", "disappear", "disappearing"), ("goes out", "go out", "going out")),
}
_MORE_COLLIDE = (("runs into", "run into", "running into"),)
"""Further wordings that the oracle understands."""


class Phrase(NamedTuple):
    """What a phrase claims of its subject: ``event`` is enters, leaves, moves, collides or "" (stays, a way alone)."""

    event: str
    direction: str
    """One of ``DIRECTIONS``, ``none`` where it stays, or "" where it is not said."""
    form: str
    """One of ``FORMS``."""


def _phrases() -> dict[tuple[str, ...], Phrase]:
    found: dict[str, Phrase] = {}
    for verb, own in _VERBS.items():
        event = verb if verb != "moves" else ""
        for forms, (at, form) in product((*own, *_MORE_VERBS[verb]), enumerate(FORMS)):
            for direction, wheres in _WHERE[verb].items():
                found |= {f"{forms[at]} {where}": Phrase(event, direction, form) for where in wheres}
            if forms[0] != "comes":  # which alone is no claim
                found[forms[at]] = Phrase(verb, "", form)
    for at, form in enumerate(FORMS):
        found |= {forms[at]: Phrase("", "none", form) for forms in _STAY}
        found |= {forms[at]: Phrase("collides", "", form) for forms in (*_COLLIDE, *_MORE_COLLIDE)}
    found |= {"collide": Phrase("collides", "", "plural"), "colliding": Phrase("collides", "", "participle")}
    for words, phrase in list(found.items()):
        if phrase.form == "participle":
            found |= {f"{be} {words}": phrase._replace(form=form) for be, form in (("is", "third"), ("are", "plural"))}
    return {tuple(words.split()): phrase for words, phrase in found.items()}


PHRASES = _phrases()
"""The words of a phrase -> what it claims."""
_LONGEST = max(map(len, PHRASES))
_OPPOSITES = (("left", "right"), ("up", "down"), ("upwards", "downwards"), ("top", "bottom"), ("below", "above"))
OTHER_WORD = {one: two for pair in _OPPOSITES for one, two in (pair, pair[::-1])}
"""A word for a direction or side -> that for the opposite one."""


def phrase_at(words: Sequence[str], start: int) -> tuple[int, Phrase] | None:
    """Length and meaning of the longest phrase that starts at a word; None where none does."""
    for length in range(min(_LONGEST, len(words) - start), 0, -1):
        phrase = PHRASES.get(tuple(words[start : start + length]))
        if phrase is not None:
            return length, phrase
    return None


def verb_phrase(verb: str, direction: str, form: str, draws: Draws) -> str:
    """Words for one of ``moving.VERBS``, in one of ``FORMS``."""
    at = FORMS.index(form)
    if verb == "stays":
        return draws.choice(_STAY)[at]
    return f"{draws.weighted(_VERBS[verb], (3, 1))[at]} {draws.choice(_WHERE[verb][direction])}"


def moving_references(scene: MovingScene, seed: int, count: int = 5) -> list[str]:
    """``count``, 1 to 10, different captions of a moving scene, of 5 to 16 words, all true; a pure function."""
    if not 1 <= count <= 10:
        raise DataError(f"{count} captions per video: expected 1 to 10")
    draws = Draws("moving references", seed, repr(scene))
    told: dict[str, str] = {}
    while len(told) < count:
        sentence = _sentence(scene, draws)
        if MIN_WORDS <= len(sentence.split()) <= MAX_WORDS and sentence not in told:
            told[sentence] = typed(sentence, draws)
    return list(told.values())


def _sentence(scene: MovingScene, draws: Draws) -> str:
    total = len(scene.motions)
    if scene.collision is not None and draws.chance(0.6):
        one, two = (named(scene.kinds[index], scene.start, draws) for index in scene.collision)
        form = draws.weighted((0, 1, 2), (3, 2, 1))
        told = (f"{one} collides with {two}", f"{one} hits {two}", f"{one} and {two} collide")[form]
        return f"{told} {on_background(scene.start, draws)}" if draws.chance(0.2) else told
    first = 0 if draws.chance(0.85) else draws.below(total)
    if draws.chance(0.2):
        return f"there is {_doing(scene, first, 'participle', draws)}"
    told = _doing(scene, first, "third", draws)
    if total > 1 and draws.chance(0.55):
        other = draws.choice([index for index in range(total) if index != first])
        return f"{told} {draws.weighted(('and', 'while'), (2, 1))} {_doing(scene, other, 'third', draws)}"
    if draws.chance(0.4):
        return f"{told} {on_background(scene.start, draws)}"
    return told


def _doing(scene: MovingScene, index: int, form: str, draws: Draws) -> str:
    kind: Kind = scene.kinds[index]
    motion = scene.motions[index]
    verb = "moves" if motion.direction and draws.chance(0.2) else motion.verb
    return f"{named(kind, scene.start, draws)} {verb_phrase(verb, motion.direction, form, draws)}"
