"""Sets of groups of captions whose scores must be in order; one function for each, named as in ``SETS``."""

from __future__ import annotations

import re

import numpy as np

from rl_caption.data.base import DataError
from rl_caption.data.negatives import EDITS, tagged
from rl_caption.meta_evaluation.sets.base import (
    CaptionGroups,
    Files,
    image_files,
    json_lines,
    json_rows,
)

SUGARCREPE_PP_SOURCE = (
    "the folder data of https://github.com/Sri-Harsha/scpp, and val2017 from https://cocodataset.org/"
)
SUGARCREPE_PP = {"swap_obj": 245, "swap_att": 666, "replace_obj": 1652, "replace_att": 788, "replace_rel": 1406}
"""File -> published number of triplets."""
WINOGROUND_SOURCE = "data/examples.jsonl and data/images.zip of https://huggingface.co/datasets/facebook/winoground"
WINOGROUND = 400
TEXT, IMAGE = [(0, 1), (3, 2)], [(0, 2), (3, 1)]
"""Of the scores of both captions for the first image, then for the second."""
ORDER_SOURCE = (
    "https://storage.googleapis.com/sfr-vision-language-research/datasets/, to which add the name of the file"
)
ORDER = {"coco_karpathy_test.json": 25_010, "flickr30k_test.json": 5_000}
"""File -> published number of captions."""
ORDER_EDITS = (
    *("shuffle_nouns_adjectives", "shuffle_all_but_nouns_adjectives"),
    *("shuffle_within_trigrams", "shuffle_trigrams"),
)
MAX_WORDS = 30


def sugarcrepe_pp(given: Files) -> list[CaptionGroups]:
    """Read SugarCrepe++'s five files (Dumpala et al., NeurIPS 2024): two captions that are right and a hard negative.

    ITT: both captions score higher than the negative. TOT, of metrics with a text encoder: the cosine of the two
    captions is higher than those of each with the negative. The summaries are means over the files.
    """
    captions, files, kinds = [], [], []
    for kind, rows in given.counted(SUGARCREPE_PP_SOURCE, SUGARCREPE_PP, "triplets"):
        captions += [row.text(key) for row in rows for key in ("caption", "caption2", "negative_caption")]
        files += [row.text("filename") for row in rows for _ in range(3)]
        kinds += [kind] * len(rows)
    photos = image_files(given.image_folder("val2017", "images"), files)
    convention = (
        "ITT: both captions score higher than the hard negative; TOT: the cosine of the two captions is above those of "
        "each with the negative, by the text encoder alone; equal scores are wrong"
    )
    figures = {"ITT": [(0, 2), (1, 2)]}, convention, {"TOT": [((0, 1), (0, 2)), ((0, 1), (1, 2))]}
    return [CaptionGroups("sugarcrepe_pp", captions, files, photos, kinds, *figures, summary="kinds")]


def winoground(given: Files) -> list[CaptionGroups]:
    """Read ``examples.jsonl`` (Thrush et al., "Winoground", CVPR 2022): two captions of the same words, an image each.

    Text score: of each image its caption scores higher; image score: of each caption its image does; group score: both.
    Kinds are ``collapsed_tag``. An image is a PNG file.
    """
    path = given.require(WINOGROUND_SOURCE, "examples.jsonl", "data/examples.jsonl")
    rows = json_lines(path)
    given.check_count(f"examples in {path}", len(rows), WINOGROUND)
    captions = [row.text(f"caption_{number}") for row in rows for number in (0, 1, 0, 1)]
    files = [f"{row.text(f'image_{number}')}.png" for row in rows for number in (0, 0, 1, 1)]
    photos = image_files(given.image_folder("images", "data/images"), files)
    kinds = [row.text("collapsed_tag") for row in rows]
    above = {"text score": TEXT, "image score": IMAGE, "group score": TEXT + IMAGE}
    convention = (
        "text score: each image scores higher with its caption than with the other; image score: each caption with its "
        "image; group score: both; equal scores are wrong"
    )
    return [CaptionGroups("winoground", captions, files, photos, kinds, above, convention)]


def aro_order(given: Files, seed: int = 0) -> list[CaptionGroups]:
    """Read COCO and Flickr30k captions for ARO's COCO-Order and Flickr30k-Order, those of the two that are there.

    Yuksekgonul et al., ICLR 2023: a caption against four shuffles of its words. They have no published file: the
    released code shuffles anew in every run, here ``seed`` does, by the rules and the tagger of
    ``rl_caption.data.negatives``, which let nouns and adjectives change places with each other, too, and drop the
    commas of trigrams. As in the released code texts are in lower case, without most punctuation, and of 30 words at
    most, and equal scores are right: a shuffle may change nothing. ``images`` is the folder above ``val2014`` or
    ``flickr30k-images``.

    Raises:
        RewardError: the package of the tagger is missing (extra ``specs``).
    """
    given.require(ORDER_SOURCE, *ORDER)
    found = []
    for file, published in ORDER.items():
        path, name = given.folder / file, f"aro_order {file.split('_')[0]}"
        if not path.is_file():
            continue
        rows = [(row.text("image"), text) for row in json_rows(path) for text in row.captions("caption")]
        given.check_count(f"captions in {path}", len(rows), published)
        captions = []
        for number, (_, text) in enumerate(rows):
            words, generator = tagged(text), np.random.default_rng((seed, number))
            shuffled = [EDITS[edit](words, {}, generator) or text for edit in ORDER_EDITS]
            captions += [_plain(own) for own in (text, *shuffled)]
            if not captions[-5]:
                raise DataError(f"{path}: the caption {text!r:.80} of {rows[number][0]!r:.80} has no words")
        names = [image for image, _ in rows for _ in range(5)]
        photos = image_files(
            given.images or (given.folder if (given.folder / rows[0][0]).parent.is_dir() else None), names
        )
        above = {"precision at 1": [(0, other) for other in range(1, 5)]}
        convention = f"no shuffle of the words (seed {seed}) scores higher than the caption; equal scores are right"
        own = captions, names, photos, ["all"] * len(rows), above, convention
        found.append(CaptionGroups(name, *own, ties="right", shown_kinds=False))
    return found


def _plain(text: str) -> str:
    """As captions are prepared in the released code."""
    return " ".join(re.sub(r"([.!\"()*#:;~])", " ", text.lower()).split()[:MAX_WORDS])
