"""What was found about metrics on sets of judgements, as Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rl_caption.data.files import write_json, write_text
from rl_caption.meta_evaluation.config import JudgeSetConfig
from rl_caption.meta_evaluation.figures import Figure

UNDEFINED = "–"
CSV_COLUMNS = (
    "set", "metric", "figure", "value", "low", "high", "count", "published_convention", "signature", "note",
)  # fmt: skip


@dataclass
class SetResult:
    """All metrics on one set, or on one part of it."""

    name: str
    description: str
    convention: str
    count: int
    """Judgements, or pairs."""
    excluded: dict[str, int]
    """Why judgements of the files are not among them -> how many."""
    figures: dict[str, list[Figure]] = field(default_factory=dict)
    """Heading of a metric -> what was found."""
    signatures: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Heading of a metric -> why it could not be computed."""


def write_results(folder: Path, config: JudgeSetConfig, results: Sequence[SetResult]) -> list[Path]:
    """Write ``agreement.md``, ``agreement.csv`` and ``agreement.json``; return their paths in this order."""
    paths = [folder / f"agreement.{kind}" for kind in ("md", "csv", "json")]
    write_text(paths[0], "\n".join(as_markdown(result, config.bootstrap) for result in results))
    write_text(paths[1], as_csv(results))
    write_json(paths[2], {"config": asdict(config), "sets": [asdict(result) for result in results]})
    return paths


def as_markdown(result: SetResult, resamples: int) -> str:
    """Return one set as a table: a line for each metric, a column for each figure, times 100 as papers print them."""
    names = list(dict.fromkeys(figure.name for own in result.figures.values() for figure in own))
    published = {figure.name for own in result.figures.values() for figure in own if figure.published}
    published = set() if published == set(names) else published  # nothing to tell apart
    head = ["metric", *(f"**{heading(name)}**" if name in published else heading(name) for name in names)]
    lines = []
    for metric, own in result.figures.items():
        found = {figure.name: figure for figure in own}
        lines.append([metric, *(_cell(found.get(name)) for name in names)])
    lines += [[metric, *[UNDEFINED] * len(names)] for metric in result.left_out]
    notes = [f"- Convention: {result.convention}"]
    notes += [f"- Excluded: {count}, {reason}" for reason, count in result.excluded.items() if count]
    if resamples:
        notes.append(f"- In brackets: 95 % bootstrap interval, {resamples} resamples of images")
    if published:
        notes.append(f"- Bold: what papers print for {result.name}")
    for metric, own in result.figures.items():
        notes += dict.fromkeys(f"- {metric}: {figure.note}" for figure in own if figure.note)
    notes += [f"- {UNDEFINED} {metric}: {reason}" for metric, reason in result.left_out.items()]
    notes += [f"- {metric}: `{signature}`" for metric, signature in result.signatures.items()]
    title = f"## {result.name}: {result.description}"
    return "\n\n".join([title, markdown(head, lines), "\n".join(notes)]) + "\n"


def heading(name: str) -> str:
    """Return the name of a figure with its unit."""
    return f"{name}, x100" if name.startswith(("tau", "pearson", "spearman")) else f"{name}, % right"


def _cell(figure: Figure | None) -> str:
    if figure is None or figure.value is None:
        return UNDEFINED
    text = f"{100 * figure.value:.1f}"
    if figure.low is None or figure.high is None:
        return text
    return f"{text} [{100 * figure.low:.1f}, {100 * figure.high:.1f}]"


def as_csv(results: Sequence[SetResult]) -> str:
    """Return all figures as CSV, unrounded: tau in [-1, 1], accuracies in [0, 1]; what is not defined is empty."""
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    table.writerow(CSV_COLUMNS)
    for result in results:
        for metric, own in result.figures.items():
            for figure in own:
                values = [figure.value, figure.low, figure.high, figure.count, figure.published]
                table.writerow([result.name, metric, figure.name, *values, result.signatures[metric], figure.note])
        for metric, reason in result.left_out.items():
            table.writerow([result.name, metric, "", "", "", "", "", "", "", reason])
    return lines.getvalue()


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Lay a table out: the first column to the left, numbers to the right."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])
