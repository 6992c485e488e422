"""Files of saved models: is a folder whole, is its configuration an object, are its weights numbers.

A folder that this package writes ends with a manifest: every file's size, and the hash of the small ones. Folders that
others made have none, and are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

MANIFEST = "manifest.json"
HASHED = 2**24
"""Files of up to so many bytes are hashed, which takes milliseconds: configurations, tokenizers, small weights."""


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


def check_types(file: Path, floating: Iterable[str]) -> None:
    """See to it that the tensors ``floating`` of a safetensors file are stored as floating-point numbers.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or a tensor is of another type; the message names it.
    """
    try:
        with safe_open(file, framework="pt") as stored:
            for name in sorted(set(stored.keys()) & set(floating)):
                kind = stored.get_slice(name).get_dtype()
                if not kind.startswith(("F", "BF")):
                    raise ValueError(f"{file}: {name} is stored as {kind}: expected floating-point numbers")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


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
