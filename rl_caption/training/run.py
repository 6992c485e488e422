"""A run: its processes, folder, rows, options and counters, and the update of its weights."""

import gc
import itertools
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim import AdamW
from tqdm.auto import tqdm

from rewards.files import remove_leftovers
from rl_caption.config.build import (
    build_data,
    checked_splits,
    quiet_libraries,
)
from rl_caption.config.reward_models import RewardModelConfig, TrainingConfig
from rl_caption.data.base import Row
from rl_caption.data.fingerprint import changes, fingerprint
from rl_caption.data.loader import micro_batch_size, micro_batches, row_loader
from rl_caption.data.plain_files import hash_text
from rl_caption.runtime.engines import (
    Averages,
    build_accelerator,
    print_main,
)
from rl_caption.runtime.errors import ConfigError, UserError
from rl_caption.runtime.launch import run_lock
from rl_caption.runtime.types import LOSS, Batch, TrainState
from rl_caption.runtime.zero import (
    Moments,
    deepspeed_step,
    engine_of,
    gathered_parameters,
    prepare,
    trained_parameters,
    uses_deepspeed,
)
from rl_caption.training.checkpoint import (
    LOGS,
    RESULT,
    SUMMARY,
    CheckpointError,
    append_line,
    computed_settings,
    drop_after,
    find_checkpoint,
    hash_of,
    load_moments,
    load_random_states,
    load_weights,
    new_folder,
    newest_checkpoint,
    read_state,
    save_checkpoint,
    write_run_files,
)

CHECKED_IMAGES = ".checked_images.json"
"""File in the run's folder that lists the image files that were found good."""
NOT_MEASURED = {"every", "max_images", "batch_size", "patience", "best_by"}
"""Options of validation that do not change the value of a metric on given images."""
LOWEST_SCALE = 2**-8
"""Loss scale below which fp16 gives up; it starts at 2^16, and each skipped update
halves it.
"""


class NonFiniteError(UserError, RuntimeError):
    """Loss, gradient or a weight is NaN or infinite; the message names the step and the
    last good checkpoint.
    """


class Run:
    """A training without its task: processes, data, model, optimizer, counters, logs.

    Attributes:
        train, eval, options: sections of its configuration; ``options`` is ``run``.
        accelerator: devices and processes.
        folder: folder of the run, locked.
        train_rows, val_rows: usable images.
        checkpoint: where the run goes on from; None at its start.
        max_steps, eval_every, save_every: numbers of steps, at least 1 where epochs
            were given.
        state: counters; ``restore`` sets them.
        model, optimizer: as prepared for all processes, after ``restore``.
        name, bar: the task's name and the progress bar, after ``start``.
    """

    def __init__(
        self,
        config: TrainingConfig,
        accelerator: Accelerator,
        train_rows: Sequence[Row],
        val_rows: Sequence[Row],
        checkpoint: Path | None = None,
    ) -> None:
        self.train, self.eval, self.options = config.train, config.eval, config.run
        self.accelerator, self.checkpoint = accelerator, checkpoint
        self.train_rows, self.val_rows = train_rows, val_rows
        self.folder = Path(config.run.dir)
        self.checkpoints = self.folder / "checkpoints"
        self.settings, self.state = config.model_dump(mode="json"), TrainState()
        self.num_workers = config.data.num_workers
        self.micro_batch_size = micro_batch_size(
            self.train.batch_size,
            self.train.micro_batch_size,
            accelerator.num_processes,
        )
        self.max_steps = self.train.max_steps or self.steps_of(self.train.epochs)
        self.eval_every = self.eval.every or self.steps_of(1)
        self.save_every = self.options.save_every or self.eval_every
        self.decay_every = self.train.decay_every
        if self.train.decay_epochs:
            self.decay_every = self.steps_of(self.train.decay_epochs)

    def steps_of(self, epochs: float) -> int:
        """Steps of passes over the training images; a batch may span two passes."""
        return max(round(epochs * len(self.train_rows) / self.train.batch_size), 1)

    def restore(
        self,
        network: nn.Module,
        signature: str = "",
        vocabulary: Mapping[str, int] | None = None,
        notes: dict[str, Any] | None = None,
        decays: Callable[[str, Tensor], bool] | None = None,
    ) -> nn.Module:
        """Prepare the network and its optimizer, AdamW, for all processes, in the state
        of the checkpoint if there is one; return the prepared network.

        Args:
            network: network to train; parameters that require a gradient are trained.
            signature: what the numbers of the reward or teacher depend on.
            vocabulary: the model's tokens and their ids.
            notes: values that outlive a restart; the checkpoint's values are put into
                it.
            decays: (name, parameter) -> whether weight decay applies; None: to all.

        Raises CheckpointError where signature, vocabulary, data or configuration differ
        from the checkpoint's.
        """
        accelerator, checkpoint = self.accelerator, self.checkpoint
        splits = {"train": self.train_rows, self.eval.split: self.val_rows}
        tokens = json.dumps(sorted((vocabulary or {}).items()))
        self.state = TrainState(
            signature=signature,
            vocabulary=f"{hash_text(tokens):016x}",
            data=fingerprint(splits),
            configuration=computed_settings(self.settings),
            notes={} if notes is None else notes,
        )
        groups = parameter_groups(network, self.train.weight_decay, decays)
        optimizer = AdamW(groups, lr=self.train.lr, betas=self.train.betas)
        moments: Moments = {}
        if checkpoint is not None:
            self.state = self._go_on(checkpoint, self.state)
            moments = load_weights(checkpoint, network, optimizer)
        accelerator.init_trackers(self.folder.name, config={"signature": signature})
        self.model, self.optimizer = prepare(accelerator, network, optimizer)
        self.model.train()
        # Weights are equal everywhere by now; dropout is to differ.
        set_seed(self.train.seed, device_specific=True)
        if checkpoint is not None:
            load_moments(accelerator, checkpoint, self.model, self.optimizer, moments)
            load_random_states(accelerator, checkpoint, self.state.processes)
        return self.model

    def _go_on(self, checkpoint: Path, now: TrainState) -> TrainState:
        """The counters of the checkpoint, with what describes this run (``now``).

        Raises CheckpointError for a checkpoint of another run, unless ``run.resume`` is ``true``.
        """
        state, resume = read_state(checkpoint), self.options.resume
        differences, copied = changes(state.data, now.data)
        if state.signature != now.signature:
            differences.append(f"{state.signature!r} -> {now.signature!r}")
        if differences and resume is not True:
            raise CheckpointError(
                f"{checkpoint} is of another run: {'; '.join(differences)}. Undo that change, "
                "choose another run.dir, or set run.resume to true to continue anyway"
            )
        if state.vocabulary != now.vocabulary:
            raise CheckpointError(
                f"{checkpoint} and this run have different vocabularies: continue with the data "
                "that it was trained on, or train its export/best (model.init) in another run.dir"
            )
        for said in differences + copied:
            print_main(
                self.accelerator, f"WARNING: {checkpoint} had other inputs: {said}"
            )
        now.notes.update(state.notes)
        for name in ("signature", "vocabulary", "data", "configuration", "notes"):
            setattr(state, name, getattr(now, name))
        if resume != "auto":  # an unchanged rule stops it again at the next validation
            state.stopped = None
        return state

    @property
    def validation(self) -> str:
        """Everything that validation metrics depend on besides the model: ``eval``
        options, and a hash of image ids and references. The length limit of captions is
        not in it.
        """
        rows = [[row["image_id"], *row["references"]] for row in self.val_rows]
        options = self.eval.model_dump(mode="json", exclude=NOT_MEASURED)
        return f"{len(rows)} images ({hash_text(json.dumps(rows)):016x}), {options}"

    def choose_best_by(self, metric: str, measured: str) -> None:
        """Choose ``export/best`` by a validation metric, and forget the best model
        where another metric, or another measurement of it, chose it. The choice of a
        finished run stays.
        """
        if self.is_finished():
            return
        state, best = self.state, self.folder / "export" / "best"
        chosen = (metric, f"{self.validation}, {measured}")
        is_same = (state.metric, state.measured) == chosen
        if state.metric and not (is_same and state.best_model in ("", hash_of(best))):
            self.say(f"{' on '.join(chosen)} chooses the best model anew")
            state.best_metric, state.best_step = None, None
            state.evaluations_without_gain = 0
        state.metric, state.measured = chosen

    def start(self, name: str, metric: str, measured: str) -> None:
        """Print what is trained on what, write the run's configuration and environment,
        open its logs.

        Args:
            name: name of the task.
            metric: key of the validation metric that chooses the best model; higher is
                better, but for ``LOSS``.
            measured: what the metric depends on besides the model, the validation
                images and ``eval``.
        """
        self.name, accelerator, state = name, self.accelerator, self.state
        self.choose_best_by(metric, measured)
        trained = trained_parameters(accelerator, self.model).values()
        count = sum(getattr(one, "ds_numel", one.numel()) for one in trained)
        self.say(
            f"{count:,} trained parameters, {len(self.train_rows)} training and "
            f"{len(self.val_rows)} validation images, {accelerator.num_processes} "
            f"process(es) on {accelerator.device}, {accelerator.mixed_precision}, "
            f"engine {engine_of(accelerator)}, {self.max_steps} steps of "
            f"{self.train.batch_size} images into {self.folder}",
        )
        if state.signature:
            self.say(f"signature: {state.signature}")
        if self.checkpoint:
            self.say(f"going on from {self.checkpoint}")
        self.start_step, self.began = state.global_step, time.monotonic()
        self.bar = tqdm(
            total=self.max_steps,
            initial=self.start_step,
            desc=name,
            unit="step",
            # None: shown on a terminal only
            disable=None if accelerator.is_main_process else True,
        )
        if accelerator.is_main_process:
            about = {
                "signature": state.signature,
                "processes": accelerator.num_processes,
            }
            write_run_files(self.folder, self.settings, about)
            if not self.is_finished():  # a kill must not leave it looking complete
                (self.folder / RESULT).unlink(missing_ok=True)
            for file in LOGS:
                # A run that starts anew validates before step 1 again, so a line of step 0 goes
                # too.
                drop_after(self.folder / file, self.start_step or -1)

    def say(self, text: str) -> None:
        """Print a line from the main process."""
        print_main(self.accelerator, f"[{self.name}] {text}")

    def log(
        self, values: Mapping[str, float], samples: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Append the values of this step to ``metrics.jsonl`` and its captions to
        ``samples.jsonl``, print a summary, pass the values to Accelerate's trackers.
        """
        step = self.state.global_step
        self.accelerator.log(dict(values), step=step)
        if not self.accelerator.is_main_process:
            return
        for file, records in zip(LOGS, ([values], samples), strict=True):
            for record in records:
                append_line(self.folder / file, {"step": step, **record})
        summary = "  ".join(
            f"{key} {values[key]:.4g}{unit}"
            for key, unit in SUMMARY.items()
            if key in values
        )
        seconds = (time.monotonic() - self.began) / max(step - self.start_step, 1)
        left = tqdm.format_interval(seconds * (self.max_steps - step))
        self.say(f"step {step}/{self.max_steps}  {summary}  {left} left")

    def end(self, text: str) -> None:
        """Print the last line, and tell the trackers that the run ended as it should."""
        self.say(text)
        self.bar.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    @contextmanager
    def loader(self, collate: Callable[[Any], Any]) -> Iterator[Iterator[list[Batch]]]:
        """Context with an iterator over this process's micro-batches of each step,
        which workers may prepare.
        """
        accelerator, processes = self.accelerator, self.accelerator.num_processes
        order = micro_batches(
            len(self.train_rows),
            self.train.batch_size,
            self.micro_batch_size,
            accelerator.process_index,
            processes,
            self.train.seed,
            self.state.global_step,
        )
        micros = range(self.train.batch_size // (self.micro_batch_size * processes))
        with row_loader(self.train_rows, collate, order, self.num_workers) as batches:
            device = accelerator.device
            yield iter(lambda: [next(batches).to(device) for _ in micros], None)

    def begin_step(self) -> None:
        """Set the learning rate of the next step."""
        self.started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.state.global_step)

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step (from 0), at most ``train.lr``.

        Linear warm-up, then: ``constant``; ``linear`` or ``cosine`` to 0 at the last
        step; ``step``, times ``train.decay`` every ``decay_every`` steps; ``noam``, the
        inverse square root (Vaswani et al. 2017).
        """
        train, warmup = self.train, self.train.warmup_steps
        if step < warmup:
            return train.lr * ((step + 1) / warmup)
        past = step - warmup
        progress = min(past / max(self.max_steps - warmup, 1), 1.0)
        factors = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
            "step": train.decay ** (past // self.decay_every),
            "noam": math.sqrt(max(warmup, 1) / (step + 1)),
        }
        return train.lr * factors[train.schedule]

    def update(self, log: Averages) -> dict[str, float]:
        """Clip the gradient, update the weights, and return the values to log.

        One seam for float32 and bf16, for fp16, whose scaler skips an update that
        overflowed, and for DeepSpeed, which clips and knows the norm in its own step.

        Raises NonFiniteError before a loss or gradient that is not finite changes the
        weights (under DeepSpeed: before such weights are validated or saved).
        """
        accelerator, scaler = self.accelerator, self.accelerator.scaler
        sharded = uses_deepspeed(accelerator)
        norm = deepspeed_step(self.model) if sharded else self._clip_gradient()
        log.add("grad/norm", norm)
        log.add("time/step", time.perf_counter() - self.started)
        metrics = log.reduce(accelerator)
        # The gradient of fp16 overflows now and then.
        watched = ["loss/total"] if scaler else ["loss/total", "grad/norm"]
        for name in watched:
            value = metrics.get(name, 0.0)
            if not math.isfinite(value):
                self._give_up(f"{name} is {value} at step {self.state.global_step + 1}")
        if not sharded:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if scaler is not None and accelerator.optimizer_step_was_skipped:
            # The step counts all the same: its images have been seen, and schedules go by steps.
            del metrics["grad/norm"]
            self.state.skipped += 1
            if scaler.get_scale() < LOWEST_SCALE:
                self._give_up("the gradient overflows fp16 at any loss scale")
        return metrics

    def _clip_gradient(self) -> Tensor:
        """Clip the gradient; return its norm before that."""
        parameters = list(self.model.parameters())
        limit, value = self.train.grad_clip_norm or math.inf, self.train.grad_clip_value
        # Before values are clipped: an infinite one would look like a finite one.
        first = limit if value is None else math.inf
        norm = self.accelerator.clip_grad_norm_(parameters, first)
        if value is not None:
            nn.utils.clip_grad_value_(parameters, value)
            nn.utils.clip_grad_norm_(parameters, limit)
        return norm

    def end_step(self, updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Count the step; return the means of what its updates logged."""
        metrics: dict[str, float] = {}
        for name in dict.fromkeys(itertools.chain(*updates)):
            metrics[name] = fmean(update[name] for update in updates if name in update)
        metrics["time/step"] = updates[-1]["time/step"]
        metrics["train/lr"] = self.optimizer.param_groups[0]["lr"]
        rate = self.train.batch_size / metrics["time/step"]
        metrics["train/images_per_second"] = rate
        if self.accelerator.scaler is not None:
            metrics["train/skipped"] = self.state.skipped
            metrics["train/loss_scale"] = self.accelerator.scaler.get_scale()
        self.state.global_step += 1
        return metrics

    def check_weights(self) -> None:
        """Raise NonFiniteError where a weight is not finite: it is neither validated nor saved."""
        shards = (
            getattr(value, "ds_tensor", value) for value in self.model.parameters()
        )
        finite = all(torch.isfinite(shard).all() for shard in shards)
        if self.any_process(not finite):
            self._give_up(
                f"a weight is NaN or infinite after step {self.state.global_step}"
            )

    def _give_up(self, what: str) -> NoReturn:
        good = newest_checkpoint(self.checkpoints) or "none yet"
        raise NonFiniteError(
            f"{what}. Last good checkpoint: {good}. A lower train.lr, train.grad_clip_norm 1.0, or "
            "train.mixed_precision bf16 for fp16 is the usual remedy"
        )

    def is_finished(self) -> bool:
        """Whether all steps are taken, a validation ended the run, or ``eval.patience`` did."""
        state, patience = self.state, self.eval.patience
        return (
            state.global_step >= self.max_steps
            or state.stopped is not None
            or (patience is not None and state.evaluations_without_gain >= patience)
        )

    def any_process(self, asked: bool) -> bool:
        """Whether ``asked`` is true in any process: all must stop at the same step."""
        if asked:
            self.accelerator.set_trigger()
        return self.accelerator.check_trigger()

    def is_best(self, value: float) -> bool:
        """Whether a validation has the best value so far; if so, ``state`` keeps it."""
        state, best = self.state, self.state.best_metric
        is_lower = state.metric == LOSS
        if best is None or (value < best if is_lower else value > best):
            state.best_metric, state.best_step = value, state.global_step
            state.evaluations_without_gain = 0
            return True
        state.evaluations_without_gain += 1
        return False

    def export(self, write: Callable[[Path], None], name: str) -> None:
        """Write the model to ``export/NAME``, whole or not at all."""
        folder, accelerator = self.folder / "export" / name, self.accelerator
        with (
            gathered_parameters(accelerator, self.model),
            new_folder(folder, replaces=True) as partial,
        ):
            if accelerator.is_main_process:
                write(partial)
        if name == "best" and accelerator.is_main_process:
            self.state.best_model = hash_of(folder)

    def save(self) -> None:
        """Write a checkpoint."""
        self.check_weights()
        self.state.processes = self.accelerator.num_processes
        save_checkpoint(
            self.accelerator,
            self.checkpoints,
            self.state,
            self.options.keep_checkpoints,
            self.model,
            self.optimizer,
        )


def parameter_groups(
    model: nn.Module, weight_decay: float, decays: Callable[[str, Tensor], bool] | None
) -> list[dict[str, Any]]:
    """Optimizer groups of (name, parameter), with and without weight decay; empty
    groups are left out. ``decays`` tells by name and parameter whether weight decay
    applies; None: to all.
    """
    groups: dict[float, list[tuple[str, Tensor]]] = {}
    for name, value in model.named_parameters():
        if value.requires_grad:
            decay = weight_decay if decays is None or decays(name, value) else 0.0
            groups.setdefault(decay, []).append((name, value))
    return [{"params": group, "weight_decay": decay} for decay, group in groups.items()]


@contextmanager
def open_run(
    config: TrainingConfig, needs: Collection[str] = ("image", "text")
) -> Iterator[Run]:
    """Check all that can be checked before long work starts; inside the ``with``, the
    run folder is locked.

    ``needs`` is what every row must have: ``image``, ``text`` (a reference), or both.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used.
        CheckpointError: the folder holds another run.
    """
    folder, split = Path(config.run.dir), config.eval.split
    accelerator = build_accelerator(config.train, config.run)
    quiet_libraries()
    with run_lock(folder) if accelerator.is_main_process else nullcontext():
        # The main process clears what a killed save left before the others look.
        with accelerator.main_process_first():
            if accelerator.is_main_process:
                for place in (folder, *folder.glob("eval/*")):
                    remove_leftovers(place, older_than=0)
            checkpoint = find_checkpoint(config.model_dump(mode="json"))
        data, cache = build_data(config.data), folder / CHECKED_IMAGES
        splits = ("train", split)
        scored = not isinstance(config, RewardModelConfig)
        rows = checked_splits(
            config.data, data, splits, accelerator, cache, needs, scored
        )
        size, images = config.train.batch_size, len(rows["train"])
        if size > images:
            raise ConfigError(
                f"train.batch_size is {size}: the training split has {images} usable images, and "
                "a batch must not repeat images. Lower it"
            )
        val_rows = rows[split][: config.eval.max_images]
        if len(val_rows) < 2:
            raise ConfigError(
                f"eval.split {split!r} has {len(val_rows)} usable image(s): at least 2 are needed"
            )
        yield Run(config, accelerator, rows["train"], val_rows, checkpoint)


def leave_process_group() -> None:
    """Leave the process group after the last training of this program; it cannot be entered again.

    The caller must hold no model any more. A model that is prepared for several
    processes keeps the group's threads alive, and a thread of gloo that frees a tensor
    while the interpreter ends aborts the process.
    """
    if torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()
