"""SPECS and the score by length, against cosines computed by hand."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rewards.base import RewardError
from rewards.clip.clipscore import ClipScore
from rewards.clip.preprocessing import count_tokens
from rewards.clip.specs import Specs, specs_score
from rewards.mixed import LengthRouter
from rewards.registry import build
from tests.clip_for_tests import ARCHITECTURE, noise_image, tiny_checkpoint


class Angles:
    """An encoder whose images lie at 0 degrees and whose captions at the number that they begin
    with.
    """

    fingerprint, signature, context_length = "angles", "angles", 8

    def count_tokens(self, text: str) -> int:
        return count_tokens(text) + 2

    def encode_images(self, images: Sequence[Any]) -> Tensor:
        return torch.tensor([[1.0, 0.0]] * len(images))

    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        angles = [math.radians(float(text.split()[0])) for text in texts]
        return torch.tensor([[math.cos(angle), math.sin(angle)] for angle in angles])


ROWS = {"image": [noise_image(1)] * 4}
CAPTIONS = ["0", "60 b", "90", "120"]


def test_the_score_is_the_cosine_on_either_scale() -> None:
    expected: dict[Any, list[float]] = {"clipped": [1, 0.5, 0, 0], "shifted": [1, 0.75, 0.5, 0.25]}
    for scale, scores in expected.items():
        reward = Specs(Angles(), scale=scale)
        assert reward(None, CAPTIONS, **ROWS) == pytest.approx(scores, abs=1e-6)
        assert reward.bounds == (0.0, 1.0)
        assert reward.signature == f"specs[angles,{scale}]"


def test_published_values_are_of_the_shifted_scale() -> None:
    """The three scores that the released code prints for its example, whose cosines are below 0;
    and rounding.
    """
    published = np.array([0.4293, 0.4457, 0.4583])
    assert specs_score(2 * published - 1, "shifted") == pytest.approx(published)
    assert specs_score(2 * published - 1, "clipped").tolist() == [0, 0, 0]
    for scale in ("clipped", "shifted"):
        assert specs_score(np.array([1 + 1e-7, -1 - 1e-7]), scale).tolist() == [1, 0]  # type: ignore[arg-type]


def released_file(folder: Path) -> str:
    """A small model in the layout of SPECS's released weights: OpenAI's keys and a second table of
    positions.
    """
    state = torch.load(tiny_checkpoint(folder), weights_only=True)
    table = torch.randn(248, 16, generator=torch.Generator().manual_seed(1))
    torch.save(
        {**state, "positional_embedding": table, "positional_embedding_res": table},
        folder / "spec.pt",
    )
    return str(folder / "spec.pt")


def test_released_weights_are_shifted(tmp_path: Path) -> None:
    """Their cosines are often negative: clipped, the three captions would score 0 all alike."""
    plain, released = tiny_checkpoint(tmp_path), released_file(tmp_path)
    cases: list[tuple[str, dict[str, Any], str]] = [
        (released, {}, "shifted"),
        (released, {"scale": "clipped"}, "clipped"),
        (plain, {}, "clipped"),
    ]
    for path, given, used in cases:
        reward: Any = build("specs", backbone=ARCHITECTURE, pretrained=path, **given)
        assert reward.scale == used
        assert reward.signature.endswith(f",{used}]")


def test_a_caption_above_the_context_is_named() -> None:
    texts, rows = (
        ["0", "60 b c d e", "60 b c d e"],
        {"image": [noise_image(1)] * 3},
    )  # a digit is a token
    with pytest.raises(RewardError, match=r"reads 8 tokens, '60 b c d e f' has 9"):
        Specs(Angles())(None, [*texts[:2], "60 b c d e f"], **rows)
    assert len(Specs(Angles())(None, texts, **rows)) == 3
    assert len(Specs(Angles(), truncate=True)(None, ["60 b c d e f"] * 3, **rows)) == 3
    assert Specs(Angles(), truncate=True).signature == "specs[angles,clipped,truncate]"
    with pytest.raises(ValueError, match="scale is 'affine'"):
        Specs(Angles(), scale="affine")  # type: ignore[arg-type]


class Fixed:
    """Scores everything the same and keeps what it was asked."""

    __name__ = "fixed"
    columns = frozenset({"image"})

    def __init__(self, score: float, bounds: tuple[float, float]) -> None:
        self.score, self.bounds, self.signature = score, bounds, f"fixed{score:g}"
        self.seen: list[Any] = []

    def __call__(self, prompts: Any, completions: Sequence[Any], **columns: Any) -> list[float]:
        self.seen.append((list(completions), list(columns["image"]), prompts))
        if "bad" in completions[0]:
            raise RewardError("it broke")
        return [self.score] * len(completions)


def test_the_router_asks_each_score_for_its_captions() -> None:
    short, long = Fixed(0.25, (0, 2.5)), Fixed(0.75, (-1, 1))
    router = LengthRouter(short, long, threshold=3)
    texts = ["a b c", "a b", "a b c d", "a"]
    assert router(list("wxyz"), texts, image=[1, 2, 3, 4], log_metric=None) == [
        0.75,
        0.25,
        0.75,
        0.25,
    ]
    assert short.seen == [(["a b", "a"], [2, 4], ["x", "z"])]
    assert long.seen == [(["a b c", "a b c d"], [1, 3], ["w", "y"])]
    assert router.bounds == (-1, 2.5)
    assert router.columns == {"image"}
    assert router.signature == "length_router[<3 CLIP tokens: fixed0.25; else: fixed0.75]"
    assert router(None, ["a"], image=[1]) == [0.25]
    assert router(None, [], image=[]) == []
    with pytest.raises(RewardError, match=r"length_router.*\(rows 1\)"):
        router(None, ["a", "bad b c"], image=[1, 2])
    with pytest.raises(RewardError, match="column 'image'"):
        router(None, ["a"])


def test_the_router_is_built_from_a_configuration(tmp_path: Path) -> None:
    encoder = {"backbone": ARCHITECTURE, "pretrained": tiny_checkpoint(tmp_path)}
    router: Any = build("length_router", short=encoder, long=encoder | {"scale": "shifted"})
    short, long = router.rewards.values()
    assert (type(short), short.w, type(long), router.threshold) == (ClipScore, 1.0, Specs, 60)
    images, texts = (
        [noise_image(1)] * 2,
        ["a cat . " * 19 + "a b", "a cat . " * 20],
    )  # 59 and 60 tokens
    expected = short(None, texts[:1], image=images[:1]) + long(None, texts[1:], image=images[1:])
    assert router(None, texts, image=images) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="reward 'specs'"):
        LengthRouter(short, encoder | {"widht": 3})
    with pytest.raises(ValueError, match="threshold is 0"):
        LengthRouter(short, long, threshold=0)
