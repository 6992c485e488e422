"""Configuration of ``ablate``: dataclasses only, as in ``rl_caption.config.schema``."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl_caption.config.schema import RewardTerm, TrustConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.options import Beams, Fraction, LengthPenalty, Range, Seed, Workers


@dataclass
class AlphaConfig:
    """A mixture of two rewards in several proportions: alpha of the one, 1 - alpha of the other.

    Args:
        values: each in [0, 1]; a term whose weight comes out as 0 is left out.
        terms: weighted by alpha.
        against: weighted by 1 - alpha; CIDEr-D where none is named.
    """

    values: list[Fraction]
    terms: dict[str, RewardTerm]
    against: dict[str, RewardTerm] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.against = self.against or {"cider": RewardTerm()}  # as a default, the parser would refuse {cider: {}}


@dataclass
class CellConfig:
    """What one cell changes in the base configuration.

    Args:
        terms: its reward, which replaces the base's ``reward.terms``.
        overrides: dotted key to value, such as ``{train.lr: 1.0e-5}``: of ``train``, ``rollout``,
            ``eval``, ``reward`` or ``monitor``.
    """

    terms: dict[str, RewardTerm]
    overrides: dict = field(default_factory=dict)


@dataclass
class AblateConfig(TrustConfig):
    """``ablate``: a grid of self-critical runs from one starting checkpoint, and a table of what came of them.

    Args:
        base: configuration of ``scst`` that all cells share; its ``model.init`` is the starting policy.
        bases: name to such a configuration, in place of ``base``: the grid is run on each (pixels and regions, say).
        data: keys that replace those of the ``data`` of every base, such as ``{path: /disk/coco}``; runs before the
            cells on the same data take them, too.
        cells: label to reward and overrides.
        alpha: further cells, labelled ``alpha=VALUE``.
        reward_models: configurations of reward models to train first, where they are not there yet.
        seeds: ``train.seed`` of the runs of each cell.
        split: of the base's data, whose images are captioned and scored.
        policy: which weights of a run are evaluated: ``last``, after its last step, or ``best`` by its validation,
            whose CIDEr-D is at its best before a reward without CIDEr-D has done anything.
        num_beams: of the decoding that is evaluated; 1 is greedy.
        length_penalty: of beam search, as in ``evaluate``.
        metrics: which scores.
        tokenizer: as in ``evaluate``.
        judges: heading to a reward that is a further column, trained on or not; the first one is drawn over alpha.
        show_images: number of images, the first of the split, whose captions by all systems ``captions.md`` shows.
        jobs: runs at a time, each in its own process with its share of the CPU cores and GPUs.
        launch: file for ``--config_file`` of ``accelerate launch``, by which cross-entropy runs and cells are then
            started; null starts each as one process. The number of processes is ``train.num_processes`` of the base, or
            else the file's, or else that of a run's GPUs.
        out: folder of all runs and of the report.
        report: write ``report.html`` there, too (docs/report.md).
    """

    base: str | None = None
    bases: dict[str, str] = field(default_factory=dict)
    data: dict = field(default_factory=dict)
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
