"""Alpha against CIDEr and against a judge, on two axes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rewards.files import atomic_write
from rl_caption.ablation.outcome import JUDGE
from rl_caption.ablation.table import Group, mean_and_deviation

CIDER_COLOUR, JUDGE_COLOUR = "#1f5f99", "#b5541c"


class NoMatplotlib(ImportError):
    """matplotlib is not installed."""


def points(groups: Sequence[Group], base: str, key: str) -> list[tuple[float, float, float]]:
    """(alpha, mean, standard deviation) of a metric, by alpha; the deviation of a single seed is 0."""
    found = []
    for group in groups:
        values = group.values(key)
        if group.base == base and group.alpha is not None and values:
            mean, deviation = mean_and_deviation(values)
            found.append((group.alpha, mean, deviation or 0.0))
    return sorted(found)


def draw_alpha(groups: Sequence[Group], judge: tuple[str, tuple[float, float]] | None, path: Path) -> None:
    """Write a picture with one panel for each base: CIDEr (x100) on the left axis, the judge on the right one.

    Error bars are standard deviations over seeds; dotted lines are the starting policy.

    Args:
        groups: rows of the table.
        judge: name and bounds; None draws CIDEr alone.
        path: the PNG file.

    Raises:
        NoMatplotlib: it is an optional dependency.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib("matplotlib is not installed: pip install 'rl-caption[report]'") from error
    bases = list(dict.fromkeys(group.base for group in groups if group.alpha is not None))
    figure = Figure(figsize=(5.2 * len(bases), 3.6), layout="constrained")
    for index, base in enumerate(bases):
        axes = figure.add_subplot(1, len(bases), index + 1)
        axes.set_title(base)
        axes.set_xlabel("alpha")
        _draw(axes, groups, base, "CIDEr", 100.0, "CIDEr (x100)", CIDER_COLOUR)
        if judge is not None:
            name, (low, high) = judge
            label = f"{name} [{low:g}, {high:g}]"
            _draw(axes.twinx(), groups, base, JUDGE + name, 1.0, label, JUDGE_COLOUR)
    with atomic_write(path) as file:
        figure.savefig(file, dpi=150, format="png")


def _draw(axes, groups: Sequence[Group], base: str, key: str, factor: float, label: str, colour: str) -> None:
    found = points(groups, base, key)
    alphas = [alpha for alpha, _, _ in found]
    means, deviations = [factor * mean for _, mean, _ in found], [factor * deviation for _, _, deviation in found]
    axes.errorbar(alphas, means, yerr=deviations, color=colour, marker="o", capsize=3)
    for group in groups:
        if group.base == base and not group.seeds:
            for value in group.values(key):
                axes.axhline(factor * value, color=colour, linestyle=":", linewidth=1)
    axes.set_ylabel(label, color=colour)
    axes.tick_params(axis="y", labelcolor=colour)
