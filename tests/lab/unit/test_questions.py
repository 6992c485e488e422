"""The program that writes questions of images: by a language model, filtered by one, or those of
the data.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rewards.base import RewardError
from rewards.language.caption_qa import NOT_SAID
from rl_caption.cli.main import run
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError
from rl_caption.data.formats import build_data
from rl_caption.lab.config import LanguageModelConfig, QuestionsConfig
from rl_caption.lab.questions import read_questions, write_questions
from rl_caption.runtime.errors import ConfigError
from tests.clip_for_tests import noise_image
from tests.endpoints_for_tests import endpoint, listing, prompt_of, writing

GOOD = {"question": "What runs?", "choices": ["a dog", "a cat"], "answer": "a dog"}
GUESSED = {
    "question": "What colour is grass?",
    "choices": ["green", "pink"],
    "answer": "green",
}
UNSAID = {"question": "Who waits?", "choices": ["a man", "a boy"], "answer": "a boy"}


@pytest.fixture
def photos(tmp_path: Path) -> DataConfig:
    lines = []
    for number in range(3):
        noise_image(number).save(tmp_path / f"{number}.png")
        lines.append(
            {
                "image": f"{number}.png",
                "references": [f"a dog runs on grass {number}"],
                "split": "train",
            }
        )
    (tmp_path / "photos.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return DataConfig(format="jsonl", path=str(tmp_path / "photos.jsonl"))


def asked_photos(folder: Path, train: int) -> DataConfig:
    """Photos with four questions each: ``train`` to train on and two of the split val."""
    lines: list[dict[str, Any]] = []
    colours = ["red", "green", "blue", "grey", "pink"]
    for number in range(train + 2):
        noise_image(number).save(folder / f"{number}.png")
        questions = [
            {
                "question": f"What colour is the {thing} of photo {number}?",
                "choices": colours[:4] if number % 2 else colours[1:],
                "answer": colours[1 + (number + index) % 3],
            }
            for index, thing in enumerate(["dog", "cat", "boat", "sky"])
        ]
        lines.append(
            {
                "image": f"{number}.png",
                "references": [f"{colours[number % 5]} things, {number} of them"],
                "split": "train" if number < train else "val",
                "questions": questions,
            }
        )
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return DataConfig(format="jsonl", path=str(folder / "asked.jsonl"))


def answer(body: dict[str, Any]) -> tuple[int, Any]:
    """Writes three questions and a wrong one of an image; knows what is in the caption, and that
    grass is green.
    """
    text = prompt_of(body)
    if "multiple-choice questions" in text:
        return 200, writing(
            f"Here: {json.dumps([GOOD, GUESSED, UNSAID, {**GOOD, 'answer': 'a cow'}])}"
        )
    choices = {
        line[3:]: line[0] for line in text.splitlines() if re.match(r"[A-Z]\. ", line)
    }
    caption = text.partition("Caption: ")[2].partition("\n")[0]
    for choice in (
        *(choice for choice in choices if choice in f"{caption} green"),
        NOT_SAID,
        "a cat",
        "a man",
    ):
        if choice in choices:
            return 200, listing(**{choices[choice]: 1.0})
    return 400, {}


def config(data: DataConfig, out: Path, **options: Any) -> QuestionsConfig:
    return QuestionsConfig(data=data, out=str(out), part_rows=2, **options)


def rows_of(out: Path, split: str = "train") -> list[Any]:
    return list(
        build_data(DataConfig(format="jsonl", path=str(out / "questions.jsonl"))).split(
            split
        )
    )


def test_what_is_written_is_a_data_set_with_counts_of_what_was_refused(
    photos: DataConfig, tmp_path: Path
) -> None:
    with endpoint(answer) as options:
        table = write_questions(
            config(
                photos, tmp_path / "out", writer=LanguageModelConfig(endpoint=options)
            )
        )
    assert "| kept | 3 |" in table
    rows = rows_of(tmp_path / "out")
    assert [row["questions"] for row in rows] == [[GOOD]] * 3
    assert rows[0]["references"] == ["a dog runs on grass 0"]
    line = json.loads((tmp_path / "out/questions.jsonl").read_text().splitlines()[0])
    assert line["refused"] == {"unreadable": 1, "guessed": 1, "unsaid": 1}


def test_a_run_that_a_failing_endpoint_stopped_goes_on_with_the_next_part(
    photos: DataConfig, tmp_path: Path
) -> None:
    bodies: list[dict[str, Any]] = []
    # the two images of the first part: two texts, two answers for each of six questions; then an
    # error
    limit = 14

    def counted(body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        return answer(body) if len(bodies) <= limit else (503, {})

    with endpoint(counted) as options:
        writer = LanguageModelConfig(
            endpoint=options | {"attempts": 1, "concurrency": 1}
        )
        asking = config(photos, tmp_path / "out", writer=writer)
        with pytest.raises(RewardError, match=r"train image '2\.png'"):
            write_questions(asking)
        bodies.clear()
        limit = 100
        write_questions(asking)
        assert len(bodies) == 7, (
            "the first part is there: one text, two answers for each of three questions"
        )
        with pytest.raises(ConfigError, match="asked was"):
            write_questions(config(photos, tmp_path / "out", writer=writer, count=2))
    assert [row["questions"] for row in rows_of(tmp_path / "out")] == [[GOOD]] * 3


def test_an_image_whose_answer_cannot_be_read_is_left_out_and_counted(
    photos: DataConfig, tmp_path: Path
) -> None:
    def sorry_for_one(body: dict[str, Any]) -> tuple[int, Any]:
        return (
            (200, writing("sorry")) if "on grass 1" in prompt_of(body) else answer(body)
        )

    def sorry(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, writing("sorry")

    with endpoint(sorry_for_one) as options:
        table = write_questions(
            config(
                photos, tmp_path / "out", writer=LanguageModelConfig(endpoint=options)
            )
        )
    assert len(rows_of(tmp_path / "out")) == 2
    assert "| kept | 2 |" in table
    assert "1 of 3 images have no question" in (tmp_path / "out/report.md").read_text()
    counted = r"questions\.jsonl.*kept': 0.*repetition': 3.*sorry"
    with endpoint(sorry) as options, pytest.raises(DataError, match=counted):
        write_questions(
            config(
                photos, tmp_path / "none", writer=LanguageModelConfig(endpoint=options)
            )
        )
    assert not (tmp_path / "none/questions.jsonl").exists()


def test_questions_of_the_data_are_written_as_they_are(tmp_path: Path) -> None:
    out, data = tmp_path / "out", asked_photos(tmp_path, train=5)
    words = ["--data.format", "jsonl", "--data.path", str(data.path), "--out", str(out)]
    assert run("questions", words) == 0
    for split in ("train", "val"):
        rows = rows_of(out, split)
        assert [row["questions"] for row in rows] == [
            row["questions"] for row in build_data(data).split(split)
        ]
        assert all(Path(row["image"]).is_file() for row in rows)


def test_further_questions_repetitions_and_other_keys_are_dropped() -> None:
    again = GOOD | {"question": "what  RUNS?", "why": "x"}
    assert read_questions(3, json.dumps([GOOD, again, UNSAID, GUESSED])) == (
        [GOOD, UNSAID],
        {"unreadable": 1},
    )
    assert read_questions(1, json.dumps([again, UNSAID]))[0] == [
        {key: again[key] for key in GOOD}
    ]
    for text in ("none", "[]", "[1]", json.dumps([{**GOOD, "answer": "A"}])):
        with pytest.raises(ValueError):
            read_questions(6, text)


def test_rows_and_models_that_do_not_fit_are_named_before_any_work(
    photos: DataConfig, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"train image '0\.png'"):
        write_questions(config(photos, tmp_path / "out"))
    both = LanguageModelConfig(
        model="x", endpoint={"url": "http://127.0.0.1:1", "model": "m"}
    )
    with pytest.raises(ConfigError, match=r"^writer"):
        write_questions(config(photos, tmp_path / "out", writer=both))
    assert not (tmp_path / "out").exists()
