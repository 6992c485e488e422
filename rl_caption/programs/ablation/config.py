"""Configuration of ``ablate``: dataclasses only, as in ``rl_caption.config.schema``."""

import re
from dataclasses import dataclass, field
from typing import Literal

from rl_caption.config.schema import RewardTerm, TrustConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Beams, Fraction, LengthPenalty, Seed, Workers

START = "start"
"""Label of the starting policy in tables."""
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")
OVERRIDABLE = ("train.", "rollout.", "eval.", "reward.", "monitor.")
SET_BY_GRID = ("train.seed.", "reward.terms.")


@dataclass
class AlphaConfig:
    """Mixtures of two rewards, with weights alpha and 1 - alpha.

    Args:
        values: values of alpha, in [0, 1]; a term whose weight is 0 is left out.
        terms: reward that is weighted by alpha.
        against: reward that is weighted by 1 - alpha; CIDEr-D by default.
    """

    values: list[Fraction]
    terms: dict[str, RewardTerm]
    against: dict[str, RewardTerm] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        """Labels of its cells."""
        return [f"alpha={value:g}" for value in self.values]

    def __post_init__(self) -> None:
        # As a default, the parser would refuse {cider: {}}.
        self.against = self.against or {"cider": RewardTerm()}
        if both := sorted(self.terms.keys() & self.against):
            raise ConfigError(f"terms and against both have {both}: expected different names")


@dataclass
class CellConfig:
    """How one cell differs from the base configuration.

    Args:
        terms: the reward of the cell, which replaces ``reward.terms`` of the base.
        overrides: values by dotted key, such as ``{train.lr: 1.0e-5}``; keys of ``train``,
            ``rollout``, ``eval``, ``reward`` or ``monitor``. Model and data are the same in all
            cells.
    """

    terms: dict[str, RewardTerm]
    overrides: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in self.overrides:
            if not key.startswith(OVERRIDABLE) or f"{key}.".startswith(SET_BY_GRID):
                raise ConfigError(
                    f"overrides has {key}: expected a key that starts with "
                    f"{', '.join(OVERRIDABLE)}; the grid sets "
                    "seeds and terms"
                )


@dataclass
class AblateConfig(TrustConfig):
    """``ablate``: a grid of self-critical runs from one starting checkpoint, and tables of their
    results.

    Args:
        base: configuration of ``scst`` that all cells share; its ``model.init`` is the starting
            policy.
        all: keys that replace those of the base in all runs, such as ``{data: {path:
            /disk/coco}}``.
        cells: reward and overrides of each cell, by its label.
        alpha: further cells, labelled ``alpha=VALUE``.
        seeds: values of ``train.seed``; each cell is trained with each of them.
        split: split of the base's data that is captioned and scored.
        policy: weights of a run that are evaluated: ``last``, after its last step, or ``best``, by
            its validation. If the reward has no CIDEr-D, the validation's CIDEr-D is often best
            before any training.
        num_beams: beam width of the evaluation; 1 is greedy.
        length_penalty: of beam search, as in ``evaluate``.
        metrics: as in ``evaluate``.
        tokenizer: as in ``evaluate``.
        judges: rewards that are further columns, by their headings; they may be trained on.
        jobs: number of runs at a time, each in its own process with its share of the CPU cores and
            GPUs.
        out: folder of all runs and of the report.
        report: also write ``report.html`` there (docs/report.md).
    """

    base: str | None = None
    all: dict = field(default_factory=dict)
    cells: dict[str, CellConfig] = field(default_factory=dict)
    alpha: AlphaConfig | None = None
    seeds: list[Seed] = field(default_factory=lambda: [0])
    split: str = "test"
    policy: Literal["last", "best"] = "last"
    num_beams: Beams = 1
    length_penalty: LengthPenalty = 1.0
    metrics: list[str] = field(
        default_factory=lambda: ["bleu", "meteor", "rouge", "cider", "spice"]
    )
    tokenizer: Literal["auto", "java", "python", "unicode", "char", "none"] = "auto"
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    jobs: Workers = 1
    out: str = "runs/ablation"
    report: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base is None:
            raise ConfigError("base is not set: name a configuration of scst")
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
