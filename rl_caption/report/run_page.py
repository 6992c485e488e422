"""The report of one run, and of several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_caption.evaluation.judge import JUDGE
from rl_caption.report.alarms import alarm_word, monitor_section, verdicts
from rl_caption.report.chart import number
from rl_caption.report.folders import RunFolder
from rl_caption.report.gallery import MAX_IMAGES, Gallery, gallery_data, reference_scores
from rl_caption.report.markup import Markup, element, join, table
from rl_caption.report.page import Page, Section
from rl_caption.report.panels import TITLES, compared_curves, run_curves, same_in_all
from rl_caption.report.settings import settings_section
from rl_caption.report.sources import Source, rows_of_config
from rl_caption.report.tables import every_validation, run_results

SAME_AS = {"cider": "CIDEr-D", "rouge_l": "ROUGE-L"}
"""Judges by which the gallery scores captions already."""

TASKS = {
    "contrastive": "contrastive, image against caption",
    "positive_augmented": "contrastive, with generated images and captions",
    "specificity": "one more true detail scores higher",
    "distill_image": "distillation, image tower",
    "distill_text": "distillation, text tower",
    "distill_dual": "distillation, both towers",
}
"""``task`` of a reward model's configuration -> what a page calls it."""
HIGHER = ("val/retrieval_r1", "val/specificity", "val/teacher_cosine_image", "val/teacher_cosine_text")
"""What validations of reward models are compared by."""


def run_page(run: RunFolder, source: Source | None = None, images: int = MAX_IMAGES) -> Page:
    """The report of a run, finished or not.

    Args:
        run: as read.
        source: rows of the validation split; None reads the data that the run's configuration names.
        images: most images of the gallery.

    Raises:
        DataError, ReportError: damaged captions or judges' scores.
    """
    steps = run.shown_steps()
    gallery = None
    if steps:
        split = run.config.get("eval", {}).get("split", "val")
        source = source or rows_of_config(run.config.get("data"), split)
        gallery = gallery_data(_gallery(run, steps, source, split), images)
    curves = run_curves(run) if run.lines else element("p", "Nothing has been logged yet.", class_="note")
    return Page(
        title=run.name,
        subtitle=_subtitle(run),
        tiles=_tiles(run),
        sections=[
            Section("Monitor", monitor_section(run)),
            Section("Results", join(run_results(run, steps), every_validation(run))),
            Section("Curves", curves),
        ],
        gallery=gallery,
        after=[Section("Settings", settings_section({run.name: run}))],
    )


def compared_runs_page(runs: Mapping[str, RunFolder], source: Source | None = None, images: int = MAX_IMAGES) -> Page:
    """Several runs in one page: their best validations, curves over each other, captions of the same images.

    Args:
        runs: name -> run, at least two.
        source, images: as for ``run_page``; the first run's data is taken for all.
    """
    first = next(iter(runs.values()))
    split = first.config.get("eval", {}).get("split", "val")
    systems: dict[str, Mapping[str, str]] = {}
    start = first.shown_steps().get("start")
    if start is not None:
        systems["start"] = first.predictions(start)
    for name, run in runs.items():
        steps = run.shown_steps()
        if steps:
            systems[name] = run.predictions(steps.get("best", list(steps.values())[-1]))
    gallery = None
    if systems:
        source = source or rows_of_config(first.config.get("data"), split)
        note = "Each run with its best captions by validation" + (
            f"; start is step 0 of {first.name}." if start == 0 else "."
        )
        gallery = gallery_data(Gallery(systems, reference_scores(systems, source.rows), source, note), images)
    return Page(
        title=" / ".join(runs) if len(runs) < 4 else f"{len(runs)} runs",
        subtitle="Runs side by side",
        tiles=[],
        sections=[
            Section("Results", _compared_results(runs)),
            Section("Monitor", verdicts(dict(runs))),
            Section("Curves", compared_curves({name: [run] for name, run in runs.items()})),
        ],
        gallery=gallery,
        after=[Section("Settings", settings_section(runs))],
    )


def _gallery(run: RunFolder, steps: Mapping[str, int], source: Source, split: str) -> Gallery:
    names = {f"step {step} ({name})": step for name, step in steps.items()}
    systems = {name: run.predictions(step) for name, step in names.items()}
    scores = {metric: dict(found) for metric, found in reference_scores(systems, source.rows).items()}
    for name, step in names.items():
        for judge, found in run.judges(step).items():
            if SAME_AS.get(judge) not in scores:
                scores.setdefault(judge, {})[name] = found
    note = f"Greedy captions of split {split}. Words that the first policy did not say are marked."
    return Gallery(systems, scores, source, note)


def _subtitle(run: RunFolder) -> str:
    terms = run.config.get("reward", {}).get("terms", {})
    reward = " + ".join(f"{term.get('weight', 1):g} {name}" for name, term in terms.items())
    if reward:
        return f"Self-critical training on {reward}"
    task = run.config.get("task")
    if task is not None:
        return f"Training of a reward model: {TASKS.get(task, task)}"
    return "Cross-entropy training"


def _tiles(run: RunFolder) -> Sequence[tuple[str, str, str]]:
    tiles = []
    metric = run.state.get("metric") or next((key for key in ("val/cider", *HIGHER) if run.series(key)), "val/cider")
    values = run.series(metric)
    if values:
        step, best = max(values, key=lambda pair: pair[1])
        began = f"{number(values[0][1])} at step {values[0][0]}"
        tiles.append((f"best {_short(metric)}", number(best), f"step {step}; {began}"))
    reward = run.series("val/reward")
    if reward:
        tiles.append(
            ("validation reward, last", number(reward[-1][1]), f"{number(reward[0][1])} at step {reward[0][0]}")
        )
    if run.series("hacking/alarm"):
        tiles.append(("alarm of reward hacking", alarm_word(run), ""))
    planned = run.config.get("train", {}).get("max_steps")
    state = "complete" if run.complete else "not complete"
    if run.state.get("stopped"):
        state = "stopped early"
    of = f"{state}; of {planned:,} planned" if planned and planned != run.last_step else state
    tiles.append(("steps", f"{run.last_step:,}", of))
    speed = sorted(value for _, value in run.series("time/step"))
    if speed:
        tiles.append(("a step takes", f"{speed[len(speed) // 2]:.3g} s", "median, without validation"))
    return tiles


def _short(metric: str) -> str:
    return ({"val/cider": "CIDEr-D"} | TITLES).get(metric, metric.removeprefix("val/judge/").removeprefix("val/"))


def _compared_results(runs: Mapping[str, RunFolder]) -> Markup:
    found = dict.fromkeys(key for run in runs.values() for line in run.validations for key in line if JUDGE in key)
    judges = [key for key in found if not same_in_all([*runs.values()], key, "val/cider")]
    keys = ("val/cider", *judges, *HIGHER)
    shown = [key for key in keys if any(run.series(key) for run in runs.values())]
    head = ["run", *(f"{_short(key)}, best validation" for key in shown), "alarm", "steps"]
    rows = []
    for name, run in runs.items():
        best = run.state.get("best_step")
        by_step = {line["step"]: line for line in run.validations}
        line = by_step.get(best) or (run.validations[-1] if run.validations else {})
        cells = [number(line[key]) if key in line else "–" for key in shown]
        note = f"step {line['step']}" if line else "no validation"
        rows.append([join(name, element("small", note)), *cells, alarm_word(run), f"{run.last_step:,}"])
    return table(head, rows, "Validation at the best step of each run, as logged")
