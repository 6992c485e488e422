"""Programs that copy a data set, part by part, and add generated columns to its rows.

``recaption`` adds a long caption of every image. ``make_positives`` adds what PAC-S learns from:
further captions of each image, and images generated for its captions. ``write_negatives`` adds
false captions of the references.
"""

import os
from collections.abc import Mapping
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from rewards.devices import chunks
from rewards.files import atomic_write
from rewards.text.tokenize import tokenize
from rl_caption.data.base import DataError, load_image
from rl_caption.data.plain_files import single_spaced
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import (
    PositivesConfig,
    RecaptionConfig,
    RecaptionerConfig,
    WriteNegativesConfig,
)
from rl_caption.lab.parts import (
    Columns,
    Report,
    Rows,
    add_columns,
    file_name,
)
from rl_caption.lab.recaptioners import TARGETS, answers_of
from rl_caption.lab.visual_bottleneck import TextToImage, load_text_to_image
from rl_caption.runtime.errors import config_errors
from rl_caption.runtime.options import build_target, load_target


def recaption(config: RecaptionConfig) -> str:
    """Write ``captions.jsonl``, whose rows have the new caption as ``long_reference``
    (``parts.add_columns``).

    Raises:
        ConfigError: the recaptioner cannot be made, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or a new caption is empty, or there are several of an
            image.
    """
    recaptioner = load_writer(config.recaptioner, "recaptioner")

    def columns(batch: Rows) -> list[Columns]:
        written = captions_of(recaptioner, batch)
        if any(len(captions) > 1 for captions in written):
            raise DataError(
                f"{recaptioner.signature} wrote several captions of one image"
            )
        return [{"long_reference": caption} for (caption,) in written]

    report = partial(_report, {"before": "references", "after": "long_reference"})
    made_by = {"recaptioner": recaptioner.signature}
    return add_columns(config, "captions", made_by, columns, report)


def make_positives(config: PositivesConfig) -> str:
    """Write ``positives.jsonl``, whose rows have ``positive_captions`` of the image,
    ``positive_images`` (PNG files in ``OUT/positive_images/SPLIT``, one for each reference in
    order), or both (``parts.add_columns``). Files that exist already are kept.

    Raises:
        ConfigError: what makes them cannot be loaded, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or too few captions or images were made.
    """
    captioner = painter = None
    made_by: dict[str, str | None] = {"captions": None, "images": None}
    if config.captions.target is not None:
        captioner = load_writer(config.captions, "captions")
        made_by["captions"] = captioner.signature
    if config.images.target is not None:
        with config_errors("images"):
            painter = load_text_to_image(config.images.target, config.images.kwargs)
        made_by["images"] = (
            f"{painter.signature} of {config.images.captions} references"
        )

    def columns(batch: Rows) -> list[dict[str, Any]]:
        new: list[dict[str, Any]] = [{} for _ in batch]
        if captioner is not None:
            for line, texts in zip(new, captions_of(captioner, batch), strict=True):
                line["positive_captions"] = texts
        if painter is not None:
            for line, files in zip(new, _images(painter, batch, config), strict=True):
                line["positive_images"] = files
        return new

    texts = "references", "positive_captions", "positive_images"
    report = partial(_report, dict(zip(texts, texts, strict=True)))
    return add_columns(config, "positives", made_by, columns, report)


def write_negatives(config: WriteNegativesConfig) -> str:
    """Write ``negatives.jsonl``, whose rows have ``negatives``, a list for each of the
    ``references``, which may be empty (``parts.add_columns``).

    False captions that equal one of the image's references, in any case, are left out, and so are
    blank ones.

    Raises:
        ConfigError: the writer cannot be made, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or the writer returned something else than a list of
            texts for each caption.
    """
    writer = load_writer(config.writer, "writer")

    def columns(batch: Rows) -> list[Columns]:
        captions = [caption for _, row in batch for caption in row["references"]]
        answers = iter(answers_of(writer, captions, list[str]))
        new: list[Columns] = []
        for _, row in batch:
            true = {single_spaced(text).lower() for text in row["references"]}
            negatives = []
            for _ in row["references"]:
                texts = dict.fromkeys(map(single_spaced, next(answers)))
                negatives.append(
                    [text for text in texts if text and text.lower() not in true]
                )
            new.append({"negatives": negatives})
        return new

    report = partial(_report, {"references": "references", "negatives": "negatives"})
    made_by = {"writer": writer.signature}
    return add_columns(config, "negatives", made_by, columns, report)


def _report(columns: Mapping[str, str], made: list[Any]) -> Report:
    """All rows, and a table: number, length and vocabulary of the texts in some columns, by their
    headings.
    """
    lines = []
    for heading, key in columns.items():
        texts = [text for _, row, new in made for text in _texts((row | new).get(key))]
        words = list(map(tokenize, texts))
        mean = np.mean(list(map(len, words))) if words else 0
        different = len(set(chain.from_iterable(words)))
        lines.append([heading, f"{len(texts):,}", f"{mean:.1f}", f"{different:,}"])
    head = ["captions", "number", "words, mean", "different words"]
    return Report(markdown(head, lines), [], made)


def _texts(value: Any) -> list[str]:
    """The texts in a column of a row: one, a list, or a list of lists."""
    if isinstance(value, str):
        return [value]
    return [text for part in value or () for text in _texts(part)]


def _images(
    painter: TextToImage, rows: Rows, config: PositivesConfig
) -> list[list[str]]:
    """The image files for the captions of each row; those that do not exist are made."""
    folder = Path(config.out) / "positive_images"
    number = 1 if config.images.captions == "first" else None
    files: list[list[str]] = []
    missing: list[tuple[Path, str]] = []
    for split, row in rows:
        files.append([])
        for index, caption in enumerate(row["references"][:number]):
            file = (
                folder / file_name(split) / f"{file_name(row['image_id'])}_{index}.png"
            )
            files[-1].append(os.path.abspath(file))
            if not file.exists():
                missing.append((file, caption))
    for batch in chunks(missing, config.images.batch_size, "images of captions"):
        images = answers_of(painter, [caption for _, caption in batch], Any)
        for (file, _), image in zip(batch, images, strict=True):
            opened = load_image(image)
            with atomic_write(file) as written:
                opened.save(written, "PNG")
    return files


def load_writer(config: RecaptionerConfig, key: str) -> Any:
    """Build what the section ``key`` of a configuration names, a recaptioner or a writer of false
    captions: it has a ``signature`` and is called with rows, or with captions.

    Raises ``ConfigError`` where that fails.
    """
    name = config.target or ""
    target = load_target(name, f"{key}.target", TARGETS)
    return build_target(target, 1, name, config.kwargs, f"{key}.kwargs")


def captions_of(recaptioner: Any, rows: Rows) -> list[list[str]]:
    """The new captions of each row without blank ones.

    Raises ``DataError`` where the recaptioner fails, returns something else than captions, or has
    none for a row.
    """
    kept = []
    # Another split may have the same image ids.
    for split, group in groupby(rows, itemgetter(0)):
        own = [row for _, row in group]
        answers = answers_of(recaptioner, own, str | list[str])
        for row, answer in zip(own, answers, strict=True):
            texts = [answer] if isinstance(answer, str) else answer
            kept.append([caption for caption in texts if caption.strip()])
            if not kept[-1]:
                image = f"{split} image {row['image_id']!r}"
                raise DataError(f"{recaptioner.signature} wrote no caption of {image}")
    return kept
