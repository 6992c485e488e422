"""Scenes: how they are drawn from a seed, and the facts about them. Lengths are
thousandths of the image side.
"""

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, combinations, product
from operator import attrgetter, itemgetter
from typing import NamedTuple, TypeVar

# Corners lie within the unit circle, so that things whose circles do not overlap do not touch.
FIGURES = {
    "circle": "0,0,.96,255",
    "square": "-.71,-.71 .71,-.71 .71,.71 -.71,.71",
    "triangle": "0,-.98 .82,.58 -.82,.58",
    "diamond": "0,-1 .66,0 0,1 -.66,0",
    "star": "0,-1 .264503364,-.364057647 .951056516,-.309016994 .427975432,.139057647 .587785252,.809016994 "
    "0,.45 -.587785252,.809016994 -.427975432,.139057647 -.951056516,-.309016994 -.264503364,-.364057647",
    "cross": "-.32,-.95 .32,-.95 .32,.95 -.32,.95; -.95,-.32 .95,-.32 .95,.32 -.95,.32",
    "ring": "0,0,.98,255; 0,0,.5,0",
    "heart": "-.43,-.32,.47,255; .43,-.32,.47,255; -.86,-.12 0,-.25 .86,-.12 0,.97",
}
"""Shape -> its polygons (corners as in SVG) and discs (centre, radius and value), in
units of the thing's radius.
"""
SHAPES = tuple(FIGURES)
COLOUR_RGB = {
    "red": "#de2020",
    "orange": "#fa8c14",
    "yellow": "#fae432",
    "green": "#1ea03c",
    "blue": "#2d5ff0",
    "purple": "#9632be",
    "pink": "#ff96c3",
    "cyan": "#28d7dc",
}
COLOURS = tuple(COLOUR_RGB)
SIZES = ("large", "small")
TEXTURES = ("plain", "striped", "dotted")
ATTRIBUTES = {"colour": COLOURS, "size": SIZES, "texture": TEXTURES}
BACKGROUND_RGB = {
    "white": "#fcfcfc",
    "grey": "#8c8c8c",
    "black": "#0e0e0e",
    "brown": "#623e24",
    "beige": "#e2cea8",
    "navy": "#161e54",
}
BACKGROUNDS = tuple(BACKGROUND_RGB)
_DIRECTIONS = {
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}
"""Relation -> its direction on the axes x and y."""
RELATIONS = tuple(_DIRECTIONS)

PAIRS = tuple(product(COLOURS, SHAPES))
"""All 64 pairs of colour and shape."""
UNSEEN_PAIRS = tuple(
    (colour, SHAPES[(3 * index + 5) % len(SHAPES)])
    for index, colour in enumerate(COLOURS)
)
"""Eight pairs, one per colour and one per shape, that no scene of train, val or test contains."""
SEEN_PAIRS = tuple(pair for pair in PAIRS if pair not in UNSEEN_PAIRS)

RADIUS = {"large": 180, "small": 100}
"""Radius of the circle around a thing."""
MARGIN = 200
"""Smallest offset of two centres along an axis at which a relation holds."""
LEVEL = 60
"""Centres at most this far apart along an axis are level. Offsets between LEVEL and
MARGIN do not occur.
"""
GAP = 25
EDGE = 15
_STEP = 125
"""Centres lie near the points of a grid of eighths of the image side, so that the
patches of a small captioner, which has few images to learn from, cut equal things
alike.
"""
_JITTER = 8

Item = TypeVar("Item")
Look = tuple[str, str, str, str]
"""Shape, colour, size and texture."""
Pairs = Sequence[tuple[str, str]]


class Draws:
    """Random draws, a pure function of ``key`` (integers and strings) on every platform
    and Python version.

    Only ``random.Random.random`` is used, the one method whose sequence Python promises
    to keep; NumPy's generators and ``random.choice`` may change between versions, and
    with them every generated scene.
    """

    def __init__(self, *key: int | str) -> None:
        self._unit = random.Random("/".join(str(value) for value in key)).random

    def below(self, bound: int) -> int:
        """An integer in 0 .. bound - 1."""
        return int(self._unit() * bound)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self._unit() < probability

    def choice(self, items: Sequence[Item]) -> Item:
        """One item, each equally likely."""
        return items[self.below(len(items))]

    def choose_weighted(self, items: Sequence[Item], weights: Sequence[int]) -> Item:
        """One item, item i with probability weights[i] / sum(weights)."""
        position = self.below(sum(weights))
        return items[bisect_right([*accumulate(weights)], position)]

    def permute(self, items: Iterable[Item]) -> list[Item]:
        """The items in random order (Fisher-Yates)."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order


class Thing(NamedTuple):
    """One object; ``x`` and ``y`` are its centre, from the left and from the top."""

    shape: str
    colour: str
    size: str
    texture: str
    x: int
    y: int


class Kind(NamedTuple):
    """All things of a scene that look the same. No two kinds of a scene share both
    colour and shape.
    """

    shape: str
    colour: str
    size: str
    texture: str
    things: tuple[Thing, ...]

    @property
    def name(self) -> str:
        """Colour and shape, which identify the kind within its scene."""
        return f"{self.colour} {self.shape}"

    @property
    def several(self) -> bool:
        """Whether there is more than one such thing."""
        return len(self.things) > 1


@dataclass(frozen=True)
class Scene:
    """A background and 1 to 4 things, the most salient first (large before small, then
    from left to right).
    """

    background: str
    things: tuple[Thing, ...]

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The things grouped by appearance, in order of salience."""
        groups: dict[Look, list[Thing]] = {}
        for thing in self.things:
            groups.setdefault(thing[:4], []).append(thing)
        return tuple(Kind(*look, tuple(things)) for look, things in groups.items())


class Fact(NamedTuple):
    """One fact of a scene; ``kind`` is shape, colour, size, texture, count, relation or background.

    ``subject`` names the kind of thing (of a relation, both); ``value`` is the
    attribute's value, number or colour.
    """

    kind: str
    subject: str
    value: str


def offset(relation: str, first: Thing, second: Thing) -> int:
    """Signed distance of ``first`` from ``second`` in the direction of ``relation``,
    which holds from ``MARGIN`` on.
    """
    right, down = _DIRECTIONS[relation]
    return right * (first.x - second.x) + down * (first.y - second.y)


def relations_between(first: Kind, second: Kind) -> list[str]:
    """Relations that hold between all things of ``first`` and all of ``second``, the
    largest offset first.
    """
    least = {
        relation: min(
            offset(relation, *pair) for pair in product(first.things, second.things)
        )
        for relation in RELATIONS
    }
    held = [relation for relation in RELATIONS if least[relation] >= MARGIN]
    return sorted(held, key=least.__getitem__, reverse=True)


def relation_fact(*names: str) -> Fact:
    """The fact that two kinds have a relation, the same for either order of their names."""
    return Fact("relation", " / ".join(sorted(names)), "")


@lru_cache(maxsize=4096)
def facts(scene: Scene) -> frozenset[Fact]:
    """All facts of a scene: the denominator of recall.

    The background; for each kind its shape, colour, size and texture, and its count if
    it has two or more things; and for each pair of kinds with a relation one fact,
    whichever way it is told.
    """
    true = {Fact("background", "background", scene.background)}
    for kind in scene.kinds:
        for attribute in ("shape", *ATTRIBUTES):
            true.add(Fact(attribute, kind.name, getattr(kind, attribute)))
        if kind.several:
            true.add(Fact("count", kind.name, str(len(kind.things))))
    for first, second in combinations(scene.kinds, 2):
        if relations_between(first, second):
            true.add(relation_fact(first.name, second.name))
    return frozenset(true)


def make_scene(seed: int, pairs: Pairs = PAIRS, leading_pairs: Pairs = ()) -> Scene:
    """The scene of a seed.

    Things are drawn from ``pairs`` of colour and shape, at least 4; with
    ``leading_pairs``, one thing at least has one of these.

    Things do not overlap, lie inside the image, and are either level or ``MARGIN``
    apart along each axis. Things of the same colour and shape look the same, so that
    "two red circles" is never half true.
    """
    draws = Draws("scene", seed)
    things: list[Thing] = []
    while not things:
        total = draws.choose_weighted((1, 2, 3, 4), (30, 35, 22, 13))
        background = draws.choice(BACKGROUNDS)
        things = _place(draws, _draw_looks(draws, total, pairs, leading_pairs))
    things.sort(key=attrgetter("size", "x", "y"))
    return Scene(background, tuple(things))


def _draw_looks(
    draws: Draws, total: int, pairs: Pairs, leading_pairs: Pairs
) -> list[Look]:
    """Draw the looks of the things; the first kind has one of ``leading_pairs`` if
    given.

    About a third of the scenes with several things have equal ones.
    """
    counts = [1] * total
    if total > 1 and draws.chance(0.35):
        same = draws.choose_weighted(range(2, total + 1), (6, 3, 1)[: total - 1])
        counts[:same] = [same]
    chosen: list[tuple[str, str]] = []
    while len(chosen) < len(counts):
        pair = draws.choice(pairs if chosen else leading_pairs or pairs)
        if pair not in chosen:
            chosen.append(pair)
    looks: list[Look] = []
    for count, (colour, shape) in zip(draws.permute(counts), chosen, strict=True):
        size = draws.choice(SIZES)
        texture = draws.choose_weighted(TEXTURES, (2, 1, 1))
        looks += [(shape, colour, size, texture)] * count
    return looks


def _place(draws: Draws, looks: Sequence[Look]) -> list[Thing]:
    """Place things at random, large things first; empty where 60 attempts find no room
    for a thing.
    """
    things: list[Thing] = []
    for look in sorted(looks, key=itemgetter(2)):
        for _ in range(60):
            x, y = _coordinate(draws, look[2]), _coordinate(draws, look[2])
            thing = Thing(*look, x, y)
            if all(_clear(thing, other) for other in things):
                things.append(thing)
                break
        else:
            return []
    return things


def _coordinate(draws: Draws, size: str) -> int:
    """A point of the grid, jittered, at which a thing is off both edges."""
    first = -(-(RADIUS[size] + EDGE + _JITTER) // _STEP)
    point = draws.choice(range(first * _STEP, 1001 - first * _STEP, _STEP))
    return point + draws.below(2 * _JITTER + 1) - _JITTER


def _clear(first: Thing, second: Thing) -> bool:
    dx = abs(first.x - second.x)
    dy = abs(first.y - second.y)
    if LEVEL < dx < MARGIN or LEVEL < dy < MARGIN:
        return False
    distance = RADIUS[first.size] + RADIUS[second.size] + GAP
    return dx * dx + dy * dy >= distance * distance


def moves(scene: Scene) -> list[Scene]:
    """All shifts of the whole scene by steps of the grid that keep it inside the image,
    including the scene itself.

    Looks, numbers and relations stay the same, so captions that are true of the scene
    are true of each.
    """
    shifted = []
    for right, down in product(_steps(scene, "x"), _steps(scene, "y")):
        things = [
            thing._replace(x=thing.x + right, y=thing.y + down)
            for thing in scene.things
        ]
        shifted.append(Scene(scene.background, tuple(things)))
    return shifted


def _steps(scene: Scene, axis: str) -> list[int]:
    """Offsets along an axis, multiples of the grid's step, that keep all things off both edges."""
    places = [(getattr(thing, axis), RADIUS[thing.size]) for thing in scene.things]
    return [
        step
        for step in range(-1000, 1001, _STEP)
        if all(abs(at + step - 500) <= 500 - EDGE - radius for at, radius in places)
    ]
