"""The report of a grid: tables over seeds, the plot over alpha, captions of the same images."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards.files import atomic_write
from rl_caption.ablation.config import AblateConfig
from rl_caption.ablation.plan import Cell, Plan, as_argument
from rl_caption.ablation.results import Result
from rl_caption.data.base import DataError, Row, thumbnail
from rl_caption.data.files import write_text
from rl_caption.evaluation.metrics import JUDGE
from rl_caption.evaluation.results import COLUMNS, LEFT_OUT, Column, csv_text, markdown
from rl_caption.report.program import write_report as write_page_of

Systems = Mapping[str, Sequence[Result]]
"""Name of a row -> its starting policy, or its cell's results of all seeds."""
PAPER_KEYS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")
"""Columns of the L-CLIPScore paper's tables; the judges follow."""
TEXT_KEYS = ("captions/repeated_ngrams", "captions/bad_endings", "length/mean", "vocabulary/size")
HACKING_KEYS = (*TEXT_KEYS, "oracle/f1", "oracle/precision", "oracle/recall", "oracle/unparsed")
IMAGE_SIZE = 256
"""Longest side of the pictures in ``captions.md``, in pixels."""


def write_report(results: Sequence[Result], plan: Plan, config: AblateConfig, failures: Sequence[str]) -> list[Path]:
    """Write ``table.md``, ``table.csv``, ``runs.csv``, ``captions.md``, ``report.html``; for alphas ``alpha.png``.

    ``results`` has the starting policies first; ``failures`` are sentences about cells that are missing.
    """
    out, systems, rows = Path(config.out), by_system(results), next(iter(plan.bases.values())).rows
    tables = markdown_tables(systems)
    print(f"\n{tables}\n")
    decoding = "greedy" if config.num_beams == 1 else f"beam search of width {config.num_beams}"
    policies = "after the last step" if config.policy == "last" else "best by validation"
    lines = [
        f"Means over seeds ± standard deviation, split {config.split!r}, {decoding}; policies {policies}. "
        "`start` is the policy that all cells start from.",
        *dict.fromkeys(f"{cell.system}: {formula(cell)}" for cell in plan.cells),
        *notes(results),
        *(f"missing: {failure}" for failure in failures),
    ]
    remarks = "\n".join(f"- {line}" for line in lines)
    written = {
        "table.md": f"# {out.name}\n\n{tables}\n\n{remarks}\n",
        "table.csv": summary_csv(systems),
        "runs.csv": runs_csv(systems),
    }
    if config.show_images:
        captions = {name: found[0].captions for name, found in systems.items()}
        written["captions.md"] = captions_page(rows[: config.show_images], captions, out / "images")
    for name, text in written.items():
        write_text(out / name, text)
    files = [out / name for name in written]
    if any(result.alpha is not None for result in results):
        try:
            files.append(draw_alpha(systems, out / "alpha.png"))
        except ImportError:
            print("no alpha.png: matplotlib is not installed: pip install 'rl-caption[report]'", file=sys.stderr)
    page = write_page_of(out, rows) if config.report else None
    return files if page is None else [*files, page]


def formula(cell: Cell) -> str:
    """A cell's reward and overrides: ``0.3 l_clipscore + 0.7 cider; train.lr = 1e-05``."""
    mixture = " + ".join(f"{term.weight:g} {name}" for name, term in cell.terms.items())
    return "; ".join([mixture, *(f"{key} = {as_argument(value)}" for key, value in cell.overrides.items())])


def by_system(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Results by system, in the order in which the systems first occur."""
    return {result.system: [other for other in results if other.system == result.system] for result in results}


def mean_and_std(results: Sequence[Result], key: str) -> tuple[float | None, float | None]:
    """Mean of a metric over the seeds that have it, and standard deviation (n - 1); None where there are too few."""
    values = [result.evaluation.metrics[key] for result in results if key in result.evaluation.metrics]
    return statistics.fmean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None


def columns_of(systems: Systems) -> list[dict[str, Column]]:
    """Columns of the two tables (those of the paper, signs of reward hacking), as far as they were computed."""
    evaluations = [result.evaluation for results in systems.values() for result in results]
    found = {key for evaluation in evaluations for key in evaluation.metrics}
    bounds = {key: ends for evaluation in evaluations for key, ends in evaluation.bounds.items()}
    paper = {key: Column(f"{key} (x100)") for key in PAPER_KEYS if key in found}
    for key, (low, high) in bounds.items():
        paper[key] = Column(f"{key.removeprefix(JUDGE)} [{low:g}, {high:g}]", 1.0, 4)
    return [paper, {key: COLUMNS[key] for key in HACKING_KEYS if key in found}]


def alarms_of(results: Sequence[Result]) -> tuple[int, list[int]]:
    """How many seeds were watched by the monitor, and the first step with an alarm of those that had one."""
    steps = [result.alarm_step for result in results if result.alarm_step is not None]
    return sum(result.watched for result in results), steps


def markdown_tables(systems: Systems) -> str:
    """Two Markdown tables, a row for each system: mean over seeds ± standard deviation."""
    paper, hacking = columns_of(systems)
    watched = any(alarms_of(results)[0] for results in systems.values())
    tables = []
    for columns, with_alarm in ((paper, False), (hacking, watched)):
        head = ["system", "seeds", *(column.heading for column in columns.values())]
        lines = []
        for name, results in systems.items():
            seeds = LEFT_OUT if results[0].seed is None else str(len(results))
            line = [name, seeds]
            for key, column in columns.items():
                numbers = [number * column.factor for number in mean_and_std(results, key) if number is not None]
                line.append(" ± ".join(f"{number:.{column.decimals}f}" for number in numbers) or LEFT_OUT)
            if with_alarm:
                count, steps = alarms_of(results)
                found = f"{min(steps)} ({len(steps)} of {count})" if steps else "none"
                line.append(found if count else LEFT_OUT)
            lines.append(line)
        if columns or with_alarm:
            tables.append(markdown(head + ["first alarm, step"] * with_alarm, lines))
    return "\n\n".join(tables)


def notes(results: Sequence[Result]) -> list[str]:
    """What was left out of the tables and why, and the signatures of the metrics."""
    left_out = [item for result in results for item in result.evaluation.left_out.items()]
    reasons = [f"{key} is left out: {reason}" for key, reason in left_out if key in PAPER_KEYS + HACKING_KEYS]
    signatures = list(dict.fromkeys(result.evaluation.signature for result in results))
    kind = "signature" if len(signatures) == 1 else "the signatures differ, so the rows do not compare"
    return [*dict.fromkeys(reasons), f"{kind}: {'; '.join(signatures)}"]


def summary_csv(systems: Systems) -> str:
    """CSV, a row for each system: every column's mean and ``KEY.std``, as computed; empty where there is none."""
    keys = [key for columns in columns_of(systems) for key in columns]
    head = ["system", "base", "alpha", "seeds", *(name for key in keys for name in (key, f"{key}.std"))]
    lines: list[list[Any]] = [[*head, "alarms", "first_alarm"]]
    for name, results in systems.items():
        watched, steps = alarms_of(results)
        values = [value for key in keys for value in mean_and_std(results, key)]
        seeds = sum(result.seed is not None for result in results)
        alarms = [len(steps) if watched else None, min(steps, default=None)]
        lines.append([name, results[0].base, results[0].alpha, seeds, *values, *alarms])
    return csv_text(lines)


def runs_csv(systems: Systems) -> str:
    """CSV, a row for each run: every metric as computed."""
    ordered = [result for results in systems.values() for result in results]
    keys = list(dict.fromkeys(key for result in ordered for key in result.evaluation.metrics))
    lines: list[list[Any]] = [["system", "base", "alpha", "seed", *keys, "first_alarm"]]
    for result in ordered:
        values = [result.evaluation.metrics.get(key) for key in keys]
        lines.append([result.system, result.base, result.alpha, result.seed, *values, result.alarm_step])
    return csv_text(lines)


def captions_page(rows: Sequence[Row], systems: Mapping[str, Mapping[str, str]], folder: Path) -> str:
    """Markdown of the captions of each row by every system (name -> image id -> caption).

    Pictures are written to ``folder``; an image that cannot be read (region features) has none.
    """
    parts = ["# Captions of the same images", "One seed a cell. The first line of an image is one of its references."]
    for index, row in enumerate(rows):
        parts.append(f"## {_escaped(row['image_id'])}")
        try:
            image = thumbnail(row["image"], IMAGE_SIZE)
        except DataError:
            pass
        else:
            with atomic_write(folder / f"{index}.png") as file:
                image.save(file, "PNG")
            parts.append(f"![image {index}]({folder.name}/{index}.png)")
        lines = ["| system | caption |", "|---|---|"]
        lines += [f"| reference | {_escaped(reference)} |" for reference in row["references"][:1]]
        for name, captions in systems.items():
            caption = captions.get(row["image_id"])
            lines.append(f"| {name} | {LEFT_OUT if caption is None else _escaped(caption) or '(empty)'} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    """Text as it stands, on one line of a Markdown table."""
    return re.sub(r"([\\|*_`<>\[\]#])", r"\\\1", " ".join(text.split()))


def alpha_curve(systems: Systems, base: str, key: str) -> list[tuple[float, float, float]]:
    """(alpha, mean, standard deviation) of a metric, by alpha; the deviation of a single seed is 0."""
    found = []
    for results in systems.values():
        (mean, std), alpha = mean_and_std(results, key), results[0].alpha
        if results[0].base == base and alpha is not None and mean is not None:
            found.append((alpha, mean, std or 0.0))
    return sorted(found)


def draw_alpha(systems: Systems, path: Path) -> Path:
    """Plot CIDEr (x100, left axis) and the first judge (right axis) over alpha, a panel for each base.

    Error bars are standard deviations over seeds; dotted lines are the starting policy.

    Raises:
        ImportError: matplotlib, an optional dependency, is not installed.
    """
    from matplotlib.figure import Figure

    columns, _ = columns_of(systems)
    judges = [(key, column, "#b5541c") for key, column in columns.items() if key.startswith(JUDGE)]
    bases = list(dict.fromkeys(results[0].base for results in systems.values() if results[0].alpha is not None))
    starts = {results[0].base: results[0].evaluation.metrics for results in systems.values() if results[0].seed is None}
    figure = Figure(figsize=(5.2 * len(bases), 3.6), layout="constrained")
    for index, base in enumerate(bases):
        left = figure.add_subplot(1, len(bases), index + 1, title=base, xlabel="alpha")
        for key, column, colour in [("CIDEr", Column("CIDEr (x100)"), "#1f5f99"), *judges[:1]]:
            axes = left.twinx() if key.startswith(JUDGE) else left
            curve = alpha_curve(systems, base, key)
            means, stds = ([column.factor * point[part] for point in curve] for part in (1, 2))
            axes.errorbar([alpha for alpha, _, _ in curve], means, stds, color=colour, marker="o", capsize=3)
            if key in starts.get(base, {}):
                axes.axhline(column.factor * starts[base][key], color=colour, linestyle=":", linewidth=1)
            axes.set_ylabel(column.heading, color=colour)
            axes.tick_params(axis="y", labelcolor=colour)
    with atomic_write(path) as file:
        figure.savefig(file, dpi=150, format="png")
    return path
