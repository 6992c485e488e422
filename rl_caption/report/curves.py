"""The charts of runs: which logged keys are drawn in one, what they are called, and what they mean."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from rl_caption.report.charts import Point, Series, figure, parts, smoothing_window
from rl_caption.report.read import RunFolder

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
TIMES = {"time/step": "all", "time/rollout": "rollout", "time/reward": "reward", "time/update": "update"}
FIXED = (
    Panel("Reward", "Advantage (reward less its baseline)", {"advantage/abs": "absolute", "advantage/mean": "mean"}),
    Panel("Reward", "Reward spread among samples", {"reward/std": "samples"}),
    Panel("Reward", "Images without a signal", {"advantage/zero_fraction": "share"}),
    Panel("Held-out judges", "CIDEr-D", {"val/cider": "validation"}),
    *(Panel("Signs of hacking", title, {key: "samples", f"val/{key}": "validation"}) for key, title in HACKING.items()),
    Panel("Policy", "KL to the starting policy", {"policy/kl": "samples"}),
    Panel("Policy", "Entropy", {"policy/entropy": "samples"}),
    Panel("Policy", "Length", {"completion/length": "samples, tokens", "val/length": "validation, words"}),
    Panel("Policy", "Captions that end by themselves", {"completion/eos_fraction": "samples"}),
    Panel(SPEED, "Loss", {"loss/total": "total", "loss/policy": "policy", "loss/xe": "cross-entropy"}),
    Panel(SPEED, "Gradient norm", {"grad/norm": "before clipping"}),
    Panel(SPEED, "Learning rate", {"train/lr": "learning rate"}),
    Panel(SPEED, "Time of a step", TIMES),
    Panel(SPEED, "Images per second", {"train/images_per_second": "training"}),
    Panel(SPEED, "Time of a validation", {"val/seconds": "validation"}),
)
"""The charts of keys that are known beforehand."""


def curves(systems: Mapping[str, Sequence[RunFolder]]) -> Markup:
    """The charts of a run, with every logged key in one of them; empty where nothing has been logged.

    Of several systems, charts of one key, with a line for each: the mean over its runs, one for each seed.
    """
    runs = [run for seeds in systems.values() for run in seeds if run.lines]
    if not runs:
        return Markup("")
    run, single = runs[0], len(systems) == 1 == len(runs)
    figures: dict[str, list[Markup]] = {}
    for panel in _panels(runs, single):
        keys = {key: name for key, name in panel.keys.items() if any(key in run.keys for run in runs)}
        if single:
            first = next(iter(keys), "")
            keys = {key: name for key, name in keys.items() if key == first or not run.equal(key, first)}
            lines = [Series(name, run.series(key), dots=key.startswith("val/")) for key, name in keys.items()]
            colours = iter((0, 2, 3, 4))
            lines = [line._replace(colour=1 if line.dots else next(colours)) for line in lines]
            drawn = _figure(panel.title, keys, lines, run.alarms, run.best_step)
        else:
            key = next((key for key in keys if key.startswith("val/")), next(iter(keys), ""))
            means = {name: _mean_over_seeds(key, seeds) for name, seeds in systems.items()}
            dots = key.startswith("val/")
            drawn = _figure(panel.title, [key], [Series(*line, n, dots) for n, line in enumerate(means.items())])
        if drawn:
            figures.setdefault(panel.heading, []).append(drawn)
    note = parts().reading_note(run, smoothing_window(len(run.series("loss/total"))), not definitions(), not single)
    return note + Markup("").join(parts().charts(found, heading) for heading, found in figures.items())


def _panels(runs: Sequence[RunFolder], single: bool) -> list[Panel]:
    """The charts in their order; without keys that equal another in every run that has it."""
    keys = dict.fromkeys(key for run in runs for key in run.keys if key not in run.doubles)
    samples, validation = {"reward/total": "samples", "reward/greedy": "greedy baseline"}, {"val/reward": "validation"}
    panels = [Panel("Reward", "Reward", samples | validation)]
    if not single or runs[0].config.get("reward", {}).get("normalize", "none") != "none":
        panels = [Panel("Reward", "Reward of samples (comparable where rewards are the same)", samples)]
        panels += [Panel("Reward", "Reward on the validation split", validation)]
    terms = [key for key in keys if key.startswith("reward/") and key not in {*samples, "reward/std"}]
    if len(terms) > 1 or not all(run.equal(key, "reward/total") for key in terms for run in runs):
        for key in terms:
            title = f"Term {key.removeprefix('reward/')}"
            panels.append(Panel("Reward", title, {key: "samples", f"val/{key}": "validation"}))
    panels += FIXED
    judges = {key: key.removeprefix("val/judge/") for key in keys if key.startswith("val/judge/")}
    panels += [Panel("Held-out judges", name, {key: "validation"}) for key, name in judges.items()]
    drawn = {"hacking/alarm", *terms, *(f"val/{key}" for key in terms)}.union(*(panel.keys for panel in panels))
    for key in keys:
        if key not in drawn:
            heading, legend = ("Validation", "validation") if key.startswith("val/") else ("Other", "training")
            panels.append(Panel(heading, title_of(key), {key: legend}))
    return panels


def title_of(key: str) -> str:
    """What a validation key is called in tables."""
    titles = {"val/cider": "CIDEr-D"} | {f"val/{key}": title for key, title in HACKING.items()}
    kind, _, name = key.removeprefix("val/").partition("/")
    plain = {"judge": f"Judge {name}", "reward": f"Reward term {name}"}.get(
        kind if name else "", kind.replace("_", " ")
    )
    return titles.get(key, plain[:1].upper() + plain[1:])


@cache
def definitions() -> Sequence[Definition]:
    """Of ``METRICS_PAGE``, whose tables have four columns: key, meaning, unit, range; empty where it is not there."""
    page = METRICS_PAGE.read_text(encoding="utf-8") if METRICS_PAGE.is_file() else ""
    page = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", page)
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    return [Definition(key, *(text.replace("`", "").replace("\\|", "|") for text in texts)) for key, *texts in rows]


def define(key: str) -> Definition | None:
    """The definition of a key; ``reward/cider`` has that of ``reward/<term>``."""
    exact = [found for found in definitions() if found.key == key]
    patterns = [found for found in definitions() if "<" in found.key and key.startswith(found.key.partition("<")[0])]
    return next((found._replace(key=key) for found in exact + patterns), None)


def _figure(
    title: str, keys: Iterable[str], lines: Sequence[Series], alarms: Sequence[int] = (), best: int | None = None
) -> Markup:
    meanings = [found for found in map(define, keys) if found is not None]
    unit = meanings[0].unit if meanings else ""
    if ";" in unit or unit in ("1", "the judge's"):  # a unit that depends on the task stands in the definition only
        unit = ""
    return figure(title, lines, unit.partition(" (")[0], meanings, alarms=alarms, best=best)


def _mean_over_seeds(key: str, seeds: Sequence[RunFolder]) -> list[Point]:
    """At every step, the mean over the seeds that logged it."""
    by_step: dict[float, list[float]] = {}
    for run in seeds:
        for step, value in run.series(key):
            by_step.setdefault(step, []).append(value)
    return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]
