"""Make region features: unpack published TSV files, or encode images with a frozen encoder."""

import argparse
import base64
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from rewards.base import naming
from rewards.files import atomic_write
from rl_caption.data.base import DataError
from rl_caption.data.features import as_image_features, as_stored, check_boxes, check_width, finite
from rl_caption.data.files import check_space
from rl_caption.data.plain_files import check_name, json_object, parse_json

logger = logging.getLogger(__name__)


def convert_tsv(
    paths: Sequence[str | Path], out: str | Path, dim: int | None = None, dtype: str = "float32"
) -> tuple[int, int]:
    """Write ``OUT/<image_id>.npz`` for every line of TSV files.

    The layout is recognised by its columns: bottom-up attention (``image_id, image_w, image_h, num_boxes, boxes,
    features``), LXMERT (ten columns, with objects and attributes) and VinVL (``image_id`` and JSON with ``num_boxes``
    and ``features``; or ``image_id, num_boxes, features``). Arrays are base64 of float32. Existing files are kept
    where they have the features of the image's first usable line, so an interrupted conversion continues; damaged ones
    are written again. Published files have lines that are cut off, and the same image whole further down.

    Args:
        paths: the TSV files.
        out: the folder to write to.
        dim: the size of a region feature; None is that of the files in ``out``, or else of the first image.
        dtype: of the written features: ``float32``, or ``float16`` (half the space).

    Returns:
        How many images were written, and how many lines were of images that were there already.

    Raises:
        DataError: a line has another layout or its arrays do not fit (the message names file, line and image), ``out``
            has features of another size or other ones of the same image, or the disk has too little space.
    """
    (folder := Path(out)).mkdir(parents=True, exist_ok=True)
    names = (
        name for name in os.listdir(folder) if name.endswith(".npz") and not name.startswith(".")
    )
    old, converted = {name.removesuffix(".npz") for name in names}, set[str]()
    dim = _stored_dim(folder, old, dim)
    _check_space(paths, folder, old, dtype)
    written, kept, bad = 0, 0, dict[str, DataError]()
    for path in paths:
        for number, columns in _lines(Path(path)):
            image_id = columns[0].decode(errors="replace")
            where = f"{path}, line {number}, image {image_id!r:.80}"
            check_name(image_id, where)
            if image_id in converted:
                kept += 1
                continue
            try:
                arrays = _arrays(columns, where)
                check_width(arrays["features"].shape[1], dim, arrays["features"].shape, where)
                finite(arrays["features"], "features", where)
                stored = as_stored(arrays["features"], dtype, where)
            except DataError as error:
                if not converted:  # a file of another layout, say
                    raise
                bad.setdefault(image_id, error)
                continue
            dim = arrays["features"].shape[1]
            path_out = folder / f"{image_id}.npz"
            if path_out.exists() and _is_stored(arrays["features"], path_out, image_id, where):
                kept += 1  # also where another process wrote it meanwhile
            else:
                with atomic_write(path_out) as file:
                    np.savez(file, **arrays | {"features": stored})
                written += 1
            converted.add(image_id)
    if lost := [error for image_id, error in bad.items() if image_id not in converted]:
        raise DataError(
            f"images without a valid line in the TSV files: {len(lost)}; the first: {lost[0]}"
        )
    return written, kept


def _stored_dim(folder: Path, names: Collection[str], dim: int | None) -> int | None:
    """Size of the features in a folder, of the first file that can be read; ``dim`` where there is none.

    Raises ``DataError`` where it is not ``dim`` (None: any).
    """
    for name in sorted(names):
        stored = as_image_features(folder / f"{name}.npz", name)
        try:
            shape = stored.load().shape
        except DataError:  # the file is written again
            continue
        check_width(shape[1], dim, shape, stored.where)
        return shape[1]
    return dim


def _is_stored(features: NDArray[np.float32], file: Path, image_id: str, where: str) -> bool:
    """Whether a file has these features, perhaps in half precision; False, with a warning, where it is damaged.

    Raises ``DataError`` where it has others.
    """
    try:
        stored = as_image_features(file, image_id).load()
    except DataError as error:
        logger.warning("%s: the features are written again", error)
        return False
    for dtype in ("float32", "float16"):
        with np.errstate(over="ignore"):
            if np.array_equal(features.astype(dtype).astype(np.float32), stored):
                return True
    raise DataError(
        f"{where}: {file} holds different features for this image id: choose another --out"
    )


def _check_space(
    paths: Sequence[str | Path], folder: Path, present: Collection[str], dtype: str
) -> None:
    """Check the disk space before the start. Base64 has four characters for three bytes."""
    text = sum(os.path.getsize(path) for path in paths)
    stored = sum(os.path.getsize(folder / f"{name}.npz") for name in present)
    check_space(folder, text * 3 / 4 * np.dtype(dtype).itemsize / 4 - stored, dtype)


def _lines(path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """Number and columns of every line, with a progress bar over the bytes of the file, or log lines."""
    size = path.stat().st_size
    bar = tqdm(total=size, desc=path.name, unit="B", unit_scale=True, leave=False, disable=None)
    with open(path, "rb") as file, bar:
        for number, line in enumerate(file, start=1):
            bar.update(len(line))
            if bar.disable and number % 10_000 == 0:
                share = 100 * file.tell() / size
                logger.info("%s: %d images, %.0f%% of the file", path.name, number, share)
            if line.strip():
                yield number, line.rstrip(b"\r\n").split(b"\t")


def _arrays(columns: Sequence[bytes], where: str) -> dict[str, Any]:
    with naming(
        f"{where}: expected num_boxes and base64 of float32",
        (ValueError, KeyError, TypeError),
        DataError,
        (DataError,),
    ):
        if len(columns) in (6, 10):
            # LXMERT's files have the height before the width, and what the detector sees in between.
            width, height = map(int, columns[1:3] if len(columns) == 6 else columns[2:0:-1])
            features, boxes = (
                _matrix(text, int(columns[-3])) for text in (columns[-1], columns[-2])
            )
            check_boxes(boxes.shape, len(features), where)
            return {"features": features, "boxes": boxes, "image_w": width, "image_h": height}
        if len(columns) == 3:
            return {"features": _matrix(columns[2], int(columns[1]))}
        if len(columns) == 2:
            item = parse_json(columns[1], where)
            return {"features": _matrix(item["features"], int(item["num_boxes"]))}
    raise DataError(
        f"{where}: {len(columns)} columns, expected 6 (image_id, image_w, image_h, num_boxes, boxes, features), 10 "
        "(those of LXMERT), 3 (image_id, num_boxes, features) or 2 (image_id, JSON)"
    )


def _matrix(text: str | bytes, rows: int) -> NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(text, validate=True), "<f4").reshape(rows, -1)


def read_options(argv: list[str] | None) -> dict[str, Any]:
    """Options of the command line that are set; those of TSV files, or those of an encoder."""
    from rl_caption.data.loader import AUGMENTATIONS

    parser = argparse.ArgumentParser(
        prog="rl-caption prepare_features",
        description="Prepare image features for training (data.features_root): convert published TSV files, or encode "
        "images with a frozen encoder.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "tsv",
        nargs="*",
        metavar="TSV",
        help="region features published with bottom-up attention, LXMERT or VinVL",
    )
    parser.add_argument(
        "--out",
        required=True,
        help="output: a folder for one .npz per image or, with --encoder, also an HDF5 file (.h5, .hdf5)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        help="of the stored features (default: float32 for TSV files, float16 with --encoder)",
    )
    of_tsv, encoder = (
        parser.add_argument_group("with TSV files"),
        parser.add_argument_group("with an encoder"),
    )
    of_tsv.add_argument(
        "--dim",
        type=int,
        help="expected feature size of a region (default: that of the first image)",
    )
    encoder.add_argument("--encoder", metavar="NAME", help="transformers:NAME, open_clip:ARCHITECTURE/TAG, timm:NAME "
                         "or package.module:Class")  # fmt: skip
    encoder.add_argument(
        "--kwargs", metavar="JSON", help="keyword arguments of the encoder, as a JSON object"
    )
    encoder.add_argument(
        "--data",
        metavar="PATH",
        help="images to encode: a Karpathy JSON file, its folder, or a folder of images",
    )
    encoder.add_argument(
        "--image_root",
        metavar="DIR",
        help="folder of the images of a Karpathy JSON, as data.image_root",
    )
    encoder.add_argument(
        "--image_extension",
        metavar=".EXT",
        help="file extension of the images, as data.image_extension",
    )
    encoder.add_argument(
        "--flatten",
        action="store_true",
        default=None,
        help="ignore the folders of image paths, as data.flatten",
    )
    encoder.add_argument(
        "--splits",
        nargs="+",
        metavar="SPLIT",
        help="splits of the Karpathy JSON to encode (default: all)",
    )
    encoder.add_argument("--augment", nargs="+", choices=AUGMENTATIONS, help="encode a randomly augmented view of each "
                         "image (as data.augment) for data.features_kwargs.views")  # fmt: skip
    encoder.add_argument("--seed", type=int, help="random seed of the augmented views (default: 0)")
    encoder.add_argument("--batch_size", type=int, help="images per forward pass (default: 32)")
    encoder.add_argument(
        "--num_workers", type=int, help="number of threads that read images (default: 4)"
    )
    encoder.add_argument(
        "--device",
        help="device of the encoder, such as cpu or cuda:0 (default: a GPU if there is one)",
    )
    options = {
        name: value
        for name, value in vars(parser.parse_args(argv)).items()
        if value not in (None, [])
    }
    encodes = "encoder" in options
    needed = {"encoder", "data"} if encodes else {"tsv"}
    foreign = {"tsv", "dim"} if encodes else {action.dest for action in encoder._group_actions}
    if not needed <= options.keys() or foreign & options.keys():
        parser.error("expected TSV files (and --dim), or --encoder with --data and its options")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command line: ``prepare_features TSV... --out FOLDER``, or ``--encoder NAME --data PATH --out PATH``."""
    options = read_options(argv)
    if "encoder" in options:
        from rl_caption.data.encode_features import encode_features

        written, kept = encode_features(
            **options | {"kwargs": json_object(options.get("kwargs", "{}"), "--kwargs")}
        )
        print(f"{options['out']}: {written:,} images written, {kept:,} images existed already")
        return 0
    written, kept = convert_tsv(options.pop("tsv"), **options)
    print(
        f"{options['out']}: {written:,} images written, {kept:,} lines skipped (their images existed already)"
    )
    return 0
