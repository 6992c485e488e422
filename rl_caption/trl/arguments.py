"""A configuration as the arguments of TRL's trainers, and the checkpoint that a run goes on from."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, cast

import torch

from rl_caption.build import ConfigError
from rl_caption.checkpoint import CheckpointError
from rl_caption.data.order import micro_batch_size
from rl_caption.launch import accelerator_kwargs
from rl_caption.precision import usable_precision
from rl_caption.run_folder import refuse_other_run
from rl_caption.trl.checks import unusable_arguments
from rl_caption.trl.config import GrpoVlmConfig


def trl_arguments(config: GrpoVlmConfig, num_processes: int) -> Any:
    """``GRPOConfig`` or ``RLOOConfig``. Every setting that decides what is sampled is given, none is inherited.

    Raises:
        ConfigError: ``train.kwargs`` has what TRL does not know or another key sets, or TRL refuses a combination.
    """
    from trl import GRPOConfig, RLOOConfig

    kind: Any = GRPOConfig if config.trainer == "grpo" else RLOOConfig
    try:
        micro = micro_batch_size(config.train.batch_size, config.train.micro_batch_size, num_processes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    arguments = _arguments(config, micro, num_processes)
    given = config.train.kwargs
    own = ("reward_weights", "generation_kwargs", "model_init_kwargs")
    known = {field.name for field in dataclasses.fields(kind) if field.init}
    wrong = unusable_arguments(given, known, {*arguments, *own}, kind.__name__)
    if wrong:
        raise ConfigError("; ".join(wrong))
    if config.model.revision is not None and config.lora is None and config.train.kl_coef > 0:
        arguments["model_init_kwargs"] = {"revision": config.model.revision}  # of the reference model
    try:
        made = kind(**arguments, **given)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"TRL refuses this configuration (rollout, train, train.kwargs): {error}") from error
    if made.n_gpu > 1:  # one process that sees several: Transformers would choose DataParallel, which TRL refuses
        made._n_gpu = 1
    return made


def _arguments(config: GrpoVlmConfig, micro: int, num_processes: int) -> dict[str, Any]:
    """Everything that keys of ``config`` other than ``train.kwargs`` decide; ``micro`` images a forward pass."""
    train, rollout, run = config.train, config.rollout, config.run
    precision = usable_precision(train.mixed_precision)
    return {
        "output_dir": str(Path(run.dir) / "checkpoints"),
        "max_steps": train.max_steps if train.max_steps is not None else -1,
        "num_train_epochs": train.epochs,
        "per_device_train_batch_size": micro * rollout.num_samples,
        "gradient_accumulation_steps": train.batch_size // (micro * num_processes),
        "num_generations": rollout.num_samples,
        "max_completion_length": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "disable_dropout": not rollout.dropout,
        "mask_truncated_completions": train.mask_truncated,
        "beta": train.kl_coef,
        "learning_rate": train.lr,
        "lr_scheduler_type": train.schedule if train.schedule != "constant" else "constant_with_warmup",
        "warmup_steps": train.warmup_steps,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.grad_clip_norm,
        "use_cpu": torch.accelerator.current_accelerator() is None or "cpu" in accelerator_kwargs(),
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "activation_checkpointing": train.gradient_checkpointing,
        "gradient_checkpointing": None,
        "seed": train.seed,
        "dataloader_num_workers": config.data.num_workers,
        "remove_unused_columns": False,
        "save_strategy": "steps",
        "save_steps": run.save_every,
        "save_total_limit": run.keep_checkpoints,
        "logging_steps": run.log_every,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no",
        "report_to": run.trackers or "none",
        "disable_tqdm": not sys.stderr.isatty(),
    }


def find_trl_checkpoint(config: GrpoVlmConfig) -> Path | None:
    """The checkpoint to go on from, or None to start. One that a kill cut off is passed over.

    Raises:
        CheckpointError: as for ``rl_caption.run_folder.find_checkpoint``.
    """
    folder, resume = Path(config.run.dir), config.run.resume
    if isinstance(resume, str) and resume not in ("auto", "true", "false"):
        if not _is_whole(Path(resume)):
            raise CheckpointError(
                f"run.resume {resume!r} is no whole checkpoint: it has no readable trainer_state.json"
            )
        return Path(resume)
    newest = newest_whole(folder / "checkpoints")
    if newest is None:
        return None
    refuse_other_run(folder, newest.name, cast(Any, config))
    return newest


def newest_whole(checkpoints: Path) -> Path | None:
    """The ``checkpoint-STEP`` of the highest step that was written to its end."""
    steps = {
        int(found[1]): path
        for path in checkpoints.glob("checkpoint-*")
        if (found := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    return next((steps[step] for step in sorted(steps, reverse=True) if _is_whole(steps[step])), None)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps after which ``checkpoint`` was written."""
    return int(json.loads((checkpoint / "trainer_state.json").read_bytes())["global_step"])


def steps_of_a_pass(arguments: Any, num_images: int) -> int:
    """Optimizer steps of one pass over ``num_images``, as Transformers' trainer counts them for TRL's sampler."""
    generations = num_images // (arguments.generation_batch_size // arguments.num_generations)
    micro_batches = generations * arguments.num_iterations * arguments.steps_per_generation
    return max(math.ceil(micro_batches / arguments.gradient_accumulation_steps), 1)


def total_steps(arguments: Any, num_images: int) -> int:
    """Optimizer steps of the whole training."""
    if arguments.max_steps > 0:
        return int(arguments.max_steps)
    return math.ceil(arguments.num_train_epochs * steps_of_a_pass(arguments, num_images))


def skip_epochs(trainer: Any, epochs: int) -> None:
    """Let ``trainer`` order the images as if it had already gone through them ``epochs`` times.

    The order of TRL's sampler is drawn anew at every pass, from a generator that no checkpoint holds: a continued run
    would begin with the order of the first one.
    """
    make = trainer._get_train_sampler

    def sampler(dataset: Any = None) -> Any:
        made = make(dataset)
        for _ in range(epochs):
            next(iter(made))  # draws the order of a pass
        return made

    trainer._get_train_sampler = sampler


def _is_whole(checkpoint: Path) -> bool:
    """Transformers writes ``trainer_state.json`` last."""
    try:
        step_of(checkpoint)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True
