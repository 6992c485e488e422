"""The training programs: from a configuration to a finished run folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from rl_caption.advantages import ADVANTAGES, NEEDS_GREEDY
from rl_caption.build import (
    ConfigError,
    build_accelerator,
    build_captioner,
    build_data,
    build_reward,
    checked_splits,
    references_of,
    usable_split,
)
from rl_caption.captioners.base import Captioner, Decoding
from rl_caption.checkpoint import CheckpointError, load_checkpoint, read_state
from rl_caption.config import ScstConfig, XeConfig
from rl_caption.config_checks import out_of_range
from rl_caption.cross_entropy import CrossEntropyTask
from rl_caption.data.base import Row
from rl_caption.data.loader import Collate, caption_loader
from rl_caption.data.order import micro_batch_size, micro_batches
from rl_caption.evaluation import validation_cider
from rl_caption.inference import caption_rows
from rl_caption.launch import RunLock
from rl_caption.run_folder import find_checkpoint, write_run_files
from rl_caption.schedules import make_schedule
from rl_caption.scst import SelfCriticalTask
from rl_caption.tracking import announce
from rl_caption.trainer import Task, Trainer
from rl_caption.types import TrainState

TaskMaker = Callable[[Accelerator, Captioner, torch.nn.Module], Task]


def train_xe(config: XeConfig) -> TrainState:
    """Train a captioner by cross-entropy; the best one by validation CIDEr-D lies in ``export/best``."""
    _check_ranges(config)
    accelerator = build_accelerator(config.train, config.run)
    with _locked(accelerator, config.run.dir):
        checkpoint = _checkpoint(config, accelerator)
        train_rows, val_rows = _rows(config, accelerator)
        captioner = build_captioner(config.model, references_of(train_rows), config.data.cache_mb)
        _check_length(captioner, "train.max_target_tokens", config.train.max_target_tokens)
        collate = Collate(
            captioner,
            config.train.max_target_tokens,
            config.train.captions_per_image,
            config.data.flips,
            config.train.seed,
        )
        decoding = Decoding(max_new_tokens=config.train.max_target_tokens)

        def make_task(accelerator: Accelerator, captioner: Captioner, model: torch.nn.Module) -> Task:
            return CrossEntropyTask(accelerator, captioner, model, config.train.label_smoothing)

        return _fit(config, accelerator, captioner, make_task, collate, decoding, train_rows, val_rows, checkpoint, "")


def train_scst(config: ScstConfig) -> TrainState:
    """Fine-tune the captioner ``model.init`` by self-critical sequence training.

    The optimizer and the schedule are fresh: nothing but the weights comes from cross-entropy training.
    """
    if config.model.init is None:
        raise ConfigError(
            "model.init is not set: self-critical training starts from a captioner trained by cross-entropy"
        )
    _check_ranges(config)
    accelerator = build_accelerator(config.train, config.run)
    with _locked(accelerator, config.run.dir):
        checkpoint = _checkpoint(config, accelerator)
        train_rows, val_rows = _rows(config, accelerator)
        captioner = build_captioner(config.model, references_of(train_rows), config.data.cache_mb)
        _check_length(captioner, "rollout.max_new_tokens", config.rollout.max_new_tokens)
        with accelerator.main_process_first():
            reward, signature = build_reward(config.reward, references_of(train_rows), Path(config.run.dir))
        signature = scst_signature(signature, config)
        ref_policy = _frozen_copy(captioner, accelerator) if config.train.kl_coef > 0 else None
        rollout = config.rollout
        decoding = Decoding(
            num_samples=rollout.num_samples,
            with_greedy=config.train.advantage in NEEDS_GREEDY,
            temperature=rollout.temperature,
            max_new_tokens=rollout.max_new_tokens,
        )
        target_tokens = rollout.max_new_tokens if config.train.xe_weight else None
        collate = Collate(captioner, target_tokens, flips=config.data.flips, seed=config.train.seed)

        def make_task(accelerator: Accelerator, captioner: Captioner, model: torch.nn.Module) -> Task:
            return SelfCriticalTask(
                accelerator,
                captioner,
                model,
                reward,
                ADVANTAGES[config.train.advantage],
                decoding,
                loss_reduction=config.train.loss_reduction,
                seed=config.train.seed,
                dropout=rollout.dropout,
                ref_policy=ref_policy,
                kl_coef=config.train.kl_coef,
                xe_weight=config.train.xe_weight,
                label_smoothing=config.train.label_smoothing,
            )

        greedy = Decoding(max_new_tokens=rollout.max_new_tokens)
        return _fit(
            config, accelerator, captioner, make_task, collate, greedy, train_rows, val_rows, checkpoint, signature
        )


def scst_signature(reward: str, config: ScstConfig) -> str:
    """SacreEOS-style signature of a run (Hu et al. 2023): EOS, document frequencies, metric, baseline, samples.

    Two runs whose signatures differ do not have comparable rewards.
    """
    base = {"greedy": "greedy", "leave_one_out": "average"}.get(config.train.advantage, config.train.advantage)
    return f"{reward}+{base}[nspi{config.rollout.num_samples}]"


def _fit(
    config: XeConfig | ScstConfig,
    accelerator: Accelerator,
    captioner: Captioner,
    make_task: TaskMaker,
    collate: Collate,
    decoding: Decoding,
    train_rows: Sequence[Row],
    val_rows: Sequence[Row],
    checkpoint: Path | None,
    signature: str,
) -> TrainState:
    train, run = config.train, config.run
    try:
        micro = micro_batch_size(train.batch_size, train.micro_batch_size, accelerator.num_processes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    steps_per_epoch = max(len(train_rows) // train.batch_size, 1)
    max_steps = train.max_steps or max(round(train.epochs * steps_per_epoch), 1)
    state = read_state(checkpoint) if checkpoint else TrainState(signature=signature)
    if state.signature != signature and run.resume != "true" and run.resume is not True:
        raise CheckpointError(
            f"{checkpoint} was trained on the reward {state.signature!r}, this run asks for {signature!r}: set "
            "run.resume to true to go on all the same"
        )
    state.signature = signature
    if accelerator.is_main_process:
        write_run_files(config, {"signature": signature, "processes": accelerator.num_processes})
    accelerator.init_trackers(Path(run.dir).name, config={"signature": signature})
    optimizer = torch.optim.AdamW(
        captioner.policy.parameters(), lr=train.lr, betas=train.betas, weight_decay=train.weight_decay
    )
    model, optimizer = accelerator.prepare(captioner.policy, optimizer)
    model.train()
    if checkpoint:
        load_checkpoint(accelerator, checkpoint)
    order = micro_batches(
        len(train_rows),
        train.batch_size,
        micro,
        accelerator.process_index,
        accelerator.num_processes,
        train.seed,
        state.global_step,
    )
    eval_every = config.eval.every or steps_per_epoch
    trainer = Trainer(
        accelerator=accelerator,
        task=make_task(accelerator, captioner, model),
        parameters=[p for p in model.parameters() if p.requires_grad],
        optimizer=optimizer,
        loader=caption_loader(train_rows, collate, order, config.data.num_workers),
        micro_batches=train.batch_size // (micro * accelerator.num_processes),
        schedule=make_schedule(train.schedule, train.warmup_steps, max_steps, train.decay, train.decay_every),
        lr=train.lr,
        max_steps=max_steps,
        folder=Path(run.dir),
        state=state,
        validate=_validator(accelerator, captioner, val_rows, decoding, config.eval.batch_size),
        export=lambda path: captioner.save_pretrained(captioner.policy, path),
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
    _announce_run(accelerator, trainer, len(train_rows), len(val_rows), micro, checkpoint, signature)
    finished = trainer.fit()
    for tracker in accelerator.trackers:
        tracker.finish()
    return finished


def leave_process_group() -> None:
    """Take leave of the other processes, after the last training of this program: a group cannot be entered twice."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _announce_run(
    accelerator: Accelerator,
    trainer: Trainer,
    images: int,
    val: int,
    micro: int,
    checkpoint: Path | None,
    signature: str,
) -> None:
    parameters = sum(p.numel() for p in trainer.parameters)
    announce(
        accelerator,
        f"{trainer.task.name}: {parameters:,} trained parameters, {images} training and {val} validation images, "
        f"{accelerator.num_processes} process(es) on {accelerator.device}, {trainer.micro_batches} x {micro} images a "
        f"step and process, {trainer.max_steps} steps into {trainer.folder}",
    )
    if signature:
        announce(accelerator, f"reward signature: {signature}")
    if checkpoint:
        announce(accelerator, f"going on from {checkpoint}")


def _check_ranges(config: XeConfig | ScstConfig) -> None:
    wrong = out_of_range(config)
    if wrong:
        raise ConfigError("; ".join(wrong))


def _check_length(captioner: Captioner, key: str, tokens: int) -> None:
    longest: int | None = getattr(captioner.policy.config, "max_positions", None)
    if longest is not None and tokens > longest:
        raise ConfigError(f"{key} is {tokens}: the captioner has positions for {longest} tokens (max_positions)")


def _checkpoint(config: XeConfig | ScstConfig, accelerator: Accelerator) -> Path | None:
    with accelerator.main_process_first():  # it clears away what a killed save left; the others then find order
        return find_checkpoint(config)


def _rows(config: XeConfig | ScstConfig, accelerator: Accelerator) -> tuple[Sequence[Row], Sequence[Row]]:
    data = build_data(config.data)
    splits = ("train", usable_split(data, config.eval.split))
    rows = checked_splits(config.data, data, splits, accelerator, Path(config.run.dir) / ".checked_images.json")
    val = rows[config.eval.split]
    if config.eval.max_images is not None:
        val = [val[index] for index in range(min(config.eval.max_images, len(val)))]
    if len(val) < 2:
        raise ConfigError(f"eval.split {config.eval.split!r} has {len(val)} usable image(s): CIDEr-D needs at least 2")
    return rows["train"], val


def _validator(
    accelerator: Accelerator, captioner: Captioner, rows: Sequence[Row], decoding: Decoding, batch_size: int
) -> Callable[[], dict[str, float]]:
    references = {row["image_id"]: row["references"] for row in (rows[index] for index in range(len(rows)))}

    def validate() -> dict[str, float]:
        captions = caption_rows(captioner, captioner.policy, rows, decoding, batch_size, accelerator)
        words = [len(caption.split()) for caption in captions.values()]
        return {"val/cider": validation_cider(captions, references), "val/length": sum(words) / len(words)}

    return validate


def _frozen_copy(captioner: Captioner, accelerator: Accelerator) -> torch.nn.Module:
    policy = copy.deepcopy(captioner.policy).eval().requires_grad_(False)
    return policy.to(accelerator.device)


def _locked(accelerator: Accelerator, folder: str) -> Any:
    return RunLock(folder) if accelerator.is_main_process else nullcontext()
