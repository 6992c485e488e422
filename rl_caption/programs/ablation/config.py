"""Configuration of ``ablate``: dataclasses only, as in ``rl_caption.config.schema``."""

import re
from typing import Literal, Self

from pydantic import model_validator

from rl_caption.config.schema import RewardTerm, TrustConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Beams, Fraction, LengthPenalty, Section, Seed, Workers

START = "start"
"""Label of the starting policy in tables."""
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")
OVERRIDABLE = ("train.", "rollout.", "eval.", "reward.", "monitor.")
SET_BY_GRID = ("train.seed.", "reward.terms.")


class AlphaConfig(Section):
    """Mixtures of two rewards, with weights alpha and 1 - alpha."""

    values: list[Fraction]
    """Values of alpha, in [0, 1]; a term whose weight is 0 is left out."""
    terms: dict[str, RewardTerm]
    """Reward that is weighted by alpha."""
    against: dict[str, RewardTerm] = {}
    """Reward that is weighted by 1 - alpha; CIDEr-D by default."""

    @property
    def labels(self) -> list[str]:
        """Labels of its cells."""
        return [f"alpha={value:g}" for value in self.values]

    @model_validator(mode="after")
    def _check_alpha(self) -> Self:
        # As a default, the parser would refuse {cider: {}}.
        self.against = self.against or {"cider": RewardTerm()}
        if both := sorted(self.terms.keys() & self.against):
            raise ConfigError(f"terms and against both have {both}: expected different names")
        return self


class CellConfig(Section):
    """How one cell differs from the base configuration."""

    terms: dict[str, RewardTerm]
    """The reward of the cell, which replaces ``reward.terms`` of the base."""
    overrides: dict = {}
    """Values by dotted key, such as ``{train.lr: 1.0e-5}``; keys of ``train``, ``rollout``,
    ``eval``, ``reward`` or ``monitor``. Model and data are the same in all cells.
    """

    @model_validator(mode="after")
    def _check_cell(self) -> Self:
        for key in self.overrides:
            if not key.startswith(OVERRIDABLE) or f"{key}.".startswith(SET_BY_GRID):
                raise ConfigError(
                    f"overrides has {key}: expected a key that starts with "
                    f"{', '.join(OVERRIDABLE)}; the grid sets "
                    "seeds and terms"
                )
        return self


class AblateConfig(TrustConfig):
    """``ablate``: a grid of self-critical runs from one starting checkpoint, and tables of their
    results.
    """

    recipe: str
    """Configuration of ``scst`` that all cells share; its ``model.init`` is the starting policy."""
    all: dict = {}
    """Keys that replace those of the recipe in all runs, such as ``{data: {path: /disk/coco}}``."""
    cells: dict[str, CellConfig] = {}
    """Reward and overrides of each cell, by its label."""
    alpha: AlphaConfig | None = None
    """Further cells, labelled ``alpha=VALUE``."""
    seeds: list[Seed] = [0]
    """Values of ``train.seed``; each cell is trained with each of them."""
    split: str = "test"
    """Split of the base's data that is captioned and scored."""
    policy: Literal["last", "best"] = "last"
    """Weights of a run that are evaluated: ``last``, after its last step, or ``best``, by its
    validation. If the reward has no CIDEr-D, the validation's CIDEr-D is often best before any
    training.
    """
    num_beams: Beams = 1
    """Beam width of the evaluation; 1 is greedy."""
    length_penalty: LengthPenalty = 1.0
    """Of beam search, as in ``evaluate``."""
    metrics: list[str] = ["bleu", "meteor", "rouge", "cider", "spice"]
    """As in ``evaluate``."""
    tokenizer: Literal["auto", "java", "python", "unicode", "char", "none"] = "auto"
    """As in ``evaluate``."""
    judges: dict[str, JudgeConfig] = {}
    """Rewards that are further columns, by their headings; they may be trained on."""
    jobs: Workers = 1
    """Number of runs at a time, each in its own process with its share of the CPU cores and GPUs.
    """
    out: str = "runs/ablation"
    """Folder of all runs and of the report."""
    report: bool = True
    """Also write ``report.html`` there (docs/report.md)."""

    @model_validator(mode="after")
    def _check_ablate(self) -> Self:
        labels = [*self.cells, *(() if self.alpha is None else self.alpha.labels)]
        if not labels:
            raise ConfigError("cells is empty, and alpha is not set: set cells, alpha, or both")
        for name in labels:
            if not LABEL.fullmatch(name) or name == START or labels.count(name) > 1:
                raise ConfigError(
                    f"cells has the name {name!r}: expected names of folders that differ, of "
                    f"letters, digits and "
                    f". _ = + - (and not {START}, the starting policy)"
                )
        if len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(f"seeds is {self.seeds}: expected different whole numbers")
        return self
