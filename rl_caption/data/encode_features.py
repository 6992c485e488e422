"""Encode images with a frozen image encoder and store their feature grids [H, W, D] as region features."""

import hashlib
import json
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor

from rewards.base import RewardError, naming
from rewards.clip.preprocessing import pixels
from rewards.clip.pretrained import load_image_encoder
from rewards.files import UNREADABLE_ARRAY, atomic_write, member, read_array, remove_leftovers
from rewards.images import IMAGE_SUFFIXES, file_hash, list_images
from rewards.model_files import fingerprint, read_object
from rl_caption.data.base import SHOWN, DataError
from rl_caption.data.features import (
    ArrayHeader,
    as_image_features,
    as_stored,
    check_stored,
    finite,
    hdf5_object,
    import_h5py,
    open_hdf5,
)
from rl_caption.data.file_checks import ImageFile, check_image_files, in_parallel, progress
from rl_caption.data.files import check_space, write_json
from rl_caption.data.karpathy import KarpathyData
from rl_caption.data.loader import AUGMENTATIONS
from rl_caption.data.loader import augment as augmented
from rl_caption.data.plain_files import check_name
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import BatchSize, Workers, shown, wrong_values

logger = logging.getLogger(__name__)

HDF5_SUFFIXES = (".h5", ".hdf5")
KEY = "{}_grids"
"""Key of an image's grid in an HDF5 file, by image id."""
HDF5_OVERHEAD = 2048
"""Bytes that an HDF5 file takes at most for the key and the attribute of an image, and for itself."""
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
    replaced image (``_image_hashes``), are made again. An HDF5 file is written at the end, from the folder
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
        ConfigError: the encoder or the device cannot be used, or ``out`` has features of another encoder or of other
            images with the same ids, or is being written by another process.
        DataError: images are missing or unreadable, the disk has too little space (both found before anything is
            encoded), or a value of a grid is not finite or beyond ``dtype``.
    """
    _check_options(batch_size, num_workers, augment)
    if in_one_file := Path(out).suffix in HDF5_SUFFIXES:
        import_h5py(Path(out))
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
    record = _as_json(made_by | ({"augment": [*augment], "seed": seed} if augment else {}))
    with _only_writer(out):
        stored = {
            name: path
            for path in dict.fromkeys((out, folder))
            for name in _finished_ids(path, record)
        }
        grid = ArrayHeader(_grid_shape(network, encoder), np.dtype(dtype))
        pending = _pending(images, stored, grid, num_workers)
        if pending:
            _check_images(list(pending.values()), dataset, num_workers)
            copied = len({*stored, *pending}) if in_one_file else 0
            _write_grids(network, record, grid, pending, folder, copied, batch_size, num_workers)
        if in_one_file and folder.is_dir():
            _write_hdf5(out, folder, record)
            shutil.rmtree(folder)
    return len(pending), len(images) - len(pending)


@contextmanager
def _only_writer(out: Path) -> Iterator[None]:
    """Inside the ``with``, no other process writes ``out``. Raises ``ConfigError`` where one does."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(
        out.with_name(f".{out.name}.lock"), fallback_to_soft=False
    )  # a soft one outlives a killed holder
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ConfigError(
            f"{out} is being written by another process: wait for it, or name another out"
        ) from error
    try:
        yield
    finally:
        os.unlink(lock.lock_file)
        lock.release()


def _image_hashes(path: str) -> str:
    """What is stored with the features of an image file: hashes of its path and of its content.

    Features that older versions wrote without are kept, and counted in the log.
    """
    return f"{hashlib.blake2b(os.fsencode(os.path.abspath(path)), digest_size=16).hexdigest()} {file_hash(path)}"


def _pending(
    images: Mapping[str, str], stored: Mapping[str, Path], grid: ArrayHeader, num_workers: int
) -> dict[str, str]:
    """The ``images`` without a ``grid``, whole and up to date, in the folder or HDF5 file that ``stored`` names.

    Raises ``ConfigError`` where there are features of other image files with the same ids.
    """
    names = [name for name in images if name in stored]

    with ExitStack() as stack:
        sources = {
            path: path if path.is_dir() else stack.enter_context(open_hdf5(path))
            for path in stored.values()
        }

        def state(name: str) -> str:
            """``usable``, or what is wrong."""
            try:
                hashes = _stored_hashes(sources[stored[name]], name, grid)
            except DataError as error:
                logger.warning("%s: they are made again", error)
                return "damaged"
            if hashes is None or not os.path.isfile(images[name]):
                return "unknown"
            recorded_hashes, current = hashes.split(" "), _image_hashes(images[name]).split(" ")
            if recorded_hashes[-1] == current[-1]:
                return "usable"
            return "replaced" if recorded_hashes[0] == current[0] else "other"

        states = dict(
            zip(names, in_parallel(state, names, num_workers, "comparing images"), strict=True)
        )
    by_state = {
        key: [name for name in names if states[name] == key]
        for key in ("other", "replaced", "unknown")
    }
    if other := by_state["other"]:
        first = ", ".join(f"{name!r} ({images[name]})" for name in other[:SHOWN])
        raise ConfigError(
            f"{stored[other[0]]} has features of other image files under {len(other)} of {len(images)} ids, such as "
            f"{first}: name another out"
        )
    if replaced := by_state["replaced"]:
        logger.warning(
            "images replaced: %d, such as %r; their features are computed again",
            len(replaced),
            replaced[0],
        )
    if unknown := by_state["unknown"]:
        logger.warning(
            "images kept unchecked: %d, such as %r, as the image file is missing or an older version wrote the "
            "features and did not record the image", len(unknown), unknown[0],
        )  # fmt: skip
    return {
        name: path for name, path in images.items() if states.get(name) not in ("usable", "unknown")
    }


def _stored_hashes(source: Any, name: str, grid: ArrayHeader) -> str | None:
    """``_image_hashes`` of the image of which a folder or an open HDF5 file has the features; None of older versions.

    Raises ``DataError`` where the features are damaged, or no such ``grid``.
    """
    if not isinstance(source, Path):
        dataset, where = (
            hdf5_object(source, KEY.format(name)),
            f"features of image {name!r} ({source.filename})",
        )
        check_stored(dataset, where)
        _check_grid(dataset, grid, where)
        hashes = dataset.attrs.get("image")
        return None if hashes is None else str(hashes)
    stored = as_image_features(source / f"{name}.npz", name)
    (header,) = stored.store.read(stored.location, stored.where, False).features
    _check_grid(header, grid, stored.where)
    with (
        naming(stored.where, UNREADABLE_ARRAY, DataError),
        zipfile.ZipFile(source / f"{name}.npz") as archive,
    ):
        if "image.npy" not in archive.namelist():
            return None
        with member(archive, "image") as (file, size):
            return str(read_array(file, size))


def _check_grid(stored: Any, grid: ArrayHeader, where: str) -> None:
    if (stored.shape, stored.dtype) != grid:
        expected = f"expected {list(grid.shape)} of {grid.dtype}"
        raise DataError(
            f"{where}: the array is {list(stored.shape or ())} of {stored.dtype}: {expected}"
        )


def _check_options(batch_size: int, num_workers: int, augment: Sequence[str]) -> None:
    wrong = [
        *wrong_values(batch_size, BatchSize, "batch_size"),
        *wrong_values(num_workers, Workers, "num_workers"),
    ]
    if unknown := sorted(set(augment) - set(AUGMENTATIONS)):
        wrong.append(f"augment has {unknown}: expected some of {list(AUGMENTATIONS)}")
    if wrong:
        raise ConfigError("; ".join(wrong))


def _as_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they will be read back from JSON (tuples become lists)."""
    try:
        return dict(json.loads(json.dumps(record, allow_nan=False)))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"kwargs are {record['kwargs']}: expected values of JSON ({error})"
        ) from error


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
        if image_root is not None or image_extension is not None or flatten or splits:
            raise DataError(
                f"{path} holds no dataset*.json, which image_root, image_extension, flatten and splits need"
            )
        with naming(f"data {str(path)!r}", (RewardError,), DataError):
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
    if not images:
        raise DataError(
            f"{path} holds neither a dataset*.json nor images ({', '.join(sorted(IMAGE_SUFFIXES))})"
        )
    return images, dataset


def _load(encoder: str, kwargs: Mapping[str, Any], device: str | None) -> Any:
    try:
        network = load_image_encoder(encoder, kwargs)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return network.to(device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used: {error}") from error


def read_record(root: str | Path) -> dict[str, Any] | None:
    """The settings that ``encode_features`` recorded in a folder or HDF5 file of features, or None."""
    path = Path(root)
    if path.is_dir():
        with suppress(FileNotFoundError, ValueError):
            return read_object(path / RECORD)
        return None
    with open_hdf5(path) as file:
        text = file.attrs.get("encoder")
    if text is None:
        return None
    if isinstance(text, str | bytes):
        with suppress(ValueError, RecursionError):
            record = json.loads(text)
            if isinstance(record, dict):
                return record
    raise DataError(
        f"{path}: its attribute 'encoder' is {shown(text)}: expected an object of JSON, or none"
    )


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
    stored_record = read_record(path) if names else record
    if not stored_record:
        raise ConfigError(
            f"{path} does not record which encoder made its features: name another out"
        )
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
        there, here = (
            f"{path} has features of {stored_record.get('encoder')!r}",
            f"not of {record['encoder']!r}",
        )
        raise ConfigError(f"{there}, {here} that are asked for: {differences}; name another out")
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


@torch.inference_mode()
def _grid_shape(network: Any, encoder: str) -> tuple[int, ...]:
    """H, W, D of the encoder's grids, from a forward pass of a blank image."""
    side, device = network.preprocessing.size, next(network.parameters()).device
    shape = tuple(network(torch.zeros(1, 3, side, side, device=device)).shape)
    if len(shape) != 4 or shape[0] != 1:
        raise ConfigError(
            f"encoder {encoder!r} makes {list(shape)} of one image: expected a grid [1, H, W, D]"
        )
    return shape[1:]


def _encode_images(
    network: Any,
    images: Mapping[str, str],
    batch_size: int,
    num_workers: int,
    view: Callable[..., Tensor],
) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
    """Yield id, ``_image_hashes`` and grid [H, W, D] of every image; ``view(pixels, image_id=…)`` augments pixels."""
    names, device = list(images), next(network.parameters()).device
    batches = [names[first : first + batch_size] for first in range(0, len(names), batch_size)]

    def read(name: str) -> tuple[str, Tensor]:
        """Hashes, taken first, so that a file replaced meanwhile does not fit; preprocessed pixels [3, S, S]."""
        try:
            hashes = _image_hashes(images[name])
            return hashes, view(pixels(images[name], network.preprocessing), image_id=name)
        except RewardError as error:
            raise DataError(str(error)) from error

    with ThreadPoolExecutor(num_workers) as pool:
        ahead = pool.map(read, batches[0])
        for batch, following in zip(batches, [*batches[1:], []], strict=True):
            hashes, inputs = zip(*ahead, strict=True)
            ahead = pool.map(read, following)  # while this batch is encoded
            with torch.inference_mode():
                grids = network(torch.stack(inputs).to(device)).float().cpu().numpy()
            yield from zip(batch, hashes, grids, strict=True)


def _reserve(file: BinaryIO, size: int) -> None:
    """Take ``size`` bytes of the disk for a file. Raises ``OSError`` where there are fewer."""
    if hasattr(os, "posix_fallocate"):  # macOS has none
        os.posix_fallocate(file.fileno(), 0, size)


def _write_hdf5(path: Path, folder: Path, record: Mapping[str, Any]) -> None:
    """Write the HDF5 file anew: the features in ``folder``, and what it has of other images already.

    The space is reserved first, and again once HDF5 has emptied the file: HDF5 cannot close a file whose disk is full,
    and crashes when the process ends.
    """
    names = sorted(_finished_ids(folder, record))
    size = (
        sum((folder / f"{name}.npz").stat().st_size + HDF5_OVERHEAD for name in names)
        + 2 * HDF5_OVERHEAD
    )
    size += path.stat().st_size if path.exists() else 0
    with atomic_write(path) as file:
        _reserve(file, size)
        with import_h5py(path).File(file.name, "w", locking=False) as target:
            _reserve(file, size)
            _fill_hdf5(target, names, folder, path)
            target.attrs["encoder"] = json.dumps(record)


def _fill_hdf5(target: Any, names: Sequence[str], folder: Path, path: Path) -> None:
    """Copy the features of ``names`` from ``folder``, and of all others from the file ``path``, if there is one."""
    for name in progress(names, f"writing {path.name}", "image"):
        with np.load(folder / f"{name}.npz") as stored:
            target[KEY.format(name)] = stored["features"]
            if "image" in stored:
                target[KEY.format(name)].attrs["image"] = str(stored["image"])
    if path.exists():
        with open_hdf5(path) as before:
            _copy_others(before, target)


def _copy_others(before: Any, target: Any) -> None:
    """Copy what one open HDF5 file has and the other has not; leave out, with a warning, what is not in the file."""
    for key in before:
        if key not in target:
            try:
                source = hdf5_object(before, key)
                if hasattr(source, "shape"):
                    check_stored(source, f"{before.filename}, key {key!r}")
            except DataError as error:
                logger.warning("left out: %s", error)
                continue
            before.copy(source, target, key)
