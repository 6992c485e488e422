"""The pages: of a run, of several, of evaluations, of a comparison, of an ablation."""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import yaml
from markupsafe import Markup

from rl_caption.evaluation.metrics import JUDGE
from rl_caption.evaluation.results import (
    CAPTION_COLUMNS,
    COLUMNS,
    LEFT_OUT,
    ORACLE_COLUMNS,
    TEXT_COLUMNS,
    column_of,
)
from rl_caption.report.charts import Series, figure, number, parts, templates
from rl_caption.report.curves import TITLES, compared_curves, define, distinct_judges, run_curves, title_of
from rl_caption.report.gallery import N_GRAM_SCORES, Captions, Scores, Source, gallery, reference_scores, rows_of_config
from rl_caption.report.read import AblationFolder, ComparisonFolder, EvaluationFolder, Member, RunFolder

TASKS = {
    "contrastive": "contrastive, image against caption",
    "positive_augmented": "contrastive, with generated images and captions",
    "specificity": "one more true detail scores higher",
    "distill_image": "distillation, image tower",
    "distill_text": "distillation, text tower",
    "distill_dual": "distillation, both towers",
}
"""``task`` of a reward model's configuration -> what a page calls it."""
BEST_BY = ("val/cider", "val/retrieval_r1", "val/specificity", "val/teacher_cosine_image", "val/teacher_cosine_text")
"""What the best validation of a run is chosen by, where its state does not say."""
MAIN_METRICS = ("CIDEr", "BLEU-4", "METEOR", "SPICE")
ALPHA_METRICS = ("CIDEr", "BLEU-4", "METEOR", "oracle/f1", "length/mean", "captions/repeated_ngrams")
HIGHER_IS_BETTER = {*CAPTION_COLUMNS, "oracle/precision", "oracle/f1"}


@dataclass(frozen=True)
class Page:
    """A report: what is to be seen first (name, value, note), and sections by heading; empty ones are left out."""

    title: str
    subtitle: str
    tiles: Sequence[tuple[str, str, str]]
    sections: Mapping[str, Markup]


class Cell(NamedTuple):
    """A cell of a table: its text, what stands small below it, and whether it is the best of its column."""

    text: str
    small: str = ""
    best: bool = False


class Score(NamedTuple):
    """A metric's value, with the standard deviation over seeds or a confidence interval where there is one."""

    value: float
    deviation: float | None = None
    interval: tuple[float, float] | None = None


class System(NamedTuple):
    """A row of a table: its name, what stands below it, and its scores by metric key."""

    name: str
    note: str
    scores: Mapping[str, Score]


def render(page: Page) -> str:
    """The page as HTML: one file with its style, script, charts and images inside, which loads nothing."""
    script = str(templates().globals["script"])
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    sections = {name: body for name, body in page.sections.items() if body}
    return templates().get_template("page.html").render(page=page, sections=sections, digest=digest)


def run_page(run: RunFolder, source: Source | None, images: int) -> Page:
    """The report of a run, finished or not.

    Args:
        run: as read.
        source: rows of the validation split; None reads the data that the run's configuration names.
        images: most images of the gallery.

    Raises:
        DataError, ReportError: damaged captions or judges' scores.
    """
    steps = run.shown_steps()
    captions = Markup("")
    if steps:
        names = {f"step {step} ({name})": step for name, step in steps.items()}
        systems = {name: run.predictions(step) for name, step in names.items()}
        source = source or rows_of_config(run.config.get("data"), run.split)
        scores = {metric: dict(found) for metric, found in reference_scores(systems, source.rows).items()}
        computed = {N_GRAM_SCORES[metric] for metric in scores}
        for name, step in names.items():
            for judge, found in run.judges(step).items():
                if judge not in computed:
                    scores.setdefault(judge, {})[name] = found
        note = f"Greedy captions of split {run.split}. Words that the first policy did not say are marked."
        captions = _gallery(systems, source, images, note, scores)
    sections = {
        "Monitor": _monitor(run),
        "Results": run_results(run, steps) + every_validation(run),
        "Curves": run_curves(run) if run.lines else parts().note("Nothing has been logged yet."),
        "Captions": captions,
        "Settings": _settings({run.name: run}),
    }
    return Page(run.name, _training(run), _run_tiles(run), sections)


def compared_runs_page(runs: Mapping[str, RunFolder], source: Source | None, images: int) -> Page:
    """Several runs in one page: their best validations, curves over each other, captions of the same images.

    Args:
        runs: name -> run, at least two.
        source, images: as for ``run_page``; the first run's data is taken for all.
    """
    first = next(iter(runs.values()))
    start = first.shown_steps().get("start")
    systems: dict[str, Mapping[str, str]] = {} if start is None else {"start": first.predictions(start)}
    for name, run in runs.items():
        steps = run.shown_steps()
        if steps:
            systems[name] = run.predictions(steps.get("best", list(steps.values())[-1]))
    captions = Markup("")
    if systems:
        source = source or rows_of_config(first.config.get("data"), first.split)
        of_start = "" if start is None else f"; start is step 0 of {first.name}"
        captions = _gallery(systems, source, images, f"Each run with its best captions by validation{of_start}.")
    sections = {
        "Results": _compared_results(runs),
        "Monitor": Markup("").join(_monitor(run, name) for name, run in runs.items()),
        "Curves": compared_curves({name: [run] for name, run in runs.items()}),
        "Captions": captions,
        "Settings": _settings(runs),
    }
    title = " / ".join(runs) if len(runs) < 4 else f"{len(runs)} runs"
    return Page(title, "Runs side by side", [], sections)


def evaluations_page(evaluations: Mapping[str, EvaluationFolder], source: Source | None, images: int) -> Page:
    """One or several evaluations: tables, and captions of the same images.

    Args:
        evaluations: name of a system -> what ``evaluate.py`` wrote; changes are against the first.
        source: references and images; None takes the data that an ablation noted, where one did.
        images: most images of the gallery.

    Raises:
        RewardError: a metric of the gallery failed.
    """
    rows = [over_seeds(name, [found]) for name, found in evaluations.items()]
    sections = {
        "Results": systems_tables(rows) + _evaluation_notes(evaluations),
        "Captions": _evaluated_captions(evaluations, source, images, ""),
    }
    if len(evaluations) > 1:
        title = " / ".join(evaluations) if len(evaluations) < 4 else f"{len(evaluations)} systems"
        return Page(title, "Evaluations side by side", [], sections)
    (row,) = rows
    tiles = [("captions", row.note.split()[0], "")]
    tiles += [(f"{key} (x100)", _shown(key, row.scores[key].value), "") for key in MAIN_METRICS if key in row.scores]
    return Page(row.name, "Evaluation of captions", tiles, sections)


def comparison_page(comparison: ComparisonFolder, source: Source | None, images: int) -> Page:
    """Two systems with a paired test: differences, tables, and captions of the same images.

    Args:
        comparison, source, images: as for ``evaluations_page``.
    """
    page = evaluations_page(comparison.evaluations, source, images)
    first, second = comparison.evaluations
    rows, tiles = [], []
    for key, found in comparison.differences.items():
        values = [_shown(key, found["first"]), _shown(key, found["second"]), _shown(key, found["difference"], "+")]
        interval = " to ".join(_shown(key, end, "+") for end in found["interval"])
        rows.append([column_of(key).heading, *values, interval, f"{found['p']:.4f}"])
        if key in MAIN_METRICS:
            tiles.append((column_of(key).heading, values[-1], f"{interval}, p {found['p']:.4f}"))
    note = (
        f"Difference: {second} minus {first}. Interval: paired bootstrap over images; p: two-sided approximate "
        f"randomisation; {comparison.resamples:,} resamples each, not corrected for the number of metrics"
    )
    table = parts().table(["metric", first, second, "difference", "95 % interval", "p"], rows, note)
    sections = {"Difference": table, **page.sections}
    return Page(f"{first} / {second}", f"Comparison: {second} against {first}", tiles, sections)


def ablation_page(ablation: AblationFolder, source: Source | None, images: int) -> Page:
    """A grid of rewards: means over seeds, alpha against metrics, curves, captions of the first seed of each system.

    Args:
        ablation, source, images: as for ``evaluations_page``.
    """
    groups: dict[str, list[Member]] = {}
    for member in ablation.members:
        groups.setdefault(member.system, []).append(member)
    rows = {name: over_seeds(name, [member.evaluation for member in found]) for name, found in groups.items()}
    first = {name: found[0].evaluation for name, found in groups.items()}
    seeds = {name: [member.run for member in found if member.run is not None] for name, found in groups.items()}
    runs = {name: found for name, found in seeds.items() if found}
    warning = parts().missing(ablation.missing) if ablation.missing else Markup("")
    sections = {
        "Results": warning + systems_tables([*rows.values()]) + _evaluation_notes(first),
        "Monitor": _alarms(runs),
        "Alpha": _alpha(groups, rows),
        "Curves": compared_curves(runs),
        "Captions": _evaluated_captions(first, source, images, "One seed of each system."),
        "Settings": _settings({name: found[0] for name, found in runs.items()}),
    }
    tiles = _ablation_tiles([*rows.values()], [run for found in runs.values() for run in found])
    return Page(ablation.path.resolve().name, "Ablation: rewards side by side", tiles, sections)


def run_results(run: RunFolder, steps: Mapping[str, int]) -> Markup:
    """Validation metrics as rows; the columns are the shown validations and the change between first and last."""
    by_step = {line["step"]: line for line in run.validations}
    steps = steps or ({"last": max(by_step)} if by_step else {})
    lines = [by_step[step] for step in steps.values()]
    if not lines:
        return Markup("")
    doubles = {f"val/reward/{term}" for term in run.terms if run.equal(f"val/reward/{term}", "val/reward")}
    doubles |= {key for key in lines[-1] if key.startswith("val/judge/") and run.equal(key, "val/cider")}
    rows: list[list[str | Cell]] = []
    for key in lines[-1]:
        if not key.startswith("val/") or key == "val/seconds" or key in doubles:
            continue
        found = define(key)
        about = f"{found.unit}, {found.range}".removeprefix("1, ") if found else ""
        heading = Cell(title_of(key), about.replace("the judge's, the", "its own unit and"))
        spacing = _spacing([line[key] for line in lines if key in line])
        rows.append([heading, *(number(line[key], spacing) if key in line else LEFT_OUT for line in lines)])
        if len(lines) > 1:
            rows[-1].append(_change(lines[0].get(key), lines[-1][key], spacing))
    head = ["validation", *(f"{name}, step {step}" for name, step in steps.items())]
    what = "The model on" if "task" in run.config else "Greedy captions of"
    note = f"{what} the validation split, as logged; change: from the first to the last"
    return parts().table([*head, "change"] if len(lines) > 1 else head, rows, note)


def every_validation(run: RunFolder) -> Markup:
    """All validations, folded away: steps down, keys across, in full precision."""
    lines = run.validations
    keys = list(dict.fromkeys(key for line in lines for key in line if key != "step"))
    rows = [[str(line["step"]), *(repr(line[key]) if key in line else LEFT_OUT for key in keys)] for line in lines]
    table = parts().table(["step", *(key.removeprefix("val/") for key in keys)], rows, "as in metrics.jsonl")
    return parts().folded(f"All {len(lines)} validations, as logged", table) if lines else Markup("")


def over_seeds(name: str, evaluations: Sequence[EvaluationFolder]) -> System:
    """A row of means and sample standard deviations (n - 1) over seeds, or of one evaluation with its intervals."""
    every = [found.scores for found in evaluations]
    if len(every) == 1:
        intervals = every[0].get("intervals", {})
        scores = {key: Score(value, None, intervals.get(key)) for key, value in every[0]["metrics"].items()}
        return System(name, f"{every[0]['n']:,} captions", scores)
    scores = {}
    for key in dict.fromkeys(key for found in every for key in found["metrics"]):
        values = [found["metrics"][key] for found in every if key in found["metrics"]]
        scores[key] = Score(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
    return System(name, f"{len(every)} seeds", scores)


def systems_tables(systems: Sequence[System]) -> Markup:
    """Systems down, metrics across: captions and judges, then signs of bad captions, then the oracle's.

    Metrics are printed as papers do (the heading says x100 or %); the best value of a metric where more is better is
    bold.
    """
    keys = dict.fromkeys(key for system in systems for key in system.scores)
    first = [*(key for key in CAPTION_COLUMNS if key in keys), *(key for key in keys if key.startswith(JUDGE))]
    oracle = [key for key in keys if key in ORACLE_COLUMNS]
    signs = [key for key in TEXT_COLUMNS | keys if key in keys and key not in (*first, *oracle)]
    tables = {"Metrics; the highest value of a column is bold": first, "Signs of bad captions": signs, "Oracle": oracle}
    body = Markup("")
    for caption, columns in tables.items():
        if columns:
            head = ["system", *(column_of(key).heading for key in columns)]
            best = {key: _best(systems, key) for key in columns}
            rows = [
                [Cell(system.name, system.note), *(_cell(key, system.scores.get(key), best[key]) for key in columns)]
                for system in systems
            ]
            body += parts().table(head, rows, caption)
    return body


def _cell(key: str, score: Score | None, best: float | None) -> Cell:
    if score is None:
        return Cell(LEFT_OUT)
    small = ""
    if score.deviation is not None:
        small = f"± {_shown(key, score.deviation)}"
    elif score.interval is not None:
        small = " to ".join(_shown(key, end) for end in score.interval)
    return Cell(_shown(key, score.value), small, score.value == best)


def _best(systems: Sequence[System], key: str) -> float | None:
    values = [system.scores[key].value for system in systems if key in system.scores]
    return max(values) if len(values) > 1 and (key in HIGHER_IS_BETTER or key.startswith(JUDGE)) else None


def _shown(key: str, value: float, sign: str = "") -> str:
    """A metric's value as papers print it."""
    column = column_of(key)
    return f"{value * column.factor:{sign}.{column.decimals}f}".replace("-", "−")


def _spacing(values: Sequence[float]) -> float:
    """What the last decimal of a row stands for: four digits of its largest value, or 1 for whole numbers."""
    finite = [abs(value) for value in values if math.isfinite(value)]
    if all(value == round(value) for value in finite):
        return 1.0
    return 10.0 ** (math.floor(math.log10(max(finite))) - 3)


def _change(first: float | None, last: float, spacing: float) -> Cell:
    if first is None:
        return Cell(LEFT_OUT)
    change = last - first
    share = f"{change / abs(first):+.1%}".replace("-", "−") if first else ""
    return Cell(("+" if change > 0 else "") + number(change, spacing), share)


def _gallery(systems: Captions, source: Source, images: int, note: str, scores: Scores | None = None) -> Markup:
    scores = reference_scores(systems, source.rows) if scores is None else scores
    data = gallery(systems, scores, source, note, images)
    return parts().gallery(data) if data["items"] else Markup("")


def _evaluated_captions(
    evaluations: Mapping[str, EvaluationFolder], source: Source | None, images: int, note: str
) -> Markup:
    systems = {name: found.captions for name, found in evaluations.items() if found.captions}
    if not systems:
        return Markup("")
    if source is None:
        settings = next(iter(evaluations.values())).settings
        source = rows_of_config(settings.get("data"), settings.get("split", "test"))
    if len(systems) > 1:
        note = f"{note} Words that {next(iter(systems))} did not say are marked.".strip()
    return _gallery(systems, source, images, note)


def _evaluation_notes(evaluations: Mapping[str, EvaluationFolder]) -> Markup:
    """What was left out and why, how intervals were made, and the signatures, or that they differ."""
    every = {name: found.scores for name, found in evaluations.items()}
    left_out = [
        f"{key} is left out: {why}" for found in every.values() for key, why in found.get("left_out", {}).items()
    ]
    intervals = [f"Intervals: {found['interval']}" for found in every.values() if found.get("interval")]
    signatures = {name: found["signature"] for name, found in every.items()}
    return parts().evaluation_notes(dict.fromkeys([*left_out, *intervals]), signatures)


def _monitor(run: RunFolder, name: str = "") -> Markup:
    """Alarms with their evidence, or that there was none; empty for a run without a monitor."""
    if not run.series("hacking/alarm"):
        return Markup("")
    reward = dict(run.series("val/reward"))
    first = run.alarms[0] if run.alarms else None
    rose = f" from {next(iter(reward.values())):.4g} to {reward[first]:.4g}" if first in reward else ""
    alarm = run.state.get("notes", {}).get("hacking", {}).get("first_alarm") or {}
    return parts().monitor(run, name, rose, alarm.get("evidence"))


def _settings(runs: Mapping[str, RunFolder]) -> Markup:
    """Signature, command line and versions of every run, with its configuration folded away."""
    body = Markup("")
    for name, run in runs.items():
        command = shlex.join(run.env["command"]) if "command" in run.env else None
        versions = ", ".join(f"{package} {found}" for package, found in run.env.get("versions", {}).items() if found)
        config = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True) if run.config else ""
        body += parts().settings(name if len(runs) > 1 else "", run, command, versions, config)
    return body


def _training(run: RunFolder) -> str:
    if run.terms:
        return "Self-critical training on " + " + ".join(
            f"{t.get('weight', 1):g} {name}" for name, t in run.terms.items()
        )
    task = run.config.get("task")
    return "Cross-entropy training" if task is None else f"Training of a reward model: {TASKS.get(task, task)}"


def _run_tiles(run: RunFolder) -> list[tuple[str, str, str]]:
    tiles = []
    metric = run.state.get("metric") or next(filter(run.series, BEST_BY), BEST_BY[0])
    values = run.series(metric)
    if values:
        step, best = max(values, key=lambda pair: pair[1])
        note = f"step {step}; {number(values[0][1])} at step {values[0][0]}"
        tiles.append((f"best {_short(metric)}", number(best), note))
    reward = run.series("val/reward")
    if reward:
        note = f"{number(reward[0][1])} at step {reward[0][0]}"
        tiles.append(("validation reward, last", number(reward[-1][1]), note))
    if run.series("hacking/alarm"):
        tiles.append(("alarm of reward hacking", run.alarm_word, ""))
    planned = run.config.get("train", {}).get("max_steps")
    state = "stopped early" if run.state.get("stopped") else "complete" if run.complete else "not complete"
    note = f"{state}; of {planned:,} planned" if planned and planned != run.last_step else state
    tiles.append(("steps", f"{run.last_step:,}", note))
    seconds = [value for _, value in run.series("time/step")]
    if seconds:
        tiles.append(("a step takes", f"{statistics.median_high(seconds):.3g} s", "median, without validation"))
    return tiles


def _short(metric: str) -> str:
    return (TITLES | {"val/cider": "CIDEr-D"}).get(metric, metric.removeprefix("val/judge/").removeprefix("val/"))


def _compared_results(runs: Mapping[str, RunFolder]) -> Markup:
    shown = [BEST_BY[0], *distinct_judges([*runs.values()]), *BEST_BY[1:]]
    shown = [key for key in shown if any(run.series(key) for run in runs.values())]
    rows = []
    for name, run in runs.items():
        by_step = {line["step"]: line for line in run.validations}
        line = by_step.get(run.state.get("best_step")) or (run.validations[-1] if run.validations else {})
        note = f"step {line['step']}" if line else "no validation"
        cells = [number(line[key]) if key in line else LEFT_OUT for key in shown]
        rows.append([Cell(name, note), *cells, run.alarm_word, f"{run.last_step:,}"])
    head = ["run", *(f"{_short(key)}, best validation" for key in shown), "alarm", "steps"]
    return parts().table(head, rows, "Validation at the best step of each run, as logged")


def _ablation_tiles(rows: Sequence[System], runs: Sequence[RunFolder]) -> list[tuple[str, str, str]]:
    tiles = [("systems", str(len(rows)), f"{len(runs)} runs")]
    for key in ("CIDEr", "METEOR", "oracle/f1"):
        scored = [row for row in rows if key in row.scores]
        if scored:
            best = max(scored, key=lambda row: row.scores[key].value)
            value = _shown(key, best.scores[key].value) + (" (x100)" if key in CAPTION_COLUMNS else "")
            tiles.append((f"highest {COLUMNS[key].heading}", best.name, value))
    watched = [run for run in runs if run.series("hacking/alarm")]
    if watched:
        alarmed = sum(bool(run.alarms) for run in watched)
        tiles.append(("runs with an alarm", f"{alarmed} of {len(watched)}", "signs of reward hacking"))
    return tiles


def _alarms(runs: Mapping[str, Sequence[RunFolder]]) -> Markup:
    rows = []
    for name, seeds in runs.items():
        first = [run.alarms[0] for run in seeds if run.alarms]
        watched = any(run.series("hacking/alarm") for run in seeds)
        count = f"{len(first)} of {len(seeds)}" if watched else "not watched"
        rows.append([name, count, f"step {min(first)}" if first else "none"])
    caption = "Runs whose reward rose while their captions got worse, by the monitor of reward hacking"
    return parts().table(["system", "runs with an alarm", "earliest"], rows, caption) if rows else Markup("")


def _alpha(groups: Mapping[str, Sequence[Member]], rows: Mapping[str, System]) -> Markup:
    """Charts of alpha against metrics, a line for each base; empty where fewer than two cells have an alpha."""
    alphas = {name: found[0].alpha for name, found in groups.items() if found[0].alpha is not None}
    if len(alphas) < 2:
        return Markup("")
    bases = list(dict.fromkeys(map(_base, alphas)))
    keys = dict.fromkeys(key for row in rows.values() for key in row.scores)
    figures = []
    for key in [*(key for key in ALPHA_METRICS if key in keys), *(key for key in keys if key.startswith(JUDGE))]:
        factor = column_of(key).factor
        lines = []
        for index, base in enumerate(bases):
            here = sorted((alpha, name) for name, alpha in alphas.items() if _base(name) == base)
            scores = [(alpha, rows[name].scores[key]) for alpha, name in here if key in rows[name].scores]
            if not scores:
                continue
            points = [(alpha, factor * score.value) for alpha, score in scores]
            errors = [factor * (score.deviation or 0.0) for _, score in scores]
            lines.append(Series(base or "mean over seeds", points, index, True, errors))
            start = next((name for name, of in groups.items() if of[0].seed is None and _base(name) == base), None)
            if start is not None and key in rows[start].scores:
                value = factor * rows[start].scores[key].value
                lines.append(Series(start, [(points[0][0], value), (points[-1][0], value)], 3))
        figures.append(figure(column_of(key).heading, lines, x_name="alpha"))
    note = "Dots are means over seeds, bars one standard deviation; the dashed line is the starting policy."
    return parts().note(note) + parts().charts(figures)


def _base(system: str) -> str:
    return system.rpartition("/")[0]
