"""Images of scenes, rendered on demand."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from PIL import Image, ImageChops, ImageDraw, ImageFilter

from rl_caption.data.scenes.world import RADIUS, Scene

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
BACKGROUND_RGB = {
    "white": "#fcfcfc",
    "grey": "#8c8c8c",
    "black": "#0e0e0e",
    "brown": "#623e24",
    "beige": "#e2cea8",
    "navy": "#161e54",
}
_OVERSAMPLING = 4
_LIGHT_INK, _DARK_INK = "#ffffff", "#141414"
_LIGHT_COLOURS = {"orange", "yellow", "pink", "cyan"}
"""Colours with dark stripes and dots; the others have white ones."""
_DISCS = {
    "circle": "0,0,.96,255",
    "ring": "0,0,.98,255 0,0,.5,0",
    "heart": "-.43,-.32,.47,255 .43,-.32,.47,255",
}
"""Shape -> discs: centre and radius in units of the thing's radius, and value."""
# Corners lie within the unit circle, so that things whose circles do not overlap do not touch.
_OUTLINES = {
    "square": "-.71,-.71 .71,-.71 .71,.71 -.71,.71",
    "triangle": "0,-.98 .82,.58 -.82,.58",
    "diamond": "0,-1 .66,0 0,1 -.66,0",
    "heart": "-.86,-.12 0,-.25 .86,-.12 0,.97",
    "cross": "-.32,-.95 .32,-.95 .32,.95 -.32,.95; -.95,-.32 .95,-.32 .95,.32 -.95,.32",
}
"""Shape -> polygons, corners as in SVG, in units of the thing's radius."""
_STAR = [
    (length * math.sin(math.pi * corner / 5), -length * math.cos(math.pi * corner / 5))
    for corner, length in enumerate((1.0, 0.45) * 5)
]


@dataclass(frozen=True)
class SceneImage:
    """A scene as an image of ``size`` by ``size`` pixels; small when pickled, compared by scene and
    size.
    """

    scene: Scene
    size: int = 64

    def render(self) -> Image.Image:
        """Draw the image as RGB. The result belongs to the caller, who may modify it."""
        return render(self.scene, self.size)


def render(scene: Scene, size: int = 64) -> Image.Image:
    """Draw a scene as an RGB image of ``size`` by ``size`` pixels, 4 times oversampled.

    A pure function; half a millisecond at 64 pixels. ``size`` is at least 16: below, shapes cannot
    be told apart.
    """
    side = size * _OVERSAMPLING
    canvas = Image.new("RGB", (side, side), BACKGROUND_RGB[scene.background])
    for thing in scene.things:
        radius = max(4, RADIUS[thing.size] * side // 1000)
        body, ink = _masks(thing.shape, thing.texture, radius)
        corner = (thing.x * side // 1000 - radius, thing.y * side // 1000 - radius)
        canvas.paste(COLOUR_RGB[thing.colour], corner, body)
        if ink is not None:
            dark = thing.colour in _LIGHT_COLOURS
            canvas.paste(_DARK_INK if dark else _LIGHT_INK, corner, ink)
    return canvas.reduce(_OVERSAMPLING)


@lru_cache(maxsize=512)
def _masks(
    shape: str, texture: str, radius: int
) -> tuple[Image.Image, Image.Image | None]:
    """Masks (0 or 255) of a thing and of its stripes or dots (None if plain)."""
    side = 2 * radius + 1
    body = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(body)
    for x, y, size, fill in _points(_DISCS.get(shape, "")):
        _disc(draw, radius + x * radius, radius + y * radius, size * radius, fill)
    outlines = [_points(text) for text in _OUTLINES.get(shape, "").split(";") if text]
    for outline in [_STAR] if shape == "star" else outlines:
        draw.polygon(
            [
                (round(radius + x * radius), round(radius + y * radius))
                for x, y in outline
            ],
            255,
        )
    if texture == "plain":
        return body, None
    pattern = Image.new("L", body.size, 0)
    draw = ImageDraw.Draw(pattern)
    # At 64 pixels, 4 drawn pixels are one image pixel: stripes and dots of 1.5 to 2 image pixels
    # remain visible.
    unit = max(2, round(2 + radius * 0.13))
    if texture == "striped":
        for top in range(radius % (2 * unit) - unit // 2 - 2 * unit, side, 2 * unit):
            draw.rectangle((0, top, side, top + unit - 1), fill=255)
    else:
        step = round(2.2 * unit)
        first = radius - (radius // step + 1) * step
        for row, y in enumerate(range(first, side + step, step)):
            for x in range(first - (row % 2) * step // 2, side + step, step):
                _disc(draw, x, y, 0.62 * unit, 255)
    # A rim of the thing's colour keeps the outline where the ink has the colour of the background.
    rim = 2 * (radius // 16) + 1
    inside = body.filter(ImageFilter.MinFilter(rim)) if rim > 1 else body
    return body, ImageChops.darker(inside, pattern)


def _points(text: str) -> list[Any]:
    """Tuples of numbers, as ``x,y x,y``."""
    return [tuple(map(float, point.split(","))) for point in text.split()]


def _disc(
    draw: ImageDraw.ImageDraw,
    x: float,
    y: float,
    radius: float,
    fill: float,
) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    draw.ellipse([round(edge) for edge in box], fill=int(fill))
