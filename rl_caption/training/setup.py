"""What every training starts from: an accelerator, a locked run folder, checked data, perhaps a checkpoint.

with setup(config) as context:
    state = context.start(signature)
    model, optimizer = context.prepare(policy)
    Trainer(context, task, model, optimizer, ...).fit()
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim import Optimizer

from rewards.files import remove_leftovers
from rl_caption.config.build import ConfigError, build_accelerator, build_data, checked_splits, usable_split
from rl_caption.config.checks import check
from rl_caption.data.base import Row
from rl_caption.data.loader import micro_batch_size
from rl_caption.launch import RunLock
from rl_caption.reward_models.config import RewardModelConfig, TrainingConfig
from rl_caption.training.checkpoint import CheckpointError, load_checkpoint, read_errors, read_state
from rl_caption.training.distributed.engines import EngineError, engine_of, fill_deepspeed_config, prepare
from rl_caption.training.distributed.sharded_state import OPTIMIZER, Moments, load_weights, read_moments
from rl_caption.training.run_folder import find_checkpoint, write_run_files
from rl_caption.training.tracking import announce
from rl_caption.types import TrainState

CHECKED_IMAGES = ".checked_images.json"
"""In the run's folder: the image files that were found good."""


@dataclass(frozen=True)
class Context:
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
    checkpoint: Path | None = None

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

    def start(self, signature: str = "", metric: str = "val/cider", notes: dict[str, Any] | None = None) -> TrainState:
        """Counters to start from, or those of the checkpoint; write the run's files and start its trackers.

        Args:
            signature: what the reward's, or a teacher's, numbers depend on; a resumed run must have the same.
            metric: which of validation's metrics chooses the best model.
            notes: what validation keeps between validations; the checkpoint's are put into it.

        Raises:
            CheckpointError: the checkpoint is of another reward or teacher, and ``run.resume`` is not ``true``.
        """
        state = self._state(signature)
        notes = {} if notes is None else notes
        notes.update(state.notes)
        state.notes = notes
        if state.metric not in ("", metric) and state.global_step < self.max_steps:
            announce(self.accelerator, f"{metric} chooses the best model from here on, in place of {state.metric}")
            state.best_metric, state.best_step, state.evaluations_without_gain = None, None, 0
        state.metric = metric
        if self.accelerator.is_main_process:
            extra = {"signature": signature, "processes": self.accelerator.num_processes}
            write_run_files(self.config, extra)
        self.accelerator.init_trackers(self.folder.name, config={"signature": signature})
        return state

    def _state(self, signature: str) -> TrainState:
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

    def prepare(
        self, model: nn.Module, decays: Callable[[str, Tensor], bool] | None = None
    ) -> tuple[nn.Module, Optimizer]:
        """The model as trained by all processes, and AdamW over its parameters that require a gradient.

        Both are those of the checkpoint, if there is one, and so are the random states.

        Args:
            model: what is trained.
            decays: from name and parameter to whether ``train.weight_decay`` applies to it; None applies it to all.
        """
        train = self.config.train
        groups = parameter_groups(model, train.weight_decay, decays)
        optimizer: Any = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas)
        moments = self._read_before_sharding(model, optimizer)
        model, optimizer = prepare(self.accelerator, model, optimizer)
        model.train()
        set_seed(train.seed, device_specific=True)  # weights are equal everywhere by now; dropout is to differ
        if self.checkpoint:
            load_checkpoint(self.accelerator, self.checkpoint, model, optimizer, moments)
        return model, optimizer

    def unsharded_copy(self, model: nn.Module) -> nn.Module | None:
        """On the main process under FSDP a copy to be exported, to be made before ``prepare``; elsewhere None.

        FSDP's modules write no state of their own. The copy never leaves the CPU.
        """
        copies = engine_of(self.accelerator) == "fsdp2" and self.accelerator.is_main_process
        return copy.deepcopy(model) if copies else None

    def _read_before_sharding(self, model: nn.Module, optimizer: Optimizer) -> Moments | None:
        """Weights into the model, and the optimizer's moments, where the checkpoint or this training is sharded."""
        path = self.checkpoint
        if path is None or (engine_of(self.accelerator) == "plain" and not (path / OPTIMIZER).is_file()):
            return None
        with read_errors(path):
            moments = read_moments(path, model, optimizer)
            load_weights(model, path)
        return moments


def parameter_groups(
    model: nn.Module, weight_decay: float, decays: Callable[[str, Tensor], bool] | None
) -> list[dict[str, Any]]:
    """Parameters that require a gradient, with and without weight decay; groups without any are left out."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    decayed = [value for name, value in trained.items() if decays is None or decays(name, value)]
    others = [value for name, value in trained.items() if decays is not None and not decays(name, value)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


@contextmanager
def setup(config: TrainingConfig) -> Iterator[Context]:
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
        yield Context(config, accelerator, train_rows, val_rows, micro, checkpoint)


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
