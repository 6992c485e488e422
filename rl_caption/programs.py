"""The training programs: from a configuration to a finished run folder."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils import set_seed

from rl_caption.advantages import ADVANTAGES, NEEDS_GREEDY
from rl_caption.build import ConfigError, build_reward, references_of
from rl_caption.captioners.base import Decoding
from rl_caption.checkpoint import load_checkpoint
from rl_caption.config import ScstConfig, XeConfig
from rl_caption.cross_entropy import CrossEntropyTask
from rl_caption.data.loader import Collate, caption_loader
from rl_caption.data.order import micro_batches
from rl_caption.run_folder import write_run_files
from rl_caption.schedules import make_schedule
from rl_caption.scst import SelfCriticalTask
from rl_caption.stage import Stage, open_stage
from rl_caption.tracking import announce
from rl_caption.trainer import Task, Trainer
from rl_caption.types import TrainState


def train_xe(config: XeConfig) -> TrainState:
    """Train a captioner by cross-entropy; the best one by validation CIDEr-D lies in ``export/best``."""
    train = config.train
    with open_stage(config, ("train.max_target_tokens", train.max_target_tokens)) as stage:
        collate = Collate(
            stage.captioner, train.max_target_tokens, train.captions_per_image, config.data.augment, train.seed
        )

        def task(model: torch.nn.Module) -> Task:
            return CrossEntropyTask(stage.accelerator, stage.captioner, model, train.label_smoothing)

        return _fit(stage, task, collate, train.max_target_tokens, signature="")


def train_scst(config: ScstConfig) -> TrainState:
    """Fine-tune the captioner ``model.init`` by self-critical sequence training.

    The optimizer and the schedule are fresh: nothing but the weights comes from cross-entropy training.
    """
    if config.model.init is None:
        raise ConfigError(
            "model.init is not set: self-critical training starts from a captioner trained by cross-entropy"
        )
    train, rollout = config.train, config.rollout
    with open_stage(config, ("rollout.max_new_tokens", rollout.max_new_tokens)) as stage:
        with stage.accelerator.main_process_first():
            reward, signature = build_reward(config.reward, references_of(stage.train_rows), stage.folder)
        target_tokens = rollout.max_new_tokens if train.xe_weight else None
        collate = Collate(stage.captioner, target_tokens, augmentations=config.data.augment, seed=train.seed)
        # Before the weights of a checkpoint are loaded: the policy that the whole run started from.
        ref_policy = _frozen_copy(stage) if train.kl_coef > 0 else None

        def task(model: torch.nn.Module) -> Task:
            """The step of ``scst.py`` on this reward."""
            return SelfCriticalTask(
                stage.accelerator,
                stage.captioner,
                model,
                reward,
                ADVANTAGES[train.advantage],
                Decoding(
                    num_samples=rollout.num_samples,
                    with_greedy=train.advantage in NEEDS_GREEDY,
                    temperature=rollout.temperature,
                    max_new_tokens=rollout.max_new_tokens,
                ),
                loss_reduction=train.loss_reduction,
                seed=train.seed,
                dropout=rollout.dropout,
                ref_policy=ref_policy,
                kl_coef=train.kl_coef,
                xe_weight=train.xe_weight,
                label_smoothing=train.label_smoothing,
            )

        return _fit(stage, task, collate, rollout.max_new_tokens, scst_signature(signature, config))


def scst_signature(reward: str, config: ScstConfig) -> str:
    """SacreEOS-style signature of a run (Hu et al. 2023): EOS, document frequencies, metric, baseline, samples.

    Where there is a KL penalty, it also names the starting policy by the hash of its weights. Two runs whose signatures
    differ do not have comparable rewards.
    """
    base = {"greedy": "greedy", "leave_one_out": "average"}.get(config.train.advantage, config.train.advantage)
    signature = f"{reward}+{base}[nspi{config.rollout.num_samples}]"
    if config.train.kl_coef > 0:
        weights = hashlib.sha256((Path(config.model.init or "") / "model.safetensors").read_bytes()).hexdigest()
        signature += f"+kl[{config.train.kl_coef:g},{weights[:8]}]"
    return signature


def _fit(
    stage: Stage, make_task: Callable[[torch.nn.Module], Task], collate: Collate, max_new_tokens: int, signature: str
) -> TrainState:
    """Prepare model and optimizer, go on from a checkpoint if there is one, and run the task."""
    train, accelerator = stage.config.train, stage.accelerator
    state = stage.state(signature)
    if accelerator.is_main_process:
        write_run_files(stage.config, {"signature": signature, "processes": accelerator.num_processes})
    accelerator.init_trackers(stage.folder.name, config={"signature": signature})
    optimizer = torch.optim.AdamW(
        stage.captioner.policy.parameters(), lr=train.lr, betas=train.betas, weight_decay=train.weight_decay
    )
    model, optimizer = accelerator.prepare(stage.captioner.policy, optimizer)
    model.train()
    set_seed(train.seed, device_specific=True)  # weights are equal everywhere by now; dropout is to differ
    if stage.checkpoint:
        load_checkpoint(accelerator, stage.checkpoint)
    trainer = _trainer(stage, make_task(model), model, optimizer, collate, max_new_tokens, state)
    _announce_run(stage, trainer)
    trainer.fit()
    for tracker in accelerator.trackers:
        tracker.finish()
    return state


def _trainer(
    stage: Stage,
    task: Task,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    collate: Collate,
    max_new_tokens: int,
    state: TrainState,
) -> Trainer:
    config, accelerator = stage.config, stage.accelerator
    train, run, micro = config.train, config.run, stage.micro_batch_size
    rank, processes = accelerator.process_index, accelerator.num_processes
    order = micro_batches(
        len(stage.train_rows), train.batch_size, micro, rank, processes, train.seed, state.global_step
    )
    eval_every = config.eval.every or stage.steps_per_epoch
    return Trainer(
        accelerator=accelerator,
        task=task,
        parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        optimizer=optimizer,
        loader=caption_loader(stage.train_rows, collate, order, config.data.num_workers),
        micro_batches=train.batch_size // (micro * processes),
        schedule=make_schedule(train.schedule, train.warmup_steps, stage.max_steps, train.decay, train.decay_every),
        lr=train.lr,
        max_steps=stage.max_steps,
        folder=stage.folder,
        state=state,
        validate=stage.validator(max_new_tokens),
        export=lambda path: stage.captioner.save_pretrained(stage.captioner.policy, path),
        grad_clip_norm=train.grad_clip_norm,
        grad_clip_value=train.grad_clip_value,
        eval_every=eval_every,
        save_every=run.save_every or eval_every,
        log_every=run.log_every,
        keep_checkpoints=run.keep_checkpoints,
        patience=config.eval.patience,
        log_samples=run.log_samples,
        validate_first=config.model.init is not None,
    )


def _announce_run(stage: Stage, trainer: Trainer) -> None:
    accelerator = stage.accelerator
    announce(
        accelerator,
        f"{trainer.task.name}: {sum(p.numel() for p in trainer.parameters):,} trained parameters, "
        f"{len(stage.train_rows)} training and {len(stage.val_rows)} validation images, "
        f"{accelerator.num_processes} process(es) on {accelerator.device}, {trainer.micro_batches} x "
        f"{stage.micro_batch_size} images a step and process, {trainer.max_steps} steps into {trainer.folder}",
    )
    if trainer.state.signature:
        announce(accelerator, f"reward signature: {trainer.state.signature}")
    if stage.checkpoint:
        announce(accelerator, f"going on from {stage.checkpoint}")


def _frozen_copy(stage: Stage) -> torch.nn.Module:
    policy = copy.deepcopy(stage.captioner.policy).eval().requires_grad_(False)
    return policy.to(stage.accelerator.device)
