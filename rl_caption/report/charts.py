"""Line charts as SVG, drawn from numbers alone. Colours are classes, so that the style sheet decides them."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

Point = tuple[float, float]
LEFT, RIGHT, TOP, BOTTOM = 46, 350, 10, 166
"""Coordinates of the axes in an image of 360 x 190."""
MAX_POINTS = 2000
"""Points of a line; where there are more, the smallest and largest value of every stretch are drawn."""
SMOOTH_FROM = 40
"""From so many points on, a line is drawn thin, and a running mean over it."""


class Series(NamedTuple):
    """One line: points (x, y) by x, colour 0 to 7, whether points are dots, x -> half the height of an error bar."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    dots: bool = False
    errors: Mapping[float, float] = {}


class Axis(NamedTuple):
    """The range [low, high], drawn between the coordinates ``start`` and ``end``."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Coordinate of a value, to a tenth."""
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Coordinates of some five multiples of 1, 2 or 5 times a power of ten, and these as text."""
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.75)
        counts = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
        return [(self.at(count * step), _tidy(f"{count * step:.6g}")) for count in counts]


def number(value: float, largest: float = 0.0) -> str:
    """A number for people: four significant digits of it or, in a row of a table, of the row's largest value."""
    if not math.isfinite(value):
        return "not finite"
    size = max(abs(value), abs(largest))
    if value == round(value) and largest == round(largest) and size < 1e6:
        text = f"{value:.0f}"
    elif 1e-3 <= size < 1e6:
        text = f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}"
    else:
        text = f"{value:.4g}"
    return _tidy(text)


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of y over ``window`` (odd) neighbours; fewer at both ends, as many before as after."""
    sums = list(accumulate((y for _, y in points), initial=0.0))
    found = []
    for index, (x, _) in enumerate(points):
        reach = min(window // 2, index, len(points) - 1 - index)
        found.append((x, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)))
    return found


def smoothing_window(count: int) -> int:
    """Points of a running mean, odd; 1 for lines that are drawn as they are."""
    return 1 if count < SMOOTH_FROM else 2 * max(count // 50, 1) + 1


def figure(
    title: str,
    series: Sequence[Series],
    unit: str = "",
    definitions: Sequence[Any] = (),
    x_name: str = "step",
    alarms: Sequence[int] = (),
    best: int | None = None,
) -> Markup:
    """A chart with its heading, unit, legend and definitions; empty where no series has a finite value.

    Args:
        title, unit: heading, and what stands below it.
        series: what is not finite is left out, and a sentence says so.
        definitions: of the logged keys that are drawn, folded away.
        x_name: what x is; for steps, x starts at 0.
        alarms, best: steps that are marked on the x axis.
    """
    lost = sum(not math.isfinite(y) for one in series for _, y in one.points)
    finite = [one._replace(points=[point for point in one.points if math.isfinite(point[1])]) for one in series]
    drawn = [one for one in finite if one.points]
    if not drawn:
        return Markup("")
    xs = [x for one in drawn for x, _ in one.points] + [0.0] * (x_name == "step")
    ys = [y + sign * one.errors.get(x, 0.0) for one in drawn for x, y in one.points for sign in (-1, 1)]
    x = Axis(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + max(1.0, abs(min(xs))), LEFT, RIGHT)
    y = Axis(*_with_margin(min(ys), max(ys)), BOTTOM, TOP)
    data = {"x": x, "y": y, "xName": x_name, "series": [(one.name, _thinned(one.points)) for one in drawn]}
    label = f"{title}: {', '.join(one.name for one in drawn)}"
    chart = parts().chart(label, json.dumps(data), x, y, x_name, [_line(one, x, y) for one in drawn], alarms, best)
    last = f"{x_name} {max(one.points[-1][0] for one in drawn):.10g}"
    legend = [(one, number(one.points[-1][1])) for one in drawn]
    return parts().figure(title, unit, last, definitions, legend, lost, chart)


@cache
def templates() -> Environment:
    """The pages' templates, with style, scripts and their SHA-256; whatever is not marked as HTML is escaped."""
    loader = PackageLoader("rl_caption.report")
    found = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    for name in ("style.css", "report.js", "web.js"):
        text = resources.files("rl_caption.report").joinpath(name).read_text(encoding="utf-8")
        stem = name.partition(".")[0]
        found.globals[stem] = Markup(text)
        found.globals[f"{stem}_digest"] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return found


def parts() -> Any:
    """The macros of ``parts.html``: what they are given is escaped, what they return is HTML."""
    return templates().get_template("parts.html").module


def _tidy(number: str) -> str:
    return number.replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def _with_margin(low: float, high: float) -> tuple[float, float]:
    """A range with a margin around [low, high]; 0 is in it where it is near."""
    if low == high:
        return (low - abs(low) / 10, high + abs(high) / 10) if low else (0.0, 1.0)
    low = 0.0 if 0 < low < 0.35 * high else low
    high = 0.0 if 0.35 * low < high < 0 else high
    margin = 0.06 * (high - low)
    return low - margin * (low != 0), high + margin


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= MAX_POINTS:
        return points
    stretch = math.ceil(len(points) / (MAX_POINTS // 2))
    kept: list[Point] = []
    for first in range(0, len(points), stretch):
        part = points[first : first + stretch]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def _line(series: Series, x: Axis, y: Axis) -> dict[str, Any]:
    """Coordinates: ``paths`` (the thin line first, where a running mean is drawn over it), ``dots``, error ``bars``."""
    window = 1 if series.dots else smoothing_window(len(series.points))
    lines = [series.points, *([running_mean(series.points, window)] if window > 1 else [])]
    shown = _thinned(series.points) if series.dots or len(series.points) == 1 else []
    errors, (first_x, first_y) = series.errors, series.points[0]
    return {
        "colour": f"c{series.colour % 8}",
        "paths": ["M" + "L".join(f"{x.at(a)} {y.at(b)}" for a, b in _thinned(points)) for points in lines],
        "dots": [(x.at(a), y.at(b), a == 0) for a, b in shown],
        "bars": [(x.at(a), y.at(b - errors[a]), y.at(b + errors[a])) for a, b in shown if a in errors],
        "start": y.at(first_y) if series.dots and first_x == 0 else None,
    }
