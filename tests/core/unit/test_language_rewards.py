"""Rewards by language models: questions, claims, a rating; local models, endpoints and the cache."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from rewards.base import RewardError
from rewards.language.caption_qa import (
    NOT_SAID,
    PROMPT,
    CaptionQA,
    length_factor,
    shuffled_choices,
)
from rewards.language.claims import Claims, distinct
from rewards.language.judge import PROMPT as JUDGE_PROMPT
from rewards.language.judge import VlmJudge
from rewards.language.models import Question, build_model, label_ids
from rewards.mixed import MixedReward
from rewards.text.detail_units import detail_units
from rl_caption.data.base import DataError
from rl_caption.data.rows import jsonl
from tests.clip_for_tests import noise_image
from tests.endpoints_for_tests import endpoint, listing, writing
from tests.hf_models_for_tests import with_template
from tests.zoo.language_models import tiny_gpt2
from tests.zoo.vision_language import answering_vlm

CAPTION = "a brown dog runs on the grass"
QUESTIONS = [
    {
        "question": "What animal is it?",
        "choices": ["dog", "cat", "bird"],
        "answer": "dog",
    },
    {"question": "Where is it?", "choices": ["beach", "grass"], "answer": "grass"},
]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    folder = tiny_gpt2(tmp_path_factory.mktemp("gpt2"), positions=1024)
    return with_template(folder, "{{ messages[0]['content'] }}\nAnswer:")


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    return str(answering_vlm(tmp_path_factory.mktemp("vlm")))


class Scripted:
    """Chooses by a function of the question; remembers what it was asked."""

    signature = "scripted"

    def __init__(self, answer: Callable[[Question], list[float]]) -> None:
        self.answer, self.asked = answer, list[Question]()

    def choose(self, questions: Sequence[Question]) -> list[list[float]]:
        self.asked += questions
        return [self.answer(question) for question in questions]


def knowing_what_the_caption_says(question: Question) -> list[float]:
    """0.9 for the choice whose word is in the caption, else for that the caption does not say."""
    caption = question.text.split("Caption: ")[1].split("\n")[0].split()
    lines = [line[3:] for line in question.text.splitlines() if line[1:3] == ". "]
    said = [line in caption for line in lines]
    chosen = said.index(True) if any(said) else lines.index("The caption does not say.")
    return [
        0.9 if place == chosen else 0.1 / (len(lines) - 1)
        for place in range(len(lines))
    ]


@pytest.mark.usefixtures("random_weights")
def test_a_local_model_answers_by_the_probabilities_of_the_labels(
    language_model,
):
    reward = CaptionQA(model=language_model, words=None)
    captions = [CAPTION, "a cat", "two small birds sit on a long branch of a tree"]
    scores = reward(None, captions, questions=[QUESTIONS] * 3, image_id=["1", "2", "3"])
    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(language_model),
        AutoTokenizer.from_pretrained(language_model),
    )
    expected = []
    for caption, image_id in zip(captions, ["1", "2", "3"], strict=True):
        marks = []
        for index, item in enumerate(QUESTIONS):
            choices = [*item["choices"], "The caption does not say."]
            order = shuffled_choices(len(choices), 0, image_id, index)
            lines = "\n".join(
                f"{'ABCD'[place]}. {choices[choice]}"
                for place, choice in enumerate(order)
            )
            text = (
                PROMPT.format(caption=caption, question=item["question"], choices=lines)
                + "\nAnswer:"
            )
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            logits = network(ids).logits[0, -1]
            letters = torch.stack(
                [
                    logits[tokenizer("ABCD"[place])["input_ids"][0]]
                    for place in range(len(choices))
                ]
            )
            marks.append(
                letters.softmax(0)[order.index(choices.index(item["answer"]))].item()
            )
        expected.append(sum(marks) / 2)
    assert scores == pytest.approx(expected, rel=1e-4)
    assert len(set(scores)) == 3


def test_questions_are_shuffled_by_image_and_seed_and_not_by_caption():
    reward = CaptionQA(model=Scripted(knowing_what_the_caption_says))
    scores = reward(
        None,
        [CAPTION, "a cat on the grass"],
        questions=[QUESTIONS] * 2,
        image_id=["1", "1"],
    )
    assert scores == pytest.approx([0.9, (0.1 / 3 + 0.9) / 2])
    texts = [
        question.text.split("Question: ")[1] for question in reward.language_model.asked
    ]
    assert texts[:2] == texts[2:]
    orders = {
        tuple(shuffled_choices(4, seed, image, 0))
        for seed in range(5)
        for image in "abcde"
    }
    assert len(orders) > 10
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)


def test_a_caption_of_400_words_does_not_win_by_length():
    many = [
        {"question": f"Is there {word}?", "choices": [word, "none"], "answer": word}
        for word in "abcdefghij"
    ]
    reward = CaptionQA(model=Scripted(knowing_what_the_caption_says))
    short = " ".join("abcdef")  # six of ten
    long = " ".join([*"abcdefghij"] * 40)
    scores = reward(None, [short, long], questions=[many] * 2, image_id=["1", "1"])
    assert scores[0] > 2 * scores[1]
    assert scores[1] == pytest.approx(0.9 * 80 / 400)
    assert (
        length_factor("a b c", None),
        length_factor("a b c", 3),
        length_factor("a b c d", 3),
    ) == (1.0, 1.0, 0.75)


@pytest.mark.parametrize(
    ("items", "key"),
    [
        ([], "questions"),
        ([{"question": "x", "choices": ["a", "b"]}], "answer"),
        (
            [QUESTIONS[0], {"question": "x", "choices": ["a", "b"], "answer": "c"}],
            "question 1",
        ),
        ([{"question": "x", "choices": ["a"], "answer": "a"}], "choices"),
        (
            [{"question": "x", "choices": [*map(str, range(26))], "answer": "1"}],
            "choices",
        ),
        ([{"question": "x", "choices": ["a", NOT_SAID], "answer": "a"}], "choices"),
        ([{"question": "x", "choices": ["a b", "a  b "], "answer": "a b"}], "choices"),
    ],
)
def test_a_wrong_question_is_named_before_any_is_asked(items, key):
    reward = CaptionQA(model=Scripted(knowing_what_the_caption_says))
    with pytest.raises(RewardError, match=rf"row 1.*{key}"):
        reward(None, [CAPTION] * 2, questions=[QUESTIONS, items], image_id=["1", "2"])
    assert reward.language_model.asked == []


def test_claims_have_precision_recall_and_f():
    def true_of_dogs(question: Question) -> list[float]:
        claim = question.text.split('"')[1]
        return [0.8, 0.2] if "dog" in claim else [0.3, 0.7]

    references = [["a cat", "a brown dog runs"], ["a cat sleeps"]]
    captions = ["a dog sits", ""]
    found = {}
    for score in ("precision", "recall", "f"):
        reward = Claims(model=Scripted(true_of_dogs), score=score)
        found[score] = reward(None, captions, references=references)

    def mean(text: str) -> float:
        values = [0.8 if "dog" in unit else 0.3 for unit in detail_units(text)]
        return math.fsum(values) / len(values)

    precision, recall = mean("a dog sits"), mean("a brown dog runs")
    assert found["precision"] == pytest.approx([precision, 0.0])
    assert found["recall"] == pytest.approx([recall, 0.0])
    assert found["f"] == pytest.approx(
        [2 * precision * recall / (precision + recall), 0.0]
    )


def test_a_claim_that_is_said_again_counts_once():
    def true_of_dogs(question: Question) -> list[float]:
        return [1.0, 0.0] if "dog" in question.text.split('"')[1] else [0.0, 1.0]

    once, again = (
        "a cat runs. a brown dog",
        "a cat runs. a brown dog. A brown dog, and the brown dog!",
    )
    reward = Claims(model=Scripted(true_of_dogs), score="precision")
    assert reward(None, [once, again], references=[["x"]] * 2) == [0.5, 0.5]
    recall = Claims(model=Scripted(true_of_dogs), score="recall")
    assert recall(None, ["x"] * 2, references=[[once], [again]]) == [0.5, 0.5]
    assert distinct(["two dogs", "three dogs", "a dog", "no dog"]) == [
        "two dogs",
        "three dogs",
        "a dog",
        "no dog",
    ]


@pytest.mark.usefixtures("random_weights")
def test_claims_are_verified_against_the_image_by_a_vision_language_model(
    vision_model,
):
    reward = Claims(model=vision_model, source="image", score="precision")
    assert reward.columns == {"image"}
    first, second = reward(
        None, ["a red circle"] * 2, image=[noise_image(0), noise_image(1)]
    )
    assert 0 < first < 1
    assert first != second, "the image matters"


@pytest.mark.usefixtures("random_weights")
def test_a_rating_is_the_expectation_of_its_digit(vision_model):
    reward = VlmJudge(model=vision_model)
    image = noise_image(0)
    (score,) = reward(None, ["a red circle"], image=[image])
    processor = AutoProcessor.from_pretrained(vision_model)
    content = [
        {"type": "image", "image": image},
        {"type": "text", "text": JUDGE_PROMPT.format(caption="a red circle")},
    ]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    logits = AutoModelForImageTextToText.from_pretrained(vision_model)(**inputs).logits[
        0, -1
    ]
    digits = logits[
        processor.tokenizer.convert_tokens_to_ids(list("0123456789"))
    ].softmax(0)
    assert score == pytest.approx(
        sum(digit * mass.item() for digit, mass in enumerate(digits)) / 9, rel=1e-4
    )
    with pytest.raises(ValueError, match="prompt"):
        VlmJudge(model=vision_model, prompt="Rate {captoin}.")
    with_references = VlmJudge(model=vision_model, references=True)
    assert with_references.columns == {"image", "references"}
    assert with_references.signature != reward.signature


def test_labels_that_the_tokenizer_confuses_are_refused(language_model):
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    with pytest.raises(ValueError, match="yes"):
        label_ids(tokenizer, ["yes", "yesterday"])
    chooser = CaptionQA(model=language_model).language_model
    with pytest.raises(RewardError, match=r"row 3.*yesterday"):
        chooser.choose([Question("x", ("yes", "yesterday"), "row 3")])


def test_a_local_model_that_is_about_to_say_something_else_is_an_error(
    language_model,
):
    question = Question("Is it a dog?", ("Yes", "No"), "row 3")
    with pytest.raises(RewardError, match=r"row 3.*probability 0\.\d+"):
        build_model("r", language_model, None).choose([question])


def thinking_model(folder: Path) -> str:
    """A causal language model whose chat template lets it think unless it is told not to."""
    return with_template(
        tiny_gpt2(folder, positions=64),
        "{{ messages[0]['content'] }}"
        "{% if enable_thinking is defined and not enable_thinking %} a bird{% endif %}",
    )


@pytest.mark.usefixtures("random_weights")
def test_a_local_model_does_not_think_unless_it_is_told_to(tmp_path):
    model = thinking_model(tmp_path)
    question = Question("a dog", ("A", "B"), "row 0")
    (silent,) = build_model("r", model, None).choose([question])
    thinking = build_model(
        "r", model, None, chat_template_kwargs={"enable_thinking": True}
    )
    assert thinking.choose([question]) != [silent]
    assert thinking.choose([Question("a dog a bird", ("A", "B"), "row 0")]) == [silent]
    assert thinking.signature != build_model("r", model, None).signature


@pytest.mark.usefixtures("random_weights")
def test_what_a_vision_language_model_cannot_read_is_named_with_its_row(
    vision_model,
):
    reward = VlmJudge(model=vision_model)
    good = noise_image(0)
    with pytest.raises(RewardError, match=r"row 1.*reads 512"):
        reward(None, ["a circle", "a circle " * 300], image=[good, good])
    with pytest.raises(RewardError, match="row 1"):
        reward(None, ["a circle"] * 2, image=[good, noise_image(0, (900, 3))])
    with pytest.raises(RewardError, match="row 1"):
        reward(None, ["a circle"] * 2, image=[good, "nowhere.png"])
    with pytest.raises(RewardError, match="row 1"):
        reward(None, ["a circle", "a \ud800"], image=[good, good])


def token_listing(*tokens: tuple[Any, Any]) -> dict[str, Any]:
    """An answer of the endpoint, with tokens and their logarithms of probabilities as they are."""
    content = [
        {
            "top_logprobs": [
                {"token": token, "logprob": logprob} for token, logprob in tokens
            ]
        }
    ]
    return {"choices": [{"logprobs": {"content": content}}]}


def test_an_endpoint_answers_by_the_probabilities_it_lists(
    monkeypatch,
):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        return 200, listing(**{"A": 0.3, " A": 0.1, "B": 0.2, "An": 0.4})

    with endpoint(answer) as options:
        reward = CaptionQA(endpoint=options)
        item = QUESTIONS[1]
        (score,) = reward(None, [CAPTION], questions=[[item]], image_id=["1"])
    order = shuffled_choices(3, 0, "1", 0)
    assert score == pytest.approx([2 / 3, 1 / 3, 0.0][order.index(1)])
    assert bodies[0]["path"] == "/v1/chat/completions"
    assert bodies[0]["key"] == "Bearer secret"
    assert (bodies[0]["temperature"], bodies[0]["max_tokens"], bodies[0]["model"]) == (
        0,
        1,
        "m",
    )
    assert "secret" not in reward.signature


@pytest.mark.parametrize(
    "answer",
    [
        (200, listing(The=0.9)),
        (200, listing(A=0.3, B=0.1, The=0.6)),
        (200, {"choices": []}),
        (200, {"error": "overloaded"}),
        (200, [1]),
        (200, b"<html>"),
        (200, writing("A")),
        (200, token_listing()),
        (200, token_listing(("A", None))),
        (200, token_listing(("A", math.log(0.5)))),
        (400, {"error": {"message": "no such model"}}),
        (503, {"error": "busy"}),
    ],
)
def test_an_endpoint_that_fails_is_an_error_with_row_and_question(
    answer,
):
    with endpoint(lambda _: answer) as options:
        reward = MixedReward(
            {"qa": (CaptionQA(endpoint=options | {"attempts": 1}), 1.0)}
        )
        with pytest.raises(RewardError, match="row 0, question 0"):
            reward(None, [CAPTION], questions=[QUESTIONS], image_id=["1"])


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (None, {"enable_thinking": False}),
        ({"thinking": True}, {"thinking": True}),
        ({}, None),
    ],
)
def test_an_endpoint_gets_the_variables_of_the_chat_template(given, sent):
    bodies = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        return 200, listing(Yes=1.0)

    with endpoint(answer) as options:
        reward = Claims(endpoint=options, chat_template_kwargs=given)
        reward(None, [CAPTION], references=[[CAPTION]])
    assert {json.dumps(body.get("chat_template_kwargs")) for body in bodies} == {
        json.dumps(sent)
    }
    assert ("thinking" in reward.signature) == bool(given)


def test_wrong_options_of_an_endpoint_are_named():
    with pytest.raises(ValueError, match="model"):
        CaptionQA()
    with pytest.raises(ValueError, match=r"endpoint.*modell"):
        CaptionQA(endpoint={"url": "http://127.0.0.1:1", "modell": "m"})
    with pytest.raises(ValueError, match=r"endpoint.*concurrency"):
        CaptionQA(
            endpoint={"url": "http://127.0.0.1:1", "model": "m", "concurrency": 0}
        )


def test_a_token_that_is_listed_twice_counts_once_and_two_of_one_text_both():
    half, quarter = math.log(0.5), math.log(0.25)
    with endpoint(
        lambda _: (
            200,
            token_listing(("A", half), ("A", half), ("A", quarter), ("B", quarter)),
        )
    ) as options:
        chooser = CaptionQA(endpoint=options).language_model
        assert chooser.choose([Question("x", ("A", "B", "C"), "row 0")]) == [
            pytest.approx([0.75, 0.25, 0.0])
        ]


def test_a_local_model_that_overflows_is_an_error(language_model):
    reward = CaptionQA(model=language_model)
    for weight in reward.language_model.frozen.network.parameters():  # type: ignore[attr-defined]
        weight.fill_(math.nan)
    with pytest.raises(RewardError, match=r"row 0, question 0.*nan"):
        reward(None, [CAPTION], questions=[QUESTIONS], image_id=["1"])


def test_questions_are_a_column_of_json_lines(tmp_path):
    row = {"image": "a.png", "references": ["a dog"], "questions": QUESTIONS}
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(row))
    assert jsonl(path).split("train")[0]["questions"] == QUESTIONS
    path.write_text(
        json.dumps(
            row | {"questions": [{"question": "x", "choices": "ab", "answer": "a"}]}
        )
    )
    with pytest.raises(DataError, match=r"questions.*choices"):
        jsonl(path)


def test_texts_are_written_by_a_local_model_or_an_endpoint(
    language_model, vision_model
):
    local = build_model("w", language_model, None)
    question = Question("Describe a dog.", (), "row 0")
    assert local.write([question], 5) == local.write([question], 5)
    with_image = Question("Describe it.", (), "row 0", noise_image(0))
    (text,) = build_model("w", vision_model, None, vision=True).write([with_image], 3)
    assert isinstance(text, str)
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        return 200, writing("a dog")

    with endpoint(answer) as options:
        writer = build_model("w", None, options)
        assert writer.write([question, question], 9) == ["a dog"] * 2
        assert (bodies[0]["max_tokens"], bodies[0]["temperature"]) == (9, 0)
    with (
        endpoint(lambda _: (200, {"choices": []})) as options,
        pytest.raises(RewardError, match="row 0"),
    ):
        build_model("w", None, options).write([question], 9)
    with pytest.raises(RewardError, match="row 0"):
        local.write([question], 2000)
