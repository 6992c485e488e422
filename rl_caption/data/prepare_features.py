"""Make region features: unpack published TSV files, or encode images with a frozen encoder."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewards.base import naming
from rl_caption.data.base import DataError
from rl_caption.data.features import check_width, write_features
from rl_caption.data.plain_files import check_name, parse_json, progress


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
    dim: int | None = None
    repeated = 0
    converted = set[str]()
    bad: dict[str, DataError] = {}
    for path in map(Path, paths):
        with open(path, "rb") as file:
            for number, line in enumerate(progress(file, path.name, "line"), start=1):
                if not line.strip():
                    continue
                columns = line.rstrip(b"\r\n").split(b"\t")
                image_id = columns[0].decode(errors="replace")
                where = f"{path}, line {number}, image {image_id!r:.80}"
                check_name(image_id, where)
                if image_id in converted:
                    repeated += 1
                    continue
                try:
                    features = _features(columns, where)
                    check_width(features.shape, dim, where)
                    write_features(
                        Path(out) / f"{image_id}.npz", features, dtype, where
                    )
                except DataError as error:
                    if not converted:  # a file of another layout, say
                        raise
                    bad.setdefault(image_id, error)
                    continue
                dim = features.shape[1]
                converted.add(image_id)
    lost = [error for image_id, error in bad.items() if image_id not in converted]
    if lost:
        raise DataError(
            f"images without a valid line: {len(lost)}; the first: {lost[0]}"
        )
    return len(converted), repeated


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
    options = config.model_dump(exclude={"trust"}, exclude_unset=True)
    if config.encoder is not None:
        from rl_caption.data.encode_features import encode_features

        written, kept = encode_features(**options)
        print(
            f"{config.out}: {written:,} images written, {kept:,} images existed already"
        )
    else:
        written, repeated = convert_tsv(
            config.tsv, config.out, config.dtype or "float32"
        )
        print(
            f"{config.out}: {written:,} images written, {repeated:,} repeated lines skipped"
        )
    return 0
