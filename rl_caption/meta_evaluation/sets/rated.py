"""Sets of captions that people rated.

Flickr8k-Expert and Flickr8k-CrowdFlower (Hodosh, Young and Hockenmaier, JAIR 2013) by the protocol of CLIPScore (Hessel
et al., EMNLP 2021): three experts rate a pair of image and caption from 1 to 4, each rating is a judgement, pairs whose
caption is among the image's references are left out; or the rating is the share of people who said yes, and judged
captions are taken out of the references.

Composite (Aditya et al., "From Images to Sentences through Scene Description Graphs", 2015): captions of Flickr8k,
Flickr30k and COCO by people and by two systems, rated 1 to 5. Its files are as Mechanical Turk returns them: separated
by semicolons, a row an image; lines at the end without an image or a rating are no judgements. Papers differ in how
many captions they count: here all with a rating.

Polaris (Wada et al., "Polos", CVPR 2024) and Nebula (Matsuda et al., "DENEB", ACCV 2024): outputs of captioners, rated
in [0, 1]. Parquet files with the images in them (needs ``pyarrow``), a CSV file, or a JSON list (Kim et al., "EXPERT",
2025), whose ``imgid`` lacks the ending ``.jpg``.

THumB 1.0 (Kasai et al., NAACL 2022): captions of COCO's test images by four systems and by a person; ``P`` and ``R``
are 1 to 5, ``human_score`` their mean less penalties.

CxC (Parekh et al., "Crisscrossed Captions", EACL 2021): captions of COCO rated 0 to 5 for their own and for other
images; the ids in ``sits_SPLIT.csv`` are those of the annotations of ``captions_val2014.json``.
"""

from __future__ import annotations

import ast
import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from rewards.base import RewardError
from rewards.images import UNREADABLE, ImageSource, open_image
from rl_caption.data.base import DataError
from rl_caption.data.plain_files import shown
from rl_caption.meta_evaluation.ratings import read_ratings
from rl_caption.meta_evaluation.sets.base import (
    RatedCaptions,
    Rating,
    caption_of,
    check_count,
    image_folder,
    json_items,
    json_lines,
    number_of,
    rated_captions,
    require,
    single_spaced,
    table_rows,
    text_of,
    texts_of,
)
from rl_caption.meta_evaluation.sets.coco import CocoCaption, coco_captions, coco_id, coco_references, other_captions

FLICKR8K = (
    "Flickr8k_text.zip (captions and annotations) and Flickr8k_Dataset.zip (photos), University of Illinois, "
    "https://hockenmaier.cs.illinois.edu/8k-pictures.html, or the copies that are named there"
)
FLICKR8K_IMAGES = ("images", "Flickr8k_Dataset", "Flicker8k_Dataset")
OWN_REFERENCE = "the caption is one of the image's references"

AMT = (
    "the AMT evaluation of 'From Images to Sentences through Scene Description Graphs' (Aditya et al., Arizona State "
    "University and University of Maryland, https://imagesdg.wordpress.com/image-to-scene-description-graph/)"
)
COMPOSITE = {
    "8k": (997, "Flickr8k.token.txt", "the captions of Flickr8k (Flickr8k_text.zip)"),
    "30k": (991, "results_20130124.token", "the captions of Flickr30k (flickr30k.tar.gz, University of Illinois)"),
    "coco": (2007, "captions_val2014.json", "the COCO annotations (annotations_trainval2014.zip, cocodataset.org)"),
}
"""Part -> published number of images, file of references, where that is from."""
COMPOSITE_IMAGES = {"8k": ("Flickr8k_Dataset", "Flicker8k_Dataset"), "30k": ("flickr30k-images", "flickr30k_images")}
TRAIN_REFERENCES = "captions_train2014.json"
"""Read, too, where it is there: captions of COCO's training images."""

HUB = {
    "polaris": "the dataset yuwd/Polaris on the Hugging Face hub, Parquet files or polaris_test.csv and images.tar.gz",
    "nebula": "the dataset Ka2ukiMatsuda/Nebula on the Hugging Face hub, Parquet files; or nebula_test.json from "
    "https://github.com/hjkim811/EXPERT",
}
HUB_COUNTS = {
    "polaris": {"train": 78_630, "validation": 26_268, "test": 26_122},
    "nebula": {"train": 26_382, "valid": 3_298, "test": 3_298},
}
"""Set -> split -> published number of judgements."""
COCO = "captions_val2014.json and val2014 from https://cocodataset.org/"
THUMB = f"mscoco/mscoco_THumB-1.0.jsonl of https://github.com/jungokasai/THumB; {COCO}"
CXC = f"the folder data of https://github.com/google-research-datasets/Crisscrossed-Captions; {COCO}"


def flickr8k_expert(folder: Path, images: Path | None = None, partial: bool = False) -> list[RatedCaptions]:
    """Read ``ExpertAnnotations.txt`` with ``Flickr8k.token.txt``, or ``flickr8k.json``."""
    name = "flickr8k_expert"
    path = require(folder, name, ["ExpertAnnotations.txt", "flickr8k.json"], FLICKR8K)
    rows = _flickr8k(path, name, ["first", "second", "third"], [], 3 * 5_822, partial)
    kept = [row for row in rows if row.caption not in (row.references or ())]
    check_count(name, "judgements", len(kept), 16_992, partial)
    convention = "each of the three experts' ratings of a caption is a judgement; 5 references"
    excluded = {OWN_REFERENCE: len(rows) - len(kept)}
    return [rated_captions(name, kept, image_folder(folder, images, FLICKR8K_IMAGES), "tau_c", convention, excluded)]


def flickr8k_crowdflower(folder: Path, images: Path | None = None, partial: bool = False) -> list[RatedCaptions]:
    """Read ``CrowdFlowerAnnotations.txt`` with ``Flickr8k.token.txt``, or ``crowdflower_flickr8k.json``."""
    name = "flickr8k_crowdflower"
    path = require(folder, name, ["CrowdFlowerAnnotations.txt", "crowdflower_flickr8k.json"], FLICKR8K)
    rows = _flickr8k(path, name, ["share"], ["yes", "no"], 47_830, partial)
    check_count(name, "judgements", len(rows), 47_830, partial)
    # In the files of others judged captions are out already, and such an image has fewer than five.
    rows = _without_judged(rows, path, complete=5)
    convention = "the rating is the share of people who said yes; judged captions are not among the references"
    return [rated_captions(name, rows, image_folder(folder, images, FLICKR8K_IMAGES), "tau_b", convention)]


def _flickr8k(path: Path, name: str, rated: list[str], others: list[str], count: int, partial: bool) -> list[Rating]:
    """Read judgements with all captions of their image; ``rated`` are the columns that are ratings."""
    if path.suffix == ".json":
        found = read_ratings(path)
        if found.references is None:
            raise DataError(f"{path} has no references: expected 'ground_truth' for every image")
        columns = zip(found.images, found.captions, found.ratings, found.references, strict=True)
        return [Rating(Path(image).name, caption, rating, texts) for image, caption, rating, texts in columns]
    tokens = require(path.parent, name, ["Flickr8k.token.txt"], FLICKR8K)
    captions, references = _read_tokens(tokens)
    check_count(name, f"captions in {tokens}", len(captions), 40_460, partial)
    rows = []
    for where, row in table_rows(path, ["image", "caption", *rated, *others], "\t", head=False):
        if row["caption"] not in captions or row["image"] not in references:
            raise DataError(
                f"{where} judges the caption {shown(row['caption'])} of {shown(row['image'])}: {tokens.name} does not "
                "have both"
            )
        known = captions[row["caption"]], references[row["image"]]
        rows += [Rating(row["image"], known[0], number_of(row, column, where), known[1]) for column in rated]
    check_count(name, f"ratings in {path}", len(rows), count, partial)
    return rows


def _read_tokens(path: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Read ``IMAGE#NUMBER<tab>CAPTION`` lines: caption id -> caption, and file name of an image -> its captions."""
    captions: dict[str, str] = {}
    references: dict[str, list[str]] = {}
    for where, row in table_rows(path, ["id", "caption"], "\t", head=False):
        image, mark, _ = row["id"].partition("#")
        if not mark:
            raise DataError(f"{where}: {row['id']!r:.80} is not a caption id: expected IMAGE#NUMBER")
        captions[row["id"]] = single_spaced(row["caption"])
        references.setdefault(image, []).append(captions[row["id"]])
    return captions, references


def _without_judged(rows: Sequence[Rating], path: Path, complete: int = 1) -> list[Rating]:
    """Take judged captions out of the references of their image, one equal reference for each judgement.

    Images with fewer than ``complete`` references keep theirs.
    """
    others = {row.image: list(row.references or ()) for row in rows}
    whole = {image for image, texts in others.items() if len(texts) >= complete}
    for row in rows:
        if row.image in whole and row.caption in others[row.image]:
            others[row.image].remove(row.caption)
    bare = [image for image, texts in others.items() if not texts]
    if bare:
        raise DataError(f"{path}: all references of {len(bare)} images are judged, such as {bare[0]!r:.80}")
    return [row._replace(references=others[row.image]) for row in rows]


def composite(
    folder: Path,
    images: Path | None = None,
    partial: bool = False,
    aspect: Literal["correctness", "throughness"] = "correctness",
) -> list[RatedCaptions]:
    """Read ``8k_ASPECT.csv``, ``30k_ASPECT.csv`` and ``coco_ASPECT.csv``; with ``partial``, those that are there.

    Papers print ``correctness``; ``throughness`` (so in the names of the files) is the other.
    """
    if aspect not in ("correctness", "throughness"):
        raise DataError(f"aspect is {aspect!r}: expected 'correctness' or 'throughness'")
    rows: list[Rating] = []
    photos: list[Path | None] = []
    skipped: Counter[str] = Counter()
    for part, (published, file, source) in COMPOSITE.items():
        if partial and not (folder / f"{part}_{aspect}.csv").is_file():
            continue
        path = require(folder, "composite", [f"{part}_{aspect}.csv"], AMT)
        own = list(_turk_judgements(path, skipped))
        check_count("composite", f"images in {path}", len({image for image, _, _ in own}), published, partial)
        known = _composite_references(require(folder, "composite", [file], source), part)
        for image, caption, rating in own:
            references = known.get(coco_id(image) if part == "coco" else image)
            if references is None:
                more = f" (of training images: {TRAIN_REFERENCES})" if part == "coco" else ""
                raise DataError(f"{path} judges captions of {image!r:.80}, of which {file} has none{more}")
            rows.append(Rating(image, caption, rating, references))
            coco_folder = re.search(r"COCO_(\w+)_\d+\.\w+$", image)  # COCO_val2014_...
            place = image_folder(
                folder, images, COMPOSITE_IMAGES.get(part, coco_folder.groups() if coco_folder else ())
            )
            photos.append(None if place is None else place / image)
    check_count("composite", "judgements", len(rows))
    found = [photo for photo in photos if photo is not None]
    convention = "each rated caption is a judgement; judged captions are not among the references"
    others, own_images = _without_judged(rows, folder), found if len(found) == len(rows) else None
    return [rated_captions("composite", others, own_images, "tau_c", convention, dict(skipped))]


def _turk_judgements(path: Path, skipped: Counter[str]) -> Iterator[tuple[str, str, float]]:
    wanted = ["Input.image_url", "Input.text1", "Answer.Q1Answer"]
    for where, row in table_rows(path, wanted, ";", ragged=True, fallback="latin-1"):  # as spreadsheets save it
        if not row["Input.image_url"].strip():
            skipped["rows without an image"] += 1
            continue
        for column in (column for column in row if re.fullmatch(r"Input\.text\d+", column)):
            answer = f"Answer.Q{column.removeprefix('Input.text')}Answer"
            if row[column].strip() and row.get(answer, "").strip().isdigit():
                image = row["Input.image_url"].strip().rsplit("/", 1)[-1]
                yield image, single_spaced(row[column]), number_of(row, answer, where)
            else:
                skipped["captions without a rating"] += 1


def _composite_references(path: Path, part: str) -> dict[str, list[str]]:
    if part != "coco":
        return _read_tokens(path)[1]
    train = path.with_name(TRAIN_REFERENCES)
    return coco_references(path) | (coco_references(train) if train.is_file() else {})


def polaris(
    folder: Path, images: Path | None = None, partial: bool = False, split: str = "test"
) -> list[RatedCaptions]:
    """Read ``polaris_SPLIT.csv``, ``polaris_SPLIT.json`` or Parquet files; splits: train, validation, test."""
    return _polaris("polaris", folder, images, partial, split)


def nebula(folder: Path, images: Path | None = None, partial: bool = False, split: str = "test") -> list[RatedCaptions]:
    """Read ``nebula_SPLIT.csv``, ``nebula_SPLIT.json`` or Parquet files; splits: train, valid, test."""
    return _polaris("nebula", folder, images, partial, split)


def _polaris(name: str, folder: Path, images: Path | None, partial: bool, split: str) -> list[RatedCaptions]:
    if split not in HUB_COUNTS[name]:
        raise DataError(f"{name} has no split {split!r}: expected one of {list(HUB_COUNTS[name])}")
    stem = f"{name}_{'val' if split in ('valid', 'validation') else split}"
    found: Path | Sequence[ImageSource] | None
    tables = [path for path in (folder / f"{stem}.csv", folder / f"{stem}.json") if path.is_file()]
    if tables:
        rows = list(_polaris_table(tables[0]))
        found = image_folder(folder, images, ["images", name.capitalize()])
    else:
        place = folder / "data" if (folder / "data").is_dir() else folder
        files = sorted(place.glob(f"{split}-*.parquet"))
        if not files:
            raise DataError(f"{name} needs {split}-*.parquet in {str(place)!r}. Get it: {HUB[name]}")
        rows = list(_polaris_parquet(files, name))
        stored = _StoredColumn(files, "img" if name == "polaris" else "image")
        found = [StoredImage(stored, number) for number in range(len(rows))]
    check_count(name, f"judgements of split {split}", len(rows), HUB_COUNTS[name][split], partial)
    return [rated_captions(name, rows, found, "tau_c", f"each row of split {split} is a judgement")]


def _polaris_table(path: Path) -> Iterator[Rating]:
    is_json = path.suffix == ".json"
    for where, row in json_items(path) if is_json else table_rows(path, ["mt", "refs", "score", "imgid"]):
        refs = row.get("refs")
        if isinstance(refs, str):
            try:
                refs = ast.literal_eval(refs)  # the CSV file holds Python's own form of a list
            except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
                raise DataError(f"{where}: 'refs' is {shown(refs)}: expected a list of texts") from error
        image = text_of(row, "imgid", where) + (".jpg" if is_json else "")
        rating, references = number_of(row, "score", where), texts_of({"refs": refs}, "refs", where)
        yield Rating(image, caption_of(row, "mt", where), rating, references)


def _polaris_parquet(files: Sequence[Path], name: str) -> Iterator[Rating]:
    caption, image = ("cand", None) if name == "polaris" else ("mt", "file_name")
    for path in files:
        for where, row in _parquet_rows(path, [caption, "human_score", "refs", *([image] if image else [])]):
            references = texts_of(row, "refs", where)
            # Polaris names no image: rows with the same references are of the same one.
            named = str(row[image]) if image else "\n".join(references)
            yield Rating(named, caption_of(row, caption, where), number_of(row, "human_score", where), references)


def _parquet_rows(path: Path, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{path} cannot be read without pyarrow: pip install pyarrow") from error
    try:
        with ParquetFile(path) as file:
            if not set(columns) <= set(file.schema_arrow.names):
                raise DataError(f"{path} has the columns {file.schema_arrow.names}: expected {columns}")
            number = 0
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except DataError:
        raise
    except (OSError, ArrowException, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


class _StoredColumn:
    """A column of images in Parquet files, read when the first is asked for: other metrics need not wait for them."""

    def __init__(self, files: Sequence[Path], column: str) -> None:
        self.files, self.column = files, column

    @cached_property
    def contents(self) -> list[bytes]:
        """The bytes of one image file for each row."""
        found = []
        for where, row in (pair for path in self.files for pair in _parquet_rows(path, [self.column])):
            stored = row[self.column]
            if not isinstance(stored, dict) or not isinstance(stored.get("bytes"), bytes):
                raise DataError(f"{where}: {self.column!r} holds no bytes of an image")
            found.append(stored["bytes"])
        return found


@dataclass(frozen=True)
class StoredImage:
    """An image in a row of Parquet files."""

    stored: _StoredColumn
    number: int

    def render(self) -> Image.Image:
        """Decode it; ``RewardError`` where it cannot be decoded."""
        try:
            return open_image(Image.open(io.BytesIO(self.stored.contents[self.number])))
        except (*UNREADABLE, RewardError) as error:
            raise RewardError(f"an image of a Parquet file cannot be read: {error}") from error


def thumb(
    folder: Path,
    images: Path | None = None,
    partial: bool = False,
    aspect: Literal["total", "precision", "recall"] = "total",
) -> list[RatedCaptions]:
    """Read ``mscoco_THumB-1.0.jsonl``: two sets, without and with the captions by people.

    References are the image's COCO captions less the one that was judged as a person's, where
    ``captions_val2014.json`` is there; else there are none.
    """
    aspects = {"total": "human_score", "precision": "P", "recall": "R"}
    if aspect not in aspects:
        raise DataError(f"aspect is {aspect!r}: expected one of {', '.join(aspects)}")
    path = require(folder, "thumb", ["mscoco_THumB-1.0.jsonl"], THUMB)
    systems, rows = [], []
    for where, item in json_lines(path):
        systems.append(text_of(item, "SYS", where))
        rating = number_of(item, aspects[aspect], where)
        rows.append(Rating(text_of(item, "image", where), text_of(item, "hyp", where), rating, None))
    number = sum(system != "Human" for system in systems)
    check_count("thumb", f"captions by systems in {path}", number)
    check_count("thumb", "judgements", len(rows), 2_500, partial)
    if (folder / "captions_val2014.json").is_file():
        known = coco_references(folder / "captions_val2014.json")
        by_people = {row.image: row.caption for system, row in zip(systems, rows, strict=True) if system == "Human"}
        rows = [
            row._replace(references=other_captions(known, row.image, by_people.get(row.image, ""), path))
            for row in rows
        ]
    by_systems = [row for system, row in zip(systems, rows, strict=True) if system != "Human"]
    photos = image_folder(folder, images, ["val2014", "images"])
    convention = "each caption is a judgement; references are the image's captions less the judged one by a person"
    return [
        rated_captions(f"thumb {aspect}, {title}", own, photos, "pearson", convention)
        for title, own in (("without captions by people", by_systems), ("with captions by people", rows))
    ]


def cxc(
    folder: Path, images: Path | None = None, partial: bool = False, split: Literal["val", "test"] = "test"
) -> list[RatedCaptions]:
    """Read the image-text ratings, ``sits_SPLIT.csv``; references are the image's captions less the judged one.

    ``partial`` is of no effect: the paper does not print the number of ratings of a split.
    """
    if split not in ("val", "test"):
        raise DataError(f"cxc has no split {split!r}: expected val or test")
    place = folder / "data" if (folder / "data").is_dir() else folder
    path = require(place, "cxc", [f"sits_{split}.csv"], CXC)
    file = require(folder, "cxc", ["captions_val2014.json"], CXC)
    known = {caption.caption_id: caption for caption in coco_captions(file)}
    own: dict[str, list[CocoCaption]] = {}
    for caption in known.values():
        own.setdefault(caption.image_id, []).append(caption)
    rows = []
    for where, row in table_rows(path, ["caption", "image", "agg_score"]):
        sentence, image = row["caption"].rpartition(":")[2], text_of(row, "image", where)
        others = [text.caption for text in own.get(coco_id(image), []) if text.caption_id != sentence]
        if sentence not in known or not others:
            missing = "other caption of " + shown(image) if sentence in known else "caption " + shown(row["caption"])
            raise DataError(f"{where}: {file.name} has no {missing}")
        rows.append(Rating(image, known[sentence].caption, number_of(row, "agg_score", where), others))
    check_count("cxc", f"ratings in {path}", len(rows))
    convention = (
        "each pair of caption and image is a judgement; references are the image's captions less the judged one"
    )
    photos = image_folder(folder, images, ["val2014", "images"])
    return [rated_captions(f"cxc {split}", rows, photos, "spearman", convention)]


def ratings(
    folder: Path, images: Path | None = None, partial: bool = False, within_images: bool = True
) -> list[RatedCaptions]:
    """Read any file of ratings (``meta_evaluation.ratings.read_ratings``), or the one ``.jsonl`` file of a folder.

    Args:
        folder: the file itself, or its folder.
        images: folder that the names of images are relative to; None is that of the file.
        partial: of no effect, there is no published number.
        within_images: also compare the captions of one image (or of one ``group``) with each other.
    """
    path = folder
    if folder.is_dir():
        files = sorted(folder.glob("*.jsonl"))
        if len(files) != 1:
            raise DataError(f"{str(folder)!r} has {len(files)} .jsonl files: expected one, or the file itself")
        path = files[0]
    rated = read_ratings(path)
    place = image_folder(path.parent, images, ()) or path.parent
    found = [place / name for name in rated.images]
    references: Sequence[list[str] | None] = rated.references or [None] * len(found)
    rows = [Rating(*row) for row in zip(rated.groups, rated.captions, rated.ratings, references, strict=True)]
    own_images = found if os.path.isfile(found[0]) else None
    convention = "each line is a judgement"
    return [rated_captions(path.stem, rows, own_images, None, convention, within_images=within_images)]
