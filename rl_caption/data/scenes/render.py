"""Images of scenes, rendered on demand."""

from dataclasses import dataclass
from functools import lru_cache

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
_LIGHT_COLOURS = {"orange", "yellow", "pink", "cyan"}
"""Colours with dark stripes and dots; the others have white ones."""
# Corners lie within the unit circle, so that things whose circles do not overlap do not touch.
_FIGURES = {
    "circle": "0,0,.96,255",
    "ring": "0,0,.98,255; 0,0,.5,0",
    "square": "-.71,-.71 .71,-.71 .71,.71 -.71,.71",
    "triangle": "0,-.98 .82,.58 -.82,.58",
    "diamond": "0,-1 .66,0 0,1 -.66,0",
    "heart": "-.43,-.32,.47,255; .43,-.32,.47,255; -.86,-.12 0,-.25 .86,-.12 0,.97",
    "cross": "-.32,-.95 .32,-.95 .32,.95 -.32,.95; -.95,-.32 .95,-.32 .95,.32 -.95,.32",
    "star": "0,-1 .264503364,-.364057647 .951056516,-.309016994 .427975432,.139057647 .587785252,.809016994 "
    "0,.45 -.587785252,.809016994 -.427975432,.139057647 -.951056516,-.309016994 -.264503364,-.364057647",
}
"""Shape -> its polygons (corners as in SVG) and discs (centre, radius and value), in
units of the thing's radius.
"""


@dataclass(frozen=True)
class SceneImage:
    """A scene as an image of ``size`` by ``size`` pixels; small when pickled, compared
    by scene and size. Below 16 pixels shapes cannot be told apart.
    """

    scene: Scene
    size: int = 64

    def render(self) -> Image.Image:
        """Draw the image as RGB, 4 times oversampled; half a millisecond at 64 pixels."""
        side = self.size * _OVERSAMPLING
        canvas = Image.new("RGB", (side, side), BACKGROUND_RGB[self.scene.background])
        for thing in self.scene.things:
            radius = RADIUS[thing.size] * side // 1000
            body, ink = _masks(thing.shape, thing.texture, radius)
            corner = (thing.x * side // 1000 - radius, thing.y * side // 1000 - radius)
            dark = thing.colour in _LIGHT_COLOURS
            canvas.paste(COLOUR_RGB[thing.colour], corner, body)
            canvas.paste("#141414" if dark else "#ffffff", corner, ink)
        return canvas.reduce(_OVERSAMPLING)


@lru_cache(maxsize=512)
def _masks(shape: str, texture: str, radius: int) -> tuple[Image.Image, Image.Image]:
    """Masks (0 or 255) of a thing and of its stripes or dots."""
    side = 2 * radius + 1
    body = Image.new("L", (side, side), 0)
    draw = ImageDraw.Draw(body)
    for figure in _FIGURES[shape].split(";"):
        points = [
            [float(value) for value in text.split(",")] for text in figure.split()
        ]
        corners = [(radius + x * radius, radius + y * radius) for x, y, *_ in points]
        if len(points) == 1:
            _disc(draw, *corners[0], points[0][2] * radius, int(points[0][3]))
        else:
            draw.polygon([(round(x), round(y)) for x, y in corners], 255)
    pattern = Image.new("L", body.size, 0)
    draw = ImageDraw.Draw(pattern)
    # At 64 pixels, 4 drawn pixels are one image pixel: stripes and dots of 1.5 to 2 image pixels
    # remain visible.
    unit = round(2 + radius * 0.13)
    if texture == "striped":
        for top in range(radius % (2 * unit) - unit // 2 - 2 * unit, side, 2 * unit):
            draw.rectangle((0, top, side, top + unit - 1), fill=255)
    elif texture == "dotted":
        step = round(2.2 * unit)
        first = radius - (radius // step + 1) * step
        for row, y in enumerate(range(first, side + step, step)):
            for x in range(first - (row % 2) * step // 2, side + step, step):
                _disc(draw, x, y, 0.62 * unit, 255)
    # A rim of the thing's colour keeps the outline where the ink has the colour of the background.
    inside = body.filter(ImageFilter.MinFilter(2 * (radius // 16) + 1))
    return body, ImageChops.darker(inside, pattern)


def _disc(
    draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, fill: int
) -> None:
    box = (x - radius, y - radius, x + radius, y + radius)
    draw.ellipse([round(edge) for edge in box], fill=fill)
