"""The interfaces of pycocoevalcap and torchmetrics: the calls and, to the last bit, the results of
the originals.
"""

import pickle
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pycocoevalcap.bleu.bleu
import pycocoevalcap.cider.cider
import pycocoevalcap.meteor.meteor
import pycocoevalcap.rouge.rouge
import pytest
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer as JavaTokenizer

from rewards.base import RewardError
from rewards.compat import pycocoevalcap as compat
from rewards.registry import build

CAPTIONS = {
    42: [
        "A man's dog -- two-year-old -- runs (fast)!",
        'He said: "No.", and the U.S. team won 3-1.',
    ],
    73: [
        "a red bus on the street",
        "A bus, red and shiny; don't miss it...",
        "There is a bus\nthat cannot stop.",
    ],
    74: ["people eat pizza"],
}
ANSWERS = {42: ["A dog runs."], 73: ["a red, red bus isn't on the street"], 74: [""]}


def annotations(captions: dict[int, list[str]]) -> dict[Any, list[dict[str, str]]]:
    return {
        image_id: [{"caption": text} for text in texts]
        for image_id, texts in captions.items()
    }


def random_sets(seed: int) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    draw = random.Random(seed)

    def caption() -> str:
        return " ".join(
            draw.choices("a b c dog 's cat\xa0x the of", k=draw.randrange(12))
        )

    ids = [f"image-{number}" for number in range(draw.randrange(1, 9))]
    return {key: [caption() for _ in range(draw.randrange(1, 5))] for key in ids}, {
        key: [caption()] for key in ids
    }


@pytest.mark.parametrize("seed", range(40))
def test_scores_and_shapes_are_those_of_the_original(seed):
    gts, res = random_sets(seed)
    total, scores = compat.Bleu(4).compute_score(gts, res, verbose=0)
    assert (total, scores) == pycocoevalcap.bleu.bleu.Bleu(4).compute_score(
        gts, res, verbose=0
    )
    originals = (pycocoevalcap.cider.cider.Cider, pycocoevalcap.rouge.rouge.Rouge)
    for ours, original in zip((compat.Cider, compat.Rouge), originals, strict=True):
        if len(gts) == 1 and ours is compat.Cider:
            continue  # its weights are all 0
        mean, of_captions = ours().compute_score(gts, res)
        expected_mean, expected = original().compute_score(gts, res)
        assert (mean, of_captions.tolist(), of_captions.dtype) == (
            expected_mean,
            expected.tolist(),
            expected.dtype,
        )
        assert type(mean) is type(expected_mean)
        assert ours().method() == original().method()


@pytest.mark.java
def test_the_example_of_the_original_gives_the_same_tokens_and_scores():
    gts, res = (
        compat.PTBTokenizer().tokenize(annotations(captions))
        for captions in (CAPTIONS, ANSWERS)
    )
    assert gts == JavaTokenizer().tokenize(annotations(CAPTIONS))
    assert res == JavaTokenizer().tokenize(annotations(ANSWERS))
    expected = pycocoevalcap.meteor.meteor.Meteor().compute_score(gts, res)
    assert compat.Meteor().compute_score(gts, res) == expected


def test_what_the_original_would_stop_at_is_named():
    for gts, res, image in (
        ({"x": ["a"]}, {"y": ["a"]}, "'x', 'y'"),
        ({"x": ["a"]}, {"x": ["a", "b"]}, "'x'"),
        ({"x": ["a"]}, {"x": "a"}, "'x'"),
        ({"x": []}, {"x": ["a"]}, "'x'"),
        ({}, {}, "0 images"),
    ):
        for scorer in (compat.Bleu(), compat.Cider(), compat.Rouge()):
            with pytest.raises(ValueError, match=image):
                scorer.compute_score(gts, res)  # type: ignore[arg-type]


def test_scores_of_text_need_neither_torch_nor_java_nor_the_original():
    code = """
import sys
for name in ("torch", "pycocoevalcap", "transformers", "open_clip"):
    sys.modules[name] = None
from rewards.compat.pycocoevalcap import Bleu, Cider, PTBTokenizer, Rouge
from rewards.registry import build
tokens = PTBTokenizer().tokenize({1: [{"caption": "A dog."}], 2: [{"caption": "Two cats"}]})
scorers = (Cider(), Rouge())
print(*(scorer.compute_score(tokens, tokens)[0] for scorer in scorers), len(Bleu().compute_score(tokens, tokens)))
for name in ("cider", "bleu", "rouge_l", "repetition", "diversity", "consensus"):
    print(name, build(name)(None, ["a dog", "a cat"], references=[["a dog"], ["two cats"]], image_id=["1", "2"]))
"""
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("5.0 1.0 2\n")


def test_a_reward_is_a_metric_of_torchmetrics():
    metrics = pytest.importorskip("torchmetrics")
    from rewards.compat.torchmetrics import RewardMetric

    captions, references = (
        ["a dog", "a cat", "two birds"],
        [["a dog"], ["the cat"], ["a bird"]],
    )
    expected = build("rouge_l")(None, captions, references=references)
    metric = pickle.loads(pickle.dumps(RewardMetric("rouge_l")))
    assert isinstance(metric, metrics.Metric)
    metric.update(captions[:1], references=references[:1])
    metric.update(captions[1:], references=references[1:])
    assert metric.compute().item() == pytest.approx(np.mean(expected), rel=1e-15)
    other = RewardMetric(build("rouge_l"))
    other.update(captions[:1], references=references[:1])
    assert other.compute().item() == expected[0]
    assert RewardMetric("bleu", {"n": 2}).reward.__name__ == "bleu2"
    other.reset()
    with pytest.raises(ValueError, match="rouge_l"):
        other.compute()
    with pytest.raises(RewardError, match="references"):
        other.update(captions)
