"""FOIL: captions of COCO with one noun replaced by a wrong one; the caption as it was must score higher.

Source: Shekhar et al., "FOIL it! Find One mismatch between Image and Language caption", ACL 2017. The accuracy is
strict: a tie is wrong. References are the image's other COCO captions: the first of them, and the first four (released
code takes all, of which a few images have more).

Two files are read:

- ``foilv1.0_test_2017.json``: all 99,480 pairs of the test set. ``one_per_image`` draws one for each image, as
  CLIPScore does (Hessel et al., EMNLP 2021, section 4.4); which ones it drew is not published. PAC-S uses 8,000 images.
- ``foil-it.json``: 1,000 pairs of VALSE (Parcalabescu et al., ACL 2022), each shown to three people. As there, those
  are judged whose caption, and not the foil, at least two of the three found to be right: 943.

References come from ``captions_val2014.json``; without it only metrics that need none can be judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rewards.judging.sets.base import (
    CaptionPairs,
    JudgingSetError,
    check_count,
    image_folder,
    read_json,
    require,
    single_spaced,
    text_of,
)
from rewards.judging.sets.composite import coco_references

SOURCE = (
    "foilv1.0_test_2017.json from https://foilunitn.github.io/, or foil-it.json from VALSE "
    "(https://github.com/Heidelberg-NLP/VALSE); captions_val2014.json and val2014 from https://cocodataset.org/"
)
PAIRS = {"foilv1.0_test_2017.json": 99_480, "foil-it.json": 1_000}
MAJORITY = 2
"""Of three people."""
_COCO_ID = re.compile(r"(\d+)\.\w+$")


class _Pair(NamedTuple):
    image: str
    """File name."""
    caption: str
    foil: str
    votes: int | None = None
    """People, of three, who found the caption right and the foil wrong; None where nobody was asked."""


def foil(
    folder: Path, images: Path | None = None, partial: bool = False, one_per_image: bool = False, seed: int = 0
) -> list[CaptionPairs]:
    """Read FOIL.

    Args:
        folder: of the files.
        images: folder of the photos (COCO's ``val2014``); None looks below ``folder``.
        partial: accept other numbers of pairs than the published ones.
        one_per_image: judge one pair of each image.
        seed: which one.

    Raises:
        JudgingSetError: a file is missing or wrong, or has another number of pairs.
    """
    name = "foil"
    path = require(folder, name, list(PAIRS), SOURCE)
    content = read_json(path)
    pairs = list(_valse(content, path) if path.name == "foil-it.json" else _released(content, path))
    check_count(name, f"pairs in {path}", len(pairs), PAIRS[path.name], partial)
    agreed = [pair for pair in pairs if pair.votes is None or pair.votes >= MAJORITY]
    excluded = {f"fewer than {MAJORITY} of 3 people found the caption right": len(pairs) - len(agreed)}
    pairs = agreed
    if one_per_image:
        drawn = _one_each(pairs, seed)
        excluded["another pair of the image was drawn"] = len(pairs) - len(drawn)
        pairs = drawn
    references: dict[str, list[list[str]]] = {}
    if (folder / "captions_val2014.json").is_file():
        others = _others(pairs, coco_references(folder / "captions_val2014.json"))
        references = {"1 reference": [texts[:1] for texts in others], "4 references": [texts[:4] for texts in others]}
    photos = image_folder(folder, images, ["val2014", "images"])
    return [
        CaptionPairs(
            name,
            [pair.caption for pair in pairs],
            [pair.foil for pair in pairs],
            [1.0] * len(pairs),
            ["all pairs"] * len(pairs),
            [pair.image for pair in pairs],
            None if photos is None else [photos / pair.image for pair in pairs],
            references,
            "the caption scores higher than its foil; equal scores are wrong",
            excluded,
            shown_kinds=False,
        )
    ]


def _released(content: Any, path: Path) -> Iterator[_Pair]:
    if not isinstance(content, dict) or not {"images", "annotations"} <= content.keys():
        raise JudgingSetError(f"{path} is not of FOIL: expected an object with images and annotations")
    names = {image["id"]: text_of(image, "file_name", f"{path}, image {image['id']}") for image in content["images"]}
    true: dict[Any, str] = {}
    for number, item in enumerate(content["annotations"]):
        where = f"{path}, annotation {number}"
        if not isinstance(item, dict) or not isinstance(item.get("foil"), bool) or item.get("image_id") not in names:
            raise JudgingSetError(
                f"{where} is {item!r:.120}: expected id, image_id of an image, caption, and foil (true or false)"
            )
        if not item["foil"]:
            true[item["id"]] = text_of(item, "caption", where)
    for item in content["annotations"]:
        if item["foil"]:
            if item["id"] not in true:
                raise JudgingSetError(
                    f"{path}: the foil of annotation {item['id']!r} has no caption that it was made from"
                )
            yield _Pair(names[item["image_id"]], true[item["id"]], text_of(item, "caption", f"{path}, {item['id']}"))


def _valse(content: Any, path: Path) -> Iterator[_Pair]:
    if not isinstance(content, dict):
        raise JudgingSetError(f"{path} is not of VALSE: expected an object of id -> image_file, caption, foil")
    for key, item in content.items():
        image, caption, wrong = (text_of(item, field, f"{path}, {key}") for field in ("image_file", "caption", "foil"))
        asked = item.get("mturk")
        votes = asked.get("caption") if isinstance(asked, dict) else None
        if isinstance(votes, bool) or not isinstance(votes, int):
            raise JudgingSetError(
                f"{path}, {key}: 'mturk' is {asked!r:.80}: expected votes, with a number for 'caption'"
            )
        yield _Pair(image, caption, wrong, votes)


def _one_each(pairs: list[_Pair], seed: int) -> list[_Pair]:
    own: dict[str, list[_Pair]] = {}
    for pair in pairs:
        own.setdefault(pair.image, []).append(pair)
    generator = np.random.default_rng(seed)
    return [members[int(generator.integers(len(members)))] for members in own.values()]


def _others(pairs: list[_Pair], references: dict[str, list[str]]) -> list[list[str]]:
    found = []
    for pair in pairs:
        number = _COCO_ID.search(pair.image)
        known = references.get(str(int(number[1])) if number else pair.image, [])
        # Case, punctuation and spaces differ between the copies of COCO's captions that sets are made from.
        left = [text for text in known if _letters(text) != _letters(pair.caption)]
        if not left:
            raise JudgingSetError(
                f"captions_val2014.json has no other caption of {pair.image!r}: expected at least one"
            )
        found.append(left)
    return found


def _letters(text: str) -> str:
    return single_spaced(re.sub(r"[^\w ]", " ", text.lower()))
