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
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils import load as load_tensors
from accelerate.utils.constants import SCALER_NAME
from accelerate.utils.other import clean_state_dict_for_safetensors
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from rewards.base import naming
from rewards.model_files import MANIFEST, damage, manifest_of
from rl_caption.data.files import write_json
from rl_caption.data.plain_files import read_json
from rl_caption.runtime.engines import (
    MOMENTS,
    Moments,
    full_parameter,
    load_deepspeed_moments,
    torch_optimizer,
    uses_deepspeed,
)
from rl_caption.runtime.errors import UserError
from rl_caption.runtime.types import TrainState

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"
MODEL, OPTIMIZER, PLAIN_OPTIMIZER = "model.safetensors", "optimizer.safetensors", "optimizer.bin"
WRITE_FAILURES = ("file", "write", "inline_container", "iostream")
"""Words in the RuntimeErrors by which ``torch.save`` reports that it could not write."""


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
    partial = folder / f".partial-{final.name}"
    with save_or_discard(f"checkpoint {final}", partial, folder):
        if accelerator.is_main_process:
            remove_tree(partial)
            partial.mkdir(parents=True)
        accelerator.wait_for_everyone()
        if model is None or not uses_deepspeed(accelerator):
            accelerator.save_state(str(partial), safe_serialization=True)
        else:
            _write_full_state(accelerator, model, optimizer, partial)
            save_accelerator_state(
                str(partial), [], [], [], [], accelerator.process_index, 0
            )  # random states
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            # It keeps logged values, and a log may hold an infinite one.
            write_json(partial / STATE, asdict(state), allow_nan=True)
            replace_folder(partial, final)
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


def load_full_state(
    accelerator: Accelerator, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Moments | None:
    """Load the weights of a checkpoint into a model that is not prepared yet, and return Adam's
    moments.

    Returns None and loads nothing if neither this run nor the one that wrote the checkpoint uses
    DeepSpeed: Accelerate then loads weights and moments into the prepared model.
    """
    if not uses_deepspeed(accelerator) and not (path / OPTIMIZER).is_file():
        return None
    with read_errors(path):
        moments = _read_moments(path)
        load_model(model, path / MODEL)
    check_trained(
        path, moments, [name for group in optimizer.param_groups for name in group["param_names"]]
    )
    return moments


def load_checkpoint(
    accelerator: Accelerator,
    path: Path,
    model: Any = None,
    optimizer: Any = None,
    moments: Moments | None = None,
) -> TrainState:
    """Restore model, optimizer and random states, and return the counters. Called by every process.

    If ``load_full_state`` returned ``moments``, the model has its weights already and the moments
    go to ``optimizer`` (as prepared). Raises CheckpointError if ``path`` is not an intact
    checkpoint, belongs to another model, holds anything but tensors and plain containers, or its
    random states cannot be restored.
    """
    state = read_state(path)
    with read_errors(path):
        if moments is None or model is None:
            with _scaler_of(accelerator, path):
                # Tensors and plain containers only: a checkpoint is not trusted to run code.
                accelerator.load_state(str(path), load_kwargs={"weights_only": True})
        else:
            _load_moments(accelerator, model, optimizer, moments)
            load_accelerator_state(
                str(path), [], [], [], [], accelerator.process_index
            )  # random states
    if state.processes == accelerator.num_processes:
        _check_random_states(
            path / f"random_states_{accelerator.process_index}.pkl", accelerator.device
        )
    elif accelerator.is_main_process:
        counts = (
            f"of another number of processes, {state.processes} (now {accelerator.num_processes})"
        )
        logger.warning(
            "%s was written by a run %s: dropout masks change, samples and data order do not",
            path,
            counts,
        )
    return state


@contextlib.contextmanager
def _scaler_of(accelerator: Accelerator, path: Path) -> Iterator[None]:
    """Inside, no loss scale is loaded if ``path`` has none (after another precision): fp16 starts
    with a fresh one.
    """
    scaler = accelerator.scaler
    if not (path / SCALER_NAME).is_file():
        accelerator.scaler = None
    try:
        yield
    finally:
        accelerator.scaler = scaler


def _check_random_states(file: Path, device: torch.device) -> None:
    """Compare the generators with ``file``: Accelerate goes on silently where it could not restore
    them.
    """
    try:
        states = load_tensors(file)
        pairs = [(torch.get_rng_state(), states["torch_manual_seed"])]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            pairs.append(
                (torch.cuda.get_rng_state(index), states["torch_cuda_manual_seed"][index].cpu())
            )
    except (
        OSError,
        RuntimeError,
        LookupError,
        TypeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise CheckpointError(f"the random states in {file} cannot be read: {error}") from error
    if not all(torch.equal(current, saved) for current, saved in pairs):
        raise CheckpointError(
            f"the random states in {file} could not be restored: the run would not continue as "
            f"before"
        )


@contextlib.contextmanager
def save_or_discard(what: str, partial: Path, checkpoints: Path | None = None) -> Iterator[None]:
    """Turn a failed write into a ``CheckpointError`` that says what to do, and remove the
    unfinished folder.

    With ``checkpoints``, of a run, the message names the newest good one in it.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not any(
            word in str(error).lower() for word in WRITE_FAILURES
        ):
            raise
        place = next(folder for folder in partial.absolute().parents if folder.is_dir())
        with contextlib.suppress(OSError):
            remove_tree(partial)
        advice = "free some space, or name another folder"
        if checkpoints is not None:
            newest = newest_checkpoint(checkpoints) or "none"
            advice = f"free some space, or choose another run.dir; the newest good checkpoint is {newest}"
        free = f"{shutil.disk_usage(place).free / 1e6:.1f} MB are free on its disk"
        raise CheckpointError(
            f"{what} could not be written: {_reason(error)} ({free}): {advice}"
        ) from error


def _reason(error: Exception) -> str:
    """Why a write failed, in words: of ``torch.save`` only the place in its source is known."""
    if isinstance(error, shutil.Error):  # of several files
        return str(error.args[0][0][-1])
    if isinstance(error, OSError | SafetensorError):
        return str(error)
    return f"the disk may be full, or a quota or limit of sizes reached; torch says {str(error).splitlines()[0]!r}"


@contextlib.contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A hidden folder beside ``final``, which is missing or empty, to write into; it gets its name
    at the block's end.

    If the block fails, nothing is left of it. Raises ``CheckpointError`` where it cannot be
    written.
    """
    final = final.absolute()
    partial = final.with_name(f".partial-{final.name}")
    try:
        with save_or_discard(f"the folder {final}", partial):
            remove_tree(partial)
            partial.mkdir(parents=True)
            yield partial
            os.rename(partial, final)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_tree(partial)
        raise


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn a failed read of a checkpoint into a ``CheckpointError`` that names it."""
    try:
        yield
    except (
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        EOFError,
        pickle.UnpicklingError,
        SafetensorError,
    ) as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded into this model and optimizer: {error}"
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
        if path <= newest and is_intact(path)
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
        if not final.exists() and is_intact(old):
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


def is_intact(folder: Path) -> bool:
    """Whether the manifest is there and every file is as it lists it."""
    return damage(folder) is None


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


def _write_full_state(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, folder: Path
) -> None:
    """Write full state dicts of model and optimizer. All-gathers one parameter at a time to the
    main process.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    weights = _full_state_dict(accelerator, model)
    step = next(iter(torch_optimizer(optimizer).state.values()))["step"]
    moments: dict[str, Tensor] = {}
    for name, parameter in _trained(accelerator, model).items():
        values = {"step": step} | {
            key: safe_get_full_optimizer_state(parameter, key) for key in MOMENTS
        }
        if accelerator.is_main_process:
            moments |= {
                f"{name}/{key}": value.detach().float().cpu().clone()
                for key, value in values.items()
            }
    if accelerator.is_main_process:
        save_file(weights, folder / MODEL, metadata={"format": "pt"})
        save_file(moments, folder / OPTIMIZER, metadata={"format": "pt"})


def _full_state_dict(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """Full state dict on the CPU of the main process, each tied weight once; empty on other
    processes.
    """
    module = accelerator.unwrap_model(model)
    tensors: dict[int, Tensor] = {}
    for parameter in module.parameters():
        value = full_parameter(accelerator, parameter)
        if accelerator.is_main_process:
            tensors[id(parameter)] = value.detach().cpu().clone()
    if not accelerator.is_main_process:
        return {}
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    state = {
        name: tensors.get(id(named[name]), named[name].detach().cpu())
        for name in module.state_dict()
    }
    return clean_state_dict_for_safetensors(state)


def check_trained(path: Path, stored: Iterable[str], expected: Iterable[str]) -> None:
    """Raise CheckpointError unless the parameters trained in a checkpoint (``stored``) are those
    trained here.
    """
    if odd := sorted({*stored} ^ {*expected}):
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded into this model and optimizer: {len(odd)} "
            f"parameters are trained in "
            f"the checkpoint or in this run only, such as {odd[0]!r}. To train others, start from "
            f"its export/best "
            "(model.init) in another run.dir"
        )


def _read_moments(folder: Path) -> Moments:
    """Adam's moments in a checkpoint of any engine."""
    moments: dict[str, dict[str, Tensor]] = {}
    if (folder / OPTIMIZER).is_file():
        for path, value in load_file(folder / OPTIMIZER).items():
            name, _, key = path.rpartition("/")
            moments.setdefault(name, {})[key] = value
    else:
        saved = torch.load(folder / PLAIN_OPTIMIZER, map_location="cpu", weights_only=True)
        names = [name for group in saved["param_groups"] for name in group["param_names"]]
        moments = {names[index]: state for index, state in saved["state"].items()}
    return moments


def _load_moments(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, moments: Moments
) -> None:
    """Give the prepared optimizer its moments back. Called by every process."""
    trained = _trained(accelerator, model)
    if uses_deepspeed(accelerator):
        load_deepspeed_moments(model, trained, moments)
        return
    for name, parameter in trained.items():
        state = {
            key: moments[name][key].to(parameter.device, torch.float32).clone() for key in MOMENTS
        }
        torch_optimizer(optimizer).state[parameter] = {
            "step": moments[name]["step"].float().cpu(),
            **state,
        }


def _trained(accelerator: Accelerator, model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: value
        for name, value in accelerator.unwrap_model(model).named_parameters()
        if value.requires_grad
    }
