"""The program ``grpo_vlm``: TRL's trainers on this package's rewards and data, then this package's evaluation."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import GenerationConfig, PrinterCallback, TrainerCallback

from rewards.base import Reward
from rewards.mixed import MixedReward
from rl_caption.build import ConfigError, build_data, build_reward, checked_splits, quiet_libraries, references_of
from rl_caption.data.base import DataError, Row
from rl_caption.evaluation import Evaluation, check_writable, find_java, format_table
from rl_caption.evaluation.reward_scores import check_judges
from rl_caption.hacking.judges import build_judges
from rl_caption.launch import RunLock, check_processes
from rl_caption.run_folder import is_complete, remove_result, write_result, write_run_files
from rl_caption.scst.scoring import COLUMNS
from rl_caption.tracking import announce, append_line, drop_after
from rl_caption.training.loop import NonFiniteError
from rl_caption.trl_captioning.arguments import (
    find_trl_checkpoint,
    skip_epochs,
    step_of,
    steps_of_a_pass,
    total_steps,
    trl_arguments,
)
from rl_caption.trl_captioning.checks import missing_libraries, mistakes, sharding
from rl_caption.trl_captioning.config import GrpoVlmConfig
from rl_caption.trl_captioning.decoding import evaluate_vlm, read_scores
from rl_caption.trl_captioning.model import HALF, Vlm, export, freeze_parameters, load_processor, load_vlm, lora_config
from rl_caption.trl_captioning.reward_functions import reward_functions
from rl_caption.trl_captioning.rows import trl_dataset


@dataclass(frozen=True)
class _Job:
    """Everything that is checked and ready before the model is loaded."""

    config: GrpoVlmConfig
    state: Any
    arguments: Any
    checkpoint: Path | None
    train_rows: Sequence[Row]
    eval_rows: Sequence[Row]
    training_captions: set[str]
    reward: MixedReward
    judges: Mapping[str, Reward]

    @property
    def folder(self) -> Path:
        return Path(self.config.run.dir)


def fine_tune(config: GrpoVlmConfig) -> str:
    """Train, export to ``export/last``, evaluate; return the table of the evaluation (empty beside the main process).

    Raises:
        ConfigError, DataError, CheckpointError, LaunchError, EvaluationError, RewardError, NonFiniteError: what is
            wrong, and what would be right.
    """
    wrong = mistakes(config)
    if wrong:
        raise ConfigError("; ".join(wrong))
    missing = missing_libraries(config)
    if missing:
        raise ConfigError(f"{' and '.join(missing)} not installed: pip install 'rl-caption[trl]'")
    quiet_libraries()
    # Before PartialState: these arguments choose the device and enter the group of processes.
    arguments = trl_arguments(config, int(os.environ.get("WORLD_SIZE", "1")))
    state: Any = PartialState()
    check_processes(state.num_processes, config.train.num_processes)
    if (engine := sharding(arguments)) is not None:
        raise ConfigError(
            f"{engine} shards the weights, which this program does not gather for its export: use one process, plain "
            "data parallelism, or ZeRO-1 or 2"
        )
    if state.device.type == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", state.num_processes))
        torch.set_num_threads(config.train.threads or max((os.cpu_count() or 1) // here, 1))
    with RunLock(config.run.dir) if state.is_main_process else nullcontext():
        checkpoint = find_trl_checkpoint(config)
        if checkpoint is not None and config.run.resume == "auto" and is_complete(Path(config.run.dir)):
            announce(state, f"{config.run.dir} is complete: remove it, or choose another run.dir")
            return ""
        load_processor(config.model)  # a wrong model is told before the data are read
        return _run(_prepare(config, state, arguments, checkpoint))


def _prepare(config: GrpoVlmConfig, state: Any, arguments: Any, checkpoint: Path | None) -> _Job:
    """Check data, rewards and judges."""
    folder, data = Path(config.run.dir), build_data(config.data)
    wanted = ["train", *([config.eval.split] if config.eval.split is not None else [])]
    absent = [split for split in wanted if split not in data.splits]
    if absent:
        raise DataError(f"split {absent[0]!r} is not in the data: it has {list(data.splits)} (eval.split)")
    rows = checked_splits(config.data, data, list(dict.fromkeys(wanted)), state, folder / ".checked_images.json")
    train_rows = rows["train"]
    eval_rows = rows[config.eval.split][: config.eval.max_images] if config.eval.split is not None else []
    if len(train_rows) < config.train.batch_size:
        raise ConfigError(
            f"train.batch_size is {config.train.batch_size}: the training split has {len(train_rows)} usable images"
        )
    with state.main_process_first():
        reward = build_reward(config.reward, references_of(train_rows), folder)
    known = {*COLUMNS, "finished"}
    for name, term in reward.rewards.items():
        if not term.columns <= known:
            raise ConfigError(
                f"reward.terms.{name} needs the columns {sorted(term.columns - known)}: rewards get {sorted(known)}"
            )
    bare = [row["image_id"] for row in eval_rows if not row["references"]]
    if bare:
        raise DataError(f"{len(bare)} images of split {config.eval.split!r} have no reference, such as {bare[:3]}")
    judges: Mapping[str, Reward] = {}
    if state.is_main_process and config.eval.split is not None:
        check_writable(folder / "eval")
        if config.eval.tokenizer == "java":
            find_java()
        judges = build_judges(config.eval.judges, None, references_of(eval_rows), key="eval.judges")
        check_judges(judges, eval_rows, f"split {config.eval.split!r}")
    captions = {caption for captions in references_of(train_rows) for caption in captions}
    return _Job(config, state, arguments, checkpoint, train_rows, eval_rows, captions, reward, judges)


def _run(job: _Job) -> str:
    config, state = job.config, job.state
    vlm = load_vlm(config.model, _dtype(config, job.arguments))
    trainer = _trainer(job, vlm)  # before the first captions, as it refuses what is wrong; new adapters change none
    tables: dict[str, Evaluation] = {}
    if config.eval.before and job.eval_rows:
        name = f"{config.eval.split}-before"
        found = read_scores(job.folder / "eval" / name, job.judges) if job.checkpoint is not None else None
        if found is not None:
            tables[name] = found
        else:
            _evaluate(job, vlm, vlm.policy, name, tables, trainer.accelerator.autocast)
    if state.is_main_process:
        remove_result(job.folder)
        write_run_files(cast(Any, config), {"reward": job.reward.signature, "num_processes": state.num_processes})
        drop_after(job.folder / "metrics.jsonl", step_of(job.checkpoint) if job.checkpoint else -1)
    announce(state, f"{config.trainer} on {len(job.train_rows)} images with the reward {job.reward.signature}")
    step = _train(job, trainer)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if config.lora is not None:
        policy = policy.merge_and_unload()
    if state.is_main_process:
        export(vlm, policy, job.folder / "export" / "last")
    if job.eval_rows:
        _evaluate(job, vlm, policy, config.eval.split or "", tables, trainer.accelerator.autocast)
    if not state.is_main_process:
        return ""
    metrics = {name: evaluation.metrics for name, evaluation in tables.items()}
    write_result(job.folder, {"step": step, "metrics": metrics, "reward": job.reward.signature})
    return format_table(tables) if tables else ""


def _dtype(config: GrpoVlmConfig, arguments: Any) -> torch.dtype:
    if config.model.dtype != "auto":
        return getattr(torch, config.model.dtype)  # type: ignore[no-any-return]
    precision = "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "no"
    return HALF.get(precision, torch.float32) if config.lora is not None else torch.float32


def _evaluate(
    job: _Job,
    vlm: Vlm,
    policy: Any,
    name: str,
    tables: dict[str, Evaluation],
    autocast: Callable[[], AbstractContextManager[Any]],
) -> None:
    policy.to(job.state.device)
    announce(job.state, f"captioning {len(job.eval_rows)} images of {job.config.eval.split!r}")
    folder = job.folder / "eval" / name
    evaluation = evaluate_vlm(
        job.config, vlm, policy, job.eval_rows, job.training_captions, job.judges, folder, autocast
    )
    if evaluation is not None:
        tables[name] = evaluation


def _trainer(job: _Job, vlm: Vlm) -> Any:
    from trl import GRPOTrainer, RLOOTrainer

    config = job.config
    functions, weights = reward_functions(job.reward, vlm.eos_token_ids)
    job.arguments.reward_weights = weights
    # In place of TRL's own, which suppresses the image token only.
    job.arguments.generation_kwargs = {"suppress_tokens": vlm.suppressed, "eos_token_id": vlm.eos_token_ids}
    adapters = lora_config(config.lora, vlm.policy, config.model.freeze) if config.lora is not None else None
    if adapters is None:
        freeze_parameters(vlm.policy, config.model.freeze)
    # ``generate`` fills what TRL leaves open from the model's own settings, a ban on repeated words, say.
    vlm.policy.generation_config = GenerationConfig(eos_token_id=vlm.eos_token_ids)
    kind: Any = GRPOTrainer if config.trainer == "grpo" else RLOOTrainer
    try:
        trainer = kind(
            model=vlm.policy,
            reward_funcs=functions,
            args=job.arguments,
            train_dataset=trl_dataset(job.train_rows, config.model.prompt),
            processing_class=vlm.processor,
            callbacks=[_Log(job.folder / "metrics.jsonl", job.reward)],
            peft_config=adapters,
        )
    except (ValueError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"TRL refuses this configuration (train.kwargs, run.trackers): {error}") from error
    trainer.remove_callback(PrinterCallback)  # prints every value, without a unit
    if job.checkpoint is not None:
        skip_epochs(trainer, step_of(job.checkpoint) // steps_of_a_pass(job.arguments, len(job.train_rows)))
    return trainer


def _train(job: _Job, trainer: Any) -> int:
    """Train to the end; return the number of the last step."""
    checkpoint = job.checkpoint
    if checkpoint is not None and step_of(checkpoint) >= total_steps(job.arguments, len(job.train_rows)):
        trainer._load_from_checkpoint(str(checkpoint))  # train() would make one more step
        return step_of(checkpoint)
    with warnings.catch_warnings():  # TRL calls Transformers by names that are on their way out, at every step
        warnings.filterwarnings("ignore", r".*gradient_checkpointing", FutureWarning)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return int(trainer.state.global_step)


class _Log(TrainerCallback):
    """Appends what TRL logs to ``metrics.jsonl``, prints a line, and ends a run whose loss is no number."""

    def __init__(self, path: Path, reward: MixedReward) -> None:
        self.path, self.reward = path, reward

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Called by the trainer with what it logs."""
        values = dict(logs or {})
        if "loss" not in values:  # the totals after the last step
            return
        if state.is_world_process_zero:
            append_line(self.path, {"step": state.global_step, **values})
            tqdm.write(f"step {state.global_step}/{state.max_steps}  {self._line(values)}", file=sys.stderr)
        if not math.isfinite(values["loss"]):
            raise NonFiniteError(f"loss is {values['loss']} at step {state.global_step}: lower train.lr, or use bf16")

    def _line(self, values: dict[str, Any]) -> str:
        terms = [
            f"{name} {values[f'rewards/{name}/mean']:.4g} ({term.bounds[0]:g} to {term.bounds[1]:g})"
            for name, term in self.reward.rewards.items()
        ]
        length, clipped = values["completions/mean_length"], values["completions/clipped_ratio"]
        return "  ".join([*terms, f"length {length:.1f} tokens", f"without EOS {clipped:.0%}"])
