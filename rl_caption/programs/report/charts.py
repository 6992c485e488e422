"""Line charts as SVG, drawn from numbers alone, and the charts of runs: which logged keys are drawn in one.

Colours are classes, so that the style sheet decides them.
"""

import base64
import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from rl_caption.evaluation.results import factor_of
from rl_caption.programs.report.read import RunFolder

Point = tuple[float, float]
LEFT, RIGHT, TOP, BOTTOM = 46, 350, 10, 166
"""Coordinates of the axes in an image of 360 x 190; wide labels move the left one further in."""
DIGIT = 6.4
"""Widest digit of a label, in the units of these coordinates."""
MAX_POINTS = 2000
"""Points of a line; where there are more, the smallest and largest value of every stretch are drawn."""
LARGEST = 1e100
"""Values beyond it, up or down, are left out as not finite; ranges below its inverse are drawn as one value."""
SMOOTH_FROM = 40
"""From so many points on, a line is drawn thin, and a running mean over it."""


class Series(NamedTuple):
    """A line of a chart.

    ``points`` are (x, y) in the order of x, ``colour`` is a number from 0 to 7, ``dots`` marks each point, and
    ``errors`` maps x to half the height of an error bar.
    """

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
        return round(
            self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1
        )

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Coordinates of some five multiples of 1, 2 or 5 times a power of ten, and these as text."""
        raw = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.75)
        counts = range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)
        return [(self.at(count * step), _tidy(f"{count * step:.6g}")) for count in counts]

    def spread(self, least: float, most: float) -> list[tuple[float, float, str]]:
        """Coordinates of ``ticks`` and of the middles of their texts, which stay between ``least`` and ``most``.

        Texts that would touch the one before them are empty.
        """
        labels: list[tuple[float, float, str]] = []
        for at, text in self.ticks:
            half = DIGIT * len(text) / 2
            middle = round(min(max(at, least + half), most - half), 1)
            free = middle - half > least
            labels.append((at, middle, text if free else ""))
            least = middle + half + DIGIT if free else least
        return labels


def number(value: float, largest: float = 0.0) -> str:
    """A number to read: with four significant digits or, beside a ``largest`` value, with that one's decimals."""
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
    """Mean of y over ``window`` points (odd) around each one; at both ends over fewer, as many before as after."""
    sums = list(accumulate((y for _, y in points), initial=0.0))
    means = []
    for index, (x, _) in enumerate(points):
        reach = min(window // 2, index, len(points) - 1 - index)
        means.append((x, (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)))
    return means


def smoothing_window(count: int) -> int:
    """Over how many points a line of ``count`` points is averaged: an odd number, 1 for a line without a mean."""
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
        title, unit: the heading, with the unit in small print.
        series: the lines; values that are not finite, or beyond ``LARGEST``, are left out and counted in a sentence.
        definitions: what the drawn keys mean, folded away.
        x_name: what x is; the axis of ``step`` starts at 0.
        alarms, best: steps with a mark on the x axis.
    """
    lost = sum(not abs(y) <= LARGEST for one in series for _, y in one.points)
    drawn = _finite(series)
    if not drawn:
        return Markup("")
    chart = _chart(title, drawn, x_name, alarms, best)
    last = f"{x_name} {max(one.points[-1][0] for one in drawn):.10g}"
    legend = [(one, number(one.points[-1][1])) for one in drawn]
    return macros().figure(title, unit, last, definitions, legend, lost, chart)


def image(charts: Mapping[str, Sequence[Series]], x_name: str) -> str:
    """Charts side by side, by their titles, as one SVG file that also programs other than browsers show."""
    drawn = {title: _finite(series) for title, series in charts.items()}
    rows = [
        (title, series, _chart(title, series, x_name, size=Markup('width="360" height="190" ')))
        for title, series in drawn.items()
        if series
    ]
    height = 226 + 14 * max((len(series) for _, series, _ in rows), default=0)
    return (
        templates()
        .get_template("charts.svg")
        .render(charts=rows, height=height, style=_style_of_images())
    )


def _finite(series: Sequence[Series]) -> list[Series]:
    """The series without values that are not finite, or beyond ``LARGEST``, and without those that have no other."""
    finite = [
        one._replace(points=[point for point in one.points if abs(point[1]) <= LARGEST])
        for one in series
    ]
    return [one for one in finite if one.points]


def _chart(
    title: str,
    series: Sequence[Series],
    x_name: str,
    alarms: Sequence[int] = (),
    best: int | None = None,
    size: str = "",
) -> Markup:
    """The SVG element of ``figure``."""
    xs = [x for one in series for x, _ in one.points] + [0.0] * (x_name == "step")
    ys = [
        y + sign * one.errors.get(x, 0.0)
        for one in series
        for x, y in one.points
        for sign in (-1, 1)
    ]
    y = Axis(*_with_margin(min(ys), max(ys)), BOTTOM, TOP)
    left = max(LEFT, math.ceil(DIGIT * max(len(text) for _, text in y.ticks)) + 8)
    x = Axis(
        min(xs), max(xs) if max(xs) > min(xs) else min(xs) + max(1.0, abs(min(xs))), left, RIGHT
    )
    data = {
        "x": x,
        "y": y,
        "xName": x_name,
        "series": [(one.name, _thin_out(one.points)) for one in series],
    }
    label = f"{title}: {', '.join(one.name for one in series)}"
    lines = [_line(one, x, y) for one in series]
    return macros().chart(label, json.dumps(data), x, y, x_name, lines, alarms, best, size)


@cache
def _style_of_images() -> str:
    """The rules of ``style.css`` for charts in its light colours, without the variables that only browsers know."""
    css = str(templates().globals["style"])
    colours = dict(re.findall(r"--(\w+): light-dark\((#\w+)", css.partition("\n.c0")[0]))
    rules = [rule for rule in css.splitlines() if re.match(r"circle|\.chart [^{]", rule)]
    rules = [
        re.sub(r"(stroke|fill|stroke-dasharray): var\(--(c|dash)\);? ?", "", rule) for rule in rules
    ]
    rules = [re.sub(r"var\(--(\w+)\)", lambda match: colours[match[1]], rule) for rule in rules]
    for name, colour, dash in re.findall(
        r"^\.(c\d) \{ --c: light-dark\((#\w+),.*?\);(?: --dash: ([\d ]+);)? \}", css, re.M
    ):
        rules.append(f".{name} path {{ fill: none; stroke: {colour}; stroke-width: 1.8; }}")
        rules.append(f".{name} circle {{ fill: {colour}; stroke: {colour}; }}")
        rules += [f".{name} .line {{ stroke-dasharray: {dash}; }}"] * bool(dash)
    return "\n".join(["text { fill: #16181d; }", *rules])


@cache
def templates() -> Environment:
    """The pages' templates, with style, scripts and their SHA-256; whatever is not marked as HTML is escaped."""
    loader = PackageLoader("rl_caption.programs.report")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    for name in ("style.css", "report.js", "web.js"):
        text = (
            resources.files("rl_caption.programs.report").joinpath(name).read_text(encoding="utf-8")
        )
        stem = name.partition(".")[0]
        environment.globals[stem] = Markup(text)
        environment.globals[f"{stem}_digest"] = base64.b64encode(
            hashlib.sha256(text.encode()).digest()
        ).decode()
    return environment


def macros() -> Any:
    """The macros of ``macros.html``, which escape the text that they are given and return HTML."""
    return templates().get_template("macros.html").module


def _tidy(number: str) -> str:
    return number.replace("e-0", "e-").replace("e+0", "e").replace("-", "−")


def _with_margin(low: float, high: float) -> tuple[float, float]:
    """A range with a margin around [low, high]; 0 is in it where it is near."""
    if high - low <= max(1 / LARGEST, 1e-12 * abs(low)):
        return (
            (low - abs(low) / 10, high + abs(high) / 10) if abs(low) > 1 / LARGEST else (0.0, 1.0)
        )
    low = 0.0 if 0 < low < 0.35 * high else low
    high = 0.0 if 0.35 * low < high < 0 else high
    margin = 0.06 * (high - low)
    return low - margin * (low != 0), high + margin


def _thin_out(points: Sequence[Point]) -> Sequence[Point]:
    if len(points) <= MAX_POINTS:
        return points
    stretch = math.ceil(len(points) / (MAX_POINTS // 2))
    kept: list[Point] = []
    for first in range(0, len(points), stretch):
        stretch_points = points[first : first + stretch]
        kept += sorted(
            {
                min(stretch_points, key=lambda point: point[1]),
                max(stretch_points, key=lambda point: point[1]),
            }
        )
    return kept


def _line(series: Series, x: Axis, y: Axis) -> dict[str, Any]:
    """Coordinates: ``paths`` (the thin line first, where a running mean is drawn over it), ``dots``, error ``bars``."""
    window = 1 if series.dots else smoothing_window(len(series.points))
    lines = [series.points, *([running_mean(series.points, window)] if window > 1 else [])]
    drawn_points = _thin_out(series.points) if series.dots or len(series.points) == 1 else []
    errors, (first_x, first_y) = series.errors, series.points[0]
    return {
        "colour": f"c{series.colour % 8}",
        "paths": [
            "M" + "L".join(f"{x.at(a)} {y.at(b)}" for a, b in _thin_out(points)) for points in lines
        ],
        "dots": [(x.at(a), y.at(b), a == 0) for a, b in drawn_points],
        "bars": [
            (x.at(a), y.at(b - errors[a]), y.at(b + errors[a]))
            for a, b in drawn_points
            if a in errors
        ],
        "start": y.at(first_y) if series.dots and first_x == 0 else None,
    }


METRICS_PAGE = Path(__file__).resolve().with_name("metrics.md")
"""The tables of docs/metrics.md: in the repository a link to them, in an installed package a copy."""


class Definition(NamedTuple):
    """What a logged key means, as plain text."""

    key: str
    meaning: str
    unit: str
    range: str


class Panel(NamedTuple):
    """One chart: its heading and title, and the logged keys it shows -> their names in the legend."""

    heading: str
    title: str
    keys: Mapping[str, str]


HACKING = {
    "hacking/repeated_ngrams": "Repeated bigrams",
    "hacking/bad_endings": "Captions that break off",
    "hacking/duplicates": "Duplicated captions",
    "hacking/vocabulary": "Vocabulary",
    "hacking/diversity": "Lexical diversity (HD-D)",
    "hacking/length_ratio": "Length over that of references",
}
SPEED = "Optimisation and speed"
TOTALS = ("reward/total", "reward/greedy", "val/reward")
TIMES = {
    "time/step": "all",
    "time/rollout": "rollout",
    "time/reward": "reward",
    "time/update": "update",
}
FIXED = (
    Panel(
        "Reward",
        "Advantage (reward less its baseline)",
        {"advantage/abs": "absolute", "advantage/mean": "mean"},
    ),
    Panel("Reward", "Reward spread among samples", {"reward/std": "samples"}),
    Panel("Reward", "Images without a signal", {"advantage/zero_fraction": "share"}),
    Panel("Held-out judges", "CIDEr-D (x100)", {"val/cider": "validation"}),
    *(
        Panel("Signs of hacking", title, {key: "samples", f"val/{key}": "validation"})
        for key, title in HACKING.items()
    ),
    Panel("Policy", "KL to the starting policy", {"policy/kl": "samples"}),
    Panel("Policy", "Entropy", {"policy/entropy": "samples"}),
    Panel(
        "Policy",
        "Length",
        {"completion/length": "samples, tokens", "val/length": "validation, words"},
    ),
    Panel("Policy", "Captions that end by themselves", {"completion/eos_fraction": "samples"}),
    Panel(
        SPEED, "Loss", {"loss/total": "total", "loss/policy": "policy", "loss/xe": "cross-entropy"}
    ),
    Panel(SPEED, "Gradient norm", {"grad/norm": "before clipping"}),
    Panel(SPEED, "Learning rate", {"train/lr": "learning rate"}),
    Panel(SPEED, "Time of a step", TIMES),
    Panel(SPEED, "Images per second", {"train/images_per_second": "training"}),
    Panel(SPEED, "Time of a validation", {"val/seconds": "validation"}),
)
"""The charts of keys that are known beforehand."""


def curves(systems: Mapping[str, Sequence[RunFolder]]) -> Markup:
    """The charts of runs; empty where nothing has been logged.

    The charts of a single run show every logged key. With several systems a chart shows one key, with a line for each
    system: the mean over its runs (one run for each seed).
    """
    runs = [run for seeds in systems.values() for run in seeds if run.lines]
    if not runs:
        return Markup("")
    run, single = runs[0], len(systems) == 1 == len(runs)
    figures: dict[str, list[Markup]] = {}
    for panel in _panels(runs, single):
        keys = {
            key: name for key, name in panel.keys.items() if any(key in run.keys for run in runs)
        }
        if single:
            first = next(iter(keys), "")
            keys = {
                key: name for key, name in keys.items() if key == first or not run.equal(key, first)
            }
            lines = [
                Series(name, _points_of(key, run, runs), dots=key.startswith("val/"))
                for key, name in keys.items()
            ]
            colours = iter((0, 2, 3, 4))
            lines = [line._replace(colour=1 if line.dots else next(colours)) for line in lines]
            drawn = _figure(panel.title, keys, lines, run.alarms, run.best_step)
        else:
            key = next((key for key in keys if key.startswith("val/")), next(iter(keys), ""))
            means = {name: _mean_over_seeds(key, seeds, runs) for name, seeds in systems.items()}
            dots = key.startswith("val/")
            drawn = _figure(
                panel.title, [key], [Series(*line, n, dots) for n, line in enumerate(means.items())]
            )
        if drawn:
            figures.setdefault(panel.heading, []).append(drawn)
    note = macros().reading_note(
        run, smoothing_window(len(run.series("loss/total"))), not definitions(), not single
    )
    return note + Markup("").join(
        macros().charts(panels, heading) for heading, panels in figures.items()
    )


def _panels(runs: Sequence[RunFolder], single: bool) -> list[Panel]:
    """The charts in their order; without keys that equal another in every run that has it."""
    keys = dict.fromkeys(key for run in runs for key in run.keys if key not in run.doubles)
    samples, validation = (
        {"reward/total": "samples", "reward/greedy": "greedy baseline"},
        {"val/reward": "validation"},
    )
    title = _with_factor("Reward", "reward/total", runs)
    panels = [Panel("Reward", title, samples | validation)]
    if not single or runs[0].config.get("reward", {}).get("normalize", "none") != "none":
        panels = [
            Panel("Reward", f"{title} of samples (comparable where rewards are the same)", samples)
        ]
        panels += [Panel("Reward", f"{title} on the validation split", validation)]
    terms = [
        key for key in keys if key.startswith("reward/") and key not in {*samples, "reward/std"}
    ]
    if len(terms) > 1 or not all(run.equal(key, "reward/total") for key in terms for run in runs):
        for key in terms:
            title = _with_factor(f"Term {key.removeprefix('reward/')}", key)
            panels.append(Panel("Reward", title, {key: "samples", f"val/{key}": "validation"}))
    panels += FIXED
    judges = {
        key: _with_factor(key.removeprefix("val/judge/"), key)
        for key in keys
        if key.startswith("val/judge/")
    }
    panels += [Panel("Held-out judges", name, {key: "validation"}) for key, name in judges.items()]
    drawn = {"hacking/alarm", *terms, *(f"val/{key}" for key in terms)}.union(
        *(panel.keys for panel in panels)
    )
    for key in keys:
        if key not in drawn:
            heading, legend = (
                ("Validation", "validation") if key.startswith("val/") else ("Other", "training")
            )
            panels.append(Panel(heading, title_of(key), {key: legend}))
    return panels


def title_of(key: str) -> str:
    """What a validation key is called in tables."""
    titles = {"val/cider": "CIDEr-D (x100)"} | {
        f"val/{key}": title for key, title in HACKING.items()
    }
    prefix, _, name = key.removeprefix("val/").partition("/")
    plain = {"judge": f"Judge {name}", "reward": f"Reward term {name}"}.get(
        prefix if name else "", prefix.replace("_", " ")
    )
    return titles.get(key, _with_factor(plain[:1].upper() + plain[1:], key))


def _with_factor(title: str, key: str, runs: Iterable[RunFolder] = ()) -> str:
    return f"{title} (x100)" if factor_in(runs, key) != 1 else title


def factor_in(runs: Iterable[RunFolder], key: str) -> float:
    """``factor_of`` a key on a page of ``runs``: 100 also for the reward, if that of all of them is CIDEr-D alone."""
    alone = [run.rewards_cider_alone for run in runs] if key in TOTALS else []
    return 100.0 if alone and all(alone) else factor_of(key)


def _points_of(key: str, run: RunFolder, runs: Iterable[RunFolder]) -> list[Point]:
    """The points of a key as they are shown on a page of ``runs``, CIDEr-D times 100."""
    return [(step, factor_in(runs, key) * value) for step, value in run.series(key)]


@cache
def definitions() -> Sequence[Definition]:
    """The rows of the tables in ``METRICS_PAGE`` (key, meaning, unit, range); empty where the page is missing."""
    page = METRICS_PAGE.read_text(encoding="utf-8") if METRICS_PAGE.is_file() else ""
    page = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", page)
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    return [
        Definition(key, *(text.replace("`", "").replace("\\|", "|") for text in texts))
        for key, *texts in rows
    ]


def define(key: str) -> Definition | None:
    """The definition of a key as it is shown; ``reward/cider`` has that of ``reward/<term>``."""
    exact = [definition for definition in definitions() if definition.key == key]
    patterns = [
        definition
        for definition in definitions()
        if "<" in definition.key and key.startswith(definition.key.partition("<")[0])
    ]
    changes = {"range": "0 to 1000, times 100"} if factor_of(key) != 1 else {}
    return next((definition._replace(key=key, **changes) for definition in exact + patterns), None)


def _figure(
    title: str,
    keys: Iterable[str],
    lines: Sequence[Series],
    alarms: Sequence[int] = (),
    best: int | None = None,
) -> Markup:
    meanings = [definition for definition in map(define, keys) if definition is not None]
    unit = meanings[0].unit if meanings else ""
    if ";" in unit or unit in (
        "1",
        "the judge's",
    ):  # a unit that depends on the task stands in the definition only
        unit = ""
    return figure(title, lines, unit.partition(" (")[0], meanings, alarms=alarms, best=best)


def _mean_over_seeds(
    key: str, seeds: Sequence[RunFolder], runs: Sequence[RunFolder]
) -> list[Point]:
    """At every step, the mean over the seeds that logged it."""
    by_step: dict[float, list[float]] = {}
    for run in seeds:
        for step, value in _points_of(key, run, runs):
            by_step.setdefault(step, []).append(value)
    return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]
