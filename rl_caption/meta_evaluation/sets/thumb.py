"""THumB 1.0: captions of COCO's test images by four systems and by a person, judged by rules for precision and recall.

Source: Kasai et al., "Transparent Human Evaluation for Image Captioning", NAACL 2022. ``mscoco_THumB-1.0.jsonl`` has
2,500 lines, 500 images times five captions: ``SYS``, ``hyp``, ``image``, ``P`` and ``R`` (1 to 5), penalties for
fluency, conciseness and inclusive language, and ``human_score``, (P + R) / 2 less the penalties. Printed is Pearson's
correlation, without and with the captions by people.

References come from ``captions_val2014.json``: the image's captions less the one that was judged as a person's, for all
captions of the image. Without that file only metrics that need none can be judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rl_caption.meta_evaluation.sets.base import (
    JudgingSetError,
    RatedCaptions,
    check_count,
    image_folder,
    json_lines,
    number_of,
    require,
    text_of,
)
from rl_caption.meta_evaluation.sets.coco import coco_id, coco_references, letters

SOURCE = (
    "mscoco/mscoco_THumB-1.0.jsonl of https://github.com/jungokasai/THumB; captions_val2014.json and val2014 from "
    "https://cocodataset.org/"
)
ASPECTS = {"total": "human_score", "precision": "P", "recall": "R"}
HUMAN = "Human"
COUNT = 2_500


def thumb(
    folder: Path,
    images: Path | None = None,
    partial: bool = False,
    aspect: Literal["total", "precision", "recall"] = "total",
) -> list[RatedCaptions]:
    """Read THumB: two sets, without and with the captions by people.

    Args:
        folder: of the files.
        images: folder of the photos (COCO's ``val2014``); None looks below ``folder``.
        partial: accept another number of judgements than the published one.
        aspect: which judgement.

    Raises:
        JudgingSetError: a file is missing or wrong, or has another number of judgements.
    """
    name = "thumb"
    if aspect not in ASPECTS:
        raise JudgingSetError(f"aspect is {aspect!r}: expected one of {', '.join(ASPECTS)}")
    path = require(folder, name, ["mscoco_THumB-1.0.jsonl"], SOURCE)
    rows = [
        (
            text_of(item, "SYS", where),
            text_of(item, "image", where),
            text_of(item, "hyp", where),
            number_of(item.get(ASPECTS[aspect]), f"{where}: {ASPECTS[aspect]!r}"),
        )
        for where, item in json_lines(path)
    ]
    check_count(name, "judgements", len(rows), COUNT, partial)
    by_systems = [row for row in rows if row[0] != HUMAN]
    if not by_systems:
        raise JudgingSetError(f"{path} has no captions by systems. Get it: {SOURCE}")
    references = None
    if (folder / "captions_val2014.json").is_file():
        references = _references(folder / "captions_val2014.json", path, rows)
    photos = image_folder(folder, images, ["val2014", "images"])
    parts = {"without captions by people": by_systems, "with captions by people": rows}
    return [
        RatedCaptions(
            f"{name} {aspect}, {title}",
            [caption for _, _, caption, _ in own],
            [rating for *_, rating in own],
            [image for _, image, _, _ in own],
            None if photos is None else [photos / image for _, image, _, _ in own],
            None if references is None else [references[image] for _, image, _, _ in own],
            "pearson",
            "each caption is a judgement; references are the image's captions less the judged one by a person",
        )
        for title, own in parts.items()
    ]


def _references(coco: Path, path: Path, rows: list[tuple[str, str, str, float]]) -> Mapping[str, list[str]]:
    known = coco_references(coco)
    judged = {image: letters(caption) for system, image, caption, _ in rows if system == HUMAN}
    found = {}
    for _, image, _, _ in rows:
        found[image] = [text for text in known.get(coco_id(image), []) if letters(text) != judged.get(image)]
        if not found[image]:
            raise JudgingSetError(f"{path} judges captions of {image!r:.80}, of which {coco.name} has no other caption")
    return found
