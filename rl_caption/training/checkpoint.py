"""Checkpoints that survive a kill at any moment and resume exactly, under any engine and number of
processes.

A step folder is written under a hidden temporary name, flushed to disk, closed with a manifest of
its files, renamed,
and only then are old ones pruned: ``Accelerator.save_state`` alone writes in place, where a kill
can destroy the only checkpoint. Under DeepSpeed a checkpoint holds full state dicts,
``model.safetensors`` as of a single process and ``optimizer.safetensors`` with the moments of each
parameter by its name; DeepSpeed's own are pickles of one number of processes.
"""

import contextlib
import hashlib
import logging
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state
from accelerate.utils import load as load_tensors
from accelerate.utils.constants import SCALER_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from rewards.base import naming
from rewards.model_files import MANIFEST, damage, manifest_of
from rl_caption.data.files import write_json
from rl_caption.data.plain_files import read_json
from rl_caption.runtime.errors import UserError
from rl_caption.runtime.types import TrainState
from rl_caption.runtime.zero import (
    Moments,
    full_state,
    load_deepspeed_moments,
    torch_optimizer,
    trained_parameters,
    uses_deepspeed,
)

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"
MODEL, OPTIMIZER, PLAIN_OPTIMIZER = (
    "model.safetensors",
    "optimizer.safetensors",
    "optimizer.bin",
)
WRITE_FAILURES = (
    OSError,
    RuntimeError,
    SafetensorError,
)  # torch.save raises RuntimeErrors
READ_FAILURES = (
    *WRITE_FAILURES,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    pickle.UnpicklingError,
)

UNFIT = "cannot be loaded into this model and optimizer"


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written or resumed; the message names the folder and what would be
    right.
    """


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    state: TrainState,
    keep: int,
    model: Any = None,
    optimizer: Any = None,
) -> Path:
    """Write ``folder/step-N`` atomically, then remove all but the newest ``keep``. Called by every
    process.

    ``model`` and ``optimizer``, as prepared, are needed under DeepSpeed. Raises CheckpointError
    where the disk is full or the folder cannot be written; older checkpoints are untouched.
    """
    final = folder / f"step-{state.global_step:08d}"
    with new_folder(final, accelerator, replaces=True) as partial:
        if not uses_deepspeed(accelerator):
            accelerator.save_state(str(partial), safe_serialization=True)
        else:
            weights, moments = full_state(accelerator, model, optimizer)
            if accelerator.is_main_process:
                save_file(weights, partial / MODEL, metadata={"format": "pt"})
                save_file(moments, partial / OPTIMIZER, metadata={"format": "pt"})
            # What is left are the random states.
            save_accelerator_state(
                str(partial), [], [], [], [], accelerator.process_index, 0
            )
        if accelerator.is_main_process:
            # It keeps logged values, and a log may hold an infinite one.
            write_json(partial / STATE, asdict(state), allow_nan=True)
    if accelerator.is_main_process:
        prune(folder, keep, final)
    accelerator.wait_for_everyone()
    return final


def read_state(path: Path) -> TrainState:
    """The counters of a checkpoint; raises CheckpointError where ``path`` is not an intact one."""
    problem = damage(path)
    if problem is not None:
        raise CheckpointError(f"{path} is not an intact checkpoint: {problem}")
    with naming(str(path / STATE), (TypeError,), CheckpointError):
        return TrainState(**read_json(path / STATE, CheckpointError))


def load_weights(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Moments:
    """Load the weights of a checkpoint of any engine into a model that is not prepared yet, and
    return Adam's moments, for ``load_moments``.

    Raises CheckpointError where the checkpoint is of another model, holds anything but tensors and
    plain containers, or other parameters were trained than ``optimizer`` has.
    """
    with naming(f"{path} {UNFIT}", READ_FAILURES, CheckpointError):
        moments = _read_moments(path)
        load_model(model, path / MODEL)
    expected = {
        name for group in optimizer.param_groups for name in group["param_names"]
    }
    if odd := sorted({*moments} ^ expected):
        raise CheckpointError(
            f"{path} {UNFIT}: {odd} are trained in the checkpoint or in this run only. To train "
            "others, start from its export/best (model.init) in another run.dir"
        )
    return moments


def load_moments(
    accelerator: Accelerator,
    path: Path,
    model: nn.Module,
    optimizer: Any,
    moments: Moments,
) -> None:
    """Give the prepared optimizer its moments back, and the loss scale of fp16. Called by every
    process.
    """
    trained = trained_parameters(accelerator, model)
    with naming(f"{path} {UNFIT}", READ_FAILURES, CheckpointError):
        if uses_deepspeed(accelerator):
            load_deepspeed_moments(model, trained, moments)
            return
        for name, values in moments.items():
            parameter = trained[name]
            torch_optimizer(optimizer).state[parameter] = {
                key: value.float().cpu()
                if key == "step"
                else value.to(parameter, copy=True)
                for key, value in values.items()
            }
        # There is none after another precision: fp16 then starts with a fresh one.
        if accelerator.scaler is not None and (path / SCALER_NAME).is_file():
            scale = torch.load(path / SCALER_NAME, weights_only=True)
            accelerator.scaler.load_state_dict(scale)


def load_random_states(accelerator: Accelerator, path: Path, processes: int) -> None:
    """Restore the random states of this process. Called by every process.

    A run of another number of processes than the ``processes`` that wrote the checkpoint goes on
    with other dropout masks. Raises CheckpointError where its own states cannot be restored:
    Accelerate alone would go on silently.
    """
    if processes != accelerator.num_processes:
        if accelerator.is_main_process:
            logger.warning(
                "%s was written by a run of another number of processes, %d (now %d): dropout "
                "masks change, samples and data order do not",
                path,
                processes,
                accelerator.num_processes,
            )
        return
    file = path / f"random_states_{accelerator.process_index}.pkl"
    with naming(f"{file} {UNFIT}", READ_FAILURES, CheckpointError):
        states = load_tensors(file)
        random.setstate(states["random_state"])
        np.random.set_state(states["numpy_random_seed"])
        torch.set_rng_state(states["torch_manual_seed"])
        if accelerator.device.type == "cuda":
            torch.cuda.set_rng_state_all(states["torch_cuda_manual_seed"])


@contextlib.contextmanager
def new_folder(
    final: Path, accelerator: Accelerator | None = None, replaces: bool = False
) -> Iterator[Path]:
    """A hidden folder beside ``final`` to write into, which gets its name at the block's end. With
    an ``accelerator``, every process enters.

    ``final`` must be missing or empty; with ``replaces``, the new folder is sealed and takes the
    place of an old one. If the block fails, nothing is left of it. Raises ``CheckpointError`` where
    it cannot be written.
    """
    partial = final.absolute().with_name(f".partial-{final.name}")
    is_main = accelerator is None or accelerator.is_main_process
    wait = (lambda: None) if accelerator is None else accelerator.wait_for_everyone
    try:
        if is_main:
            remove_tree(partial)
            partial.mkdir(parents=True)
        wait()
        yield partial
        wait()
        if is_main and replaces:
            replace_folder(partial, final)
        elif is_main:
            os.rename(partial, final)
        wait()
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove_tree(partial)
        if not isinstance(error, WRITE_FAILURES):
            raise
        place = next(folder for folder in partial.parents if folder.is_dir())
        free = shutil.disk_usage(place).free / 1e6
        raise CheckpointError(
            f"the folder {final} could not be written: {error} ({free:.1f} MB are free on its "
            "disk): free some space, or name another folder"
        ) from error


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest ``step-N`` in ``folder`` whose manifest holds, or None."""
    for candidate in sorted(folder.glob("step-*"), reverse=True):
        problem = damage(candidate)
        if problem is None:
            return candidate
        logger.warning("%s is damaged (%s) and is skipped", candidate, problem)
    return None


def prune(folder: Path, keep: int, newest: Path) -> None:
    """Remove all but the ``keep`` newest intact checkpoints up to ``newest``.

    Those of later steps belong to a continuation that was given up: the run went on from an older
    checkpoint.
    """
    past = [
        path
        for path in sorted(folder.glob("step-*"), reverse=True)
        if path <= newest and damage(path) is None
    ]
    for path in set(folder.glob("step-*")) - set(past[: max(keep, 1)]):
        doomed = folder / f".partial-{path.name}"
        os.rename(path, doomed)
        remove_tree(doomed)


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed save left behind; a folder that was about to be replaced gets its name
    back.
    """
    for partial in folder.glob(".partial-*"):
        remove_tree(partial)
    for old in folder.glob(".old-*"):
        final = folder / old.name.removeprefix(".old-")
        if not final.exists() and damage(old) is None:
            os.rename(old, final)
        else:
            remove_tree(old)


def replace_folder(new: Path, final: Path) -> None:
    """Replace the folder ``final`` by the finished folder ``new``.

    At every moment the old or the new one is intact; after a kill, ``clear_leftovers`` finds out
    which.
    """
    seal(new)
    old = final.with_name(f".old-{final.name}")
    remove_tree(old)
    if final.exists():
        os.rename(final, old)
    os.rename(new, final)
    sync_folder(final.parent)
    remove_tree(old)


def seal(folder: Path) -> None:
    """Flush every file to disk and write the manifest, last."""
    entries = manifest_of(folder)
    for name in entries:
        with (folder / name).open("rb") as handle:
            os.fsync(handle.fileno())
    write_json(folder / MANIFEST, entries)
    sync_folder(folder)


def hash_of(folder: Path) -> str:
    """Hash of the names and contents of a folder's files; a missing folder counts as empty."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(path.relative_to(folder).as_posix().encode())
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def remove_tree(path: Path) -> None:
    """Remove a folder if it is there."""
    if path.exists():
        shutil.rmtree(path)


def sync_folder(folder: Path) -> None:
    """Flush a folder's own entries (renames) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_moments(folder: Path) -> Moments:
    """Adam's moments of each trained parameter in a checkpoint of any engine."""
    moments: dict[str, dict[str, Tensor]] = {}
    if (folder / OPTIMIZER).is_file():
        for path, value in load_file(folder / OPTIMIZER).items():
            name, _, key = path.rpartition("/")
            moments.setdefault(name, {})[key] = value
        return moments
    saved = torch.load(folder / PLAIN_OPTIMIZER, map_location="cpu", weights_only=True)
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    return {name: saved["state"].get(index, {}) for index, name in enumerate(names)}
