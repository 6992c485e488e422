"""What every training starts from: an accelerator, a locked run folder, checked data, perhaps a checkpoint."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from rewards.files import remove_leftovers
from rl_caption.build import (
    ConfigError,
    build_accelerator,
    build_data,
    checked_splits,
    usable_split,
)
from rl_caption.checkpoint import CheckpointError, read_state
from rl_caption.config_checks import check
from rl_caption.data.base import Row
from rl_caption.data.order import micro_batch_size
from rl_caption.engines import EngineError, engine_of, fill_deepspeed_config
from rl_caption.launch import RunLock
from rl_caption.reward_models.config import RewardModelConfig, TrainingConfig
from rl_caption.run_folder import find_checkpoint
from rl_caption.types import TrainState

CHECKED_IMAGES = ".checked_images.json"
"""In the run's folder: the image files that were found good."""


@dataclass(frozen=True)
class Stage:
    """Everything that is ready before there is a model.

    Attributes:
        config: as resolved.
        accelerator: devices and processes.
        train_rows, val_rows: usable images.
        micro_batch_size: images of one forward pass of one process.
        checkpoint: where the run goes on from; None at its start.
    """

    config: TrainingConfig
    accelerator: Accelerator
    train_rows: Sequence[Row]
    val_rows: Sequence[Row]
    micro_batch_size: int
    checkpoint: Path | None

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every training image is seen once, rounded down, at least 1."""
        return max(len(self.train_rows) // self.config.train.batch_size, 1)

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.config.train.max_steps or max(round(self.config.train.epochs * self.steps_per_epoch), 1)

    @property
    def signature_of(self) -> str:
        """What a run's signature describes, for messages."""
        return "teacher" if isinstance(self.config, RewardModelConfig) else "reward"

    def state(self, signature: str) -> TrainState:
        """Counters to start from, or those of the checkpoint.

        Raises:
            CheckpointError: the checkpoint is of another reward or teacher, and ``run.resume`` is not ``true``.
        """
        state = read_state(self.checkpoint) if self.checkpoint else TrainState(signature=signature)
        if state.signature != signature and self.config.run.resume not in (True, "true"):
            raise CheckpointError(
                f"{self.checkpoint} was trained on the {self.signature_of} {state.signature!r}, this run asks "
                f"for {signature!r}: set run.resume to true to go on all the same"
            )
        state.signature = signature
        if self.config.run.resume != "auto":  # asked to go on; an unchanged rule stops it at the next validation
            state.stopped = None
        return state


@contextmanager
def open_stage(config: TrainingConfig) -> Iterator[Stage]:
    """Check everything that can be checked before long work starts, and hold the run folder's lock meanwhile.

    Raises:
        ConfigError, DataError, CheckpointError, EngineError, LaunchError: what is wrong, and what would be right.
    """
    check(config)
    accelerator = build_accelerator(config.train, config.run)
    try:
        micro = micro_batch_size(config.train.batch_size, config.train.micro_batch_size, accelerator.num_processes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _check_sharding(config, accelerator, micro)
    with RunLock(config.run.dir) if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process:
            for folder in (Path(config.run.dir), *Path(config.run.dir).glob("eval/*")):
                remove_leftovers(folder, older_than=0)
        with accelerator.main_process_first():  # it clears away what a killed save left; the others then find order
            checkpoint = find_checkpoint(config)
        train_rows, val_rows = _rows(config, accelerator)
        yield Stage(config, accelerator, train_rows, val_rows, micro, checkpoint)


def _check_sharding(config: TrainingConfig, accelerator: Accelerator, micro: int) -> None:
    train, engine = config.train, engine_of(accelerator)
    if engine != "plain" and isinstance(config, RewardModelConfig):
        raise EngineError(f"reward models do not train under {engine}: take configs/accelerate/multi_gpu.yaml")
    if engine.startswith("zero"):
        plugin: Any = accelerator.state.deepspeed_plugin
        fill_deepspeed_config(
            plugin.deepspeed_config, train.batch_size, micro, accelerator.num_processes, train.grad_clip_norm
        )


def leave_process_group() -> None:
    """Take leave of the other processes, after the last training of this program: a group cannot be entered twice.

    The caller holds no model any more: one that is prepared for several processes keeps the group's threads alive, and
    a thread of gloo that lets go of a tensor while the interpreter ends aborts the process.
    """
    if torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()


def _rows(config: TrainingConfig, accelerator: Accelerator) -> tuple[Sequence[Row], Sequence[Row]]:
    data = build_data(config.data)
    splits = ("train", usable_split(data, config.eval.split))
    rows = checked_splits(config.data, data, splits, accelerator, Path(config.run.dir) / CHECKED_IMAGES)
    val = rows[config.eval.split]
    if config.eval.max_images is not None:
        val = val[: config.eval.max_images]
    if len(val) < 2:
        raise ConfigError(f"eval.split {config.eval.split!r} has {len(val)} usable image(s): at least 2 are needed")
    return rows["train"], val
