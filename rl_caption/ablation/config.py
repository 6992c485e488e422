"""Configuration of ``ablate``: dataclasses only, as in ``rl_caption.config.schema``."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from rl_caption.config.schema import DataConfig, RewardTerm, TrustConfig
from rl_caption.errors import ConfigError
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.options import Beams, Fraction, LengthPenalty, Range, Seed, Workers


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

    def __post_init__(self) -> None:
        self.against = self.against or {"cider": RewardTerm()}  # as a default, the parser would refuse {cider: {}}


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
        show_images: number of images, the first of the split, whose captions by all systems are in ``captions.md``.
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
    metrics: list[str] = field(default_factory=lambda: ["bleu", "meteor", "rouge", "cider", "spice"])
    tokenizer: Literal["auto", "java", "python", "unicode", "char", "none"] = "auto"
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    show_images: Annotated[int, Range(min=0, max=10**4)] = 12
    jobs: Workers = 1
    launch: str | None = None
    out: str = "runs/ablation"
    report: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        options = [option.name for option in fields(DataConfig)]
        for key in [key for key in self.data if key not in options]:
            raise ConfigError(f"data.{key} is not an option: expected {', '.join(options)}")
