"""Checkpoints that survive being killed at any moment, and resume exactly.

A step folder is written under a hidden temporary name, flushed to disk, closed with a manifest of every file's size,
renamed, and only then are old ones pruned. ``Accelerator.save_state`` alone writes in place: a kill in the middle can
destroy the only checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from accelerate import Accelerator

from rl_caption.types import TrainState

MANIFEST = "manifest.json"
STATE = "trainer_state.json"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or resumed; the message names the folder and what would be right."""


def save_checkpoint(accelerator: Accelerator, folder: Path, state: TrainState, keep: int) -> Path:
    """Write ``folder/step-N`` atomically, then remove all but the newest ``keep``. Called by every process.

    Raises:
        CheckpointError: the disk is full or the folder cannot be written; older checkpoints are untouched.
    """
    final = folder / f"step-{state.global_step:08d}"
    partial = folder / f".partial-{final.name}"
    error: Exception | None = None
    try:
        if accelerator.is_main_process:
            remove_tree(partial)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial), safe_serialization=True)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            write_json(partial / STATE, asdict(state))
            seal(partial)
            remove_tree(final)
            os.rename(partial, final)
            sync_folder(folder)
            _prune(folder, keep)
        accelerator.wait_for_everyone()
    except OSError as failure:
        error = failure
    except RuntimeError as failure:
        # torch.save reports a failed write as a RuntimeError of its file writer.
        if "file" not in str(failure).lower() and "write" not in str(failure).lower():
            raise
        error = failure
    if error is not None:
        last = newest_checkpoint(folder)
        raise CheckpointError(
            f"checkpoint {final} could not be written: {error}. Free some space or choose another run.dir; "
            f"the newest good checkpoint is {last or 'none'}"
        ) from error
    return final


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest ``step-N`` in ``folder`` whose manifest holds, or None."""
    for candidate in sorted(folder.glob("step-*"), reverse=True):
        if is_intact(candidate):
            return candidate
    return None


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed save or a killed prune left behind."""
    for leftover in [*folder.glob(".partial-*"), *folder.glob(".old-*")]:
        remove_tree(leftover)


def load_checkpoint(accelerator: Accelerator, path: Path) -> TrainState:
    """Restore model, optimizer and random states, and return the counters. Called by every process.

    Raises:
        CheckpointError: ``path`` is not an intact checkpoint.
    """
    state = read_state(path)
    # Tensors and plain containers only: a checkpoint is not trusted to run code.
    accelerator.load_state(str(path), load_kwargs={"weights_only": True})
    return state


def read_state(path: Path) -> TrainState:
    """Read the counters of a checkpoint.

    Raises:
        CheckpointError: ``path`` is not an intact checkpoint.
    """
    if not is_intact(path):
        raise CheckpointError(f"{path} is not an intact checkpoint: its {MANIFEST} is missing or does not match")
    return TrainState(**json.loads((path / STATE).read_text()))


def seal(folder: Path) -> None:
    """Flush every file to disk and write the manifest of sizes, last."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    write_json(folder / MANIFEST, {str(p.relative_to(folder)): p.stat().st_size for p in files})
    sync_folder(folder)


def is_intact(folder: Path) -> bool:
    """Whether the manifest is there and every file it lists has the size it lists."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return False
    sizes = json.loads(manifest.read_text())
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items())


def replace_folder(new: Path, final: Path) -> None:
    """Put the finished folder ``new`` in the place of ``final``; at every moment one of the two is whole."""
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


def write_json(path: Path, value: object) -> None:
    """Write JSON and flush it to disk."""
    with path.open("w") as handle:
        json.dump(value, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """Flush a folder's own entries (renames) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(folder: Path, keep: int) -> None:
    intact = [path for path in sorted(folder.glob("step-*"), reverse=True) if is_intact(path)]
    for path in intact[keep:]:
        doomed = folder / f".old-{path.name}"
        os.rename(path, doomed)
        remove_tree(doomed)
