"""Images with the captions of several systems: which are shown, their scores, and small pictures."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rewards.images import frames_of
from rewards.text.tokenize import TOKENIZER
from rewards.trust import check_trusted
from rl_caption.config.build import ConfigError, build_data
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError, Row, load_image
from rl_caption.evaluation.results import factor_of
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.runtime.errors import naming
from rl_caption.runtime.options import class_names

MAX_IMAGES = 200
THUMBNAIL = 176
"""Longest side in pixels."""
CIDER = "CIDEr-D (x100)"

Captions = Mapping[str, Mapping[str, str]]
"""System -> image id -> caption."""
Scores = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Metric -> system -> image id -> score of the caption."""


class Source(NamedTuple):
    """Image id -> row, for references and images, and why there are none."""

    rows: Mapping[str, Row]
    missing: str = ""


def source_of(rows: Sequence[Row]) -> Source:
    """A source of rows, whose ``image`` may be missing."""
    return Source({row["image_id"]: row for row in rows})


def rows_of_config(data: Mapping[str, Any] | None, split: str) -> Source:
    """A split of the data that the section ``data`` of a configuration names; empty where it cannot
    be read.
    """
    reason = "the folder does not say which data was captioned"
    if data:
        try:
            return source_of(build_data(received_data(data)).split(split))
        except (DataError, ConfigError, OSError, TypeError) as error:
            where = f"split {split!r} of the data cannot be read from {Path.cwd()}"
            reason = f"{where} ({error})"
    return Source({}, f"No references and images are shown: {reason}.")


def received_data(data: Mapping[str, Any]) -> DataConfig:
    """The section ``data`` of the configuration of a run, perhaps from elsewhere: a class in it has
    to be trusted.

    Raises ``ConfigError``, also for unknown keys and wrong types.
    """
    with naming("data"):
        for name in class_names(data):
            check_trusted(name, "its class")
        return DataConfig.model_validate_json(json.dumps(data))


def reference_scores(
    systems: Captions, rows: Mapping[str, Row], tokenizer: str = TOKENIZER
) -> Scores:
    """CIDEr-D of every caption, times 100: 0 to 1000.

    Document frequencies are those of the captioned images' references, without EOS, as in
    ``val/cider``. Captions of images without references get no score; the result is empty if fewer
    than two images have references.
    """
    captioned = [
        rows[i] for captions in systems.values() for i in captions if i in rows
    ]
    references = {
        row["image_id"]: row["references"] for row in captioned if row["references"]
    }
    if len(references) < 2:
        return {}
    corpus = list(references.values())
    judges = build_judges({"cider": JudgeConfig()}, None, corpus, tokenizer=tokenizer)
    scores: dict[str, dict[str, float]] = {}
    for system, captions in systems.items():
        ids = [image_id for image_id in captions if image_id in references]
        texts = [captions[image_id] for image_id in ids]
        own = [references[image_id] for image_id in ids]
        values = judges["cider"](None, texts, references=own) if ids else []
        shown = [factor_of("cider") * value for value in values]
        scores[system] = dict(zip(ids, shown, strict=True))
    return {CIDER: scores}


def select_images(systems: Captions, scores: Scores, limit: int) -> list[str]:
    """The ids of the images to show: at most ``limit``, an even sample, those first whose first
    score differs most among the systems.
    """
    ids = list(
        dict.fromkeys(
            image_id for captions in systems.values() for image_id in captions
        )
    )
    by_system = next(iter(scores.values()), {})

    def change(image_id: str) -> float:
        values = [own[image_id] for own in by_system.values() if image_id in own]
        return max(values, default=0) - min(values, default=0)

    count = min(limit, len(ids))
    chosen = [ids[index * len(ids) // count] for index in range(count)]
    return sorted(chosen, key=change, reverse=True)


def gallery(
    systems: Captions, scores: Scores, source: Source, note: str, limit: int
) -> dict[str, Any]:
    """The values that the template shows: ``note``, and ``items``, one for each image.

    An item has ``id``, ``image`` (a data URI or None), ``references``, and ``captions``: system,
    caption (None where there is none), scores by metric.
    """
    ids = select_images(systems, scores, limit)
    items = []
    for image_id in ids:
        row: Any = source.rows.get(image_id, {})
        captions = []
        for name, texts in systems.items():
            own = {}
            for metric, by_system in scores.items():
                if image_id in by_system.get(name, {}):
                    own[metric] = by_system[name][image_id]
            captions.append((name, texts.get(image_id), own))
        references = list(row.get("references", ()))
        item = {"id": image_id, "image": _picture(row), "references": references}
        items.append(item | {"captions": captions})
    return {"items": items, "note": f"{len(ids):,} images. {note} {source.missing}"}


def _picture(row: Mapping[str, Any]) -> str | None:
    """A data URI of a thumbnail, as WebP, of a video of its first frame; None where there is no image."""
    if row.get("image", "") == "":
        return None
    try:
        image = load_image(frames_of(row["image"])[0])
    except DataError:  # captioners over region features do without the pictures
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    image.save(buffer, "webp", quality=85)
    return (
        f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    )
