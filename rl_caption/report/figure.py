"""A chart with its heading, unit, legend and definitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rl_caption.report.chart import COLOURS, Marks, Series, line_chart, number
from rl_caption.report.markup import Markup, element


def figure(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    about: Sequence[Markup] = (),
    x_name: str = "step",
    marks: Marks | None = None,
) -> Markup:
    """A chart as ``<figure>``; empty where no series has a finite value.

    Args:
        title: heading.
        series: the lines; what is not finite is left out, and a sentence says so.
        unit: below the heading.
        about: definitions, folded away.
        x_name: what x is; for steps, x starts at 0.
        marks: on the x axis.
    """
    lost = sum(not math.isfinite(y) for one in series for _, y in one.points)
    drawn = [one for one in map(_finite, series) if one.points]
    if not drawn:
        return Markup("")
    last = max(one.points[-1][0] for one in drawn)
    units = [element("span", unit, class_="unit")] if unit else []
    small = element("small", *units, element("span", f"{x_name} {number(last)}", class_="at"))
    parts = [element("h4", title, small)]
    if about:
        summary = element("summary", "i", aria_label=f"What is {title}?")
        parts.append(element("details", summary, *about, class_="about"))
    keys = [
        element(
            "li",
            element("i", class_=f"key c{one.colour % COLOURS}{' dots' if one.marks else ''}"),
            element("span", one.name, class_="name"),
            element("b", number(one.points[-1][1])),
        )
        for one in drawn
    ]
    parts.append(element("ul", *keys, class_="legend", aria_live="polite"))
    if lost:
        parts.append(element("p", f"{lost} values are not finite and left out.", class_="note"))
    label = f"{title}: {', '.join(one.name for one in drawn)}"
    parts.append(Markup(line_chart(drawn, label, x_name=x_name, marks=marks, from_zero=x_name == "step")))
    return element("figure", *parts)


def _finite(series: Series) -> Series:
    kept = [index for index, point in enumerate(series.points) if all(map(math.isfinite, point))]
    errors = [series.errors[index] for index in kept] if series.errors else ()
    return replace(series, points=[series.points[index] for index in kept], errors=errors)
