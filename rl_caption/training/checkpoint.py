"""A run's folder: checkpoints, configuration, environment, logs and result, and where a run resumes.

Checkpoints survive a kill at any moment and resume exactly, under any engine and number
of processes. A step folder is written under a hidden temporary name, flushed to disk,
closed with a manifest of its files, renamed, and only then are old ones pruned:
``Accelerator.save_state`` alone writes in place, where a kill can destroy the only
checkpoint. Under DeepSpeed a checkpoint holds full state dicts, as of a single process;
DeepSpeed's own are pickles of one number of processes.
"""

import contextlib
import hashlib
import json
import logging
import os
import pickle
import platform
import random
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import Accelerator, PartialState
from accelerate.checkpointing import save_accelerator_state
from accelerate.utils import load as load_tensors
from accelerate.utils.constants import SCALER_NAME
from safetensors import SafetensorError
from safetensors.torch import load_model, save_file
from torch import nn
from transformers.utils import flatten_dict

from rewards.base import naming
from rewards.files import write_errors
from rewards.model_files import MANIFEST, damage, manifest_of
from rl_caption.data.files import write_json, write_json_lines, write_text
from rl_caption.data.plain_files import read_json, read_log, read_yaml
from rl_caption.runtime.engines import print_main
from rl_caption.runtime.errors import UserError, installed_version
from rl_caption.runtime.types import LOSS, TrainState
from rl_caption.runtime.zero import (
    Moments,
    full_state,
    load_deepspeed_moments,
    torch_optimizer,
    trained_parameters,
    uses_deepspeed,
)

logger = logging.getLogger(__name__)

RESULT = "result.json"
LOGS = ("metrics.jsonl", "samples.jsonl")
FREE_TO_CHANGE = (
    "run.",
    "report",
    "trust",
    "teacher.batch_size",
    "teacher.cache_",
    "data.num_workers",
    "data.cache_mb",
    "data.check_images",
    "data.source",
    "eval.batch_size",
    "train.num_processes",
    "train.threads",
    "train.micro_batch_size",
)
"""Configuration keys, or beginnings of keys, that do not change what is computed."""
RECORDED = re.compile(
    "ACCELERATE_|ATEN_|CU|DNNL_|MKL_|NCCL_|NVIDIA_|OMP_|ONEDNN_|TORCH"
)
"""Beginnings of the names of environment variables that choose kernels, and so the last
digits.
"""
SUMMARY = {
    "loss/total": "",
    "loss/xe": " nats",
    "reward/total": "",
    "reward/greedy": "",
    "policy/entropy": " nats",
    "completion/length": " tokens",
    "completion/eos_fraction": " of 1",
    "grad/norm": "",
    "val/cider": " of 10",
    "val/retrieval_r1": " of 1",
    "val/teacher_cosine_image": " of 1",
    "val/teacher_cosine_text": " of 1",
    "val/hard_negatives": " of 1",
    "val/specificity": " of 1",
    "val/r_squared": " of 1",
    "val/token_logprob": " nats",
    LOSS: " nats",
}
"""Keys of the one-line summary, where present, with their unit or upper bound; all keys
are in ``metrics.jsonl``.
"""
RECORDED_VERSIONS = (
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "numpy",
    "open_clip_torch",
    "deepspeed",
    "rl-caption",
)
STATE = "trainer_state.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.bin"
# torch.save raises RuntimeErrors
WRITE_FAILURES = (OSError, RuntimeError, SafetensorError)
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
    """A checkpoint cannot be written or resumed; the message names the folder and what
    would be right.
    """


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    state: TrainState,
    keep: int,
    model: nn.Module,
    optimizer: Any,
) -> Path:
    """Write ``folder/step-N`` atomically, then remove all but the newest ``keep``.
    Called by every process.

    ``model`` and ``optimizer`` are prepared ones. Raises CheckpointError where the disk
    is full or the folder cannot be written; older checkpoints are untouched.
    """
    final = folder / f"step-{state.global_step:08d}"
    with new_folder(final, replaces=True) as partial:
        if not uses_deepspeed(accelerator):
            accelerator.save_state(str(partial), safe_serialization=True)
        else:
            weights, moments = full_state(accelerator, model, optimizer)
            if accelerator.is_main_process:
                save_file(weights, partial / MODEL, metadata={"format": "pt"})
                groups = [{"param_names": list(moments)}]
                saved = dict(enumerate(moments.values()))
                torch.save(
                    {"state": saved, "param_groups": groups}, partial / OPTIMIZER
                )
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
    """Load the weights of a checkpoint of any engine into a model that is not prepared
    yet, and return Adam's moments, for ``load_moments``.

    Raises CheckpointError where the checkpoint is of another model, holds anything but
    tensors and plain containers, or other parameters were trained than ``optimizer``
    has.
    """
    with naming(f"{path} {UNFIT}", READ_FAILURES, CheckpointError):
        saved = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True)
        states = saved["state"]
        names = _trained_names(saved["param_groups"])
        moments = {name: states.get(index, {}) for index, name in enumerate(names)}
        load_model(model, path / MODEL)
    expected = _trained_names(optimizer.param_groups)
    if odd := sorted({*names} ^ {*expected}):
        raise CheckpointError(
            f"{path} {UNFIT}: {odd} are trained in the checkpoint or in this run only. To train "
            "others, start from its export/best (model.init) in another run.dir"
        )
    return moments


def _trained_names(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    return [name for group in groups for name in group["param_names"]]


def load_moments(
    accelerator: Accelerator,
    path: Path,
    model: nn.Module,
    optimizer: Any,
    moments: Moments,
) -> None:
    """Give the prepared optimizer its moments back, and the loss scale of fp16. Called
    by every process.
    """
    trained = trained_parameters(accelerator, model)
    with naming(f"{path} {UNFIT}", READ_FAILURES, CheckpointError):
        if uses_deepspeed(accelerator):
            load_deepspeed_moments(model, trained, moments)
            return
        for name, values in moments.items():
            parameter = trained[name]
            torch_optimizer(optimizer).state[parameter] = {
                # AdamW counts its steps on the CPU.
                key: value if key == "step" else value.to(parameter)
                for key, value in values.items()
            }
        # A checkpoint of another precision has none: fp16 then starts with a fresh one.
        if accelerator.scaler is not None and (path / SCALER_NAME).is_file():
            scale = torch.load(path / SCALER_NAME, weights_only=True)
            accelerator.scaler.load_state_dict(scale)


def load_random_states(accelerator: Accelerator, path: Path, processes: int) -> None:
    """Restore the random states of this process. Called by every process.

    If another number of processes wrote the checkpoint (``processes``), the run goes on
    with other dropout masks. Raises CheckpointError where this process's states cannot
    be restored: Accelerate alone would go on silently.
    """
    if processes != accelerator.num_processes:
        print_main(
            accelerator,
            f"WARNING: {path} was written by another number of processes, {processes} (now "
            f"{accelerator.num_processes}): dropout masks change, samples and data order do not",
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
def new_folder(final: Path, replaces: bool = False) -> Iterator[Path]:
    """A hidden folder beside ``final`` to write into, which gets its name at the
    block's end. Every process enters.

    ``final`` must be missing or empty; with ``replaces``, the new folder is sealed and
    takes the place of an old one. If the block fails, nothing is left of it. Raises
    ``CheckpointError`` where it cannot be written.
    """
    partial, processes = final.with_name(f".partial-{final.name}"), PartialState()
    try:
        if processes.is_main_process:
            remove_tree(partial)
            partial.mkdir(parents=True)
        processes.wait_for_everyone()
        yield partial
        processes.wait_for_everyone()
        if processes.is_main_process:
            (replace_folder if replaces else os.rename)(partial, final)
        processes.wait_for_everyone()
    except BaseException as error:
        with contextlib.suppress(OSError):
            remove_tree(partial)
        if not isinstance(error, WRITE_FAILURES):
            raise
        raise CheckpointError(
            f"the folder {final} could not be written: {error}"
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

    Checkpoints of later steps belong to a continuation that was given up: the run went
    on from an older checkpoint.
    """
    steps = sorted(folder.glob("step-*"), reverse=True)
    intact = [path for path in steps if path <= newest and damage(path) is None]
    for path in set(steps) - set(intact[:keep]):
        doomed = folder / f".partial-{path.name}"
        os.rename(path, doomed)
        remove_tree(doomed)


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed save left behind; a folder that was about to be replaced
    gets its name back.
    """
    for partial in folder.glob(".partial-*"):
        remove_tree(partial)
    for old in folder.glob(".old-*"):
        final = folder / old.name.removeprefix(".old-")
        if not final.exists() and damage(old) is None:
            os.rename(old, final)
        remove_tree(old)


def replace_folder(new: Path, final: Path) -> None:
    """Replace the folder ``final`` by the finished folder ``new``.

    At every moment the old or the new one is intact; after a kill, ``clear_leftovers``
    finds out which.
    """
    seal(new)
    old = final.with_name(f".old-{final.name}")
    remove_tree(old)
    if final.exists():
        os.rename(final, old)
    os.rename(new, final)
    sync(final.parent)
    remove_tree(old)


def seal(folder: Path) -> None:
    """Flush every file to disk and write the manifest, last."""
    entries = manifest_of(folder)
    for name in entries:
        sync(folder / name)
    write_json(folder / MANIFEST, entries)
    sync(folder)


def hash_of(folder: Path) -> str:
    """Hash of the names and contents of a folder's files; a missing folder counts as empty."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(filter(Path.is_file, folder.rglob("*"))):
        digest.update(bytes(path.relative_to(folder)))
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def remove_tree(path: Path) -> None:
    """Remove a folder if it is there."""
    if path.exists():
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Flush a file, or a folder's own entries (renames), to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_checkpoint(settings: Mapping[str, Any]) -> Path | None:
    """The checkpoint to resume from, or None to start; ``settings`` are a configuration as JSON.

    Raises:
        CheckpointError: the folder holds a run and ``run.resume`` is false; it holds a
            run of another configuration and ``run.resume`` is ``auto``; ``run.resume``
            is a path without an intact checkpoint; or all checkpoints are damaged,
            unless ``run.resume`` is false.
    """
    options = settings["run"]
    folder, resume = Path(options["dir"]), options["resume"]
    checkpoints = folder / "checkpoints"
    clear_leftovers(checkpoints)
    clear_leftovers(folder / "export")
    if resume not in ("auto", True, False):
        read_state(Path(resume))
        return Path(resume)
    newest = newest_checkpoint(checkpoints)
    if newest is None:
        if resume and any(checkpoints.glob("step-*")):
            raise CheckpointError(
                f"all checkpoints in {checkpoints} are damaged. Put a whole "
                "one back, choose another run.dir, or set run.resume to false to start over"
            )
        return None
    problems = [] if resume else ["run.resume is false"]
    if resume == "auto":
        before = read_state(newest).configuration
        problems = changed_settings(before, settings)
    if problems:
        raise CheckpointError(
            f"{folder} holds a run ({newest.name}), and {'; '.join(problems)}. Choose another "
            "run.dir, or set run.resume to true to continue that run"
        )
    return newest


def computed_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration that may change what is computed, by ``section.key``."""
    return {
        key: value
        for key, value in flatten_dict(dict(settings)).items()
        if not key.startswith(FREE_TO_CHANGE)
    }


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences between the ``computed_settings`` of two configurations, as ``key:
    old -> new``.
    """
    old, new = computed_settings(old), computed_settings(new)
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def changed_keys(saved: Path, settings: Mapping[str, Any]) -> list[str]:
    """``changed_settings`` of a saved configuration file and of a configuration as
    JSON.
    """
    return changed_settings(read_yaml(saved, CheckpointError), settings)


def write_run_files(
    folder: Path, settings: Mapping[str, Any], extra: dict[str, Any]
) -> None:
    """Write ``config.yaml`` (resolved ``settings``) and ``env.json`` (versions,
    platform, command, variables that choose kernels, ``extra``).
    """
    variables = {key: os.environ[key] for key in filter(RECORDED.match, os.environ)}
    environment = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: installed_version(name) for name in RECORDED_VERSIONS},
        "command": sys.argv,
        "environment": variables,
    }
    write_text(folder / "config.yaml", yaml.safe_dump(dict(settings), sort_keys=False))
    write_json(folder / "env.json", environment | extra)


def is_complete(folder: Path) -> bool:
    """Whether the run in ``folder`` reached its end."""
    return (folder / RESULT).is_file()


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line in a single write."""
    line = json.dumps(record, ensure_ascii=False) + "\n"
    with write_errors(path), path.open("ab") as file:
        file.write(line.encode())


def drop_after(path: Path, step: int) -> None:
    """Remove the lines of steps after ``step``, which are run again, and a last line
    that a kill left incomplete.

    Raises CheckpointError if any other line is not JSON.
    """
    if not path.exists():
        return
    lines = read_log(path, CheckpointError)
    write_json_lines(path, [record for record in lines if record["step"] <= step])
