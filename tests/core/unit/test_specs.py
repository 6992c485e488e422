"""SPECS and the score by length, against cosines computed by hand."""

import math

import numpy as np
import pytest
import torch

from rewards.base import RewardError
from rewards.clip.preprocessing import clip_tokenizer
from rewards.clip.specs import Specs
from tests.clip_for_tests import ARCHITECTURE, noise_image, tiny_checkpoint


class Angles:
    """An encoder whose images lie at 0 degrees and whose captions at the number that
    they begin with.
    """

    fingerprint, signature, context_length = "angles", "angles", 8

    def count_tokens(self, text):
        return len(clip_tokenizer().encode(text)) + 2

    def encode_images(self, images):
        return torch.tensor([[1.0, 0.0]] * len(images))

    def encode_texts(self, texts):
        angles = [math.radians(float(text.split()[0])) for text in texts]
        return torch.tensor([[math.cos(angle), math.sin(angle)] for angle in angles])


ROWS = {"image": [noise_image(1)] * 4}
CAPTIONS = ["0", "60 b", "90", "120"]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [("clipped", [1, 0.5, 0, 0]), ("shifted", [1, 0.75, 0.5, 0.25])],
)
def test_the_score_is_the_cosine_on_either_scale(scale, expected):
    reward = Specs(Angles(), scale=scale)
    assert reward(None, CAPTIONS, **ROWS) == pytest.approx(expected, abs=1e-6)
    assert reward.bounds == (0.0, 1.0)
    # rounding
    assert reward.scores(np.array([1 + 1e-7, -1 - 1e-7])).tolist() == [1, 0]


def test_published_values_are_of_the_shifted_scale():
    """The three scores that the released code prints for its example, whose cosines are below 0."""
    published = np.array([0.4293, 0.4457, 0.4583])
    cosines = 2 * published - 1
    shifted = Specs(Angles(), scale="shifted")
    assert shifted.scores(cosines) == pytest.approx(published)
    assert Specs(Angles()).scores(cosines).tolist() == [0, 0, 0]


def test_released_weights_are_shifted(tmp_path):
    """Their cosines are often negative: clipped, the three captions would score 0 all
    alike. They have OpenAI's keys and a second table of positions.
    """
    plain = tiny_checkpoint(tmp_path)
    released = str(tmp_path / "spec.pt")
    state = torch.load(plain, weights_only=True)
    tables = ("positional_embedding", "positional_embedding_res")
    torch.save(state | dict.fromkeys(tables, torch.randn(248, 16)), released)
    for path, given, used in (
        (released, {}, "shifted"),
        (released, {"scale": "clipped"}, "clipped"),
        (plain, {}, "clipped"),
    ):
        reward = Specs(ARCHITECTURE, path, **given)
        assert reward.scale == used
        assert reward.signature.endswith(f",{used}]")


def test_a_caption_above_the_context_is_named():
    texts = ["60 b c d e", "60 b c d e f"]  # a digit is a token
    rows = {"image": [noise_image(1)] * 2}
    with pytest.raises(RewardError, match=r"reads 8 tokens, '60 b c d e f' has 9"):
        Specs(Angles())(None, texts, **rows)
    assert len(Specs(Angles())(None, texts[:1] * 2, **rows)) == 2
    assert len(Specs(Angles(), truncate=True)(None, texts, **rows)) == 2
