"""The pages: of a run, of several, of evaluations, of a comparison."""

import shlex
import statistics
from collections.abc import Mapping, Sequence
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
    factor_of,
    format_value,
)
from rl_caption.programs.report.charts import (
    curves,
    macros,
    number,
    templates,
    title_of,
)
from rl_caption.programs.report.gallery import (
    N_GRAM_SCORES,
    Source,
    gallery,
    reference_scores,
    rows_of_config,
)
from rl_caption.programs.report.read import (
    Comparison,
    EvaluationFolder,
    RunFolder,
    over_seeds,
)

HIGHER_IS_BETTER = {*CAPTION_COLUMNS, "oracle/precision", "oracle/f1"}

Evaluations = Mapping[str, EvaluationFolder]
"""Name of a system -> what ``evaluate`` wrote of it."""
Validations = Mapping[str, tuple[RunFolder, int]]
"""Name of a validation -> its run and step."""


class Page(NamedTuple):
    """A report: heading -> section; empty sections are left out."""

    title: str
    subtitle: str
    sections: Mapping[str, Markup]


class Cell(NamedTuple):
    """A cell of a table: its text, small print below it, and whether it is the best of its column."""

    text: str
    small: str = ""
    best: bool = False


class Table(NamedTuple):
    """The arguments of the macro ``table``."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]


def render(page: Page) -> str:
    """The page as HTML: one file with its style, charts and images inside, without scripts, which loads nothing."""
    return templates().get_template("page.html").render(page=page)


def runs_page(runs: Mapping[str, RunFolder], source: Source | None, images: int) -> Page:
    """The report of one run, finished or not, or of several: their best validations, with their curves in one chart.

    The gallery shows rows of the first run's data, unless a source is given.

    Raises:
        DataError, ReportError: damaged captions or judges' scores.
    """
    first = next(iter(runs.values()))
    several = len(runs) > 1
    validations = _shown_validations(runs)
    watched = {name if several else "": run for name, run in runs.items() if run.has_monitor}
    sections = {
        "Monitor": Markup("").join(macros().monitor(run, name) for name, run in watched.items()),
        "Results": _results_of_runs(runs),
        "Curves": curves({name: [run] for name, run in runs.items()})
        or macros().note("Nothing has been logged yet."),
        "Captions": _validation_captions(first, validations, source, images),
        "Settings": settings_section(runs),
    }
    if several:
        return Page(" / ".join(runs), "Runs side by side", sections)
    return Page(first.name, _training(first), sections)


def evaluations_page(evaluations: Evaluations, source: Source | None, images: int) -> Page:
    """One or several evaluations by name: tables, and captions of the same images, with changes against the first.

    Without a source, references and images are those of the data that ``settings.json`` names.
    """
    seeds = {name: [evaluation] for name, evaluation in evaluations.items()}
    sections = {
        "Results": scores_section(seeds),
        "Captions": captions_section(evaluations, source, images),
    }
    about = "Evaluations side by side" if len(evaluations) > 1 else "Evaluation of captions"
    return Page(" / ".join(evaluations), about, sections)


def comparison_page(
    comparison: Comparison, evaluations: Evaluations, source: Source | None, images: int
) -> Page:
    """Two systems with a paired test: differences, tables, and captions of the same images."""
    first, second = evaluations
    rows = [[_minus(text) for text in row] for row in difference_rows(comparison["differences"])]
    note = (
        f"Difference: {second} minus {first}. Interval: paired bootstrap over images; p: two-sided permutation test; "
        f"{comparison['resamples']:,} resamples each, not corrected for the number of metrics"
    )
    head = ["metric", first, second, "difference", "95 % interval", "p"]
    sections = {"Difference": macros().table(note, head, rows)}
    sections |= evaluations_page(evaluations, source, images).sections
    return Page(f"{first} / {second}", f"Comparison: {second} against {first}", sections)


def _shown_validations(runs: Mapping[str, RunFolder]) -> Validations:
    """Of a single run the start, the best and the last; of several the first start, and the best of each."""
    validations: dict[str, tuple[RunFolder, int]] = {}
    for name, run in runs.items():
        steps = run.shown_steps()
        if len(runs) == 1:
            validations |= {f"step {step} ({word})": (run, step) for word, step in steps.items()}
        elif steps:
            if not validations and "start" in steps:
                validations["start"] = run, steps["start"]
            validations[name] = run, steps.get("best", list(steps.values())[-1])
    return validations


def validations_table(runs: Mapping[str, RunFolder]) -> Table:
    """Metrics as rows, the shown validations as columns; of a single run also the change."""
    validations = _shown_validations(runs)
    head = ["validation"]
    lines = []
    for name, (run, step) in validations.items():
        head.append(name if "step" in name else f"{name}, step {step}")
        lines.append(next(line for line in run.validations if line["step"] == step))
    with_change = len(runs) == 1 < len(lines)
    doubles = set.intersection(*(run.doubles for run in runs.values())) | {"val/seconds"}
    rows = []
    for key in dict.fromkeys(key for line in lines for key in line):
        if key.startswith("val/") and key not in doubles:
            rows.append(_result_row(key, [line.get(key) for line in lines], with_change))
    return Table("Validations", head + ["change from first to last"] * with_change, rows)


def _results_of_runs(runs: Mapping[str, RunFolder]) -> Markup:
    """``validations_table`` and, folded away, all validations in full precision."""
    table = validations_table(runs)
    body = macros().table(*table) if table.rows else Markup("")
    terms = [item for run in runs.values() for item in run.terms.items()]
    rewarded = any("cider" in (name, term.get("target")) for name, term in terms)
    if any("val/cider" in run.keys for run in runs.values()):
        body += macros().note(f"{CIDER_SCALE} {CIDER_DIFFERENCES if rewarded else ''}")
    for name, run in runs.items():
        body += _all_validations(name, run)
    return body


def _result_row(key: str, values: Sequence[float | None], with_change: bool) -> list[Cell]:
    shown = [None if value is None else factor_of(key) * value for value in values]
    row = [Cell(title_of(key))]
    row += [Cell(LEFT_OUT if value is None else number(value)) for value in shown]
    first, last = shown[0], shown[-1]
    if with_change and first is not None and last is not None:
        share = _minus(f"{(last - first) / abs(first):+.1%}") if first else ""
        row.append(Cell(number(last - first), share))
    return row


def _all_validations(name: str, run: RunFolder) -> Markup:
    if not run.validations:
        return Markup("")
    keys = dict.fromkeys(key for line in run.validations for key in line if key != "step")
    rows = []
    for line in run.validations:
        values = [repr(line[key]) if key in line else LEFT_OUT for key in keys]
        rows.append([str(line["step"]), *values])
    head = ["step", *(key.removeprefix("val/") for key in keys)]
    table = macros().table("as in metrics.jsonl", head, rows)
    return macros().folded(f"All {len(rows)} validations of {name}, as logged", table)


def _validation_captions(
    first: RunFolder, validations: Validations, source: Source | None, images: int
) -> Markup:
    systems = {name: run.predictions(step) for name, (run, step) in validations.items()}
    if not any(systems.values()):
        return Markup("")
    data = first.config.get("data", {})
    split = first.config.get("eval", {}).get("split", "val")
    source = source or rows_of_config(data, split)
    words = words_tokenizer("auto", data.get("tokenizer", TOKENIZER))
    scores = {**reference_scores(systems, source.rows, words)}
    for name, (run, step) in validations.items():
        for judge, by_image in run.judges(step).items():
            if not (scores and judge in N_GRAM_SCORES.values()):
                column = column_of(JUDGE + judge)
                shown = {i: column.factor * value for i, value in by_image.items()}
                scores[column.heading] = {**scores.get(column.heading, {}), name: shown}
    note = f"Greedy captions of split {split}. Words that {next(iter(systems))} did not say are marked."
    return macros().gallery(gallery(systems, scores, source, note, images))


def score_tables(systems: Mapping[str, Sequence[EvaluationFolder]]) -> list[Table]:
    """Systems down, metrics across: captions and judges, then signs of bad captions, then the oracle's.

    Metrics are printed as papers do (the heading says x100 or %), with the standard deviation over seeds or, of one
    evaluation, its interval; the best value of a metric where more is better is marked.
    """
    means = {name: over_seeds(seeds) for name, seeds in systems.items()}
    keys = dict.fromkeys(key for scores in means.values() for key in scores)
    judges = [key for key in keys if key.startswith(JUDGE)]
    captions = [*(key for key in CAPTION_COLUMNS if key in keys), *judges]
    oracle = [key for key in keys if key in ORACLE_COLUMNS]
    signs = [key for key in TEXT_COLUMNS | keys if key in keys and key not in captions + oracle]
    columns_by_caption = {
        "Metrics; the highest value of a column is bold": captions,
        "Signs of bad captions": signs,
        "Oracle": oracle,
    }
    tables = []
    for caption, columns in columns_by_caption.items():
        rows = [_system_row(name, seeds, means, columns) for name, seeds in systems.items()]
        head = ["system", "of", *(column_of(key).heading for key in columns)]
        tables += [Table(caption, head, rows)] if columns else []
    return tables


def score_notes(systems: Mapping[str, Sequence[EvaluationFolder]]) -> list[str]:
    """Sentences on the tables: what was left out and why, intervals, decoding, and signatures."""
    notes = []
    names_by_signature: dict[str, list[str]] = {}
    for name, seeds in systems.items():
        scores = seeds[0].scores
        names_by_signature.setdefault(scores["signature"], []).append(name)
        notes += [f"{key} is left out: {why}" for key, why in scores.get("left_out", {}).items()]
        notes += [f"Intervals: {scores['interval']}"] if scores.get("interval") else []
        notes += [f"Decoding: {scores['decoding']}"] if scores.get("decoding") else []
    if len(names_by_signature) > 1:
        notes.append("The signatures differ, so the rows may not compare.")
    for signature, names in names_by_signature.items():
        notes.append(f"Signature of {', '.join(names)}: {signature}")
    return list(dict.fromkeys(notes))


def scores_section(systems: Mapping[str, Sequence[EvaluationFolder]]) -> Markup:
    """``score_tables`` and ``score_notes``."""
    tables = Markup("").join(macros().table(*table) for table in score_tables(systems))
    return tables + macros().list(score_notes(systems))


def _system_row(
    name: str,
    seeds: Sequence[EvaluationFolder],
    means: Mapping[str, Mapping[str, tuple[float, float | None]]],
    columns: Sequence[str],
) -> list[Cell]:
    scores = seeds[0].scores
    intervals = scores.get("intervals", {}) if len(seeds) == 1 else {}
    of = f"{scores['n']:,} captions" if len(seeds) == 1 else f"{len(seeds)} seeds"
    row = [Cell(name), Cell(of)]
    for key in columns:
        if key not in means[name]:
            row.append(Cell(LEFT_OUT))
            continue
        value, deviation = means[name][key]
        small = "" if deviation is None else f"± {_format_value(key, deviation)}"
        if key in intervals:
            small = " to ".join(_format_value(key, end) for end in intervals[key])
        best = max(of_system[key][0] for of_system in means.values() if key in of_system)
        is_rated = len(means) > 1 and (key in HIGHER_IS_BETTER or key.startswith(JUDGE))
        row.append(Cell(_format_value(key, value), small, is_rated and value == best))
    return row


def _minus(text: str) -> str:
    return text.replace("-", "−")


def _format_value(key: str, value: float) -> str:
    return _minus(format_value(value, column_of(key)))


def captions_section(
    evaluations: Evaluations, source: Source | None, images: int, note: str = ""
) -> Markup:
    systems = {name: one.captions for name, one in evaluations.items() if one.captions}
    if not systems:
        return Markup("")
    settings = next(iter(evaluations.values())).settings
    data = settings.get("data", {})
    source = source or rows_of_config(data, settings.get("split", "test"))
    if len(systems) > 1:
        note = f"{note} Words that {next(iter(systems))} did not say are marked.".strip()
    words = words_tokenizer(settings.get("tokenizer", "auto"), data.get("tokenizer", TOKENIZER))
    scores = reference_scores(systems, source.rows, words)
    return macros().gallery(gallery(systems, scores, source, note, images))


def settings_section(runs: Mapping[str, RunFolder]) -> Markup:
    """Folder, signature, command line, versions and configuration of runs."""
    body = Markup("")
    for name, run in runs.items():
        seconds = [value for _, value in run.series("time/step")]
        planned = run.config.get("train", {}).get("max_steps")
        state = run.state.get("stopped") or ("complete" if run.complete else "not complete")
        facts = {
            "folder": str(run.path),
            "steps": f"{run.last_step:,} of {planned}, {state}",
            "a step takes": f"{statistics.median(seconds):.3g} s (median)" if seconds else "",
            "signature": run.env.get("signature") or run.state.get("signature"),
            "command": shlex.join(run.env.get("command", [])),
        }
        settings = {"environment": dict(run.env), "configuration": dict(run.config)}
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        body += macros().settings(name if len(runs) > 1 else "", facts, text)
    return body


def _training(run: RunFolder) -> str:
    if run.terms:
        return f"Self-critical training on {run.reward}"
    if "task" in run.config:
        return f"Training of a reward model: {run.config['task']}"
    return "Cross-entropy training"
