"""The self-retrieval reward: its scores by hand, which images are distractors, and what it does
without one.
"""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rewards.base import RewardError
from rewards.clip.retrieval import Retrieval, retrieval_scores


class Compass:
    """Embeds in the plane: an image of one grey value, and a caption that is a number, by that
    angle in degrees.
    """

    fingerprint, signature, context_length = "compass", "compass", 77

    def encode_images(self, images: Any) -> torch.Tensor:
        return self.encode_texts(
            [Image.open(one) if isinstance(one, Path) else one for one in images]
        )

    def encode_texts(self, texts: Any) -> torch.Tensor:
        degrees = [
            float(one) if isinstance(one, str) else float(one.getpixel((0, 0))) for one in texts
        ]
        angles = torch.tensor(degrees).deg2rad()
        return torch.stack([angles.cos(), angles.sin()], dim=1)


def grey(value: int) -> Image.Image:
    return Image.new("L", (1, 1), value)


def columns(*angles: int) -> dict[str, Any]:
    """Rows of images of these angles, which are their ids too."""
    return {
        "image": [grey(angle) for angle in angles],
        "image_id": [str(angle) for angle in angles],
    }


def cosine(caption: float, image: float) -> float:
    return math.cos(math.radians(caption - image))


def test_scores_by_hand() -> None:
    own, others = np.array([0.5, 0.5]), np.array([[0.3, 0.1], [0.7, -np.inf]])
    found = retrieval_scores(own, others, "log_softmax", scale=10.0)
    expected = [
        5 - math.log(math.exp(5) + math.exp(3) + math.exp(1)),
        5 - math.log(math.exp(5) + math.exp(7)),
    ]
    assert found == pytest.approx(expected)
    assert retrieval_scores(own, others, "margin", margin=0.3) == pytest.approx([-0.1, -0.5])
    assert retrieval_scores(own, others, "recall", k=1).tolist() == [1.0, 0.0]
    tied = np.array([[0.5, 0.7]] * 2)  # ranks 2 and 3 are as likely
    assert [retrieval_scores(own, tied, "recall", k=k)[0] for k in (1, 2, 3)] == [0.0, 0.5, 1.0]
    none = np.full((2, 1), -np.inf)
    for score, best in (("log_softmax", 0), ("margin", 0), ("recall", 1)):
        assert retrieval_scores(own, none, score).tolist() == [best, best]  # type: ignore[arg-type]


def test_bounds_are_reached() -> None:
    bounds: dict[Any, tuple[float, float]] = {
        "log_softmax": (-math.log1p(math.exp(20)), -math.log1p(math.exp(-20))),
        "margin": (-2.2, 0.0),
        "recall": (0.0, 1.0),
    }
    for score, (low, high) in bounds.items():
        reward = Retrieval(Compass(), score=score, scale=10.0, distractors=1)
        found = reward(None, ["180", "180"], **columns(0, 180))
        assert found == pytest.approx([low, high])
        assert reward.bounds[0] == pytest.approx(low)
        assert high <= reward.bounds[1] <= high + 1e-8
        assert reward.bounds[0] - 1e-9 <= found[0]


def test_captions_of_one_image_are_not_each_others_distractors() -> None:
    captions, rows = (
        ["10", "20", "95"],
        ((10, 0, 90), (20, 0, 90), (95, 90, 0)),
    )  # caption, its image, the other
    found = Retrieval(Compass(), scale=3.0)(None, captions, **columns(0, 0, 90))
    expected = [
        -math.log1p(math.exp(3 * (cosine(c, other) - cosine(c, own)))) for c, own, other in rows
    ]
    assert found == pytest.approx(expected, abs=1e-6)


def test_the_nearest_images_are_the_distractors() -> None:
    """Caption 50 of image 0 is nearer to 60 and to 90; images with equal embeddings are one."""
    rows, captions = columns(0, 90, 60, 170), ["50", "90", "60", "170"]
    for distractors, rank in ((1, 2), (2, 3), (9, 3)):
        for k in (1, 2, 3):
            reward = Retrieval(Compass(), score="recall", k=k, distractors=distractors)
            assert reward(None, captions, **rows)[0] == float(rank <= k)
    twice = columns(0, 0, 90) | {"image_id": ["a", "b", "c"]}
    assert Retrieval(Compass(), score="recall")(None, ["10", "10", "80"], **twice) == [
        1.0,
        1.0,
        1.0,
    ]


def test_scores_against_a_pool_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    for angle in (0, 30, 90, 150):
        grey(angle).save(tmp_path / f"{angle}.png")
    (tmp_path / "notes.txt").write_text("no image")
    files = [tmp_path / "0.png", tmp_path / "90.png", grey(45)]
    rows = {"image": files, "image_id": ["0", "90", "45"]}
    reward = Retrieval(Compass(), score="recall", pool=tmp_path)
    together = reward(None, ["20", "100", "44"], **rows)
    assert together == [0.0, 1.0, 1.0], (
        "image 0 is no distractor of itself, 30 is nearer; 45 is not in the pool"
    )
    for row, caption in enumerate(["20", "100", "44"]):
        one = {name: [values[row]] for name, values in rows.items()}
        assert reward(None, [caption], **one) == [together[row]]
        assert pickle.loads(pickle.dumps(reward))(None, [caption], **one) == [together[row]]
    assert "4:" in reward.signature
    assert reward.signature != Retrieval(Compass(), score="recall").signature


def test_two_images_of_one_id_are_refused_and_hidden_files_are_not_in_the_pool(
    tmp_path: Path,
) -> None:
    reward = Retrieval(Compass())
    for image_id in ("a", 3):
        with pytest.raises(RewardError, match=f"image_id {image_id!r}"):
            reward(None, ["0", "90"], image=[grey(0), grey(90)], image_id=[image_id] * 2)
    assert len(reward(None, ["0", "90"], image=[grey(0), grey(0)], image_id=["a"] * 2)) == 2, (
        "equal images are one"
    )
    grey(0).save(tmp_path / "a.png")
    (tmp_path / "._a.png").write_bytes(b"what macOS leaves beside every file")
    assert Retrieval(Compass(), pool=tmp_path).pool == [tmp_path / "a.png"]


def test_an_image_without_a_distractor_scores_the_upper_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scores: Any = ("log_softmax", "margin", "recall")
    for number, score in enumerate(scores, start=1):
        reward = Retrieval(Compass(), score=score, distractors=2)
        for _ in range(2):
            assert reward(None, ["170", "3"], **columns(0, 0)) == [reward.bounds[1]] * 2
        assert len(caplog.records) == number, "it warns once"
        assert reward(None, [], image=[], image_id=[]) == []
        with pytest.raises(RewardError, match="text 'nan'"):
            reward(None, ["5", "nan"], **columns(0, 90))


def test_many_images_are_scored_in_chunks() -> None:
    angles = list(range(0, 180, 4))
    captions = [str(angle + 1) for angle in reversed(angles)]
    found = Retrieval(Compass(), score="margin", margin=0.0)(
        None, captions, **columns(*reversed(angles))
    )
    assert found == [0.0] * len(angles)
    shifted = Retrieval(Compass(), score="recall")(
        None, captions[1:] + captions[:1], **columns(*reversed(angles))
    )
    assert shifted == [0.0] * len(angles)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"score": "mrr"}, "score is 'mrr'"),
        ({"scale": 0.0}, "scale = 0.0"),
        ({"margin": -1.0}, "margin = -1.0"),
        ({"distractors": 0}, "distractors is 0"),
        ({"pool": tmp_path}, "has no image"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            Retrieval(Compass(), **arguments)


def test_the_signature_names_every_option_and_the_images_of_the_pool(tmp_path: Path) -> None:
    grey(10).save(tmp_path / "a.png")
    options: list[dict[str, Any]] = [
        {},
        {"scale": 50.0},
        {"score": "margin"},
        {"score": "margin", "margin": 0.3},
        {"score": "recall"},
        {"score": "recall", "k": 2},
        {"distractors": 3},
        {"prefix": "a "},
        {"pool": tmp_path},
    ]
    found = [Retrieval(Compass(), **own).signature for own in options]
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes() + b"0")
    found.append(Retrieval(Compass(), pool=tmp_path).signature)
    grey(20).save(tmp_path / "b.png")
    found.append(Retrieval(Compass(), pool=tmp_path).signature)
    assert len(set(found)) == len(found)
