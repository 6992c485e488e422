"""Checkpoints that survive being killed at any moment, and resume exactly.

A step folder is written under a hidden temporary name, flushed to disk, closed with a manifest of its files,
renamed, and only then are old ones pruned. ``Accelerator.save_state`` alone writes in place: a kill in the middle can
destroy the only checkpoint. What a sharded training writes is in ``sharded_state.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils import load as load_tensors
from accelerate.utils.constants import SCALER_NAME
from safetensors import SafetensorError
from torch import nn

from rewards.model_files import MANIFEST, damage, manifest_of
from rl_caption.data.files import write_json
from rl_caption.data.plain_files import check_type, read_json
from rl_caption.training.distributed.engines import engine_of
from rl_caption.training.distributed.sharded_state import Moments, load_moments, write_sharded
from rl_caption.types import TrainState

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"
WRITE_FAILURES = ("file", "write", "inline_container", "iostream")
"""Words in the RuntimeErrors by which ``torch.save`` reports that it could not write."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or resumed; the message names the folder and what would be right."""


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    state: TrainState,
    keep: int,
    model: nn.Module | None = None,
    optimizer: Any = None,
) -> Path:
    """Write ``folder/step-N`` atomically, then remove all but the newest ``keep``. Called by every process.

    ``model`` and ``optimizer``, as prepared, are needed where an engine shards them.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; older checkpoints are untouched.
    """
    final = folder / f"step-{state.global_step:08d}"
    partial = folder / f".partial-{final.name}"
    with write_errors(f"checkpoint {final}", partial, folder):
        if accelerator.is_main_process:
            remove_tree(partial)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        if engine_of(accelerator) == "plain" or model is None:
            accelerator.save_state(str(partial), safe_serialization=True)
        else:
            write_sharded(accelerator, model, optimizer, partial)
            save_accelerator_state(str(partial), [], [], [], [], accelerator.process_index, 0)  # random states
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            write_json(partial / STATE, asdict(state))
            replace_folder(partial, final)
            prune(folder, keep, final)
        accelerator.wait_for_everyone()
    return final


@contextlib.contextmanager
def write_errors(what: str, partial: Path, checkpoints: Path) -> Iterator[None]:
    """Turn a failed write into a ``CheckpointError`` that says what to do, and remove the unfinished folder."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not any(word in str(error).lower() for word in WRITE_FAILURES):
            raise
        with contextlib.suppress(OSError):
            remove_tree(partial)
        raise CheckpointError(
            f"{what} could not be written: {error}. Is the disk full? Free some space or choose another run.dir; "
            f"the newest good checkpoint is {newest_checkpoint(checkpoints) or 'none'}"
        ) from error


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest ``step-N`` in ``folder`` whose manifest holds, or None."""
    for candidate in sorted(folder.glob("step-*"), reverse=True):
        found = damage(candidate)
        if found is None:
            return candidate
        logger.warning("%s is damaged (%s) and is passed over", candidate, found)
    return None


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed save left behind; a folder that was about to be replaced gets its name back."""
    for partial in folder.glob(".partial-*"):
        remove_tree(partial)
    for old in folder.glob(".old-*"):
        final = folder / old.name.removeprefix(".old-")
        if not final.exists() and is_intact(old):
            os.rename(old, final)
        else:
            remove_tree(old)


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn a failed read of a checkpoint into a ``CheckpointError`` that names it."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded into this model and optimizer: {error}") from error


def load_checkpoint(
    accelerator: Accelerator,
    path: Path,
    model: nn.Module | None = None,
    optimizer: Any = None,
    moments: Moments | None = None,
) -> TrainState:
    """Restore model, optimizer and random states, and return the counters. Called by every process.

    Where ``moments`` are given, they go to ``optimizer`` (as prepared), and the model has its weights already.

    Raises:
        CheckpointError: ``path`` is not an intact checkpoint, belongs to another model, holds anything but tensors and
            plain containers, or its random states cannot be restored.
    """
    state = read_state(path)
    with read_errors(path):
        if moments is None or model is None:
            with _scaler_of(accelerator, path):
                # Tensors and plain containers only: a checkpoint is not trusted to run code.
                accelerator.load_state(str(path), load_kwargs={"weights_only": True})
        else:
            load_moments(accelerator, model, optimizer, moments)
            load_accelerator_state(str(path), [], [], [], [], accelerator.process_index)  # random states
    if state.processes == accelerator.num_processes:
        _check_random_states(path / f"random_states_{accelerator.process_index}.pkl", accelerator.device)
    elif accelerator.is_main_process:
        logger.warning(
            "%s was written by %d process(es) and %d go on: dropout is drawn anew, samples and data order stay",
            path,
            state.processes,
            accelerator.num_processes,
        )
    return state


@contextlib.contextmanager
def _scaler_of(accelerator: Accelerator, path: Path) -> Iterator[None]:
    """Inside, fp16 that goes on from another precision has no loss scale to load: it starts with a fresh one."""
    scaler = accelerator.scaler
    if not (path / SCALER_NAME).is_file():
        accelerator.scaler = None
    try:
        yield
    finally:
        accelerator.scaler = scaler


def _check_random_states(file: Path, device: torch.device) -> None:
    """Compare the generators with ``file``: Accelerate goes on silently where it could not restore them."""
    try:
        states = load_tensors(file)
        pairs = [(torch.get_rng_state(), states["torch_manual_seed"])]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            pairs.append((torch.cuda.get_rng_state(index), states["torch_cuda_manual_seed"][index].cpu()))
    except (OSError, RuntimeError, LookupError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"the random states in {file} cannot be read: {error}") from error
    if not all(torch.equal(current, saved) for current, saved in pairs):
        raise CheckpointError(f"the random states in {file} could not be restored: the run would not go on as it was")


def read_state(path: Path) -> TrainState:
    """Read the counters of a checkpoint.

    Raises:
        CheckpointError: ``path`` is not an intact checkpoint.
    """
    found = damage(path)
    if found is not None:
        raise CheckpointError(f"{path} is not an intact checkpoint: {found}")
    content = read_json(path / STATE, CheckpointError)
    kinds = get_type_hints(TrainState)
    for key, value in content.items():
        if key not in kinds:
            raise CheckpointError(f"{path / STATE} has the key {key!r}, which this version does not know")
        check_type(value, kinds[key], f"{path / STATE}, {key!r}", CheckpointError)
    return TrainState(**content)


def seal(folder: Path) -> None:
    """Flush every file to disk and write the manifest, last."""
    entries = manifest_of(folder)
    for name in entries:
        with (folder / name).open("rb") as handle:
            os.fsync(handle.fileno())
    write_json(folder / MANIFEST, entries)
    sync_folder(folder)


def is_intact(folder: Path) -> bool:
    """Whether the manifest is there and every file is as it lists it."""
    return damage(folder) is None


def replace_folder(new: Path, final: Path) -> None:
    """Put the finished folder ``new`` in the place of ``final``.

    At every moment the old or the new one is whole; ``clear_leftovers`` tells which after a kill.
    """
    seal(new)
    old = final.with_name(f".old-{final.name}")
    remove_tree(old)
    if final.exists():
        os.rename(final, old)
    os.rename(new, final)
    sync_folder(final.parent)
    remove_tree(old)


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


def prune(folder: Path, keep: int, newest: Path) -> None:
    """Remove all but the ``keep`` newest intact checkpoints up to ``newest``.

    One of a later step is from a continuation that was given up, by going on from an older checkpoint.
    """
    past = [path for path in sorted(folder.glob("step-*"), reverse=True) if path <= newest and is_intact(path)]
    for path in set(folder.glob("step-*")) - set(past[: max(keep, 1)]):
        doomed = folder / f".partial-{path.name}"
        os.rename(path, doomed)
        remove_tree(doomed)
