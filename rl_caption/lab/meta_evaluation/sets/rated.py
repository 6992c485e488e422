"""Sets of captions that people rated; one function for each, named as in ``SETS``."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rewards.base import naming
from rl_caption.data.base import DataError
from rl_caption.data.plain_files import json_lines, parse_json, single_spaced
from rl_caption.lab.meta_evaluation.sets.base import (
    COCO_CAPTIONS,
    READING,
    Files,
    Judged,
    JudgementSet,
    caption_of,
    captions_of,
    coco_id,
    coco_references,
    convert,
    rated,
    table_rows,
)
from rl_caption.lab.meta_evaluation.sets.hub import hub_files, hub_rows

FLICKR8K = (
    "Flickr8k_text.zip (captions and annotations) and Flickr8k_Dataset.zip (photos), University of "
    "Illinois, https://hockenmaier.cs.illinois.edu/8k-pictures.html, or the copies that are named "
    "there"
)
FLICKR8K_TOKENS = "Flickr8k.token.txt"
FLICKR8K_IMAGES = ("images", "Flickr8k_Dataset", "Flicker8k_Dataset")
OWN_REFERENCE = "the caption is one of the image's references"
AMT = (
    "the AMT evaluation of 'From Images to Sentences through Scene Description Graphs' (Aditya et "
    "al., Arizona State University and University of Maryland, "
    "https://imagesdg.wordpress.com/image-to-scene-description-graph/)"
)
COMPOSITE = {
    "8k": (997, FLICKR8K_TOKENS, "the captions of Flickr8k (Flickr8k_text.zip)"),
    "30k": (
        991,
        "results_20130124.token",
        "the captions of Flickr30k (flickr30k.tar.gz, University of Illinois)",
    ),
    "coco": (
        2007,
        COCO_CAPTIONS,
        "the COCO annotations (annotations_trainval2014.zip, cocodataset.org)",
    ),
}
"""Part -> published number of images, file of references, where that is from."""
COMPOSITE_IMAGES = {
    "8k": ("Flickr8k_Dataset", "Flicker8k_Dataset"),
    "30k": ("flickr30k-images", "flickr30k_images"),
}
TRAIN_REFERENCES = "captions_train2014.json"
"""Read, too, where it is there: captions of COCO's training images."""
ICC_CAPTIONS = "https://github.com/moranyanuka/icc, the captions that people rated"
BRYSBAERT = (
    "Concreteness_ratings_Brysbaert_et_al_BRM.txt of Brysbaert et al. 2014, "
    "http://crr.ugent.be/archives/1330"
)


def flickr8k_expert(release: Files) -> list[JudgementSet]:
    """Read ``ExpertAnnotations.txt`` with ``Flickr8k.token.txt``, ``flickr8k.json`` or Parquet
    files.

    Hodosh, Young and Hockenmaier, JAIR 2013; protocol of CLIPScore (Hessel et al., EMNLP 2021):
    three experts rate a pair of image and caption from 1 to 4, each rating is a judgement, and
    captions among the image's references are left out. Parquet files: ``expert/test-*.parquet``.
    """
    files = ["ExpertAnnotations.txt", "flickr8k.json"]
    rows, path = _flickr8k(release, files, "expert", ["first", "second", "third"])
    kept = [row for row in rows if row.captions[0] not in row.references[0]]
    release.check_count(f"judgements in {path}", len(kept), 16_992)
    convention = "each of the three experts' ratings of a caption is a judgement; 5 references"
    excluded = {OWN_REFERENCE: len(rows) - len(kept)}
    return [JudgementSet(release.name, kept, convention, excluded, published="tau_c")]


def flickr8k_crowdflower(release: Files) -> list[JudgementSet]:
    """Read ``CrowdFlowerAnnotations.txt``, ``crowdflower_flickr8k.json`` or Parquet files.

    The latter are ``crowdflower/test-*.parquet``. Source as for ``flickr8k_expert``. The rating is
    the fraction of people who found that the caption fits, and judged captions are taken out of the
    references.
    """
    files = ["CrowdFlowerAnnotations.txt", "crowdflower_flickr8k.json"]
    rows, path = _flickr8k(release, files, "crowdflower", ["first"])
    release.check_count(f"judgements in {path}", len(rows), 47_830)
    # In the JSON file judged captions are out already: such an image has fewer than five.
    rows = _without_judged(rows, path, complete=5)
    convention = (
        "the rating is the share of people who said yes; judged captions are not among the "
        "references"
    )
    return [JudgementSet(release.name, rows, convention, published="tau_b")]


def _flickr8k(
    release: Files, files: list[str], configuration: str, ratings: list[str]
) -> tuple[list[Judged], Path]:
    """Judgements with all captions of their image, and their file."""
    stored = hub_files(release, "test", configuration)
    if stored and not any((release.folder / file).is_file() for file in files):
        return hub_rows(stored), stored[0]
    path = release.require(FLICKR8K, *files)
    if path.suffix == ".json":
        rows = _flickr8k_json(path)
        rows = [row._replace(image_id=Path(str(row.image)).name) for row in rows]
        return release.with_images(rows, *FLICKR8K_IMAGES), path
    tokens = release.require(FLICKR8K, FLICKR8K_TOKENS)
    captions, references = _read_tokens(tokens)
    release.check_count(f"captions in {tokens}", len(captions), 40_460)
    rows = []

    def read(row: dict[str, str]) -> None:
        name, caption = row["image"], captions[row["caption"]]
        rows.extend(rated(name, caption, row[column], references[name]) for column in ratings)

    columns = ["image", "caption", "first", "second", "third"]
    convert(path, table_rows(path, "\t", columns), read)
    return release.with_images(rows, *FLICKR8K_IMAGES), path


def _read_tokens(path: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Read ``IMAGE#NUMBER<tab>CAPTION`` lines: caption id -> caption, image -> its captions."""
    captions: dict[str, str] = {}
    references: dict[str, list[str]] = {}
    for row in table_rows(path, "\t", ["id", "caption"]):
        caption = single_spaced(row["caption"])
        captions[row["id"]] = caption
        references.setdefault(row["id"].partition("#")[0], []).append(caption)
    return captions, references


def _without_judged(rows: Sequence[Judged], path: Path, complete: int = 1) -> list[Judged]:
    """Take judged captions out of the references of their image; each removes one equal reference.

    Images with fewer than ``complete`` references keep all of them.
    """
    others = {row.image_id: list(row.references[0]) for row in rows}
    full = {image for image, texts in others.items() if len(texts) >= complete}
    for row in rows:
        (caption,) = row.captions
        if row.image_id in full and caption in others[row.image_id]:
            others[row.image_id].remove(caption)
    bare = [image for image, texts in others.items() if not texts]
    if bare:
        raise DataError(
            f"{path}: all references of {len(bare)} images are judged, such as {bare[0]!r:.80}"
        )
    return [row._replace(references=(others[row.image_id],)) for row in rows]


def composite(
    release: Files,
    aspect: Literal["correctness", "throughness"] = "correctness",
    photos: Literal["all", "8k", "30k", "coco"] = "all",
) -> list[JudgementSet]:
    """Read ``8k_ASPECT.csv``, ``30k_ASPECT.csv`` and ``coco_ASPECT.csv``.

    With ``partial``, those that are there. Where none is there, ``test-*.parquet`` of the hub; how
    many judgements that has is not published.

    Aditya et al., "From Images to Sentences through Scene Description Graphs", 2015: captions of
    Flickr8k, Flickr30k and COCO by people and by two systems, rated 1 to 5. Papers print
    ``correctness``; ``throughness`` (so in the names of the files) is the other aspect. Papers
    differ in how many captions they count: here all with a rating. ``photos`` judges those of one
    data set alone.
    """
    parts = list(COMPOSITE) if photos == "all" else [photos]
    there = [part for part in parts if (release.folder / f"{part}_{aspect}.csv").is_file()]
    stored = hub_files(release, "test")
    if stored and not there and (aspect, photos) == ("correctness", "all"):
        convention = "each row of split test is a judgement"
        rows = hub_rows(stored)
        release.check_count("judgements", len(rows))
        return [JudgementSet("composite", rows, convention, published="tau_c")]
    rows = []
    skipped: Counter[str] = Counter()
    for part in there if release.partial else parts:
        rows += _composite_part(release, part, aspect, skipped)
    release.check_count("judgements", len(rows))
    convention = "each rated caption is a judgement; judged captions are not among the references"
    rows = _without_judged(rows, release.folder)
    name = "composite" if photos == "all" else f"composite {photos}"
    return [JudgementSet(name, rows, convention, dict(skipped), published="tau_c")]


def _composite_part(release: Files, part: str, aspect: str, skipped: Counter[str]) -> list[Judged]:
    published, file, source = COMPOSITE[part]
    path = release.require(AMT, f"{part}_{aspect}.csv")
    judgements = list(_turk_judgements(path, skipped))
    release.check_count(f"images in {path}", len({image for image, *_ in judgements}), published)
    references_file = release.require(source, file)
    train_file = references_file.with_name(TRAIN_REFERENCES)
    if part != "coco":
        references = _read_tokens(references_file)[1]
    else:
        references = coco_references(references_file)
        references |= coco_references(train_file) if train_file.is_file() else {}

    rows = []
    with naming(f"{references_file} has no captions of an image", (KeyError,), DataError):
        for name, caption, rating in judgements:
            coco_folder = re.search(r"COCO_(\w+)_\d+\.\w+$", name)  # COCO_val2014_...
            names = COMPOSITE_IMAGES.get(part, coco_folder.groups() if coco_folder else ())
            folder = release.image_folder(*names)
            own = references[coco_id(name) if part == "coco" else name]
            rows.append(rated(name, caption, rating, own, folder and folder / name))
    return rows


def _turk_judgements(path: Path, skipped: Counter[str]) -> Iterator[tuple[str, str, float]]:
    """Image, caption and rating from a file of Mechanical Turk: a row an image."""
    for row in table_rows(path, ";"):
        with naming(str(path), (KeyError,), DataError):
            url = row["Input.image_url"].strip()
        if not url:
            skipped["rows without an image"] += 1
            continue
        for column in row:
            if not re.fullmatch(r"Input\.text\d+", column):
                continue
            answer = row.get(column.replace("Input.text", "Answer.Q") + "Answer", "").strip()
            caption = single_spaced(row[column])
            if caption and answer.isdigit():
                yield url.rsplit("/", 1)[-1], caption, float(answer)
            else:
                skipped["captions without a rating"] += 1


def ratings(release: Files, within_images: bool = True) -> list[JudgementSet]:
    """Read any file of ratings, given by its path or as the only ``.jsonl`` file of a folder.

    - JSON lines, one rated caption each: ``image``, ``caption``, ``rating`` (a number), and
      optionally ``references`` (a list of strings; in all lines or in none) and ``group`` (the
      image, if absent). Several ratings of a caption are several lines. DeCapBench (five captions
      of each image, one rating each) is written so.
    - ``flickr8k.json`` and ``crowdflower_flickr8k.json``, or any other ``.json`` file of their
      form: an object of image id -> ``{image_path, ground_truth, human_judgement: [{caption,
      rating}]}``. White space is made single, and a judgement without a number (NaN) is left out,
      as in the loader of PAC-S.

    ``images`` is the folder that names of images are relative to, by default that of the file.
    ``partial`` is of no effect.
    """
    path = release.folder
    if path.is_dir():
        files = sorted(path.glob("*.jsonl"))
        if len(files) != 1:
            raise DataError(
                f"{str(path)!r} has {len(files)} .jsonl files: expected one, or the file itself"
            )
        path = files[0]
    rows = _flickr8k_json(path) if path.suffix == ".json" else _rating_lines(path)
    if not rows:
        raise DataError(f"{path} has no ratings")
    folder = release.images or path.parent
    there = os.path.isfile(folder / str(rows[0].image))
    rows = [row._replace(image=folder / str(row.image) if there else None) for row in rows]
    return [JudgementSet(path.stem, rows, "each line is a judgement", within_images=within_images)]


def _rating_lines(path: Path) -> list[Judged]:
    rows = []
    for _, where, row in json_lines(path):
        with naming(where, READING, DataError):
            references = (captions_of(row["references"]),) if "references" in row else ()
            image_id, rating = str(row.get("group", row["image"])), float(row["rating"])
            captions, image = [row["caption"]], row["image"]
            rows.append(Judged(image_id, captions, rating, references=references, image=image))
    return rows


def _flickr8k_json(path: Path) -> list[Judged]:
    """Judgements, with the path that the file has for the image as ``image``."""
    rows: list[Judged] = []

    def read(item: tuple[str, Any]) -> None:
        image_id, content = item
        references = captions_of(content["ground_truth"])
        for judgement in content["human_judgement"]:
            caption, rating = caption_of(judgement["caption"]), float(judgement["rating"])
            if not math.isnan(rating):
                rows.append(rated(image_id, caption, rating, references, content["image_path"]))

    convert(path, parse_json(path.read_bytes(), path).items(), read)
    return rows


def icc_captions(
    release: Files, first: Annotated[int, Field(ge=2, le=500)] | None = None
) -> list[JudgementSet]:
    """Read ``caption_concreteness_annotations.csv``: captions of LAION that people rated 0 to 3.

    Yanuka et al., "ICC", Findings of ACL 2024 (docs/papers.md). ``first`` takes the first so many
    rows: the first 200 of the 500 give the paper's figures. The column ``icc_score`` are the scores
    that the authors released. ``images`` is of no effect.
    """
    path = release.require(ICC_CAPTIONS, "caption_concreteness_annotations.csv")
    table = table_rows(path)
    release.check_count(f"captions in {path}", len(table), 500)
    table = table[:first]
    scores = convert(path, table, lambda row: float(row["icc_score"]))
    rows = convert(
        path, table, lambda row: rated("", row["caption"], row["concreteness_annotation"], None)
    )
    return [
        JudgementSet(
            "icc_captions" + (f", first {first}" if first else ""),
            [row._replace(image_id=str(number)) for number, row in enumerate(rows)],
            "each caption is a judgement; there is no image",
            text_alone=True,
            released={"ICC (released scores)": scores},
        )
    ]


def icc_words(release: Files) -> list[JudgementSet]:
    """Read the concreteness ratings (1 to 5, means over people) of 39,954 words and expressions.

    Brysbaert, Warriner and Kuperman, "Concreteness ratings for 40 thousand generally known English
    word lemmas", Behavior Research Methods 2014. The 14,592 words whose ``Dom_Pos`` is ``Noun`` are
    judged (the ICC paper has 14,562 nouns, and does not say which it left out). ``images`` is of no
    effect.
    """
    path = release.require(BRYSBAERT, "Concreteness_ratings_Brysbaert_et_al_BRM.txt")
    table = table_rows(path, "\t")
    release.check_count(f"words in {path}", len(table), 39_954)
    kinds = convert(path, table, lambda row: row["Dom_Pos"])
    nouns = [row for row, kind in zip(table, kinds, strict=True) if kind == "Noun"]
    release.check_count(f"nouns in {path}", len(nouns))
    rows = convert(path, nouns, lambda row: rated("", row["Word"], row["Conc.M"], None))
    return [
        JudgementSet(
            "icc_words, Noun",
            [row._replace(image_id=str(number)) for number, row in enumerate(rows)],
            "each word is a judgement, its mean rating; there is no image",
            {"Dom_Pos is not Noun": len(table) - len(nouns)},
            text_alone=True,
        )
    ]
