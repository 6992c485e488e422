"""Polaris and Nebula: outputs of captioners, each rated by several people.

Sources: Wada et al., "Polos: Multimodal Metric Learning from Human Feedback for Image Captioning", CVPR 2024 (131,020
ratings), and Matsuda, Wada and Sugiura, "DENEB: A Hallucination-Robust Automatic Evaluation Metric for Image
Captioning", ACCV 2024 (32,978). Ratings are in [0, 1]. Printed is tau_c on the test split.

Both are published as Parquet files with the images in them, ``data/SPLIT-....parquet``; Polaris also as
``polaris_SPLIT.csv`` (``mt``, ``refs``, ``score``, ``imgid``) with a folder ``images``. Parquet needs ``pyarrow``. Both
circulate as ``nebula_SPLIT.json`` and ``polaris_SPLIT.json`` (in the repository of EXPERT, Kim et al., 2025): a list of
objects with the fields of the CSV file, ``imgid`` without the ending ``.jpg`` of the image's file.
"""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from PIL import Image

from rewards.base import RewardError
from rewards.images import UNREADABLE, ImageSource, open_image
from rl_caption.meta_evaluation.sets.base import (
    JudgingSetError,
    RatedCaptions,
    check_count,
    csv_rows,
    image_folder,
    list_of,
    number_of,
    read_json,
    single_spaced,
    text_of,
    texts_of,
)

SOURCES = {
    "polaris": "the dataset yuwd/Polaris on the Hugging Face hub, Parquet files or polaris_test.csv and images.tar.gz",
    "nebula": "the dataset Ka2ukiMatsuda/Nebula on the Hugging Face hub, Parquet files; or nebula_test.json from "
    "https://github.com/hjkim811/EXPERT",
}
COUNTS = {
    "polaris": {"train": 78_630, "validation": 26_268, "test": 26_122},
    "nebula": {"train": 26_382, "valid": 3_298, "test": 3_298},
}
"""Set -> split -> published number of judgements."""
CAPTION_FIELDS = {"polaris": "cand", "nebula": "mt"}


def polaris(
    folder: Path, images: Path | None = None, partial: bool = False, split: str = "test"
) -> list[RatedCaptions]:
    """Read Polaris.

    Args:
        folder: of the files, or the one above their ``data``.
        images: folder of the images that a CSV or JSON file names; None looks below ``folder``. Parquet files have
            theirs.
        partial: accept another number of judgements than the published one.
        split: ``train``, ``validation`` or ``test``.

    Raises:
        JudgingSetError: a file is missing or wrong, or has another number of judgements.
    """
    _check_split("polaris", split)
    return [_read("polaris", folder, images, split, partial)]


def nebula(folder: Path, images: Path | None = None, partial: bool = False, split: str = "test") -> list[RatedCaptions]:
    """Read Nebula; arguments and errors as for ``polaris``, with the splits ``train``, ``valid`` and ``test``."""
    _check_split("nebula", split)
    return [_read("nebula", folder, images, split, partial)]


def _read(name: str, folder: Path, images: Path | None, split: str, partial: bool) -> RatedCaptions:
    stem = f"{name}_{'val' if split in ('valid', 'validation') else split}"
    for path in (folder / f"{stem}.csv", folder / f"{stem}.json"):
        if path.is_file():
            photos = image_folder(folder, images, ["images", name.capitalize()])
            return _from_table(name, path, split, photos, partial)
    return _from_parquet(name, folder, split, partial)


def _check_split(name: str, split: str) -> None:
    if split not in COUNTS[name]:
        raise JudgingSetError(f"{name} has no split {split!r}: expected one of {list(COUNTS[name])}")


def _from_table(name: str, path: Path, split: str, photos: Path | None, partial: bool) -> RatedCaptions:
    captions, ratings, ids, references = [], [], [], []
    for where, row in _json_rows(path) if path.suffix == ".json" else csv_rows(path, ["mt", "refs", "score", "imgid"]):
        captions.append(single_spaced(text_of(row, "mt", where)))
        ratings.append(number_of(row.get("score"), f"{where}: 'score'"))
        ids.append(text_of(row, "imgid", where) + (".jpg" if path.suffix == ".json" else ""))
        refs = row.get("refs")
        references.append(
            _listed(refs, f"{where}: 'refs'") if isinstance(refs, str) else texts_of(refs, f"{where}: 'refs'")
        )
    images = None if photos is None else [photos / name for name in ids]
    return _rated(name, split, captions, ratings, ids, images, references, partial)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, item in enumerate(list_of(read_json(path), path)):
        yield f"{path}, [{number}]", item


def _listed(text: str, where: str) -> list[str]:
    try:
        texts = ast.literal_eval(text)  # the file holds Python's own form of a list
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise JudgingSetError(f"{where} is {text!r:.80}: expected a list of texts") from error
    return texts_of(texts, where)


def _from_parquet(name: str, folder: Path, split: str, partial: bool) -> RatedCaptions:
    place = folder / "data" if (folder / "data").is_dir() else folder
    files = sorted(place.glob(f"{split}-*.parquet"))
    if not files:
        raise JudgingSetError(f"{name} needs {split}-*.parquet in {str(place)!r}. Get it: {SOURCES[name]}")
    captions, ratings, ids, references = [], [], [], []
    picture = "img" if name == "polaris" else "image"
    for path in files:
        named = [] if name == "polaris" else ["file_name"]
        for number, row in enumerate(_rows(path, [CAPTION_FIELDS[name], "human_score", "refs", *named])):
            where = f"{path}, row {number}"
            captions.append(single_spaced(text_of(row, CAPTION_FIELDS[name], where)))
            ratings.append(number_of(row["human_score"], f"{where}: 'human_score'"))
            references.append(texts_of(row["refs"], f"{where}: 'refs'"))
            # Polaris names no image: rows with the same references are of the same one.
            ids.append(str(row["file_name"]) if named else "\n".join(references[-1]))
    return _rated(name, split, captions, ratings, ids, StoredImages(files, picture), references, partial)


def _rows(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    for batch in _batches(path, columns):
        yield from batch.to_pylist()


def _batches(path: Path, columns: list[str]) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise JudgingSetError(f"{path} cannot be read without pyarrow: pip install pyarrow") from error
    try:
        with ParquetFile(path) as file:
            missing = sorted(set(columns) - set(file.schema_arrow.names))
            if missing:
                raise JudgingSetError(f"{path} has the columns {file.schema_arrow.names}: expected {columns}")
            yield from file.iter_batches(columns=columns)
    except (OSError, ArrowException, ValueError) as error:
        raise JudgingSetError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True)
class StoredImage:
    """An image that is held in memory as the bytes of a file."""

    content: bytes

    def render(self) -> Image.Image:
        """Decode it.

        Raises:
            RewardError: it cannot be decoded.
        """
        try:
            return open_image(Image.open(io.BytesIO(self.content)))
        except (*UNREADABLE, RewardError) as error:
            raise RewardError(f"an image of a Parquet file cannot be read: {error}") from error


class StoredImages(Sequence[ImageSource]):
    """The images of Parquet files, read when the first is asked for: metrics without images need not wait for them."""

    def __init__(self, files: Sequence[Path], column: str) -> None:
        self.files, self.column = files, column
        self._images: list[StoredImage] | None = None

    def _read(self) -> list[StoredImage]:
        if self._images is None:
            self._images = []
            for path in self.files:
                for number, row in enumerate(_rows(path, [self.column])):
                    stored = row[self.column]
                    if not isinstance(stored, dict) or not isinstance(stored.get("bytes"), bytes):
                        raise JudgingSetError(f"{path}, row {number}: {self.column!r} holds no bytes of an image")
                    self._images.append(StoredImage(stored["bytes"]))
        return self._images

    def __len__(self) -> int:
        return len(self._read())

    @overload
    def __getitem__(self, index: int) -> ImageSource: ...
    @overload
    def __getitem__(self, index: slice) -> list[ImageSource]: ...
    def __getitem__(self, index: int | slice) -> ImageSource | list[ImageSource]:
        images = self._read()
        return list(images[index]) if isinstance(index, slice) else images[index]


def _rated(
    name: str,
    split: str,
    captions: list[str],
    ratings: list[float],
    ids: list[str],
    images: Sequence[ImageSource] | None,
    references: list[list[str]],
    partial: bool,
) -> RatedCaptions:
    check_count(name, f"judgements of split {split}", len(captions), COUNTS[name][split], partial)
    if not captions:
        raise JudgingSetError(f"{name} has no judgements of split {split}. Get it: {SOURCES[name]}")
    convention = f"each row of split {split} is a judgement"
    return RatedCaptions(name, captions, ratings, ids, images, references, "tau_c", convention)
