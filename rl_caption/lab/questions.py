"""Program that writes questions about images, the column ``questions`` of ``caption_qa``.

Source: the form of Xing et al. (``rewards.language.caption_qa``), whose questions are filtered,
too: one that is answered without the image is refused. Prompts are our own.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

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
from rl_caption.lab.config import QuestionsConfig
from rl_caption.lab.parts import Columns, Report, Rows, add_columns
from rl_caption.runtime.errors import config_errors

logger = logging.getLogger(__name__)

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
REFUSALS = ("unreadable", "guessed", "unsaid")
"""Reasons in the column ``refused``: no question with different choices, one of which is the answer,
or a repetition; answered right without a caption; not answered right from the references.
"""


def write_questions(config: QuestionsConfig) -> str:
    """Write ``questions.jsonl``, whose rows have ``questions``, and ``refused``, a number for each
    reason (``parts.add_columns``). Rows without a question that is kept are left out and counted.

    Raises:
        ConfigError: a model cannot be made, or ``out`` has parts of other settings.
        DataError: the data cannot be read, a row has no references to ask about, or no question is
            kept.
        RewardError: a model does not answer; the message names image and question.
    """
    with config_errors("writer"):
        writer = build_model("questions", **config.writer.model_dump())
    reader = writer
    if config.reader is not None:
        with config_errors("reader"):
            reader = build_model("questions", **config.reader.model_dump())

    def columns(split: str, rows: Sequence[Row]) -> Columns:
        prompts = []
        for row in rows:
            where = f"{split} image {row['image_id']!r}"
            told = _descriptions(row)
            if not told:
                raise DataError(f"{where} has no references")
            text = PROMPT.format(count=config.count, descriptions=told)
            prompts.append(Question(text, (), where))
        questions, refused = [], []
        for answer in writer.write(prompts, config.max_new_tokens):
            read, unreadable = read_questions(config.count, answer)
            if not read:
                logger.warning("no question can be read: %.200r", answer)
            questions.append(read)
            refused.append(Counter(unreadable=unreadable))
        kept = _filter(reader, config.seed, split, rows, questions, refused)
        return {"questions": kept, "refused": refused}

    def report(rows: Rows) -> Report:
        kept = [row for row in rows if row["questions"]]
        counts = {"kept": sum(len(row["questions"]) for row in kept)}
        for reason in REFUSALS:
            counts[reason] = sum(row["refused"].get(reason, 0) for row in rows)
        if not kept:
            raise DataError(
                f"{config.out}/questions.jsonl would have no rows: {counts}"
            )
        notes = [f"{len(rows) - len(kept):,} images have no question and are left out"]
        lines = [[name, f"{number:,}"] for name, number in counts.items()]
        return Report(markdown(["questions", "number"], lines), notes, kept)

    texts = (PROMPT + GUESS_PROMPT).encode()
    made_by = {
        "writer": writer.signature,
        "reader": reader.signature,
        "asked": f"{config.count} an image, {config.max_new_tokens} tokens, seed {config.seed}",
        "texts": hashlib.blake2b(texts, digest_size=4).hexdigest(),
    }
    return add_columns(config, "questions", made_by, columns, report)


def _descriptions(row: Row) -> str:
    """References of a row, one a line."""
    texts = [*row["references"], row.get("long_reference", "")]
    return "\n".join(f"- {single_spaced(text)}" for text in texts if text.strip())


def read_questions(count: int, answer: str) -> tuple[list[ImageQuestion], int]:
    """The first ``count`` questions in an answer, less those that are wrong or repeated, and the
    number of these; 1 where the answer cannot be read.
    """
    try:
        items = json.loads(answer[answer.find("[") : answer.rfind("]") + 1])[:count]
    except (ValueError, RecursionError):
        return [], 1
    questions: dict[str, ImageQuestion] = {}
    for item in items:
        with suppress(RewardError):
            (question,) = check_questions([item], "it")
            title = single_spaced(question["question"]).casefold()
            questions.setdefault(title, question)
    return list(questions.values()), len(items) - len(questions)


def _filter(
    reader: LanguageModel,
    seed: int,
    split: str,
    rows: Sequence[Row],
    written: list[list[ImageQuestion]],
    refused: list[Counter[str]],
) -> list[list[ImageQuestion]]:
    """The questions of each row that the reader answers right from the references, and not from
    nothing; counts the others.
    """
    posed = []
    for row, questions in zip(rows, written, strict=True):
        told = _descriptions(row)
        for index, item in enumerate(questions):
            order = (seed, row["image_id"], index)
            where = f"{split} image {row['image_id']!r}, question {index}"
            choices = item["choices"]
            posed.append(pose(item, choices, order, where, prompt=GUESS_PROMPT))
            posed.append(pose(item, [*choices, NOT_SAID], order, where, told))
    answers = reader.choose([question for question, _ in posed])
    pairs = zip(answers, posed, strict=True)
    is_right = iter([is_found(masses, place) for masses, (_, place) in pairs])
    kept: list[list[ImageQuestion]] = []
    for questions, counts in zip(written, refused, strict=True):
        kept.append([])
        for item in questions:
            guessed, said = next(is_right), next(is_right)
            if said and not guessed:
                kept[-1].append(item)
            else:
                counts["guessed" if guessed else "unsaid"] += 1
    return kept
