"""Sets of rated captions as Parquet files of the Hugging Face hub; one function for each."""

import ast
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from rewards.base import RewardError, naming
from rewards.images import UNREADABLE, open_image
from rl_caption.data.base import DataError
from rl_caption.lab.meta_evaluation.sets.base import (
    Files,
    RatedCaptions,
    Rating,
    caption_of,
    captions_of,
    convert,
    json_rows,
    rated_captions,
    table_rows,
)

SOURCES = {
    "polaris": "the dataset yuwd/Polaris on the Hugging Face hub, Parquet files or polaris_test.csv and images.tar.gz",
    "nebula": "the dataset Ka2ukiMatsuda/Nebula on the Hugging Face hub, Parquet files; or nebula_test.json from "
    "https://github.com/hjkim811/EXPERT",
    "longcap_arena": "the dataset Ka2ukiMatsuda/LongCap-Arena on the Hugging Face hub, Parquet files",
}
COUNTS = {"polaris": 26_122, "nebula": 3_298}
"""Set -> published number of judgements of the test split."""
COLUMNS = {
    "caption": ("cand", "mt", "caption"),
    "references": ("refs", "references"),
    "rating": ("human_score", "score"),
    "image": ("img", "image"),
    "image name": ("imgid", "file_name"),
}
"""What a row has -> its names in these data sets."""
NAMES = {"caption": "mt", "references": "refs", "rating": "score", "image name": "imgid"}
"""What a row of a CSV or JSON file has -> its name."""


def test_split(release: Files) -> list[RatedCaptions]:
    """Read ``NAME_test.csv``, ``NAME_test.json`` or Parquet files of ``polaris`` or ``nebula``.

    Outputs of captioners, rated in [0, 1]. Wada et al., "Polos", CVPR 2024; Matsuda et al.,
    "DENEB", ACCV 2024; Nebula's JSON file is that of Kim et al., "EXPERT", 2025.
    """
    name = release.name
    folder = release.image_folder("images", name.capitalize())
    table, listed = release.folder / f"{name}_test.csv", release.folder / f"{name}_test.json"
    if table.is_file():
        rows = convert(table, table_rows(table), lambda row: _rating(row, NAMES))
    elif listed.is_file():
        rows = convert(listed, json_rows(listed), lambda row: _rating(row, NAMES))
        rows = [row._replace(image_id=f"{row.image_id}.jpg") for row in rows]
    else:
        rows = hub_ratings(_required(release, "test"))
    if folder:
        rows = [row._replace(image=row.image or folder / row.image_id) for row in rows]
    release.check_count("judgements of split test", len(rows), COUNTS[name])
    convention = "each row of split test is a judgement"
    return [rated_captions(name, rows, "tau_c", convention)]


def longcap_arena(
    release: Files,
    aspect: Literal["desc", "rel", "flu"] = "desc",
    split: Literal["test", "dci_val", "dci_test"] = "test",
) -> list[RatedCaptions]:
    """Read ``data/SPLIT.ASPECT-*.parquet`` of LongCap-Arena: long captions by models, rated by
    people.

    ``aspect`` is descriptiveness, relevance or fluency; each has its own rows. Papers print
    ``dci_val`` as TestA and ``dci_test`` as TestB. The number of judgements of a split is not
    checked: 32,246 are published of all.
    """
    part = f"{split}.{aspect}"
    rows = hub_ratings(_required(release, part))
    release.check_count(f"judgements of {part}", len(rows))
    convention = f"each row of {part} is a judgement"
    name = f"{release.name} {aspect}"
    return [rated_captions(name, rows, "tau_c", convention)]


def _required(release: Files, split: str) -> tuple[Path, ...]:
    files = hub_files(release, split)
    if not files:
        raise DataError(
            f"{release.name} needs {split}-*.parquet in {str(release.folder)!r}. Get it: "
            f"{SOURCES[release.name]}"
        )
    return files


def hub_files(release: Files, split: str, configuration: str = "") -> tuple[Path, ...]:
    """Parquet files of a split, of the data set's configuration if it has several; () without."""
    for folder in dict.fromkeys((configuration, f"data/{configuration}", "data", "")):
        if files := tuple(sorted((release.folder / folder).glob(f"{split}-*.parquet"))):
            return files
    return ()


def hub_ratings(files: tuple[Path, ...]) -> list[Rating]:
    """The judgements of Parquet files with the columns ``COLUMNS``.

    Where the name of the image is not there, rows with the same references are of one image.
    """
    with _open_parquet(files[0]) as content:
        there = set(content.schema_arrow.names)
    columns = {}
    for what, names in COLUMNS.items():
        found = [name for name in names if name in there]
        if found:
            columns[what] = found[0]
        elif what != "image name":
            raise DataError(f"{files[0]} has the columns {sorted(there)}: expected {names}")
    image = columns.pop("image")
    rows: list[Rating] = []
    for path in files:
        with _open_parquet(path) as content:
            values = content.read(list(columns.values())).to_pylist()
        rows += convert(path, values, lambda row: _rating(row, columns))
    return [row._replace(image=StoredImage(files, image, n)) for n, row in enumerate(rows)]


def _rating(row: Mapping[str, Any], columns: Mapping[str, str]) -> Rating:
    references = row[columns["references"]]
    if isinstance(references, str):  # Python's own form of a list
        references = ast.literal_eval(references)
    references = captions_of(references)
    image = str(row[columns["image name"]]) if "image name" in columns else "\n".join(references)
    rating = float(row[columns["rating"]])
    return Rating(image, caption_of(row[columns["caption"]]), rating, references)


@lru_cache(maxsize=1)
def _stored_images(files: tuple[Path, ...], column: str) -> list[Any]:
    """The cells of a column of images; only metrics that look at images wait for them."""
    cells: list[Any] = []
    for path in files:
        with _open_parquet(path) as content:
            cells += content.read([column])[column].to_pylist()
    return cells


@dataclass(frozen=True)
class StoredImage:
    """An image in a row of Parquet files."""

    files: tuple[Path, ...]
    column: str
    row: int

    def render(self) -> Image.Image:
        """Decode it; ``RewardError`` where it cannot be decoded."""
        try:
            stored = _stored_images(self.files, self.column)[self.row]["bytes"]
            return open_image(Image.open(io.BytesIO(stored)), own_mode=True)
        except (*UNREADABLE, RewardError) as error:
            raise RewardError(f"an image of a Parquet file cannot be read: {error}") from error


@contextmanager
def _open_parquet(file: Path) -> Iterator[Any]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    kinds = (ArrowException, OSError, ValueError)
    with naming(f"{file} is not a readable Parquet file", kinds, DataError):
        yield ParquetFile(file)
