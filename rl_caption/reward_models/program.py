"""The training program of reward models: from a configuration to a finished run folder."""

from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.types import TrainState
from rl_caption.runtime.zero import uses_deepspeed
from rl_caption.training.run import open_run


def train_reward_model(config: RewardModelConfig) -> TrainState:
    """Train the model of the configuration's task; the best model by validation is in
    ``export/best``. Returns the state in which the run ended.

    Raises:
        ConfigError: a model cannot be loaded or made, or does not fit its task or the
            data; or the launcher asks for DeepSpeed, which needs one loss per
            micro-batch.
        DataError: the data cannot be used.
        RewardError: the task needs detail units of captions, and the package textblob
            is not installed.
    """
    config.check()
    with open_run(config, config.needs) as run:
        if uses_deepspeed(run.accelerator):
            raise ConfigError(
                "reward models do not train under DeepSpeed: take "
                "configs/accelerate/multi_gpu.yaml"
            )
        return config.fit(run)
