"""Images with the captions of several systems, as data for the page: selected, scored, with small pictures."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from tqdm import tqdm

from rl_caption.data.base import DataError, Row, load_image
from rl_caption.hacking.config import JudgeConfig
from rl_caption.hacking.judges import build_judges
from rl_caption.report.sources import Source

MAX_IMAGES = 600
THUMBNAIL = 176
"""Longest side in pixels."""
MAX_REFERENCES = 8
N_GRAM_SCORES = {"CIDEr-D": "cider", "ROUGE-L": "rouge_l"}

Scores = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Metric -> system -> image id -> score."""


@dataclass(frozen=True)
class Gallery:
    """What the page shows of images.

    Attributes:
        systems: name -> image id -> caption; changes are against the first.
        scores: of single captions.
        source: references and images.
        note: where the captions come from.
    """

    systems: Mapping[str, Mapping[str, str]]
    scores: Scores = field(default_factory=dict)
    source: Source = field(default_factory=Source)
    note: str = ""


def reference_scores(systems: Mapping[str, Mapping[str, str]], rows: Mapping[str, Row]) -> Scores:
    """CIDEr-D (0 to 10) and ROUGE-L (0 to 1) of every caption.

    Document frequencies are those of the captioned images' references, without EOS, as in ``val/cider``.

    Empty where an image has no references, or there are fewer than two images.

    Raises:
        RewardError: a metric failed.
    """
    ids = [image_id for image_id in dict.fromkeys(i for texts in systems.values() for i in texts) if image_id in rows]
    references = {image_id: rows[image_id]["references"] for image_id in ids}
    if len(ids) < 2 or not all(references.values()):
        return {}
    judges = build_judges({name: JudgeConfig() for name in N_GRAM_SCORES.values()}, None, list(references.values()))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for heading, name in N_GRAM_SCORES.items():
        for system, captions in systems.items():
            here = [image_id for image_id in captions if image_id in references]
            texts, refs = [captions[i] for i in here], [references[i] for i in here]
            values = judges[name]([""] * len(here), texts, references=refs) if here else []
            found.setdefault(heading, {})[system] = dict(zip(here, values, strict=True))
    return found


def selected(gallery: Gallery, limit: int = MAX_IMAGES) -> tuple[list[str], str]:
    """The images to show, in the order of the data, and a sentence that says which they are.

    All of them or, of more than ``limit``, half those whose first score changed most between the first and the last
    system, and half an even sample of the others, so that the extremes are there and the usual is too.
    """
    ids = list(dict.fromkeys(image_id for texts in gallery.systems.values() for image_id in texts))
    if len(ids) <= limit:
        return ids, f"All {len(ids):,} images."
    metric = next(iter(gallery.scores), None)
    names = list(gallery.systems)
    extreme: list[str] = []
    if metric is not None and len(names) > 1:
        first, last = gallery.scores[metric].get(names[0], {}), gallery.scores[metric].get(names[-1], {})
        changes = {i: abs(last.get(i, 0.0) - first.get(i, 0.0)) for i in ids if i in first and i in last}
        extreme = sorted(changes, key=lambda image_id: -changes[image_id])[: limit // 2]
    taken = set(extreme)
    others = [image_id for image_id in ids if image_id not in taken]
    rest = limit - len(extreme)
    taken |= {others[index * len(others) // rest] for index in range(rest)}
    sentence = f"{limit:,} of {len(ids):,} images: "
    if extreme:
        sentence += f"the {len(extreme):,} whose {metric} changed most from {names[0]} to {names[-1]}, and "
    sentence += f"an even sample of {rest:,} {'others' if extreme else 'of them'}."
    return [image_id for image_id in ids if image_id in taken], sentence


def gallery_data(gallery: Gallery, limit: int = MAX_IMAGES) -> tuple[dict[str, Any], str]:
    """What the page's script shows, as plain values, and the sentence of ``selected`` with what is missing.

    ``items`` has for each image: ``id``, ``image`` (a data URI, or null), ``references``, ``captions`` (null where a
    system has none), and ``scores``, by metric and then by system.
    """
    ids, sentence = selected(gallery, limit)
    items, unreadable = [], 0
    for image_id in tqdm(ids, desc="gallery", unit="image", leave=False, disable=None, delay=2):
        row = gallery.source.rows.get(image_id)
        picture = _picture(row) if row is not None else None
        unreadable += row is not None and row["image"] != "" and picture is None
        items.append(
            {
                "id": image_id,
                "image": picture,
                "references": list(row["references"][:MAX_REFERENCES]) if row is not None else [],
                "captions": [texts.get(image_id) for texts in gallery.systems.values()],
                "scores": [
                    [_rounded(by_system.get(name, {}).get(image_id)) for name in gallery.systems]
                    for by_system in gallery.scores.values()
                ],
            }
        )
    notes = [sentence, gallery.note, gallery.source.missing]
    if unreadable:
        notes.append(f"{unreadable:,} images could not be read and have no picture.")
    data = {"systems": list(gallery.systems), "metrics": list(gallery.scores), "items": items}
    return data, " ".join(filter(None, notes))


def thumbnail(image: Image.Image) -> str:
    """A data URI of the image in small: PNG or JPEG, whichever takes less."""
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    made = []
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 82})):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        made.append((len(buffer.getvalue()), kind, buffer.getvalue()))
    _, kind, content = min(made)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _picture(row: Row) -> str | None:
    if row["image"] == "":
        return None
    try:
        return thumbnail(load_image(row["image"]))
    except DataError:  # captioners over region features do without the pictures
        return None


def _rounded(value: float | None) -> float | None:
    return round(value, 6) if value is not None and math.isfinite(value) else None
