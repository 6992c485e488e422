"""The program that writes questions of images: by a language model, filtered by one, or those of
the data.
"""

import json
import re

import pytest

from rewards.base import RewardError
from rewards.language.caption_qa import NOT_SAID
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError
from rl_caption.data.files import write_json_lines
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
def photos(tmp_path):
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
    write_json_lines(tmp_path / "photos.jsonl", lines)
    return DataConfig(format="jsonl", path=str(tmp_path / "photos.jsonl"))


def answer(body):
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


def config(data, out, **options):
    return QuestionsConfig(data=data, out=str(out), part_rows=2, **options)


def rows_of(out):
    data = DataConfig(format="jsonl", path=str(out / "questions.jsonl"))
    return list(build_data(data).split("train"))


def test_what_is_written_is_a_data_set_with_counts_of_what_was_refused(
    photos, tmp_path
):
    with endpoint(answer) as options:
        writer = LanguageModelConfig(endpoint=options)
        table = write_questions(config(photos, tmp_path / "out", writer=writer))
    assert "| kept | 3 |" in table
    rows = rows_of(tmp_path / "out")
    assert [row["questions"] for row in rows] == [[GOOD]] * 3
    assert rows[0]["references"] == ["a dog runs on grass 0"]
    line = json.loads((tmp_path / "out/questions.jsonl").read_text().splitlines()[0])
    assert line["refused"] == {"unreadable": 1, "guessed": 1, "unsaid": 1}


def test_a_run_that_a_failing_endpoint_stopped_goes_on_with_the_next_part(
    photos, tmp_path
):
    bodies = []
    # the two images of the first part: two texts, two answers for each of six questions; then an
    # error
    limit = 14

    def counted(body):
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
        assert len(bodies) == 7, "one text, two answers for each of three questions"
        with pytest.raises(ConfigError, match="asked was"):
            write_questions(config(photos, tmp_path / "out", writer=writer, count=2))
    assert [row["questions"] for row in rows_of(tmp_path / "out")] == [[GOOD]] * 3


def test_an_image_whose_answer_cannot_be_read_is_left_out_and_counted(photos, tmp_path):
    unreadable = ["on grass 1"]

    def sorry(body):
        if any(text in prompt_of(body) for text in unreadable):
            return 200, writing("sorry")
        return answer(body)

    with endpoint(sorry) as options:
        writer = LanguageModelConfig(endpoint=options)
        table = write_questions(config(photos, tmp_path / "out", writer=writer))
        assert len(rows_of(tmp_path / "out")) == 2
        assert "| kept | 2 |" in table
        unreadable.append("a dog")
        with pytest.raises(DataError, match=r"questions\.jsonl.*kept': 0"):
            write_questions(config(photos, tmp_path / "none", writer=writer))
    assert not (tmp_path / "none/questions.jsonl").exists()


def test_further_questions_and_repetitions_are_dropped():
    again = GOOD | {"question": "what  RUNS?"}
    found = read_questions(3, json.dumps([GOOD, again, UNSAID, GUESSED]))
    assert found == ([GOOD, UNSAID], 1)
    for text, count in (("none", 1), ("[]", 0), ("[1]", 1)):
        assert read_questions(6, text) == ([], count)
    assert read_questions(6, json.dumps([{**GOOD, "answer": "A"}])) == ([], 1)


def test_rows_and_models_that_do_not_fit_are_named_before_any_work(photos, tmp_path):
    with pytest.raises(ConfigError, match=r"^writer"):
        write_questions(config(photos, tmp_path / "out"))
    both = LanguageModelConfig(
        model="x", endpoint={"url": "http://127.0.0.1:1", "model": "m"}
    )
    with pytest.raises(ConfigError, match=r"^writer"):
        write_questions(config(photos, tmp_path / "out", writer=both))
    assert not (tmp_path / "out").exists()
