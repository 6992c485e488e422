"""The program that makes what PAC-S learns from: captions of a data set's images, and images of its captions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rewards.clip.encoder import chunks
from rewards.files import atomic_write
from rl_caption.config.checks import check
from rl_caption.config.programs import PositivesConfig, TextToImageConfig
from rl_caption.data.base import DataError, load_image
from rl_caption.errors import ConfigError
from rl_caption.programs.recaption import (
    Rows,
    captions_of,
    gather_parts,
    load_recaptioner,
    make_parts,
    selected_rows,
    statistics_table,
    write_report,
)
from rl_caption.reward_models.visual_bottleneck import TextToImage, load_text_to_image


def make_positives(config: PositivesConfig) -> str:
    """Write ``positives.jsonl`` and ``report.md``, and return the report's table; of a ``worker`` only what it did.

    A line of ``positives.jsonl`` is a row of ``data.format: jsonl`` with ``positive_captions`` of its image and
    ``positive_images`` of its references, in their order, or one of the two; images are PNG files in
    ``OUT/positive_images/SPLIT``. Files that are there are kept.

    Raises:
        ConfigError: neither is asked for, what makes them cannot be made, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or a caption or an image is missing in what was made.
    """
    check(config)
    if config.captions.target is None and config.images.target is None:
        raise ConfigError("neither captions.target nor images.target is set: name what makes positives (docs/pac.md)")
    data, rows = selected_rows(config)
    captioner = None if config.captions.target is None else load_recaptioner(config.captions, "captions")
    painter = None if config.images.target is None else _text_to_image(config.images)
    made_by = {
        "captions": None if captioner is None else captioner.signature,
        "images": None if painter is None else f"{painter.signature} of {config.images.captions} references",
    }

    def columns(part: Rows) -> list[dict[str, Any]]:
        """The new columns of each row."""
        found: list[dict[str, Any]] = [{} for _ in part]
        if captioner is not None:
            for line, texts in zip(found, captions_of(captioner, part), strict=True):
                line["positive_captions"] = texts
        if painter is not None:
            for line, files in zip(found, _images(painter, part, config), strict=True):
                line["positive_images"] = files
        return found

    done = make_parts(config, rows, made_by, columns, "positives")
    if config.worker is not None:
        return done
    file = Path(config.out) / "positives.jsonl"
    lines, count = gather_parts(config, data, rows, file)
    captions = {
        name: [text for line in lines for text in line.get(name, [])] for name in ("references", "positive_captions")
    }
    images = sum(len(line.get("positive_images", [])) for line in lines)
    notes = [f"- {name} by {signature}" for name, signature in made_by.items() if signature is not None]
    notes += [f"- {images:,} images", f"- `positives.jsonl`: {count:,} rows"]
    return write_report(file, count, ["# Positives", "", statistics_table(captions), "", *notes])


def _text_to_image(config: TextToImageConfig) -> TextToImage:
    try:
        return load_text_to_image(str(config.target), config.kwargs)
    except ValueError as error:
        raise ConfigError(f"images: {error}") from error


def _images(painter: TextToImage, rows: Rows, config: PositivesConfig) -> list[list[str]]:
    """The files of each row's images, made where they are not there."""
    folder, number = Path(config.out) / "positive_images", 1 if config.images.captions == "first" else None
    files: list[list[str]] = []
    missing: list[tuple[Path, str]] = []
    for split, row in rows:
        stem, captions = quote(row["image_id"], safe=""), row["references"][:number]
        own = [folder / quote(split, safe="") / f"{stem}_{index}.png" for index in range(len(captions))]
        missing += [(file, text) for file, text in zip(own, captions, strict=True) if not file.exists()]
        files.append([os.path.abspath(file) for file in own])
    for batch in chunks(missing, config.images.batch_size, "images of captions"):
        made: Sequence[Any] = painter([caption for _, caption in batch])
        if len(made) != len(batch):
            raise DataError(f"{painter.signature} made {len(made)} images of {len(batch)} captions")
        for (file, _), image in zip(batch, made, strict=True):
            with atomic_write(file) as written:
                load_image(image).save(written, "PNG")
    return files
