"""Programs that copy a data set, part by part, and add generated columns to its rows.

``recaption`` adds a long caption of every image. ``make_positives`` adds what PAC-S learns from: further captions of
each image, and images generated for its captions. ``write_negatives`` adds false captions of the references.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NotRequired, TypedDict
from urllib.parse import quote

import numpy as np

from rewards.build import RewardBuilder
from rewards.devices import chunks
from rewards.files import atomic_write
from rewards.text.perplexity import Perplexity
from rewards.text.tokenize import tokenize
from rl_caption.data.base import DataError, DataModule, Row, load_image
from rl_caption.data.file_checks import progress
from rl_caption.data.files import write_json_lines, write_text
from rl_caption.data.fingerprint import fingerprint
from rl_caption.data.formats import build_data
from rl_caption.data.parts import missing_parts, own_parts
from rl_caption.data.plain_files import parse_json, single_spaced
from rl_caption.evaluation.metrics import check_one_row_each
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import (
    PartsConfig,
    PositivesConfig,
    RecaptionConfig,
    RecaptionerConfig,
    WriteNegativesConfig,
)
from rl_caption.lab.negative_writers import WRITERS, NegativeWriter
from rl_caption.lab.recaptioners import RECAPTIONERS, Recaptioner
from rl_caption.lab.visual_bottleneck import TextToImage, images_of, load_text_to_image
from rl_caption.runtime.errors import ConfigError, config_errors, errors_of_user_code
from rl_caption.runtime.options import build_target, check_type, load_target

QUANTILES = (0.05, 0.5, 0.95)
TEXTS = ("prompt", "long_reference", "positive_captions", "negatives", "questions")
"""Columns that are copied where a row has them; so is ``positive_images``."""
Rows = Sequence[tuple[str, Row]]
"""Rows, each with the name of its split."""
NewColumns = Callable[[Rows], Sequence[Mapping[str, Any]]]
"""From some rows to the new columns of each."""


class _Recaptioned(TypedDict):
    references: list[str]
    long_reference: str


class _Negatives(TypedDict):
    references: list[str]
    negatives: list[list[str]]


class _Positives(TypedDict):
    references: list[str]
    positive_captions: NotRequired[list[str]]
    positive_images: NotRequired[list[str]]


def recaption(config: RecaptionConfig) -> str:
    """Write ``captions.jsonl`` and ``report.md`` to ``config.out``, and return the table of the report.

    ``captions.jsonl`` is a data set of ``data.format: jsonl``. Each row keeps its ``references`` and gets the new
    caption as ``long_reference``. Images that are not files, such as generated scenes, are written to
    ``OUT/images/SPLIT``. With ``config.worker`` only the parts of that worker are made, and a sentence is returned that
    counts them.

    Raises:
        ConfigError: the recaptioner or the language model cannot be made, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or a new caption is empty, or there are several of an image.
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
        several = max(map(len, written))
        if several > 1:
            raise DataError(
                f"{recaptioner.signature} wrote {several} captions of one image: recaption expects exactly one"
            )
        return [{"long_reference": caption} for (caption,) in written]

    summary = make_parts(
        config, rows, {"recaptioner": recaptioner.signature}, columns, "recaptioning"
    )
    if config.worker is not None:
        return summary
    file = Path(config.out) / "captions.jsonl"
    lines = read_parts(config, rows, _Recaptioned)
    count = write_parts(config, data, lines, file)
    before = [caption for line in lines for caption in line["references"]]
    captions = {"before": before, "after": [line["long_reference"] for line in lines]}
    notes = [f"by {recaptioner.signature}"]
    if language_model is not None:
        notes.append(
            f"log-probability: {language_model.signature}, nats a token with EOS, mean over captions"
        )
    return write_report(
        file, count, "Recaptioned", statistics_table(captions, language_model), notes
    )


def make_positives(config: PositivesConfig) -> str:
    """Write ``positives.jsonl`` and ``report.md`` to ``config.out``, and return the table of the report.

    ``positives.jsonl`` is a data set of ``data.format: jsonl`` whose rows have ``positive_captions`` of the image,
    ``positive_images`` (PNG files in ``OUT/positive_images/SPLIT``, one for each reference in order), or both. Files
    that exist already are kept. With ``config.worker`` only the parts of that worker are made, and a sentence is
    returned that counts them.

    Raises:
        ConfigError: nothing is asked for, what makes it cannot be loaded, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or too few captions or images were made.
    """
    if config.captions.target is None and config.images.target is None:
        raise ConfigError(
            "neither captions.target nor images.target is set: set at least one of them (docs/pac.md)"
        )
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

    summary = make_parts(config, rows, made_by, columns, "positives")
    if config.worker is not None:
        return summary
    file = Path(config.out) / "positives.jsonl"
    lines = read_parts(config, rows, _Positives)
    count = write_parts(config, data, lines, file)
    kinds = ("references", "positive_captions")
    captions = {name: [text for line in lines for text in line.get(name, [])] for name in kinds}
    notes = [
        f"{name} by {signature}" for name, signature in made_by.items() if signature is not None
    ]
    notes.append(f"{sum(len(line.get('positive_images', [])) for line in lines):,} images")
    return write_report(file, count, "Positives", statistics_table(captions), notes)


def write_negatives(config: WriteNegativesConfig) -> str:
    """Write ``negatives.jsonl`` and ``report.md`` to ``config.out``, and return the table of the report.

    ``negatives.jsonl`` is a data set of ``data.format: jsonl`` whose rows have ``negatives``, a list for each of the
    ``references``, which may be empty: false captions that equal one of the image's references, in any case, are left
    out, and so are blank ones. With ``config.worker`` only the parts of that worker are made, and a sentence is
    returned that counts them.

    Raises:
        ConfigError: the writer cannot be made, or ``out`` has parts of other settings.
        DataError: the data cannot be read, or the writer returned something else than a list of texts for each caption.
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
        return [
            {"negatives": _false_captions(row, [next(rest) for _ in row["references"]])}
            for _, row in batch
        ]

    summary = make_parts(config, rows, {"writer": writer.signature}, columns, "negatives")
    if config.worker is not None:
        return summary
    file = Path(config.out) / "negatives.jsonl"
    lines = read_parts(config, rows, _Negatives)
    count = write_parts(config, data, lines, file)
    captions = {
        "references": [caption for line in lines for caption in line["references"]],
        "negatives": [text for line in lines for texts in line["negatives"] for text in texts],
    }
    bare = sum(not texts for line in lines for texts in line["negatives"])
    notes = [
        f"by {writer.signature}",
        f"{bare:,} of {len(captions['references']):,} references have no negative",
    ]
    return write_report(file, count, "Negatives", statistics_table(captions), notes)


def _false_captions(row: Row, answers: Sequence[Sequence[str]]) -> list[list[str]]:
    """The answers of each reference without blank ones, repetitions and references of the image."""
    true = {single_spaced(text).lower() for text in row["references"]}
    texts = [list(dict.fromkeys(map(single_spaced, answer))) for answer in answers]
    return [[text for text in answer if text and text.lower() not in true] for answer in texts]


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
    """Build what the section ``key`` of a configuration names: a ``Recaptioner``, or another of ``known``.

    Raises ``ConfigError`` where that fails.
    """
    if config.target is None:
        raise ConfigError(
            f"{key}.target is not set: expected {', '.join(targets)} or package.module:Class"
        )
    target = load_target(config.target, f"{key}.target", targets)
    recaptioner: Any = build_target(target, 1, config.target, config.kwargs, f"{key}.kwargs")
    if not isinstance(getattr(recaptioner, "signature", None), str):
        raise ConfigError(
            f"{key}.target is {config.target!r}: it has no attribute signature, which identifies the model"
        )
    return recaptioner


def captions_of(recaptioner: Recaptioner, rows: Rows, where: str) -> list[list[str]]:
    """The new captions of each row without blank ones, by the recaptioner that is named ``where`` in messages.

    Raises ``DataError`` where it fails, returns something else than captions, or has none for a row.
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


def selected_rows(config: PartsConfig) -> tuple[DataModule, list[tuple[str, Row]]]:
    """Read the data of a configuration: all of it, and the rows of the ``splits`` that are worked on.

    Raises:
        ConfigError: a split is unknown, ``worker`` is not K/N, or the images are videos.
        DataError: the data cannot be read.
        EvaluationError: an image id is in several rows of a split: captions and files go by it.
    """
    data = build_data(config.data)
    unknown = sorted(set(config.splits) - set(data.splits))
    if unknown:
        raise ConfigError(f"splits has {unknown}: expected some of {', '.join(data.splits)}")
    own_parts(config.worker, 1)
    names = list(dict.fromkeys(config.splits or data.splits))
    for name in data.splits:  # of splits that are not worked on, images in memory become files, too
        check_one_row_each(data.split(name), f"split {name!r}")
    rows = [(name, row) for name in names for row in data.split(name)]
    if any(isinstance(row.get("image"), list | tuple) for _, row in rows):
        raise ConfigError(
            f"images of {config.data.path or config.data.format} are videos: expected one image each"
        )
    return data, rows


def make_parts(
    config: PartsConfig,
    rows: Rows,
    made_by: Mapping[str, str | None],
    columns: NewColumns,
    what: str,
) -> str:
    """Write the worker's missing parts of ``rows``; return a sentence that counts them.

    ``made_by`` has the signatures of what makes the new columns: ``ConfigError`` if ``out`` has parts by others, or by
    other settings. ``what`` is the title of the progress bar.
    """
    files, out = _part_files(config, len(rows)), Path(config.out)
    by_split = {split: [row for _, row in group] for split, group in groupby(rows, itemgetter(0))}
    settings: dict[str, Any] = {"rows": len(rows), "captions_before": _fingerprint(rows)}
    settings |= {"part_rows": config.part_rows, "data": fingerprint(by_split)}
    missing, summary = missing_parts(out, files, config.worker, {**settings, **made_by})
    for number in progress(missing, what, "part"):
        batch = rows[number * config.part_rows : (number + 1) * config.part_rows]
        lines = [
            _line(split, row, out) | dict(new)
            for (split, row), new in zip(batch, columns(batch), strict=True)
        ]
        write_json_lines(files[number], lines)
    return summary


def _fingerprint(rows: Rows) -> str:
    """A hash of the images' ids and texts in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for split, row in rows:
        texts = [row.get(key) for key in ("references", *TEXTS) if key != "questions" or key in row]
        digest.update(json.dumps([split, row["image_id"], *texts]).encode())
    return digest.hexdigest()


def file_name(text: str) -> str:
    """A file's or folder's name for an id or a split: other characters as ``%2F``, and also the dots of ``..``.

    Of a long id the end is a fingerprint: file systems allow 255 bytes.
    """
    quoted = quote(text, safe="")
    if len(quoted) > 200:
        return f"{quoted[:160]}-{hashlib.blake2b(quoted.encode(), digest_size=16).hexdigest()}"
    return quoted.replace(".", "%2E") if quoted in ("", ".", "..") else quoted


def _part_files(config: PartsConfig, rows: int) -> list[Path]:
    return [
        Path(config.out) / "parts" / f"{number:06d}.jsonl"
        for number in range(-(-rows // config.part_rows))
    ]


def _line(split: str, row: Row, out: Path) -> dict[str, Any]:
    """A row as ``data.format: jsonl`` reads it; its image is written to a file if it is none."""
    image: Any = row["image"]
    if not isinstance(image, str | Path):
        image = out / "images" / file_name(split) / f"{file_name(row['image_id'])}.png"
        if not image.exists():
            with atomic_write(image) as file:
                load_image(row["image"]).save(file, "PNG")
    line = {
        "image_id": row["image_id"],
        "image": os.path.abspath(image),
        "references": row["references"],
    }
    copied: dict[str, Any] = {key: row[key] for key in TEXTS if key in row}  # type: ignore[literal-required]
    files: Any = row.get("positive_images", [])
    if files and all(isinstance(file, str | Path) for file in files):
        copied["positive_images"] = [os.path.abspath(file) for file in files]
    return line | {"split": split} | copied


def read_parts(config: PartsConfig, rows: Rows, line_type: Any) -> list[dict[str, Any]]:
    """The lines of all parts, of the type ``line_type`` (``check_type``).

    Raises ``DataError``, which names part and line, for a damaged part.
    """
    lines_of_parts: list[dict[str, Any]] = []
    for number, path in enumerate(_part_files(config, len(rows))):
        lines = path.read_bytes().splitlines()
        expected = len(rows[number * config.part_rows : (number + 1) * config.part_rows])
        if len(lines) != expected:
            raise DataError(
                f"{path} has {len(lines)} of {expected} rows: "
                "delete it and run again to recreate it"
            )
        for line, content in enumerate(lines, start=1):
            where = f"{path}, line {line}"
            lines_of_parts.append(parse_json(content, where))
            check_type(lines_of_parts[-1], line_type, where, DataError)
    return lines_of_parts


def write_parts(
    config: PartsConfig, data: DataModule, lines: Iterable[dict[str, Any]], file: Path
) -> int:
    """Write one ``file`` of the lines of parts and the rows of splits that were not worked on.

    Returns its number of lines.
    """
    written = list(lines)
    for name in data.splits:
        if config.splits and name not in config.splits:
            written += [_line(name, row, Path(config.out)) for row in data.split(name)]
    write_json_lines(file, written)
    return len(written)


def write_report(file: Path, count: int, title: str, table: str, notes: Sequence[str]) -> str:
    """Write ``report.md`` beside ``file``, which has ``count`` rows; return the table and what was written."""
    report = file.with_name("report.md")
    listed = [f"- {note}" for note in (*notes, f"`{file.name}`: {count:,} rows")]
    write_text(report, "\n".join([f"# {title}", "", table, "", *listed]) + "\n")
    return f"{table}\n\nwrote {file} ({count:,} rows) and {report}"


def statistics_table(
    captions: Mapping[str, Sequence[str]], language_model: Perplexity | None = None
) -> str:
    """A Markdown table with a row for each name: number, length, vocabulary and likelihood of its captions."""
    rows = {name: _statistics(texts, language_model) for name, texts in captions.items()}
    return markdown(
        ["captions", *_statistics([], None)], [[name, *row.values()] for name, row in rows.items()]
    )


def _statistics(captions: Sequence[str], language_model: Perplexity | None) -> Mapping[str, str]:
    """Heading -> figure; without captions the figures mean nothing."""
    lengths: list[int] = []
    vocabulary: set[str] = set()
    for caption in captions:
        words = tokenize(caption)
        lengths.append(len(words))
        vocabulary.update(words)
    low, middle, high = np.quantile(lengths or [0], QUANTILES)
    scores = language_model(None, list(captions)) if language_model is not None and captions else []
    return {
        "number": f"{len(captions):,}",
        "words, mean": f"{np.mean(lengths):.1f}" if captions else "",
        "words, 5 / 50 / 95 %": f"{low:.0f} / {middle:.0f} / {high:.0f}",
        "different words": f"{len(vocabulary):,}",
        "log-probability a token": f"{np.mean(scores):.3f}" if scores else "–",
        "of a caption, median": f"{np.median(language_model.log_likelihoods(captions)):.1f}"
        if language_model is not None and captions
        else "–",
    }
