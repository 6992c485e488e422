"""The pages: of a run, of several, of evaluations, of a comparison, of an ablation."""

import math
import shlex
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import yaml
from markupsafe import Markup

from rewards.text.cider import CIDER_DIFFERENCES, CIDER_SCALE
from rewards.text.tokenize import TOKENIZER
from rl_caption.evaluation.metrics import JUDGE, words_tokenizer
from rl_caption.evaluation.results import (
    CAPTION_COLUMNS,
    LEFT_OUT,
    ORACLE_COLUMNS,
    TEXT_COLUMNS,
    column_of,
    difference_rows,
    format_value,
)
from rl_caption.programs.report.charts import (
    Series,
    curves,
    define,
    factor_in,
    figure,
    macros,
    number,
    templates,
    title_of,
)
from rl_caption.programs.report.gallery import (
    N_GRAM_SCORES,
    Captions,
    Scores,
    Source,
    gallery,
    reference_scores,
    rows_of_config,
)
from rl_caption.programs.report.read import (
    Comparison,
    EvaluationFolder,
    Member,
    RunFolder,
    alpha_curve,
    by_system,
    over_seeds,
    starts_of,
)
from rl_caption.runtime.types import LOSS

ALPHA_METRICS = (
    "CIDEr",
    "BLEU-4",
    "METEOR",
    "oracle/f1",
    "length/mean",
    "captions/repeated_ngrams",
)
HIGHER_IS_BETTER = {*CAPTION_COLUMNS, "oracle/precision", "oracle/f1"}

Evaluations = Mapping[str, EvaluationFolder]
"""Name of a system -> what ``evaluate.py`` wrote of it."""


class Page(NamedTuple):
    """A report: heading -> section, of which empty ones are left out, and tiles (name, value, note) at the top."""

    title: str
    subtitle: str
    sections: Mapping[str, Markup]
    tiles: Sequence[tuple[str, str, str]] = ()


class Cell(NamedTuple):
    """A cell of a table: its text, small print below it, and whether it is the best of its column."""

    text: str
    small: str = ""
    best: bool = False


def render(page: Page) -> str:
    """The page as HTML: one file with its style, script, charts and images inside, which loads nothing."""
    return templates().get_template("page.html").render(page=page)


def runs_page(runs: Mapping[str, RunFolder], source: Source | None, images: int) -> Page:
    """The report of one run, finished or not, or of several: their best validations, with their curves in one chart.

    The gallery shows rows of the first run's data, unless a source is given.

    Raises:
        DataError, ReportError: damaged captions or judges' scores.
    """
    several, first = len(runs) > 1, next(iter(runs.values()))
    split = first.config.get("eval", {}).get("split", "val")
    validations: dict[str, tuple[RunFolder, int]] = {}
    for name, run in runs.items():
        steps = run.shown_steps()
        if not several:
            validations = {f"step {step} ({word})": (run, step) for word, step in steps.items()}
        elif steps:
            validations |= (
                {"start": (run, steps["start"])} if not validations and "start" in steps else {}
            )
            validations[name] = run, steps.get("best", list(steps.values())[-1])
    systems = {name: run.predictions(step) for name, (run, step) in validations.items()}
    source = source or (
        rows_of_config(first.config.get("data"), split) if validations else Source({})
    )
    words = words_tokenizer("auto", first.config.get("data", {}).get("tokenizer", TOKENIZER))
    scores = {
        metric: dict(by_system)
        for metric, by_system in reference_scores(systems, source.rows, words).items()
    }
    for name, (run, step) in validations.items():
        for judge, by_image in run.judges(step).items():
            if judge not in {N_GRAM_SCORES[metric] for metric in scores if metric in N_GRAM_SCORES}:
                column = column_of(JUDGE + judge)
                scores.setdefault(column.heading, {})[name] = {
                    i: column.factor * x for i, x in by_image.items()
                }
    note = f"Greedy captions of split {split}. Words that {next(iter(validations), '')} did not say are marked."
    sections = {
        "Monitor": Markup("").join(
            _monitor(run, name if several else "") for name, run in runs.items()
        ),
        "Results": _validations(runs, validations),
        "Curves": curves({name: [run] for name, run in runs.items()})
        or macros().note("Nothing has been logged yet."),
        "Captions": _gallery(systems, scores, source, note, images),
        "Settings": _settings(runs),
    }
    if several:
        return Page(_join_names(runs), "Runs side by side", sections)
    return Page(first.name, _training(first), sections, _run_tiles(first))


def evaluations_page(evaluations: Evaluations, source: Source | None, images: int) -> Page:
    """One or several evaluations by name: tables, and captions of the same images, with changes against the first.

    Without a source, references and images are those of the data that ``settings.json`` names.
    """
    sections = {
        "Results": _systems_tables(
            {name: [evaluation] for name, evaluation in evaluations.items()}
        ),
        "Captions": _evaluated_captions(evaluations, source, images),
    }
    about = "Evaluations side by side" if len(evaluations) > 1 else "Evaluation of captions"
    return Page(_join_names(evaluations), about, sections)


def comparison_page(
    comparison: Comparison, evaluations: Evaluations, source: Source | None, images: int
) -> Page:
    """Two systems with a paired test: differences, tables, and captions of the same images."""
    first, second = evaluations
    printed = difference_rows(comparison["differences"])
    rows = [
        [heading, *(value.replace("-", "−") for value in values)] for heading, *values in printed
    ]
    note = (
        f"Difference: {second} minus {first}. Interval: paired bootstrap over images; p: two-sided permutation "
        f"test; {comparison['resamples']:,} resamples each, not corrected for the number of metrics"
    )
    table = macros().table(
        ["metric", first, second, "difference", "95 % interval", "p"], rows, note
    )
    sections = {"Difference": table, **evaluations_page(evaluations, source, images).sections}
    return Page(f"{first} / {second}", f"Comparison: {second} against {first}", sections)


def ablation_page(
    name: str, members: Sequence[Member], missing: Sequence[str], source: Source | None, images: int
) -> Page:
    """An ablation: means over seeds, metrics over alpha, curves, and captions of the first seed of each system."""
    groups = by_system(members)
    runs = {name: [member.run for member in seeds if member.run] for name, seeds in groups.items()}
    runs = {name: seeds for name, seeds in runs.items() if seeds}
    evaluations = {name: [member.evaluation for member in seeds] for name, seeds in groups.items()}
    first = {name: seeds[0] for name, seeds in evaluations.items()}
    sections = {
        "Results": (macros().missing(missing) if missing else Markup(""))
        + _systems_tables(evaluations),
        "Monitor": _alarms(runs),
        "Alpha": _alpha(groups),
        "Curves": curves(runs),
        "Captions": _evaluated_captions(first, source, images, "One seed of each system."),
        "Settings": _settings({name: seeds[0] for name, seeds in runs.items()}),
    }
    return Page(name, "Ablation: rewards side by side", sections)


def _validations(
    runs: Mapping[str, RunFolder], validations: Mapping[str, tuple[RunFolder, int]]
) -> Markup:
    """Metrics as rows, the shown validations as columns; folded away, all validations in full precision."""
    if not validations:
        validations = {
            name: (run, run.validations[-1]["step"])
            for name, run in runs.items()
            if run.validations
        }
    lines = {
        name: next(x for x in run.validations if x["step"] == step)
        for name, (run, step) in validations.items()
    }
    doubles = set.intersection(*(run.doubles for run in runs.values())) | {"val/seconds"}
    head = [
        "validation",
        *(
            name if "step" in name else f"{name}, step {step}"
            for name, (_, step) in validations.items()
        ),
    ]
    rows: list[list[Cell]] = []
    for key in dict.fromkeys(
        key for line in lines.values() for key in line if key.startswith("val/")
    ):
        factor = factor_in(runs.values(), key)
        values = [factor * line[key] for line in lines.values() if key in line]
        definition, largest = define(key), max(filter(math.isfinite, values), key=abs, default=0.0)
        about = f"{definition.unit}, {definition.range}".removeprefix("1, ") if definition else ""
        title = "Reward (x100)" if key == "val/reward" and factor != 1 else title_of(key)
        row = [Cell(title, about.replace("the judge's, the", "its own unit and"))]
        row += [
            Cell(number(factor * line[key], largest) if key in line else LEFT_OUT)
            for line in lines.values()
        ]
        if len(runs) == 1 and len(values) == len(lines) > 1:
            change = values[-1] - values[0]
            share = f"{change / abs(values[0]):+.1%}".replace("-", "−") if values[0] else ""
            row.append(Cell(("+" if change > 0 else "") + number(change, largest), share))
        rows += [] if key in doubles else [row]
    head += ["change from first to last"] * (max(map(len, rows), default=0) > len(head))
    body = macros().table(head, rows, "Validations") if rows else Markup("")
    if any("val/cider" in line for line in lines.values()):
        rewarded = any(
            "cider" in (name, term.get("target"))
            for run in runs.values()
            for name, term in run.terms.items()
        )
        body += macros().note(" ".join([CIDER_SCALE, *[CIDER_DIFFERENCES] * rewarded]))
    for name, run in runs.items():
        keys = list(dict.fromkeys(key for line in run.validations for key in line if key != "step"))
        every = [
            [str(x["step"]), *(repr(x[key]) if key in x else LEFT_OUT for key in keys)]
            for x in run.validations
        ]
        table = macros().table(
            ["step", *(key.removeprefix("val/") for key in keys)], every, "as in metrics.jsonl"
        )
        body += (
            macros().folded(f"All {len(every)} validations of {name}, as logged", table)
            if every
            else Markup("")
        )
    return body


def _systems_tables(systems: Mapping[str, Sequence[EvaluationFolder]]) -> Markup:
    """Systems down, metrics across: captions and judges, then signs of bad captions, then the oracle's; and notes.

    Metrics are printed as papers do (the heading says x100 or %), with the standard deviation over seeds or, of one
    evaluation, its interval; the best value of a metric where more is better is bold.
    """
    means = {name: over_seeds(seeds) for name, seeds in systems.items()}
    keys = dict.fromkeys(key for scores in means.values() for key in scores)
    first = [
        *(key for key in CAPTION_COLUMNS if key in keys),
        *(key for key in keys if key.startswith(JUDGE)),
    ]
    oracle = [key for key in keys if key in ORACLE_COLUMNS]
    signs = [key for key in TEXT_COLUMNS | keys if key in keys and key not in (*first, *oracle)]
    tables = {
        "Metrics; the highest value of a column is bold": first,
        "Signs of bad captions": signs,
        "Oracle": oracle,
    }
    body = Markup("")
    for caption, columns in tables.items():
        best = {
            key: max(scores[key][0] for scores in means.values() if key in scores)
            for key in columns
        }
        rows: list[list[Cell]] = []
        for name, seeds in systems.items():
            single = seeds[0].scores if len(seeds) == 1 else None
            rows.append(
                [Cell(name, f"{single['n']:,} captions" if single else f"{len(seeds)} seeds")]
            )
            for key in columns:
                value, deviation = means[name].get(key, (None, None))
                interval = single.get("intervals", {}).get(key) if single else None
                small = "" if deviation is None else f"± {_format_value(key, deviation)}"
                small = (
                    " to ".join(_format_value(key, end) for end in interval) if interval else small
                )
                rated = len(systems) > 1 and (key in HIGHER_IS_BETTER or key.startswith(JUDGE))
                text = LEFT_OUT if value is None else _format_value(key, value)
                rows[-1].append(Cell(text, small, rated and value == best[key]))
        if columns:
            body += macros().table(
                ["system", *(column_of(key).heading for key in columns)], rows, caption
            )
    every = {name: seeds[0].scores for name, seeds in systems.items()}
    left_out = [
        f"{key} is left out: {why}"
        for scores in every.values()
        for key, why in scores.get("left_out", {}).items()
    ]
    intervals = [
        f"Intervals: {scores['interval']}" for scores in every.values() if scores.get("interval")
    ]
    signatures = {name: scores["signature"] for name, scores in every.items()}
    return body + macros().evaluation_notes(dict.fromkeys([*left_out, *intervals]), signatures)


def _format_value(key: str, value: float) -> str:
    return format_value(value, column_of(key)).replace("-", "−")


def _gallery(systems: Captions, scores: Scores, source: Source, note: str, images: int) -> Markup:
    data = gallery(systems, scores, source, note, images)
    return macros().gallery(data) if data["items"] else Markup("")


def _evaluated_captions(
    evaluations: Evaluations, source: Source | None, images: int, note: str = ""
) -> Markup:
    systems = {
        name: evaluation.captions for name, evaluation in evaluations.items() if evaluation.captions
    }
    if not systems:
        return Markup("")
    settings = next(iter(evaluations.values())).settings
    source = source or rows_of_config(settings.get("data"), settings.get("split", "test"))
    if len(systems) > 1:
        note = f"{note} Words that {next(iter(systems))} did not say are marked.".strip()
    data = settings.get("data", {})
    words = words_tokenizer(settings.get("tokenizer", "auto"), data.get("tokenizer", TOKENIZER))
    return _gallery(systems, reference_scores(systems, source.rows, words), source, note, images)


def _monitor(run: RunFolder, name: str = "") -> Markup:
    """Alarms with their evidence, or that there was none; empty for a run without a monitor."""
    if not run.has_monitor:
        return Markup("")
    reward = dict(run.series("val/reward"))
    first = run.alarms[0] if run.alarms else None
    rose = (
        f" from {next(iter(reward.values())):.4g} to {reward[first]:.4g}" if first in reward else ""
    )
    return macros().monitor(run, name, rose, run.first_alarm.get("evidence"))


def _settings(runs: Mapping[str, RunFolder]) -> Markup:
    """Signature, command line and versions of runs, with their configurations folded away."""
    body = Markup("")
    for name, run in runs.items():
        command = shlex.join(run.env["command"]) if "command" in run.env else None
        versions = ", ".join(
            f"{package} {version}"
            for package, version in run.env.get("versions", {}).items()
            if version
        )
        config = (
            yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
            if run.config
            else ""
        )
        body += macros().settings(name if len(runs) > 1 else "", run, command, versions, config)
    return body


def _training(run: RunFolder) -> str:
    if run.terms:
        return f"Self-critical training on {run.reward}"
    return (
        f"Training of a reward model: {run.config['task']}"
        if "task" in run.config
        else "Cross-entropy training"
    )


def _run_tiles(run: RunFolder) -> list[tuple[str, str, str]]:
    tiles = []
    metric = run.state.get("metric", "val/cider")
    for title, values in (
        (f"best {title_of(metric)}", run.series(metric)),
        ("best reward", run.series("val/reward")),
    ):
        if values:
            choose = min if metric == LOSS and title != "best reward" else max
            step, best = choose(values, key=lambda pair: pair[1])
            factor = factor_in([run], "val/reward" if title.startswith("best reward") else metric)
            title += " (x100)" if title == "best reward" and factor != 1 else ""
            first = number(factor * values[0][1])
            tiles.append(
                (title, number(factor * best), f"step {step}; {first} at step {values[0][0]}")
            )
    if run.has_monitor:
        tiles.append(
            ("alarm of reward hacking", f"from step {run.alarms[0]}" if run.alarms else "none", "")
        )
    planned = run.config.get("train", {}).get("max_steps")
    state = (
        "stopped early"
        if run.state.get("stopped")
        else "complete"
        if run.complete
        else "not complete"
    )
    note = f"{state}; of {planned:,} planned" if planned and planned != run.last_step else state
    tiles.append(("steps", f"{run.last_step:,}", note))
    seconds = [value for _, value in run.series("time/step")]
    if seconds:
        tiles.append(
            (
                "a step takes",
                f"{statistics.median_high(seconds):.3g} s",
                "median, without validation",
            )
        )
    return tiles


def _join_names(names: Collection[str]) -> str:
    return " / ".join(names) if len(names) < 4 else f"{len(names)} systems"


def _alarms(systems: Mapping[str, Sequence[RunFolder]]) -> Markup:
    rows = []
    for name, seeds in systems.items():
        first = [run.alarms[0] for run in seeds if run.alarms]
        count = (
            f"{len(first)} of {len(seeds)}"
            if any(run.has_monitor for run in seeds)
            else "not watched"
        )
        rows.append([name, count, f"step {min(first)}" if first else "none"])
    caption = (
        "Runs whose reward rose while their captions got worse, by the monitor of reward hacking"
    )
    return (
        macros().table(["system", "runs with an alarm", "earliest"], rows, caption)
        if rows
        else Markup("")
    )


def _alpha(systems: Mapping[str, Sequence[Member]]) -> Markup:
    """Charts of alpha against metrics, a line for each base; empty where fewer than two cells have an alpha."""
    if sum(members[0].alpha is not None for members in systems.values()) < 2:
        return Markup("")
    keys = dict.fromkeys(
        key
        for members in systems.values()
        for one in members
        for key in one.evaluation.scores["metrics"]
    )
    chosen = [
        *(key for key in ALPHA_METRICS if key in keys),
        *(key for key in keys if key.startswith(JUDGE)),
    ]
    figures = [
        figure(column_of(key).heading, alpha_series(systems, key), x_name="alpha") for key in chosen
    ]
    note = "Dots are means over seeds, bars one standard deviation; the dashed line is the starting policy."
    return macros().note(note) + macros().charts(figures)


def alpha_series(systems: Mapping[str, Sequence[Member]], key: str) -> list[Series]:
    """The lines of alpha against a metric, times the factor of its heading: for each base its cells, and its start."""
    factor, starts, lines = column_of(key).factor, starts_of(systems), []
    bases = dict.fromkeys(
        members[0].base for members in systems.values() if members[0].alpha is not None
    )
    for colour, base in enumerate(bases):
        curve = alpha_curve(systems, base, key, factor)
        if not curve:
            continue
        points, errors = (
            [point[:2] for point in curve],
            {alpha: deviation for alpha, _, deviation in curve},
        )
        lines.append(Series(base or "mean over seeds", points, colour, True, errors))
        start = starts.get(base)
        if start is not None and key in start.evaluation.scores["metrics"]:
            value = factor * start.evaluation.scores["metrics"][key]
            lines.append(Series(start.system, [(points[0][0], value), (points[-1][0], value)], 3))
    return lines
