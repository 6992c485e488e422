"""The pages: of a run, of evaluations; the parts that other pages share."""

import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import yaml
from markupsafe import Markup

from rewards.text.cider import CIDER_DIFFERENCES
from rewards.text.tokenize import TOKENIZER
from rl_caption.evaluation.confidence import Difference
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
from rl_caption.programs.report.charts import curves, macros, shown_key, templates
from rl_caption.programs.report.gallery import (
    Source,
    gallery,
    reference_scores,
    rows_of_config,
)
from rl_caption.programs.report.read import EvaluationFolder, RunFolder, over_seeds

Evaluations = Mapping[str, EvaluationFolder]
"""Name of a system -> what ``evaluate`` wrote of it."""
Seeds = Mapping[str, Sequence[EvaluationFolder]]
"""Name of a system -> what ``evaluate`` wrote of each of its seeds."""


class Page(NamedTuple):
    """A report: heading -> section; empty sections are left out."""

    title: str
    subtitle: str
    sections: Mapping[str, Markup]


class Table(NamedTuple):
    """The arguments of the macro ``table``."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


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
    results = Markup("")
    if run.validations:
        results = macros().table(*validations_table(run))
    if any("cider" in (name, term.get("target")) for name, term in run.terms.items()):
        results += macros().note(CIDER_DIFFERENCES)
    sections = {
        "Monitor": monitor_section({"": run}),
        "Results": results,
        "Curves": curves({run.name: [run]})
        or macros().note("Nothing has been logged yet."),
        "Captions": _validation_captions(run, source, images),
        "Settings": settings_section({run.name: run}),
    }
    return Page(
        run.name, run.reward or run.config.get("task", "cross-entropy"), sections
    )


def evaluations_page(
    evaluations: Evaluations,
    source: Source | None,
    images: int,
    differences: Mapping[str, Difference] = MappingProxyType({}),
) -> Page:
    """One or several evaluations by name: tables, and captions of the same images.

    Without a source, references and images are those of the data that ``settings.json`` names.
    ``differences`` are those of a comparison of two.
    """
    note = "Second system minus first; paired bootstrap, two-sided permutation test"
    head = ["metric", *evaluations, "difference", "95 % interval", "p"]
    rows = list(difference_rows(differences))
    sections = {
        "Difference": macros().table(note, head, rows) if rows else Markup(""),
        "Results": scores_section({name: [one] for name, one in evaluations.items()}),
        "Captions": captions_section(evaluations, source, images),
    }
    return Page(" / ".join(evaluations), "Evaluation of captions", sections)


def monitor_section(runs: Mapping[str, RunFolder]) -> Markup:
    """What the monitor found in the runs that it watched, each below its name."""
    watched = [(name, run) for name, run in runs.items() if run.has_monitor]
    return Markup("").join(macros().monitor(run, name) for name, run in watched)


def settings_section(runs: Mapping[str, RunFolder]) -> Markup:
    """Folder, steps, signature, command line, versions and configuration of runs."""
    body = Markup("")
    for name, run in runs.items():
        settings = {"environment": dict(run.env), "configuration": dict(run.config)}
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        body += macros().settings(
            name, run, shlex.join(run.env.get("command", [])), text
        )
    return body


def validations_table(run: RunFolder) -> Table:
    """Metrics as rows; the first, best and last validation as columns."""
    lines = {line["step"]: line for line in run.validations}
    steps = run.shown_steps()
    rows = []
    for key in run.keys:
        if key.startswith("val/"):
            row = [shown_key(key)]
            for step in steps.values():
                has_value = key in lines[step]
                value = (
                    f"{factor_of(key) * lines[step][key]:.4g}"
                    if has_value
                    else LEFT_OUT
                )
                row.append(value)
            rows.append(row)
    return Table("Validations", ["key", *steps], rows)


def score_tables(systems: Seeds) -> list[Table]:
    """Systems down, metrics across: captions and judges, then signs of bad captions, then the
    oracle's.

    Metrics are printed as papers do (the heading says x100 or %), with the standard deviation over
    seeds or, of one evaluation, its interval.
    """
    means = {name: over_seeds(seeds) for name, seeds in systems.items()}
    keys = dict.fromkeys(key for scores in means.values() for key in scores)
    judges = [key for key in keys if key.startswith(JUDGE)]
    captions = [*(key for key in CAPTION_COLUMNS if key in keys), *judges]
    oracle = [key for key in keys if key in ORACLE_COLUMNS]
    signs = [
        key
        for key in TEXT_COLUMNS | keys
        if key in keys and key not in captions + oracle
    ]
    groups = {"Metrics": captions, "Signs of bad captions": signs, "Oracle": oracle}
    tables = []
    for caption, columns in groups.items():
        rows = []
        for name, seeds in systems.items():
            of = (
                f"{len(seeds)} seeds"
                if len(seeds) > 1
                else f"{seeds[0].scores['n']:,} captions"
            )
            cells = [_score(seeds, means[name], key) for key in columns]
            rows.append([name, of, *cells])
        if columns:
            head = ["system", "of", *(column_of(key).heading for key in columns)]
            tables.append(Table(caption, head, rows))
    return tables


def _score(
    seeds: Sequence[EvaluationFolder],
    means: Mapping[str, tuple[float, float | None]],
    key: str,
) -> str:
    if key not in means:
        return LEFT_OUT
    column, (value, deviation) = column_of(key), means[key]
    text = format_value(value, column)
    if deviation is not None:
        text += f" ± {format_value(deviation, column)}"
    elif key in seeds[0].scores.get("intervals", {}):
        low, high = seeds[0].scores["intervals"][key]
        text += f" ({format_value(low, column)} to {format_value(high, column)})"
    return text


def score_notes(systems: Seeds) -> list[str]:
    """Sentences on the tables: what was left out and why, intervals, decoding, and signatures."""
    notes = []
    names_by_signature: dict[str, list[str]] = {}
    for name, seeds in systems.items():
        scores = seeds[0].scores
        names_by_signature.setdefault(scores["signature"], []).append(name)
        notes += [
            f"{key} is left out: {why}"
            for key, why in scores.get("left_out", {}).items()
        ]
        notes += [f"Intervals: {scores['interval']}"] if scores.get("interval") else []
        notes += [f"Decoding: {scores['decoding']}"] if scores.get("decoding") else []
    if len(names_by_signature) > 1:
        notes.append("The signatures differ, so the rows may not compare.")
    for signature, names in names_by_signature.items():
        notes.append(f"Signature of {', '.join(names)}: {signature}")
    return list(dict.fromkeys(notes))


def scores_section(systems: Seeds) -> Markup:
    """``score_tables`` and ``score_notes``."""
    tables = Markup("").join(macros().table(*table) for table in score_tables(systems))
    return tables + macros().list(score_notes(systems))


def captions_section(
    evaluations: Evaluations, source: Source | None, images: int
) -> Markup:
    """The gallery of the captions of several systems; empty where none were kept."""
    systems = {name: one.captions for name, one in evaluations.items() if one.captions}
    if not systems:
        return Markup("")
    settings = next(iter(evaluations.values())).settings
    data = settings.get("data", {})
    source = source or rows_of_config(data, settings.get("split", "test"))
    words = words_tokenizer(
        settings.get("tokenizer", "auto"), data.get("tokenizer", TOKENIZER)
    )
    scores = reference_scores(systems, source.rows, words)
    return macros().gallery(gallery(systems, scores, source, "", images))


def _validation_captions(run: RunFolder, source: Source | None, images: int) -> Markup:
    """The gallery of the captions of the first, the best and the last validation."""
    steps = run.shown_steps()
    systems = {name: run.predictions(step) for name, step in steps.items()}
    if not any(systems.values()):
        return Markup("")
    data = run.config.get("data", {})
    split = run.config.get("eval", {}).get("split", "val")
    source = source or rows_of_config(data, split)
    words = words_tokenizer("auto", data.get("tokenizer", TOKENIZER))
    scores = dict(reference_scores(systems, source.rows, words))
    for name, step in steps.items():
        for judge, by_image in run.judges(step).items():
            scores[judge] = {**scores.get(judge, {}), name: by_image}
    return macros().gallery(gallery(systems, scores, source, f"Split {split}.", images))
