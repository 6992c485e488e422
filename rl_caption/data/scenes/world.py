"""The generated world: what a scene is, how one is made from a seed, and which facts are true of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from rl_caption.data.base import DataError
from rl_caption.data.scenes.draws import Draws

SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross", "ring", "heart")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "cyan")
SIZES = ("large", "small")
TEXTURES = ("plain", "striped", "dotted")
BACKGROUNDS = ("white", "grey", "black", "brown", "beige", "navy")
RELATIONS = ("left of", "right of", "above", "below")
INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}

PAIRS = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
"""All 64 pairs of colour and shape."""
UNSEEN_PAIRS = tuple((colour, SHAPES[(3 * index + 5) % len(SHAPES)]) for index, colour in enumerate(COLOURS))
"""Eight pairs, one per colour and one per shape, that no scene of train, val or test contains."""
SEEN_PAIRS = tuple(pair for pair in PAIRS if pair not in UNSEEN_PAIRS)

RADIUS = {"large": 180, "small": 100}
"""Radius of the circle around a thing, in thousandths of the image side."""
MARGIN = 200
"""Least offset of two centres along an axis for a relation, in thousandths of the image side."""
LEVEL = 60
"""Centres at most this far apart along an axis are level. Offsets between LEVEL and MARGIN do not occur."""
_GAP = 25
_EDGE = 15
_STEP = 125
"""Centres lie near the points of a grid of eighths of the image side: the patches of a small captioner, which has few
images to learn from, then cut equal things alike."""
_JITTER = 8


@dataclass(frozen=True)
class Thing:
    """One object. ``x`` and ``y`` are the centre, in thousandths of the image side from the left and from the top."""

    shape: str
    colour: str
    size: str
    texture: str
    x: int
    y: int


class Kind(NamedTuple):
    """The things of a scene that look the same. No two kinds of a scene share both colour and shape."""

    shape: str
    colour: str
    size: str
    texture: str
    things: tuple[Thing, ...]

    @property
    def name(self) -> str:
        """Colour and shape, which identify the kind within its scene."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A background and 1 to 4 things, the salient ones first (large before small, then from left to right)."""

    background: str
    things: tuple[Thing, ...]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The things grouped by appearance, in order of salience."""
        return _kinds(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the scene as plain dictionaries and lists, for JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Scene:
        """Return the scene that ``to_dict`` wrote.

        Raises:
            DataError: a key is missing, unknown, or has a value that this world does not know.
        """
        try:
            things = tuple(Thing(**thing) for thing in values["things"])
            background = values["background"]
        except (KeyError, TypeError) as error:
            raise DataError(f"not a scene: {values!r:.120} ({error}); expected 'background' and 'things'") from error
        known = {"shape": SHAPES, "colour": COLOURS, "size": SIZES, "texture": TEXTURES}
        for value, allowed in [(background, BACKGROUNDS)] + [
            (getattr(thing, key), allowed) for thing in things for key, allowed in known.items()
        ]:
            if value not in allowed:
                raise DataError(f"not a scene: {value!r} is none of {', '.join(allowed)}")
        return Scene(background, things)


class Fact(NamedTuple):
    """One thing that is true of a scene.

    ``kind`` is shape, colour, size, texture, count, relation or background; ``subject`` names the kind of thing (or,
    for a relation, the two kinds); ``value`` is the attribute's value, the number, or the background's colour.
    """

    kind: str
    subject: str
    value: str


@lru_cache(maxsize=4096)
def _kinds(scene: Scene) -> tuple[Kind, ...]:
    groups: dict[tuple[str, str, str, str], list[Thing]] = {}
    for thing in scene.things:
        groups.setdefault((thing.shape, thing.colour, thing.size, thing.texture), []).append(thing)
    return tuple(Kind(*look, tuple(things)) for look, things in groups.items())


def holds(relation: str, first: Thing, second: Thing) -> bool:
    """Return whether ``first`` is in ``relation`` to ``second``: ``MARGIN`` or more apart in that direction."""
    return _offset(relation, first, second) >= MARGIN


def _offset(relation: str, first: Thing, second: Thing) -> int:
    if relation in ("left of", "right of"):
        return second.x - first.x if relation == "left of" else first.x - second.x
    return second.y - first.y if relation == "above" else first.y - second.y


def relations_between(first: Kind, second: Kind) -> list[str]:
    """Return the relations of every thing of ``first`` to every thing of ``second``, the widest apart first."""
    least = {
        relation: min(_offset(relation, one, other) for one in first.things for other in second.things)
        for relation in RELATIONS
    }
    return sorted((relation for relation in RELATIONS if least[relation] >= MARGIN), key=lambda name: -least[name])


def relation_fact(first: Kind, second: Kind) -> Fact:
    """Return the fact that the places of two kinds relative to each other are known, whichever way round."""
    return Fact("relation", " / ".join(sorted((first.name, second.name))), "")


@lru_cache(maxsize=4096)
def facts(scene: Scene) -> frozenset[Fact]:
    """Return all facts of a scene, the denominator of recall.

    The background; of each kind its shape, colour, size and texture, and its count where it has two or more things;
    of each pair of kinds that has a relation, that relation (one fact per pair, whichever way it is told).
    """
    found = {Fact("background", "background", scene.background)}
    kinds = scene.kinds
    for kind in kinds:
        for attribute in ("shape", "colour", "size", "texture"):
            found.add(Fact(attribute, kind.name, getattr(kind, attribute)))
        if len(kind.things) > 1:
            found.add(Fact("count", kind.name, str(len(kind.things))))
    for index, first in enumerate(kinds):
        found.update(relation_fact(first, second) for second in kinds[index + 1 :] if relations_between(first, second))
    return frozenset(found)


def make_scene(
    seed: int,
    pairs: Sequence[tuple[str, str]] = PAIRS,
    leading_pairs: Sequence[tuple[str, str]] | None = None,
) -> Scene:
    """Make the scene of a seed: a pure function, equal on every platform.

    Args:
        seed: any integer.
        pairs: pairs of colour and shape to draw from; at least 4.
        leading_pairs: when given, one kind of the scene is drawn from these.

    Returns:
        A scene whose things do not overlap, lie inside the image, and are either level or ``MARGIN`` apart along each
        axis. Things of the same colour and shape look the same, so that "two red circles" is never half true.
    """
    draws = Draws("scene", seed)
    while True:
        total = draws.weighted((1, 2, 3, 4), (30, 35, 22, 13))
        background = draws.choice(BACKGROUNDS)
        looks = _looks(draws, _counts(draws, total), pairs, leading_pairs)
        things = _place(draws, looks)
        if things is not None:
            order = {size: rank for rank, size in enumerate(SIZES)}
            return Scene(background, tuple(sorted(things, key=lambda thing: (order[thing.size], thing.x, thing.y))))


def moves(scene: Scene) -> list[Scene]:
    """Return the scene with all things moved together by steps of the grid, wherever they stay inside the image.

    Looks, numbers and relations stay, so whatever is true of the scene is true of each. Where it is, is one of them.
    """
    across = _steps([(thing.x, RADIUS[thing.size] + _EDGE) for thing in scene.things])
    down = _steps([(thing.y, RADIUS[thing.size] + _EDGE) for thing in scene.things])
    return [_moved(scene, _STEP * right, _STEP * below) for right in across for below in down]


def _steps(places: Sequence[tuple[int, int]]) -> range:
    """By how many steps of the grid, either way, all places may move and stay ``low`` from both edges."""
    return range(
        max(-((at - low) // _STEP) for at, low in places),
        min((1000 - low - at) // _STEP for at, low in places) + 1,
    )


def _moved(scene: Scene, right: int, below: int) -> Scene:
    things = (dataclasses.replace(thing, x=thing.x + right, y=thing.y + below) for thing in scene.things)
    return Scene(scene.background, tuple(things))


def _counts(draws: Draws, total: int) -> list[int]:
    """Split the number of things into kinds; about a third of the larger scenes have things that look the same."""
    if total == 1 or not draws.chance(0.35):
        return [1] * total
    same = draws.weighted(range(2, total + 1), (6, 3, 1)[: total - 1])
    return [same] + [1] * (total - same)


def _looks(
    draws: Draws,
    counts: Sequence[int],
    pairs: Sequence[tuple[str, str]],
    leading_pairs: Sequence[tuple[str, str]] | None,
) -> list[tuple[str, str, str, str]]:
    chosen: list[tuple[str, str]] = []
    while len(chosen) < len(counts):
        pair = draws.choice(leading_pairs if leading_pairs and not chosen else pairs)
        if pair not in chosen:
            chosen.append(pair)
    looks = []
    for count, (colour, shape) in zip(draws.shuffled(counts), chosen, strict=True):
        look = (shape, colour, draws.choice(SIZES), draws.weighted(TEXTURES, (2, 1, 1)))
        looks.extend([look] * count)
    return looks


def _place(draws: Draws, looks: Iterable[tuple[str, str, str, str]]) -> list[Thing] | None:
    """Place things one after the other; None when one finds no room."""
    placed: list[Thing] = []
    for shape, colour, size, texture in sorted(looks, key=lambda look: -RADIUS[look[2]]):
        low = RADIUS[size] + _EDGE
        for _ in range(60):
            thing = Thing(shape, colour, size, texture, _coordinate(draws, low), _coordinate(draws, low))
            if all(_clear(thing, other) for other in placed):
                placed.append(thing)
                break
        else:
            return None
    return placed


def _coordinate(draws: Draws, low: int) -> int:
    """Return a point of the grid, moved a little, that is at least ``low`` from both edges."""
    first = -(-(low + _JITTER) // _STEP)
    last = (1000 - low - _JITTER) // _STEP
    return _STEP * (first + draws.below(last - first + 1)) + draws.below(2 * _JITTER + 1) - _JITTER


def _clear(first: Thing, second: Thing) -> bool:
    dx, dy = abs(first.x - second.x), abs(first.y - second.y)
    if LEVEL < dx < MARGIN or LEVEL < dy < MARGIN:
        return False
    apart = RADIUS[first.size] + RADIUS[second.size] + _GAP
    return dx * dx + dy * dy >= apart * apart
