"""COCO's captions, which are the references of sets that judge captions of its images."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rl_caption.data.base import DataError
from rl_caption.meta_evaluation.sets.base import caption_of, id_of, json_items, single_spaced


class CocoCaption(NamedTuple):
    """A caption that COCO has of an image; ids as text."""

    caption_id: str
    image_id: str
    caption: str
    """With single spaces."""


def coco_id(name: str) -> str:
    """Return the id of the image that ``COCO_val2014_000000000012.jpg`` or ``12.jpg`` names; else the name itself."""
    found = re.search(r"0*(\d+)\.\w+$", name)
    return found[1] if found else name


def coco_captions(path: Path) -> list[CocoCaption]:
    """Read a COCO annotation file of captions; ``DataError`` names the row of what is something else."""
    return [
        CocoCaption(str(item.get("id")), id_of(item, "image_id", where), caption_of(item, "caption", where))
        for where, item in json_items(path, "annotations")
    ]


def coco_references(path: Path) -> dict[str, list[str]]:
    """Read a COCO annotation file as id of an image -> its captions in the order of the file."""
    found: dict[str, list[str]] = {}
    for caption in coco_captions(path):
        found.setdefault(caption.image_id, []).append(caption.caption)
    return found


def other_captions(references: Mapping[str, list[str]], image: str, caption: str, path: Path) -> list[str]:
    """Return an image's captions less ``caption``; case, punctuation and spaces differ between the copies of COCO.

    Raises:
        DataError: there is no other caption; ``path`` is the file of the judgements.
    """
    others = [text for text in references.get(coco_id(image), []) if _words(text) != _words(caption)]
    if not others:
        raise DataError(f"{path} judges captions of {image!r:.80}, of which captions_val2014.json has no other caption")
    return others


def _words(text: str) -> str:
    return single_spaced(re.sub(r"[^\w ]", " ", text.lower()))
