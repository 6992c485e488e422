"""Karpathy JSON: the format of the standard splits of COCO, Flickr8k, Flickr30k and UCM-Captions."""

import os
from pathlib import Path
from typing import Any

from rl_caption.data.base import DataError, Row, Splits
from rl_caption.data.files import read_records
from rl_caption.data.formats import add_features, grouped_by_split


class KarpathyData(Splits):
    """A Karpathy JSON file as a ``DataModule``.

    A record's ``image_id`` is its ``cocoid``, or else its ``imgid``, as a string. Its references
    are the ``raw`` sentences, or the joined ``tokens`` of a sentence without ``raw``. Its image is
    ``image_root / filepath / filename``, unless an option says otherwise; nothing is guessed.

    Args:
        path: the JSON file, or a folder that holds exactly one ``dataset*.json``.
        image_root: the folder of the images, relative to the JSON file's folder; None is that
            folder itself.
        image_extension: replaces the extension of every ``filename``, such as ``.jpg`` where the
            JSON says ``.tif``.
        flatten: leave out ``filepath``: all images lie in ``image_root``.
        restval_as_train: add the split ``restval`` (the rest of COCO's validation images) to
            ``train``.
        features_root: the folder, or the HDF5 file, of region features; rows then carry
            ``features``.
        max_images: keep only the first rows of a split, such as ``{"train": 1000}``.
        features_kwargs: how the features are stored and read, arguments of ``FeatureOptions``. A
            record's ``width`` and ``height``, in pixels, are the image's size where boxes need it.

    Raises:
        DataError: the file is not Karpathy JSON. Images are checked by ``check_data``, not here.
    """

    def __init__(
        self,
        path: str | Path,
        image_root: str | Path | None = None,
        image_extension: str | None = None,
        flatten: bool = False,
        restval_as_train: bool = True,
        features_root: str | Path | None = None,
        max_images: dict[str, int] | None = None,
        features_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.path = _json_file(Path(path))
        root = self.path.parent / (image_root or "")
        pairs = []
        for record in read_records(self.path):
            name = record.filename
            if image_extension:
                name = os.path.splitext(name)[0] + image_extension
            row: Row = {
                "image_id": record.image_id,
                "image": os.path.join(root, "" if flatten else record.filepath, name),
                "references": record.references,
            }
            if record.size is not None:
                row["size"] = record.size
            is_train = record.split == "restval" and restval_as_train
            pairs.append(("train" if is_train else record.split, row))
        rows = grouped_by_split(pairs, self.path, max_images)
        add_features(rows, features_root, features_kwargs)
        super().__init__(rows, self.path)


def _json_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = sorted(path.glob("dataset*.json"))
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise DataError(
            f"{path} must hold exactly one dataset*.json, found {names}: set data.path to the file"
        )
    return files[0]
