"""The report of a grid: tables over seeds, charts over alpha, captions of the same images."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from rl_caption.data.files import write_text
from rl_caption.evaluation.metrics import JUDGE
from rl_caption.evaluation.results import column_of, csv_text, markdown
from rl_caption.programs.ablation.config import START, AblateConfig, CellConfig
from rl_caption.programs.ablation.grid import as_argument
from rl_caption.programs.ablation.plan import Plan
from rl_caption.programs.report.charts import Series, curves, figure, macros
from rl_caption.programs.report.gallery import MAX_IMAGES, Source, source_of
from rl_caption.programs.report.pages import (
    Page,
    Table,
    captions_section,
    score_notes,
    score_tables,
    scores_section,
    settings_section,
)
from rl_caption.programs.report.program import write_report as write_page
from rl_caption.programs.report.read import EvaluationFolder, RunFolder, over_seeds

ALPHA_METRICS = (
    "CIDEr",
    "BLEU-4",
    "METEOR",
    "oracle/f1",
    "length/mean",
    "captions/repeated_ngrams",
)


class Member(NamedTuple):
    """One evaluated captioner: the starting policy (seed and run are None), or a cell with one
    seed.

    ``system`` names its row in tables, which all seeds of a cell share.
    """

    system: str
    alpha: float | None
    seed: int | None
    evaluation: EvaluationFolder
    run: RunFolder | None


Systems = Mapping[str, Sequence[Member]]
"""``by_system``."""


def by_system(members: Sequence[Member]) -> dict[str, list[Member]]:
    """System -> its members (a starting policy, or the seeds of a cell), in the order in which
    systems first occur.
    """
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.system, []).append(member)
    return groups


def write_report(
    members: Sequence[Member], plan: Plan, config: AblateConfig, failures: Sequence[str]
) -> list[Path]:
    """Write ``table.md``, ``runs.csv`` and ``report.html``; return the paths.

    ``members`` begins with the starting policy; ``failures`` are sentences about missing cells.
    """
    out = Path(config.out)
    systems = by_system(members)
    tables = markdown_tables(systems)
    print(f"\n{tables}\n")
    policies = "after the last step" if config.policy == "last" else "best by validation"
    remarks = [
        f"Means over seeds ± standard deviation, split {config.split!r}; policies {policies}. "
        "`start` is the policy that all cells start from.",
        *(f"{label}: {formula(cell)}" for label, cell in plan.cells.items()),
        *score_notes(evaluations_of(systems)),
        *(f"missing: {failure}" for failure in failures),
    ]
    listed = "\n".join(f"- {line}" for line in remarks)
    written = {
        "table.md": f"# {out.name}\n\n{tables}\n\n{listed}\n",
        "runs.csv": runs_csv(systems),
    }
    for name, text in written.items():
        write_text(out / name, text)
    files = [out / name for name in written]
    if config.report:
        page = ablation_page(out.name, systems, failures, source_of(plan.rows))
        files += filter(None, [write_page(out, plan.rows, page)])
    return files


def ablation_page(name: str, systems: Systems, failures: Sequence[str], source: Source) -> Page:
    """Means over seeds, metrics over alpha, curves, and captions of the first seed of each system."""
    evaluations = evaluations_of(systems)
    runs = {name: [member.run for member in seeds if member.run] for name, seeds in systems.items()}
    runs = {name: seeds for name, seeds in runs.items() if seeds}
    missing = Markup("").join(macros().verdict(f"Missing: {text}", True) for text in failures)
    first = {name: seeds[0] for name, seeds in evaluations.items()}
    figures = []
    if sum(members[0].alpha is not None for members in systems.values()) > 1:
        for key in metric_keys(systems):
            if key in ALPHA_METRICS or key.startswith(JUDGE):
                series = alpha_series(systems, key)
                figures.append(figure(column_of(key).heading, series, x_name="alpha"))
    note = "Dots are means over seeds, bars one standard deviation; the dashed line is the starting policy."
    alpha = macros().note(note) + macros().charts(figures)
    sections = {
        "Results": missing + scores_section(evaluations),
        "Monitor": macros().table(*alarm_table(systems)),
        "Alpha": alpha if figures else Markup(""),
        "Curves": curves(runs),
        "Captions": captions_section(first, source, MAX_IMAGES, "One seed of each system."),
        "Settings": settings_section({name: seeds[0] for name, seeds in runs.items()}),
    }
    return Page(name, "Ablation: rewards side by side", sections)


def evaluations_of(systems: Systems) -> dict[str, list[EvaluationFolder]]:
    """System -> the evaluations of its seeds."""
    return {name: [member.evaluation for member in seeds] for name, seeds in systems.items()}


def metric_keys(systems: Systems) -> list[str]:
    """All metrics, in the order in which they first occur."""
    every = [one.evaluation.scores["metrics"] for seeds in systems.values() for one in seeds]
    return list(dict.fromkeys(key for metrics in every for key in metrics))


def formula(cell: CellConfig) -> str:
    """A cell's reward, with options that differ from the defaults, and its overrides, as one line
    of text: ``0.3 rouge_l + 0.7 cider; train.lr = 1e-05``.
    """
    terms = []
    for name, term in cell.terms.items():
        options = term.model_dump(mode="json", exclude={"weight"}, exclude_defaults=True)
        weight = "" if term.weight == 1 else f"{term.weight:g} "
        terms.append(weight + name + (f" {json.dumps(options)}" if options else ""))
    return "; ".join(
        [
            " + ".join(terms),
            *(f"{key} = {as_argument(value)}" for key, value in cell.overrides.items()),
        ]
    )


def alarm_table(systems: Systems) -> Table:
    """How many runs of each system had an alarm, and the earliest one."""
    rows = []
    for name, members in systems.items():
        watched = [one.run for one in members if one.run is not None and one.run.has_monitor]
        steps = [run.alarms[0] for run in watched if run.alarms]
        count = f"{len(steps)} of {len(watched)}" if watched else "not watched"
        rows.append([name, count, f"step {min(steps)}" if steps else "none"])
    caption = (
        "Runs whose reward rose while their captions got worse, by the monitor of reward hacking"
    )
    return Table(caption, ["system", "runs with an alarm", "earliest"], rows)


def markdown_tables(systems: Systems) -> str:
    """The tables of the page as Markdown: mean over seeds ± standard deviation."""
    blocks = []
    for _, head, rows in [*score_tables(evaluations_of(systems)), alarm_table(systems)]:
        lines = []
        for row in rows:
            texts = [cell if isinstance(cell, str) else " ".join(cell[:2]) for cell in row]
            lines.append([text.strip() for text in texts])
        blocks.append(markdown(head, lines))
    return "\n\n".join(blocks)


def runs_csv(systems: Systems) -> str:
    """CSV, a row for each run: every metric as computed."""
    keys = metric_keys(systems)
    lines: list[list[Any]] = [["system", "alpha", "seed", *keys, "first_alarm"]]
    for members in systems.values():
        for one in members:
            values = [one.evaluation.scores["metrics"].get(key) for key in keys]
            first_alarm = one.run.alarms[0] if one.run and one.run.alarms else None
            lines.append([one.system, one.alpha, one.seed, *values, first_alarm])
    return csv_text(lines)


def alpha_series(systems: Systems, key: str) -> list[Series]:
    """The lines of alpha against a metric, times the factor of its heading: of the cells, and of
    the start.
    """
    factor = column_of(key).factor
    points, errors, start = [], {}, None
    for members in systems.values():
        mean, deviation = over_seeds([one.evaluation for one in members]).get(key, (None, None))
        alpha = members[0].alpha
        if mean is None:
            continue
        if alpha is not None:
            points.append((alpha, factor * mean))
            errors[alpha] = factor * (deviation or 0.0)
        elif members[0].seed is None:
            start = factor * mean
    points.sort()
    lines = [Series("mean over seeds", points, 0, True, errors)] if points else []
    if points and start is not None:
        lines.append(Series(START, [(points[0][0], start), (points[-1][0], start)], 2))
    return lines
