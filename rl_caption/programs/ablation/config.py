"""Configuration of ``ablate``: dataclasses only, as in ``rl_caption.config.schema``."""

import re
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Literal

from rl_caption.config.schema import DataConfig, RewardTerm, TrustConfig
from rl_caption.evaluation.metrics import SCORERS
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
        self.against = self.against or {
            "cider": RewardTerm()
        }  # as a default, the parser would refuse {cider: {}}
        _check_terms("terms", self.terms)
        _check_terms("against", self.against)
        if not self.values:
            raise ConfigError("values is empty: expected at least one number from 0 to 1")
        if both := sorted(self.terms.keys() & self.against):
            raise ConfigError(
                f"terms and against both have {both}: expected different names (target names the reward)"
            )


@dataclass
class CellConfig:
    """How one cell differs from the base configuration.

    Args:
        terms: the reward of the cell, which replaces ``reward.terms`` of the base.
        overrides: values by dotted key, such as ``{train.lr: 1.0e-5}``; keys of ``train``, ``rollout``, ``eval``,
            ``reward`` or ``monitor``.
    """

    terms: dict[str, RewardTerm]
    overrides: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_terms("terms", self.terms)
        for key in self.overrides:
            if f"{key}.".startswith(SET_BY_GRID):
                raise ConfigError(f"overrides has {key}: the grid sets it (seeds, terms)")
            if not key.startswith(OVERRIDABLE):
                starts = ", ".join(OVERRIDABLE)
                same = "model and data are the same in all cells of a base"
                raise ConfigError(
                    f"overrides has {key}: expected a key that starts with {starts}; {same}"
                )


def _check_terms(key: str, terms: dict[str, RewardTerm]) -> None:
    if not terms:
        raise ConfigError(f"{key} is empty: name at least one reward, such as cider")
    if zeros := [name for name, term in terms.items() if term.weight == 0]:
        raise ConfigError(f"{key}.{zeros[0]}.weight is 0: expected another number")


@dataclass
class AblateConfig(TrustConfig):
    """``ablate``: a grid of self-critical runs from one starting checkpoint, and tables of their results.

    Args:
        base: configuration of ``scst`` that all cells share; its ``model.init`` is the starting policy.
        bases: several such configurations by name, instead of ``base``; the grid is run on each.
        data: keys that replace those of ``data`` in every base, such as ``{path: /disk/coco}``.
        all: keys that replace those of every base and of the runs that it starts from, such as ``{data: {path:
            /disk/coco}}``.
        cells: reward and overrides of each cell, by its label.
        alpha: further cells, labelled ``alpha=VALUE``.
        reward_models: configurations of reward models to train first, unless they are done.
        seeds: values of ``train.seed``; each cell is trained with each of them.
        split: split of the base's data that is captioned and scored.
        policy: weights of a run that are evaluated: ``last``, after its last step, or ``best``, by its validation. If
            the reward has no CIDEr-D, the validation's CIDEr-D is often best before any training.
        num_beams: beam width of the evaluation; 1 is greedy.
        length_penalty: of beam search, as in ``evaluate``.
        metrics: as in ``evaluate``.
        tokenizer: as in ``evaluate``.
        judges: rewards that are further columns, by their headings; they may be trained on. The first one is plotted
            over alpha.
        jobs: number of runs at a time, each in its own process with its share of the CPU cores and GPUs.
        launch: start cross-entropy runs and cells by ``accelerate launch`` with this ``--config_file``; null starts
            each as one process. The number of processes is ``train.num_processes`` of the base, or else that of the
            file, or else the number of GPUs of a run.
        out: folder of all runs and of the report.
        report: also write ``report.html`` there (docs/report.md).
    """

    base: str | None = None
    bases: dict[str, str] = field(default_factory=dict)
    data: dict = field(default_factory=dict)
    all: dict = field(default_factory=dict)
    cells: dict[str, CellConfig] = field(default_factory=dict)
    alpha: AlphaConfig | None = None
    reward_models: list[str] = field(default_factory=list)
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
    launch: str | None = None
    out: str = "runs/ablation"
    report: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        options = [option.name for option in fields(DataConfig)]
        for key in [key for key in self.data if key not in options]:
            raise ConfigError(f"data.{key} is not an option: expected {', '.join(options)}")
        if (self.base is None) == (not self.bases):
            raise ConfigError(
                "set either base (one scst configuration) or bases (a mapping from names to them)"
            )
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(
                f"seeds is {self.seeds}: expected different whole numbers, and at least one"
            )
        self._check_labels()
        for name in self.judges:
            if not name.isprintable() or "|" in name or not name.strip():
                raise ConfigError(
                    f"judges has the name {name!r}: expected a heading for a table, without |"
                )
        if unknown := [name for name in self.metrics if name not in SCORERS]:
            raise ConfigError(f"metrics has {unknown[0]!r}: expected some of {', '.join(SCORERS)}")

    def _check_labels(self) -> None:
        labels = [*self.cells, *(() if self.alpha is None else self.alpha.labels)]
        if not labels:
            raise ConfigError("cells is empty, and alpha is not set: set cells, alpha, or both")
        for key, names in (("cells", labels), ("bases", self.bases)):
            for name in names:
                if not LABEL.fullmatch(name):
                    expected = "letters, digits and . _ = + - only, as it becomes a folder"
                    raise ConfigError(f"{key} has the name {name!r}: expected {expected}")
        if START in labels:
            raise ConfigError(
                f"cells has the name {START!r}, which is that of the starting policy: choose another"
            )
        if twice := [label for label, count in Counter(labels).items() if count > 1]:
            raise ConfigError(f"cells and alpha have {twice[0]!r} twice")
