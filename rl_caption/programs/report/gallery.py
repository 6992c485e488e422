"""Images with the captions of several systems: which are shown, their scores, and small pictures."""

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from rewards.text.tokenize import TOKENIZER
from rewards.trust import check_trusted
from rl_caption.config.build import ConfigError, build_data
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError, Row, thumbnail
from rl_caption.evaluation.results import factor_of
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.runtime.errors import naming
from rl_caption.runtime.options import class_names

MAX_IMAGES = 200
THUMBNAIL = 176
"""Longest side in pixels."""
N_GRAM_SCORES = {"CIDEr-D (x100)": "cider", "ROUGE-L": "rouge_l"}
WORD = re.compile(r"(\w+)")

Captions = Mapping[str, Mapping[str, str]]
"""System -> image id -> caption."""
Scores = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Metric -> system -> image id -> score of the caption."""


class Source(NamedTuple):
    """Image id -> row, for references and images, and a sentence for the reader where either is
    missing.
    """

    rows: Mapping[str, Row]
    missing: str = ""


def source_of(rows: Sequence[Row]) -> Source:
    """A source of rows, whose ``image`` may be missing."""
    rows_by_id = {row["image_id"]: row for row in (rows[index] for index in range(len(rows)))}
    without = all(row.get("image", "") == "" for row in rows_by_id.values())
    return Source(
        rows_by_id, "No images are shown: no folder of images was named." if without else ""
    )


def rows_of_config(data: Mapping[str, Any] | None, split: str) -> Source:
    """A split of the data that the section ``data`` of a configuration names; empty where it cannot
    be read.

    The configuration may be that of a run from elsewhere: a class in it has to be trusted
    (``rewards.trust``).
    """
    if not data:
        return Source(
            {},
            "No references and images are shown: the folder does not say which data was captioned.",
        )
    try:
        return source_of(build_data(received_data(data)).split(split))
    except (DataError, ConfigError, OSError, TypeError) as error:
        where = f"split {split!r} of the data cannot be read from {Path.cwd()}"
        return Source({}, f"No references and images are shown: {where} ({error}).")


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
    """CIDEr-D (times 100: 0 to 1000) and ROUGE-L (0 to 1) of every caption.

    Document frequencies are those of the captioned images' references, without EOS, as in
    ``val/cider``. Captions of images without references get no score; the result is empty if fewer
    than two images have references.

    Raises:
        RewardError: a metric failed.
    """
    captioned = [rows[i] for captions in systems.values() for i in captions if i in rows]
    references = {row["image_id"]: row["references"] for row in captioned if row["references"]}
    if len(references) < 2:
        return {}
    judge_configs = {name: JudgeConfig() for name in N_GRAM_SCORES.values()}
    judges = build_judges(judge_configs, None, list(references.values()), tokenizer=tokenizer)
    scores: dict[str, dict[str, dict[str, float]]] = {heading: {} for heading in N_GRAM_SCORES}
    for system, captions in systems.items():
        ids = [image_id for image_id in captions if image_id in references]
        texts, refs = [captions[i] for i in ids], [references[i] for i in ids]
        for heading, name in N_GRAM_SCORES.items():
            values = judges[name]([""] * len(ids), texts, references=refs) if ids else []
            scores[heading][system] = {
                i: factor_of(name) * value for i, value in zip(ids, values, strict=True)
            }
    return scores


def select_images(systems: Captions, scores: Scores, limit: int) -> tuple[list[str], str]:
    """The ids of the images to show, and a sentence that says which they are.

    Where there are more than ``limit``, they are an even sample. The first are those whose first
    score changed most between the first and the last system.
    """
    ids = list(dict.fromkeys(image_id for captions in systems.values() for image_id in captions))
    count = min(limit, len(ids))
    chosen = [ids[index * len(ids) // count] for index in range(count)]
    sentence = f"{count:,} of {len(ids):,} images."
    if scores and len(systems) > 1:
        metric, names = next(iter(scores)), list(systems)
        first, last = (scores[metric].get(name, {}) for name in (names[0], names[-1]))
        changes = {i: abs(last[i] - first[i]) for i in chosen if i in first and i in last}
        chosen.sort(key=lambda image_id: -changes.get(image_id, -1.0))
        sentence += f" Largest change of {metric} first."
    return chosen, sentence


def gallery(
    systems: Captions, scores: Scores, source: Source, note: str, limit: int
) -> dict[str, Any]:
    """The values that the template shows: ``systems``, ``metrics``, ``note``, and ``items``, one
    for each image.

    An item has ``id``, ``image`` (a data URI or None), ``references``, ``scores``
    [metrics][systems] (None: no score),
    and ``captions`` [systems]: None, or pairs of a piece of text and whether it is a word that the
    first system did not use.
    """
    ids, sentence = select_images(systems, scores, limit)
    items, unreadable = [], 0
    for image_id in tqdm(ids, desc="gallery", unit="image", leave=False, disable=None, delay=2):
        row: Any = source.rows.get(image_id, {})
        picture = _picture(row)
        unreadable += row.get("image", "") != "" and picture is None
        texts = [captions.get(image_id) for captions in systems.values()]
        values = [
            [by_name.get(name, {}).get(image_id) for name in systems] for by_name in scores.values()
        ]
        items.append(
            {
                "id": image_id,
                "image": picture,
                "references": list(row.get("references", ())),
                "captions": [_mark_new_words(text, texts[0]) for text in texts],
                "scores": values,
            }
        )
    lost = f"{unreadable:,} images could not be read and have no picture." if unreadable else ""
    about = " ".join(filter(None, [sentence, note, source.missing, lost]))
    return {"systems": list(systems), "metrics": list(scores), "items": items, "note": about}


def _mark_new_words(text: str | None, before: str | None) -> list[tuple[str, bool]] | None:
    if text is None:
        return None
    known = None if before is None else set(WORD.findall(before.lower()))
    pieces = []
    for index, piece in enumerate(WORD.split(text)):
        is_word = index % 2 == 1
        pieces.append((piece, is_word and known is not None and piece.lower() not in known))
    return pieces if text.strip() else []


def _picture(row: Mapping[str, Any]) -> str | None:
    """A data URI of a thumbnail, as WebP; None where there is no image."""
    try:
        image = thumbnail(row["image"], THUMBNAIL) if row.get("image", "") != "" else None
    except DataError:  # captioners over region features do without the pictures
        image = None
    if image is None:
        return None
    buffer = io.BytesIO()
    image.save(buffer, "webp", quality=85)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
