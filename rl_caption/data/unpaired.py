"""Images without captions, and captions without images, optionally with a target (docs/data.md,
docs/papers.md).
"""

import math
import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypedDict

from rewards.base import naming
from rewards.images import list_images
from rl_caption.data.base import DataError, Row, RowView, Splits
from rl_caption.data.file_checks import progress
from rl_caption.data.plain_files import (
    check_type,
    csv_rows,
    hash_text,
    json_lines,
    shown,
    single_spaced,
)
from rl_caption.data.splits import STANDARD_SPLITS, standard_split
from rl_caption.runtime.options import Range


class _Target(TypedDict):
    caption: str
    target: float


HeldOut = Annotated[float, Range(above=0, below=1)]


class Texts(Sequence[str]):
    """A compact list of texts, for datasets of millions: one byte buffer and the end of each text."""

    def __init__(self) -> None:
        self._bytes, self._ends = bytearray(), array("q", [0])

    def add(self, text: str) -> None:
        self._bytes += text.encode()
        self._ends.append(len(self._bytes))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        start, end = self._ends[index : index + 2]
        return self._bytes[start:end].decode()


def held_out_splits(
    path: Path,
    items: Iterable[tuple[str, str, str]],
    val_fraction: float,
    make: Callable[[int, str], Row],
) -> dict[str, Sequence[Row]]:
    """Rows from (split, key, text) items; items of ``train`` whose key hashes below the fraction go
    to ``val``.
    """
    texts: dict[str, Texts] = defaultdict(Texts)
    for split, key, text in items:
        held_out = split == "train" and val_fraction > 0 and hash_text(key) / 2**64 < val_fraction
        texts["val" if held_out else split].add(text)
    return {split: RowView(texts[split], make) for split in STANDARD_SPLITS if split in texts}


class ImageFolder(Splits):
    """A folder tree of images without captions, such as ImageNet, as a ``DataModule``.

    Folders ``train``, ``val`` and ``test`` at its top are the splits; everything else is ``train``.
    Without ``val``,
    about ``val_fraction`` of the training images are held out: those whose path hashes below it,
    the same in every run, whatever else is in the folder. ``image_id`` is the path in the folder.
    Files and folders whose names begin with a dot are left out; links to folders are followed.
    """

    def __init__(self, path: str | Path, val_fraction: HeldOut = 0.01) -> None:
        root = Path(path)
        items = ((split, name, name) for split, name in _image_files(root))
        folders = [standard_split(folder.name) for folder in root.iterdir() if folder.is_dir()]
        held_out = 0 if "val" in folders else val_fraction
        super().__init__(held_out_splits(root, items, held_out, partial(_image_row, root)), root)


class CaptionFile(Splits):
    """Captions without images, one per line, such as those of CC3M, as a ``DataModule``.

    Empty lines are skipped. ``image_id`` is the file's name and the line, ``train.tsv:17``. Raises
    ``DataError``, which names file and line, where a line is wrong.

    Args:
        path: a text file, UTF-8, or a folder with one file per split: ``train``, ``val`` and
            ``test`` with any extension.
        column: the column of the caption, separated by tabs and counted from 0 (CC3M: 0); None is
            the whole line. Of files that end on ``.csv``, which have a line of headings, the
            heading; None is ``caption``.
        val_fraction: without a file ``val``, about this fraction of the captions is held out, those
            that hash below it: equal captions always together, the same ones in every run.
    """

    def __init__(
        self,
        path: str | Path,
        column: Annotated[int, Range(min=0)] | str | None = None,
        val_fraction: HeldOut = 0.01,
    ) -> None:
        files = _caption_files(Path(path))
        items = (
            (split, caption, f"{file.name}:{number}\t{caption}")
            for split, file in files.items()
            for number, caption in _captions(file, column)
        )
        super().__init__(
            held_out_splits(Path(path), items, 0 if "val" in files else val_fraction, _caption_row),
            path,
        )


class CaptionTargets(Splits):
    """JSON lines ``{"caption": ..., "target": ...}`` without images, as a ``DataModule``
    (docs/papers.md).

    Empty lines are skipped, and further keys ignored. ``image_id`` is the file's name and the line.
    ``val`` is held out as for ``CaptionFile``. Raises ``DataError``, which names file and line,
    where a line is wrong.
    """

    def __init__(self, path: str | Path, val_fraction: HeldOut = 0.05) -> None:
        file = Path(path)
        super().__init__(held_out_splits(file, _targets(file), val_fraction, _target_row), file)


def _image_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield split and relative path of the images below ``root``."""
    for file in progress(list_images(root), root.name, "image"):
        path = file.relative_to(root)
        folder = standard_split(path.parts[0]) if len(path.parts) > 1 else ""
        yield folder if folder in STANDARD_SPLITS else "train", path.as_posix()


def _image_row(root: Path, index: int, name: str) -> Row:
    return {"image_id": name, "image": os.path.join(root, name), "references": []}


def _caption_files(path: Path) -> dict[str, Path]:
    """Split -> its file."""
    if not path.is_dir():
        return {"train": path}
    files: dict[str, Path] = {}
    for file in sorted(path.iterdir()):
        split = standard_split(file.stem)
        if split in STANDARD_SPLITS and file.is_file():
            if split in files:
                raise DataError(
                    f"{path} has {files[split].name} and {file.name}: expected one file a split"
                )
            files[split] = file
    return files


def _captions(file: Path, column: int | str | None) -> Iterator[tuple[int, str]]:
    """Line numbers and captions."""
    if file.suffix == ".csv":
        heading = "caption" if column is None else str(column)
        for where, row in csv_rows(file, [heading]):
            if row[heading].strip():
                yield int(where.rpartition(" ")[2]), single_spaced(row[heading])
        return
    with (
        naming(str(file), (UnicodeDecodeError,), DataError),
        open(file, encoding="utf-8-sig", newline="\n") as lines,
    ):
        for number, line in enumerate(progress(lines, file.name, "line"), start=1):
            if not line.strip():
                continue
            columns = line.rstrip("\r\n").split("\t")
            if column not in range(len(columns)) and (column is not None or len(columns) > 1):
                raise DataError(
                    f"{file}, line {number} has {len(columns)} columns, {shown(line)}, and "
                    f"data.kwargs.column is "
                    f"{column}: say which is the caption, counted from 0"
                )
            yield number, columns[int(column or 0)].strip()


def _caption_row(index: int, text: str) -> Row:
    name, _, caption = text.rpartition("\t")
    return {"image_id": name, "references": [caption]}


def _targets(file: Path) -> Iterator[tuple[str, str, str]]:
    for number, where, item in json_lines(file):
        check_type(item, _Target, where, DataError)
        caption, target = single_spaced(item["caption"]), float(item["target"])
        if not caption or not math.isfinite(target):
            raise DataError(f"{where}: 'caption' is {caption!r}, 'target' is {target}")
        yield "train", caption, f"{file.name}:{number}\t{target!r}\t{caption}"


def _target_row(index: int, text: str) -> Row:
    name, target, caption = text.rsplit("\t", 2)
    return {"image_id": name, "references": [caption], "target": float(target)}
