"""Configuration of ``grpo_vlm``: dataclasses only, as in ``rl_caption.config.schema``."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rl_caption.captioners.config import SavedModelConfig
from rl_caption.config.schema import DataConfig, PairsConfig, RewardConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import BatchSize, Beams, Workers


@dataclass
class VlmTrainConfig:
    """The processes that train.

    Args:
        num_processes: required number of processes; null accepts the number that the launcher
            started.
        threads: CPU threads per process; null uses OMP_NUM_THREADS or, if that is not set, divides
            the physical cores among the processes of the machine.
    """

    num_processes: Workers | None = None
    threads: Workers | None = None


@dataclass
class VlmEvalConfig:
    """The evaluation of the exported model, as by ``evaluate``.

    Args:
        split: name of the split; null evaluates nothing.
        before: also evaluate the starting model, before training.
        batch_size: images per forward pass of one process.
        num_beams: beam width; 1 is greedy.
        metrics: as in ``evaluate``.
        tokenizer: as in ``evaluate``; ``auto`` follows ``data.tokenizer``.
        judges: rewards whose means are further metrics, by their column headings.
    """

    split: str | None = "test"
    before: bool = False
    batch_size: BatchSize = 8
    num_beams: Beams = 1
    metrics: list[str] = field(
        default_factory=lambda: ["bleu", "meteor", "rouge", "cider", "spice"]
    )
    tokenizer: Literal["auto", "java", "python", "unicode", "char"] = "auto"
    judges: dict[str, JudgeConfig] = field(default_factory=dict)


@dataclass
class VlmRunConfig:
    """Where a run lives.

    Args:
        dir: the run's folder.
        resume: continue from the newest intact checkpoint, if configuration, data, reward and model
            are the same, or start a new run; false refuses a folder that holds one.
    """

    dir: str = "runs/grpo_vlm"
    resume: bool = True


@dataclass
class GrpoVlmConfig(PairsConfig):
    """``grpo_vlm``: fine-tune a decoder-only vision-language model with TRL's trainers.

    Args:
        trainer: ``grpo`` or ``rloo``.
        model: the model, as in ``scst``; ``gradient_checkpointing`` is an option of ``trl``.
        data: images and captions.
        reward: the reward of sampled captions; TRL adds up its terms.
        trl: arguments of TRL's ``GRPOConfig`` or ``RLOOConfig``: steps, learning rate, sampling,
            vLLM and so on.
        eval: evaluation of the trained model.
        train: processes.
        run: folder and resuming.
    """

    trainer: Literal["grpo", "rloo"] = "grpo"
    model: SavedModelConfig = field(default_factory=SavedModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trl: dict[str, Any] = field(default_factory=dict)
    eval: VlmEvalConfig = field(default_factory=VlmEvalConfig)
    train: VlmTrainConfig = field(default_factory=VlmTrainConfig)
    run: VlmRunConfig = field(default_factory=VlmRunConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        terms = self.reward.terms.values()
        if self.reward.normalize != "none" or any(t.schedule or t.length_ratio for t in terms):
            raise ConfigError(
                "reward has normalize, schedule or length_ratio, but TRL adds up the terms itself: "
                "leave them out (GRPO's own is trl.multi_objective_aggregation)"
            )
