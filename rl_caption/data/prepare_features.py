"""Make region features: unpack published TSV files, or encode images with a frozen encoder."""

import argparse
import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewards.base import naming
from rewards.files import atomic_write
from rl_caption.data.base import DataError
from rl_caption.data.features import as_stored, check_width
from rl_caption.data.file_checks import progress
from rl_caption.data.plain_files import check_name, json_object, parse_json


def convert_tsv(
    paths: Sequence[str | Path], out: str | Path, dtype: str = "float32"
) -> tuple[int, int]:
    """Write ``OUT/<image_id>.npz`` for every image of TSV files, over files that are there.

    The layout is recognised by its columns: bottom-up attention (``image_id, image_w, image_h,
    num_boxes, boxes, features``), LXMERT (ten columns, with objects and attributes) and VinVL
    (``image_id`` and JSON with ``num_boxes`` and ``features``; or ``image_id, num_boxes,
    features``). Arrays are base64 of float32. The first usable line of an
    image counts: published files have lines that are cut off, and the same image whole further
    down.

    Args:
        paths: the TSV files.
        out: the folder to write to.
        dtype: of the written features: ``float32``, or ``float16`` (half the space).

    Returns:
        How many images were written, and how many lines were of images that were written already.

    Raises:
        DataError: a line has another layout or its arrays do not fit, or their size is not that of
            the first image (the message names file, line and image).
    """
    (folder := Path(out)).mkdir(parents=True, exist_ok=True)
    dim: int | None = None
    converted, repeated, bad = set[str](), 0, dict[str, DataError]()
    for path in map(Path, paths):
        for where, columns in _lines(path):
            image_id = columns[0].decode(errors="replace")
            where = f"{where}, image {image_id!r:.80}"
            check_name(image_id, where)
            if image_id in converted:
                repeated += 1
                continue
            try:
                features = _features(columns, where)
                check_width(features.shape[1], dim, features.shape, where)
                stored = as_stored(features, dtype, where)
            except DataError as error:
                if not converted:  # a file of another layout, say
                    raise
                bad.setdefault(image_id, error)
                continue
            dim = features.shape[1]
            with atomic_write(folder / f"{image_id}.npz") as file:
                np.savez(file, features=stored)
            converted.add(image_id)
    if lost := [error for image_id, error in bad.items() if image_id not in converted]:
        raise DataError(
            f"images without a valid line in the TSV files: {len(lost)}; the first: {lost[0]}"
        )
    return len(converted), repeated


def _lines(path: Path) -> Iterator[tuple[str, list[bytes]]]:
    """``FILE, line N`` and columns of every line."""
    with open(path, "rb") as file:
        for number, line in enumerate(progress(file, path.name, "line"), start=1):
            if line.strip():
                yield f"{path}, line {number}", line.rstrip(b"\r\n").split(b"\t")


def _features(columns: Sequence[bytes], where: str) -> NDArray[np.float32]:
    """The features [R, D] of a line."""
    if len(columns) not in (2, 3, 6, 10):
        raise DataError(
            f"{where}: {len(columns)} columns, expected 6 (image_id, image_w, image_h, num_boxes, "
            f"boxes, features), 10 "
            "(those of LXMERT), 3 (image_id, num_boxes, features) or 2 (image_id, JSON)"
        )
    expected = f"{where}: expected num_boxes and base64 of float32"
    with naming(expected, (ValueError, KeyError, TypeError), DataError):
        if len(columns) == 2:
            item = parse_json(columns[1], where)
            return _matrix(item["features"], int(item["num_boxes"]))
        return _matrix(columns[-1], int(columns[1 if len(columns) == 3 else -3]))


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
        "tsv", nargs="*", metavar="TSV", help="files of bottom-up attention, LXMERT or VinVL"
    )
    parser.add_argument("--out", required=True, help="output: a folder for one .npz per image")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        help="of the stored features (default: float32 for TSV files, float16 with --encoder)",
    )
    encoder = parser.add_argument_group("with an encoder")
    for name, metavar, text in (
        (
            "encoder",
            "NAME",
            "transformers:NAME, open_clip:ARCHITECTURE/TAG or package.module:Class",
        ),
        ("kwargs", "JSON", "keyword arguments of the encoder, as a JSON object"),
        (
            "data",
            "PATH",
            "images to encode: a Karpathy JSON file, its folder, or a folder of images",
        ),
        ("image_root", "DIR", "folder of the images of a Karpathy JSON, as data.image_root"),
        ("image_extension", ".EXT", "file extension of the images, as data.image_extension"),
        ("device", "DEVICE", "such as cpu or cuda:0 (default: a GPU if there is one)"),
    ):
        encoder.add_argument(f"--{name}", metavar=metavar, help=text)
    for name, text in (
        ("batch_size", "images per forward pass (default: 32)"),
        ("num_workers", "threads that read images (default: 4)"),
        ("seed", "random seed of the augmented views (default: 0)"),
    ):
        encoder.add_argument(f"--{name}", type=int, help=text)
    encoder.add_argument("--flatten", action="store_true", default=None, help="as data.flatten")
    encoder.add_argument("--splits", nargs="+", help="of the Karpathy JSON (default: all)")
    encoder.add_argument(
        "--augment",
        nargs="+",
        choices=AUGMENTATIONS,
        help="encode a randomly augmented view of each image for data.features_kwargs.views",
    )
    options = {
        name: value
        for name, value in vars(parser.parse_args(argv)).items()
        if value not in (None, [])
    }
    if "encoder" in options:
        unfit = not options.keys() >= {"data"} or "tsv" in options
    else:
        unfit = not options.keys() <= {"tsv", "out", "dtype"} or "tsv" not in options
    if unfit:
        parser.error("expected TSV files, or --encoder with --data and its options")
    return options


def main(argv: list[str] | None = None) -> int:
    """Run the command line: ``prepare_features TSV... --out FOLDER``, or ``--encoder NAME --data
    PATH --out FOLDER``.
    """
    options = read_options(argv)
    if "encoder" in options:
        from rl_caption.data.encode_features import encode_features

        options["kwargs"] = json_object(options.get("kwargs", "{}"), "--kwargs")
        written, kept = encode_features(**options)
        print(f"{options['out']}: {written:,} images written, {kept:,} images existed already")
    else:
        written, repeated = convert_tsv(options.pop("tsv"), **options)
        print(f"{options['out']}: {written:,} images written, {repeated:,} repeated lines skipped")
    return 0
