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
from rl_caption.lab.parts import Report, Rows, add_columns, file_name, selected_rows
from rl_caption.lab.recaptioners import RECAPTIONERS, Recaptioner
from rl_caption.lab.visual_bottleneck import TextToImage, images_of, load_text_to_image
from rl_caption.runtime.errors import config_errors, errors_of_user_code
from rl_caption.runtime.options import build_target, check_type, load_target

QUANTILES = (0.05, 0.5, 0.95)


def recaption(config: RecaptionConfig) -> str:
    """Write ``captions.jsonl``, whose rows have the new caption as ``long_reference``
    (``parts.add_columns``).

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
            options = {"model": config.language_model, "floor": -100.0}
            language_model = RewardBuilder().build("perplexity", options)
    recaptioner = load_recaptioner(config.recaptioner, "recaptioner")

    def columns(batch: Rows) -> list[dict[str, Any]]:
        written = captions_of(recaptioner, batch, f"recaptioner.target {config.recaptioner.target}")
        if any(len(captions) > 1 for captions in written):
            raise DataError(f"{recaptioner.signature} wrote 2 captions or more of one image")
        return [{"long_reference": caption} for (caption,) in written]

    def report(made: Sequence[Mapping[str, Any]]) -> Report:
        captions = {
            "before": [caption for _, row in rows for caption in row["references"]],
            "after": [new["long_reference"] for new in made],
        }
        notes = [f"by {recaptioner.signature}"]
        if language_model is not None:
            unit = "nats a token with EOS, mean over captions"
            notes.append(f"log-probability: {language_model.signature}, {unit}")
        return Report(statistics_table(captions, language_model), notes)

    made_by = {"recaptioner": recaptioner.signature}
    return add_columns(config, data, rows, "captions", made_by, columns, report)


def make_positives(config: PositivesConfig) -> str:
    """Write ``positives.jsonl``, whose rows have ``positive_captions`` of the image,
    ``positive_images`` (PNG files in ``OUT/positive_images/SPLIT``, one for each reference in
    order), or both (``parts.add_columns``). Files that exist already are kept.

    Raises:
        ConfigError: what makes them cannot be loaded, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or too few captions or images were made.
    """
    data, rows = selected_rows(config)
    captioner = painter = None
    made_by: dict[str, str | None] = {"captions": None, "images": None}
    if config.captions.target is not None:
        captioner = load_recaptioner(config.captions, "captions")
        made_by["captions"] = captioner.signature
    if config.images.target is not None:
        with config_errors("images"):
            painter = load_text_to_image(config.images.target, config.images.kwargs)
        made_by["images"] = f"{painter.signature} of {config.images.captions} references"

    def columns(batch: Rows) -> list[dict[str, Any]]:
        new: list[dict[str, Any]] = [{} for _ in batch]
        if captioner is not None:
            written = captions_of(captioner, batch, f"captions.target {config.captions.target}")
            for line, texts in zip(new, written, strict=True):
                line["positive_captions"] = texts
        if painter is not None:
            for line, files in zip(new, _images(painter, batch, config), strict=True):
                line["positive_images"] = files
        return new

    def report(made: Sequence[Mapping[str, Any]]) -> Report:
        captions = {
            "references": [text for _, row in rows for text in row["references"]],
            "positive_captions": [
                text for new in made for text in new.get("positive_captions", [])
            ],
        }
        notes = [f"{name} by {signature}" for name, signature in made_by.items() if signature]
        notes.append(f"{sum(len(new.get('positive_images', [])) for new in made):,} images")
        return Report(statistics_table(captions), notes)

    return add_columns(config, data, rows, "positives", made_by, columns, report)


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
    data, rows = selected_rows(config)
    writer: NegativeWriter = load_recaptioner(config.writer, "writer", WRITERS)

    def columns(batch: Rows) -> list[dict[str, Any]]:
        captions = [caption for _, row in batch for caption in row["references"]]
        where = f"writer.target {config.writer.target}"
        with errors_of_user_code(where, error=DataError):
            answers: Any = list(writer(captions))
        check_type(answers, list[list[str]], f"{where}: what it returned", DataError)
        if len(answers) != len(captions):
            count = f"{len(answers)} of {len(captions)} captions"
            raise DataError(f"{writer.signature} answered {count}")
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

    def report(made: Sequence[Mapping[str, Any]]) -> Report:
        negatives = [texts for new in made for texts in new["negatives"]]
        captions = {
            "references": [caption for _, row in rows for caption in row["references"]],
            "negatives": [text for texts in negatives for text in texts],
        }
        bare = f"{sum(not texts for texts in negatives):,} of {len(negatives):,} references"
        notes = [f"by {writer.signature}", f"{bare} have no negative"]
        return Report(statistics_table(captions), notes)

    made_by = {"writer": writer.signature}
    return add_columns(config, data, rows, "negatives", made_by, columns, report)


def _images(painter: TextToImage, rows: Rows, config: PositivesConfig) -> list[list[str]]:
    """The image files for the captions of each row; those that do not exist are made."""
    folder = Path(config.out) / "positive_images"
    number = 1 if config.images.captions == "first" else None
    files: list[list[str]] = []
    missing: list[tuple[Path, str]] = []
    for split, row in rows:
        files.append([])
        for index, caption in enumerate(row["references"][:number]):
            file = folder / file_name(split) / f"{file_name(row['image_id'])}_{index}.png"
            files[-1].append(os.path.abspath(file))
            if not file.exists():
                missing.append((file, caption))
    where = f"images.target {config.images.target}"
    for batch in chunks(missing, config.images.batch_size, "images of captions"):
        generated = images_of(painter, [caption for _, caption in batch], where)
        for (file, _), image in zip(batch, generated, strict=True):
            opened = load_image(image)
            with atomic_write(file) as written:
                opened.save(written, "PNG")
    return files


def load_recaptioner(
    config: RecaptionerConfig, key: str, targets: Mapping[str, str] = RECAPTIONERS
) -> Any:
    """Build what the section ``key`` of a configuration names: a ``Recaptioner``, or another of
    ``targets``.

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
    answers: list[Any] = []
    for _, group in groupby(rows, itemgetter(0)):  # another split may have the same image ids
        with errors_of_user_code(where, error=DataError):
            written: Any = recaptioner([row for _, row in group])
            if isinstance(written, Iterable) and not isinstance(written, str):
                written = list(written)
        check_type(written, list[str | list[str]], f"{where}: what it returned", DataError)
        answers += written
    if len(answers) != len(rows):
        count = f"{len(answers)} captions of {len(rows)} images"
        raise DataError(f"{recaptioner.signature} wrote {count}")
    kept = []
    for (split, row), answer in zip(rows, answers, strict=True):
        texts = [answer] if isinstance(answer, str) else answer
        kept.append([caption for caption in texts if caption.strip()])
        if not kept[-1]:
            image = f"{split} image {row['image_id']!r}"
            raise DataError(f"{recaptioner.signature} wrote no caption of {image}")
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
