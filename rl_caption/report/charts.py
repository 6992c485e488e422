"""Line charts as SVG, from numbers alone. Colours are classes, so that the page's style decides them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

Point = tuple[float, float]

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 350, 10, 166
"""Coordinates of the axes."""
MAX_POINTS = 2000
"""Points of a line; where there are more, the smallest and largest value of every stretch are drawn."""
SMOOTH_FROM = 40
"""From so many points on, a line is drawn thin, and a running mean over it."""
COLOURS = 8


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: for the legend.
        points: (x, y), by x.
        colour: 0 to 7, a class of the page's style.
        marks: draw a dot at every point, as for validations.
        errors: half the height of the error bar at every point; empty draws none.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    marks: bool = False
    errors: Sequence[float] = ()


@dataclass(frozen=True)
class Marks:
    """What is marked on the x axis: steps with an alarm, and the step of the best model."""

    alarms: Sequence[int] = ()
    best: int | None = None


@dataclass(frozen=True)
class Axis:
    """A range of values, drawn between the coordinates ``start`` and ``end``."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def around(cls, low: float, high: float, start: float, end: float) -> Axis:
        """An axis with some room around [low, high]; 0 is on it where it is near."""
        if low == high == 0:
            return cls(0.0, 1.0, start, end)
        if not high > low:
            room = abs(low) * 0.1 or 1.0
            low, high = low - room, high + room
        if 0 < low < 0.35 * high:
            low = 0.0
        if 0.35 * low < high < 0:
            high = 0.0
        room = 0.06 * (high - low)
        return cls(low - room if low else low, high + room, start, end)

    def at(self, value: float) -> float:
        """Coordinate of a value, to a tenth."""
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Coordinates of round numbers, and these as text."""
        values = ticks(self.low, self.high)
        spacing = values[1] - values[0] if len(values) > 1 else None
        return [(self.at(value), number(value, spacing)) for value in values]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers in [low, high]: 1, 2 or 5 times a power of ten apart, ``about`` so many (a third more at most)."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.75)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [count * step for count in range(first, last + 1)]


def number(value: float, spacing: float | None = None) -> str:
    """A number for people: four significant digits or, on an axis, as many decimals as its ticks need."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or (size < 1e-3 and (not spacing or spacing < 1e-4)):
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    elif value == round(value) and not spacing:
        text = f"{round(value)}"
    else:
        digits = -math.floor(math.log10(spacing) + 1e-9) if spacing else 3 - math.floor(math.log10(size))
        text = f"{value:{',' if size >= 1e4 else ''}.{max(0, digits)}f}"
    return text.replace("-", "−")


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of y over ``window`` (odd) neighbours; fewer at both ends, the same number on either side."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    found = []
    for index, (x, _) in enumerate(points):
        reach = min(window // 2, index, len(points) - 1 - index)
        first, last = index - reach, index + reach + 1
        found.append((x, (sums[last] - sums[first]) / (last - first)))
    return found


def smoothing_window(count: int) -> int:
    """Points that a running mean takes together, odd; 1 for lines that are drawn as they are."""
    return 1 if count < SMOOTH_FROM else 2 * max(count // 50, 1) + 1


def line_chart(
    series: Sequence[Series], label: str, *, x_name: str = "step", marks: Marks | None = None, from_zero: bool = True
) -> Markup:
    """Draw lines over a common x axis.

    Args:
        series: at least one, each with at least one point, all finite.
        label: for screen readers.
        x_name: what x is.
        marks: alarms and the best step.
        from_zero: the x axis starts at 0, which is marked where a series with marks has a point there.

    Returns:
        An ``<svg>`` element, with every number in its attribute ``data-chart`` as JSON.
    """
    xs = [x for one in series for x, _ in one.points]
    errors = [error for one in series for error in one.errors or [0.0] * len(one.points)]
    spans = [(y - e, y + e) for y, e in zip((y for one in series for _, y in one.points), errors, strict=True)]
    low, high = min(0.0, *xs) if from_zero else min(xs), max(xs)
    x = Axis(low, high if high > low else low + max(1.0, abs(low)), LEFT, RIGHT)
    y = Axis.around(min(bottom for bottom, _ in spans), max(top for _, top in spans), BOTTOM, TOP)
    data = {
        "x": [x.low, x.high, x.start, x.end],
        "y": [y.low, y.high, y.start, y.end],
        "xName": x_name,
        "series": [{"name": one.name, "colour": one.colour, "points": _thinned(one.points)} for one in series],
    }
    lines = [_line(one, x, y) for one in series]
    return parts().chart(label, json.dumps(data, ensure_ascii=False), x, y, lines, marks or Marks(), x_name, from_zero)


def figure(
    title: str,
    series: Sequence[Series],
    unit: str = "",
    definitions: Sequence[Any] = (),
    x_name: str = "step",
    marks: Marks | None = None,
) -> Markup:
    """A chart with its heading, unit, legend and definitions; empty where no series has a finite value.

    Args:
        title: heading.
        series: the lines; what is not finite is left out, and a sentence says so.
        unit: below the heading.
        definitions: of the keys that are drawn, folded away.
        x_name: what x is; for steps, x starts at 0.
        marks: on the x axis.
    """
    lost = sum(not math.isfinite(y) for one in series for _, y in one.points)
    drawn = [one for one in map(_finite, series) if one.points]
    if not drawn:
        return Markup("")
    label = f"{title}: {', '.join(one.name for one in drawn)}"
    chart = line_chart(drawn, label, x_name=x_name, marks=marks, from_zero=x_name == "step")
    last = f"{x_name} {number(max(one.points[-1][0] for one in drawn))}"
    legend = [(one, number(one.points[-1][1])) for one in drawn]
    return parts().figure(title, unit, last, definitions, legend, lost, chart)


@cache
def templates() -> Environment:
    """The page's templates; whatever is not marked as HTML is escaped."""
    found = Environment(
        loader=PackageLoader("rl_caption.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    found.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    found.globals |= {"style": _file("style.css"), "script": _file("report.js")}
    return found


def parts() -> Any:
    """The macros of ``parts.html``: what they are given is escaped, what they return is HTML."""
    return templates().get_template("parts.html").module


def _file(name: str) -> Markup:
    return Markup(resources.files("rl_caption.report").joinpath(name).read_text(encoding="utf-8"))


def _finite(series: Series) -> Series:
    kept = [index for index, point in enumerate(series.points) if all(map(math.isfinite, point))]
    errors = [series.errors[index] for index in kept] if series.errors else ()
    return replace(series, points=[series.points[index] for index in kept], errors=errors)


def _thinned(points: Sequence[Point]) -> list[Point]:
    if len(points) <= MAX_POINTS:
        return list(points)
    stretch = math.ceil(len(points) / (MAX_POINTS // 2))
    kept: list[Point] = []
    for first in range(0, len(points), stretch):
        part = points[first : first + stretch]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def _line(series: Series, x: Axis, y: Axis) -> dict[str, Any]:
    """Coordinates: ``paths`` (the thin line first, where a running mean is drawn over it), ``dots``, error bars."""
    window = 1 if series.marks else smoothing_window(len(series.points))
    lines = [series.points, *([running_mean(series.points, window)] if window > 1 else [])]
    places = [[(x.at(a), y.at(b)) for a, b in _thinned(points)] for points in lines]
    shown = _thinned(series.points) if series.marks or len(series.points) == 1 else []
    return {
        "colour": f"c{series.colour % COLOURS}",
        "paths": ["M" + "L".join(f"{a} {b}" for a, b in line) for line in places],
        "dots": [(x.at(a), y.at(b), a == 0) for a, b in shown],
        "radius": 2.6 if len(shown) <= 40 else 1.6,
        "errors": [(x.at(a), y.at(b - e), y.at(b + e)) for (a, b), e in zip(shown, series.errors, strict=False) if e],
        "start": y.at(series.points[0][1]) if series.marks and series.points[0][0] == 0 else None,
    }
