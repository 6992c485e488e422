"""Make region features: unpack published TSV files, or encode photos with a frozen
image encoder, whose grids [H, W, D] are stored.
"""

import base64
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from rewards.base import naming
from rewards.clip.preprocessing import pixels
from rewards.clip.pretrained import ImageEncoder, load_part
from rewards.files import remove_leftovers
from rewards.images import list_images
from rewards.model_files import fingerprint, read_object
from rl_caption.data.base import DataError, Row
from rl_caption.data.checks import check_row_images
from rl_caption.data.features import check_width, write_features
from rl_caption.data.files import write_json
from rl_caption.data.fingerprint import size_and_time
from rl_caption.data.formats import build_data
from rl_caption.data.plain_files import parse_json, progress
from rl_caption.runtime.errors import ConfigError

RECORD = "encoder.json"
"""File of the encoder's settings in the folder of the features."""


def encode_features(config: Any) -> tuple[int, int]:
    """Write the grid of every image, as a ``PrepareFeaturesConfig`` says; return the
    numbers of images written and kept.

    Images are preprocessed as the encoder requires. Existing features are kept unless
    their image is newer. The file ``ID.npz`` has the array ``features`` [H, W, D].

    Raises:
        ConfigError: the encoder or the device cannot be used, or ``out`` has features
            of another encoder.
        DataError: images are missing or unreadable (found before anything is encoded),
            or a value of a grid is not finite or beyond ``dtype``.
    """
    out, encoder = Path(config.out), config.encoder
    images, dtype = _images(config), config.dtype or "float16"
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    unusable = (ValueError, RuntimeError, AssertionError)
    with naming(f"encoder {encoder!r} on {device!r}", unusable, ConfigError):
        network = load_part(ImageEncoder, encoder, config.kwargs).to(device)
    record: Any = {
        "encoder": encoder,
        "kwargs": config.kwargs,
        "dtype": dtype,
        "preprocessing": repr(network.preprocessing),
        "weights": fingerprint(network.state_dict()),
    }
    remove_leftovers(out)
    mtimes = {file.stem: size_and_time(file)[1] for file in out.glob("[!.]*.npz")}
    stored = read_object(out / RECORD) if (out / RECORD).is_file() else {}
    if mtimes and stored != record:
        raise ConfigError(
            f"{out} has features of another encoder ({stored}); name another out"
        )
    pending = [
        (name, path)
        for name, path in images.items()
        if mtimes.get(name, -1) < size_and_time(path)[1]
    ]
    if pending:
        rows = [Row(image_id=name, image=path, references=[]) for name, path in pending]
        check_row_images(rows, "the encoder")
        write_json(out / RECORD, record)
        loader: Any = DataLoader(
            pending,  # type: ignore[arg-type]
            config.batch_size,
            num_workers=config.num_workers,
            collate_fn=partial(_read_batch, network.preprocessing),
        )
        for names, inputs in progress(loader, "encoding images"):
            with torch.inference_mode():
                grids = network(inputs.to(device)).float().cpu().numpy()
            for name, grid in zip(names, grids, strict=True):
                where = f"image {name!r} ({images[name]})"
                write_features(_file(out, name, where), grid, dtype, where)
    return len(pending), len(images) - len(pending)


def _read_batch(
    preprocessing: Any, images: Sequence[tuple[str, str]]
) -> tuple[list[str], Tensor]:
    """Ids and preprocessed pixels [B, 3, S, S] of images."""
    squares = [pixels(path, preprocessing) for _, path in images]
    return [name for name, _ in images], torch.stack(squares)


def _images(config: Any) -> dict[str, str]:
    """Image id -> file, of the rows of ``data`` or a folder of images."""
    path = Path(config.data.path)
    if path.is_dir() and not any(path.glob("dataset*.json")):
        pairs = [(file.stem, str(file)) for file in sorted(list_images(path))]
    else:
        data = build_data(config.data)
        rows = (row for split in config.splits or data for row in data[split])
        pairs = [(row["image_id"], str(row["image"])) for row in rows]
    images: dict[str, str] = {}
    for name, file in pairs:
        if images.setdefault(name, file) != file:
            raise DataError(
                f"{path}: image {name!r} is {images[name]!r} and {file!r}: expected one"
            )
    return images


def convert_tsv(paths: Sequence[str | Path], out: Path, dtype: str = "float32") -> int:
    """Write ``OUT/<image_id>.npz`` for every image of TSV files, over files that are there.

    The layout is recognised by its columns: bottom-up attention (``image_id, image_w,
    image_h, num_boxes, boxes, features``), LXMERT (ten columns, with objects and
    attributes) and VinVL (``image_id`` and JSON with ``num_boxes`` and ``features``; or
    ``image_id, num_boxes, features``). Arrays are base64 of float32. The first usable
    line of an image counts: published files have lines that are cut off, and the same
    image whole further down.

    Args:
        paths: the TSV files.
        out: the folder to write to.
        dtype: of the written features: ``float32``, or ``float16`` (half the space).

    Returns:
        Number of images written.

    Raises:
        DataError: a line has another layout or its arrays do not fit, or their size is
            not the first image's (the message names file, line and image).
    """
    dim: int | None = None
    converted = set[str]()
    bad: dict[str, DataError] = {}
    for path in paths:
        with open(path, "rb") as file:
            for number, line in enumerate(progress(file, f"{path}"), start=1):
                columns = line.rstrip(b"\r\n").split(b"\t")
                image_id = columns[0].decode(errors="replace")
                where = f"{path}, line {number}, image {image_id!r:.80}"
                if not line.strip() or image_id in converted:
                    continue
                place = _file(out, image_id, where)
                try:
                    features = _features(columns, where)
                    check_width(features.shape, dim, where)
                    write_features(place, features, dtype, where)
                except DataError as error:
                    if not converted:  # a file of another layout, say
                        raise
                    bad.setdefault(image_id, error)
                    continue
                dim = features.shape[1]
                converted.add(image_id)
                bad.pop(image_id, None)
    for first in bad.values():
        raise DataError(f"images without a valid line: {len(bad)}; the first: {first}")
    return len(converted)


def _file(folder: Path, image_id: str, where: str) -> Path:
    """The file of an image's features. Raises ``DataError`` for an id with a path, which
    a published file could use to write elsewhere.
    """
    if os.sep in image_id:
        raise DataError(f"{where}: expected an id that can be a file's name")
    return folder / f"{image_id}.npz"


def _features(columns: Sequence[bytes], where: str) -> NDArray[np.float32]:
    """The features [R, D] of a line."""
    expected = "expected 2, 3, 6 or 10 columns, num_boxes and base64 of float32"
    with naming(f"{where}: {expected}", (ValueError, KeyError, TypeError), DataError):
        if len(columns) == 2:
            item = parse_json(columns[1], where)
            text, rows = item["features"], item["num_boxes"]
        else:
            text, rows = columns[-1], columns[{3: 1, 6: 3, 10: 7}[len(columns)]]
        return np.frombuffer(base64.b64decode(text, validate=True), "<f4").reshape(
            int(rows), -1
        )


def main(config: Any) -> int:
    """Unpack files, or encode photos, as a ``PrepareFeaturesConfig`` says."""
    if config.encoder is None:
        out, dtype = Path(config.out), config.dtype or "float32"
        written, kept = convert_tsv(config.tsv, out, dtype), 0
    else:
        written, kept = encode_features(config)
    print(f"{config.out}: {written:,} images written, {kept:,} kept")
    return 0
