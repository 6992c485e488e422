"""The files of a grid's report."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rl_caption.ablation.config import AblateConfig
from rl_caption.ablation.grid import as_argument
from rl_caption.ablation.outcome import Outcome
from rl_caption.ablation.plan import Plan
from rl_caption.ablation.plot import NoMatplotlib, draw_alpha
from rl_caption.ablation.side_by_side import captions_page
from rl_caption.ablation.table import Group, grouped, markdown_tables, notes, runs_csv, summary_csv
from rl_caption.config import RewardTerm
from rl_caption.data.files import write_text
from rl_caption.report.gallery import source_of
from rl_caption.report.program import write_report as write_page_of


def write_report(
    outcomes: Sequence[Outcome],
    plan: Plan,
    bounds: Mapping[str, tuple[float, float]],
    config: AblateConfig,
    failures: Sequence[str],
) -> list[Path]:
    """Write ``table.md``, ``table.csv``, ``runs.csv``, ``captions.md``, ``report.html``; for alphas ``alpha.png``.

    Args:
        outcomes: starting policies first.
        plan, config: of the grid.
        bounds: name of each judge -> its smallest and largest possible score.
        failures: sentences about cells that are missing, for the table's notes.

    Returns:
        The files.
    """
    out, groups = Path(config.out), grouped(outcomes)
    tables = markdown_tables(groups, bounds)
    print(f"\n{tables}\n")
    write_text(
        out / "table.md",
        "\n\n".join([f"# {out.name}", tables, _remarks(groups, plan, config, failures)]) + "\n",
    )
    write_text(out / "table.csv", summary_csv(groups, bounds))
    write_text(out / "runs.csv", runs_csv(groups))
    written = [out / "table.md", out / "table.csv", out / "runs.csv"]
    rows_of_split = next(iter(plan.bases.values())).rows
    rows = rows_of_split[: config.show_images]
    if rows:
        shown = {group.system: group.outcomes[0].captions for group in groups}
        written.append(captions_page(rows, shown, out))
    if any(group.alpha is not None for group in groups):
        judge = next(iter(bounds.items()), None)
        try:
            draw_alpha(groups, judge, out / "alpha.png")
        except NoMatplotlib as error:
            print(f"no alpha.png: {error}", file=sys.stderr)
        else:
            written.append(out / "alpha.png")
    if config.report:
        page = write_page_of(out, source_of(rows_of_split) if rows_of_split else None)
        written += [page] if page is not None else []
    return written


def formula(terms: Mapping[str, RewardTerm], overrides: Mapping[str, Any] = MappingProxyType({})) -> str:
    """A mixture as people write it, and what else a cell changes: ``0.3 l_clipscore + 0.7 cider; train.lr = 1e-05``."""
    mixture = " + ".join(f"{term.weight:g} {name}" for name, term in terms.items())
    return "; ".join([mixture, *(f"{key} = {as_argument(value)}" for key, value in overrides.items())])


def _remarks(
    groups: Sequence[Group],
    plan: Plan,
    config: AblateConfig,
    failures: Sequence[str],
) -> str:
    split = (
        f"split {config.split!r}, {'greedy' if config.num_beams == 1 else f'beam search of width {config.num_beams}'}"
    )
    which = "after the last step" if config.policy == "last" else "best by validation"
    lines = [
        f"Means over seeds ± standard deviation, {split}; policies {which}. "
        "`start` is the policy that all cells start from.",
    ]
    rewards = {cell.cell.system: formula(cell.cell.terms, cell.cell.overrides) for cell in plan.cells}
    lines += [f"{system}: {reward}" for system, reward in rewards.items()]
    return "\n".join(f"- {line}" for line in [*lines, *notes(groups), *(f"missing: {text}" for text in failures)])
