"""Which charts show a run, or several runs together: panels of one unit each, in groups."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rl_caption.report.chart import Marks, Point, Series, smoothing_window
from rl_caption.report.figure import figure
from rl_caption.report.folders import RunFolder
from rl_caption.report.glossary import Definition, define, definitions, definitions_note
from rl_caption.report.markup import Markup, element, join

TRAINING, VALIDATION = 0, 1
"""Colours: samples in training, greedy captions of the validation split."""
STEPS_PER_SECOND = "steps per second"


@dataclass(frozen=True)
class Panel:
    """One chart.

    Attributes:
        title: for people.
        keys: logged keys it shows -> name in the legend.
        derived: from the logged value to what is shown.
    """

    title: str
    keys: Mapping[str, str]
    derived: Callable[[float], float] | None = None


@dataclass
class _Groups:
    """Panels by heading, of the keys that a run has; remembers which keys are shown."""

    known: set[str]
    shown: set[str] = field(default_factory=set)
    groups: dict[str, list[Panel]] = field(default_factory=dict)

    def add(self, group: str, title: str, keys: Mapping[str, str]) -> None:
        present = {key: name for key, name in keys.items() if key in self.known}
        if present:
            self.groups.setdefault(group, []).append(Panel(title, present))
            self.shown |= present.keys()


def run_panels(run: RunFolder) -> dict[str, list[Panel]]:
    """Heading -> panels, every logged key in one of them."""
    keys = list(dict.fromkeys(key for line in run.lines for key in line if key not in ("step", "hacking/alarm")))
    found = _Groups(set(keys))
    together = run.config.get("reward", {}).get("normalize", "none") == "none"
    reward = {"reward/total": "samples", "reward/greedy": "greedy baseline"}
    if together:
        found.add("Reward", "Reward", reward | {"val/reward": "validation"})
    else:
        found.add("Reward", "Reward, normalised per term", reward)
        found.add("Reward", "Reward on the validation split", {"val/reward": "validation"})
    terms = [key.removeprefix("reward/") for key in keys if key.startswith("reward/")]
    terms = [term for term in terms if term not in ("total", "std", "greedy")]
    for term in terms:
        pair = {f"reward/{term}": "samples", f"val/reward/{term}": "validation"}
        if len(terms) == 1 and together and same(run, f"reward/{term}", "reward/total"):
            found.shown |= pair.keys()  # the term is the reward
        else:
            found.add("Reward", f"Term {term}", pair)
    found.add("Reward", "Advantage (reward less its baseline)", {"advantage/abs": "absolute", "advantage/mean": "mean"})
    found.add("Reward", "Reward spread among samples", {"reward/std": "samples"})
    found.add("Reward", "Images without a signal", {"advantage/zero_fraction": "share"})
    judges = "Held-out judges"
    found.add(judges, "CIDEr-D", {"val/cider": "validation"})
    for key in keys:
        if key.startswith("val/judge/"):
            if same(run, key, "val/cider"):
                found.shown.add(key)
            else:
                found.add(judges, key.removeprefix("val/judge/"), {key: "validation"})
    for group, title, wanted in FIXED:
        equal = {key for key in wanted if key == "loss/policy" and same(run, key, "loss/total")}
        found.add(group, title, {key: name for key, name in wanted.items() if key not in equal})
        found.shown |= equal
    for key in keys:
        if key not in found.shown:
            validated = key.startswith("val/")
            title = TITLES.get(key, key)
            found.add("Validation" if validated else "Other", title, {key: "validation" if validated else "training"})
    if "time/step" in found.known:
        speed = Panel(STEPS_PER_SECOND.capitalize(), {"time/step": STEPS_PER_SECOND}, lambda seconds: 1 / seconds)
        found.groups.setdefault("Optimisation and speed", []).append(speed)
    return found.groups


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

FIXED: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    *(
        (
            "Signs of hacking",
            title,
            {f"hacking/{key}": "samples", f"val/hacking/{key}": "validation"},
        )
        for key, title in (
            ("repeated_ngrams", "Repeated bigrams"),
            ("bad_endings", "Captions that break off"),
            ("duplicates", "Duplicated captions"),
            ("vocabulary", "Vocabulary"),
            ("diversity", "Lexical diversity (HD-D)"),
            ("length_ratio", "Length over that of references"),
        )
    ),
    ("Policy", "KL to the starting policy", {"policy/kl": "samples"}),
    ("Policy", "Entropy", {"policy/entropy": "samples"}),
    ("Policy", "Length", {"completion/length": "samples, tokens", "val/length": "validation, words"}),
    ("Policy", "Captions that end by themselves", {"completion/eos_fraction": "samples"}),
    ("Optimisation and speed", "Loss", {"loss/total": "total", "loss/policy": "policy", "loss/xe": "cross-entropy"}),
    ("Optimisation and speed", "Gradient norm", {"grad/norm": "before clipping"}),
    ("Optimisation and speed", "Learning rate", {"train/lr": "learning rate"}),
    (
        "Optimisation and speed",
        "Time of a step",
        {"time/step": "all", "time/rollout": "rollout", "time/reward": "reward", "time/update": "update"},
    ),
    ("Optimisation and speed", "Images per second", {"train/images_per_second": "training"}),
    ("Optimisation and speed", "Time of a validation", {"val/seconds": "validation"}),
)


def run_curves(run: RunFolder) -> Markup:
    """All charts of a run, with a note on how to read them."""
    best = run.state.get("best_step")
    marks = Marks(run.alarms, best if best else None)
    groups = []
    for heading, panels in run_panels(run).items():
        charts = [_panel(panel, _series_of(run, panel), marks) for panel in panels]
        groups.append(join(element("h3", heading), element("div", *charts, class_="charts")))
    lost = [element("p", definitions_note(), class_="note")] if definitions_note() else []
    return join(element("p", reading_note(run), class_="note"), *lost, *groups)


def reading_note(run: RunFolder) -> str:
    """How to read the charts of a run."""
    parts = ["Across: optimizer steps. Lines with dots are validations."]
    if any(line["step"] == 0 for line in run.lines):
        what = "model" if "task" in run.config else "policy"
        parts.append(f"The hollow dot and the dotted line are step 0, the {what} that training started from.")
    if run.state.get("best_step"):
        parts.append("The small triangle on the axis is the best validation.")
    if run.alarms:
        parts.append("The flags at the top are alarms of reward hacking, with a line at the first.")
    window = smoothing_window(len(run.series("loss/total")))
    if window > 1:
        parts.append(f"Thin lines are what was logged, thick ones its mean over {window} log lines.")
    return " ".join([*parts, "Touch a chart, or go to it with Tab and use the arrow keys, to read values."])


def compared_curves(runs: Mapping[str, Sequence[RunFolder]]) -> Markup:
    """The same keys of several systems in one chart each; of several seeds the mean over those that have a step.

    Args:
        runs: name of a system -> its runs, one a seed.
    """
    every = [run for seeds in runs.values() for run in seeds]
    if not every:
        return Markup("")
    many = any(len(seeds) > 1 for seeds in runs.values())
    text = "A line for each system" + (", its mean over seeds." if many else ".")
    groups = [element("p", text + " Lines with dots are validations.", class_="note")]
    for heading, keys in _compared_keys(every).items():
        charts = []
        for key, title in keys.items():
            derived = (lambda seconds: 1 / seconds) if title == STEPS_PER_SECOND else None
            panel = Panel(title, {key: ""}, derived)
            series = [
                Series(name, _mean_over_seeds(panel, key, seeds), index, key.startswith("val/"))
                for index, (name, seeds) in enumerate(runs.items())
            ]
            charts.append(_panel(panel, series, Marks()))
        groups.append(join(element("h3", heading), element("div", *charts, class_="charts")))
    return join(*groups)


def _compared_keys(runs: Sequence[RunFolder]) -> dict[str, dict[str, str]]:
    """Heading -> key -> title, of what compares between runs of different rewards."""
    keys = list(dict.fromkeys(key for run in runs for line in run.lines for key in line))
    judges = [key for key in keys if key.startswith("val/judge/") and not same_in_all(runs, key, "val/cider")]
    judged = {"val/cider": "CIDEr-D"} | {key: key.removeprefix("val/judge/") for key in judges}
    rewards = {
        "reward/total": "Reward (of each run, not comparable if rewards differ)",
        "val/reward": "Reward, validation",
    }
    rewards["advantage/abs"] = "Advantage, absolute"
    wanted = {
        "Validation": judged | {key: TITLES[key] for key in keys if key in TITLES},
        "Reward": rewards,
        "Signs of hacking": {f"val/{key}" if f"val/{key}" in keys else key: title for key, title in _HACKING.items()},
        "Policy": {
            "policy/kl": "KL to the starting policy",
            "policy/entropy": "Entropy",
            "completion/length": "Length",
        },
        "Optimisation and speed": {"loss/total": "Loss", "grad/norm": "Gradient norm", "train/lr": "Learning rate"}
        | {"time/step": STEPS_PER_SECOND},
    }
    found = {heading: {key: title for key, title in group.items() if key in keys} for heading, group in wanted.items()}
    return {heading: group for heading, group in found.items() if group}


_HACKING = {next(iter(keys)): title for group, title, keys in FIXED if group == "Signs of hacking"}


def _panel(panel: Panel, series: Sequence[Series], marks: Marks) -> Markup:
    meanings = _meanings(panel.keys)
    unit = "steps / s" if panel.derived else _short_unit(meanings[0][1].unit) if meanings else ""
    about = [
        element("p", element("code", key), f" {found.meaning} ({found.unit}; range {found.range})")
        for key, found in meanings
    ]
    return figure(panel.title, series, unit=unit, about=about, marks=marks)


def _short_unit(unit: str) -> str:
    """What fits below a heading; a unit that depends on the kind of training stands in the definition only."""
    return "" if ";" in unit or unit in ("1", "the judge's") else unit.partition(" (")[0]


def title_of(key: str) -> str:
    """What a validation key is called in tables."""
    titles = {key: title for _, title, keys in FIXED for key in keys if key.startswith("val/hacking/")}
    names = titles | TITLES | {"val/cider": "CIDEr-D"}
    return names.get(
        key, key.removeprefix("val/").replace("judge/", "judge ").replace("reward/", "reward term ").capitalize()
    )


def _meanings(keys: Mapping[str, str]) -> list[tuple[str, Definition]]:
    found = ((key, define(key, definitions())) for key in keys)
    return [(key, definition) for key, definition in found if definition is not None]


def _series_of(run: RunFolder, panel: Panel) -> list[Series]:
    found, colour = [], TRAINING
    taken = 0
    for key, name in panel.keys.items():
        validated = key.startswith("val/")
        if validated:
            colour = VALIDATION
        else:
            colour = (TRAINING, 2, 3, 4)[taken]
            taken += 1
        found.append(Series(name, _points(run, panel, key), colour, validated))
    return found


def _points(run: RunFolder, panel: Panel, key: str) -> list[Point]:
    return [(step, panel.derived(value) if panel.derived else value) for step, value in run.series(key)]


def _mean_over_seeds(panel: Panel, key: str, seeds: Sequence[RunFolder]) -> list[Point]:
    by_step: dict[float, list[float]] = {}
    for run in seeds:
        for step, value in _points(run, panel, key):
            by_step.setdefault(step, []).append(value)
    return [(step, statistics.fmean(values)) for step, values in sorted(by_step.items())]


def same_in_all(runs: Sequence[RunFolder], one: str, other: str) -> bool:
    """Whether ``same`` holds in every run that has ``one``."""
    having = [run for run in runs if run.series(one)]
    return bool(having) and all(same(run, one, other) for run in having)


def same(run: RunFolder, one: str, other: str) -> bool:
    """Whether two logged keys have one and the same values, wherever both were logged: one chart is enough."""
    return any(one in line and other in line for line in run.lines) and all(
        abs(line[one] - line[other]) < 1e-9 for line in run.lines if one in line and other in line
    )
