"""COCO's captions, which are the references of sets that judge captions of its images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from rl_caption.meta_evaluation.sets.base import JudgingSetError, list_of, read_json, single_spaced, text_of

_NAME = re.compile(r"0*(\d+)\.\w+$")


class CocoCaption(NamedTuple):
    """A caption that COCO has of an image; ids as text."""

    caption_id: str
    image_id: str
    caption: str
    """With single spaces."""


def coco_id(name: str) -> str:
    """Return the id of the image that ``COCO_val2014_000000000012.jpg`` or ``12.jpg`` names; else the name itself."""
    found = _NAME.search(name)
    return found[1] if found else name


def coco_captions(path: Path) -> list[CocoCaption]:
    """Read a COCO annotation file of captions.

    Raises:
        JudgingSetError: it is something else.
    """
    found = []
    for number, item in enumerate(list_of(read_json(path), path, "annotations")):
        where = f"{path}, annotations[{number}]"
        if not isinstance(item.get("image_id"), int | str):
            raise JudgingSetError(f"{where}: 'image_id' is {item.get('image_id')!r:.80}: expected a whole number")
        caption = single_spaced(text_of(item, "caption", where))
        found.append(CocoCaption(str(item.get("id")), str(item["image_id"]), caption))
    return found


def coco_references(path: Path) -> dict[str, list[str]]:
    """Read a COCO annotation file as id of an image -> its captions in the order of the file. Raises as above."""
    found: dict[str, list[str]] = {}
    for caption in coco_captions(path):
        found.setdefault(caption.image_id, []).append(caption.caption)
    return found


def letters(text: str) -> str:
    """Return the words alone: case, punctuation and spaces differ between the copies of COCO's captions."""
    return single_spaced(re.sub(r"[^\w ]", " ", text.lower()))
