"""Charts of what runs logged: which keys are drawn together, and the drawing, as SVG by matplotlib."""

import io
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from rl_caption.evaluation.results import factor_of
from rl_caption.programs.report.read import RunFolder

Point = tuple[float, float]
SMOOTH_FROM, WINDOW = 40, 9
"""From so many points on, a line is drawn thin, and over it its mean over a window of points."""
COLOURS = ["#2b86d1", "#e0701a", "#17966b", "#c95f9e", "#a8870f", "#4fb0e0", "#7d8590", "#8f6fe0"]
"""Visible on white and on black."""
DASHES = ("-", "-", "--", ":", "-.")
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
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": INK,
    "grid.alpha": 0.12,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-4, 6),
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
}


class Series(NamedTuple):
    """A line of a chart: (x, y) in the order of x; ``errors`` maps x to half the height of an error
    bar.
    """

    name: str
    points: Sequence[Point]
    colour: int = 0
    dots: bool = False
    errors: Mapping[float, float] = {}


def number(value: float) -> str:
    """A number to read, with four significant digits."""
    return f"{value:.4g}".replace("-", "−")


def figure(
    title: str,
    series: Sequence[Series],
    keys: Sequence[str] = (),
    x_name: str = "step",
    alarms: Sequence[int] = (),
    best: int | None = None,
) -> Markup:
    """A chart with its heading, legend and definitions; empty where no value is finite.

    Args:
        title: the heading.
        series: the lines; values that are not finite are left out and counted in a sentence.
        keys: the drawn keys, whose definitions are folded away.
        x_name: what x is; the axis of ``step`` starts at 0.
        alarms, best: steps with a mark.
    """
    drawn = []
    for one in series:
        finite = [point for point in one.points if math.isfinite(point[1])]
        drawn += [one._replace(points=finite)] if finite else []
    if not drawn:
        return Markup("")
    lost = sum(len(one.points) for one in series) - sum(len(one.points) for one in drawn)
    last = f"{x_name} {max(one.points[-1][0] for one in drawn):.10g}"
    legend = [(one, number(one.points[-1][1]), COLOURS[one.colour % len(COLOURS)]) for one in drawn]
    import matplotlib
    from matplotlib.figure import Figure

    # The same bytes for the same values.
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": title}):
        drawing = Figure(figsize=(3.6, 1.9), layout="constrained")
        draw(drawing.subplots(), drawn, x_name, alarms, best)
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawing.savefig(buffer, format="svg", metadata=no_metadata, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r' (?:id="[\w.]+_\d+"|(?:width|height)="[\d.]+pt")', "", svg)
    definitions = [found for found in map(define, keys) if found is not None]
    return macros().figure(title, last, definitions, legend, lost, Markup(svg))


def draw(
    axes: Any,
    series: Sequence[Series],
    x_name: str = "step",
    alarms: Sequence[int] = (),
    best: int | None = None,
) -> None:
    """Draw lines with finite values on the axes of matplotlib."""
    for one in series:
        x: Any
        y: Any
        x, y = zip(*one.points, strict=True)
        look = {
            "color": COLOURS[one.colour % len(COLOURS)],
            "linestyle": DASHES[one.colour % len(DASHES)],
            "marker": "o" if one.dots or len(x) == 1 else None,
        }
        if len(x) >= SMOOTH_FROM and not one.dots:
            axes.plot(x, y, color=look["color"], linewidth=0.6, alpha=0.4)
            # Both ends have fewer points around them, and are left out.
            x = x[WINDOW // 2 : -(WINDOW // 2)]
            y = np.convolve(y, np.full(WINDOW, 1 / WINDOW), "valid")
        errors = [one.errors.get(at, 0.0) for at in x] if one.errors else None
        axes.errorbar(x, y, errors, label=one.name, **look)
        if one.dots and x[0] == 0 and x_name == "step":
            axes.axhline(y[0], color=look["color"], linewidth=0.8, linestyle=":")
    if x_name == "step":
        axes.set_xlim(left=0)
    bottom_to_top = axes.get_xaxis_transform()
    if alarms:
        axes.axvline(alarms[0], color=ALARM, linewidth=0.9, linestyle="--")
        flags = {"color": ALARM, "linestyle": "", "clip_on": False, "gid": "alarms"}
        axes.plot(alarms, [1] * len(alarms), marker="v", transform=bottom_to_top, **flags)
    if best is not None:
        axes.plot([best], [0], "^", color=INK, transform=bottom_to_top, clip_on=False, gid="best")
    axes.set_xlabel(x_name)
    axes.locator_params(axis="x", nbins=6, integer=x_name == "step")
    axes.locator_params(axis="y", nbins=5)


@cache
def templates() -> Environment:
    """The pages' templates and their style; whatever is not marked as HTML is escaped."""
    loader = PackageLoader("rl_caption.programs.report")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    style = resources.files("rl_caption.programs.report").joinpath("style.css")
    environment.globals["style"] = Markup(style.read_text(encoding="utf-8"))
    return environment


def macros() -> Any:
    """The macros of ``macros.html``, which escape the text that they are given and return HTML."""
    return templates().get_template("macros.html").module


METRICS_PAGE = Path(__file__).resolve().with_name("metrics.md")
"""The tables of docs/metrics.md: in the repository a link to them, in an installed package a copy.
"""


class Definition(NamedTuple):
    """What a logged key means, as plain text."""

    key: str
    meaning: str
    unit: str
    range: str


ORDER = ("reward", "cider", "judge", "hacking", "policy", "completion", "length", "loss")
"""First parts of the keys whose charts come first, without ``val/``."""
TITLES = {
    "cider": "CIDEr-D",
    "reward": "Reward on the validation split",
    "reward/total": "Reward of samples",
    "reward/greedy": "Reward of samples",
    "reward/std": "Reward spread among samples",
    "policy/kl": "KL to the starting policy",
    "completion/length": "Length of samples",
}
"""Titles of logged keys without ``val/``; all other keys are called by their parts."""


def title_of(key: str) -> str:
    """What a logged key is called above charts and in tables; a key and its ``val/`` key have one
    title.
    """
    base = key.removeprefix("val/")
    kind, _, name = base.partition("/")
    name = name if kind in ("judge", "reward") else name.replace("_", " ")
    called = f"{kind.capitalize()}: {name}" if name else kind.capitalize()
    title = TITLES.get(base, called)
    return title if factor_of(key) == 1 else f"{title} (x100)"


def curves(systems: Mapping[str, Sequence[RunFolder]]) -> Markup:
    """The charts of runs; empty where nothing has been logged.

    The charts of a single run show every logged key. With several systems a chart shows one key,
    with a line for each
    system: the mean over its runs (one run for each seed).
    """
    runs = [run for seeds in systems.values() for run in seeds if run.lines]
    if not runs:
        return Markup("")
    is_single = len(runs) == len(systems) == 1
    figures = []
    for title, keys in _keys_by_title(runs).items():
        if is_single:
            run, colours, lines = runs[0], iter((0, 2, 3, 4)), []
            for key in keys:
                dots = key.startswith("val/")
                lines.append(Series(key, run.shown(key), 1 if dots else next(colours, 0), dots))
            figures.append(figure(title, lines, keys, alarms=run.alarms, best=run.best_step))
        else:
            figures.append(_figure_of_systems(systems, title, keys))
    return macros().reading_note(runs[0], not is_single) + macros().charts(figures)


def _keys_by_title(runs: Sequence[RunFolder]) -> dict[str, list[str]]:
    """Title of a chart -> its keys, without keys that equal another in every run that has them."""

    def rank(key: str) -> int:
        part = key.removeprefix("val/").partition("/")[0]
        return ORDER.index(part) if part in ORDER else len(ORDER)

    keys_by_title: dict[str, list[str]] = {}
    for key in sorted(dict.fromkeys(key for run in runs for key in run.keys), key=rank):
        is_double = all(key in run.doubles for run in runs if key in run.keys)
        if key != "hacking/alarm" and not is_double:
            keys_by_title.setdefault(title_of(key), []).append(key)
    return keys_by_title


def _figure_of_systems(
    systems: Mapping[str, Sequence[RunFolder]], title: str, keys: Sequence[str]
) -> Markup:
    """A line for each system: its mean over seeds, of the key of validations where there is one."""
    key = next((key for key in keys if key.startswith("val/")), keys[0])
    lines = []
    for colour, (name, seeds) in enumerate(systems.items()):
        by_step: dict[float, list[float]] = {}
        for run in seeds:
            for step, value in run.shown(key):
                by_step.setdefault(step, []).append(value)
        points = [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]
        lines.append(Series(name, points, colour, key.startswith("val/")))
    return figure(title, lines, [key])


@cache
def definitions() -> Sequence[Definition]:
    """The rows of the tables in ``METRICS_PAGE``: key, meaning, unit, range."""
    page = METRICS_PAGE.read_text(encoding="utf-8")
    page = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", page)
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    plain = [[text.replace("`", "").replace("\\|", "|") for text in row] for row in rows]
    return [Definition(*row) for row in plain]


def define(key: str) -> Definition | None:
    """The definition of a key as it is shown; ``reward/cider`` has that of ``reward/<term>``."""
    for row in sorted(definitions(), key=lambda row: "<" in row.key):
        if fnmatchcase(key, re.sub("<.*?>", "*", row.key)):
            shown_range = (
                row.range if factor_of(key) == 1 else "0 to 1000 (CIDEr-D, 0 to 10, times 100)"
            )
            return row._replace(key=key, range=shown_range)
    return None
