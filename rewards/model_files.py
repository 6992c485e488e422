"""Files of saved models, local or on the hub: checks of folders, configurations and weights before they are used.

A folder that this package writes ends with a manifest: every file's size, and the hash of the small ones. Folders that
others made have none, and are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

MANIFEST = "manifest.json"
HASHED = 2**24
"""Files of up to so many bytes are hashed, which takes milliseconds: configurations, tokenizers, small weights."""
LARGEST = (
    (r"(layers?|blocks|repeats)$", 256),
    (r"(image|patch|resolution).*size$", 2**14),
    (r"(size|dim|width|embd|heads|rank|channels|embeddings|positions|tokens|context_length)$", 2**24),
)
"""Largest value of keys whose names match, the first that does."""
WHOLE = r"(position_ids|num_batches_tracked|token_type_ids|\.attn\.(masked_)?bias|attn_mask)$"
"""Names of buffers that hold whole numbers, or truth values, in weights of Transformers and open_clip."""


def manifest_of(folder: Path) -> dict[str, Any]:
    """What a manifest of ``folder`` lists: every other file, by its path inside."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {file.relative_to(folder).as_posix(): _entry(file) for file in files}


def damage(folder: Path) -> str | None:
    """What differs between ``folder`` and its manifest, the first file by name; None where nothing does.

    Files that the manifest does not list are not looked at. One written by an older version has sizes alone.
    """
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}"
    try:
        entries = read_object(manifest)
    except ValueError as error:
        return str(error)
    for name, listed in entries.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        size = listed.get("size") if isinstance(listed, dict) else listed
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
        if isinstance(listed, dict) and listed != _entry(file):
            return f"{name} was changed: its content is not that of the manifest"
    return None


def check_folder(folder: Path) -> None:
    """See to it that the folder of a model is as it was written, where it has a manifest.

    Raises:
        ValueError: which file is missing or changed.
    """
    found = damage(folder) if (folder / MANIFEST).is_file() else None
    if found is not None:
        raise ValueError(
            f"{str(folder)!r} is not as it was written: {found}. Copy the whole folder again; where the change is "
            f"meant, remove its {MANIFEST}"
        )


def _entry(file: Path) -> dict[str, Any]:
    size = file.stat().st_size
    return {"size": size} | ({"sha256": hashlib.sha256(file.read_bytes()).hexdigest()} if size <= HASHED else {})


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else; the message names it.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds {type(content).__name__}: expected a JSON object")
    return content


def check_ranges(values: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]]) -> None:
    """See to it that each of ``values`` that ``ranges`` names is a number in its range.

    Args:
        values: as they were read.
        ranges: smallest and largest; whole numbers, where these are.

    Raises:
        ValueError: the first that is not.
    """
    for key, (lowest, highest) in ranges.items():
        value, whole = values[key], isinstance(highest, int)
        is_number = isinstance(value, int | float) and not isinstance(value, bool | float if whole else bool)
        if not is_number or not lowest <= value <= highest:
            what = "a whole number" if whole else "a number"
            raise ValueError(f"{key} is {value!r:.80}: expected {what} from {lowest} to {highest}")


def check_sizes(values: Mapping[str, Any], where: str = "") -> None:
    """Refuse the shape of a model that nobody has, before anything of that size is made.

    Args:
        values: a configuration, with sections perhaps.
        where: the section, for messages.

    Raises:
        ValueError: the first number of layers, size or width below 0 or above ``LARGEST``.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            check_sizes(value, f"{where}{key}.")
        elif isinstance(value, int):
            largest = next((largest for pattern, largest in LARGEST if re.search(pattern, key)), None)
            if largest is not None and not 0 <= value <= largest:
                raise ValueError(f"{where}{key} is {value}: expected 0 to {largest}")


def check_memory(model: nn.Module) -> None:
    """See to it that the float32 weights of a model, which is on the meta device still, fit into memory.

    Raises:
        ValueError: they do not.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * count > memory:
        raise ValueError(
            f"a model of this shape has {count:,} parameters, {4 * count / 2**30:,.0f} GiB: this machine has "
            f"{memory / 2**30:,.0f} GiB of memory"
        )


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or holds something other than finite floating-point numbers.
    """
    try:
        weights = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    check_numbers(weights.items(), str(file))
    return weights


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint file by key, without unpickling (safetensors, or ``weights_only``).

    ``state_dict`` inside it, and a prefix ``module.`` of data parallelism, are looked through.

    Raises:
        OSError, RuntimeError, ValueError, pickle.UnpicklingError: it is not such a file.
    """
    if path.suffix == ".safetensors":
        try:
            stored: Any = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from error
    else:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    state = stored.get("state_dict", stored) if isinstance(stored, dict) else stored
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds something other than tensors by key")
    return {str(key).removeprefix("module."): value for key, value in state.items()}


def check_types(file: Path) -> None:
    """See to it that the tensors of a safetensors file are stored as floating-point numbers, without reading them.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or a tensor is of another type; the message names it.
    """
    try:
        with safe_open(file, framework="pt") as stored:
            kinds = {name: stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    for name, kind in kinds.items():
        if not kind.startswith(("F", "BF")) and not re.search(WHOLE, name):
            raise ValueError(f"{file}: {name} is stored as {kind}: expected floating-point numbers")


def check_numbers(tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
    """See to it that all ``tensors`` hold finite floating-point numbers.

    Raises:
        ValueError: one does not; the message says ``where`` and names it.
    """
    for name, tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"{where}: {name} holds {tensor.dtype}: expected floating-point numbers")
        found = non_finite(tensor)
        if found:
            raise ValueError(f"{where}: {name} has {found} of {tensor.numel()} values that are NaN or infinite")


def non_finite(tensor: Tensor) -> int:
    """How many values are NaN or infinite."""
    return tensor.numel() - int(torch.isfinite(tensor).sum())


def state_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the state of ``model``."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def check_state(state: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], what: str, hint: str = "") -> None:
    """Compare names and shapes of ``state`` with ``shapes``.

    Raises:
        ValueError: a key is missing, unexpected or of the wrong shape; the message names the first five of each.
    """
    wrong = [
        f"{name} has {list(state[name].shape)}, not {list(shape)}"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    found = {
        "missing": sorted(shapes.keys() - state.keys()),
        "unexpected": sorted(state.keys() - shapes.keys()),
        "wrong shape": wrong,
    }
    problems = [
        f"{len(names)} {kind}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for kind, names in found.items()
        if names
    ]
    if problems:
        raise ValueError(f"{what} do not fit the configuration: {'; '.join(problems)}{hint}")


def ask_hub(name: str, file: str) -> bool:
    """Ask the hub for ``file`` of the model ``name``, in one request.

    Libraries ask for a dozen files, and again for each that fails: a mistyped name would take half a minute without a
    connection.

    Returns:
        Whether the hub answers; where it does not, the file lies in the local cache, and so may the others.

    Raises:
        OSError: there is no such model, or neither a connection nor a copy in the cache.
        ValueError: this is no name of a model.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    http_error: Any = HfHubHTTPError.__mro__[1]  # of the client that huggingface_hub was built on
    try:
        get_hf_file_metadata(hf_hub_url(name, file))
    except GatedRepoError as error:
        raise OSError(f"{name!r} asks for an agreement: accept it on its page, then log in (hf auth login)") from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise OSError(f"{name!r} is no model on the hub that has a {file}: {_first_line(error)}") from error
    except (OSError, http_error) as error:
        if isinstance(try_to_load_from_cache(name, file), str):
            return False
        raise OSError(f"the hub cannot be reached, and {name!r} is not in the cache: {_first_line(error)}") from error
    return True


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
