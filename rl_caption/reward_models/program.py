"""The training program of reward models: from a configuration to a finished run folder."""

from collections.abc import Sequence
from pathlib import Path

from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.data.formats import check_path
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.types import TrainState
from rl_caption.training.run import open_run


def train_reward_model(config: RewardModelConfig) -> TrainState:
    """Train the model of the configuration's task; the best by validation lies in ``export/best``.

    Raises:
        ConfigError: a model cannot be loaded or made, or does not fit its task or the data.
        DataError: the data cannot be used.
        RewardError: the task needs detail units of captions, and the package textblob is not
            installed.
    """
    config.check()
    with open_run(config, config.needs, trained_on="teacher", deepspeed=False) as run:
        return config.fit(run)


def check_inputs(
    to_train: Sequence[RewardModelConfig], complete: Sequence[RewardModelConfig]
) -> None:
    """Check that the data of every run exist, and every folder that it starts from, unless another
    run will make it.

    Args:
        to_train: runs that one call of a program trains.
        complete: finished runs that these start from; they are not trained again.

    Raises:
        ConfigError: a folder will not be there; the message says what to do.
        DataError: ``data.path`` of a run does not exist; the message has its ``data.source``.
    """
    for config in to_train:
        check_path(config.data, f"the run {config.run.dir}: ")
    run_folders = [Path(config.run.dir).resolve() for config in to_train]
    for config in to_train:
        for key, folder in config.folders().items():
            if (
                folder is None
                or Path(folder).exists()
                or any(Path(folder).resolve().is_relative_to(run) for run in run_folders)
            ):
                continue
            message = (
                f"{key} is {folder!r}, which does not exist, and no run of warm_start writes it"
            )
            if complete:
                folders = ", ".join(run.run.dir for run in complete)
                message += (
                    f". {folders}, which comes before {config.run.dir}, is complete, so runs "
                    f"before it are not trained "
                    f"again. Put {folder} back, or remove {folders}: then this command trains all "
                    f"of them again"
                )
            raise ConfigError(message)
