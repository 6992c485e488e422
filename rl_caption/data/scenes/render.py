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
_DISCS: dict[str, Any] = {
    "circle": [(0, 0, 0.96, 255)],
    "ring": [(0, 0, 0.98, 255), (0, 0, 0.5, 0)],
    "heart": [(-0.43, -0.32, 0.47, 255), (0.43, -0.32, 0.47, 255)],
}
"""Shape -> discs: centre and radius in units of the thing's radius, and value."""
_STAR = [
    (length * math.sin(math.pi * corner / 5), -length * math.cos(math.pi * corner / 5))
    for corner, length in enumerate((1.0, 0.45) * 5)
]
# Corners lie within the unit circle, so that things whose circles do not overlap do not touch.
_OUTLINES: dict[str, Any] = {
    "square": [[(-0.71, -0.71), (0.71, -0.71), (0.71, 0.71), (-0.71, 0.71)]],
    "triangle": [[(0, -0.98), (0.82, 0.58), (-0.82, 0.58)]],
    "diamond": [[(0, -1.0), (0.66, 0), (0, 1.0), (-0.66, 0)]],
    "star": [_STAR],
    "heart": [[(-0.86, -0.12), (0, -0.25), (0.86, -0.12), (0, 0.97)]],
    "cross": [
        [(-0.32, -0.95), (0.32, -0.95), (0.32, 0.95), (-0.32, 0.95)],
        [(-0.95, -0.32), (0.95, -0.32), (0.95, 0.32), (-0.95, 0.32)],
    ],
}
"""Shape -> polygons, corners in units of the thing's radius."""


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

    def dimensions(self) -> tuple[int, int]:
        """Width and height, without drawing it."""
        return self.size, self.size


def render(scene: Scene, size: int = 64) -> Image.Image:
    """Draw a scene as an RGB image of ``size`` by ``size`` pixels, 4 times oversampled.

    A pure function; half a millisecond at 64 pixels. ``size`` is at least 16: below, shapes cannot
    be told apart.
    """
    side = size * _OVERSAMPLING
    canvas = Image.new("RGB", (side, side), BACKGROUND_RGB[scene.background])
    for thing in scene.things:
        body, ink = _masks(thing.shape, thing.texture, max(4, RADIUS[thing.size] * side // 1000))
        corner = (
            thing.x * side // 1000 - body.width // 2,
            thing.y * side // 1000 - body.height // 2,
        )
        canvas.paste(COLOUR_RGB[thing.colour], corner, body)
        if ink is not None:
            canvas.paste(_DARK_INK if thing.colour in _LIGHT_COLOURS else _LIGHT_INK, corner, ink)
    return canvas.reduce(_OVERSAMPLING)


@lru_cache(maxsize=512)
def _masks(shape: str, texture: str, radius: int) -> tuple[Image.Image, Image.Image | None]:
    """Masks (0 or 255) of a thing and of its stripes or dots (None if plain)."""
    body = _shape_mask(shape, radius)
    if texture == "plain":
        return body, None
    pattern = Image.new("L", body.size, 0)
    draw = ImageDraw.Draw(pattern)
    side = 2 * radius + 1
    # At 64 pixels, 4 drawn pixels are one image pixel: stripes and dots of 1.5 to 2 image pixels
    # remain visible.
    unit = max(2, round(2 + radius * 0.13))
    if texture == "striped":
        for top in range(radius % (2 * unit) - unit // 2 - 2 * unit, side, 2 * unit):
            draw.rectangle((0, top, side, top + unit - 1), fill=255)
    else:
        dot, step = 0.62 * unit, round(2.2 * unit)
        first = radius - (radius // step + 1) * step
        for row, y in enumerate(range(first, side + step, step)):
            for x in range(first - (row % 2) * step // 2, side + step, step):
                _disc(draw, x, y, dot, 255)
    # A rim of the thing's colour keeps the outline where the ink has the colour of the background.
    rim = 2 * (radius // 16) + 1
    inside = body.filter(ImageFilter.MinFilter(rim)) if rim > 1 else body
    return body, ImageChops.darker(inside, pattern)


def _shape_mask(shape: str, radius: int) -> Image.Image:
    mask = Image.new("L", (2 * radius + 1, 2 * radius + 1), 0)
    draw = ImageDraw.Draw(mask)
    for x, y, size, fill in _DISCS.get(shape, ()):
        _disc(draw, radius + x * radius, radius + y * radius, size * radius, fill)
    for outline in _OUTLINES.get(shape, ()):
        corners = [(round(radius + x * radius), round(radius + y * radius)) for x, y in outline]
        draw.polygon(corners, fill=255)
    return mask


def _disc(draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, fill: int) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    draw.ellipse([round(edge) for edge in box], fill=fill)
