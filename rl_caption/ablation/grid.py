"""From the configuration of a grid to its cells. Pure: nothing is read or written."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rl_caption import config_checks
from rl_caption.ablation.config import AblateConfig, AlphaConfig
from rl_caption.config import RewardTerm

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")
START = "start"
"""Name of the starting policy's row in the tables."""
OVERRIDABLE = ("train.", "rollout.", "eval.", "reward.", "monitor.")
FIXED = ("train.seed", "reward.terms")
"""Keys that the grid itself sets."""


@dataclass(frozen=True)
class Cell:
    """One run of the grid.

    Attributes:
        base: name of its base configuration; "" where the grid has one.
        label: of the cell, in tables and paths.
        seed: ``train.seed``.
        alpha: its place in an alpha grid.
        terms: the reward.
        overrides: dotted key -> value.
    """

    base: str
    label: str
    seed: int
    alpha: float | None
    terms: Mapping[str, RewardTerm]
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def system(self) -> str:
        """Name of its row in tables, shared by all seeds: ``LABEL`` or ``BASE/LABEL``."""
        return f"{self.base}/{self.label}" if self.base else self.label

    def folder(self, out: Path) -> Path:
        """``OUT/cells/[BASE/]LABEL/seedN``."""
        return out / "cells" / self.base / self.label / f"seed{self.seed}"

    def arguments(self) -> list[str]:
        """What the cell adds to the command line of ``scst.py --config BASE``."""
        terms = {name: asdict(term) for name, term in self.terms.items()}
        changes = {"train.seed": self.seed, "reward.terms": terms} | dict(self.overrides)
        return [f"--{key}={as_argument(value)}" for key, value in changes.items()]


def as_argument(value: Any) -> str:
    """A value of a configuration as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def bases_of(config: AblateConfig) -> dict[str, str]:
    """Name of each base -> its file; the name is "" where there is only ``base``."""
    return {"": config.base} if config.base is not None else dict(config.bases)


def make_cells(config: AblateConfig) -> list[Cell]:
    """All runs of the grid, seed by seed, so that an interrupted grid has its first cells complete.

    Expects what ``mistakes`` found nothing wrong with.
    """
    designs = [Cell("", label, 0, None, cell.terms, cell.overrides) for label, cell in config.cells.items()]
    if config.alpha is not None:
        designs = alpha_cells(config.alpha) + designs
    return [
        replace(design, base=base, seed=seed)
        for seed in config.seeds
        for base in bases_of(config)
        for design in designs
    ]


def alpha_cells(grid: AlphaConfig) -> list[Cell]:
    """One cell for each alpha, total = alpha * terms + (1 - alpha) * against, without terms of weight 0.

    The ablation's equation in the L-CLIPScore paper puts alpha on CIDEr; but its row of alpha = 0 is that of CIDEr
    alone and alpha = 1 that of L-CLIPS alone, so the paper's alpha, too, weights L-CLIPS.
    """
    return [Cell("", alpha_label(alpha), 0, alpha, _mixture(grid, alpha)) for alpha in grid.values]


def alpha_label(alpha: float) -> str:
    """``alpha=0.3``."""
    return f"alpha={alpha:g}"


def _mixture(grid: AlphaConfig, alpha: float) -> dict[str, RewardTerm]:
    parts = ((grid.terms, alpha), (grid.against, round(1 - alpha, 12)))
    weighted = {
        name: replace(term, weight=term.weight * share)
        for terms, share in parts
        for name, term in terms.items()
    }  # fmt: skip
    return {name: term for name, term in weighted.items() if term.weight != 0}


def mistakes(config: AblateConfig) -> list[str]:
    """What is wrong with the grid itself, one sentence each: key, value, and what would be right."""
    wrong = config_checks.mistakes(config)
    if (config.base is None) == (not config.bases):
        wrong.append("set either base (one configuration of scst.py) or bases (name to configuration)")
    if not config.cells and config.alpha is None:
        wrong.append("there is no cell: set cells, alpha, or both")
    if not config.seeds or len(set(config.seeds)) != len(config.seeds):
        wrong.append(f"seeds is {config.seeds}: expected different whole numbers, and at least one")
    wrong += _wrong_alphas(config.alpha) if config.alpha is not None else []
    wrong += _wrong_names(config)
    for label, cell in config.cells.items():
        wrong += _wrong_weights(f"cells.{label}.terms", cell.terms)
        wrong += [f"cells.{label}.overrides: {problem}" for problem in _wrong_overrides(cell.overrides)]
    return wrong


def _wrong_alphas(grid: AlphaConfig) -> list[str]:
    wrong = []
    if not grid.values:
        wrong.append("alpha.values is empty: expected at least one number from 0 to 1")
    both = sorted(set(grid.terms) & set(grid.against))
    if both:
        wrong.append(f"alpha: {both} are in terms and in against: expected different names (target names the reward)")
    return wrong + _wrong_weights("alpha.terms", grid.terms) + _wrong_weights("alpha.against", grid.against)


def _wrong_weights(key: str, terms: Mapping[str, RewardTerm]) -> list[str]:
    if not terms:
        return [f"{key} is empty: name at least one reward, such as cider"]
    return [
        f"{key}.{name}.weight is {term.weight}: expected a number other than 0"
        for name, term in terms.items()
        if term.weight == 0
    ]


def _wrong_names(config: AblateConfig) -> list[str]:
    labels = list(config.cells)
    if config.alpha is not None:
        labels += [alpha_label(alpha) for alpha in config.alpha.values]
    wrong = [f"label {START!r} is that of the starting policy: choose another"] if START in labels else []
    wrong += [f"label {label!r} stands for {count} cells" for label, count in Counter(labels).items() if count > 1]
    for kind, names in (("label", labels), ("bases", list(config.bases))):
        wrong += [
            f"{kind} {name!r}: expected letters, digits and . _ = + - only, as it becomes a folder"
            for name in dict.fromkeys(names)
            if not LABEL.fullmatch(name)
        ]
    return wrong


def _wrong_overrides(overrides: Mapping[str, Any]) -> Sequence[str]:
    wrong = []
    for key in overrides:
        if key in FIXED or key.startswith(tuple(f"{fixed}." for fixed in FIXED)):
            wrong.append(f"{key} is set by the grid (seeds, terms)")
        elif not key.startswith(OVERRIDABLE):
            wrong.append(
                f"{key} cannot be overridden: expected a key that starts with {', '.join(OVERRIDABLE)}; "
                "model and data are the same in all cells of a base"
            )
    return wrong
