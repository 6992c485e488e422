"""Configurations of grids."""

from typing import Literal

from pydantic import PositiveInt

from rl_caption.config.schema import RewardTerm, TrustConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.options import LengthPenalty, Section, Seed


class CellConfig(Section):
    """Changes of one cell to the recipe."""

    terms: dict[str, RewardTerm] = {}
    """The reward of the cell, which replaces ``reward.terms`` of the recipe."""
    overrides: dict = {}
    """Values by dotted key, such as ``{train.lr: 1.0e-5}``."""


class AblateConfig(TrustConfig):
    """``ablate``: a grid of self-critical runs from one starting checkpoint, and tables
    of their results.

    ``recipe`` is a configuration of ``scst``; its ``model.init`` is the starting
    policy. Model and data are the same in all cells.
    """

    recipe: str
    """Configuration that all cells share."""
    cells: dict[str, CellConfig] = {}
    """Label of a cell -> its changes."""
    seeds: list[Seed] = [0]
    """Values of ``train.seed``; each cell is trained once with each value."""
    jobs: PositiveInt = 1
    """Number of runs at a time, each in its own process with its share of the CPU cores and GPUs.
    """
    out: str = "runs/ablation"
    """Folder of all runs and of the tables."""
    all: dict = {}
    """Values that replace the recipe's in all runs, such as
    ``{data: {path: /disk/coco}}``.
    """
    split: str = "test"
    """Split of the recipe's data that is captioned and scored."""
    policy: Literal["last", "best"] = "last"
    """Weights of a run that are evaluated: ``last``, after its last step, or ``best``,
    by its validation. If the reward has no CIDEr-D, the validation's CIDEr-D is often
    best before any training.
    """
    num_beams: PositiveInt = 1
    """Beam width of the evaluation; 1 is greedy."""
    length_penalty: LengthPenalty = 1.0
    """Length penalty of beam search, as in ``evaluate``."""
    metrics: list[str] = ["bleu", "meteor", "rouge", "cider", "spice"]
    """Metrics, as in ``evaluate``."""
    tokenizer: Literal["auto", "java", "python", "unicode", "char", "none"] = "auto"
    """Tokenizer of the metrics, as in ``evaluate``."""
    judges: dict[str, JudgeConfig] = {}
    """Rewards that are further columns, by their headings; they may be trained on."""
