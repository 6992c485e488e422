"""Sets of rated captions as Parquet files of the Hugging Face hub; one function for each."""

import ast
import io
from collections.abc import Mapping, Sequence
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
    Judged,
    JudgementSet,
    captions_of,
    convert,
    json_rows,
    rated,
    table_rows,
)

SOURCES = {
    "polaris": "the dataset yuwd/Polaris on the Hugging Face hub, Parquet files or "
    "polaris_test.csv and images.tar.gz",
    "nebula": "the dataset Ka2ukiMatsuda/Nebula on the Hugging Face hub, Parquet files; or "
    "nebula_test.json from https://github.com/hjkim811/EXPERT",
    "longcap_arena": "the dataset Ka2ukiMatsuda/LongCap-Arena on the Hugging Face hub, Parquet "
    "files",
}
COUNTS = {"polaris": 26_122, "nebula": 3_298}
"""Set -> published number of judgements of the test split."""
COLUMNS = {
    "caption": ("cand", "mt", "caption"),
    "references": ("refs", "references"),
    "rating": ("human_score", "score"),
}
"""What a row has -> its names in these data sets."""
IMAGE_NAMES, IMAGES = ("imgid", "file_name"), ("img", "image")
"""Columns of the name of an image, and of the image itself."""


def test_split(release: Files) -> list[JudgementSet]:
    """Read ``NAME_test.csv``, ``NAME_test.json`` or Parquet files of ``polaris`` or ``nebula``.

    Outputs of captioners, rated in [0, 1]. Wada et al., "Polos", CVPR 2024; Matsuda et al.,
    "DENEB", ACCV 2024; Nebula's JSON file is that of Kim et al., "EXPERT", 2025.
    """
    name = release.name
    folder = release.image_folder("images", name.capitalize())
    files = [release.folder / f"{name}_test.{suffix}" for suffix in ("csv", "json")]
    rows = hub_rows([file for file in files if file.is_file()][:1] or _required(release, "test"))
    if folder:
        rows = [row._replace(image=row.image or folder / row.image_id) for row in rows]
    release.check_count("judgements of split test", len(rows), COUNTS[name])
    convention = "each row of split test is a judgement"
    return [JudgementSet(name, rows, convention, published="tau_c")]


def longcap_arena(
    release: Files,
    aspect: Literal["desc", "rel", "flu"] = "desc",
    split: Literal["test", "dci_val", "dci_test"] = "test",
) -> list[JudgementSet]:
    """Read ``data/SPLIT.ASPECT-*.parquet`` of LongCap-Arena: long captions by models, rated by
    people.

    ``aspect`` is descriptiveness, relevance or fluency; each has its own rows. Papers print
    ``dci_val`` as TestA and ``dci_test`` as TestB. The number of judgements of a split is not
    checked: 32,246 are published of all.
    """
    part = f"{split}.{aspect}"
    rows = hub_rows(_required(release, part))
    release.check_count(f"judgements of {part}", len(rows))
    convention = f"each row of {part} is a judgement"
    return [JudgementSet(f"{release.name} {aspect}", rows, convention, published="tau_c")]


def _required(release: Files, split: str) -> Sequence[Path]:
    files = hub_files(release, split)
    if not files:
        raise DataError(
            f"{release.name} needs {split}-*.parquet in {str(release.folder)!r}. Get it: "
            f"{SOURCES[release.name]}"
        )
    return files


def hub_files(release: Files, split: str, configuration: str = "") -> Sequence[Path]:
    """Parquet files of a split, of the data set's configuration if it has several; empty without."""
    for folder in (configuration, f"data/{configuration}", "data", ""):
        files = sorted((release.folder / folder).glob(f"{split}-*.parquet"))
        if files:
            return files
    return []


def hub_rows(files: Sequence[Path]) -> list[Judged]:
    """The judgements of CSV, JSON or Parquet files with the columns ``COLUMNS``.

    Where the name of the image is not there, rows with the same references are of one image.
    """
    rows = []
    for path in files:
        if path.suffix == ".csv":
            values = table_rows(path)
        elif path.suffix == ".json":
            values = json_rows(path)
        else:
            values = _parquet_rows(path)
        rows += convert(path, values, _judged)
    return rows


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    """Rows with a ``StoredImage`` in place of the image, whose column is not read yet."""
    file = _parquet(path)
    names = file.schema_arrow.names
    rows: list[dict[str, Any]] = file.read([n for n in names if n not in IMAGES]).to_pylist()
    column = next((name for name in IMAGES if name in names), IMAGES[0])
    for number, row in enumerate(rows):
        row["stored"] = StoredImage(path, column, number)
    return rows


def _judged(row: Mapping[str, Any]) -> Judged:
    caption, references, rating = (
        row[next((name for name in names if name in row), names[0])] for names in COLUMNS.values()
    )
    if isinstance(references, str):  # Python's own form of a list
        references = ast.literal_eval(references)
    references = captions_of(references)
    image = next((str(row[name]) for name in IMAGE_NAMES if name in row), "\n".join(references))
    if "stored" not in row and "." not in image:  # EXPERT's file of Nebula
        image += ".jpg"
    return rated(image, caption, rating, references, row.get("stored"))


@lru_cache(maxsize=1)
def _cells(path: Path, column: str) -> list[Any]:
    """The cells of a column of images; only metrics that look at images wait for them."""
    return list(_parquet(path).read([column])[column].to_pylist())


@dataclass(frozen=True)
class StoredImage:
    """An image in a row of a Parquet file."""

    path: Path
    column: str
    row: int

    def render(self) -> Image.Image:
        """Decode it; ``RewardError`` where it cannot be decoded."""
        try:
            stored = _cells(self.path, self.column)[self.row]["bytes"]
            return open_image(Image.open(io.BytesIO(stored)), own_mode=True)
        except (*UNREADABLE, RewardError) as error:
            raise RewardError(f"an image of a Parquet file cannot be read: {error}") from error


def _parquet(file: Path) -> Any:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    kinds = (ArrowException, OSError, ValueError)
    with naming(f"{file} is not a readable Parquet file", kinds, DataError):
        return ParquetFile(file)
