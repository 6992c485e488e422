"""Programs that copy a data set, part by part, and add generated columns to its rows.

``recaption`` adds a long caption of every image. ``make_positives`` adds positives for
PAC-S: further captions of each image, and images generated for its captions.
``write_negatives`` adds false captions of the references.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from rewards.devices import chunks
from rewards.text.tokenize import tokenize
from rl_caption.data.base import DataError, Row
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
    write_image,
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
        DataError: the data cannot be read, or an image got no caption or several.
    """
    recaptioner = load_writer(config.recaptioner, "recaptioner")

    def columns(split: str, rows: Sequence[Row]) -> Columns:
        """One caption of each row."""
        written = captions_of(recaptioner, split, rows)
        if max(map(len, written)) > 1:
            raise DataError(
                f"{recaptioner.signature} wrote several captions of one image"
            )
        return {"long_reference": [caption for (caption,) in written]}

    headings = {"before": "references", "after": "long_reference"}
    made_by = {"recaptioner": recaptioner.signature}
    return add_columns(config, "captions", made_by, columns, partial(_report, headings))


def make_positives(config: PositivesConfig) -> str:
    """Write ``positives.jsonl``, whose rows have ``positive_captions`` of the image,
    ``positive_images`` (PNG files in ``OUT/positive_images/SPLIT``, one for each
    reference in order), or both (``parts.add_columns``). Files that exist already are
    kept.

    Raises:
        ConfigError: a model cannot be loaded, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or too few captions or images were made.
    """
    makers: dict[str, Callable[[str, Sequence[Row]], Sequence[Any]]] = {}
    made_by = {}
    if config.captions.target is not None:
        captioner = load_writer(config.captions, "captions")
        makers["positive_captions"] = partial(captions_of, captioner)
        made_by["captions"] = captioner.signature
    if config.images.target is not None:
        with config_errors("images"):
            painter = load_text_to_image(config.images.target, config.images.kwargs)
        makers["positive_images"] = partial(_images, painter, config)
        of = f"{config.images.captions} references"
        made_by["images"] = f"{painter.signature} of {of}"

    def columns(split: str, rows: Sequence[Row]) -> Columns:
        return {name: make(split, rows) for name, make in makers.items()}

    headings = {name: name for name in ("references", *makers)}
    return add_columns(
        config, "positives", made_by, columns, partial(_report, headings)
    )


def write_negatives(config: WriteNegativesConfig) -> str:
    """Write ``negatives.jsonl``, whose rows have ``negatives``, a list for each of the
    ``references``, which may be empty (``parts.add_columns``).

    False captions that equal one of the image's references, in any case, are left out,
    and so are blank ones.

    Raises:
        ConfigError: the writer cannot be made, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or the writer did not return a list of texts
            for each caption.
    """
    writer = load_writer(config.writer, "writer")

    def columns(split: str, rows: Sequence[Row]) -> Columns:
        """Answers to each reference, except references of the image."""
        captions = [caption for row in rows for caption in row["references"]]
        answers = iter(answers_of(writer, captions, list[str]))
        negatives: list[list[list[str]]] = []
        for row in rows:
            truths = {"", *(single_spaced(text).lower() for text in row["references"])}
            negatives.append([])
            for texts in islice(answers, len(row["references"])):
                different = dict.fromkeys(map(single_spaced, texts))
                false = [text for text in different if text.lower() not in truths]
                negatives[-1].append(false)
        return {"negatives": negatives}

    headings = {name: name for name in ("references", "negatives")}
    made_by = {"writer": writer.signature}
    return add_columns(
        config, "negatives", made_by, columns, partial(_report, headings)
    )


def _report(columns: Mapping[str, str], rows: Rows) -> Report:
    """All rows, and a table with the number, mean length and vocabulary of the texts in
    ``columns`` (heading -> column).
    """
    lines = []
    for heading, key in columns.items():
        texts = [text for row in rows for text in _texts(row.get(key))]
        words = list(map(tokenize, texts))
        mean = np.mean(list(map(len, words or [[]])))
        different = len(set(chain.from_iterable(words)))
        lines.append([heading, f"{len(words):,}", f"{mean:.1f}", f"{different:,}"])
    head = ["captions", "number", "words, mean", "different words"]
    return Report(markdown(head, lines), rows)


def _texts(value: Any) -> list[str]:
    """The texts in a column of a row: one, a list, or a list of lists."""
    if isinstance(value, str):
        return [value]
    return [text for item in value or () for text in _texts(item)]


def _images(
    painter: TextToImage, config: PositivesConfig, split: str, rows: Sequence[Row]
) -> list[list[str]]:
    """Image files for the captions of each row; missing files are generated."""
    folder = Path(config.out) / "positive_images" / file_name(split)
    number = 1 if config.images.captions == "first" else None
    files: list[list[str]] = []
    missing: dict[Path, str] = {}
    for row in rows:
        files.append([])
        for index, caption in enumerate(row["references"][:number]):
            name = f"{file_name(row['image_id'])}_{index}.png"
            file = folder / name
            files[-1].append(os.path.abspath(file))
            if not file.exists():
                missing[file] = caption
    for batch in chunks([*missing], config.images.batch_size, "images of captions"):
        images = answers_of(painter, [missing[file] for file in batch], Any)
        for file, image in zip(batch, images, strict=True):
            write_image(file, image)
    return files


def load_writer(config: RecaptionerConfig, key: str) -> Any:
    """Build the recaptioner, or the writer of false captions, of the section ``key``.
    It has a ``signature`` and is called with rows, or with captions.

    Raises ``ConfigError``.
    """
    name = config.target or ""
    target = load_target(name, f"{key}.target", TARGETS)
    return build_target(target, 1, name, config.kwargs, f"{key}.kwargs")


def captions_of(recaptioner: Any, split: str, rows: Sequence[Row]) -> list[list[str]]:
    """New captions of each row, without blank ones.

    Raises ``DataError`` where the recaptioner fails, does not return captions, or has
    none for a row.
    """
    kept = []
    answers = answers_of(recaptioner, rows, str | list[str])
    for row, answer in zip(rows, answers, strict=True):
        texts = [answer] if isinstance(answer, str) else answer
        kept.append([caption for caption in texts if caption.strip()])
        if not kept[-1]:
            image = f"{split} image {row['image_id']!r}"
            raise DataError(f"{recaptioner.signature} wrote no caption of {image}")
    return kept
