"""The charts of runs: which logged keys are drawn together, what they are called, and what they mean."""

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
SAMPLED = {"reward/total": "samples", "reward/greedy": "greedy baseline"}
VALIDATED = {"val/reward": "validation"}
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


def run_curves(run: RunFolder) -> Markup:
    """Every logged key of a run in one of its charts, with a note on how to read them."""
    together = run.config.get("reward", {}).get("normalize", "none") == "none"
    panels = [Panel("Reward", "Reward", SAMPLED | VALIDATED)]
    if not together:
        panels = [Panel("Reward", "Reward, normalised per term", SAMPLED)]
        panels += [Panel("Reward", "Reward on the validation split", VALIDATED)]
    terms = [key for key in run.keys if key.startswith("reward/") and key not in {*SAMPLED, "reward/std"}]
    for key in terms:
        title = f"Term {key.removeprefix('reward/')}"
        panels.append(Panel("Reward", title, {key: "samples", f"val/{key}": "validation"}))
    panels += [*FIXED, *_judge_panels([run])]
    drawn = {"hacking/alarm", *run.doubles, *(key for panel in panels for key in panel.keys)}
    for key in run.keys:
        if key not in drawn:
            heading, legend = ("Validation", "validation") if key.startswith("val/") else ("Other", "training")
            panels.append(Panel(heading, title_of(key), {key: legend}))
    known = set(run.keys) - run.doubles
    if run.equal("loss/policy", "loss/total"):
        known.remove("loss/policy")
    if len(terms) == 1 and together and run.equal(terms[0], "reward/total"):
        known -= {terms[0], f"val/{terms[0]}"}
    figures: dict[str, list[Markup]] = {panel.heading: [] for panel in panels}
    for panel in panels:
        colours = iter((0, 2, 3, 4))  # validations are 1
        keys = {key: name for key, name in panel.keys.items() if key in known}
        lines = [
            Series(name, run.series(key), *((1, True) if key.startswith("val/") else (next(colours), False)))
            for key, name in keys.items()
        ]
        figures[panel.heading].append(_figure(panel.title, keys, lines, run.alarms, run.best_step))
    window = smoothing_window(len(run.series("loss/total")))
    return parts().reading_note(run, window, not definitions()) + _charts(figures) if run.lines else Markup("")


def compared_curves(systems: Mapping[str, Sequence[RunFolder]]) -> Markup:
    """A chart for each key that compares between runs; a line is the mean over a system's runs, one for each seed."""
    runs = [run for seeds in systems.values() for run in seeds]
    if not runs:
        return Markup("")
    panels = [Panel("Reward", "Reward of samples (comparable where rewards are the same)", {"reward/total": ""})]
    panels += [Panel("Reward", "Reward, validation", VALIDATED), *FIXED, *_judge_panels(runs)]
    drawn = {key for panel in panels for key in panel.keys}
    others = dict.fromkeys(key for run in runs for key in run.keys if key.startswith("val/") and key not in drawn)
    panels += [Panel("Validation", title_of(key), {key: ""}) for key in others if not key.startswith("val/judge/")]
    figures: dict[str, list[Markup]] = {panel.heading: [] for panel in panels}
    for panel in panels:
        keys = [key for key in panel.keys if any(key in run.keys for run in runs)]
        if keys:
            key = next((key for key in keys if key.startswith("val/")), keys[0])
            lines = [
                Series(name, _mean_over_seeds(key, seeds), index, key.startswith("val/"))
                for index, (name, seeds) in enumerate(systems.items())
            ]
            figures[panel.heading].append(_figure(panel.title, [key], lines))
    means = ", its mean over seeds" if len(runs) > len(systems) else ""
    return parts().note(f"A line for each system{means}. Lines with dots are validations.") + _charts(figures)


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


def _judge_panels(runs: Sequence[RunFolder]) -> list[Panel]:
    """The judges of validations, without those that are CIDEr-D in every run that has them."""
    judges = dict.fromkeys(key for run in runs for key in run.keys if key not in run.doubles)
    prefix = "val/judge/"
    return [
        Panel("Held-out judges", key.removeprefix(prefix), {key: "validation"})
        for key in judges
        if key.startswith(prefix)
    ]


def _figure(
    title: str, keys: Iterable[str], lines: Sequence[Series], alarms: Sequence[int] = (), best: int | None = None
) -> Markup:
    meanings = [found for found in map(define, keys) if found is not None]
    unit = meanings[0].unit if meanings else ""
    if ";" in unit or unit in ("1", "the judge's"):  # a unit that depends on the task stands in the definition only
        unit = ""
    return figure(title, lines, unit.partition(" (")[0], meanings, alarms=alarms, best=best)


def _charts(figures: Mapping[str, Sequence[Markup]]) -> Markup:
    shown = {heading: [one for one in found if one] for heading, found in figures.items()}
    return Markup("").join(parts().charts(found, heading) for heading, found in shown.items() if found)


def _mean_over_seeds(key: str, seeds: Sequence[RunFolder]) -> list[Point]:
    """At every step, the mean over the seeds that logged it."""
    by_step: dict[float, list[float]] = {}
    for run in seeds:
        for step, value in run.series(key):
            by_step.setdefault(step, []).append(value)
    return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]
