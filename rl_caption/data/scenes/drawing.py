"""From a caption to a scene of which it is true: a text-to-image model for the generated world."""

from collections.abc import Sequence
from dataclasses import replace

from rl_caption.data.scenes.oracle import Parse, oracle, parse
from rl_caption.data.scenes.world import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    SIZES,
    TEXTURES,
    Draws,
    Look,
    Scene,
    make_scene,
    place_things,
)

MOST_THINGS = 4
"""Largest number of things in a scene; further ones of a caption are not drawn."""


def scene_of(caption: str, seed: int = 0, attempts: int = 64) -> Scene:
    """A scene that the caption describes; what the caption leaves open is drawn at random. A pure function.

    Things, numbers, attributes and background are those that the parser finds. Of ``attempts`` random completions and
    layouts, the first with the highest precision of the caption (by the oracle) is returned. A caption that names no
    thing gets a random scene.
    """
    draws, parsed = Draws("drawing", seed, caption), parse(caption)
    best, highest = make_scene(draws.below(2**31)), -1.0
    grounds = [colour for colour in parsed.backgrounds if colour in BACKGROUNDS]
    if not parsed.things:
        return replace(best, background=grounds[0]) if grounds else best
    for _ in range(attempts):
        scene = _fill_in(parsed, grounds, draws)
        precision = -1.0 if scene is None else oracle(caption, scene).precision
        if scene is not None and precision > highest:
            best, highest = scene, precision
        if highest == 1.0:
            break
    return best


def _fill_in(parsed: Parse, grounds: Sequence[str], draws: Draws) -> Scene | None:
    looks: list[Look] = []
    for thing in parsed.things:
        said = dict(reversed(thing.attributes))  # the first of two values of an attribute
        colour = said.get("colour", "")
        look = (
            thing.shape or draws.choice(SHAPES),
            colour if colour in COLOURS else draws.choice(COLOURS),
            said.get("size") or draws.choice(SIZES),
            said.get("texture") or draws.choice(TEXTURES),
        )
        is_told = any(
            look[:2] == earlier[:2] or (thing.definite and look[0] == earlier[0])
            for earlier in looks
        )
        if not is_told:  # "the circle" refers back
            looks += [look] * (thing.number or (2 if thing.plural else 1))
    return place_things(
        draws, looks[:MOST_THINGS], grounds[0] if grounds else draws.choice(BACKGROUNDS)
    )
