"""The runs that a run starts from (``warm_start``, ``reward_models``): which are left to do, and
doing them.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_caption.cli.configuration import UsageError
from rl_caption.config.overrides import Chain
from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.config.schema import ScstConfig, XeConfig
from rl_caption.runtime.errors import ConfigError

logger = logging.getLogger(__name__)


def train_earlier_runs(config: Any, chain: Chain) -> bool:
    """Train what a run starts from, unless it is done; False where SIGTERM stopped one of these
    runs.

    All earlier runs, and the run itself, are checked before any is trained.

    Args:
        config: of the run.
        chain: its command line, which also says what is for its earlier runs.

    Raises:
        ConfigError, UsageError: an earlier run's configuration is wrong, or does not fit the run.
    """
    if isinstance(config, ScstConfig):
        return _train_before_scst(config, chain)
    models = []
    if isinstance(config, RewardModelConfig):
        models = _reward_models_to_train(config.warm_start, chain, config)
    _log_from_main_process(logging.INFO, chain.log_line())
    return _train_reward_models(models)


def _train_before_scst(config: ScstConfig, chain: Chain) -> bool:
    from rl_caption.programs.train import check_images_early, check_weights_early, train_xe
    from rl_caption.training.run_folder import is_complete

    warm_start = (
        None if config.warm_start is None else warm_start_to_train(config.warm_start, config, chain)
    )
    models = _reward_models_to_train(config.reward_models, chain)
    _log_from_main_process(logging.INFO, chain.log_line())
    if warm_start is not None or models:
        check_weights_early(config, [model.run.dir for model in models])
        check_images_early(config)
    if warm_start is not None:
        train_xe(warm_start)
        if not is_complete(Path(warm_start.run.dir)):
            return False
    return _train_reward_models(models)


def warm_start_to_train(file: str, config: ScstConfig, chain: Chain) -> XeConfig | None:
    """The cross-entropy run of ``file``, from which the policy of ``config`` starts; None where it
    is complete.
    """
    from rl_caption.training.run_folder import is_complete

    warm_start = chain.parse(XeConfig, file, "rl-caption xe")
    folder, init = Path(warm_start.run.dir).resolve(), config.model.init
    if is_complete(folder):
        _warn_of_changes(warm_start)
        return None
    chain.check_alone(file, warm_start)
    if init is None or not (Path(init).exists() or Path(init).resolve().is_relative_to(folder)):
        export = f"{warm_start.run.dir}/export/best"
        raise ConfigError(
            f"model.init is {init!r}, but warm_start {file} writes {export}: set it to that"
        )
    return warm_start


def _reward_models_to_train(
    files: Sequence[str], chain: Chain, last: RewardModelConfig | None = None
) -> list[RewardModelConfig]:
    """The runs of ``files`` that are not complete, each after those that it starts from.

    All of them, and ``last``, which comes after them, are checked before any is trained.
    """
    from rl_caption.reward_models.program import check_inputs
    from rl_caption.training.run_folder import is_complete

    runs: dict[Path, RewardModelConfig] = {}

    def collect(files: Sequence[str], above: tuple[str, ...]) -> None:
        """Add a file after those that its ``warm_start`` names, but for a teacher in whose place
        there is another.
        """
        for file in files:
            if file in above:
                raise UsageError(f"warm_start is circular: {' -> '.join((*above, file))}")
            config = chain.parse(RewardModelConfig, file, "rl-caption reward_model")
            folder = Path(config.run.dir).resolve()
            if chain.replaces(config.run.dir):
                continue
            if not is_complete(folder):
                chain.check_alone(file, config)
                collect(config.warm_start, (*above, file))
            runs.setdefault(folder, config)

    collect(files, ())
    complete = [config for folder, config in runs.items() if is_complete(folder)]
    to_train = [config for config in runs.values() if config not in complete]
    for config in complete:
        _warn_of_changes(config)
    for config in to_train:
        try:
            config.check()
        except ConfigError as error:
            raise ConfigError(f"the run {config.run.dir}, which comes first: {error}") from error
    if last is not None:
        last.check()
    check_inputs(to_train if last is None else [*to_train, last], complete)
    return to_train


def _train_reward_models(configs: Sequence[RewardModelConfig]) -> bool:
    """Train the models one after the other; False if stopped by SIGTERM."""
    if not configs:
        return True
    from rl_caption.reward_models.program import train_reward_model
    from rl_caption.training.run_folder import is_complete

    for config in configs:
        train_reward_model(config)
        if not is_complete(Path(config.run.dir)):
            return False
    return True


def _warn_of_changes(config: XeConfig | RewardModelConfig) -> None:
    """Say where a complete run, which is used as it is, was made by another configuration."""
    from rl_caption.training.run_folder import changed_keys

    folder = Path(config.run.dir)
    changed = "; ".join(changed_keys(folder / "config.yaml", config))
    trained = f"was trained with another configuration and is used unchanged: {changed}"
    warning = f"WARNING: the model in {folder} {trained}. To train it again, remove the folder"
    _log_from_main_process(logging.WARNING, warning if changed else "")


def _log_from_main_process(level: int, message: str) -> None:
    if message and os.environ.get("RANK", "0") == "0":
        logger.log(level, "%s", message)
