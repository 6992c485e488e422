"""Programs that copy a data set, part by part, and add generated columns to its rows.

``recaption`` adds a long caption of every image. ``make_positives`` adds what PAC-S learns from:
further captions of each image, and images generated for its captions. ``write_negatives`` adds
false captions of the references.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from rewards.build import RewardBuilder
from rewards.devices import chunks
from rewards.files import atomic_write
from rewards.text.perplexity import Perplexity
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
from rl_caption.lab.negative_writers import WRITERS, NegativeWriter
from rl_caption.lab.parts import (
    Rows,
    file_name,
    make_parts,
    selected_rows,
    with_columns,
    write_result,
)
from rl_caption.lab.recaptioners import RECAPTIONERS, Recaptioner
from rl_caption.lab.visual_bottleneck import TextToImage, images_of, load_text_to_image
from rl_caption.runtime.errors import config_errors, errors_of_user_code
from rl_caption.runtime.options import build_target, check_type, load_target

QUANTILES = (0.05, 0.5, 0.95)


def recaption(config: RecaptionConfig) -> str:
    """Write ``captions.jsonl`` and ``report.md`` to ``config.out``, and return the table of the
    report.

    ``captions.jsonl`` is a data set of ``data.format: jsonl``. Each row keeps its ``references``
    and gets the new caption as ``long_reference``. Images that are not files, such as generated
    scenes, are written to ``OUT/images/SPLIT``. With ``config.worker`` only the parts of that
    worker are made, and a sentence is returned that counts them.

    Raises:
        ConfigError: the recaptioner or the language model cannot be made, or ``out`` has parts of
            other settings.
        DataError: the data cannot be read, or a new caption is empty, or there are several of an
            image.
    """
    data, rows = selected_rows(config)
    with config_errors("language_model"):
        language_model: Any = None
        if config.language_model is not None:
            language_model = RewardBuilder().build(
                "perplexity", {"model": config.language_model, "floor": -100.0}
            )
    recaptioner = load_recaptioner(config.recaptioner, "recaptioner")

    def columns(batch: Rows) -> list[dict[str, Any]]:
        """The new caption of each row."""
        written = captions_of(recaptioner, batch, f"recaptioner.target {config.recaptioner.target}")
        if any(len(captions) > 1 for captions in written):
            raise DataError(f"{recaptioner.signature} wrote 2 captions or more of one image")
        return [{"long_reference": caption} for (caption,) in written]

    made_by = {"recaptioner": recaptioner.signature}
    summary, made = make_parts(config, rows, made_by, columns, "recaptioning")
    if config.worker is not None:
        return summary
    captions = {
        "before": [caption for _, row in rows for caption in row["references"]],
        "after": [new["long_reference"] for new in made],
    }
    table = statistics_table(captions, language_model)
    notes = [f"by {recaptioner.signature}"]
    if language_model is not None:
        unit = "nats a token with EOS, mean over captions"
        notes.append(f"log-probability: {language_model.signature}, {unit}")
    return write_result(config, data, with_columns(rows, made), "captions", table, notes)


def make_positives(config: PositivesConfig) -> str:
    """Write ``positives.jsonl`` and ``report.md`` to ``config.out``, and return the table of the
    report.

    ``positives.jsonl`` is a data set of ``data.format: jsonl`` whose rows have
    ``positive_captions`` of the image, ``positive_images`` (PNG files in
    ``OUT/positive_images/SPLIT``, one for each reference in order), or both. Files that exist
    already are kept. With ``config.worker`` only the parts of that worker are made, and a sentence
    is returned that counts them.

    Raises:
        ConfigError: what makes them cannot be loaded, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or too few captions or images were made.
    """
    data, rows = selected_rows(config)
    captioner = (
        None if config.captions.target is None else load_recaptioner(config.captions, "captions")
    )
    with config_errors("images"):
        asked = config.images
        painter = None if asked.target is None else load_text_to_image(asked.target, asked.kwargs)
    made_by = {
        "captions": None if captioner is None else captioner.signature,
        "images": None
        if painter is None
        else f"{painter.signature} of {config.images.captions} references",
    }

    def columns(batch: Rows) -> list[dict[str, Any]]:
        """The new columns of each row."""
        new_columns: list[dict[str, Any]] = [{} for _ in batch]
        if captioner is not None:
            texts_of_rows = captions_of(
                captioner, batch, f"captions.target {config.captions.target}"
            )
            for line, texts in zip(new_columns, texts_of_rows, strict=True):
                line["positive_captions"] = texts
        if painter is not None:
            for line, files in zip(new_columns, _images(painter, batch, config), strict=True):
                line["positive_images"] = files
        return new_columns

    summary, made = make_parts(config, rows, made_by, columns, "positives")
    if config.worker is not None:
        return summary
    captions = {
        "references": [text for _, row in rows for text in row["references"]],
        "positive_captions": [text for new in made for text in new.get("positive_captions", [])],
    }
    notes = [f"{name} by {signature}" for name, signature in made_by.items() if signature]
    notes.append(f"{sum(len(new.get('positive_images', [])) for new in made):,} images")
    table = statistics_table(captions)
    return write_result(config, data, with_columns(rows, made), "positives", table, notes)


def write_negatives(config: WriteNegativesConfig) -> str:
    """Write ``negatives.jsonl`` and ``report.md`` to ``config.out``, and return the table of the
    report.

    ``negatives.jsonl`` is a data set of ``data.format: jsonl`` whose rows have ``negatives``, a
    list for each of the ``references``, which may be empty: false captions that equal one of the
    image's references, in any case, are left out, and so are blank ones. With ``config.worker``
    only the parts of that worker are made, and a sentence is returned that counts them.

    Raises:
        ConfigError: the writer cannot be made, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or the writer returned something else than a list of
            texts for each caption.
    """
    data, rows = selected_rows(config)
    writer: NegativeWriter = load_recaptioner(config.writer, "writer", WRITERS)

    def columns(batch: Rows) -> list[dict[str, Any]]:
        """The false captions of each row's references."""
        captions = [caption for _, row in batch for caption in row["references"]]
        where = f"writer.target {config.writer.target}"
        with errors_of_user_code(where, error=DataError):
            answers: Any = list(writer(captions))
        check_type(answers, list[list[str]], f"{where}: what it returned", DataError)
        if len(answers) != len(captions):
            raise DataError(
                f"{writer.signature} answered {len(answers)} of {len(captions)} captions"
            )
        rest = iter(answers)
        new = []
        for _, row in batch:
            true = {single_spaced(text).lower() for text in row["references"]}
            negatives = []
            for _ in row["references"]:
                texts = dict.fromkeys(map(single_spaced, next(rest)))
                negatives.append([text for text in texts if text and text.lower() not in true])
            new.append({"negatives": negatives})
        return new

    made_by = {"writer": writer.signature}
    summary, made = make_parts(config, rows, made_by, columns, "negatives")
    if config.worker is not None:
        return summary
    negatives = [texts for new in made for texts in new["negatives"]]
    captions = {
        "references": [caption for _, row in rows for caption in row["references"]],
        "negatives": [text for texts in negatives for text in texts],
    }
    bare = sum(not texts for texts in negatives)
    notes = [
        f"by {writer.signature}",
        f"{bare:,} of {len(negatives):,} references have no negative",
    ]
    table = statistics_table(captions)
    return write_result(config, data, with_columns(rows, made), "negatives", table, notes)


def _images(painter: TextToImage, rows: Rows, config: PositivesConfig) -> list[list[str]]:
    """The image files for the captions of each row; those that do not exist are made."""
    folder, number = (
        Path(config.out) / "positive_images",
        1 if config.images.captions == "first" else None,
    )
    files: list[list[str]] = []
    missing: list[tuple[Path, str]] = []
    for split, row in rows:
        stem, captions = file_name(row["image_id"]), row["references"][:number]
        row_files = [
            folder / file_name(split) / f"{stem}_{index}.png" for index in range(len(captions))
        ]
        missing += [
            (file, text)
            for file, text in zip(row_files, captions, strict=True)
            if not file.exists()
        ]
        files.append([os.path.abspath(file) for file in row_files])
    for batch in chunks(missing, config.images.batch_size, "images of captions"):
        generated = images_of(
            painter, [caption for _, caption in batch], f"images.target {config.images.target}"
        )
        for (file, _), image in zip(batch, generated, strict=True):
            opened = load_image(image)
            with atomic_write(file) as written:
                opened.save(written, "PNG")
    return files


def load_recaptioner(
    config: RecaptionerConfig, key: str, targets: Mapping[str, str] = RECAPTIONERS
) -> Any:
    """Build what the section ``key`` of a configuration names: a ``Recaptioner``, or another of
    ``known``.

    Raises ``ConfigError`` where that fails.
    """
    name = config.target or ""
    target = load_target(name, f"{key}.target", targets)
    return build_target(target, 1, name, config.kwargs, f"{key}.kwargs")


def captions_of(recaptioner: Recaptioner, rows: Rows, where: str) -> list[list[str]]:
    """The new captions of each row without blank ones, by the recaptioner that is named ``where``
    in messages.

    Raises ``DataError`` where it fails, returns something else than captions, or has none for a
    row.
    """
    answers_of_rows: list[Any] = []
    for _, group in groupby(rows, itemgetter(0)):  # another split may have the same image ids
        with errors_of_user_code(where, error=DataError):
            answers: Any = recaptioner([row for _, row in group])
            if isinstance(answers, Iterable) and not isinstance(answers, str):
                answers = list(answers)
        check_type(answers, list[str | list[str]], f"{where}: what it returned", DataError)
        answers_of_rows += [[answer] if isinstance(answer, str) else answer for answer in answers]
    if len(answers_of_rows) != len(rows):
        raise DataError(
            f"{recaptioner.signature} wrote {len(answers_of_rows)} captions of {len(rows)} images"
        )
    kept = [[caption for caption in texts if caption.strip()] for texts in answers_of_rows]
    for (split, row), texts in zip(rows, kept, strict=True):
        if not texts:
            raise DataError(
                f"{recaptioner.signature} wrote no caption of {split} image {row['image_id']!r}"
            )
    return kept


def statistics_table(
    captions: Mapping[str, Sequence[str]], language_model: Perplexity | None = None
) -> str:
    """A Markdown table with a row for each name: number, length, vocabulary and likelihood of its
    captions.
    """
    lines = []
    for name, texts in captions.items():
        words = [tokenize(caption) for caption in texts]
        lengths = list(map(len, words))
        low, middle, high = np.quantile(lengths or [0], QUANTILES)
        likelihoods = ["–", "–"]
        if language_model is not None and texts:
            scores = language_model(None, list(texts))
            whole = language_model.log_likelihoods(texts)
            likelihoods = [f"{np.mean(scores):.3f}", f"{np.median(whole):.1f}"]
        mean = f"{np.mean(lengths):.1f}" if texts else ""
        different = len({word for caption in words for word in caption})
        quantiles = f"{low:.0f} / {middle:.0f} / {high:.0f}"
        lines.append([name, f"{len(texts):,}", mean, quantiles, f"{different:,}", *likelihoods])
    heads = ["captions", "number", "words, mean", "words, 5 / 50 / 95 %", "different words"]
    return markdown([*heads, "log-probability a token", "of a caption, median"], lines)
