"""BLEU, ROUGE-L and CIDEr against the classes of pycocoevalcap: equal, not close."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rewards.text.bleu import bleu_counts
from rewards.text.cider import cider_d
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.evaluation import toolkit as coco

CAPTION = st.lists(st.sampled_from("a a a man dog on the the wave".split()), max_size=9).map(" ".join)  # noqa: SIM905
IMAGES = st.lists(st.tuples(CAPTION, st.lists(CAPTION, min_size=1, max_size=4)), min_size=2, max_size=6)


@settings(max_examples=150, deadline=None)
@given(IMAGES)
def test_scores_equal_the_toolkits_classes(images: list[tuple[str, list[str]]]) -> None:
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge

    assume(any(text for _, texts in images for text in texts))
    candidates = {str(number): caption for number, (caption, _) in enumerate(images)}
    references = {str(number): texts for number, (_, texts) in enumerate(images)}
    singles = {key: [caption] for key, caption in candidates.items()}
    totals, per_image = Bleu(4).compute_score(references, singles, verbose=0)
    assert coco.bleu(candidates, references) == {f"BLEU-{n + 1}": (totals[n], per_image[n]) for n in range(4)}
    total, scores = Cider().compute_score(references, singles)
    if any(scores):
        assert coco.cider(candidates, references) == {"CIDEr": (total, scores.tolist())}
    else:  # ours says why, where all images have the same n-grams
        with contextlib.suppress(coco.UndefinedMetric):
            assert coco.cider(candidates, references)["CIDEr"][0] == 0
    total, scores = Rouge().compute_score(references, singles)
    assert coco.rouge(candidates, references) == {"ROUGE-L": (total, scores.tolist())}


def test_references_without_a_weight_leave_cider_undefined() -> None:
    with pytest.raises(coco.UndefinedMetric, match="all 2 images have the same n-grams"):
        coco.cider({"1": "a dog", "2": "a cat"}, {"1": ["a dog", "a man"], "2": ["a man", "a dog"]})
    assert coco.cider({"1": "a cat", "2": "a cat"}, {"1": ["a dog"], "2": ["a man"]})["CIDEr"][0] == 0


def scores(candidates: list[list[str]], references: list[list[list[str]]]) -> list[float]:
    """CIDEr-D with the document frequencies of these references."""
    return cider_d(candidates, references, DocumentFrequencies.from_references(references, eos=False))


def test_counts_by_hand() -> None:
    candidates = [["a", "a", "b"], []]
    references = [[["a", "b"], ["b", "a", "b", "c"]], [["x"], ["x", "y"]]]
    counts = [bleu_counts(candidate, own) for candidate, own in zip(candidates, references, strict=True)]
    assert counts == [[2, 1, 0, 0, 3, 2, 1, 0, 3, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]]
    assert scores(candidates, references)[1] == 0.0


def test_a_changed_word_changes_every_score() -> None:
    references = [[["a", "dog", "runs"]], [["a", "man", "sits"]]]
    one = scores([["a", "dog", "runs"], ["a", "man"]], references)
    other = scores([["a", "dog", "sits"], ["a", "man"]], references)
    assert one[0] > other[0] > 0
    assert one[1] == other[1]


@pytest.mark.parametrize("count", [2, 40])
def test_no_order_of_images_matters(count: int) -> None:
    generator = np.random.default_rng(0)
    words = np.array(["a", "b", "c", "d"])
    images = [
        (list(words[generator.integers(4, size=6)]), list(words[generator.integers(4, size=5)])) for _ in range(count)
    ]
    forwards = scores([one for one, _ in images], [[two] for _, two in images])
    images.reverse()
    backwards = scores([one for one, _ in images], [[two] for _, two in images])
    assert forwards == backwards[::-1]
