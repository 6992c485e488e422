"""The loop of every training: steps, validation, export of the best model, checkpoints, the end."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rl_caption.data.files import write_json
from rl_caption.runtime.engines import Averages
from rl_caption.runtime.launch import stop_requests
from rl_caption.runtime.types import TrainState, Validation
from rl_caption.runtime.zero import gathered_parameters
from rl_caption.training.checkpoint import RESULT, SUMMARY, newest_checkpoint, prune
from rl_caption.training.run import Run


class Task(Protocol):
    """A training task: what one step does. The loop does the rest."""

    name: str
    samples: list[dict[str, Any]]

    def training_step(self, batches: Sequence[Any], step: int) -> Iterator[Averages]:
        """Leave a gradient in the parameters and yield what is to be logged; the loop
        then updates the weights.

        Most tasks yield once. The parameters have no gradient at the start and after each update.
        """
        ...


Validate = Callable[[int, Mapping[str, float]], Validation]
"""(step, values that this step logged) -> result of a validation. Called by every
process.
"""


def train(
    run: Run,
    task: Task,
    collate: Callable[[Any], Any],
    validate: Validate,
    export: Callable[[Path], None],
    metric: str,
    measured: str,
    validate_first: bool = True,
) -> TrainState:
    """Train a restored run to its end, or to SIGTERM, SIGINT or SIGHUP; return the counters.

    ``collate`` makes a micro-batch of (row, step) pairs; ``export`` writes the model to
    a folder. The best model by ``metric`` is in ``export/best``; ``measured`` says how
    it is measured (``Run.start``). With ``validate_first``, a starting model that is
    trained already is validated before the first step, too.
    """
    state = run.state
    run.start(task.name, metric, measured)

    def check_model(logged: Mapping[str, float]) -> None:
        """Validate, export the best model, log."""
        run.check_weights()
        started = time.perf_counter()
        with gathered_parameters(run.accelerator, run.model):
            validation = validate(state.global_step, logged)
        if run.is_best(validation.metrics[metric]):
            run.export(export, "best")
        state.stopped = validation.stop
        seconds = {"val/seconds": time.perf_counter() - started}
        run.log(validation.metrics | seconds)
        for message in (best_so_far(run), *validation.messages):
            run.say(message)

    with run.loader(collate) as steps, stop_requests() as stop_requested:
        if state.global_step == 0 and validate_first:
            check_model({})
        while not run.is_finished():
            batches = next(steps)
            run.begin_step()
            updates = []
            for averages in task.training_step(batches, state.global_step):
                updates.append(run.update(averages))
            metrics = run.end_step(updates)
            run.bar.update()
            step, last = state.global_step, state.global_step >= run.max_steps
            if step % run.options.log_every == 0 or last or step == 1:
                run.log(metrics, task.samples[: run.options.log_samples])
            if step % run.eval_every == 0 or last:
                check_model(metrics)
            if step % run.save_every == 0 or run.is_finished():
                run.save()
            if run.any_process(stop_requested()):
                run.save()
                run.end(f"terminated: checkpoint of step {step} saved, start again")
                return state
    run.export(export, "last")
    finish(run)
    return state


def best_so_far(run: Run) -> str:
    """Metric, step and folder of the best model, as a sentence for the log."""
    state = run.state
    value = f"{state.metric} {state.best_metric:.4f}{SUMMARY.get(state.metric, '')}"
    return f"best {value} at step {state.best_step}, in {run.folder / 'export/best'}"


def finish(run: Run) -> None:
    """Write ``result.json``, which says that the run is complete, and the last lines of the log."""
    state = run.state
    if run.accelerator.is_main_process:
        newest = newest_checkpoint(run.checkpoints)
        if newest is not None:  # the last save may have been killed before it pruned
            prune(newest.parent, run.options.keep_checkpoints, newest)
        result = asdict(state)
        del result["data"], result["configuration"]
        write_json(run.folder / RESULT, result, allow_nan=True)
    run.accelerator.wait_for_everyone()  # every process then finds the result
    if state.stopped is not None:
        run.say(
            f"stopped at step {state.global_step} of {run.max_steps}: {state.stopped}"
        )
    run.end(f"done: {best_so_far(run)}")
