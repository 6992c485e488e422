"""Program that writes questions about images, the column ``questions`` of ``caption_qa``.

Source: the form of Xing et al. (``rewards.language.caption_qa``), whose questions are filtered,
too: one that is answered without the image is refused. Prompts are our own.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from rewards.base import RewardError
from rewards.language.build import build_model
from rewards.language.caption_qa import NOT_SAID, ImageQuestion, check_questions, is_found, pose
from rewards.language.models import (
    LanguageModel,
    Question,
    calls_of,
    choose,
    read_answers,
    read_list,
)
from rl_caption.data.base import DataError, Row
from rl_caption.data.plain_files import single_spaced
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import LanguageModelConfig, QuestionsConfig
from rl_caption.lab.parts import Report, Rows, add_columns, selected_rows, with_columns
from rl_caption.runtime.errors import config_errors

PROMPT = (
    "Write {count} different multiple-choice questions about an image, from its descriptions "
    "below. Each asks for one "
    "thing that can be seen: what there is, its colour, material, number or action, where it is, "
    "or what is written "
    "on it. One choice is right, and the descriptions say so; two or three others are as plausible "
    "and wrong. Nobody "
    "should be able to guess the answer without the descriptions, which a question does not "
    "mention.\n\n"
    "Descriptions of the image:\n{descriptions}\n\n"
    'Reply with a JSON list such as [{{"question": "What is on the grass?", "choices": ["a dog", '
    '"a cat", "a cow"], '
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


Written = tuple[list[ImageQuestion], Counter[str]]
"""Questions of an image, and reason -> number of those that were refused."""


def write_questions(config: QuestionsConfig) -> str:
    """Write ``questions.jsonl``, whose rows have ``questions``, and ``refused``, a number for each
    reason (``parts.add_columns``). Rows without a question that is kept are left out and counted.

    Raises:
        ConfigError: a model cannot be made, or ``out`` has parts of other settings.
        DataError: the data cannot be read, a row has no references to ask about (without a writer:
            no questions), or no question is kept; then with the counts and a refused answer.
        RewardError: a model does not answer; the message names image and question.
    """
    start = time.perf_counter()
    data, rows = selected_rows(config)
    writer, reader = _models(config)
    for split, row in rows:  # before any work
        where = f"{split} image {row['image_id']!r}"
        if writer is None and "questions" not in row:
            raise DataError(f"{where} has no questions: set writer.model or writer.endpoint")
        if writer is not None and not _descriptions(row):
            raise DataError(f"{where} has no references, from which questions are written")
    refused_answers: list[str] = []

    def columns(batch: Rows) -> list[dict[str, object]]:
        written = _write(writer, config, batch, refused_answers)
        if reader is not None:
            written = _filter(reader, config.seed, batch, written, refused_answers)
        return [
            {"questions": questions, "refused": dict(reasons)} for questions, reasons in written
        ]

    given = [row.get("questions") for _, row in rows] if writer is None else []
    texts = json.dumps([PROMPT, GUESS_PROMPT, given]).encode()
    made_by: dict[str, str | None] = {"writer": "the data", "reader": None}
    if writer is not None:
        tokens = config.max_new_tokens
        made_by["writer"] = f"{writer.signature}, tokens {tokens}, {config.count} an image"
    if reader is not None:
        made_by["reader"] = f"{reader.signature}, seed {config.seed}"
    settings = made_by | {"prompts": hashlib.blake2b(texts, digest_size=4).hexdigest()}

    def report(made: list[dict[str, Any]]) -> Report:
        kept = [line for line in with_columns(rows, made) if line[2]["questions"]]
        counts = {"kept": sum(len(new["questions"]) for new in made)}
        for reason, text in REFUSALS.items():
            counts[text] = sum(new["refused"].get(reason, 0) for new in made)
        if not kept:
            sample = refused_answers[-1] if refused_answers else "none in this call"
            raise DataError(
                f"{config.out}/questions.jsonl would have none of {len(made)} rows: {counts}; "
                f"the last that was refused: {sample}"
            )
        notes = [f"{name}: {signature}" for name, signature in made_by.items() if signature]
        bare = len(made) - len(kept)
        notes.append(f"{bare:,} of {len(made):,} images have no question and are left out")
        notes += [f"{name}: {_cost(model)}" for name, model in models.items()]
        total = sum(counts.values())
        lines = [[name, f"{n:,}", f"{100 * n / total:.1f}"] for name, n in counts.items()]
        return Report(markdown(["questions", "number", "%"], lines), notes, kept)

    models = {"writer": writer, "reader": reader}
    if writer is reader:
        models = {"writer and reader": writer}
    models = {name: model for name, model in models.items() if model is not None}
    summary = add_columns(config, data, rows, "questions", settings, columns, report)
    if config.worker is None:
        return summary
    costs = [f"{name}: {_cost(model)}" for name, model in models.items()]
    return "; ".join([summary, *costs, f"{time.perf_counter() - start:,.1f} seconds"])


def _models(config: QuestionsConfig) -> tuple[LanguageModel | None, LanguageModel | None]:
    """Writer and reader; the reader is the writer's model unless it is set."""
    models: list[LanguageModel | None] = []
    for name in ("writer", "reader"):
        options: LanguageModelConfig = getattr(config, name)
        model = models[0] if models else None
        if options.is_set:
            with config_errors(name):
                model = build_model("questions", cache_dir=config.cache_dir, **options.model_dump())
        models.append(model)
    return models[0], models[1]


def _cost(model: LanguageModel | None) -> str:
    calls = calls_of(model)
    tokens = "an unknown number of" if calls.tokens is None else f"{calls.tokens:,}"
    return f"{calls.requests:,} requests, {tokens} tokens, in this call"


def _descriptions(row: Row) -> list[str]:
    return [text for text in [*row["references"], row.get("long_reference", "")] if text.strip()]


def _write(
    writer: LanguageModel | None, config: QuestionsConfig, rows: Rows, refused_answers: list[str]
) -> list[Written]:
    """At most ``count`` questions of each row; without a writer, those that it has."""
    if writer is None:
        return [(list(row["questions"]), Counter()) for _, row in rows]
    prompts = []
    for split, row in rows:
        descriptions = "\n".join(f"- {single_spaced(text)}" for text in _descriptions(row))
        text = PROMPT.format(count=config.count, descriptions=descriptions)
        prompts.append(Question(text, (), f"{split} image {row['image_id']!r}"))

    def unreadable(failure: RewardError) -> Written:
        refused_answers.append(str(failure))
        return [], Counter(unreadable=1)

    read = partial(read_questions, config.count)
    return read_answers(writer, prompts, config.max_new_tokens, read, unreadable)


def read_questions(count: int, answer: str) -> Written:
    """The first ``count`` questions in an answer, less those that are wrong or repeated, which are
    counted.

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


def _filter(
    reader: LanguageModel,
    seed: int,
    rows: Rows,
    written: Sequence[Written],
    refused_answers: list[str],
) -> list[Written]:
    """The questions that the reader answers right from the references, and not from nothing."""
    asked: list[Question] = []
    right: list[int] = []
    for (split, row), (questions, _) in zip(rows, written, strict=True):
        for index, item in enumerate(questions):
            order = (seed, row["image_id"], index)
            where = f"{split} image {row['image_id']!r}, question {index}"
            descriptions = "\n".join(_descriptions(row))
            guess = pose(item, item["choices"], order, where, prompt=GUESS_PROMPT)
            read = pose(item, [*item["choices"], NOT_SAID], order, where, descriptions)
            for question, place in (guess, read):
                asked.append(question)
                right.append(place)
    answers = zip(choose(reader, asked), right, strict=True)
    marks = iter([is_found(masses, place) for masses, place in answers])
    kept: list[Written] = []
    for questions, before in written:
        left, refused = list[ImageQuestion](), Counter(before)
        for item in questions:
            guessed, said = next(marks), next(marks)
            if said and not guessed:
                left.append(item)
            else:
                reason = "guessed" if guessed else "unsaid"
                refused[reason] += 1
                refused_answers.append(f"{reason}: {item}")
        kept.append((left, refused))
    return kept
