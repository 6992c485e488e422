"""Rewards by language models: questions, claims, a rating; local models and endpoints."""

import json
import math
import re

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
from rewards.language.models import Question, build_model
from rewards.text.detail_units import detail_units
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

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def choose(self, questions):
        self.asked += questions
        return [self.answer(question) for question in questions]


def knowing_what_the_caption_says(question):
    """0.9 for the choice whose word is in the caption, else for that the caption does not say."""
    caption = re.search("Caption: (.*)", question.text)[1].split()
    lines = re.findall(r"^\w\. (.*)", question.text, re.MULTILINE)
    said = [line for line in lines if line in caption] or [NOT_SAID]
    others = 0.1 / (len(lines) - 1)
    return [0.9 if line == said[0] else others for line in lines]


def next_token_shares(inputs, network, tokens):
    """Probabilities of ``tokens`` among themselves after a prompt."""
    logits = network(**inputs).logits[0, -1]
    return logits[tokens].softmax(0)


@pytest.mark.usefixtures("random_weights")
def test_a_local_model_answers_by_the_probabilities_of_the_labels(language_model):
    captions = [CAPTION, "two small birds sit on a long branch of a tree"]
    reward = CaptionQA(model=language_model, words=None)
    scores = reward(None, captions, questions=[QUESTIONS] * 2, image_id=["1", "2"])
    network = AutoModelForCausalLM.from_pretrained(language_model)
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    labels = [tokenizer(label)["input_ids"][0] for label in "ABCD"]
    for caption, image_id, score in zip(captions, "12", scores, strict=True):
        marks = []
        for index, item in enumerate(QUESTIONS):
            choices = [*item["choices"], NOT_SAID]
            order = shuffled_choices(len(choices), image_id, index)
            shown = [choices[choice] for choice in order]
            lines = [f"{label}. {one}" for label, one in zip("ABCD", shown)]  # noqa: B905
            text = PROMPT.format(
                caption=caption,
                question=item["question"],
                choices="\n".join(lines),
            )
            inputs = tokenizer(text + "\nAnswer:", return_tensors="pt")
            shares = next_token_shares(inputs, network, labels[: len(choices)])
            marks.append(shares[shown.index(item["answer"])].item())
        assert score == pytest.approx(sum(marks) / 2, rel=1e-4)
    assert scores[0] != scores[1]


def test_a_caption_of_400_words_does_not_win_by_length():
    many = [
        {"question": f"Is there {word}?", "choices": [word, "none"], "answer": word}
        for word in "abcdefghij"
    ]
    reward = CaptionQA(model=Scripted(knowing_what_the_caption_says))
    captions = ["a b c d e f", "a b c d e f g h i j " * 40]
    scores = reward(None, captions, questions=[many] * 2, image_id=["1", "1"])
    first = (6 * 0.9 + 4 * 0.05) / 10
    second = 0.9 * 80 / 400
    assert scores == pytest.approx([first, second])
    # questions are shuffled by image and not by caption
    asked = reward.language_model.asked
    texts = [question.text.split("Question: ")[1] for question in asked]
    assert texts[:10] == texts[10:]
    orders = {tuple(shuffled_choices(4, str(image), 0)) for image in range(25)}
    assert len(orders) > 10
    factors = [length_factor("a b c d", words) for words in (None, 4, 3)]
    assert factors == [1.0, 1.0, 0.75]


def question(choices, **answer):
    return {"question": "x", "choices": choices, **answer}


@pytest.mark.parametrize(
    "items",
    [
        [],
        [question(["a", "b"])],
        [QUESTIONS[0], question(["a", "b"], answer="c")],
        [question([*map(str, range(26))], answer="1")],
        [question(["a", NOT_SAID], answer="a")],
        [question(["a b", "a  b "], answer="a b")],
    ],
)
def test_a_wrong_question_is_named_before_any_is_asked(items):
    reward = CaptionQA(model=Scripted(knowing_what_the_caption_says))
    with pytest.raises(RewardError, match=r"row 1, .*questions"):
        reward(None, [CAPTION] * 2, questions=[QUESTIONS, items], image_id=["1", "2"])
    assert reward.language_model.asked == []


@pytest.mark.usefixtures("random_weights")
def test_claims_are_verified_against_the_image_by_a_vision_language_model(vision_model):
    reward = Claims(model=vision_model, source="image", score="precision")
    assert reward.columns == {"image"}
    images = [noise_image(0), noise_image(1)]
    first, second = reward(None, ["a red circle"] * 2, image=images)
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
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    network = AutoModelForImageTextToText.from_pretrained(vision_model)
    digits = processor.tokenizer.convert_tokens_to_ids(list("0123456789"))
    shares = next_token_shares(inputs, network, digits)
    expected = (shares * torch.arange(10)).sum().item() / 9
    assert score == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="prompt"):
        VlmJudge(model=vision_model, prompt="Rate {captoin}.")
    with_references = VlmJudge(model=vision_model, references=True)
    assert with_references.columns == {"image", "references"}
    assert with_references.signature != reward.signature


@pytest.mark.usefixtures("random_weights")
def test_a_local_model_does_not_think_unless_it_is_told_to(tmp_path):
    template = (
        "{{ messages[0]['content'] }}"
        "{% if enable_thinking is defined and not enable_thinking %} a bird{% endif %}"
    )
    model = with_template(tiny_gpt2(tmp_path, positions=64), template)
    ask = Question("a dog", ("A", "B"), "row 0")
    silent = build_model("r", model, None)
    options = {"enable_thinking": True}
    thinking = build_model("r", model, None, chat_template_kwargs=options)
    assert thinking.choose([ask]) != silent.choose([ask])
    told = Question("a dog a bird", ("A", "B"), "row 0")
    assert thinking.choose([told]) == silent.choose([ask])
    assert thinking.signature != silent.signature


@pytest.mark.usefixtures("random_weights")
@pytest.mark.parametrize(
    ("caption", "image"),
    [
        ("a circle " * 300, noise_image(0)),
        ("a circle", "nowhere.png"),
        ("a \ud800", noise_image(0)),
    ],
)
def test_what_a_vision_language_model_cannot_read_is_named_with_its_row(
    vision_model, caption, image
):
    reward = VlmJudge(model=vision_model)
    with pytest.raises(RewardError, match="row 1"):
        reward(None, ["a circle", caption], image=[noise_image(0), image])


def listed(*tokens):
    """An answer of the endpoint, with (token, probability)s as they are."""
    top = []
    for token, share in tokens:
        top.append({"token": token, "logprob": share and math.log(share)})
    content = [{"top_logprobs": top}]
    return {"choices": [{"logprobs": {"content": content}}]}


def remembering(bodies, content):
    """A function of an endpoint that answers the same to all, and keeps the requests."""

    def answer(body):
        bodies.append(body)
        return 200, content

    return answer


def test_an_endpoint_answers_by_the_probabilities_it_lists(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    bodies = []
    masses = {"A": 0.3, " A": 0.1, "B": 0.2, "An": 0.4}
    with endpoint(remembering(bodies, listing(**masses))) as options:
        reward = CaptionQA(endpoint=options)
        columns = {"questions": [QUESTIONS[1:]], "image_id": ["1"]}
        (score,) = reward(None, [CAPTION], **columns)
    order = shuffled_choices(3, "1", 0)
    assert score == pytest.approx([2 / 3, 1 / 3, 0.0][order.index(1)])
    expected = {
        "path": "/v1/chat/completions",
        "key": "Bearer secret",
        "model": "m",
        "temperature": 0,
        "max_tokens": 1,
    }
    assert expected.items() <= bodies[0].items()
    assert "secret" not in reward.signature
    # a token that is listed twice counts once, and two of one text both
    tokens = [("A", 0.5), ("A", 0.5), ("A", 0.25), ("B", 0.25)]
    with endpoint(lambda _: (200, listed(*tokens))) as options:
        chooser = build_model("r", endpoint=options)
        asked = Question("x", ("A", "B", "C"), "row 0")
        (shares,) = chooser.choose([asked])
    assert shares == pytest.approx([0.75, 0.25, 0.0])


@pytest.mark.parametrize(
    "answer",
    [
        (200, listing(The=0.9)),
        (200, listing(A=0.3, B=0.1, The=0.6)),
        (200, b"<html>"),
        (200, writing("A")),
        (200, listed(("A", None))),
        (200, listed(("A", 0.5))),
        (400, {"error": {"message": "no such model"}}),
        (503, {"error": "busy"}),
    ],
)
def test_an_endpoint_that_fails_is_an_error_with_row_and_question(answer):
    with endpoint(lambda _: answer) as options:
        reward = CaptionQA(endpoint=options | {"attempts": 1})
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
    with endpoint(remembering(bodies, listing(Yes=1.0))) as options:
        reward = Claims(endpoint=options, chat_template_kwargs=given)
        reward(None, [CAPTION], references=[[CAPTION]])
    assert all(body.get("chat_template_kwargs") == sent for body in bodies)
    assert (json.dumps(sent) in reward.signature) == bool(sent)


def true_of_dogs(question):
    """The probabilities of yes and no of a claim in quotes."""
    claim = question.text.split('"')[1]
    return [0.8, 0.2] if "dog" in claim else [0.3, 0.7]


def test_claims_have_precision_recall_and_f_and_one_said_again_counts_once():
    captions = ["a dog sits", "", "a cat runs. a dog. A dog, and the dog!"]
    references = [["a cat", "a brown dog runs"], ["a cat sleeps"], captions[2:]]
    found = {}
    for score in ("precision", "recall", "f"):
        reward = Claims(model=Scripted(true_of_dogs), score=score)
        found[score] = reward(None, captions, references=references)

    def mean(text):
        values = [0.8 if "dog" in unit else 0.3 for unit in detail_units(text)]
        return math.fsum(values) / len(values)

    precision, recall = mean("a dog sits"), mean("a brown dog runs")
    again = (0.3 + 0.8) / 2
    assert found["precision"] == pytest.approx([precision, 0.0, again])
    assert found["recall"] == pytest.approx([recall, 0.0, again])
    f = 2 * precision * recall / (precision + recall)
    assert found["f"] == pytest.approx([f, 0.0, again])
    different = ["two dogs", "three dogs", "a dog", "no dog"]
    assert distinct(different) == different


def test_what_a_local_model_cannot_answer_is_an_error_with_its_row(language_model):
    chooser = build_model("r", language_model, None)
    with pytest.raises(RewardError, match=r"row 3.*yesterday"):
        chooser.choose([Question("x", ("yes", "yesterday"), "row 3")])
    # about to say something else
    with pytest.raises(RewardError, match=r"row 3.*probability 0\.\d+"):
        chooser.choose([Question("Is it a dog?", ("Yes", "No"), "row 3")])
    reward = CaptionQA(model=language_model)
    for weight in reward.language_model.frozen.network.parameters():
        weight.fill_(math.nan)
    with pytest.raises(RewardError, match=r"row 0, question 0.*nan"):
        reward(None, [CAPTION], questions=[QUESTIONS], image_id=["1"])
