"""Encode images with a frozen image encoder and store their feature grids [H, W, D] as region
features.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from rewards.base import naming
from rewards.clip.preprocessing import pixels
from rewards.clip.pretrained import load_image_encoder
from rewards.files import remove_leftovers
from rewards.images import list_images
from rewards.model_files import fingerprint, read_object
from rewards.options import Count, check_values
from rl_caption.data.base import DataError, Row
from rl_caption.data.checks import check_row_images
from rl_caption.data.features import write_features
from rl_caption.data.files import write_json
from rl_caption.data.loader import augment as augmented
from rl_caption.data.plain_files import check_name, progress
from rl_caption.data.rows import karpathy
from rl_caption.runtime.errors import ConfigError, config_errors

RECORD = "encoder.json"
"""File, in the folder of the features, of the settings that made them."""


def encode_features(
    encoder: str,
    data: str | Path,
    out: str | Path,
    image_root: str | Path | None = None,
    image_extension: str | None = None,
    flatten: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    dtype: str = "float16",
    batch_size: int = 32,
    num_workers: int = 4,
    device: str | None = None,
    splits: Sequence[str] = (),
    augment: Sequence[str] = (),
    seed: int = 0,
) -> tuple[int, int]:
    """Write the grid of every image; returns how many were written and how many were there already.

    Images are preprocessed as the encoder requires. Existing features are kept but for
    those of newer images. Another process
    that writes ``out`` is waited for.

    Args:
        encoder: see ``rewards.clip.pretrained``; ``kwargs`` are its arguments, where it is a class.
        data: a Karpathy JSON or its folder, with ``image_root``, ``image_extension`` and
            ``flatten`` as for ``karpathy``, and ``splits`` (empty: all); or a folder of images,
            whose ids are their names without extension.
        out: a folder, for ``ID.npz`` with the array ``features`` [H, W, D] in ``dtype``,
            ``float16`` or ``float32``.
        device: such as ``cuda:0``; None is a GPU where there is one.
        augment: names of ``AUGMENTATIONS``: encode a random view of each image, drawn by ``seed``,
            for ``features_kwargs.views``.

    Raises:
        ConfigError: the encoder or the device cannot be used, or ``out`` has features of another
            encoder.
        DataError: images are missing or unreadable (found before anything is encoded), or a value
            of a grid is not finite or beyond ``dtype``.
    """
    with config_errors("prepare_features"):
        check_values(Count, batch_size=batch_size, num_workers=num_workers)
    out = Path(os.path.realpath(out))  # two links to it have one lock
    images = _images(Path(data), image_root, image_extension, flatten, splits)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    unusable = (ValueError, RuntimeError, AssertionError)
    with naming(f"encoder {encoder!r} on {device!r}", unusable, ConfigError):
        network = load_image_encoder(encoder, kwargs or {}).to(device)
    record: dict[str, Any] = {
        "encoder": encoder,
        "kwargs": dict(kwargs or {}),
        "dtype": dtype,
    }
    record |= _identity(network)
    if augment:
        record |= {"augment": [*augment], "seed": seed}
    record = json.loads(json.dumps(record))  # tuples become lists
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(out.with_name(f".{out.name}.lock")):
        found = _stored_ids(out, record)
        pending = {
            name: path
            for name, path in images.items()
            if name not in found or _is_newer(path, out / f"{name}.npz")
        }
        if pending:
            rows: list[Row] = [
                {"image_id": name, "image": path, "references": []}
                for name, path in pending.items()
            ]
            check_row_images(rows, "the encoder", num_workers=num_workers)
            write_json(out / RECORD, record)
            view = partial(augmented, names=augment, seed=seed, step=0)
            grids = _encode_images(network, pending, batch_size, num_workers, view)
            for name, grid in progress(grids, "encoding images", "image", len(pending)):
                write_features(
                    out / f"{name}.npz", grid, dtype, f"image {name!r} ({images[name]})"
                )
    return len(pending), len(images) - len(pending)


def _is_newer(image: str, features: Path) -> bool:
    """Whether an image was replaced after its features were made."""
    return os.path.isfile(image) and os.path.getmtime(image) > features.stat().st_mtime


def _images(
    path: Path,
    image_root: str | Path | None,
    image_extension: str | None,
    flatten: bool,
    splits: Sequence[str],
) -> dict[str, str]:
    """Image id -> file, of a Karpathy JSON or a folder of images."""
    if path.is_dir() and not any(path.glob("dataset*.json")):
        pairs = [(file.stem, str(file)) for file in sorted(list_images(path))]
    else:
        data = karpathy(path, image_root, image_extension, flatten)
        rows = (row for split in splits or data for row in data[split])
        pairs = [(row["image_id"], str(row["image"])) for row in rows]
    images: dict[str, str] = {}
    for name, file in pairs:
        check_name(name, f"{path}: image {name!r:.80}")
        if images.setdefault(name, file) != file:
            raise DataError(
                f"{path}: image {name!r} is {images[name]!r} and {file!r}: expected one"
            )
    return images


def read_record(root: str | Path) -> dict[str, Any] | None:
    """The settings that ``encode_features`` recorded in a folder of features, or None."""
    file = Path(root) / RECORD
    return read_object(file) if file.is_file() else None


def _identity(network: Any) -> dict[str, Any]:
    """What the features depend on beside the image, as JSON: preprocessing, and a hash of the
    weights.
    """
    preprocessing = json.loads(json.dumps(asdict(network.preprocessing)))
    return {
        "preprocessing": preprocessing,
        "weights": fingerprint(network.state_dict()),
    }


def _stored_ids(folder: Path, record: Mapping[str, Any]) -> set[str]:
    """Ids of the images whose features a folder holds.

    Raises ``ConfigError`` unless the settings of ``record`` made them.
    """
    remove_leftovers(folder)
    names = {file.stem for file in folder.glob("[!.]*.npz")}
    stored = (read_record(folder) or {}) if names else record
    changed = [
        key for key in {**record, **stored} if stored.get(key) != record.get(key)
    ]
    if changed:
        there = {key: stored.get(key) for key in changed}
        raise ConfigError(
            f"{folder} has features of another encoder ({there}); name another out"
        )
    return names


def _encode_images(
    network: Any,
    images: Mapping[str, str],
    batch_size: int,
    num_workers: int,
    view: Callable[..., Tensor],
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield id and grid [H, W, D] of every image; ``view(pixels, image_id=…)`` augments pixels."""
    names, device = list(images), next(network.parameters()).device
    batches = [
        names[first : first + batch_size] for first in range(0, len(names), batch_size)
    ]

    def read(name: str) -> Tensor:
        """Preprocessed pixels [3, S, S]."""
        return view(pixels(images[name], network.preprocessing), image_id=name)

    with ThreadPoolExecutor(num_workers) as pool:
        ahead = pool.map(read, batches[0])
        for batch, following in zip(batches, [*batches[1:], []], strict=True):
            inputs = list(ahead)
            ahead = pool.map(read, following)  # while this batch is encoded
            with torch.inference_mode():
                grids = network(torch.stack(inputs).to(device)).float().cpu().numpy()
            yield from zip(batch, grids, strict=True)
