"""A line chart as SVG: a pure function of numbers. Colours are classes, so that the page's style decides them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
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


def line_chart(
    series: Sequence[Series], label: str, *, x_name: str = "step", marks: Marks | None = None, from_zero: bool = True
) -> str:
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
    marks = marks or Marks()
    xs = [x for one in series for x, _ in one.points]
    ys = [
        y + sign * error
        for one in series
        for (_, y), error in zip(one.points, one.errors or [0.0] * len(one.points), strict=True)
        for sign in (-1, 1)
    ]
    x_low = min(0.0, *xs) if from_zero else min(xs)
    x_axis, y_axis = Axis.of(x_low, max(*xs, x_low + 1e-9), tight=True), Axis.of(min(ys), max(ys))
    parts = [_grid(x_axis, y_axis, x_name)]
    parts += [_starting_value(one, x_axis, y_axis) for one in series if one.marks and from_zero]
    parts += [_alarms(marks.alarms, x_axis)] if marks.alarms else []
    if marks.best is not None and x_axis.low <= marks.best <= x_axis.high:
        x = x_axis.place(marks.best, LEFT, WIDTH - RIGHT)
        parts.append(f'<path class="best" d="M{x:.1f} {HEIGHT - BOTTOM - 7} l4 7 h-8 z"><title>best</title></path>')
    parts += [_line(one, x_axis, y_axis, hollow_start=from_zero) for one in series]
    content = {
        "x": [x_axis.low, x_axis.high, LEFT, WIDTH - RIGHT],
        "y": [y_axis.low, y_axis.high, HEIGHT - BOTTOM, TOP],
        "xName": x_name,
        "series": [{"name": one.name, "colour": one.colour, "points": _thinned(one.points)} for one in series],
    }
    data = escape(json.dumps(content, ensure_ascii=False), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{escape(label)}" '
        f'data-chart="{data}">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True)
class Axis:
    """A range of values with its ticks."""

    low: float
    high: float
    ticks: Sequence[float]

    @classmethod
    def of(cls, low: float, high: float, tight: bool = False) -> Axis:
        """An axis around [low, high]; 0 is on it where it is near. ``tight`` ends at the values themselves."""
        if low == high == 0:
            return cls(0.0, 1.0, ticks(0.0, 1.0))
        if not high > low:
            room = abs(low) * 0.1 or 1.0
            low, high = low - room, high + room
        if not tight:
            if 0 < low < 0.35 * high:
                low = 0.0
            if 0.35 * low < high < 0:
                high = 0.0
            low, high = (low if low == 0 else low - 0.06 * (high - low)), high + 0.06 * (high - low)
        return cls(low, high, ticks(low, high))

    def place(self, value: float, first: float, last: float) -> float:
        """Where a value is drawn between the coordinates of both ends."""
        return first + (value - self.low) / (self.high - self.low) * (last - first)


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
    if value == round(value) and abs(value) < 1e6 and not spacing:
        return f"{round(value)}".replace("-", "−")
    if abs(value) >= 1e6 or (abs(value) < 1e-3 and (not spacing or spacing < 1e-4)):
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    decimals = (
        max(0, -math.floor(math.log10(spacing) + 1e-9)) if spacing else max(0, 3 - math.floor(math.log10(abs(value))))
    )
    text = f"{value:,.{decimals}f}" if abs(value) >= 1e4 else f"{value:.{decimals}f}"
    return text.replace("-", "−")


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Mean of y over ``window`` (odd) neighbours; fewer at both ends, the same number on either side."""
    half, sums = window // 2, [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    found = []
    for index, (x, _) in enumerate(points):
        reach = min(half, index, len(points) - 1 - index)
        first, last = index - reach, index + reach + 1
        found.append((x, (sums[last] - sums[first]) / (last - first)))
    return found


def smoothing_window(count: int) -> int:
    """Points that a running mean takes together, odd; 1 for lines that are drawn as they are."""
    return 1 if count < SMOOTH_FROM else 2 * max(count // 50, 1) + 1


def _thinned(points: Sequence[Point]) -> list[Point]:
    if len(points) <= MAX_POINTS:
        return list(points)
    stretch = math.ceil(len(points) / (MAX_POINTS // 2))
    kept: list[Point] = []
    for first in range(0, len(points), stretch):
        part = points[first : first + stretch]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept


def _grid(x_axis: Axis, y_axis: Axis, x_name: str) -> str:
    parts = []
    spacing = y_axis.ticks[1] - y_axis.ticks[0] if len(y_axis.ticks) > 1 else None
    for tick in y_axis.ticks:
        y = y_axis.place(tick, HEIGHT - BOTTOM, TOP)
        text = number(tick, spacing)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    spacing = x_axis.ticks[1] - x_axis.ticks[0] if len(x_axis.ticks) > 1 else None
    for tick in x_axis.ticks:
        x = x_axis.place(tick, LEFT, WIDTH - RIGHT)
        last = x > WIDTH - RIGHT - 16
        anchor = "end" if last else "middle"
        parts.append(f'<path class="axis" d="M{x:.1f} {HEIGHT - BOTTOM} v4"/>')
        place = WIDTH - 2 if last else x
        parts.append(
            f'<text class="tick" x="{place:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{number(tick, spacing)}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM} H{WIDTH - RIGHT}"/>')
    parts.append(f'<text class="tick name" x="4" y="{HEIGHT - 8}">{escape(x_name)}</text>')
    return "".join(parts)


def _starting_value(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    if series.points[0][0] != 0:
        return ""
    y = y_axis.place(series.points[0][1], HEIGHT - BOTTOM, TOP)
    return f'<path class="start c{series.colour}" d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}"/>'


def _alarms(steps: Sequence[int], x_axis: Axis) -> str:
    parts = []
    for index, step in enumerate(steps):
        x = x_axis.place(step, LEFT, WIDTH - RIGHT)
        if index == 0:
            parts.append(f'<path class="alarm" d="M{x:.1f} {TOP} V{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<path class="alarm flag" d="M{x:.1f} {TOP} l-3 -7 h6 z"><title>alarm, step {step}</title></path>'
        )
    return "".join(parts)


def _line(series: Series, x_axis: Axis, y_axis: Axis, hollow_start: bool) -> str:
    def path(points: Sequence[Point]) -> str:
        places = (
            f"{x_axis.place(x, LEFT, WIDTH - RIGHT):.1f} {y_axis.place(y, HEIGHT - BOTTOM, TOP):.1f}" for x, y in points
        )
        return "M" + "L".join(places)

    points = _thinned(series.points)
    colour = f"c{series.colour % COLOURS}"
    window = 1 if series.marks else smoothing_window(len(series.points))
    parts = []
    if window > 1:
        parts.append(f'<path class="line thin {colour}" d="{path(points)}"/>')
        points = _thinned(running_mean(series.points, window))
    parts.append(f'<path class="line {colour}" d="{path(points)}"/>')
    if series.marks or len(points) == 1:
        radius = 2.6 if len(points) <= 40 else 1.6
        for index, (x, y) in enumerate(points):
            left, top = x_axis.place(x, LEFT, WIDTH - RIGHT), y_axis.place(y, HEIGHT - BOTTOM, TOP)
            if series.errors and series.errors[index]:
                reach = series.errors[index] / (y_axis.high - y_axis.low) * (HEIGHT - BOTTOM - TOP)
                parts.append(f'<path class="line {colour}" d="M{left:.1f} {top - reach:.1f} v{2 * reach:.1f}"/>')
            hollow = " first" if x == 0 and hollow_start else ""
            parts.append(f'<circle class="dot{hollow} {colour}" cx="{left:.1f}" cy="{top:.1f}" r="{radius}"/>')
    return "".join(parts)
