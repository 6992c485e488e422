"""What every training starts from: an accelerator, a locked run folder, checked data, and a
checkpoint if there is one.

``training.fit`` goes on from there.
"""

import gc
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim import Optimizer

from rewards.files import remove_leftovers
from rl_caption.config.build import build_data, checked_splits, quiet_libraries, usable_split
from rl_caption.config.reward_models import RewardModelConfig, TrainingConfig
from rl_caption.data.base import Row
from rl_caption.data.fingerprint import changes, fingerprint
from rl_caption.data.loader import micro_batch_size
from rl_caption.data.plain_files import hash_text
from rl_caption.data.refused import Prepares, usable_rows
from rl_caption.runtime.engines import (
    EngineError,
    build_accelerator,
    deepspeed_plugin,
    engine_of,
    fill_deepspeed_config,
    prepare,
    print_main,
    uses_deepspeed,
)
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.launch import run_lock
from rl_caption.runtime.types import TrainState
from rl_caption.training.checkpoint import (
    CheckpointError,
    check_trained,
    hash_of,
    load_checkpoint,
    load_full_state,
    read_state,
)
from rl_caption.training.run_folder import changed_settings, find_checkpoint, settings_of

CHECKED_IMAGES = ".checked_images.json"
"""File in the run's folder that lists the image files that were found good."""
NOT_MEASURED = ("every", "max_images", "batch_size", "patience", "best_by")
"""Options of validation that do not change the value of a metric on given images."""


@dataclass(frozen=True)
class Context:
    """What is ready before there is a model.

    Attributes:
        config: as resolved.
        accelerator: devices and processes.
        train_rows, val_rows: usable images.
        micro_batch_size: images of one forward pass of one process.
        checkpoint: where the run resumes from; None at its start.
        signature_of: the word for what a run's signature describes, for messages.
    """

    config: TrainingConfig
    accelerator: Accelerator
    train_rows: Sequence[Row]
    val_rows: Sequence[Row]
    micro_batch_size: int
    checkpoint: Path | None = None
    signature_of: str = "reward"

    def readable(self, captioner: Prepares) -> "Context":
        """The context with the images that a captioner can read, checked as ``data.on_bad`` says."""
        splits = {"train": self.train_rows, "validation": self.val_rows}
        rows = usable_rows(splits, captioner, self.config.data.on_bad, self.accelerator)
        check_batch_size(self.config.train.batch_size, rows["train"])
        return replace(self, train_rows=rows["train"], val_rows=rows["validation"])

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.run.dir)

    def steps_of(self, epochs: float) -> int:
        """Optimizer steps in ``epochs`` passes over the training images, at least 1; a batch may
        span two passes.
        """
        return max(round(epochs * len(self.train_rows) / self.config.train.batch_size), 1)

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.config.train.max_steps or self.steps_of(self.config.train.epochs)

    @property
    def validation(self) -> str:
        """What the validation metrics depend on besides the model: ``eval`` options, and a hash of
        image ids and references. The length limit of captions is not in it.
        """
        rows = hash_text(
            json.dumps([[row["image_id"], *row["references"]] for row in self.val_rows])
        )
        options = {
            key: value for key, value in vars(self.config.eval).items() if key not in NOT_MEASURED
        }
        listed = [
            f"{len(self.val_rows)} images ({rows:016x})",
            *(f"{key} {value}" for key, value in options.items()),
        ]
        return ", ".join(listed)

    def start(
        self,
        signature: str = "",
        metric: str = "val/cider",
        notes: dict[str, Any] | None = None,
        measured: str = "",
        vocabulary: Mapping[str, int] | None = None,
    ) -> TrainState:
        """Initial counters, or those of the checkpoint; start the run's trackers.

        Args:
            signature: what the numbers of the reward or teacher depend on. It must be the
                checkpoint's, unless ``run.resume`` is ``true``.
            metric: the validation metric that chooses the best model.
            notes: values that outlive a restart; updated in place with those of the checkpoint.
            measured: what ``metric`` depends on besides the model, the validation images and
                ``eval``.
            vocabulary: the model's tokens and their ids, which must be those of the checkpoint.

        Raises:
            CheckpointError: the signature, the data, the configuration or the vocabulary is not
                that of the checkpoint.
        """
        resume = self.config.run.resume
        state = read_state(self.checkpoint) if self.checkpoint else TrainState(signature=signature)
        if state.signature != signature and resume not in (True, "true"):
            raise CheckpointError(
                f"{self.checkpoint} was trained on the {self.signature_of} {state.signature!r}, "
                f"but this run has "
                f"{signature!r}: set run.resume to true to continue anyway"
            )
        self._check_inputs(state)
        state.signature = signature
        tokens = json.dumps(sorted((vocabulary or {}).items())).encode()
        token_hash = hashlib.blake2b(tokens, digest_size=8).hexdigest() if vocabulary else ""
        if state.vocabulary not in ("", token_hash):
            raise CheckpointError(
                f"{self.checkpoint} and this run have different vocabularies: continue with the "
                f"data that it was "
                "trained on, or train its export/best (model.init) in another run.dir"
            )
        state.vocabulary = token_hash
        if resume != "auto":  # an unchanged rule stops the run again at the next validation
            state.stopped = None
        notes = {} if notes is None else notes
        notes.update(state.notes)
        state.notes = notes
        if (
            state.global_step < self.max_steps and state.stopped is None
        ):  # the choice of a finished run stays
            measured = ", ".join(filter(None, (self.validation, measured)))
            if state.metric not in ("", metric):
                reason = f"in place of {state.metric}"
            elif state.measured not in ("", measured):
                reason = f"on {measured}, before on {state.measured}"
            else:
                reason = self._lost_best(state)
            if reason:
                print_main(
                    self.accelerator, f"{metric} chooses the best model from here on, {reason}"
                )
                state.best_metric, state.best_step, state.evaluations_without_gain = None, None, 0
            state.metric, state.measured = metric, measured
        self.accelerator.init_trackers(self.folder.name, config={"signature": signature})
        return state

    def _check_inputs(self, state: TrainState) -> None:
        """Refuse a checkpoint of other data or of another run, where ``run.resume`` is ``auto``;
        update ``state``.

        A checkpoint names its configuration as well as the run folder does: it may have been copied
        there.
        """
        now = fingerprint({"train": self.train_rows, self.config.eval.split: self.val_rows})
        resume, wrong = self.config.run.resume, ""
        if self.checkpoint is not None:
            data, times = changes(state.data, now)
            other = changed_settings(state.configuration, self.config)
            if data:
                wrong = f"was trained on other data: {'; '.join(data)}"
            elif other and resume == "auto":
                wrong = f"was written with another configuration, perhaps by another run: {'; '.join(other)}"
            elif times:
                copied = "names and sizes are the same, as in a copy"
                print_main(
                    self.accelerator,
                    f"WARNING: files of the data have changed: {'; '.join(times)}; {copied}",
                )
        if wrong and resume == "auto":
            raise CheckpointError(
                f"{self.checkpoint} {wrong}. Undo that change, choose another run.dir, or set "
                f"run.resume to true to "
                "continue anyway"
            )
        if wrong:
            print_main(self.accelerator, f"WARNING: {self.checkpoint} {wrong}")
        state.data, state.configuration = now, settings_of(self.config)

    def _lost_best(self, state: TrainState) -> str:
        """Why ``export/best`` is not the best model that the checkpoint knows of; an empty string
        if it is.
        """
        best = self.folder / "export" / "best"
        if state.best_model in ("", hash_of(best)):
            return ""
        return f"as {best} is not that of {self.checkpoint}"

    def prepare(
        self, model: nn.Module, decays: Callable[[str, Tensor], bool] | None = None
    ) -> tuple[nn.Module, Optimizer]:
        """Model and AdamW over its trainable parameters, prepared for all processes, in the state
        of the checkpoint.

        ``decays(name, parameter)`` tells whether ``train.weight_decay`` applies to a parameter;
        None: to all.
        """
        train = self.config.train
        groups = parameter_groups(model, train.weight_decay, decays)
        optimizer: Any = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas)
        moments = (
            load_full_state(self.accelerator, self.checkpoint, model, optimizer)
            if self.checkpoint
            else None
        )
        model, optimizer = prepare(self.accelerator, model, optimizer)
        model.train()
        set_seed(
            train.seed, device_specific=True
        )  # weights are equal everywhere by now; dropout is to differ
        if self.checkpoint:
            load_checkpoint(self.accelerator, self.checkpoint, model, optimizer, moments)
            if moments is None:  # Accelerate has loaded those of the checkpoint
                for group, new_group in zip(optimizer.param_groups, groups, strict=True):
                    check_trained(self.checkpoint, group["param_names"], new_group["param_names"])
                    group |= {key: new_group[key] for key in ("betas", "weight_decay")}
        return model, optimizer


def parameter_groups(
    model: nn.Module, weight_decay: float, decays: Callable[[str, Tensor], bool] | None
) -> list[dict[str, Any]]:
    """Optimizer groups of (name, parameter), with and without weight decay; an empty group is left
    out.
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, value in model.named_parameters():
        if value.requires_grad:
            groups[0 if decays is None or decays(name, value) else 1]["params"].append(
                (name, value)
            )
    return [group for group in groups if group["params"]]


@contextmanager
def setup(
    config: TrainingConfig,
    needs: Collection[str] = ("image", "text"),
    signature_of: str = "reward",
    deepspeed: bool = True,
) -> Iterator[Context]:
    """Check all that can be checked before long work starts; inside the ``with``, the run folder is
    locked.

    Args:
        config: as resolved.
        needs: what every row must have: ``image``, ``text`` (a reference), or both.
        signature_of: as in ``Context``.
        deepspeed: whether this training can run under DeepSpeed.

    Raises:
        ConfigError, DataError: the configuration or the data cannot be used.
        CheckpointError: the folder holds another run.
        EngineError: the launcher asks for DeepSpeed, and this training cannot use it.
    """
    train = config.train
    accelerator = build_accelerator(train, config.run)
    quiet_libraries()
    micro = micro_batch_size(train.batch_size, train.micro_batch_size, accelerator.num_processes)
    if uses_deepspeed(accelerator):
        if not deepspeed:
            raise EngineError(
                f"reward models do not train under {engine_of(accelerator)}: take "
                f"configs/accelerate/multi_gpu.yaml"
            )
        settings = deepspeed_plugin(accelerator).deepspeed_config
        fill_deepspeed_config(
            settings, train.batch_size, micro, accelerator.num_processes, train.grad_clip_norm
        )
    with run_lock(config.run.dir) if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process:
            for folder in (Path(config.run.dir), *Path(config.run.dir).glob("eval/*")):
                remove_leftovers(folder, older_than=0)
        with (
            accelerator.main_process_first()
        ):  # it clears what a killed save left before the others look
            checkpoint = find_checkpoint(config)
        train_rows, val_rows = _rows(config, accelerator, needs)
        check_batch_size(train.batch_size, train_rows)
        yield Context(config, accelerator, train_rows, val_rows, micro, checkpoint, signature_of)


def check_batch_size(size: int, rows: Sequence[Row]) -> None:
    """Raise ``ConfigError`` where a batch would be larger than the training split."""
    if size > len(rows):
        raise ConfigError(
            f"train.batch_size is {size}: the training split has {len(rows)} usable images, and a "
            f"batch must not "
            "repeat images. Lower it"
        )


def leave_process_group() -> None:
    """Leave the process group after the last training of this program; it cannot be entered again.

    The caller must hold no model any more. A model that is prepared for several processes keeps the
    group's threads alive, and a thread of gloo that frees a tensor while the interpreter ends
    aborts the process.
    """
    if torch.distributed.is_initialized():
        gc.collect()
        torch.distributed.destroy_process_group()


def _rows(
    config: TrainingConfig, accelerator: Accelerator, needs: Collection[str]
) -> tuple[Sequence[Row], Sequence[Row]]:
    """The usable training images and validation images."""
    data = build_data(config.data)
    split = usable_split(data, config.eval.split)
    cache = Path(config.run.dir) / CHECKED_IMAGES
    scored = not isinstance(config, RewardModelConfig)
    rows = checked_splits(config.data, data, ("train", split), accelerator, cache, needs, scored)
    val = rows[split]
    if config.eval.max_images is not None:
        val = val[: config.eval.max_images]
    if len(val) < 2:
        raise ConfigError(
            f"eval.split {split!r} has {len(val)} usable image(s): at least 2 are needed"
        )
    return rows["train"], val
