"""Scenes that move: things that move, enter, leave, stay or collide; the facts about them, and captions.

In a moving scene, the things of a still one (``world.Scene``) go straight, at constant speed, to where they end. At any
moment it is a still scene again, which is how it is drawn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from rl_caption.data.scenes.language import (
    MAX_WORDS,
    MIN_WORDS,
    describe_kind,
    on_background,
    vary_typing,
)
from rl_caption.data.scenes.world import (
    BACKGROUNDS,
    EDGE,
    GAP,
    PAIRS,
    RADIUS,
    Draws,
    Fact,
    Kind,
    Look,
    Scene,
    Thing,
    coordinate,
    draw_looks,
    facts,
)

STEP = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""Direction -> signs of the change of x and of y."""
DIRECTIONS = tuple(STEP)
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
VERBS = ("moves", "enters", "leaves", "stays")
LEAST = 350
"""Shortest distance that a moving thing covers, in thousandths of the image side."""
_MOMENTS = 17
_ATTEMPTS = 60
_TOUCH = 0.75
"""Distance of two things after a collision, relative to the sum of their radii."""


@dataclass(frozen=True)
class Motion:
    """What a thing does: one of ``VERBS``, its direction ("" if it stays), and its centre at the end."""

    verb: str
    direction: str
    x: int
    y: int


@dataclass(frozen=True)
class MovingScene:
    """1 to 3 things, no two of the same colour and shape, and what each does; moving things come first.

    ``collision`` has the indices of the first thing, which moves, and of the one that it hits at the end, or is None.
    """

    start: Scene
    motions: tuple[Motion, ...]
    collision: tuple[int, int] | None = None

    @property
    def background(self) -> str:
        """Colour of the background."""
        return self.start.background

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each thing; every kind has one thing."""
        return self.start.kinds

    def at(self, moment: float) -> Scene:
        """The still scene at a moment from 0 (start) to 1 (end); things may be outside the image."""
        things = [
            replace(
                thing,
                x=round(thing.x + moment * (to.x - thing.x)),
                y=round(thing.y + moment * (to.y - thing.y)),
            )
            for thing, to in zip(self.start.things, self.motions, strict=True)
        ]
        return Scene(self.background, tuple(things))


def done(scene: MovingScene, index: int) -> frozenset[Fact]:
    """The facts about what thing ``index`` does.

    Its direction (``none`` if it stays); the event, if it enters or leaves; and its collision, one fact shared by both
    things.
    """
    name, motion = scene.kinds[index].name, scene.motions[index]
    facts = {Fact("direction", name, motion.direction or "none")}
    if motion.verb in ("enters", "leaves"):
        facts.add(Fact("event", name, motion.verb))
    if scene.collision is not None and index in scene.collision:
        names = sorted(scene.kinds[position].name for position in scene.collision)
        facts.add(Fact("collision", " / ".join(names), ""))
    return frozenset(facts)


@lru_cache(maxsize=4096)
def moving_facts(scene: MovingScene) -> frozenset[Fact]:
    """All facts, the denominator of recall: those of the still scene except relations, and what its things do."""
    still = {fact for fact in facts(scene.start) if fact.kind != "relation"}
    return frozenset(still.union(*(done(scene, index) for index in range(len(scene.motions)))))


def make_moving_scene(seed: int) -> MovingScene:
    """The moving scene of a seed; a pure function.

    The first thing moves, enters or leaves. Things never touch, except the two of a collision at the end.
    """
    draws = Draws("moving", seed)
    while True:
        looks = draw_looks(draws, [1] * draws.choose_weighted((1, 2, 3), (3, 5, 2)), PAIRS, ())
        background = draws.choice(BACKGROUNDS)
        collides = len(looks) > 1 and draws.chance(0.3)
        placed = _collision(draws, looks[:2]) if collides else []
        for look in looks[len(placed) :]:
            added = _place_one(draws, look, placed)
            if added is None:
                break
            placed.append(added)
        if len(placed) == len(looks):
            placed[1:] = (
                sorted(placed[1:], key=lambda pair: pair[1].verb == "stays")
                if not collides
                else placed[1:]
            )
            things, motions = zip(*placed, strict=True)
            return MovingScene(Scene(background, things), motions, (0, 1) if collides else None)


Placed = tuple[Thing, Motion]


def _collision(draws: Draws, looks: Sequence[Look]) -> list[Placed]:
    """Place two things on one line: the first hits the other, which stays or comes towards it."""
    direction = draws.choice(DIRECTIONS)
    across = STEP[direction][0] != 0
    radii = [RADIUS[look[2]] for look in looks]
    line = coordinate(draws, max(radii) + EDGE)
    comes = draws.chance(0.5)
    # Positions along the line, in the direction of the first thing.
    touch = round(_TOUCH * sum(radii))
    first = radii[0] + EDGE
    last = 1000 - radii[1] - EDGE
    room = last - first - touch
    ends = first + (room // 2 if comes else room)
    ways = [(first, ends), (last, ends + touch if comes else last)]
    does = [("moves", direction), ("moves", OPPOSITE[direction]) if comes else ("stays", "")]
    placed: list[Placed] = []
    for look, way, (verb, adverb) in zip(looks, ways, does, strict=True):
        along = [at if sum(STEP[direction]) > 0 else 1000 - at for at in way]
        start, end = (((at, line) if across else (line, at)) for at in along)
        placed.append((Thing(*look, *start), Motion(verb, adverb, *end)))
    return placed


def _place_one(draws: Draws, look: Look, placed: Sequence[Placed]) -> Placed | None:
    """Place a thing that never touches the others; None where no attempt succeeds."""
    low = RADIUS[look[2]] + EDGE
    for _ in range(_ATTEMPTS):
        verb = draws.choose_weighted(VERBS, (4, 2, 2, 3 if placed else 0))
        direction = "" if verb == "stays" else draws.choice(DIRECTIONS)
        start = [coordinate(draws, low), coordinate(draws, low)]
        end = list(start)
        if direction:
            axis = 0 if STEP[direction][0] else 1
            forward = sum(STEP[direction]) > 0
            before, after = (
                (-low, 1000 + low) if forward else (1000 + low, -low)
            )  # outside the image
            start[axis] = before if verb == "enters" else start[axis]
            end[axis] = after if verb == "leaves" else coordinate(draws, low)
            if (end[axis] - start[axis]) * (1 if forward else -1) < LEAST:
                continue
        added = Thing(*look, start[0], start[1]), Motion(verb, direction, end[0], end[1])
        if all(_clear(added, other) for other in placed):
            return added
    return None


def _clear(one: Placed, two: Placed) -> bool:
    least = RADIUS[one[0].size] + RADIUS[two[0].size] + GAP

    def centres(moment: float) -> list[tuple[float, float]]:
        ways = (one, two)
        return [
            (thing.x + moment * (to.x - thing.x), thing.y + moment * (to.y - thing.y))
            for thing, to in ways
        ]

    return all(math.dist(*centres(number / (_MOMENTS - 1))) >= least for number in range(_MOMENTS))


# --- captions ---------------------------------------------------------------------------------------------------------

FORMS = ("third", "plural", "participle")
"""Forms of a verb: moves, move, moving."""
_MOVE = (("moves", "move", "moving"), ("goes", "go", "going"))
_ENTER = (("enters", "enter", "entering"), ("comes in", "come in", "coming in"))
_LEAVE = (("leaves", "leave", "leaving"), ("exits", "exit", "exiting"))
_STAY = (
    ("stays still", "stay still", "staying still"),
    ("does not move", "do not move", "not moving"),
)
_COLLIDE = (("collides with", "collide with", "colliding with"), ("hits", "hit", "hitting"))
_WHERE: dict[str, dict[str, tuple[str, ...]]] = {
    "moves": {
        "left": ("left", "to the left"),
        "right": ("right", "to the right"),
        "up": ("up", "upwards"),
        "down": ("down", "downwards"),
    },
    # By the direction of the motion: what goes left enters from the right.
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
    """Claim of a phrase about its subject; ``event`` is enters, leaves, moves, collides or "" (none of these)."""

    event: str
    direction: str
    """One of ``DIRECTIONS``, ``none`` (stays), or "" (not said)."""
    form: str
    """One of ``FORMS``."""


def _phrases() -> dict[tuple[str, ...], Phrase]:
    phrases: dict[str, Phrase] = {}
    for verb, forms_of_verb in _VERBS.items():
        event = verb if verb != "moves" else ""
        for forms, (at, form) in product((*forms_of_verb, *_MORE_VERBS[verb]), enumerate(FORMS)):
            for direction, wheres in _WHERE[verb].items():
                phrases |= {
                    f"{forms[at]} {where}": Phrase(event, direction, form) for where in wheres
                }
            if forms[0] != "comes":  # which alone is no claim
                phrases[forms[at]] = Phrase(verb, "", form)
    for at, form in enumerate(FORMS):
        phrases |= {forms[at]: Phrase("", "none", form) for forms in _STAY}
        phrases |= {
            forms[at]: Phrase("collides", "", form) for forms in (*_COLLIDE, *_MORE_COLLIDE)
        }
    phrases |= {
        "collide": Phrase("collides", "", "plural"),
        "colliding": Phrase("collides", "", "participle"),
    }
    for words, phrase in list(phrases.items()):
        if phrase.form == "participle":
            phrases |= {
                f"{be} {words}": phrase._replace(form=form)
                for be, form in (("is", "third"), ("are", "plural"))
            }
    return {tuple(words.split()): phrase for words, phrase in phrases.items()}


PHRASES = _phrases()
"""Words of a phrase -> its claim."""
_LONGEST = max(map(len, PHRASES))
_OPPOSITES = (
    ("left", "right"),
    ("up", "down"),
    ("upwards", "downwards"),
    ("top", "bottom"),
    ("below", "above"),
)
OTHER_WORD = {one: two for pair in _OPPOSITES for one, two in (pair, pair[::-1])}
"""Word for a direction or side -> word for the opposite one."""


def phrase_at(words: Sequence[str], start: int) -> tuple[int, Phrase] | None:
    """Length and claim of the longest phrase that starts at a word, or None."""
    for length in range(min(_LONGEST, len(words) - start), 0, -1):
        phrase = PHRASES.get(tuple(words[start : start + length]))
        if phrase is not None:
            return length, phrase
    return None


def verb_phrase(verb: str, direction: str, form: str, draws: Draws) -> str:
    """Random words for one of ``VERBS``, in one of ``FORMS``."""
    at = FORMS.index(form)
    if verb == "stays":
        return draws.choice(_STAY)[at]
    return (
        f"{draws.choose_weighted(_VERBS[verb], (3, 1))[at]} {draws.choice(_WHERE[verb][direction])}"
    )


def moving_references(scene: MovingScene, seed: int, count: int = 5) -> list[str]:
    """``count`` (1 to 10) different true captions of a moving scene, of 5 to 16 words; a pure function."""
    draws = Draws("moving references", seed, repr(scene))
    told: dict[str, str] = {}
    while len(told) < count:
        sentence = _sentence(scene, draws)
        if MIN_WORDS <= len(sentence.split()) <= MAX_WORDS and sentence not in told:
            told[sentence] = vary_typing(sentence, draws)
    return list(told.values())


def _sentence(scene: MovingScene, draws: Draws) -> str:
    total = len(scene.motions)
    if scene.collision is not None and draws.chance(0.6):
        one, two = (
            describe_kind(scene.kinds[index], scene.start, draws) for index in scene.collision
        )
        form = draws.choose_weighted((0, 1, 2), (3, 2, 1))
        told = (f"{one} collides with {two}", f"{one} hits {two}", f"{one} and {two} collide")[form]
        return f"{told} {on_background(scene.start, draws)}" if draws.chance(0.2) else told
    first = 0 if draws.chance(0.85) else draws.below(total)
    if draws.chance(0.2):
        return f"there is {_doing(scene, first, 'participle', draws)}"
    told = _doing(scene, first, "third", draws)
    if total > 1 and draws.chance(0.55):
        other = draws.choice([index for index in range(total) if index != first])
        return f"{told} {draws.choose_weighted(('and', 'while'), (2, 1))} {_doing(scene, other, 'third', draws)}"
    if draws.chance(0.4):
        return f"{told} {on_background(scene.start, draws)}"
    return told


def _doing(scene: MovingScene, index: int, form: str, draws: Draws) -> str:
    category: Kind = scene.kinds[index]
    motion = scene.motions[index]
    verb = "moves" if motion.direction and draws.chance(0.2) else motion.verb
    return f"{describe_kind(category, scene.start, draws)} {verb_phrase(verb, motion.direction, form, draws)}"
