"""The loop around every training task: steps, learning rate, validation, checkpoints, resume, logs."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.optim import Optimizer

from rl_caption.data.loader import micro_batches, row_loader
from rl_caption.runtime.engines import (
    Averages,
    deepspeed_step,
    engine_of,
    first_non_finite,
    gathered_parameters,
    numel,
    print_main,
    uses_deepspeed,
)
from rl_caption.runtime.errors import UserError
from rl_caption.runtime.launch import stop_requests
from rl_caption.runtime.types import Batch, TrainState, Validation, is_better
from rl_caption.training.checkpoint import (
    hash_of,
    newest_checkpoint,
    prune,
    remove_tree,
    replace_folder,
    save_checkpoint,
    save_or_discard,
)
from rl_caption.training.run_folder import RunLog, remove_result, write_result, write_run_files
from rl_caption.training.setup import Context

MOST_SKIPPED = 24
"""Updates in a row that fp16 may skip: its loss scale starts at 2^16 and is halved by each."""
NEWEST = ("time/step", "train/skipped", "train/loss_scale")
"""Keys of which a step of several updates logs the last value; of all others it logs the mean."""


class NonFiniteError(UserError, RuntimeError):
    """Loss, gradient or a weight is NaN or infinite; the message names the step and the last good
    checkpoint.
    """


def schedule_factor(
    step: int,
    schedule: str,
    warmup_steps: int,
    max_steps: int,
    decay: float = 0.8,
    decay_every: int = 1000,
) -> float:
    """Factor of the peak learning rate at optimizer step ``step`` (from 0), in [0, 1].

    Linear warm-up over ``warmup_steps``, then: ``constant``; ``linear`` or ``cosine`` to 0 at
    ``max_steps``; ``step``, times ``decay`` every ``decay_every`` steps; ``noam``, the inverse
    square root (Vaswani et al. 2017), 1 at the end of the warm-up.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule == "step":
        return decay ** ((step - warmup_steps) // decay_every)
    if schedule == "noam":
        return math.sqrt(max(warmup_steps, 1) / (step + 1))
    raise ValueError(f"schedule {schedule!r} is not one of constant, linear, cosine, step, noam")


class Task(Protocol):
    """What one step does; the loop does the rest."""

    name: str
    samples: list[dict[str, Any]]

    def training_step(self, batches: Sequence[Any], step: int) -> Iterator[Averages]:
        """Leave a gradient in the parameters and yield what is to be logged; the loop then updates
        the weights.

        Most tasks yield once. The parameters have no gradient at the start and after each update.
        """
        ...


@dataclass
class Trainer:
    """Runs a task for the optimizer steps of a run.

    Args:
        context: configuration, processes and data of the run (``training.setup``).
        task: computes the gradients.
        model, optimizer: as prepared by the context.
        collate: (row, step) pairs to a micro-batch.
        state: counters to start from.
        validate: from a step, and what its newest step logged, to a verdict on the model. Called by
            every process.
        export: writes the model to a folder.
        metric_range: of the metric that chooses the best model (``state.metric``; higher is better,
            but for ``LOSS``), for log lines.
        validate_first: validate before the first step, where the model to start from is a trained
            one.
    """

    context: Context
    task: Task
    model: nn.Module
    optimizer: Optimizer
    collate: Callable[[Any], Any]
    state: TrainState
    validate: Callable[[int, Mapping[str, float]], Validation]
    export: Callable[[Path], None]
    metric_range: str = "0 to 10"
    validate_first: bool = True

    def __post_init__(self) -> None:
        context, train, run = self.context, self.context.config.train, self.context.config.run
        self.accelerator, self.folder, self.max_steps = (
            context.accelerator,
            context.folder,
            context.max_steps,
        )
        self.checkpoints = self.folder / "checkpoints"
        self.parameters = [
            parameter for parameter in self.model.parameters() if parameter.requires_grad
        ]
        size, micro, step = train.batch_size, context.micro_batch_size, self.state.global_step
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        self.micro_batches = size // (micro * processes)
        order = micro_batches(
            len(context.train_rows), size, micro, rank, processes, train.seed, step
        )
        workers = context.config.data.num_workers
        self.loader: AbstractContextManager[Iterator[Any]] = row_loader(
            context.train_rows, self.collate, order, workers
        )
        decay_every = (
            train.decay_every
            if train.decay_epochs is None
            else context.steps_of(train.decay_epochs)
        )
        self.schedule: Callable[[int], float] = partial(
            schedule_factor,
            schedule=train.schedule,
            warmup_steps=train.warmup_steps,
            max_steps=self.max_steps,
            decay=train.decay,
            decay_every=decay_every,
        )
        self.eval_every = context.config.eval.every or context.steps_of(1)
        self.save_every = run.save_every or self.eval_every
        self._newest: Mapping[str, float] = {}
        self._skipped = 0

    def fit(self) -> TrainState:
        """Train to ``max_steps``, to the end of patience, or to SIGTERM, SIGINT or SIGHUP, which
        save a checkpoint.

        A finished run has the best model in ``export/best`` and that after the last step in
        ``export/last``.

        Raises NonFiniteError before a loss or gradient that is not finite changes the weights, and
        before weights that are not finite are validated or written; CheckpointError where a
        checkpoint or the model cannot be written.
        """
        self._describe()
        if (
            self.accelerator.is_main_process
        ):  # not before a checkpoint has fitted: ``auto`` would ask for what did not
            about = {"signature": self.state.signature, "processes": self.accelerator.num_processes}
            write_run_files(self.context.config, about)
        log = RunLog(
            self.accelerator, self.folder, self.task.name, self.state.global_step, self.max_steps
        )
        try:
            finished = self._train(log)
        finally:
            log.close()
        if finished:
            self._finish(log)
        for tracker in self.accelerator.trackers:
            tracker.finish()
        return self.state

    def _describe(self) -> None:
        context, accelerator = self.context, self.accelerator
        engine = f"engine {engine_of(accelerator)}, " if uses_deepspeed(accelerator) else ""
        lines = [
            f"{self.task.name}: {sum(map(numel, self.parameters)):,} trained parameters, "
            f"{len(context.train_rows)} training and {len(context.val_rows)} validation images, "
            f"{accelerator.num_processes} process(es) on {accelerator.device}, "
            f"{engine}{self.micro_batches} x "
            f"{context.micro_batch_size} images a step and process, {self.max_steps} steps into "
            f"{self.folder}"
        ]
        if self.state.signature:
            lines.append(f"{context.signature_of} signature: {self.state.signature}")
        if context.checkpoint:
            lines.append(f"going on from {context.checkpoint}")
        for line in lines:
            print_main(accelerator, line)

    def _train(self, log: RunLog) -> bool:
        """Take the steps; False where a signal ended them."""
        if self.accelerator.is_main_process and not self._is_finished():
            remove_result(self.folder)
        with self.loader as batches, stop_requests() as terminated:
            if self.state.global_step == 0 and self.validate_first:
                self._validate(log)
            while not self._is_finished():
                metrics = self._step(
                    [next(batches).to(self.accelerator.device) for _ in range(self.micro_batches)]
                )
                log.advance()
                self._after_step(log, metrics)
                if self._any_process(terminated()):
                    self._save()
                    log.message(
                        f"terminated: checkpoint of step {self.state.global_step} saved, start "
                        f"again to continue"
                    )
                    return False
        return True

    def _finish(self, log: RunLog) -> None:
        self._export("last")
        if self.accelerator.is_main_process:
            newest = newest_checkpoint(self.checkpoints)
            if newest is not None:  # the last save may have been killed before it pruned
                prune(newest.parent, self.context.config.run.keep_checkpoints, newest)
            inputs = ("data", "configuration")  # of checkpoints, which are resumed
            write_result(
                self.folder,
                {key: value for key, value in asdict(self.state).items() if key not in inputs},
            )
        self.accelerator.wait_for_everyone()  # every process then finds the result
        if self.state.stopped is not None:
            log.message(
                f"stopped at step {self.state.global_step} of {self.max_steps}: "
                f"{self.state.stopped}"
            )
        untouched = (
            ", which is the model that the training started from"
            if self.state.best_step == 0
            else ""
        )
        log.message(
            f"done: best {self.state.metric} {self.state.best_metric:.4f} ({self.metric_range}) at "
            f"step "
            f"{self.state.best_step}, model in "
            f"{self.folder / 'export' / 'best'}{untouched}{self._gains()}"
        )

    def _gains(self) -> str:
        """What ``export/best`` and ``export/last`` have gained on the validation images since the
        first validation.
        """
        if not self.accelerator.is_main_process:
            return ""
        metrics = (self.state.metric, "val/cider", "val/reward")
        validations: dict[int, dict[str, float]] = {}
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        for record in map(json.loads, lines):
            if self.state.metric in record:
                validations[record["step"]] = record
        if self.state.best_step not in validations or len(validations) < 2:
            return ""
        first, last = min(validations), max(validations)
        gains = []
        for name, step in (("best", self.state.best_step), ("last", last)):
            changes = [
                f"{key} {validations[step][key] - validations[first][key]:+.4f}"
                for key in dict.fromkeys(metrics)
                if key in validations[first] and key in validations[step]
            ]
            gains.append(f"export/{name} (step {step}) {', '.join(changes)}")
        return f"; gained since step {first}: {'; '.join(gains)}"

    def _step(self, batches: list[Batch]) -> dict[str, float]:
        """One step of the task, of one optimizer update or more; returns what is logged."""
        started = time.perf_counter()
        step = self.state.global_step
        lr = self.context.config.train.lr * self.schedule(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        updates: list[dict[str, float]] = []
        for averages in self.task.training_step(batches, step):
            updates.append(self._update(averages, batches, started))
            self.optimizer.zero_grad()
        names = dict.fromkeys(name for update in updates for name in update)
        metrics = {
            name: fmean(update[name] for update in updates if name in update) for name in names
        }
        metrics |= {name: updates[-1][name] for name in NEWEST if name in names}
        self.state.global_step += 1
        images = sum(len(batch.rows) for batch in batches) * self.accelerator.num_processes
        return metrics | {"train/lr": lr, "train/images_per_second": images / metrics["time/step"]}

    def _update(self, averages: Averages, batches: list[Batch], started: float) -> dict[str, float]:
        """Check, clip and apply the gradient."""
        sharded = uses_deepspeed(self.accelerator)
        if not sharded:
            averages.add("grad/norm", self._clip_gradients())
        averages.add("time/step", time.perf_counter() - started)
        metrics = averages.reduce(self.accelerator)
        self._check_finite(metrics, batches)
        if sharded:
            metrics["grad/norm"] = deepspeed_step(self.model)
            self._check_finite(metrics, batches, updated=True)
            return metrics
        self.optimizer.step()
        return metrics if self.accelerator.scaler is None else self._loss_scale_metrics(metrics)

    def _clip_gradients(self) -> float:
        """Clip gradients, by value first where both are asked for; return their norm before any
        clipping.
        """
        train = self.context.config.train
        limit = math.inf if train.grad_clip_norm is None else train.grad_clip_norm
        if train.grad_clip_value is None:
            return float(self.accelerator.clip_grad_norm_(self.parameters, limit))
        # The norm comes first: clipped by value, an infinite gradient would look like a finite one.
        norm = float(self.accelerator.clip_grad_norm_(self.parameters, math.inf))
        torch.nn.utils.clip_grad_value_(self.parameters, train.grad_clip_value)
        if train.grad_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, limit)
        return norm

    def _loss_scale_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """What fp16 logs besides. A step whose gradient overflowed leaves weights and moments as
        they were.

        It counts as a step all the same: its images have been seen, and the schedule is a function
        of the step.
        """
        assert self.accelerator.scaler is not None
        if self.accelerator.optimizer_step_was_skipped:
            self._skipped += 1
            self.state.skipped += 1
            metrics.pop("grad/norm")  # it is not finite
        else:
            self._skipped = 0
        if self._skipped > MOST_SKIPPED:
            raise NonFiniteError(
                f"the gradient overflowed fp16 in {self._skipped} steps in a row: no "
                "loss scale helps. train.mixed_precision bf16 or no is the usual remedy"
            )
        scale = float(self.accelerator.scaler.get_scale())
        return metrics | {"train/skipped": float(self.state.skipped), "train/loss_scale": scale}

    def _after_step(self, log: RunLog, metrics: dict[str, float]) -> None:
        self._newest = metrics
        step, run = self.state.global_step, self.context.config.run
        last = step >= self.max_steps
        if step % run.log_every == 0 or last or step == 1:
            log.metrics(step, metrics)
            log.samples(step, self.task.samples[: run.log_samples])
        if step % self.eval_every == 0 or last:
            self._validate(log)
        if step % self.save_every == 0 or last or self._stops_early():
            self._save()

    def _validate(self, log: RunLog) -> None:
        """Validate the model; a better ``state.metric`` than before exports it to ``export/best``."""
        self._check_weights()
        state, started = self.state, time.perf_counter()
        with gathered_parameters(self.accelerator, self.model):
            verdict = self.validate(state.global_step, self._newest)
        value, best = verdict.metrics[state.metric], state.best_metric
        improved = is_better(state.metric, value, best)
        if improved:
            state.best_metric, state.best_step, state.evaluations_without_gain = (
                value,
                state.global_step,
                0,
            )
            self._export("best")
            if self.accelerator.is_main_process:
                state.best_model = hash_of(self.folder / "export" / "best")
        else:
            state.evaluations_without_gain += 1
        log.metrics(
            state.global_step, verdict.metrics | {"val/seconds": time.perf_counter() - started}
        )
        log.message(
            f"validation: {state.metric} {value:.4f} ({self.metric_range})"
            + (", the best so far" if improved else f", best {best:.4f} at step {state.best_step}")
        )
        for message in verdict.messages:
            log.message(message)
        state.stopped = verdict.stop

    def _export(self, name: str) -> None:
        final, partial_folder = (
            self.folder / "export" / name,
            self.folder / "export" / f".partial-{name}",
        )
        with gathered_parameters(self.accelerator, self.model):
            if self.accelerator.is_main_process:
                with save_or_discard(f"model {final}", partial_folder, self.checkpoints):
                    remove_tree(partial_folder)
                    self.export(partial_folder)
                    replace_folder(partial_folder, final)
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        self._check_weights()
        self.state.processes = self.accelerator.num_processes
        keep = self.context.config.run.keep_checkpoints
        save_checkpoint(
            self.accelerator, self.checkpoints, self.state, keep, self.model, self.optimizer
        )

    def _is_finished(self) -> bool:
        return self.state.global_step >= self.max_steps or self._stops_early()

    def _stops_early(self) -> bool:
        if self.state.stopped is not None:
            return True
        patience = self.context.config.eval.patience
        return patience is not None and self.state.evaluations_without_gain >= patience

    def _any_process(self, terminated: bool) -> bool:
        """Whether any process was told to stop; all of them must leave the loop at the same step."""
        if self.accelerator.num_processes == 1:
            return terminated
        votes = torch.tensor(float(terminated), device=self.accelerator.device)
        return bool(self.accelerator.reduce(votes, reduction="sum").item() > 0)

    def _check_weights(self) -> None:
        """Weights that are not finite are neither validated nor written: the checkpoints before are
        the good ones.
        """
        name = first_non_finite(self.accelerator, self.model)
        if name is not None:
            raise NonFiniteError(
                f"the weights of {name} have NaN or infinite values after step "
                f"{self.state.global_step}: they "
                f"are not saved. {self._last_good()}. A lower train.lr is the usual remedy"
            )

    def _check_finite(
        self, metrics: dict[str, float], batches: list[Batch], updated: bool = False
    ) -> None:
        scaled = (
            self.accelerator.scaler is not None
        )  # fp16 overflows now and then; the scaler skips that step
        watched = ("loss/total",) if scaled else ("loss/total", "grad/norm")
        bad = [
            f"{name} is {metrics[name]}"
            for name in watched
            if not math.isfinite(metrics.get(name, 0.0))
        ]
        if not bad:
            return
        ids = [row["image_id"] for batch in batches for row in batch.rows]
        ids = gather_object(ids) if self.accelerator.num_processes > 1 else ids
        weights = (
            "The weights in memory are not usable" if updated else "The weights were not changed"
        )
        raise NonFiniteError(
            f"{' and '.join(bad)} at step {self.state.global_step + 1}; images of the step: "
            f"{json.dumps(ids)}. "
            f"{weights}. {self._last_good()}. "
            "A lower train.lr, or train.grad_clip_norm 1.0, is the usual remedy"
        )

    def _last_good(self) -> str:
        return f"Last good checkpoint: {newest_checkpoint(self.checkpoints) or 'none yet'}"
