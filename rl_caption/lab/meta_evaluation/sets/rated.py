"""Sets of captions that people rated; one function for each, named as in ``SETS``."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from rl_caption.data.base import DataError
from rl_caption.data.plain_files import single_spaced
from rl_caption.lab.meta_evaluation.sets.base import (
    COCO_CAPTIONS,
    Files,
    Images,
    RatedCaptions,
    Rating,
    Row,
    benchmark_of,
    coco_id,
    coco_references,
    json_lines,
    json_object,
    rated_captions,
    table_rows,
)
from rl_caption.lab.meta_evaluation.sets.hub import hub_files, hub_ratings
from rl_caption.runtime.options import Range

FLICKR8K = (
    "Flickr8k_text.zip (captions and annotations) and Flickr8k_Dataset.zip (photos), University of Illinois, "
    "https://hockenmaier.cs.illinois.edu/8k-pictures.html, or the copies that are named there"
)
FLICKR8K_TOKENS = "Flickr8k.token.txt"
FLICKR8K_IMAGES = ("images", "Flickr8k_Dataset", "Flicker8k_Dataset")
OWN_REFERENCE = "the caption is one of the image's references"
AMT = (
    "the AMT evaluation of 'From Images to Sentences through Scene Description Graphs' (Aditya et al., Arizona State "
    "University and University of Maryland, https://imagesdg.wordpress.com/image-to-scene-description-graph/)"
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
BRYSBAERT = "Concreteness_ratings_Brysbaert_et_al_BRM.txt of Brysbaert et al. 2014, http://crr.ugent.be/archives/1330"


def flickr8k_expert(release: Files) -> list[RatedCaptions]:
    """Read ``ExpertAnnotations.txt`` with ``Flickr8k.token.txt``, or ``flickr8k.json``, or ``expert/test-*.parquet``.

    Hodosh, Young and Hockenmaier, JAIR 2013; protocol of CLIPScore (Hessel et al., EMNLP 2021): three experts rate a
    pair of image and caption from 1 to 4, each rating is a judgement, and captions among the image's references are
    left out.
    """
    files = ["ExpertAnnotations.txt", "flickr8k.json"]
    rows, path, photos = _flickr8k(release, files, "expert", ["first", "second", "third"], [])
    kept = [row for row in rows if row.caption not in (row.references or ())]
    release.check_count(f"judgements in {path}", len(kept), 16_992)
    convention = "each of the three experts' ratings of a caption is a judgement; 5 references"
    excluded = {OWN_REFERENCE: len(rows) - len(kept)}
    if not isinstance(photos, Path | None):
        photos = [
            photo
            for photo, row in zip(photos, rows, strict=True)
            if row.caption not in (row.references or ())
        ]
    return [
        rated_captions(
            release.name,
            kept,
            photos,
            "tau_c",
            convention,
            excluded,
            benchmark=benchmark_of(release, release.name),
        )
    ]


def flickr8k_crowdflower(release: Files) -> list[RatedCaptions]:
    """Read ``CrowdFlowerAnnotations.txt`` with ``Flickr8k.token.txt``, ``crowdflower_flickr8k.json``, or Parquet files.

    The latter are ``crowdflower/test-*.parquet``. Source as for ``flickr8k_expert``. The rating is the fraction of
    people who found that the caption fits, and judged captions are taken out of the references.
    """
    files = ["CrowdFlowerAnnotations.txt", "crowdflower_flickr8k.json"]
    rows, path, photos = _flickr8k(release, files, "crowdflower", ["share"], ["yes", "no"])
    release.check_count(f"judgements in {path}", len(rows), 47_830)
    # In the JSON file judged captions are out already, and such an image has fewer than five references.
    rows = _without_judged(rows, path, complete=5)
    convention = "the rating is the share of people who said yes; judged captions are not among the references"
    return [
        rated_captions(
            release.name,
            rows,
            photos,
            "tau_b",
            convention,
            benchmark=benchmark_of(release, release.name),
        )
    ]


def _flickr8k(
    release: Files, files: list[str], configuration: str, rated: list[str], others: list[str]
) -> tuple[list[Rating], Path, Images]:
    """Judgements with all captions of their image, their file, and the images; ``rated`` are the columns of ratings."""
    if not any((release.folder / file).is_file() for file in files) and (
        stored := hub_files(release, "test", configuration)
    ):
        rows, images = hub_ratings(stored)
        return rows, stored[0], images
    path = release.require(FLICKR8K, *files)
    if path.suffix == ".json":
        rows = [
            row._replace(image=Path(row.image).name, group=None) for row in _flickr8k_json(path)
        ]
    else:
        rows, tokens = [], release.require(FLICKR8K, FLICKR8K_TOKENS)
        captions, references = _read_tokens(tokens)
        release.check_count(f"captions in {tokens}", len(captions), 40_460)
        for row in table_rows(path, ["image", "caption", *rated, *others], "\t", head=False):
            for key, entries in (("caption", captions), ("image", references)):
                if row.values[key] not in entries:
                    raise row.refusal(key, f"one of {tokens.name}")
            image, caption = row.values["image"], captions[row.values["caption"]]
            rows += [
                Rating(image, caption, row.number(column), references[image]) for column in rated
            ]
    return rows, path, release.image_folder(*FLICKR8K_IMAGES)


def _read_tokens(path: Path) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Read ``IMAGE#NUMBER<tab>CAPTION`` lines: caption id -> caption, and file name of an image -> its captions."""
    captions: dict[str, str] = {}
    references: dict[str, list[str]] = {}
    for row in table_rows(path, ["id", "caption"], "\t", head=False):
        caption_id, caption = row.values["id"], single_spaced(row.values["caption"])
        image, mark, _ = caption_id.partition("#")
        if not mark:
            raise row.refusal("id", "a caption id, IMAGE#NUMBER")
        captions[caption_id] = caption
        references.setdefault(image, []).append(caption)
    return captions, references


def _without_judged(rows: Sequence[Rating], path: Path, complete: int = 1) -> list[Rating]:
    """Take judged captions out of the references of their image; each judgement removes one equal reference.

    Images with fewer than ``complete`` references keep all of them.
    """
    others = {row.image: list(row.references or ()) for row in rows}
    full = {image for image, texts in others.items() if len(texts) >= complete}
    for row in rows:
        if row.image in full and row.caption in others[row.image]:
            others[row.image].remove(row.caption)
    bare = [image for image, texts in others.items() if not texts]
    if bare:
        raise DataError(
            f"{path}: all references of {len(bare)} images are judged, such as {bare[0]!r:.80}"
        )
    return [row._replace(references=others[row.image]) for row in rows]


def composite(
    release: Files,
    aspect: Literal["correctness", "throughness"] = "correctness",
    photos: Literal["all", "8k", "30k", "coco"] = "all",
) -> list[RatedCaptions]:
    """Read ``8k_ASPECT.csv``, ``30k_ASPECT.csv`` and ``coco_ASPECT.csv``; with ``partial``, those that are there.

    Where none is there, ``test-*.parquet`` of the hub, which has the correctness of all; how many is not published.

    Aditya et al., "From Images to Sentences through Scene Description Graphs", 2015: captions of Flickr8k, Flickr30k
    and COCO by people and by two systems, rated 1 to 5. Papers print ``correctness``; ``throughness`` (so in the names
    of the files) is the other. Papers differ in how many captions they count: here all with a rating. ``photos`` judges
    those of Flickr8k, Flickr30k or COCO alone.
    """
    stored = hub_files(release, "test")
    if stored and not any(
        (release.folder / f"{source_set}_{aspect}.csv").is_file() for source_set in COMPOSITE
    ):
        if (aspect, photos) != ("correctness", "all"):
            raise DataError(
                f"{release.name}: {stored[0]} has the correctness of all photos: leave out aspect and photos"
            )
        rows, images = hub_ratings(stored)
        release.check_count("judgements", len(rows))
        convention = "each row of split test is a judgement"
        return [
            rated_captions(
                "composite",
                rows,
                images,
                "tau_c",
                convention,
                benchmark=benchmark_of(release, "composite"),
            )
        ]
    rows = []
    files: list[Path] = []
    skipped: Counter[str] = Counter()
    for source_set, (published, file, source) in COMPOSITE.items():
        if photos not in ("all", source_set):
            continue
        if release.partial and not (release.folder / f"{source_set}_{aspect}.csv").is_file():
            continue
        path = release.require(AMT, f"{source_set}_{aspect}.csv")
        judgements = list(_turk_judgements(path, skipped))
        release.check_count(
            f"images in {path}", len({image for image, _, _ in judgements}), published
        )
        references_of_image = _composite_references(release.require(source, file), source_set)
        for image, caption, rating in judgements:
            references = references_of_image.get(coco_id(image) if source_set == "coco" else image)
            if references is None:
                more = f" (of training images: {TRAIN_REFERENCES})" if source_set == "coco" else ""
                raise DataError(
                    f"{path} judges captions of {image!r:.80}, of which {file} has none{more}"
                )
            rows.append(Rating(image, caption, rating, references))
            coco_folder = re.search(r"COCO_(\w+)_\d+\.\w+$", image)  # COCO_val2014_...
            names = COMPOSITE_IMAGES.get(source_set, coco_folder.groups() if coco_folder else ())
            if folder := release.image_folder(*names):
                files.append(folder / image)
    release.check_count("judgements", len(rows))
    all_files = files if len(files) == len(rows) else None
    convention = "each rated caption is a judgement; judged captions are not among the references"
    rows = _without_judged(rows, release.folder)
    name = "composite" if photos == "all" else f"composite {photos}"
    benchmark = (
        benchmark_of(release, "composite") if (aspect, photos) == ("correctness", "all") else None
    )
    return [
        rated_captions(
            name, rows, all_files, "tau_c", convention, dict(skipped), benchmark=benchmark
        )
    ]


def _turk_judgements(path: Path, skipped: Counter[str]) -> Iterator[tuple[str, str, float]]:
    """Image, caption and rating from a file of Mechanical Turk: a row an image, separated by semicolons."""
    columns = ["Input.image_url", "Input.text1", "Answer.Q1Answer"]
    for row in table_rows(path, columns, ";", spreadsheet=True):
        url = row.values["Input.image_url"].strip()
        if not url:
            skipped["rows without an image"] += 1
            continue
        for column in (column for column in row.values if re.fullmatch(r"Input\.text\d+", column)):
            answer, caption = (
                column.replace("Input.text", "Answer.Q") + "Answer",
                single_spaced(row.values[column]),
            )
            if caption and row.values.get(answer, "").strip().isdigit():
                yield url.rsplit("/", 1)[-1], caption, row.number(answer)
            else:
                skipped["captions without a rating"] += 1


def _composite_references(path: Path, source_set: str) -> dict[str, list[str]]:
    if source_set != "coco":
        return _read_tokens(path)[1]
    files = [path, path.with_name(TRAIN_REFERENCES)]
    return {
        image: list(texts.values())
        for file in files
        if file.is_file()
        for image, texts in coco_references(file).items()
    }


def ratings(release: Files, within_images: bool = True) -> list[RatedCaptions]:
    """Read any file of ratings, given by its path or as the only ``.jsonl`` file of a folder; two formats.

    - JSON lines, one rated caption each: ``image``, ``caption``, ``rating`` (a number), and optionally ``references``
      (a list of strings; in all lines or in none) and ``group`` (the image, if absent). Several ratings of a caption
      are several lines. DeCapBench (five captions of each image, one rating each) is written so.
    - ``flickr8k.json`` and ``crowdflower_flickr8k.json``, or any other ``.json`` file of their form: an object of
      image id -> ``{image_path, ground_truth, human_judgement: [{caption, rating}]}``. White space is made single, and
      a judgement without a number (NaN) is left out, as in the loader of PAC-S.

    ``images`` is the folder that names of images are relative to, by default that of the file. ``partial`` is of no
    effect. ``within_images`` also compares the captions of one group with each other; groups are the ``image_ids``.
    """
    path = release.folder
    if path.is_dir():
        files = sorted(file for file in path.glob("*.jsonl") if not file.name.startswith("."))
        if len(files) != 1:
            raise DataError(
                f"{str(path)!r} has {len(files)} .jsonl files: expected one, or the file itself"
            )
        path = files[0]
    rows = _flickr8k_json(path) if path.suffix == ".json" else _rating_lines(path)
    if not rows:
        raise DataError(
            f"{path} has no ratings: expected JSON lines with 'image', 'caption' and 'rating'"
        )
    folder = release.images or path.parent
    photos = folder if os.path.isfile(folder / rows[0].image) else None
    return [
        rated_captions(
            path.stem, rows, photos, None, "each line is a judgement", within_images=within_images
        )
    ]


def _rating_lines(path: Path) -> list[Rating]:
    ratings, rows = [], json_lines(path)
    have = any("references" in row.values for row in rows)
    for row in rows:
        if have and "references" not in row.values:
            raise DataError(
                f"{row.where} has no 'references', other rows have: expected them in all or in none"
            )
        references = row.texts("references") if have else None
        image, group = row.text("image"), row.identifier("group") if "group" in row.values else None
        ratings.append(Rating(image, row.text("caption"), row.number("rating"), references, group))
    return ratings


def _flickr8k_json(path: Path) -> list[Rating]:
    ratings, content = [], json_object(path, "an object of image id -> object")
    for image_id in content.values:
        item = content.row(image_id)
        image, references = item.text("image_path"), item.captions("ground_truth")
        for row in item.rows("human_judgement"):
            value = row.values.get("rating")
            if not (isinstance(value, float) and math.isnan(value)):
                ratings.append(
                    Rating(
                        image, row.caption("caption"), row.number("rating"), references, image_id
                    )
                )
    return ratings


def icc_captions(
    release: Files, first: Annotated[int, Range(min=2, max=10**6)] | None = None
) -> list[RatedCaptions]:
    """Read ``caption_concreteness_annotations.csv``: captions of LAION that people rated 0 to 3 (docs/icc.md).

    Yanuka et al., "ICC", Findings of ACL 2024. ``first`` takes the first so many rows: the first 200 of the 500 give
    the paper's figures. The column ``icc_score`` are the scores that the authors released. ``images`` is of no effect.
    """
    path = release.require(ICC_CAPTIONS, "caption_concreteness_annotations.csv")
    rows = list(table_rows(path, ["caption", "concreteness_annotation", "icc_score"]))
    release.check_count(f"captions in {path}", len(rows), 500)
    if first is not None and not 2 <= first <= len(rows):
        raise DataError(
            f"icc_captions: first is {first}: expected 2 to {len(rows)}, the captions in {path}"
        )
    rows, name = rows[:first], "icc_captions" + (f", first {first}" if first else "")
    released = {"ICC (released scores)": [row.number("icc_score") for row in rows]}
    convention = "each caption is a judgement; there is no image"
    return [
        _texts_alone(
            name, rows, "caption", "concreteness_annotation", convention, released=released
        )
    ]


def icc_words(release: Files, part_of_speech: str | None = "Noun") -> list[RatedCaptions]:
    """Read the concreteness ratings (1 to 5, means over people) of 39,954 words and two-word expressions.

    Brysbaert, Warriner and Kuperman, "Concreteness ratings for 40 thousand generally known English word lemmas",
    Behavior Research Methods 2014. ``part_of_speech`` is a value of the column ``Dom_Pos``: 14,592 words are ``Noun``
    (the ICC paper has 14,562 nouns, and does not say which it left out); None takes all 39,954. ``images`` is of no
    effect.
    """
    path = release.require(BRYSBAERT, "Concreteness_ratings_Brysbaert_et_al_BRM.txt")
    rows = list(table_rows(path, ["Word", "Conc.M", "Dom_Pos"], "\t"))
    release.check_count(f"words in {path}", len(rows), 39_954)
    chosen = [row for row in rows if part_of_speech in (None, row.values["Dom_Pos"])]
    release.check_count(f"words with Dom_Pos {part_of_speech!r} in {path}", len(chosen))
    excluded = (
        {}
        if part_of_speech is None
        else {f"Dom_Pos is not {part_of_speech}": len(rows) - len(chosen)}
    )
    name = "icc_words" + (f", {part_of_speech}" if part_of_speech else "")
    convention = "each word is a judgement, its mean rating; there is no image"
    return [_texts_alone(name, chosen, "Word", "Conc.M", convention, excluded)]


def _texts_alone(
    name: str, rows: Sequence[Row], caption: str, rating: str, *args: Any, **kwargs: Any
) -> RatedCaptions:
    judged = [
        Rating(str(number), row.caption(caption), row.number(rating), None)
        for number, row in enumerate(rows)
    ]
    return rated_captions(name, judged, None, "pearson", *args, text_alone=True, **kwargs)
