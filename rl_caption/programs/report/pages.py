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
    """The page as HTML: one file with its style, charts and images inside, without scripts, which
    loads nothing.
    """
    return templates().get_template("page.html").render(page=page)


def run_page(run: RunFolder, source: Source | None, images: int) -> Page:
    """The report of a run, finished or not.

    The gallery shows rows of the run's data, unless a source is given.

    Raises:
        DataError, ReportError: damaged captions or judges' scores.
    """
    sections = {
        "Monitor": monitor_section({"": run}),
        "Results": _results_of_run(run),
        "Curves": curves({run.name: [run]}) or macros().note("Nothing has been logged yet."),
        "Captions": _validation_captions(run, source, images),
        "Settings": settings_section({run.name: run}),
    }
    about = "Cross-entropy training"
    if run.terms:
        about = f"Self-critical training on {run.reward}"
    elif "task" in run.config:
        about = f"Training of a reward model: {run.config['task']}"
    return Page(run.name, about, sections)


def monitor_section(runs: Mapping[str, RunFolder]) -> Markup:
    """What the monitor found in the runs that it watched, each below its name."""
    watched = [(name, run) for name, run in runs.items() if run.has_monitor]
    return Markup("").join(macros().monitor(run, name) for name, run in watched)


def evaluations_page(evaluations: Evaluations, source: Source | None, images: int) -> Page:
    """One or several evaluations by name: tables, and captions of the same images, with changes
    against the first.

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
    rows = []
    for row in difference_rows(comparison["differences"]):
        rows.append([text.replace("-", "−") for text in row])
    note = (
        f"Difference: {second} minus {first}. Interval: paired bootstrap over images; p: two-sided "
        f"permutation test; "
        f"{comparison['resamples']:,} resamples each, not corrected for the number of metrics"
    )
    head = ["metric", first, second, "difference", "95 % interval", "p"]
    sections = {"Difference": macros().table(note, head, rows)}
    sections |= evaluations_page(evaluations, source, images).sections
    return Page(f"{first} / {second}", f"Comparison: {second} against {first}", sections)


def validations_table(run: RunFolder) -> Table:
    """Metrics as rows; the first, best and last validation as columns, and the change."""
    lines = {line["step"]: line for line in run.validations}
    shown = [lines[step] for step in run.shown_steps().values()]
    head = ["validation", *(f"step {step} ({word})" for word, step in run.shown_steps().items())]
    rows = []
    for key in dict.fromkeys(key for line in shown for key in line):
        if key.startswith("val/") and key not in run.doubles and key != "val/seconds":
            values = [factor_of(key) * line[key] if key in line else None for line in shown]
            row = [Cell(title_of(key))]
            row += [Cell(LEFT_OUT if value is None else number(value)) for value in values]
            first, last = values[0], values[-1]
            if len(shown) > 1 and first is not None and last is not None:
                share = f"{(last - first) / abs(first):+.1%}".replace("-", "−") if first else ""
                row.append(Cell(number(last - first), share))
            rows.append(row)
    return Table("Validations", head + ["change from first to last"] * (len(shown) > 1), rows)


def _results_of_run(run: RunFolder) -> Markup:
    """``validations_table`` and, folded away, all validations in full precision."""
    table = validations_table(run)
    body = macros().table(*table) if table.rows else Markup("")
    rewarded = any("cider" in (name, term.get("target")) for name, term in run.terms.items())
    if "val/cider" in run.keys:
        body += macros().note(f"{CIDER_SCALE} {CIDER_DIFFERENCES if rewarded else ''}")
    if not run.validations:
        return body
    keys = dict.fromkeys(key for line in run.validations for key in line if key != "step")
    rows = []
    for line in run.validations:
        values = [repr(line[key]) if key in line else LEFT_OUT for key in keys]
        rows.append([str(line["step"]), *values])
    head = ["step", *(key.removeprefix("val/") for key in keys)]
    logged = macros().table("as in metrics.jsonl", head, rows)
    return body + macros().folded(f"All {len(rows)} validations, as logged", logged)


def _validation_captions(run: RunFolder, source: Source | None, images: int) -> Markup:
    steps = {f"step {step} ({word})": step for word, step in run.shown_steps().items()}
    systems = {name: run.predictions(step) for name, step in steps.items()}
    if not any(systems.values()):
        return Markup("")
    data = run.config.get("data", {})
    split = run.config.get("eval", {}).get("split", "val")
    source = source or rows_of_config(data, split)
    words = words_tokenizer("auto", data.get("tokenizer", TOKENIZER))
    scores = {**reference_scores(systems, source.rows, words)}
    for name, step in steps.items():
        for judge, by_image in run.judges(step).items():
            if not (scores and judge in N_GRAM_SCORES.values()):
                column = column_of(JUDGE + judge)
                shown = {i: column.factor * value for i, value in by_image.items()}
                scores[column.heading] = {**scores.get(column.heading, {}), name: shown}
    note = f"Greedy captions of split {split}. Words that {next(iter(systems))} did not say are marked."
    return macros().gallery(gallery(systems, scores, source, note, images))


def score_tables(systems: Mapping[str, Sequence[EvaluationFolder]]) -> list[Table]:
    """Systems down, metrics across: captions and judges, then signs of bad captions, then the
    oracle's.

    Metrics are printed as papers do (the heading says x100 or %), with the standard deviation over
    seeds or, of one evaluation, its interval; the best value of a metric where more is better is
    marked.
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


def _format_value(key: str, value: float) -> str:
    return format_value(value, column_of(key)).replace("-", "−")


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
