"""From an open stage and a model to a finished run: optimizer, data order, checkpoint, loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn

from rl_caption.checkpoint import load_checkpoint, read_errors
from rl_caption.data.loader import row_loader
from rl_caption.data.order import micro_batches
from rl_caption.engines import engine_of, prepare, whole_numel
from rl_caption.run_folder import write_run_files
from rl_caption.sharded_state import OPTIMIZER, Moments, load_weights, read_moments
from rl_caption.stage import Stage
from rl_caption.tracking import announce
from rl_caption.training.loop import Task, Trainer
from rl_caption.training.schedules import make_schedule, steps_between_decays
from rl_caption.types import TrainState, Validation


@dataclass(frozen=True)
class Trainee:
    """What a run trains, and how it is judged and exported.

    Attributes:
        model: what is trained: those of its parameters that require a gradient.
        validate: judges the model as it is at a step, told what the newest step logged; called by every process.
        export: writes the model to a folder.
        export_copy: writes the copy of the model that it is given; without it FSDP cannot export the model.
        is_trained: whether the weights are worth validating before the first step.
        metric: which of validation's metrics chooses the best model; higher is better.
        metric_range: its range, for log lines.
        notes: what ``validate`` keeps between validations; saved with every checkpoint and in ``result.json``.
        decays: from name and parameter to whether ``train.weight_decay`` applies to it; None applies it to all.
    """

    model: nn.Module
    validate: Callable[[int, Mapping[str, float]], Validation]
    export: Callable[[Path], None]
    is_trained: bool
    metric: str = "val/cider"
    metric_range: str = "0 to 10"
    notes: dict[str, Any] = field(default_factory=dict)
    decays: Callable[[str, Tensor], bool] | None = None
    export_copy: Callable[[nn.Module, Path], None] | None = None


def fit(
    stage: Stage,
    trainee: Trainee,
    make_task: Callable[[nn.Module], Task],
    collate: Callable[[Any], Any],
    signature: str = "",
) -> TrainState:
    """Prepare model and optimizer, go on from a checkpoint if there is one, and run the task.

    Args:
        stage: of the run.
        trainee: the model and its judge.
        make_task: from the model as prepared for (distributed) training to what one step does.
        collate: (row, step) pairs to a micro-batch.
        signature: what the reward's, or a teacher's, numbers depend on; a resumed run must have the same.
    """
    train, accelerator = stage.config.train, stage.accelerator
    state = stage.state(signature)
    trainee.notes.update(state.notes)
    state.notes = trainee.notes
    if state.metric not in ("", trainee.metric) and state.global_step < stage.max_steps:
        announce(accelerator, f"{trainee.metric} chooses the best model from here on, in place of {state.metric}")
        state.best_metric, state.best_step, state.evaluations_without_gain = None, None, 0
    state.metric = trainee.metric
    if accelerator.is_main_process:
        write_run_files(stage.config, {"signature": signature, "processes": accelerator.num_processes})
    accelerator.init_trackers(stage.folder.name, config={"signature": signature})
    optimizer = torch.optim.AdamW(_parameter_groups(trainee, train.weight_decay), lr=train.lr, betas=train.betas)
    moments = _read_before_sharding(stage, trainee.model, optimizer)
    # FSDP's modules write no state of their own: the main process exports a copy, which never leaves the CPU.
    copies = engine_of(accelerator) == "fsdp2" and accelerator.is_main_process
    whole = copy.deepcopy(trainee.model) if copies else None
    model, optimizer = prepare(accelerator, trainee.model, optimizer)
    model.train()
    set_seed(train.seed, device_specific=True)  # weights are equal everywhere by now; dropout is to differ
    if stage.checkpoint:
        load_checkpoint(accelerator, stage.checkpoint, model, optimizer, moments)
    trainer = _trainer(stage, trainee, make_task(model), model, optimizer, collate, state, whole)
    _announce_run(stage, trainer)
    trainer.fit()
    for tracker in accelerator.trackers:
        tracker.finish()
    return state


def _read_before_sharding(stage: Stage, model: nn.Module, optimizer: torch.optim.Optimizer) -> Moments | None:
    """Weights into the model, and the optimizer's moments, where the checkpoint or this training is a sharded one."""
    path = stage.checkpoint
    if path is None or (engine_of(stage.accelerator) == "plain" and not (path / OPTIMIZER).is_file()):
        return None
    with read_errors(path):
        moments = read_moments(path, model, optimizer)
        load_weights(model, path)
    return moments


def _parameter_groups(trainee: Trainee, weight_decay: float) -> list[dict[str, Any]]:
    trained = {name: value for name, value in trainee.model.named_parameters() if value.requires_grad}
    decays = trainee.decays or (lambda name, value: True)
    groups = [
        {"params": [v for n, v in trained.items() if decays(n, v)], "weight_decay": weight_decay},
        {"params": [v for n, v in trained.items() if not decays(n, v)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _trainer(
    stage: Stage,
    trainee: Trainee,
    task: Task,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    collate: Callable[[Any], Any],
    state: TrainState,
    whole: nn.Module | None,
) -> Trainer:
    config, accelerator = stage.config, stage.accelerator
    train, run, micro = config.train, config.run, stage.micro_batch_size
    rank, processes = accelerator.process_index, accelerator.num_processes
    order = micro_batches(
        len(stage.train_rows), train.batch_size, micro, rank, processes, train.seed, state.global_step
    )
    eval_every = config.eval.every or stage.steps_per_epoch
    copied = trainee.export_copy
    export = trainee.export if whole is None or copied is None else partial(copied, whole)
    decay_every = steps_between_decays(train.decay_every, train.decay_epochs, stage.steps_per_epoch)
    return Trainer(
        accelerator=accelerator,
        task=task,
        model=model,
        parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        optimizer=optimizer,
        loader=row_loader(stage.train_rows, collate, order, config.data.num_workers),
        micro_batches=train.batch_size // (micro * processes),
        schedule=make_schedule(train.schedule, train.warmup_steps, stage.max_steps, train.decay, decay_every),
        lr=train.lr,
        max_steps=stage.max_steps,
        folder=stage.folder,
        state=state,
        validate=trainee.validate,
        export=export,
        whole=whole,
        metric=trainee.metric,
        metric_range=trainee.metric_range,
        grad_clip_norm=train.grad_clip_norm,
        grad_clip_value=train.grad_clip_value,
        eval_every=eval_every,
        save_every=run.save_every or eval_every,
        log_every=run.log_every,
        keep_checkpoints=run.keep_checkpoints,
        patience=config.eval.patience,
        log_samples=run.log_samples,
        validate_first=trainee.is_trained,
    )


def _announce_run(stage: Stage, trainer: Trainer) -> None:
    accelerator = stage.accelerator
    engine = "" if engine_of(accelerator) == "plain" else f"engine {engine_of(accelerator)}, "
    announce(
        accelerator,
        f"{trainer.task.name}: {sum(map(whole_numel, trainer.parameters)):,} trained parameters, "
        f"{len(stage.train_rows)} training and {len(stage.val_rows)} validation images, "
        f"{accelerator.num_processes} process(es) on {accelerator.device}, {engine}{trainer.micro_batches} x "
        f"{stage.micro_batch_size} images a step and process, {trainer.max_steps} steps into {trainer.folder}",
    )
    if trainer.state.signature:
        announce(accelerator, f"{stage.signature_of} signature: {trainer.state.signature}")
    if stage.checkpoint:
        announce(accelerator, f"going on from {stage.checkpoint}")
