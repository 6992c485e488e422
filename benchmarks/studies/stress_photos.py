"""Does ``rl-caption stress`` in the generated world tell what training on photos does? From the tables of docs/.

    python -m benchmarks.studies.stress_photos --study OUT

``OUT`` is the folder of ``stress_study``, with the predictions of each reward of the tables below, and at least one
training for the push. The truth is what the captions of the test split lost, in percent of the starting captioner's
score: oracle F1 or METEOR, which are in no reward, and CIDEr, which most of them were trained on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.stats import spearmanr

from benchmarks.studies.stress_study import PARTS, SEEDS, pushed_fall, untrained_falls

TABLES = {
    "generated world": [("results_scenes.md", "## Rewards and mixtures")],
    "UCM": [("results_ucm.md", "## Rewards and mixtures")],
    "Flickr8k": [
        ("results_flickr8k.md", "### A second start"),
        ("icc.md", "## As a term of the reward"),
    ],
}
"""Training on rewards -> page and heading of its tables, which begin with the start. Of a reward, the first counts."""
METRICS = {
    "generated world": ("oracle F1", "CIDEr"),
    "UCM": ("METEOR", "CIDEr"),
    "Flickr8k": ("METEOR", "CIDEr"),
}
Falls = dict[str, dict[str, float]]
"""Reward -> metric or part -> fall."""


def read_table(page: Path, heading: str) -> list[dict[str, str]]:
    """The rows of the first table of rewards after a heading."""
    lines = iter(page.read_text(encoding="utf-8").partition(f"{heading}\n")[2].splitlines())
    head = next(line for line in lines if line.startswith("| reward"))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in (head, line)]
        rows.append(dict(zip(*cells, strict=True)))
    return rows


def true_falls(docs: Path, training: str) -> Falls:
    """What each reward of the tables took from the metrics, in percent of the start."""
    falls: Falls = {}
    metrics = METRICS[training]
    for page, heading in TABLES[training]:
        start, *rows = read_table(docs / page, heading)
        for row in rows:
            name = (
                next(iter(row.values())).partition(" (")[0].partition(":")[0].removesuffix(" alone")
            )
            before, after = (
                [float(of[metric].split()[0].strip("*")) for metric in metrics]
                for of in (start, row)
            )
            changes = {
                metric: 100 * (1 - new / old)
                for metric, new, old in zip(metrics, after, before, strict=True)
            }
            falls.setdefault(name, changes)
    return falls


def predicted_falls(study: Path, name: str) -> dict[str, float]:
    """Part -> what it predicts, a mean over seeds: all of them, for the push those with a training."""
    parts = [untrained_falls(study, name, seed) for seed in SEEDS]
    trained = [seed for seed in SEEDS if (study / "truth" / f"{name}-{seed}.json").is_file()]
    falls = {part: fmean(of[part] for of in parts) for part in parts[0]}
    return falls | {"push": fmean(pushed_fall(study, name, seed) for seed in trained)}


def rank_correlation(predicted: Sequence[float], fall: Sequence[float], draws: int = 2000) -> str:
    """Spearman's rho with the 95 % interval of rewards drawn with replacement."""
    pairs, generator = np.array([predicted, fall]), np.random.default_rng(0)
    drawn = (generator.integers(len(fall), size=len(fall)) for _ in range(draws))
    rhos = [
        spearmanr(*pairs[:, rows]).statistic
        for rows in drawn
        if all(len(set(of[rows])) > 1 for of in pairs)
    ]
    low, high = np.quantile(rhos, [0.025, 0.975])
    return f"{spearmanr(*pairs).statistic:.2f} ({low:.2f} to {high:.2f})"


def report(study: Path, docs: Path) -> str:
    """Markdown: true and predicted falls of every reward, and their rank correlations."""
    truths = {training: true_falls(docs, training) for training in TABLES}
    names = list(dict.fromkeys(name for truth in truths.values() for name in truth))
    predictions = {name: predicted_falls(study, name) for name in names}
    measures = [(training, metric) for training in TABLES for metric in METRICS[training]]
    columns = [f"{training}, {metric}" for training, metric in measures]
    lines = [
        f"| reward | {' | '.join([*columns, *PARTS])} |",
        "|---" * (1 + len(columns) + len(PARTS)) + "|",
    ]
    for name in names:
        falls = [truths[training].get(name, {}).get(metric) for training, metric in measures]
        cells = ["" if fall is None else f"{fall:.1f}" for fall in falls]
        lines.append(
            f"| {name} | {' | '.join([*cells, *(f'{predictions[name][part]:.3f}' for part in PARTS)])} |"
        )
    lines += [
        "",
        f"| training | rewards | fall of | {' | '.join(PARTS)} |",
        "|---" * (3 + len(PARTS)) + "|",
    ]
    for training, metric in measures:
        truth = truths[training]
        fall = [of[metric] for of in truth.values()]
        rhos = [
            rank_correlation([predictions[name][part] for name in truth], fall) for part in PARTS
        ]
        lines.append(f"| {training} | {len(truth)} | {metric} | {' | '.join(rhos)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path, required=True, help="the folder of stress_study")
    chosen = parser.parse_args()
    print(report(chosen.study, Path(__file__).parents[2] / "docs"))


if __name__ == "__main__":
    main()
