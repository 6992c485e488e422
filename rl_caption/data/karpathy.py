"""Karpathy JSON: the format of the standard splits of COCO, Flickr8k, Flickr30k and UCM-Captions."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rl_caption.data.base import DataError, ImageSize, Row
from rl_caption.data.formats import add_features, grouped_by_split, rows_of
from rl_caption.data.plain_files import check_text, shown, stream_list

_EXTENSIONS = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp", ".bmp", ".JPG", ".JPEG", ".PNG", ".TIF")


@dataclass(frozen=True)
class _Layout:
    """How a record's ``filepath`` and ``filename`` become a path."""

    root: Path
    extension: str | None
    flatten: bool

    def path(self, filepath: str, filename: str) -> str:
        name = os.path.splitext(filename)[0] + self.extension if self.extension else filename
        return os.path.join(self.root, name) if self.flatten else os.path.join(self.root, filepath, name)


class KarpathyData:
    """A Karpathy JSON file as a ``DataModule``.

    A record's ``image_id`` is its ``cocoid``, or else its ``imgid``, as a string. Its references are the ``raw``
    sentences, or the joined ``tokens`` of a sentence without ``raw``. Its image is
    ``image_root / filepath / filename``. Where the files lie differently an option says so; nothing is guessed.

    Args:
        path: the JSON file, or a folder that holds exactly one ``dataset*.json``.
        image_root: the folder of the images, relative to the JSON file's folder; None is that folder itself.
        image_extension: replaces the extension of every ``filename``, such as ``.jpg`` where the JSON says ``.tif``.
        flatten: leave out ``filepath``: all images lie in ``image_root``.
        restval_as_train: the split ``restval`` (the rest of COCO's validation images) counts as ``train``.
        features_root: the folder, or the HDF5 file, of region features; rows then carry ``features``.
        max_images: at most so many rows of a split, the first ones, such as ``{"train": 1000}``.
        features_kwargs: how the features are stored and read, arguments of ``FeatureOptions``. A record's ``width`` and
            ``height``, in pixels, are the image's size where boxes need it.

    Raises:
        DataError: the file is missing, not Karpathy JSON, or an option is wrong. Images are not looked for here: that
            is ``check_data``.
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
        if image_extension is not None and not (image_extension.startswith(".") and len(image_extension) > 1):
            raise DataError(f"data.image_extension is {image_extension!r}: expected a dot and letters, such as .jpg")
        self.path = _json_file(Path(path))
        self._layout = _Layout(self.path.parent / (image_root or ""), image_extension, flatten)
        self._rows = grouped_by_split(self._read_rows(restval_as_train), self.path, max_images)
        add_features(self._rows, features_root, features_kwargs)

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits in the file, ``train`` first."""
        return tuple(self._rows)

    def split(self, name: str) -> Sequence[Row]:
        """Return the rows of one split, in the order of the file. Raises ``DataError`` for an unknown name."""
        return rows_of(self._rows, name, self.path)

    def _read_rows(self, restval_as_train: bool) -> Iterator[tuple[str, Row]]:
        for record in read_records(self.path):
            image = self._layout.path(record.filepath, record.filename)
            row: Row = {"image_id": record.image_id, "image": image, "references": record.references}
            if record.size is not None:
                row["size"] = record.size
            yield "train" if record.split == "restval" and restval_as_train else record.split, row

    def explain_missing(self, missing: Sequence[str]) -> str:
        """Say which option would find the image files that are ``missing``.

        Other folders, extensions and values of ``flatten`` are tried; one is named only where more of the dataset's
        images are found with it than without.
        """
        used = {str(row["image"]) for rows in self._rows.values() for row in rows}
        records = [(record.filepath, record.filename) for record in read_records(self.path)]
        records = [record for record in records if self._layout.path(*record) in used]
        absent = set(missing)
        wanted = [record for record in records if self._layout.path(*record) in absent][:3]
        present = sum(os.path.isfile(self._layout.path(*record)) for record in records)
        for layout in self._other_layouts():
            found = next((path for path in (layout.path(*record) for record in wanted) if os.path.isfile(path)), None)
            if found is None:
                continue
            count = sum(os.path.isfile(layout.path(*record)) for record in records)
            if count > present:
                shown = os.path.relpath(found, self.path.parent)
                return f"found {shown}: set {self._change(layout)} (finds {count} of {len(records)} images)"
        if not self._layout.root.is_dir():
            return f"{self._layout.root} is not a folder: set data.image_root, relative to {self.path.parent}"
        return f"no other extension or folder beside {self.path} has them: complete the images"

    def _other_layouts(self) -> Iterator[_Layout]:
        """Yield layouts that differ in one setting, then in two, then in three."""
        now, folder = self._layout, self.path.parent
        roots = [folder, *sorted(child for child in folder.iterdir() if child.is_dir())[:50]]
        changes: list[list[dict[str, Any]]] = [
            [{"extension": extension} for extension in (None, *_EXTENSIONS) if extension != now.extension],
            [{"flatten": not now.flatten}],
            [{"root": root} for root in roots if root != now.root],
        ]
        for size in (1, 2, 3):
            for chosen in itertools.combinations(changes, size):
                for parts in itertools.product(*chosen):
                    yield replace(now, **{key: value for part in parts for key, value in part.items()})

    def _change(self, layout: _Layout) -> str:
        words = []
        if layout.root != self._layout.root:
            words.append(f"data.image_root: {os.path.relpath(layout.root, self.path.parent)}")
        if layout.extension != self._layout.extension:
            words.append(f"data.image_extension: {layout.extension or 'null'}")
        if layout.flatten != self._layout.flatten:
            words.append(f"data.flatten: {str(layout.flatten).lower()}")
        return " and ".join(words)


class Record(NamedTuple):
    """What a record of Karpathy JSON says of an image."""

    split: str
    image_id: str
    filepath: str
    """Empty where there is none."""
    filename: str
    references: list[str]
    size: ImageSize | None


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a Karpathy JSON file. Raises ``DataError`` where one is wrong, or the file is not JSON."""
    for index, item in enumerate(stream_list(path, "images")):
        where = f"{path}, images[{index}]"
        if not isinstance(item, dict):
            raise DataError(f"{where} is {shown(item)}, expected an object")
        filepath, sides = item.get("filepath") or "", (item.get("width"), item.get("height"))
        if not isinstance(filepath, str):
            raise DataError(f"{where}: 'filepath' is {shown(filepath)}, expected a string")
        yield Record(
            _text(item, "split", where),
            _image_id(item, where),
            check_text(filepath, f"{where}: 'filepath'"),
            _text(item, "filename", where),
            _references(item, where),
            (sides[0], sides[1]) if isinstance(sides[0], int | float) and isinstance(sides[1], int | float) else None,
        )


def _json_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"data.path {str(path)!r} does not exist: expected a Karpathy JSON file, or its folder")
    found = sorted(path.glob("dataset*.json"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise DataError(f"{path} must hold exactly one dataset*.json, found {names}: set data.path to the file")
    return found[0]


def _text(record: dict[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: {key!r} is {shown(value)}, expected a string that is not empty")
    return check_text(value, f"{where}: {key!r}")


def _image_id(record: dict[str, Any], where: str) -> str:
    for key in ("cocoid", "imgid"):
        value = record.get(key)
        if isinstance(value, int | str) and not isinstance(value, bool) and value != "":
            return check_text(str(value), f"{where}: {key!r}")
        if value is not None:
            raise DataError(f"{where}: {key!r} is {shown(value)}, expected an integer or a string")
    raise DataError(f"{where}: no 'cocoid' and no 'imgid', expected one of them")


def _references(record: dict[str, Any], where: str) -> list[str]:
    sentences = record.get("sentences", [])
    if not isinstance(sentences, list):
        raise DataError(f"{where}: 'sentences' is {shown(sentences)}, expected a list")
    return [_caption(sentence, f"{where}, sentences[{index}]") for index, sentence in enumerate(sentences)]


def _caption(sentence: Any, where: str) -> str:
    if isinstance(sentence, dict):
        raw, tokens = sentence.get("raw"), sentence.get("tokens")
        if isinstance(raw, str):
            return check_text(raw, where)
        if raw is None and isinstance(tokens, list) and all(isinstance(token, str) for token in tokens):
            return check_text(" ".join(tokens), where)
    raise DataError(f"{where} is {shown(sentence)}, expected an object with the string 'raw' or the list 'tokens'")
