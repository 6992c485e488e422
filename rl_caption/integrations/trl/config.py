"""Configuration of ``grpo_vlm``."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from rl_caption.captioners.config import SavedModelConfig
from rl_caption.config.schema import DataConfig, PairsConfig, RewardConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Section


class VlmTrainConfig(Section):
    """The processes that train."""

    num_processes: PositiveInt | None = None
    """Required number of processes; null accepts the number that the launcher started."""
    threads: PositiveInt | None = None
    """CPU threads per process; null uses OMP_NUM_THREADS or, if that is not set,
    divides the physical cores among the processes of the machine.
    """


class VlmRunConfig(Section):
    """Folder of a run, and resuming."""

    dir: str = "runs/grpo_vlm"
    """The run's folder."""
    resume: bool = True
    """Continue from the newest intact checkpoint, if configuration, data, reward and
    model are the same, or start a new run; false refuses a folder that holds one.
    """


class GrpoVlmConfig(PairsConfig):
    """``grpo_vlm``: fine-tune a decoder-only vision-language model with TRL's trainers."""

    trainer: Literal["grpo", "rloo"] = "grpo"
    """Trainer of TRL: ``grpo`` or ``rloo``."""
    model: SavedModelConfig = Field(default_factory=SavedModelConfig)
    """The model, as in ``scst``; ``gradient_checkpointing`` is an option of ``trl``."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Images and captions."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """The reward of sampled captions; TRL adds up its terms."""
    trl: dict[str, Any] = {}
    """Arguments of TRL's ``GRPOConfig`` or ``RLOOConfig``: steps, learning rate,
    sampling, vLLM and so on.
    """
    train: VlmTrainConfig = Field(default_factory=VlmTrainConfig)
    """Processes."""
    run: VlmRunConfig = Field(default_factory=VlmRunConfig)
    """Folder and resuming."""

    @model_validator(mode="after")
    def _check_grpo_vlm(self) -> Self:
        terms = self.reward.terms.values()
        if self.reward.normalize != "none" or any(term.schedule for term in terms):
            raise ConfigError(
                "reward has normalize or schedule, but TRL adds up the terms itself: "
                "leave them out (GRPO's own is trl.multi_objective_aggregation)"
            )
        return self
