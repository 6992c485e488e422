"""Karpathy JSON: the format of the standard splits of COCO, Flickr8k, Flickr30k and UCM-Captions."""

import itertools
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rl_caption.data.base import DataError, Row, Splits
from rl_caption.data.files import read_records
from rl_caption.data.formats import add_features, grouped_by_split

_EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".png",
    ".tif",
    ".tiff",
    ".webp",
    ".bmp",
    ".JPG",
    ".JPEG",
    ".PNG",
    ".TIF",
)


class _Layout(NamedTuple):
    """How ``filepath`` and ``filename`` of a record become a path; the fields are named like the options."""

    image_root: Path
    image_extension: str | None
    flatten: bool

    def path(self, filepath: str, filename: str) -> str:
        name = (
            os.path.splitext(filename)[0] + self.image_extension
            if self.image_extension
            else filename
        )
        return os.path.join(self.image_root, "" if self.flatten else filepath, name)


class KarpathyData(Splits):
    """A Karpathy JSON file as a ``DataModule``.

    A record's ``image_id`` is its ``cocoid``, or else its ``imgid``, as a string. Its references are the ``raw``
    sentences, or the joined ``tokens`` of a sentence without ``raw``. Its image is
    ``image_root / filepath / filename``, unless an option says otherwise; nothing is guessed.

    Args:
        path: the JSON file, or a folder that holds exactly one ``dataset*.json``.
        image_root: the folder of the images, relative to the JSON file's folder; None is that folder itself.
        image_extension: replaces the extension of every ``filename``, such as ``.jpg`` where the JSON says ``.tif``.
        flatten: leave out ``filepath``: all images lie in ``image_root``.
        restval_as_train: add the split ``restval`` (the rest of COCO's validation images) to ``train``.
        features_root: the folder, or the HDF5 file, of region features; rows then carry ``features``.
        max_images: keep only the first rows of a split, such as ``{"train": 1000}``.
        features_kwargs: how the features are stored and read, arguments of ``FeatureOptions``. A record's ``width`` and
            ``height``, in pixels, are the image's size where boxes need it.

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
        self._layout = _Layout(self.path.parent / (image_root or ""), image_extension, flatten)
        rows = grouped_by_split(self._read_rows(restval_as_train), self.path, max_images)
        add_features(rows, features_root, features_kwargs)
        super().__init__(rows, self.path)

    def _read_rows(self, restval_as_train: bool) -> Iterator[tuple[str, Row]]:
        for record in read_records(self.path):
            image = self._layout.path(record.filepath, record.filename)
            row: Row = {
                "image_id": record.image_id,
                "image": image,
                "references": record.references,
            }
            if record.size is not None:
                row["size"] = record.size
            yield "train" if record.split == "restval" and restval_as_train else record.split, row

    def explain_missing(self, missing: Sequence[str]) -> str:
        """Say which options would find the ``missing`` image files.

        Tries other folders, extensions and values of ``flatten``, as few changes as possible, and names those with
        which more of the dataset's images are found than now.
        """
        now, folder = self._layout, self.path.parent
        files = {
            now.path(record.filepath, record.filename): record[2:4]
            for record in read_records(self.path)
        }
        used = {str(row["image"]) for rows in self._rows.values() for row in rows}
        names = [name for path, name in files.items() if path in used]
        lost = [files[path] for path in dict.fromkeys(missing) if path in files][:3]
        present = sum(map(os.path.isfile, used))
        roots = [
            folder,
            *sorted(child for child in folder.iterdir() if child.is_dir())[:50],
            now.image_root,
        ]
        others = map(_Layout._make, itertools.product(roots, (None, *_EXTENSIONS), (False, True)))
        for layout in sorted(others, key=lambda other: sum(map(operator.ne, other, now))):
            place = next(
                (path for path in (layout.path(*name) for name in lost) if os.path.isfile(path)),
                None,
            )
            if place is None:
                continue
            count = sum(os.path.isfile(layout.path(*name)) for name in names)
            if count > present:
                root = os.path.relpath(layout.image_root, folder)
                values = (root, layout.image_extension or "null", str(layout.flatten).lower())
                changed = zip(layout._fields, values, layout, now, strict=True)
                options = " and ".join(
                    f"data.{key}: {text}" for key, text, new, old in changed if new != old
                )
                return f"found {os.path.relpath(place, folder)}: set {options} (finds {count} of {len(names)} images)"
        if not now.image_root.is_dir():
            return f"{now.image_root} is not a folder: set data.image_root, relative to {folder}"
        return f"no other extension or folder beside {self.path} has them: complete the images"


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
