"""Sets of captions that people rated; one function for each set, named as in ``SETS``."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rewards.base import naming
from rl_caption.data.base import DataError
from rl_caption.data.plain_files import json_lines, single_spaced
from rl_caption.lab.meta_evaluation.sets.base import (
    READING,
    Files,
    Judged,
    JudgementSet,
    captions_of,
    coco_id,
    coco_references,
    rated_row,
)

FLICKR8K_TOKENS = "Flickr8k.token.txt"
FLICKR8K_IMAGES = ("images", "Flickr8k_Dataset", "Flicker8k_Dataset")
OWN_REFERENCE = "the caption is one of the image's references"
COMPOSITE = {
    "8k": (997, FLICKR8K_TOKENS, FLICKR8K_IMAGES[1:]),
    "30k": (
        991,
        "results_20130124.token",
        ("flickr30k-images", "flickr30k_images"),
    ),
    "coco": (2007, "captions_val2014.json", ()),
}
"""Part -> published number of images, file of references, folders of images."""
IN_TEXT_ALONE = ("tau_b", "pearson", "spearman")


def flickr8k_expert(files: Files) -> list[JudgementSet]:
    """Read ``ExpertAnnotations.txt`` with ``Flickr8k.token.txt``, or the
    ``flickr8k.json`` of CLIPScore and PAC-S.

    Hodosh, Young and Hockenmaier, JAIR 2013; protocol of CLIPScore (Hessel et al.,
    EMNLP 2021): three experts rate a pair of image and caption from 1 to 4, each rating
    is a judgement, and captions among the image's references are left out.
    """
    rows = _flickr8k(files, "ExpertAnnotations.txt", "flickr8k.json", raters=3)
    kept = [row for row in rows if row.captions[0] not in row.references[0]]
    files.check_count("judgements", len(kept), 16_992)
    convention = (
        "each of the three experts' ratings of a caption is a judgement; 5 references"
    )
    excluded = {OWN_REFERENCE: len(rows) - len(kept)}
    return [
        JudgementSet(
            files.name,
            kept,
            convention,
            excluded,
            published=["tau_c"],
        )
    ]


def flickr8k_crowdflower(files: Files) -> list[JudgementSet]:
    """Read ``CrowdFlowerAnnotations.txt`` with ``Flickr8k.token.txt``, or
    ``crowdflower_flickr8k.json``.

    Source as for ``flickr8k_expert``. The rating is the fraction of people who found
    that the caption fits, and judged captions are taken out of the references.
    """
    json_name = "crowdflower_flickr8k.json"
    rows = _flickr8k(files, "CrowdFlowerAnnotations.txt", json_name, raters=1)
    files.check_count("judgements", len(rows), 47_830)
    convention = (
        "the rating is the share of people who said yes; judged captions are not among the "
        "references"
    )
    # The JSON file leaves judged captions out already: their images have fewer than five.
    rows = _without_judged(rows, complete=5)
    return [JudgementSet(files.name, rows, convention, published=["tau_b"])]


def _flickr8k(files: Files, name: str, json_name: str, raters: int) -> list[Judged]:
    """Judgements with all captions of their image."""
    rows = []
    if files.require(name, json_name).name == json_name:
        for item in files.json(json_name).values():
            image, texts = (
                Path(item["image_path"]).name,
                captions_of(item["ground_truth"]),
            )
            for answer in item["human_judgement"]:
                if not math.isnan(answer["rating"]):
                    rows.append(
                        rated_row(
                            image,
                            answer["caption"],
                            answer["rating"],
                            texts,
                        )
                    )
        return files.with_images(rows, *FLICKR8K_IMAGES)
    captions, references = _token_file(files, FLICKR8K_TOKENS)
    files.check_count("captions", len(captions), 40_460)
    for row in files.table(name, "\t", ["image", "caption", "0", "1", "2"]):
        image, caption = row["image"], captions[row["caption"]]
        for rater in range(raters):
            rows.append(
                rated_row(
                    image,
                    caption,
                    row[str(rater)],
                    references[image],
                )
            )
    return files.with_images(rows, *FLICKR8K_IMAGES)


def _token_file(files: Files, name: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Read ``IMAGE#NUMBER<tab>CAPTION`` lines: id of a caption -> caption; image ->
    captions.
    """
    captions: dict[str, str] = {}
    references: dict[str, list[str]] = {}
    for row in files.table(name, "\t", ["id", "caption"]):
        caption = captions[row["id"]] = single_spaced(row["caption"])
        references.setdefault(row["id"].partition("#")[0], []).append(caption)
    return captions, references


def _without_judged(rows: Sequence[Judged], complete: int = 1) -> list[Judged]:
    """Remove judged captions from the references of their image, one reference for each
    equal caption. Raises ``DataError`` where an image keeps none.

    Images with fewer than ``complete`` references keep all references.
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
            f"all references of {len(bare)} images are judged, such as {bare[0]!r:.80}"
        )
    return [row._replace(references=(others[row.image_id],)) for row in rows]


def composite(
    files: Files,
    aspect: Literal["correctness", "throughness"] = "correctness",
    photos: Literal["all", "8k", "30k", "coco"] = "all",
) -> list[JudgementSet]:
    """Read ``8k_ASPECT.csv``, ``30k_ASPECT.csv`` and ``coco_ASPECT.csv``.

    Aditya et al., "From Images to Sentences through Scene Description Graphs", 2015:
    captions of Flickr8k, Flickr30k and COCO by people and by two systems, rated 1 to 5.
    Papers print ``correctness``; ``throughness`` (spelled as in the files' names) is
    the other aspect. Papers differ in the number of captions; here, all captions with a
    rating count. ``photos`` selects the photos of one data set.
    """
    skipped: Counter[str] = Counter()
    rows: list[Judged] = []
    for subset in COMPOSITE if photos == "all" else [photos]:
        published, file, folders = COMPOSITE[subset]
        if subset == "coco":
            files.require(file)
            references = coco_references(files, file)
            references |= coco_references(files, "captions_train2014.json")
        else:
            references = _token_file(files, file)[1]
        names = set()
        for row in files.table(f"{subset}_{aspect}.csv", ";"):
            name = row["Input.image_url"].strip().rsplit("/", 1)[-1]
            if not name:
                skipped["rows without an image"] += 1
                continue
            names.add(name)
            in_coco = re.search(r"COCO_(\w+)_\d+\.\w+$", name)  # COCO_val2014_...
            folder = files.image_folder(*(in_coco.groups() if in_coco else folders))
            texts = references[coco_id(name) if subset == "coco" else name]
            for column, caption in row.items():
                number = column.removeprefix("Input.text")
                if number == column or not caption.strip():
                    continue
                rating = row.get(f"Answer.Q{number}Answer", "").strip()
                if rating.isdigit():
                    photo = folder and folder / name
                    rows.append(rated_row(name, caption, rating, texts, photo))
                else:
                    skipped["captions without a rating"] += 1
        files.check_count(f"images of {subset}", len(names), published)
    convention = "each rated caption is a judgement; judged captions are not among the references"
    name = "composite" if photos == "all" else f"composite {photos}"
    rows = _without_judged(rows)
    return [
        JudgementSet(
            name,
            rows,
            convention,
            dict(skipped),
            published=["tau_c"],
        )
    ]


def ratings(files: Files, within_images: bool = True) -> list[JudgementSet]:
    """Read any file of ratings, given by its path or as the only ``.jsonl`` file of a folder.

    JSON lines, one rated caption each: ``image``, ``caption``, ``rating`` (a number),
    and optionally ``references`` (a list of strings; in all lines or in none) and
    ``group`` (the image, if absent). Several ratings of a caption are several lines.
    DeCapBench (five captions of each image, one rating each) is written so.

    ``images`` is the folder that names of images are relative to, by default the file's
    folder. ``partial`` has no effect.
    """
    path = files.folder
    if path.is_dir():
        matches = sorted(path.glob("*.jsonl"))
        if len(matches) != 1:
            raise DataError(
                f"{str(path)!r} has {len(matches)} .jsonl files: expected one"
            )
        path = matches[0]
    folder = files.images or path.parent
    rows = []
    for _, where, row in json_lines(path):
        with naming(where, READING, DataError):
            references = captions_of(row["references"]) if "references" in row else ()
            name, image = str(row.get("group", row["image"])), folder / row["image"]
            judged = rated_row(
                name,
                row["caption"],
                row["rating"],
                references,
                image,
            )
            rows.append(judged._replace(captions=[row["caption"]]))
    files.check_count(f"ratings in {path}", len(rows))
    if len({bool(row.references) for row in rows}) > 1:
        raise DataError(f"{path}: some rows have no references: expected all or none")
    if not Path(str(rows[0].image)).is_file():
        rows = [row._replace(image=None) for row in rows]
    convention = "each line is a judgement"
    return [JudgementSet(path.stem, rows, convention, within_images=within_images)]


def icc_captions(
    files: Files, first: Annotated[int, Field(ge=2, le=500)] | None = None
) -> list[JudgementSet]:
    """Read ``caption_concreteness_annotations.csv``: captions of LAION that people rated 0 to 3.

    Yanuka et al., "ICC", Findings of ACL 2024 (docs/papers.md). ``first`` is the number
    of rows to take: the first 200 of the 500 give the paper's figures. The column
    ``icc_score`` has the scores that the authors released. ``images`` has no effect.
    """
    table = files.table("caption_concreteness_annotations.csv")
    files.check_count("captions", len(table), 500)
    rows = [
        rated_row(str(number), row["caption"], row["concreteness_annotation"])
        for number, row in enumerate(table[:first])
    ]
    scores = [float(row["icc_score"]) for row in table[:first]]
    return [
        JudgementSet(
            "icc_captions" + (f", first {first}" if first else ""),
            rows,
            "each caption is a judgement; there is no image",
            published=IN_TEXT_ALONE,
            text_alone=True,
            released={"ICC (released scores)": scores},
        )
    ]


def icc_words(files: Files) -> list[JudgementSet]:
    """Read the concreteness ratings (1 to 5, means over people) of 39,954 words and expressions.

    Brysbaert, Warriner and Kuperman, "Concreteness ratings for 40 thousand generally
    known English word lemmas", Behavior Research Methods 2014. The 14,592 words whose
    ``Dom_Pos`` is ``Noun`` are judged (the ICC paper has 14,562 nouns, and does not say
    which it left out). ``images`` has no effect.
    """
    table = files.table("Concreteness_ratings_Brysbaert_et_al_BRM.txt", "\t")
    files.check_count("words", len(table), 39_954)
    nouns = [row for row in table if row["Dom_Pos"] == "Noun"]
    rows = [
        rated_row(str(number), row["Word"], row["Conc.M"])
        for number, row in enumerate(nouns)
    ]
    return [
        JudgementSet(
            "icc_words, Noun",
            rows,
            "each word is a judgement, its mean rating; there is no image",
            {"Dom_Pos is not Noun": len(table) - len(nouns)},
            published=IN_TEXT_ALONE,
            text_alone=True,
        )
    ]
