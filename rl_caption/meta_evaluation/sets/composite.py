"""Composite: captions of Flickr8k, Flickr30k and COCO by people and by two systems, rated 1 to 5 on Mechanical Turk.

Source: Aditya et al., "From Images to Sentences through Scene Description Graphs using Commonsense Reasoning and
Knowledge", 2015. Its files are ``8k_correctness.csv``, ``30k_correctness.csv`` and ``coco_correctness.csv`` (and
``..._throughness.csv``), as Mechanical Turk returns them: separated by semicolons, a row an image, ``Input.image_url``,
``Input.text1`` ... and ``Answer.Q1Answer`` ...; lines at the end without an image or a rating are no judgements.

References are those of the three datasets. One of the captions is a person's, often a reference: it is taken out of
the image's references, as CLIPScore does (Hessel et al., EMNLP 2021, section 4.1), for all captions of the image.
Printed is tau_c. How many captions a row has differs between the files, and papers differ in how many they count ("12k
judgments"): here all captions with a rating are judged.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from rl_caption.meta_evaluation.sets.base import (
    JudgingSetError,
    RatedCaptions,
    check_count,
    image_folder,
    number_of,
    read_text,
    require,
    single_spaced,
)
from rl_caption.meta_evaluation.sets.coco import coco_id, coco_references
from rl_caption.meta_evaluation.sets.flickr8k import read_tokens, references_without

SOURCE = (
    "the AMT evaluation of 'From Images to Sentences through Scene Description Graphs' (Aditya et al., Arizona State "
    "University and University of Maryland, https://imagesdg.wordpress.com/image-to-scene-description-graph/)"
)
PARTS = {
    "8k": (997, "Flickr8k.token.txt", "the captions of Flickr8k (Flickr8k_text.zip)"),
    "30k": (991, "results_20130124.token", "the captions of Flickr30k (flickr30k.tar.gz, University of Illinois)"),
    "coco": (2007, "captions_val2014.json", "the COCO annotations (annotations_trainval2014.zip, cocodataset.org)"),
}
"""Part -> published number of images, file of references, where that is from."""
TRAIN_REFERENCES = "captions_train2014.json"
"""Read, too, where it is there: captions of COCO's training images."""
IMAGE_FOLDERS = {"8k": ("Flickr8k_Dataset", "Flicker8k_Dataset"), "30k": ("flickr30k-images", "flickr30k_images")}
_COCO_FOLDER = re.compile(r"COCO_(\w+)_\d+\.\w+$")


def composite(
    folder: Path,
    images: Path | None = None,
    partial: bool = False,
    aspect: Literal["correctness", "throughness"] = "correctness",
) -> list[RatedCaptions]:
    """Read Composite.

    Args:
        folder: of the three CSV files and the three files of references.
        images: one folder with the photos of all three; None looks below ``folder`` for those of each.
        partial: accept other numbers of images than the published ones, and parts that are not there.
        aspect: ``correctness`` is what papers print; ``throughness`` (so in the names of the files) is the other.

    Raises:
        JudgingSetError: a file is missing or wrong, or has another number of images.
    """
    name = "composite"
    if aspect not in ("correctness", "throughness"):
        raise JudgingSetError(f"aspect is {aspect!r}: expected 'correctness' or 'throughness'")
    rows: list[tuple[str, str, float]] = []
    references: dict[str, list[str]] = {}
    photos: dict[str, Path | None] = {}
    skipped: Counter[str] = Counter()
    for part, (published, file, source) in PARTS.items():
        if partial and not (folder / f"{part}_{aspect}.csv").is_file():
            continue
        path = require(folder, name, [f"{part}_{aspect}.csv"], SOURCE)
        own = list(_judgements(path, skipped))
        check_count(name, f"images in {path}", len({image for image, _, _ in own}), published, partial)
        known = _references(require(folder, name, [file], source), part)
        for image, caption, rating in own:
            if _key(image, part) not in known:
                more = f" (of training images: {TRAIN_REFERENCES})" if part == "coco" else ""
                raise JudgingSetError(f"{path} judges captions of {image!r:.80}, of which {file} has none{more}")
            references[image] = known[_key(image, part)]
            photos[image] = _photo(folder, images, part, image)
            rows.append((image, caption, rating))
    if not rows:
        raise JudgingSetError(f"{name} has no judgements in {str(folder)!r}. Get it: {SOURCE}")
    return [_rated(folder, rows, references, photos, skipped)]


def _judgements(path: Path, skipped: Counter[str]) -> Iterator[tuple[str, str, float]]:
    text = read_text(path, "latin-1")  # as spreadsheets save it
    try:
        content = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=";"))
    except csv.Error as error:
        raise JudgingSetError(f"{path}: {error}") from error
    head = list(content[0]) if content else []
    texts = [column for column in head if re.fullmatch(r"Input\.text\d+", column or "")]
    if "Input.image_url" not in head or not texts:
        raise JudgingSetError(
            f"{path} has the columns {head[:40]!r:.400}: expected Input.image_url, Input.text1, Answer.Q1Answer"
        )
    for number, row in enumerate(content, start=1):
        url = row.get("Input.image_url") or ""
        if not url.strip():
            skipped["rows without an image"] += 1
            continue
        for column in texts:
            answer = row.get(f"Answer.Q{column.removeprefix('Input.text')}Answer") or ""
            caption = single_spaced(row[column] or "")
            if caption and answer.strip().isdigit():
                rating = number_of(answer, f"{path}, row {number}: the rating of {column}")
                yield url.strip().rsplit("/", 1)[-1], caption, rating
            else:
                skipped["captions without a rating"] += 1


def _references(path: Path, part: str) -> dict[str, list[str]]:
    if part != "coco":
        return read_tokens(path)[1]
    train = path.with_name(TRAIN_REFERENCES)
    return coco_references(path) | (coco_references(train) if train.is_file() else {})


def _photo(folder: Path, images: Path | None, part: str, image: str) -> Path | None:
    found = _COCO_FOLDER.search(image)  # COCO's folders are named in the names of its files: COCO_val2014_...
    names = IMAGE_FOLDERS[part] if part in IMAGE_FOLDERS else ((found[1],) if found else ())
    place = image_folder(folder, images, names)
    return None if place is None else place / image


def _key(image: str, part: str) -> str:
    return coco_id(image) if part == "coco" else image


def _rated(
    folder: Path,
    rows: list[tuple[str, str, float]],
    references: Mapping[str, list[str]],
    photos: Mapping[str, Path | None],
    skipped: Mapping[str, int],
) -> RatedCaptions:
    others = references_without(rows, references, folder)
    found = [photo for image, _, _ in rows if (photo := photos[image]) is not None]
    return RatedCaptions(
        "composite",
        [caption for _, caption, _ in rows],
        [rating for _, _, rating in rows],
        [image for image, _, _ in rows],
        found if len(found) == len(rows) else None,
        [others[image] for image, _, _ in rows],
        "tau_c",
        "each rated caption is a judgement; judged captions are not among the references",
        dict(skipped),
    )
