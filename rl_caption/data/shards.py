"""Tar shards in webdataset's layout: files ``KEY.jpg`` beside ``KEY.txt`` or ``KEY.json``, one sample after the other.

When the data set is opened, the headers of all archives are read for the place of each image, and texts are kept in
memory. A row is then read wherever it is, so that the order stays a pure function of (seed, step), resumed or not.
"""

import hashlib
import json
import tarfile
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from rewards.base import naming
from rewards.images import IMAGE_SUFFIXES
from rl_caption.data.base import DataError, Row, RowView, Splits
from rl_caption.data.file_checks import progress
from rl_caption.data.hub import decode_image, stored_size
from rl_caption.data.jsonl import read_row, renamed_columns
from rl_caption.data.plain_files import json_object, shown
from rl_caption.data.splits import (
    STANDARD_SPLITS,
    SplitNames,
    check_one_source,
    regrouped,
    standard_split,
)
from rl_caption.data.unpaired import Texts

DAMAGED = (tarfile.TarError, OSError, ValueError, EOFError)
"""What reading a damaged archive raises."""


def shards(
    path: str, columns: dict[str, str] | None = None, splits: dict[str, str] | None = None
) -> Splits:
    """Read tar archives, whose samples are an image, and a caption (``txt``) or an object (``json``) or both.

    Args:
        path: an archive, which is the split ``train``, or a folder of archives.
        columns: column here -> key of the object (``renamed_columns``), ``txt`` being the text. None is
            ``{references: txt}`` or, without a text, the keys of JSON lines.
        splits: split -> pattern of the names of its archives, such as ``{train: "cc3m-train-*.tar"}``. None goes by
            names ``SPLIT-*.tar`` and ``SPLIT.tar``; where none begins with the name of a split, all are ``train``, or
            each sample is in the split that its object names.

    Raises:
        DataError: an archive is compressed, damaged, or has a sample without an image.
    """
    archives = split_archives(Path(path), splits)
    total = sum(map(len, archives.values()))
    indices = {split: ShardIndex() for split in archives}
    names = ((split, file) for split, files in archives.items() for file in files)
    for split, file in progress(names, "reading headers of shards", total=total):
        indices[split].add(file)
    rows = {
        split: RowView(index.samples, partial(index.row, columns))
        for split, index in indices.items()
    }
    check_one_source(path, columns, splits)
    in_objects = (
        columns is None and splits is None and any(map(ShardIndex.has_splits, indices.values()))
    )
    if not in_objects and "split" not in (columns or {}):
        return Splits(rows, path)
    reader = SplitNames(path)
    named = {split: index.splits(columns, split, reader) for split, index in indices.items()}
    reader.warn()
    return Splits(regrouped(rows, named), path)


def split_archives(path: Path, splits: Mapping[str, str] | None) -> dict[str, list[Path]]:
    """Split -> its archives, in the order of their names. Raises ``DataError`` for an archive of no split."""
    if path.is_file():
        return {"train": [path]}
    if splits is not None:
        return {split: sorted(path.glob(pattern)) for split, pattern in splits.items()}
    files = sorted(path.glob("*.tar"))
    names = {file: standard_split(file.stem.partition("-")[0]) for file in files}
    if not any(name in STANDARD_SPLITS for name in names.values()):
        return {"train": files}
    if others := [file.name for file, name in names.items() if name not in STANDARD_SPLITS]:
        raise DataError(
            f"{path} has the archive {others[0]!r} beside those of splits: say data.kwargs.splits"
        )
    archives: dict[str, list[Path]] = {}
    for file, name in names.items():
        archives.setdefault(name, []).append(file)
    return archives


class ShardIndex:
    """Where the images of the N samples of some archives are, and their texts.

    Attributes:
        samples: N JSON objects with ``key``, and the texts ``txt`` and ``json`` where the sample has them.
    """

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.samples = Texts()
        self.archives, self.offsets, self.sizes = array("i"), array("q"), array("q")

    def add(self, file: Path) -> None:
        """Read the headers and texts of an archive. Raises ``DataError``."""
        for key, members in archive_samples(file):
            texts = {name: text for name, text in members.items() if isinstance(text, str)}
            images = [place for place in members.values() if not isinstance(place, str)]
            where = f"{file}, sample {shown(key)}"
            if len(images) != 1:
                expected = f"one file KEY{', KEY'.join(sorted(IMAGE_SUFFIXES))}"
                raise DataError(f"{where} has {len(images)} images: expected {expected}")
            self.samples.add(json.dumps({"key": key} | texts))
            self.archives.append(len(self.files))
            self.offsets.append(images[0][0])
            self.sizes.append(images[0][1])
        self.files.append(file)

    def has_splits(self) -> bool:
        """Whether an object may name the split of its sample."""
        return any("split" in self.samples[index] for index in range(len(self.samples)))

    def splits(
        self, columns: Mapping[str, str] | None, default: str, names: SplitNames
    ) -> list[str]:
        """The split that each sample's object names, or else ``default``."""
        found = []
        for index in range(len(self.samples)):
            where, _, values = self._values(columns, index, self.samples[index])
            found.append(names.read(values["split"], where) if "split" in values else default)
        return found

    def row(self, columns: Mapping[str, str] | None, index: int, sample: str) -> Row:
        """The row of a sample. Raises ``DataError`` where its texts are wrong."""
        where, name, values = self._values(columns, index, sample)
        _, row = read_row({"image_id": name} | values | {"image": name}, where, Path())
        file = self.files[self.archives[index]]
        row["image"] = ShardImage(str(file), self.offsets[index], self.sizes[index], where)
        return row

    def _values(
        self, columns: Mapping[str, str] | None, index: int, sample: str
    ) -> tuple[str, str, dict[str, Any]]:
        """Where a sample is, its id, and its values by the names of this package."""
        file, texts = self.files[self.archives[index]], json.loads(sample)
        where, name = f"{file}, sample {shown(texts['key'])}", f"{file.stem}/{texts['key']}"
        item = json_object(texts.get("json", "{}"), where)
        if "txt" in texts:
            item["txt"] = texts["txt"].strip()
            if columns is None:
                columns = {"references": "txt"} | ({"split": "split"} if "split" in item else {})
        return where, name, item if columns is None else renamed_columns(item, columns, where)


def archive_samples(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and files of each sample of an archive: extension -> text, or offset and size of an image."""
    key, members = "", dict[str, Any]()
    with naming(str(file), DAMAGED, DataError), tarfile.open(file, "r:") as archive:
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # it would keep all
            folder, _, name = member.name.removeprefix("./").rpartition("/")
            stem, _, extension = name.partition(".")
            extension = extension.lower()
            is_text = extension in ("txt", "json")
            if not member.isreg() or not (is_text or f".{extension}" in IMAGE_SUFFIXES):
                continue
            sample = f"{folder}/{stem}" if folder else stem
            if sample != key:
                if members:
                    yield key, members
                key, members = sample, {}
            members[extension] = member.offset_data, member.size
            if is_text:
                content: Any = archive.extractfile(member)
                members[extension] = content.read().decode()
    if members:
        yield key, members


@dataclass(frozen=True)
class ShardImage:
    """An image in an archive: the file ``path`` has it at ``offset``, in ``size`` bytes."""

    path: str
    offset: int
    size: int
    where: str = field(compare=False)

    def render(self) -> Image.Image:
        """Read and decode it; ``RewardError``, which names the sample, where that fails."""
        return decode_image(self._content(), self.where)

    def dimensions(self) -> tuple[int, int]:
        """Width and height, without decoding it."""
        return stored_size(self._content(), self.where)

    def identity(self) -> str:
        """A key of caches, without decoding: a hash of the bytes."""
        return hashlib.blake2b(self._content()).hexdigest()

    def _content(self) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)
