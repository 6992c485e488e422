"""The self-retrieval reward: its scores by hand, which images are distractors, and what it does without one."""

from __future__ import annotations

import logging
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rewards.base import RewardError
from rewards.clip.clipscore import ClipScore
from rewards.clip.retrieval import Retrieval, retrieval_scores
from rl_caption.config.build import build_reward
from rl_caption.config.schema import RewardConfig, RewardTerm
from rl_caption.reward_models.retrieval import retrieval_recall
from tests.clip_for_tests import ARCHITECTURE, tiny_checkpoint


class Compass:
    """Embeds in the plane: an image of one grey value, and a caption that is a number, by that angle in degrees."""

    fingerprint, signature, context_length = "compass", "compass", 77

    def encode_images(self, images: Any) -> torch.Tensor:
        return self.encode_texts([Image.open(one) if isinstance(one, Path) else one for one in images])

    def encode_texts(self, texts: Any) -> torch.Tensor:
        degrees = [float(one) if isinstance(one, str) else float(one.getpixel((0, 0))) for one in texts]
        angles = torch.tensor(degrees).deg2rad()
        return torch.stack([angles.cos(), angles.sin()], dim=1)


class Table(Compass):
    """Embeds by rows of given tables: an image's grey value, and a caption that is a number, is the row."""

    def __init__(self, images: torch.Tensor, texts: torch.Tensor) -> None:
        self.images, self.texts = (torch.nn.functional.normalize(rows, dim=1) for rows in (images, texts))

    def encode_images(self, images: Any) -> torch.Tensor:
        return self.images[[one.getpixel((0, 0)) for one in images]]

    def encode_texts(self, texts: Any) -> torch.Tensor:
        return self.texts[[int(text) for text in texts]]


def grey(value: int) -> Image.Image:
    return Image.new("L", (1, 1), value)


def columns(*angles: int) -> dict[str, Any]:
    """Rows of images of these angles, which are their ids too."""
    return {"image": [grey(angle) for angle in angles], "image_id": [str(angle) for angle in angles]}


def cosine(caption: float, image: float) -> float:
    return math.cos(math.radians(caption - image))


def test_scores_by_hand() -> None:
    own, others = np.array([0.5, 0.5]), np.array([[0.3, 0.1], [0.7, -np.inf]])
    found = retrieval_scores(own, others, "log_softmax", scale=10.0)
    expected = [5 - math.log(math.exp(5) + math.exp(3) + math.exp(1)), 5 - math.log(math.exp(5) + math.exp(7))]
    assert found == pytest.approx(expected)
    assert retrieval_scores(own, others, "margin", margin=0.3) == pytest.approx([-0.1, -0.5])
    assert retrieval_scores(own, others, "reciprocal_rank").tolist() == [1.0, 0.5]
    assert retrieval_scores(own, others, "recall", k=1).tolist() == [1.0, 0.0]
    tied = np.array([[0.5, 0.7]] * 2)  # ranks 2 and 3 are as likely
    assert retrieval_scores(own, tied, "reciprocal_rank") == pytest.approx([1 / 2.5] * 2)
    assert [retrieval_scores(own, tied, "recall", k=k)[0] for k in (1, 2, 3)] == [0.0, 0.5, 1.0]
    none = np.full((2, 1), -np.inf)
    for score, best in (("log_softmax", 0), ("margin", 0), ("reciprocal_rank", 1), ("recall", 1)):
        assert retrieval_scores(own, none, score).tolist() == [best, best]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("score", "low", "high"),
    [
        ("log_softmax", -math.log1p(math.exp(20)), -math.log1p(math.exp(-20))),
        ("margin", -2.2, 0.0),
        ("reciprocal_rank", 0.5, 1.0),
        ("recall", 0.0, 1.0),
    ],
)
def test_bounds_are_reached(score: Any, low: float, high: float) -> None:
    reward = Retrieval(Compass(), score=score, scale=10.0, distractors=1)
    found = reward(None, ["180", "180"], **columns(0, 180))
    assert found == pytest.approx([low, high])
    assert reward.bounds[0] == pytest.approx(low)
    assert high <= reward.bounds[1] <= high + 1e-8
    assert reward.bounds[0] - 1e-9 <= found[0]


def test_captions_of_one_image_are_not_each_others_distractors() -> None:
    captions, images = ["10", "20", "95"], (0, 0, 90)
    found = Retrieval(Compass(), scale=3.0)(None, captions, **columns(*images))
    expected = [
        -math.log1p(math.exp(3 * (cosine(c, other) - cosine(c, own))))
        for c, own, other in ((10, 0, 90), (20, 0, 90), (95, 90, 0))
    ]
    assert found == pytest.approx(expected, abs=1e-6)
    both = Retrieval(Compass(), score="margin", margin=0.9, both=True)(None, captions, **columns(*images))
    # Image 90 has caption 95, and those of image 0, of which 20 is nearer, are its distractors.
    to_image = [
        max(0.0, 0.9 - cosine(c, own) + cosine(c, other)) for c, own, other in ((10, 0, 90), (20, 0, 90), (95, 90, 0))
    ]
    to_text = [
        0.9 - cosine(10, 0) + cosine(95, 0),
        0.9 - cosine(20, 0) + cosine(95, 0),
        0.9 - cosine(95, 90) + cosine(20, 90),
    ]
    assert both == pytest.approx([-(a + max(0.0, b)) / 2 for a, b in zip(to_image, to_text, strict=True)], abs=1e-6)


def test_images_with_equal_embeddings_are_one_image() -> None:
    twice = columns(0, 0, 90) | {"image_id": ["a", "b", "c"]}
    found = Retrieval(Compass(), score="recall")(None, ["10", "10", "80"], **twice)
    assert found == [1.0, 1.0, 1.0]


def test_the_nearest_images_are_the_distractors() -> None:
    """Caption 40 of image 0 is nearer to 60 and to 90; 60 alone counts."""
    rows = columns(0, 90, 60, 170)
    captions = ["40", "90", "60", "170"]
    ranks = [Retrieval(Compass(), score="reciprocal_rank", distractors=n)(None, captions, **rows)[0] for n in (1, 2, 9)]
    assert ranks == [1 / 2, 1 / 2, 1 / 2]
    captions[0] = "50"
    ranks = [Retrieval(Compass(), score="reciprocal_rank", distractors=n)(None, captions, **rows)[0] for n in (1, 2, 9)]
    assert ranks == [1 / 2, 1 / 3, 1 / 3]


def test_scores_against_a_pool_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    for angle in (0, 30, 90, 150):
        grey(angle).save(tmp_path / f"{angle}.png")
    (tmp_path / "notes.txt").write_text("no image")
    files = [tmp_path / "0.png", tmp_path / "90.png", grey(45)]
    rows = {"image": files, "image_id": ["0", "90", "45"]}
    reward = Retrieval(Compass(), score="reciprocal_rank", pool=tmp_path)
    together = reward(None, ["20", "100", "44"], **rows)
    assert together == [1 / 2, 1.0, 1.0], "image 0 is no distractor of itself, 30 is nearer; 45 is not in the pool"
    for row, caption in enumerate(["20", "100", "44"]):
        one = {name: [values[row]] for name, values in rows.items()}
        assert reward(None, [caption], **one) == [together[row]]
        assert pickle.loads(pickle.dumps(reward))(None, [caption], **one) == [together[row]]
    assert "4:" in reward.signature
    assert reward.signature != Retrieval(Compass(), score="reciprocal_rank").signature


def test_an_image_without_a_distractor_scores_the_upper_bound(caplog: pytest.LogCaptureFixture) -> None:
    for score in ("log_softmax", "margin", "reciprocal_rank", "recall"):
        reward = Retrieval(Compass(), score=score, distractors=2, both=True)  # type: ignore[arg-type]
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert [reward(None, ["170", "3"], **columns(0, 0)) for _ in range(2)] == [[reward.bounds[1]] * 2] * 2
        assert len(caplog.records) == 1
    assert reward(None, [], image=[], image_id=[]) == []


def test_recall_is_that_of_reward_models() -> None:
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(40, 6, generator=generator) for _ in range(2))
    texts[3], owners = texts[4], torch.arange(40) % 20
    rows = {"image": [grey(int(owner)) for owner in owners], "image_id": owners.tolist()}
    expected = retrieval_recall(images[:20], texts, owners)
    for k in (1, 5, 10):
        found = Retrieval(Table(images, texts), score="recall", k=k)(None, [str(row) for row in range(40)], **rows)
        assert sum(found) / 40 == pytest.approx(expected[f"t2i_r{k}"])


def test_many_images_are_scored_in_chunks() -> None:
    angles = list(range(0, 180, 4))
    captions = [str(angle + 1) for angle in reversed(angles)]
    found = Retrieval(Compass(), score="margin", margin=0.0)(None, captions, **columns(*reversed(angles)))
    assert found == [0.0] * len(angles)
    shifted = Retrieval(Compass(), score="recall")(None, captions[1:] + captions[:1], **columns(*reversed(angles)))
    assert shifted == [0.0] * len(angles)


def test_terms_of_a_mixture_share_the_encoder(tmp_path: Path) -> None:
    arguments = {"backbone": ARCHITECTURE, "pretrained": tiny_checkpoint(tmp_path)}
    terms = {name: RewardTerm(kwargs=dict(arguments)) for name in ("clipscore", "retrieval")}
    made = build_reward(RewardConfig(terms=terms), [["a"], ["b"]]).rewards
    assert isinstance(made["clipscore"], ClipScore)
    assert made["clipscore"].backbone is made["retrieval"].backbone  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"score": "mrr"}, "score is 'mrr'"),
        ({"scale": 0.0}, "scale = 0"),
        ({"margin": -1.0}, "margin = -1"),
        ({"k": 0}, "k = 0"),
        ({"distractors": 0}, "distractors = 0"),
        ({"pool": "absent"}, "'absent' is no folder"),
        ({"both": True, "pool": "."}, "both"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retrieval(Compass(), **arguments)


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no image"):
        Retrieval(Compass(), pool=tmp_path)
    with pytest.raises(RewardError, match="needs the column 'image_id'"):
        Retrieval(Compass())(None, ["1"], image=[grey(1)])
