"""Validation of embedding models: what is embedded, what is kept, and embeddings that are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from open_clip import SimpleTokenizer
from torch import Tensor, nn

from rewards.clip.preprocessing import Preprocessing
from rl_caption.reward_models import validation
from rl_caption.reward_models.batch import PixelCache, TokenCache
from rl_caption.reward_models.retrieval import retrieval_recall
from rl_caption.reward_models.validation import embedding_validator
from rl_caption.training.loop import NonFiniteError
from tests.clip_for_tests import Drawn


class Network(nn.Module):
    """Embeds an image by its colour and a caption by its ids; counts what it embeds."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))
        self.counts = {"image": 0, "text": 0}

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, values in inputs.items():
            self.counts[name] += len(values)
            found[name] = values.float().flatten(1)[:, :3] * self.factor + torch.tensor([1.0, 0.0, 0.0])
        return found


def rows() -> list[Any]:
    captions = [["a dog", "a cat"], ["a dog", "a dog"], ["two cats", "a cat"]]
    return [{"image_id": str(i), "image": Drawn(80 * i), "references": own} for i, own in enumerate(captions)]


def validator(network: Network, own: list[Any]) -> Any:
    tokens = TokenCache(SimpleTokenizer(context_length=8), 8, trims=False)
    validate = embedding_validator(
        Accelerator(cpu=True), network, ("image", "text"), own, PixelCache(Preprocessing(8)), tokens, 2
    )
    return lambda step: validate(step, {})


def test_equal_captions_are_embedded_once_with_the_result_of_all() -> None:
    network, own = Network(), rows()
    metrics = validator(network, own)(1).metrics
    assert network.counts == {"image": 3, "text": 3}
    pixels, tokens = Preprocessing(8), SimpleTokenizer(context_length=8)
    images = network({"image": torch.stack([pixels(row["image"].render()) for row in own])})["image"]
    texts = network({"text": tokens([caption for row in own for caption in row["references"]])})["text"]
    expected = retrieval_recall(images.detach(), texts.detach(), torch.tensor([0, 0, 1, 1, 2, 2]))
    assert {name: metrics[f"val/{name}"] for name in expected} == pytest.approx(expected)


def test_validation_images_are_kept_without_a_cache_where_they_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    own = rows()
    validate = validator(Network(), own)
    validate(1), validate(2)
    assert [row["image"].drawn for row in own] == [1, 1, 1]
    monkeypatch.setattr(validation, "MOST_PIXELS", 3 * 3 * 8 * 8 - 1)
    validate = validator(Network(), own)
    validate(1), validate(2)
    assert [row["image"].drawn for row in own] == [3, 3, 3]


def test_embeddings_that_are_not_finite_are_an_error_that_says_so() -> None:
    network = Network()
    network.factor.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"validation at step 7: the model's image embeddings: 3 of 3 are NaN"):
        validator(network, rows())(7)
