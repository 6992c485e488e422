"""Program that writes multiple-choice questions about images, the column ``questions`` of the reward ``caption_qa``.

Source: the form of Xing et al. (``rewards.language.caption_qa``), whose questions are filtered, too: one that is
answered without the image is refused. Prompts are our own.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from rewards.base import RewardError
from rewards.language.caption_qa import NOT_SAID, ImageQuestion, check_questions, is_found, pose
from rewards.language.chooser import Chooser, Question, build_chooser, calls_of, choose
from rewards.language.writer import Writer, build_writer, read_answers, read_list
from rl_caption.data.base import DataError, Row
from rl_caption.data.plain_files import single_spaced
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import QuestionsConfig
from rl_caption.lab.recaption import Rows, gather_parts, make_parts, selected_rows, write_report
from rl_caption.runtime.errors import config_errors

PROMPT = (
    "Write {count} different multiple-choice questions about an image, from its descriptions below. Each asks for one "
    "thing that can be seen: what there is, its colour, material, number or action, where it is, or what is written "
    "on it. One choice is right, and the descriptions say so; two or three others are as plausible and wrong. Nobody "
    "should be able to guess the answer without the descriptions, which a question does not mention.\n\n"
    "Descriptions of the image:\n{descriptions}\n\n"
    'Reply with a JSON list such as [{{"question": "What is on the grass?", "choices": ["a dog", "a cat", "a cow"], '
    '"answer": "a dog"}}].'
)
GUESS_PROMPT = (
    "This question is about an image that you cannot see. Choose the most likely answer.\n\n"
    "Question: {question}\n{choices}\n\nReply with the letter of the answer."
)
REFUSALS = {
    "unreadable": "refused: no question with different choices, of which one is the answer, or a repetition",
    "guessed": "refused: answered right without a caption",
    "unsaid": "refused: not answered right from the references",
}
"""Reason, as in the column ``refused`` -> its row of the report."""


class _Line(TypedDict):
    references: list[str]
    questions: list[ImageQuestion]
    refused: dict[str, int]


Written = tuple[list[ImageQuestion], Counter[str]]
"""Questions of an image, and reason -> number of those that were refused."""


def write_questions(config: QuestionsConfig) -> str:
    """Write ``questions.jsonl`` and ``report.md`` to ``config.out``, and return the table of the report.

    ``questions.jsonl`` is a data set of ``data.format: jsonl`` whose rows have ``questions``, and ``refused``, a number
    for each reason. Rows without a question that is kept are left out and counted. With ``config.worker`` only the
    parts of that worker are made, and a sentence is returned that counts them.

    Raises:
        ConfigError: a model cannot be made, or ``out`` has parts of other settings.
        DataError: the data cannot be read, a row has no references to ask about (without a writer: no questions), or no
            question is kept.
        RewardError: a model does not answer; the message names image and question.
    """
    start = time.perf_counter()
    data, rows = selected_rows(config)
    writer, reader = _models(config)
    _check_rows(rows, writer)

    def columns(batch: Rows) -> list[dict[str, object]]:
        """Questions of each row, and what was refused."""
        written = _write(writer, config.count, batch)
        kept = written if reader is None else _filter(reader, config.seed, batch, written)
        return [{"questions": questions, "refused": dict(refused)} for questions, refused in kept]

    prompts = hashlib.blake2b(f"{PROMPT}{GUESS_PROMPT}".encode(), digest_size=4).hexdigest()
    made_by = {
        "writer": "the data" if writer is None else f"{writer.signature}, {config.count} an image",
        "reader": None if reader is None else f"{reader.signature}, seed {config.seed}",
    }
    summary = make_parts(config, rows, made_by | {"prompts": prompts}, columns, "questions")
    costs = [
        f"{name}, in this call: {calls.requests:,} requests, {tokens} tokens"
        for name, model in {"writer": writer, "reader": reader}.items()
        if model is not None
        for calls in [calls_of(model)]
        for tokens in ["an unknown number of" if calls.tokens is None else f"{calls.tokens:,}"]
    ]
    costs.append(f"{time.perf_counter() - start:,.1f} seconds, in this call")
    if config.worker is not None:
        return "; ".join([summary, *costs])
    file = Path(config.out) / "questions.jsonl"
    lines, count = gather_parts(config, data, rows, file, _Line, has_questions)
    notes = [f"{name}: {signature}" for name, signature in made_by.items() if signature is not None]
    bare = sum(not has_questions(line) for line in lines)
    notes += [f"{bare:,} of {len(lines):,} images have no question and are left out", *costs]
    return write_report(file, count, "Questions", _table(lines), notes)


def _models(config: QuestionsConfig) -> tuple[Writer | None, Chooser | None]:
    """Writer and reader; the reader is the writer's model unless it is set."""
    writer, reader, kept = (
        config.writer,
        config.reader if config.reader.is_set else config.writer,
        config.cache_dir,
    )
    built: tuple[Writer | None, Chooser | None] = (None, None)
    with config_errors("writer"):
        if writer.is_set:
            options = kept, writer.device, writer.precision, config.max_new_tokens
            built = build_writer("questions", writer.model, writer.endpoint, *options), None
    with config_errors("reader"):
        if reader.is_set:
            how = kept, reader.device, reader.precision, reader.batch_size
            built = (
                built[0],
                build_chooser("questions", reader.model, reader.endpoint, *how, vision=False),
            )
    return built


def _check_rows(rows: Rows, writer: Writer | None) -> None:
    """Refuse, before any work, a row of which nothing can be asked."""
    for split, row in rows:
        where = f"{split} image {row['image_id']!r}"
        if writer is None and "questions" not in row:
            remedy = "set writer.model or writer.endpoint; on the generated world data.kwargs.questions, too"
            raise DataError(f"{where} has no questions: {remedy}")
        if writer is not None and not _descriptions(row):
            raise DataError(f"{where} has no references, from which questions are written")


def _descriptions(row: Row) -> list[str]:
    return [text for text in [*row["references"], row.get("long_reference", "")] if text.strip()]


def _write(writer: Writer | None, count: int, rows: Rows) -> list[Written]:
    """At most ``count`` questions of each row; without a writer, those that it has."""
    if writer is None:
        return [(list(row["questions"]), Counter()) for _, row in rows]
    prompts = []
    for split, row in rows:
        descriptions = "\n".join(f"- {single_spaced(text)}" for text in _descriptions(row))
        text = PROMPT.format(count=count, descriptions=descriptions)
        prompts.append(Question(text, (), f"{split} image {row['image_id']!r}"))
    return read_answers(
        writer, prompts, partial(read_questions, count), lambda _: ([], Counter(unreadable=1))
    )


def read_questions(count: int, answer: str) -> Written:
    """The first ``count`` questions in an answer, less those that are wrong or repeated, which are counted.

    Raises ``ValueError`` where there is none.
    """
    questions: dict[str, ImageQuestion] = {}
    problem = ""
    items = read_list(answer)[:count]
    for item in items:
        try:
            (question,) = check_questions([item], "it")
        except RewardError as error:
            problem = str(error)
        else:
            fields: ImageQuestion = {key: question[key] for key in ImageQuestion.__annotations__}  # type: ignore
            questions.setdefault(single_spaced(question["question"]).casefold(), fields)
    if not questions:
        raise ValueError(problem)
    return list(questions.values()), Counter(unreadable=len(items) - len(questions))


def _filter(reader: Chooser, seed: int, rows: Rows, written: Sequence[Written]) -> list[Written]:
    """The questions that the reader answers right from the references, and does not from nothing."""
    asked: list[Question] = []
    right: list[int] = []
    for (split, row), (questions, _) in zip(rows, written, strict=True):
        for index, item in enumerate(questions):
            order, where = (
                (seed, row["image_id"], index),
                f"{split} image {row['image_id']!r}, question {index}",
            )
            guess = pose(item, item["choices"], order, where, prompt=GUESS_PROMPT)
            read = pose(
                item, [*item["choices"], NOT_SAID], order, where, "\n".join(_descriptions(row))
            )
            for question, place in (guess, read):
                asked.append(question)
                right.append(place)
    answers = zip(choose(reader, asked), right, strict=True)
    marks = iter([is_found(masses, place) for masses, place in answers])
    kept: list[Written] = []
    for questions, refused in written:
        left, refused = list[ImageQuestion](), Counter(refused)
        for item in questions:
            guessed, said = next(marks), next(marks)
            if said and not guessed:
                left.append(item)
            else:
                refused["guessed" if guessed else "unsaid"] += 1
        kept.append((left, refused))
    return kept


def has_questions(line: Mapping[str, Any]) -> bool:
    """Whether a row of a part has a question left."""
    return bool(line["questions"])


def _table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of all questions: kept, and refused for each reason."""
    refused = Counter[str]()
    for line in lines:
        refused.update(line["refused"])
    kept = sum(len(line["questions"]) for line in lines)
    total = kept + refused.total()
    rows = {"kept": kept, **{text: refused[reason] for reason, text in REFUSALS.items()}}
    return markdown(
        ["questions", "number", "%"],
        [[name, f"{n:,}", f"{100 * n / total:.1f}"] for name, n in rows.items()],
    )
