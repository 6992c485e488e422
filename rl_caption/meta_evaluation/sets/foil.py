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

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rl_caption.meta_evaluation.sets.base import (
    CaptionPairs,
    JudgingSetError,
    check_count,
    image_folder,
    list_of,
    read_json,
    require,
    text_of,
)
from rl_caption.meta_evaluation.sets.coco import coco_id, coco_references, letters

SOURCE = (
    "foilv1.0_test_2017.json from https://foilunitn.github.io/, or foil-it.json from VALSE "
    "(https://github.com/Heidelberg-NLP/VALSE); captions_val2014.json and val2014 from https://cocodataset.org/"
)
PAIRS = {"foilv1.0_test_2017.json": 99_480, "foil-it.json": 1_000}
MAJORITY = 2
"""Of three people."""


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
        others = _others(pairs, coco_references(folder / "captions_val2014.json"), path)
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
    names: dict[Any, str] = {}
    for number, image in enumerate(list_of(content, path, "images")):
        where = f"{path}, images[{number}]"
        names[_id(image, "id", where)] = text_of(image, "file_name", where)
    true: dict[Any, str] = {}
    wrong: list[tuple[Any, Any, str]] = []
    for number, item in enumerate(list_of(content, path, "annotations")):
        where = f"{path}, annotations[{number}]"
        own, of, caption = _id(item, "id", where), _id(item, "image_id", where), text_of(item, "caption", where)
        if not isinstance(item.get("foil"), bool) or of not in names:
            raise JudgingSetError(
                f"{where} is {item!r:.120}: expected image_id of one of the images, and foil (true or false)"
            )
        if item["foil"]:
            wrong.append((own, of, caption))
        else:
            true[own] = caption
    for own, of, caption in wrong:
        if own not in true:
            raise JudgingSetError(f"{path}: the foil of annotation {own!r:.80} has no caption that it was made from")
        yield _Pair(names[of], true[own], caption)


def _id(item: dict[str, Any], key: str, where: str) -> int | str:
    value = item.get(key)
    if not isinstance(value, int | str):
        raise JudgingSetError(f"{where}: {key!r} is {value!r:.80}: expected an id")
    return value


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


def _others(pairs: list[_Pair], references: dict[str, list[str]], path: Path) -> list[list[str]]:
    found = []
    for pair in pairs:
        known = references.get(coco_id(pair.image), [])
        left = [text for text in known if letters(text) != letters(pair.caption)]
        if not left:
            raise JudgingSetError(
                f"{path} judges captions of {pair.image!r:.80}, of which captions_val2014.json has no other caption"
            )
        found.append(left)
    return found
