"""Charts of what runs logged, as SVG by matplotlib, and the templates of pages."""

import io
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from rl_caption.evaluation.results import factor_of
from rl_caption.programs.report.read import RunFolder

Line = Sequence[tuple[float, float]]
"""(x, y) in the order of x."""
SMOOTH_FROM, WINDOW = 40, 9
"""From so many points on, a line is drawn thin, and over it its mean over a window of points."""
COLOURS = [
    "#2b86d1",
    "#e0701a",
    "#17966b",
    "#c95f9e",
    "#a8870f",
    "#4fb0e0",
    "#7d8590",
    "#8f6fe0",
]
"""Visible on white and on black."""
INK, ALARM = "#16181d", "#d03a20"
STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 8,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
}


@cache
def templates() -> Environment:
    """The pages' templates and their style; whatever is not marked as HTML is escaped."""
    loader = PackageLoader("rl_caption.programs.report")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    style = resources.files("rl_caption.programs.report").joinpath("style.css")
    environment.globals["style"] = Markup(style.read_text(encoding="utf-8"))
    return environment


def macros() -> Any:
    """The macros of ``macros.html``, which escape the text that they are given and return HTML."""
    return templates().get_template("macros.html").module


def shown_key(key: str) -> str:
    """A logged key as it is shown: CIDEr-D is multiplied by 100."""
    return key if factor_of(key) == 1 else f"{key} (x100)"


def curves(systems: Mapping[str, Sequence[RunFolder]]) -> Markup:
    """The charts of runs, one for each logged key and its ``val/`` key; empty where nothing has
    been logged.

    A chart has a line for each system: the mean over its runs (one for each seed).
    """
    runs = [run for seeds in systems.values() for run in seeds]
    charts: dict[str, dict[str, Line]] = {}
    for key in dict.fromkeys(key for run in runs for key in run.keys):
        lines = charts.setdefault(shown_key(key.removeprefix("val/")), {})
        for name, seeds in systems.items():
            by_step: dict[int, list[float]] = {}
            for run in seeds:
                for step, value in run.series(key):
                    by_step.setdefault(step, []).append(factor_of(key) * value)
            means = [
                (step, statistics.fmean(values))
                for step, values in sorted(by_step.items())
            ]
            if means:
                lines[key if len(systems) == 1 else f"{name}: {key}"] = means
    marks: dict[str, Any] = {}
    if len(runs) == 1:
        marks = {"alarms": runs[0].alarms, "best": runs[0].best_step}
    figures = [chart(title, lines, **marks) for title, lines in charts.items()]
    return macros().charts(figures, runs) if figures else Markup("")


def chart(title: str, lines: Mapping[str, Line], **options: Any) -> Markup:
    """Lines by their names as SVG; ``options`` are those of ``draw``."""
    import matplotlib
    from matplotlib.figure import Figure

    # The salt gives the same bytes for the same values, and other ids to each chart of a page.
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": title}):
        figure = Figure(figsize=(3.6, 2.4), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, fontsize=9, loc="left")
        draw(axes, lines, **options)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()
    return Markup(svg[svg.index("<svg") :].replace(INK, "currentColor"))


def draw(
    axes: Any,
    lines: Mapping[str, Line],
    x_name: str = "step",
    alarms: Sequence[int] = (),
    best: int | None = None,
    errors: Sequence[float] | None = None,
) -> None:
    """Draw lines on the axes of matplotlib; values that are not finite leave gaps.

    Args:
        axes: of matplotlib.
        lines: by their names; those of validations have dots.
        x_name: what x is.
        alarms, best: steps with a mark.
        errors: half the height of the error bar of each point of the first line.
    """
    for number, (name, points) in enumerate(lines.items()):
        x: Any
        y: Any
        x, y = zip(*points, strict=True)
        label = f"{name} {y[-1]:.4g}"
        colour = COLOURS[number % len(COLOURS)]
        has_dots = "val/" in name or len(x) < 3
        if len(x) >= SMOOTH_FROM and not has_dots:
            axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.4)
            # Both ends have fewer points around them, and are left out.
            x = x[WINDOW // 2 : -(WINDOW // 2)]
            y = np.convolve(y, np.full(WINDOW, 1 / WINDOW), "valid")
        bars = errors if number == 0 else None
        marker = "o" if has_dots or bars else None
        axes.errorbar(x, y, bars, label=label, color=colour, marker=marker)
    for step in alarms:
        axes.axvline(step, color=ALARM, linewidth=0.9, linestyle="--")
    if best is not None:
        axes.axvline(best, color=INK, linewidth=0.9, linestyle=":")
    axes.set_xlabel(x_name)
    axes.legend(fontsize=7)
