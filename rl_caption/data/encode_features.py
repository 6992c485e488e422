"""Encode images with a frozen image encoder and store their feature grids [H, W, D] as region features."""

import importlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
from rewards.clip.pretrained import grid_shape, load_image_encoder
from rewards.files import UNREADABLE_ARRAY, atomic_write, remove_leftovers
from rewards.images import file_hash, list_images
from rewards.model_files import fingerprint, read_object
from rewards.options import Count, check_values
from rl_caption.data.base import SHOWN, DataError
from rl_caption.data.features import (
    ArrayHeader,
    as_image_features,
    as_stored,
    check_stored,
    finite,
    open_hdf5,
)
from rl_caption.data.file_checks import ImageFile, check_image_files, in_parallel, progress
from rl_caption.data.files import check_space, write_json
from rl_caption.data.karpathy import KarpathyData
from rl_caption.data.loader import augment as augmented
from rl_caption.data.plain_files import check_name, json_object
from rl_caption.runtime.errors import ConfigError, config_errors

logger = logging.getLogger(__name__)

HDF5_SUFFIXES = (".h5", ".hdf5")
KEY = "{}_grids"
"""Key of an image's grid in an HDF5 file, by image id."""
RECORD = "encoder.json"
"""File, in the folder of the features, of the settings that made them; in HDF5 the attribute ``encoder``."""


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

    Images are preprocessed as the encoder requires. Existing features are kept, but damaged ones, and those of a
    replaced image, are made again. Another process that writes ``out`` is waited for. An HDF5 file is written at the end, from the folder
    ``OUT.parts``, which is then removed: HDF5 files that a killed process was writing cannot be read.

    Args:
        encoder: see ``rewards.clip.pretrained``; ``kwargs`` are its arguments, where it is a class.
        data: a Karpathy JSON or its folder, with ``image_root``, ``image_extension`` and ``flatten`` as for
            ``KarpathyData``, and ``splits`` (empty: all); or a folder of images, whose ids are their names without
            extension.
        out: a folder, for ``ID.npz`` with the array ``features`` [H, W, D]; or an HDF5 file (``.h5``, ``.hdf5``), for
            the keys ``ID_grids``; in ``dtype``, ``float16`` or ``float32``.
        device: such as ``cuda:0``; None is a GPU where there is one.
        augment: names of ``AUGMENTATIONS``: encode a random view of each image, drawn by ``seed``, for
            ``features_kwargs.views``.

    Raises:
        ConfigError: the encoder or the device cannot be used, or ``out`` has features of another encoder.
        DataError: images are missing or unreadable, the disk has too little space (both found before anything is
            encoded), or a value of a grid is not finite or beyond ``dtype``.
    """
    with config_errors("prepare_features"):
        check_values(Count, batch_size=batch_size, num_workers=num_workers)
    in_one_file = Path(out).suffix in HDF5_SUFFIXES
    if in_one_file:
        importlib.import_module("h5py")  # it is missed before the work
    out = Path(os.path.realpath(out))  # two links to it have one lock
    folder = out.with_name(f"{out.name}.parts") if in_one_file else out
    images, dataset = _images(Path(data), image_root, image_extension, flatten, splits)
    network = _load(encoder, kwargs or {}, device)
    made_by = {
        "encoder": encoder,
        "kwargs": dict(kwargs or {}),
        "dtype": dtype,
        **_identity(network),
    }
    if augment:
        made_by |= {"augment": [*augment], "seed": seed}
    record = json.loads(json.dumps(made_by))  # tuples become lists
    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(out.with_name(f".{out.name}.lock")):
        stored = {
            name: path
            for path in dict.fromkeys((out, folder))
            for name in _finished_ids(path, record)
        }
        grid = ArrayHeader(grid_shape(network)[1:], np.dtype(dtype))
        pending = _pending(images, stored, grid, num_workers)
        if pending:
            _check_images(list(pending.values()), dataset, num_workers)
            copied = len({*stored, *pending}) if in_one_file else 0
            _write_grids(network, record, grid, pending, folder, copied, batch_size, num_workers)
        if in_one_file and folder.is_dir():
            _write_hdf5(out, folder, record)
            shutil.rmtree(folder)
    return len(pending), len(images) - len(pending)


def _pending(
    images: Mapping[str, str], stored: Mapping[str, Path], grid: ArrayHeader, num_workers: int
) -> dict[str, str]:
    """The ``images`` without a ``grid``, whole and up to date, in the folder or HDF5 file that ``stored`` names."""
    names = [name for name in images if name in stored]
    with ExitStack() as stack:
        sources = {
            path: path if path.is_dir() else stack.enter_context(open_hdf5(path))
            for path in set(stored.values())
        }

        def is_usable(name: str) -> bool:
            """Whether the features are whole, and of the image file, if that is still there."""
            try:
                image_hash = _stored_hash(sources[stored[name]], name, grid)
            except DataError as error:
                logger.warning("%s: they are made again", error)
                return False
            if not os.path.isfile(images[name]) or image_hash == file_hash(images[name]):
                return True
            logger.warning("%s was replaced: its features are made again", images[name])
            return False

        usable = list(in_parallel(is_usable, names, num_workers, "comparing images"))
    kept = {name for name, is_good in zip(names, usable, strict=True) if is_good}
    return {name: path for name, path in images.items() if name not in kept}


def _stored_hash(source: Any, name: str, grid: ArrayHeader) -> str:
    """``file_hash`` of the image of which a folder or an open HDF5 file has the features.

    Raises ``DataError`` where the features are damaged, or no such ``grid``.
    """
    if not isinstance(source, Path):
        dataset, where = source[KEY.format(name)], f"features of image {name!r} ({source.filename})"
        check_stored(dataset, where)
        _check_grid(dataset, grid, where)
        return str(dataset.attrs["image"])
    stored = as_image_features(source / f"{name}.npz", name)
    (header,) = stored.store.read(stored.location, stored.where, False).features
    _check_grid(header, grid, stored.where)
    with naming(stored.where, UNREADABLE_ARRAY, DataError), np.load(str(stored)) as arrays:
        return str(arrays["image"])


def _check_grid(stored: Any, grid: ArrayHeader, where: str) -> None:
    if (stored.shape, stored.dtype) != grid:
        expected = f"expected {list(grid.shape)} of {grid.dtype}"
        raise DataError(
            f"{where}: the array is {list(stored.shape or ())} of {stored.dtype}: {expected}"
        )


def _write_grids(
    network: Any,
    record: Mapping[str, Any],
    grid: ArrayHeader,
    images: Mapping[str, str],
    folder: Path,
    copied: int,
    batch_size: int,
    num_workers: int,
) -> None:
    """Encode images into ``folder``; ``copied`` is the number of images that are then copied to an HDF5 file."""
    encoder, dtype, shape = record["encoder"], record["dtype"], grid.shape
    folder.mkdir(parents=True, exist_ok=True)
    check_space(
        folder, int(np.prod(shape)) * np.dtype(dtype).itemsize * (len(images) + copied), dtype
    )
    logger.info("%s: grids %d x %d of %d values, %s", encoder, *shape, dtype)
    write_json(folder / RECORD, record)
    view = partial(augmented, names=record.get("augment", ()), seed=record.get("seed", 0), step=0)
    grids = _encode_images(network, images, batch_size, num_workers, view)
    for name, hashes, values in progress(grids, "encoding images", "image", len(images)):
        where = f"image {name!r} ({images[name]})"
        stored = as_stored(
            finite(values.reshape(-1, shape[-1]), "features", where), dtype, where
        ).reshape(values.shape)
        with atomic_write(folder / f"{name}.npz") as file:
            np.savez(file, features=stored, image=hashes)


def _images(
    path: Path,
    image_root: str | Path | None,
    image_extension: str | None,
    flatten: bool,
    splits: Sequence[str],
) -> tuple[dict[str, str], KarpathyData | None]:
    """Image id -> file, and the dataset if ``path`` is one (not a folder of images)."""
    dataset = None
    if path.is_dir() and not any(path.glob("dataset*.json")):
        pairs = [(file.stem, str(file)) for file in sorted(list_images(path))]
    else:
        dataset = KarpathyData(path, image_root, image_extension, flatten)
        rows = (row for split in splits or dataset.splits for row in dataset.split(split))
        pairs = [(row["image_id"], str(row["image"])) for row in rows]
    images: dict[str, str] = {}
    for name, file in pairs:
        check_name(name, f"{path}: image {name!r:.80}")
        if images.setdefault(name, file) != file:
            raise DataError(
                f"{path}: image {name!r} is {images[name]!r} and {file!r}: expected one file per id"
            )
    return images, dataset


def _load(encoder: str, kwargs: Mapping[str, Any], device: str | None) -> Any:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    unusable = (ValueError, RuntimeError, AssertionError)
    with naming(f"encoder {encoder!r} on {device!r}", unusable, ConfigError):
        return load_image_encoder(encoder, kwargs).to(device)


def read_record(root: str | Path) -> dict[str, Any] | None:
    """The settings that ``encode_features`` recorded in a folder or HDF5 file of features, or None."""
    path = Path(root)
    if path.is_dir():
        return read_object(path / RECORD) if (path / RECORD).is_file() else None
    with open_hdf5(path) as file:
        text = file.attrs.get("encoder")
    return None if text is None else json_object(text, f"{path}: its attribute 'encoder'")


def made_by(root: str | Path, encoder: Any) -> bool:
    """Whether features are recorded as made by an image encoder with the same weights and preprocessing."""
    record = read_record(root)
    if record is None or "augment" in record:
        return False
    return all(record.get(key) == value for key, value in _identity(encoder).items())


def _identity(network: Any) -> dict[str, Any]:
    """What the features depend on beside the image, as JSON: preprocessing, and a hash of the weights."""
    preprocessing = json.loads(json.dumps(asdict(network.preprocessing)))
    return {"preprocessing": preprocessing, "weights": fingerprint(network.state_dict())}


def _finished_ids(path: Path, record: Mapping[str, Any]) -> set[str]:
    """Ids of the images whose features a folder or HDF5 file holds (it may be missing).

    Raises ``ConfigError`` unless the settings of ``record`` made them.
    """
    names: set[str] = set()
    if path.is_dir():
        remove_leftovers(path)
        files = (
            name for name in os.listdir(path) if name.endswith(".npz") and not name.startswith(".")
        )
        names = {name.removesuffix(".npz") for name in files}
    elif path.exists():
        with open_hdf5(path) as file:
            names = {key.removesuffix(KEY.format("")) for key in file}
    stored_record = (read_record(path) or {}) if names else record
    changed = [
        key
        for key in dict.fromkeys((*record, *stored_record))
        if stored_record.get(key) != record.get(key)
    ]
    if changed:
        differences = "; ".join(
            f"{key} is {stored_record.get(key)!r} there, {record.get(key)!r} here"
            for key in changed
        )
        raise ConfigError(
            f"{path} has features of another encoder: {differences}; name another out"
        )
    return names


def _check_images(paths: Sequence[str], dataset: KarpathyData | None, num_workers: int) -> None:
    verdicts = check_image_files(map(ImageFile, paths), num_workers)
    bad = [verdict.error for verdict in verdicts.values() if verdict.error is not None]
    missing = [file.path for file, verdict in verdicts.items() if verdict.missing]
    if bad:
        advice = f" ({dataset.explain_missing(missing)})" if missing and dataset is not None else ""
        raise DataError(
            f"{len(bad)} of {len(verdicts)} images cannot be used: {'; '.join(bad[:SHOWN])}{advice}"
        )


def _encode_images(
    network: Any,
    images: Mapping[str, str],
    batch_size: int,
    num_workers: int,
    view: Callable[..., Tensor],
) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
    """Yield id, ``file_hash`` and grid [H, W, D] of every image; ``view(pixels, image_id=…)`` augments pixels."""
    names, device = list(images), next(network.parameters()).device
    batches = [names[first : first + batch_size] for first in range(0, len(names), batch_size)]

    def read(name: str) -> tuple[str, Tensor]:
        """Hash, taken first, so that a file replaced meanwhile does not fit; preprocessed pixels [3, S, S]."""
        image_hash = file_hash(images[name])
        return image_hash, view(pixels(images[name], network.preprocessing), image_id=name)

    with ThreadPoolExecutor(num_workers) as pool:
        ahead = pool.map(read, batches[0])
        for batch, following in zip(batches, [*batches[1:], []], strict=True):
            hashes, inputs = zip(*ahead, strict=True)
            ahead = pool.map(read, following)  # while this batch is encoded
            with torch.inference_mode():
                grids = network(torch.stack(inputs).to(device)).float().cpu().numpy()
            yield from zip(batch, hashes, grids, strict=True)


def _write_hdf5(path: Path, folder: Path, record: Mapping[str, Any]) -> None:
    """Write the HDF5 file anew: the features in ``folder``, and what it has of other images already."""
    import h5py

    names = sorted(_finished_ids(folder, record))
    with atomic_write(path) as file, h5py.File(file.name, "w", locking=False) as target:
        for name in progress(names, f"writing {path.name}", "image"):
            with np.load(folder / f"{name}.npz") as stored:
                target[KEY.format(name)] = stored["features"]
                target[KEY.format(name)].attrs["image"] = str(stored["image"])
        if path.exists():
            with open_hdf5(path) as before:
                for key in before.keys() - target.keys():
                    before.copy(key, target)
        target.attrs["encoder"] = json.dumps(record)
