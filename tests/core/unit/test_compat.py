"""The interfaces of pycocoevalcap and torchmetrics: the calls and, to the last bit, the
results of the originals.
"""

import pickle
import random
import subprocess
import sys

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


def annotations(captions):
    return {name: [{"caption": text} for text in own] for name, own in captions.items()}


def random_sets(seed):
    """References and one caption of up to eight images."""
    draw = random.Random(seed)
    words = ["a", "b", "c", "dog", "'s", "cat\xa0x", "the", "of"]

    def captions(count):
        lengths = [draw.randrange(12) for _ in range(count)]
        return [" ".join(draw.choices(words, k=length)) for length in lengths]

    names = [f"image-{number}" for number in range(draw.randrange(1, 9))]
    references = {name: captions(draw.randrange(1, 5)) for name in names}
    return references, {name: captions(1) for name in names}


@pytest.mark.parametrize("seed", range(40))
def test_scores_and_shapes_are_those_of_the_original(seed):
    gts, res = random_sets(seed)
    ours, theirs = (
        package.Bleu(4).compute_score(gts, res, verbose=0)
        for package in (compat, pycocoevalcap.bleu.bleu)
    )
    assert ours == theirs
    pairs = [(compat.Rouge(), pycocoevalcap.rouge.rouge.Rouge())]
    if len(gts) > 1:  # of one image all weights are 0
        pairs.append((compat.Cider(), pycocoevalcap.cider.cider.Cider()))
    for scorer, original in pairs:
        mean, scores = scorer.compute_score(gts, res)
        expected_mean, expected = original.compute_score(gts, res)
        assert (mean, scores.tolist()) == (expected_mean, expected.tolist())
        assert (type(mean), scores.dtype) == (type(expected_mean), expected.dtype)
        assert scorer.method() == original.method()


@pytest.mark.slow
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


@pytest.mark.parametrize("scorer", [compat.Bleu(), compat.Cider(), compat.Rouge()])
@pytest.mark.parametrize(
    ("gts", "res"),
    [
        ({"x": ["a"]}, {"y": ["a"]}),
        ({"x": ["a"]}, {"x": ["a", "b"]}),
        ({}, {}),
    ],
)
def test_what_the_original_would_stop_at_is_named(scorer, gts, res):
    with pytest.raises(ValueError, match=r"'x'|0 images"):
        scorer.compute_score(gts, res)


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

    captions = ["a dog", "a cat", "two birds"]
    references = [["a dog"], ["the cat"], ["a bird"]]
    expected = build("rouge_l")(None, captions, references=references)
    metric = pickle.loads(pickle.dumps(RewardMetric("rouge_l")))
    assert isinstance(metric, metrics.Metric)
    for part in (slice(1), slice(1, 3)):
        metric.update(captions[part], references=references[part])
    assert metric.compute().item() == pytest.approx(np.mean(expected), rel=1e-15)
    metric.reset()
    with pytest.raises(ValueError, match="rouge_l"):
        metric.compute()
    with pytest.raises(RewardError, match="references"):
        metric.update(captions)
    assert RewardMetric("bleu", {"n": 2}).reward.__name__ == "bleu2"
