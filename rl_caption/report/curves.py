"""Which charts show a run, or several runs together, and what their keys mean."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from rl_caption.report.charts import Marks, Point, Series, figure, parts, smoothing_window
from rl_caption.report.read import RunFolder

METRICS_PAGE = Path(__file__).resolve().with_name("metrics.md")
"""The tables of docs/metrics.md: in the repository a link to them, in an installed package a copy."""
PER_SECOND = "Steps per second"
SPEED = "Optimisation and speed"


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


TITLES = {
    "val/retrieval_r1": "Retrieval, recall at 1",
    "val/i2t_r1": "Image to caption, recall at 1",
    "val/t2i_r1": "Caption to image, recall at 1",
    "val/specificity": "Specificity",
    "val/specificity_positive": "Specificity: a true detail more",
    "val/specificity_negative": "Specificity: a false detail more",
    "val/teacher_cosine_image": "Cosine to the teacher, images",
    "val/teacher_cosine_text": "Cosine to the teacher, captions",
}
"""Validation keys of reward models -> what they are called."""
HACKING = {
    "hacking/repeated_ngrams": "Repeated bigrams",
    "hacking/bad_endings": "Captions that break off",
    "hacking/duplicates": "Duplicated captions",
    "hacking/vocabulary": "Vocabulary",
    "hacking/diversity": "Lexical diversity (HD-D)",
    "hacking/length_ratio": "Length over that of references",
}
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
    Panel(
        SPEED,
        "Time of a step",
        {"time/step": "all", "time/rollout": "rollout", "time/reward": "reward", "time/update": "update"},
    ),
    Panel(SPEED, "Images per second", {"train/images_per_second": "training"}),
    Panel(SPEED, "Time of a validation", {"val/seconds": "validation"}),
    Panel(SPEED, PER_SECOND, {"time/step": "steps per second"}),
)


def run_panels(run: RunFolder) -> dict[str, list[Panel]]:
    """Heading -> the charts of a run: every logged key in one of them, except those that equal another."""
    keys = list(dict.fromkeys(key for line in run.lines for key in line if key not in ("step", "hacking/alarm")))
    together = run.config.get("reward", {}).get("normalize", "none") == "none"
    samples, validation = {"reward/total": "samples", "reward/greedy": "greedy baseline"}, {"val/reward": "validation"}
    wanted = [Panel("Reward", "Reward", samples | validation)]
    if not together:
        wanted = [
            Panel("Reward", "Reward, normalised per term", samples),
            Panel("Reward", "Reward on the validation split", validation),
        ]
    terms = [key for key in keys if key.startswith("reward/") and key not in (*samples, "reward/std")]
    judges = [key for key in keys if key.startswith("val/judge/")]
    for key in terms:
        title = f"Term {key.removeprefix('reward/')}"
        wanted.append(Panel("Reward", title, {key: "samples", f"val/{key}": "validation"}))
    wanted += FIXED
    wanted += [Panel("Held-out judges", key.removeprefix("val/judge/"), {key: "validation"}) for key in judges]
    placed = {key for panel in wanted for key in panel.keys}
    for key in keys:
        if key not in placed:
            heading, legend = ("Validation", "validation") if key.startswith("val/") else ("Other", "training")
            wanted.append(Panel(heading, TITLES.get(key, key), {key: legend}))
    doubles = {key for key in judges if run.equal(key, "val/cider")}
    doubles |= {"loss/policy"} if run.equal("loss/policy", "loss/total") else set()
    if len(terms) == 1 and together and run.equal(terms[0], "reward/total"):
        doubles |= {terms[0], f"val/{terms[0]}"}
    return _by_heading(wanted, set(keys) - doubles)


def compared_panels(runs: Sequence[RunFolder]) -> dict[str, list[Panel]]:
    """Heading -> charts of one key each: of what compares between runs of different rewards."""
    keys = list(dict.fromkeys(key for run in runs for line in run.lines for key in line))
    judges = {key: key.removeprefix("val/judge/") for key in distinct_judges(runs)}
    validation = {"val/cider": "CIDEr-D"} | judges | {key: TITLES[key] for key in keys if key in TITLES}
    rewards = {
        "reward/total": "Reward (of each run, not comparable if rewards differ)",
        "val/reward": "Reward, validation",
        "advantage/abs": "Advantage, absolute",
    }
    signs = {f"val/{key}" if f"val/{key}" in keys else key: title for key, title in HACKING.items()}
    policy = {"policy/kl": "KL to the starting policy", "policy/entropy": "Entropy", "completion/length": "Length"}
    speed = {"loss/total": "Loss", "grad/norm": "Gradient norm", "train/lr": "Learning rate", "time/step": PER_SECOND}
    headings = {"Validation": validation, "Reward": rewards, "Signs of hacking": signs, "Policy": policy, SPEED: speed}
    wanted = [Panel(name, title, {key: ""}) for name, titles in headings.items() for key, title in titles.items()]
    return _by_heading(wanted, set(keys))


def distinct_judges(runs: Sequence[RunFolder]) -> list[str]:
    """Keys of the judges in validations, without one that is CIDEr-D in every run that has it."""
    keys = dict.fromkeys(key for run in runs for line in run.lines for key in line if key.startswith("val/judge/"))
    return [key for key in keys if not all(run.equal(key, "val/cider") for run in runs if run.series(key))]


def run_curves(run: RunFolder) -> Markup:
    """All charts of a run, with a note on how to read them."""
    marks = Marks(run.alarms, run.state.get("best_step") or None)
    body = parts().note(reading_note(run))
    if not definitions():
        lost = "This installation lacks the definitions of logged keys; they are in docs/metrics.md of the source."
        body += parts().note(lost)
    for heading, panels in run_panels(run).items():
        body += parts().charts([_figure(panel, _series_of(run, panel), marks) for panel in panels], heading)
    return body


def reading_note(run: RunFolder) -> str:
    """How to read the charts of a run."""
    notes = ["Across: optimizer steps. Lines with dots are validations."]
    if any(line["step"] == 0 for line in run.lines):
        what = "model" if "task" in run.config else "policy"
        notes.append(f"The hollow dot and the dotted line are step 0, the {what} that training started from.")
    if run.state.get("best_step"):
        notes.append("The small triangle on the axis is the best validation.")
    if run.alarms:
        notes.append("The flags at the top are alarms of reward hacking, with a line at the first.")
    window = smoothing_window(len(run.series("loss/total")))
    if window > 1:
        notes.append(f"Thin lines are what was logged, thick ones its mean over {window} log lines.")
    return " ".join([*notes, "Touch a chart, or go to it with Tab and use the arrow keys, to read values."])


def compared_curves(systems: Mapping[str, Sequence[RunFolder]]) -> Markup:
    """The same keys of several systems in one chart each; of several seeds the mean over those that have a step.

    Args:
        systems: name of a system -> its runs, one a seed.
    """
    every = [run for seeds in systems.values() for run in seeds]
    if not every:
        return Markup("")
    means = ", its mean over seeds" if len(every) > len(systems) else ""
    body = parts().note(f"A line for each system{means}. Lines with dots are validations.")
    for heading, panels in compared_panels(every).items():
        figures = []
        for panel in panels:
            (key,) = panel.keys
            lines = [
                Series(name, _mean_over_seeds(panel, key, seeds), index, key.startswith("val/"))
                for index, (name, seeds) in enumerate(systems.items())
            ]
            figures.append(_figure(panel, lines))
        body += parts().charts(figures, heading)
    return body


def title_of(key: str) -> str:
    """What a validation key is called in tables."""
    titles = TITLES | {"val/cider": "CIDEr-D"} | {f"val/{key}": title for key, title in HACKING.items()}
    plain = key.removeprefix("val/").replace("judge/", "judge ").replace("reward/", "reward term ")
    return titles.get(key, plain.capitalize())


@cache
def definitions() -> Sequence[Definition]:
    """Those of ``METRICS_PAGE``; empty where it is not there."""
    return parse_definitions(METRICS_PAGE.read_text(encoding="utf-8")) if METRICS_PAGE.is_file() else ()


def parse_definitions(page: str) -> list[Definition]:
    """Definitions in a Markdown page with tables of four columns: key, meaning, unit, range."""
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    return [Definition(key, *(_without_markdown(text) for text in texts)) for key, *texts in rows]


def define(key: str) -> Definition | None:
    """The definition of a key; ``reward/cider`` has that of ``reward/<term>``."""
    exact = next((found for found in definitions() if found.key == key), None)
    patterns = (found for found in definitions() if "<" in found.key and key.startswith(found.key.partition("<")[0]))
    found = exact or next(patterns, None)
    return found and found._replace(key=key)


def _without_markdown(text: str) -> str:
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("`", "").replace("\\|", "|").strip()


def _by_heading(panels: Sequence[Panel], known: set[str]) -> dict[str, list[Panel]]:
    """Panels in the order of their headings, with the keys that are known; those without any are left out."""
    found: dict[str, list[Panel]] = {panel.heading: [] for panel in panels}
    for panel in panels:
        keys = {key: name for key, name in panel.keys.items() if key in known}
        if keys:
            found[panel.heading].append(panel._replace(keys=keys))
    return {heading: panels for heading, panels in found.items() if panels}


def _figure(panel: Panel, lines: Sequence[Series], marks: Marks | None = None) -> Markup:
    meanings = [found for found in map(define, panel.keys) if found is not None]
    unit = meanings[0].unit if meanings else ""
    if ";" in unit or unit in ("1", "the judge's"):  # a unit that depends on the task stands in the definition only
        unit = ""
    unit = "steps / s" if panel.title == PER_SECOND else unit.partition(" (")[0]
    return figure(panel.title, lines, unit, meanings, marks=marks)


def _series_of(run: RunFolder, panel: Panel) -> list[Series]:
    """Lines of a panel: validations in colour 1, the others in 0, 2, 3 and 4."""
    colours = iter((0, 2, 3, 4))
    return [
        Series(name, _points(run, panel, key), 1 if key.startswith("val/") else next(colours), key.startswith("val/"))
        for key, name in panel.keys.items()
    ]


def _points(run: RunFolder, panel: Panel, key: str) -> list[Point]:
    return [(step, 1 / value if panel.title == PER_SECOND else value) for step, value in run.series(key)]


def _mean_over_seeds(panel: Panel, key: str, seeds: Sequence[RunFolder]) -> list[Point]:
    by_step: dict[float, list[float]] = {}
    for run in seeds:
        for step, value in _points(run, panel, key):
            by_step.setdefault(step, []).append(value)
    return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]
