"""Sets of rated captions as Parquet files of the Hugging Face hub; one function for each, named as in ``SETS``."""

import ast
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from PIL import Image

from rewards.base import RewardError
from rewards.images import UNREADABLE, open_image
from rl_caption.data.base import DataError
from rl_caption.lab.curation import open_parquet
from rl_caption.lab.meta_evaluation.sets.base import (
    Files,
    Images,
    RatedCaptions,
    Rating,
    Row,
    benchmark_of,
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
COUNTS = {
    "polaris": {"train": 78_630, "validation": 26_268, "test": 26_122},
    "nebula": {"train": 26_382, "valid": 3_298, "test": 3_298},
}
"""Set -> split -> published number of judgements."""
COLUMNS = {
    "caption": ("cand", "mt", "caption"),
    "references": ("refs", "references"),
    "rating": ("human_score", "score"),
    "image": ("img", "image"),
    "image name": ("imgid", "file_name"),
}
"""What a row has -> its names in these data sets."""
CORRECTIONS = ("spica_train.csv", "spica_val.csv", "spica_test.csv")
SPICA = "the dataset hiranohachiman/Spica on the Hugging Face hub"


def polaris(
    release: Files, split: Literal["train", "validation", "test"] = "test"
) -> list[RatedCaptions]:
    """Read ``polaris_SPLIT.csv``, ``polaris_SPLIT.json`` or Parquet files.

    Wada et al., "Polos", CVPR 2024: outputs of captioners, rated in [0, 1].
    """
    rows, photos = _polaris(release, split)
    benchmark = benchmark_of(release, "polaris") if split == "test" else None
    convention = f"each row of split {split} is a judgement"
    return [rated_captions(release.name, rows, photos, "tau_c", convention, benchmark=benchmark)]


def nebula(
    release: Files, split: Literal["train", "valid", "test"] = "test", corrected: bool = False
) -> list[RatedCaptions]:
    """Read ``nebula_SPLIT.csv``, ``nebula_SPLIT.json`` or Parquet files.

    Matsuda et al., "DENEB", ACCV 2024; the JSON file is that of Kim et al., "EXPERT", 2025. ``corrected`` takes the
    mean rating of the same image and caption in ``spica_train.csv``, ``spica_val.csv`` and ``spica_test.csv``, where
    they have one, as capevalkit does.
    """
    rows, photos = _polaris(release, split)
    benchmark = benchmark_of(release, "nebula") if split == "test" else None
    convention = f"each row of split {split} is a judgement"
    if corrected:
        ratings = _spica_ratings(release)
        keys = [(Path(row.image).stem, row.caption) for row in rows]
        new = [
            row._replace(rating=ratings.get(key, row.rating))
            for row, key in zip(rows, keys, strict=True)
        ]
        corrections, changed = (
            sum(key in ratings for key in keys),
            sum(a != b for a, b in zip(rows, new, strict=True)),
        )
        convention += f"; of {len(rows)}, {corrections} have a rating in Spica, which is another one for {changed}"
        rows = new
    name = f"{release.name}, corrected" if corrected else release.name
    return [rated_captions(name, rows, photos, "tau_c", convention, benchmark=benchmark)]


def _spica_ratings(release: Files) -> dict[tuple[str, str], float]:
    """Name of an image without its suffix, and caption -> the mean of Spica's ratings."""
    ratings: dict[tuple[str, str], list[float]] = {}
    for file in CORRECTIONS:
        for row in table_rows(release.require(SPICA, file), ["imgid", "mt", "score"]):
            key = Path(row.text("imgid")).stem, row.caption("mt")
            ratings.setdefault(key, []).append(row.number("score"))
    return {key: sum(scores) / len(scores) for key, scores in ratings.items()}


def _polaris(release: Files, split: str) -> tuple[list[Rating], Images]:
    """Judgements of Polaris or Nebula, and their images."""
    name = release.name
    stem = f"{name}_{'val' if split in ('valid', 'validation') else split}"
    photos: Images = release.image_folder("images", name.capitalize())
    columns = {"caption": "mt", "references": "refs", "rating": "score", "image name": "imgid"}
    if (path := release.folder / f"{stem}.csv").is_file():
        rows = [_rating(row, columns) for row in table_rows(path, list(columns.values()))]
    elif (path := release.folder / f"{stem}.json").is_file():
        rows = [_rating(row, columns) for row in json_rows(path)]
        rows = [row._replace(image=f"{row.image}.jpg") for row in rows]
    else:
        files = hub_files(release, split)
        if not files:
            raise DataError(
                f"{name} needs {split}-*.parquet in {str(release.folder)!r}. Get it: {SOURCES[name]}"
            )
        rows, photos = hub_ratings(files)
    release.check_count(f"judgements of split {split}", len(rows), COUNTS[name][split])
    return rows, photos


def longcap_arena(
    release: Files,
    aspect: Literal["desc", "rel", "flu"] = "desc",
    split: Literal["test", "dci_val", "dci_test"] = "test",
) -> list[RatedCaptions]:
    """Read ``data/SPLIT.ASPECT-*.parquet`` of LongCap-Arena: long captions by models, rated by people.

    ``aspect`` is descriptiveness, relevance or fluency; each has its own rows. Papers print ``dci_val`` as TestA and
    ``dci_test`` as TestB. The number of judgements of a split is not checked: 32,246 are published of all.
    """
    files = hub_files(release, f"{split}.{aspect}")
    if not files:
        name = f"{split}.{aspect}-*.parquet"
        raise DataError(
            f"{release.name} needs {name} in {str(release.folder)!r}. Get it: {SOURCES[release.name]}"
        )
    rows, photos = hub_ratings(files)
    release.check_count(f"judgements of {split}.{aspect}", len(rows))
    convention = f"each row of {split}.{aspect} is a judgement"
    benchmark = benchmark_of(release, f"{release.name} {split}.{aspect}")
    return [
        rated_captions(
            f"{release.name} {aspect}", rows, photos, "tau_c", convention, benchmark=benchmark
        )
    ]


def hub_files(release: Files, split: str, configuration: str = "") -> tuple[Path, ...]:
    """Parquet files of a split, of the configuration of the data set where it has several; () where there are none."""
    for folder in dict.fromkeys((configuration, f"data/{configuration}", "data", "")):
        if files := tuple(sorted((release.folder / folder).glob(f"{split}-*.parquet"))):
            return files
    return ()


def hub_ratings(files: tuple[Path, ...]) -> tuple[list[Rating], Images]:
    """The judgements of Parquet files with the columns ``COLUMNS``, and their images.

    Where the name of the image is not there, rows with the same references are of one image. Raises ``DataError``.
    """
    with open_parquet(files[0]) as content:
        there = set(content.schema_arrow.names)
    columns = {
        what: next((name for name in names if name in there), None)
        for what, names in COLUMNS.items()
    }
    for what in ("caption", "references", "rating", "image"):
        if columns[what] is None:
            names = " or ".join(COLUMNS[what])
            raise DataError(
                f"{files[0]} has the columns {sorted(there)}: expected {names}, the {what} of a judgement"
            )
    texts = {what: name for what, name in columns.items() if name is not None and what != "image"}
    rows = [_rating(row, texts) for row in _parquet_rows(files, list(texts.values()))]
    return rows, [StoredImage(files, str(columns["image"]), number) for number in range(len(rows))]


def _rating(row: Row, columns: Mapping[str, str]) -> Rating:
    key = columns["references"]
    if isinstance(row.values.get(key), str):  # Python's own form of a list
        try:
            row = Row({**row.values, key: ast.literal_eval(row.values[key])}, row.where)
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
            raise row.refusal(key, "a list of texts") from error
    references = row.captions(key)
    image = (
        row.identifier(columns["image name"]) if "image name" in columns else "\n".join(references)
    )
    return Rating(image, row.caption(columns["caption"]), row.number(columns["rating"]), references)


def _parquet_rows(files: Sequence[Path], columns: list[str]) -> Iterator[Row]:
    for path in files:
        with open_parquet(path) as content:
            rows = content.read(columns).to_pylist()
        if rows and not set(columns) <= rows[0].keys():
            raise DataError(f"{path} lacks some of the columns {columns}")
        yield from (Row(values, f"{path}, row {number}") for number, values in enumerate(rows))


@lru_cache(maxsize=1)
def _stored_images(files: tuple[Path, ...], column: str) -> list[bytes]:
    """The image files in a column of Parquet files; only metrics that look at images wait for them."""
    contents = []
    for row in _parquet_rows(files, [column]):
        stored = row.values[column]
        if not isinstance(stored, dict) or not isinstance(stored.get("bytes"), bytes):
            raise row.refusal(column, "the bytes of an image")
        contents.append(stored["bytes"])
    return contents


@dataclass(frozen=True)
class StoredImage:
    """An image in a row of Parquet files."""

    files: tuple[Path, ...]
    column: str
    row: int

    def render(self) -> Image.Image:
        """Decode it; ``RewardError`` where it cannot be decoded."""
        try:
            stored = _stored_images(self.files, self.column)[self.row]
            return open_image(Image.open(io.BytesIO(stored)), own_mode=True)
        except (*UNREADABLE, RewardError) as error:
            raise RewardError(f"an image of a Parquet file cannot be read: {error}") from error
