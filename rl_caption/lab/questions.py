"""Program that writes questions about images, the column ``questions`` of ``caption_qa``.

Source: the form of Xing et al. (``rewards.language.caption_qa``), whose questions are filtered,
too: one that is answered without the image is refused. Prompts are our own.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rewards.base import RewardError
from rewards.language.caption_qa import (
    NOT_SAID,
    ImageQuestion,
    check_questions,
    is_found,
    pose,
)
from rewards.language.models import LanguageModel, Question, build_model
from rl_caption.data.base import DataError, Row
from rl_caption.data.plain_files import single_spaced
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import LanguageModelConfig, QuestionsConfig
from rl_caption.lab.parts import Columns, Report, Rows, add_columns, selected_rows
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
            no questions), or no question is kept.
        RewardError: a model does not answer; the message names image and question.
    """
    data, rows = selected_rows(config)
    writer = _model(config, "writer")
    reader = _model(config, "reader") or writer
    for split, row in rows:  # before any work
        if not (row.get("questions") if writer is None else _descriptions(row)):
            what = "questions (or set writer)" if writer is None else "references"
            raise DataError(f"{split} image {row['image_id']!r} has no {what}")

    unread: list[str] = []

    def columns(batch: Rows) -> list[Columns]:
        written = _write(writer, config, batch, unread)
        if reader is not None:
            written = _filter(reader, config.seed, batch, written)
        return [
            {"questions": questions, "refused": dict(reasons)}
            for questions, reasons in written
        ]

    def report(made: list[Any]) -> Report:
        kept = [line for line in made if line[2]["questions"]]
        counts = {"kept": sum(len(new["questions"]) for *_, new in made)}
        for reason, text in REFUSALS.items():
            counts[text] = sum(new["refused"].get(reason, 0) for *_, new in made)
        if not kept:
            raise DataError(
                f"{config.out}/questions.jsonl would have no rows: {counts}; the last answer that "
                f"could not be read: {unread[-1] if unread else 'none'}"
            )
        bare = len(made) - len(kept)
        notes = [f"{bare:,} of {len(made):,} images have no question and are left out"]
        lines = [[name, f"{number:,}"] for name, number in counts.items()]
        return Report(markdown(["questions", "number"], lines), notes, kept)

    texts = [PROMPT, GUESS_PROMPT]
    texts += [] if writer else [json.dumps(row.get("questions")) for _, row in rows]
    made_by = {
        "writer": writer and writer.signature,
        "reader": reader and reader.signature,
        "asked": f"{config.count} an image, {config.max_new_tokens} tokens, seed {config.seed}",
        "texts": hashlib.blake2b(json.dumps(texts).encode(), digest_size=4).hexdigest(),
    }
    return add_columns(config, (data, rows), "questions", made_by, columns, report)


def _model(config: QuestionsConfig, name: str) -> LanguageModel | None:
    """Writer or reader; None where it is not set."""
    options: LanguageModelConfig = getattr(config, name)
    if not options.is_set:
        return None
    with config_errors(name):
        return build_model("questions", **options.model_dump())


def _descriptions(row: Row) -> list[str]:
    return [
        text
        for text in [*row["references"], row.get("long_reference", "")]
        if text.strip()
    ]


def _write(
    writer: LanguageModel | None, config: QuestionsConfig, rows: Rows, unread: list[str]
) -> list[Written]:
    """At most ``count`` questions of each row; without a writer, those that it has.

    Answers that cannot be read are added to ``unread``.
    """
    if writer is None:
        return [(list(row["questions"]), Counter()) for _, row in rows]
    prompts = []
    for split, row in rows:
        descriptions = "\n".join(
            f"- {single_spaced(text)}" for text in _descriptions(row)
        )
        text = PROMPT.format(count=config.count, descriptions=descriptions)
        prompts.append(Question(text, (), f"{split} image {row['image_id']!r}"))

    written: list[Written] = []
    for answer in writer.write(prompts, config.max_new_tokens):
        try:
            written.append(read_questions(config.count, answer))
        except (ValueError, RecursionError):
            unread.append(answer)
            written.append(([], Counter(unreadable=1)))
    return written


def read_questions(count: int, answer: str) -> Written:
    """The first ``count`` questions in an answer, less those that are wrong or repeated, which are
    counted.

    Raises ``ValueError`` where there is none.
    """
    questions: dict[str, ImageQuestion] = {}
    problem = ""
    items = json.loads(answer[answer.find("[") : answer.rfind("]") + 1])[:count]
    for item in items:
        try:
            (question,) = check_questions([item], "it")
        except RewardError as error:
            problem = str(error)
        else:
            fields = ImageQuestion(
                question=question["question"],
                choices=question["choices"],
                answer=question["answer"],
            )
            questions.setdefault(single_spaced(question["question"]).casefold(), fields)
    if not questions:
        raise ValueError(problem)
    return list(questions.values()), Counter(unreadable=len(items) - len(questions))


def _filter(
    reader: LanguageModel, seed: int, rows: Rows, written: Sequence[Written]
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
    answers = zip(reader.choose(asked), right, strict=True)
    marks = iter([is_found(masses, place) for masses, place in answers])
    kept: list[Written] = []
    for questions, before in written:
        left, refused = list[ImageQuestion](), Counter(before)
        for item in questions:
            guessed, said = next(marks), next(marks)
            if said and not guessed:
                left.append(item)
            else:
                refused["guessed" if guessed else "unsaid"] += 1
        kept.append((left, refused))
    return kept
