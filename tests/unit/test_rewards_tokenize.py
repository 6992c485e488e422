"""The caption tokeniser against recorded and live output of the Java tokeniser that the COCO toolkit uses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.text.tokenize import tokenize, tokenize_lines

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ptb_tokens.json").read_text(encoding="utf-8"))

WORDS = """
    a an the man dog's dogs' can't cannot gonna it's they're o'clock 'em '90s t-shirt black-and-white 10-year-old
    and/or w/ 3.5 1,000 12:30 5pm 1/2 no. st. mr. u.s. a.m. b. p.m. etc. vs. ft. café naïve 5% $5 #1 6' & + * @home
    (red) [sic] "stop" 'go' `go` -- - ... . , ; : ! ? man, street. dog; what?! half-eaten two-story; end...
    foo_bar o'neil ya'll rock'n'roll http://a.example/b a.example.com street.the
    """.split()  # noqa: SIM905


def differing(cases: list[dict]) -> list[str]:
    return [case["text"] for case in cases if tokenize(case["text"]) != case["tokens"]]


def test_recorded_sentences() -> None:
    assert differing(GOLDEN["cases"]) == []


def test_the_comparison_sees_a_changed_recording() -> None:
    changed = [{**case, "tokens": [*case["tokens"], "x"]} for case in GOLDEN["cases"]]
    assert differing(changed) == [case["text"] for case in GOLDEN["cases"]]


@given(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join))
def test_tokens_of_tokens_are_the_tokens(caption: str) -> None:
    tokens = tokenize(caption)
    assert tokenize(" ".join(tokens)) == tokens


@given(st.text(max_size=60))
def test_any_text_gives_words_without_white_space(text: str) -> None:
    for token in tokenize(text):
        assert token
        assert token.split() == [token]


@given(st.lists(st.sampled_from([*WORDS, "Then", "A", "Miss."]), min_size=1, max_size=8), st.sampled_from(" \t\n\r"))
def test_white_space_around_and_between_does_not_count(words: list[str], space: str) -> None:
    assert tokenize(space + space.join(words) + space) == tokenize(" ".join(words))


def test_callers_may_change_what_they_get() -> None:
    tokenize("the dog's ball").append("x")
    assert tokenize("the dog's ball") == ["the", "dog", "'s", "ball"]


def test_lines_look_at_the_next_line() -> None:
    lines = ["a sign that reads K.", "A dog", "a sign that reads K.", "a dog", "vitamin c"]
    assert [tokens[-1] for tokens in tokenize_lines(lines)] == ["k", "dog", "k.", "dog", "c"]


@pytest.mark.java
@pytest.mark.skipif(shutil.which("java") is None, reason="no Java runtime")
@pytest.mark.parametrize("dataset", ["coco_val2017", "coco_karpathy_test"])
def test_real_captions_equal_the_live_toolkit(dataset: str, shared_data: Path) -> None:
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    if dataset == "coco_val2017":
        content = json.loads((shared_data / "coco_val2017_captions" / "captions_val2017.json").read_text())
        captions = [annotation["caption"] for annotation in content["annotations"]]
    else:
        folder = shared_data / "coco_karpathy_test"
        captions = [text for row in json.loads((folder / "refs.json").read_text()) for text in row["captions"]]
        for path in sorted((folder / "predictions").glob("*.json")):
            captions += [row["caption"] for row in json.loads(path.read_text())]
    assert len(captions) > 25000
    captions = [caption.replace("\n", " ") for caption in captions]
    expected = PTBTokenizer().tokenize({0: [{"caption": caption} for caption in captions]})[0]
    found = tokenize_lines(captions)
    wrong = [text for text, mine, theirs in zip(captions, found, expected, strict=True) if mine != theirs.split()]
    assert wrong == []
