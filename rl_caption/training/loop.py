"""The loop of every training: steps, validation, export of the best model, checkpoints, the end."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rl_caption.data.files import write_json
from rl_caption.data.plain_files import read_log
from rl_caption.runtime.engines import Averages, numel, print_main
from rl_caption.runtime.launch import stop_requests
from rl_caption.runtime.types import TrainState, Validation, is_better
from rl_caption.runtime.zero import engine_of, gathered_parameters
from rl_caption.training.checkpoint import CheckpointError, newest_checkpoint, prune
from rl_caption.training.run import Run
from rl_caption.training.run_folder import RESULT, RunLog, write_run_files


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


@dataclass(frozen=True)
class Metric:
    """The validation metric that chooses the best model; higher is better, but for ``LOSS``.

    Args:
        name: its log key.
        range: its values, for log lines.
        measured: what it depends on besides the model, the validation images and ``eval``.
    """

    name: str = "val/cider"
    range: str = "0 to 10"
    measured: str = ""


Validate = Callable[[int, Mapping[str, float]], Validation]
"""From a step, and what its newest step logged, to a verdict on the model. Called by every process.
"""


def train(
    run: Run,
    task: Task,
    collate: Callable[[Any], Any],
    validate: Validate,
    export: Callable[[Path], None],
    metric: Metric = Metric(),
    validate_first: bool = True,
) -> TrainState:
    """Train to the last step, to the end of patience, or to SIGTERM, SIGINT or SIGHUP, which save a
    checkpoint; return the counters.

    A finished run has the best model in ``export/best`` and the last one in ``export/last``.

    Args:
        run: restored.
        task: computes the gradients of ``run.model``.
        collate: from (row, step) pairs to a micro-batch.
        validate: measures ``metric``, and may end the run.
        export: writes the model to a folder.
        metric: chooses the best model.
        validate_first: validate before the first step: the model to start from is a trained one.

    Raises:
        NonFiniteError: a loss, gradient or weight is not finite; no such weight is saved.
        CheckpointError: a checkpoint or the model cannot be written.
    """
    state = run.state
    run.choose_best_by(metric.name, metric.measured)
    log = open_log(run, task)
    with run.loader(collate) as steps, stop_requests() as stop_requested:
        if state.global_step == 0 and validate_first:
            check_model(run, log, validate, export, metric, {})
        while not run.is_finished():
            batches = next(steps)
            run.begin_step()
            updates = []
            for averages in task.training_step(batches, state.global_step):
                updates.append(run.update(averages, batches))
            metrics = run.end_step(updates, batches)
            log.bar.update()
            step, last = state.global_step, state.global_step >= run.max_steps
            if step % run.log_every == 0 or last or step == 1:
                log.metrics(step, metrics)
                log.samples(step, task.samples[: run.log_samples])
            if step % run.eval_every == 0 or last:
                check_model(run, log, validate, export, metric, metrics)
            if step % run.save_every == 0 or run.is_finished():
                run.save()
            if run.any_process(stop_requested()):
                run.save()
                log.message(
                    f"terminated: checkpoint of step {step} saved, start again to continue"
                )
                log.end_trackers()
                return state
    run.export(export, "last")
    finish(run, log, metric)
    return state


def check_model(
    run: Run,
    log: RunLog,
    validate: Validate,
    export: Callable[[Path], None],
    metric: Metric,
    logged: Mapping[str, float],
) -> None:
    """Validate the model, export it if it is the best so far, and stop where the verdict says so;
    ``logged`` is what the newest step logged.
    """
    run.check_weights()
    started, state = time.perf_counter(), run.state
    with gathered_parameters(run.accelerator, run.model):
        verdict = validate(state.global_step, logged)
    value = verdict.metrics[metric.name]
    if is_better(metric.name, value, state.best_metric):
        state.best_metric, state.best_step = value, state.global_step
        state.evaluations_without_gain = 0
        run.export(export, "best")
    else:
        state.evaluations_without_gain += 1
    state.stopped = verdict.stop
    seconds = {"val/seconds": time.perf_counter() - started}
    log.metrics(state.global_step, verdict.metrics | seconds)
    log.message(
        f"validation: {metric.name} {value:.4f} ({metric.range}), best {state.best_metric:.4f} at "
        f"step {state.best_step}"
    )
    for message in verdict.messages:
        log.message(message)


def open_log(run: Run, task: Task) -> RunLog:
    """Say what is trained on what, write the run's configuration and environment, and open its
    log.
    """
    accelerator, state = run.accelerator, run.state
    parameters = sum(
        numel(value) for value in run.model.parameters() if value.requires_grad
    )
    print_main(
        accelerator,
        f"{task.name}: {parameters:,} trained parameters, {len(run.train_rows)} training and "
        f"{len(run.val_rows)} validation images, {accelerator.num_processes} process(es) on "
        f"{accelerator.device}, engine {engine_of(accelerator)}, {run.batch_size} images a step, "
        f"{run.micro_batch_size} at once in a process, {run.max_steps} steps into {run.folder}",
    )
    if state.signature:
        print_main(accelerator, f"{run.trained_on} signature: {state.signature}")
    if run.checkpoint:
        print_main(accelerator, f"going on from {run.checkpoint}")
    if accelerator.is_main_process:
        about = {"signature": state.signature, "processes": accelerator.num_processes}
        write_run_files(run.folder, run.settings, about)
        if not run.is_finished():  # a kill must not leave it looking complete
            (run.folder / RESULT).unlink(missing_ok=True)
    return RunLog(accelerator, run.folder, task.name, state.global_step, run.max_steps)


def finish(run: Run, log: RunLog, metric: Metric) -> None:
    """Write ``result.json``, which says that the run is complete, and the last lines of the log."""
    state = run.state
    if run.accelerator.is_main_process:
        newest = newest_checkpoint(run.checkpoints)
        if newest is not None:  # the last save may have been killed before it pruned
            prune(newest.parent, run.keep_checkpoints, newest)
        result = asdict(state)
        del result["data"], result["configuration"]
        write_json(run.folder / RESULT, result, allow_nan=True)
    run.accelerator.wait_for_everyone()  # every process then finds the result
    if state.stopped is not None:
        log.message(
            f"stopped at step {state.global_step} of {run.max_steps}: {state.stopped}"
        )
    log.message(
        f"done: best {state.metric} {state.best_metric:.4f} ({metric.range}) at step "
        f"{state.best_step}, model in {run.folder / 'export' / 'best'}"
    )
    if run.accelerator.is_main_process:
        log.message(gains(run.folder, state))
    log.end_trackers()


def gains(folder: Path, state: TrainState) -> str:
    """What the best and the last model have gained on the validation images since the first
    validation.
    """
    validations: dict[int | None, dict[str, float]] = {}
    for _, record in read_log(folder / "metrics.jsonl", CheckpointError):
        if state.metric in record:
            validations[record["step"]] = record
    steps, said = list(validations), []
    for name, step in (("best", state.best_step), ("last", steps[-1])):
        before, now = validations[steps[0]], validations.get(step, {})
        for key in dict.fromkeys((state.metric, "val/cider", "val/reward")):
            if key in before and key in now:
                said.append(f"export/{name} {key} {now[key] - before[key]:+.4f}")
    return f"gained since step {steps[0]}: {', '.join(said)}"
