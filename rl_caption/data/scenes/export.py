"""Writes the generated world to disk as a Karpathy JSON file and PNG images, for tools that read files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rewards.files import write_errors
from rl_caption.data.base import DataError, DataModule, Row, load_image
from rl_caption.data.files import write_text
from rl_caption.data.scenes.grammar import tokens


def export(directory: str | Path, data: DataModule) -> Path:
    """Write every split of a generated dataset.

    Writes ``directory/images/<image_id>.png`` and, last, ``directory/dataset.json``: ``{"dataset": "scenes",
    "images": [{"filepath", "filename", "imgid", "split", "sentids", "sentences": [{"tokens", "raw", "imgid",
    "sentid"}], "long_reference", "scene"}]}``. ``tokens`` are lower-case words without punctuation; ``scene`` is what
    ``Scene.from_dict`` reads. Equal data gives equal files, so that exporting again over an export is harmless.

    Args:
        directory: made where it is missing.
        data: ``ScenesData``, or any dataset whose rows have a scene.

    Returns:
        The path of ``dataset.json``.

    Raises:
        DataError: the folder cannot be written, or a row has no scene.
    """
    root = Path(directory)
    entries: list[dict[str, Any]] = []
    sentence_id = 0
    try:
        (root / "images").mkdir(parents=True, exist_ok=True)
        for split in data.splits:
            for row in tqdm(data.split(split), desc=f"drawing {split}", unit="image", disable=None):
                entry = _entry(row, split, len(entries), sentence_id)
                image = root / "images" / entry["filename"]
                with write_errors(image):
                    load_image(row["image"]).save(image)
                sentence_id += len(entry["sentences"])
                entries.append(entry)
        path = root / "dataset.json"
        write_text(path, json.dumps({"dataset": "scenes", "images": entries}) + "\n")
    except OSError as error:
        raise DataError(f"cannot write the scenes to {str(root)!r}: {error}") from error
    return path


def _entry(row: Row, split: str, image_number: int, first_sentence: int) -> dict[str, Any]:
    scene = row.get("scene")
    if scene is None:
        raise DataError(f"row {row['image_id']!r} has no scene: only the generated world can be exported")
    sentences = [
        {
            "tokens": [word for word in tokens(caption) if word[0] not in ".,;:!?"],
            "raw": caption,
            "imgid": image_number,
            "sentid": first_sentence + position,
        }
        for position, caption in enumerate(row["references"])
    ]
    return {
        "filepath": "images",
        "filename": f"{row['image_id']}.png",
        "imgid": image_number,
        "split": split,
        "sentids": [sentence["sentid"] for sentence in sentences],
        "sentences": sentences,
        "long_reference": row.get("long_reference", ""),
        "scene": scene.to_dict(),
    }
