"""Validation of embedding models: what is embedded, what is kept, triplets in order, embeddings
that are not finite.
"""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from open_clip import SimpleTokenizer
from torch import Tensor, nn

from rewards.clip.preprocessing import Preprocessing
from rewards.clip.pretrained import ClipText, Texts
from rl_caption.evaluation.retrieval import retrieval_recall
from rl_caption.reward_models.batch import PairCollate, PixelCache
from rl_caption.reward_models.pac import GeneratedPositives, positive_augmented
from rl_caption.reward_models.triplets import Triplet
from rl_caption.reward_models.validation import EmbeddingValidator, validation_loss
from rl_caption.runtime.errors import ConfigError
from rl_caption.training.run import NonFiniteError
from tests.clip_for_tests import Drawn

TOKENS = Texts(ClipText(SimpleTokenizer(), 8), 8, trims=False)


class Network(nn.Module):
    """Embeds an image by its colour and a caption by its ids, and counts what it embeds; with a
    ``scale`` if given.
    """

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.factor, self.scale = nn.Parameter(torch.tensor(1.0)), scale
        self.counts: Counter[str] = Counter()

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, values in inputs.items():
            self.counts[name] += len(values)
            found[name] = values.float().flatten(1)[:, :3] * self.factor + torch.tensor(
                [1.0, 0.0, 0.0]
            )
        return (
            found if self.scale is None else found | {"scale": torch.tensor(self.scale)}
        )


class Scripted(nn.Module):
    """Embeds images at 0 degrees, and a caption at 10 degrees for each of its tokens, or 5 where it
    says "true".
    """

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        (true,) = SimpleTokenizer().encode("true")
        found = {}
        for name, values in inputs.items():
            length = (
                (values != 0).sum(dim=1).float()
                if name == "text"
                else torch.zeros(len(values))
            )
            said = (
                (values == true).any(dim=1)
                if name == "text"
                else torch.zeros(len(values))
            )
            angles = torch.deg2rad(length * torch.where(said.bool(), 5.0, 10.0))
            found[name] = torch.stack([angles.cos(), angles.sin()], dim=1)
        return found


def rows() -> list[Any]:
    captions = [["a dog", "a cat"], ["a dog", "a dog"], ["two cats", "a cat"]]
    return [
        {"image_id": str(i), "image": Drawn(80 * i), "references": own}
        for i, own in enumerate(captions)
    ]


def validator(
    network: nn.Module, own: list[Any], triplets: list[Triplet | None] | None = None
) -> Any:
    towers, pixels = ("image", "text"), PixelCache(Preprocessing(8))
    validate = EmbeddingValidator(
        Accelerator(cpu=True),
        network,
        towers,
        own,
        pixels,
        TOKENS,
        2,
        triplets=triplets,
    )
    return lambda step: validate(step, {})


def test_equal_captions_are_embedded_once_with_the_result_of_all():
    network, own = Network(), rows()
    metrics = validator(network, own)(1).metrics
    assert network.counts == {"image": 3, "text": 3}
    pixels, tokens = Preprocessing(8), SimpleTokenizer(context_length=8)
    images = network(
        {"image": torch.stack([pixels(row["image"].render()) for row in own])}
    )["image"]
    texts = network(
        {"text": tokens([caption for row in own for caption in row["references"]])}
    )["text"]
    expected = retrieval_recall(
        images.detach(), texts.detach(), torch.tensor([0, 0, 1, 1, 2, 2])
    )
    assert {name: metrics[f"val/{name}"] for name in expected} == pytest.approx(
        expected
    )
    assert expected["i2t_r1"] != expected["t2i_r1"]
    assert metrics["val/retrieval_r1"] == pytest.approx(
        (expected["i2t_r1"] + expected["t2i_r1"]) / 2
    )


def test_validation_has_no_dropout_and_training_goes_on_with_it():
    modes = set()
    network = Network().train()
    network.register_forward_hook(
        lambda module, inputs, output: modes.add(module.training)
    )
    validator(network, rows())(1)
    assert modes == {False}
    assert network.training


def test_embeddings_that_are_not_finite_are_an_error_that_says_so():
    network = Network()
    network.factor.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"step 7.*3 of 3 are NaN"):
        validator(network, rows())(7)


def test_validation_counts_triplets_in_order():
    right = Triplet("a", "a true cat", "a cat")
    no_gain = Triplet("a", "a cat", "a cat sits")
    tie = Triplet("a cat", "a cat", "a cat")
    metrics = validator(
        Scripted(), [*rows(), *rows()[:1]], [right, no_gain, tie, None]
    )(1).metrics
    assert metrics["val/specificity_positive"] == pytest.approx(1 / 3)
    assert metrics["val/specificity_negative"] == pytest.approx(2 / 3)
    assert metrics["val/specificity"] == pytest.approx(1 / 2)
    with pytest.raises(ConfigError, match=r"3.*data\.long_captions"):
        validator(Scripted(), rows(), [None] * 3)


def test_the_loss_of_a_split_is_that_of_its_whole_batches():
    """Five rows in batches of two: the loss of rows 0 and 1, and of 2 and 3, however the forward
    pass is split.
    """

    pixels = PixelCache(Preprocessing(32, (0.5,) * 3, (0.5,) * 3))
    some: list[Any] = [
        {
            "image_id": str(i),
            "image": Drawn(50 * i),
            "references": [text],
            "positive_captions": [f"{text} runs"],
        }
        for i, text in enumerate(["a dog", "one cat", "two cats", "a bird", "no fish"])
    ]
    objective = partial(positive_augmented, positive_images=0.0, positive_captions=0.5)
    collate = PairCollate(
        pixels,
        TOKENS,
        augmentations=("rand_augment",),
        additions=[GeneratedPositives(["text"])],
    )
    network = Network(scale=3.0)

    def loss(size: int, batch_size: int) -> float:
        return validation_loss(
            objective,
            collate,
            size,
            Accelerator(),
            network,
            some,
            pixels,
            batch_size,
        )

    def by_hand(own: list[Any]) -> float:
        inputs = {"image": torch.stack([pixels.of(row) for row in own])}
        inputs["text"] = TOKENS([row["references"][0] for row in own])
        inputs["text_generated"] = TOKENS([row["positive_captions"][0] for row in own])
        return float(objective(network(inputs), {})[0])

    with torch.no_grad():
        expected = (by_hand(some[:2]) + by_hand(some[2:4])) / 2
        assert loss(2, 1) == pytest.approx(expected, rel=1e-6)
        assert loss(2, 3) == pytest.approx(expected, rel=1e-6)
        with torch.autocast("cpu", torch.bfloat16):  # of the network alone
            assert loss(2, 3) == pytest.approx(expected, rel=1e-6)
        assert loss(8, 2) == pytest.approx(by_hand(some), rel=1e-6), (
            "a split of fewer rows is one batch"
        )
