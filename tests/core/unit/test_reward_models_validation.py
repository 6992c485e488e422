"""Validation of embedding models: what is embedded, what is kept, triplets in order,
embeddings that are not finite.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from open_clip import SimpleTokenizer
from torch import nn

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
    """Embeds an image by its colour and a caption by its ids, and counts what it
    embeds; with a ``scale`` if given.
    """

    def __init__(self, scale=None):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.0))
        self.scale = scale
        self.counts = Counter()

    def forward(self, inputs):
        found = {} if self.scale is None else {"scale": torch.tensor(self.scale)}
        first = torch.tensor([1.0, 0.0, 0.0])
        for name, values in inputs.items():
            self.counts[name] += len(values)
            found[name] = values.float().flatten(1)[:, :3] * self.factor + first
        return found


def rows():
    captions = [["a dog", "a cat"], ["a dog", "a dog"], ["two cats", "a cat"]]
    return [
        {"image_id": str(i), "image": Drawn(80 * i), "references": own}
        for i, own in enumerate(captions)
    ]


class ByLength(nn.Module):
    """Embeds images at 0 degrees, and a caption at 10 degrees for each of its tokens,
    or 5 where it says "true".
    """

    def forward(self, inputs):
        (true,) = SimpleTokenizer().encode("true")
        found = {}
        for name, values in inputs.items():
            degrees = torch.zeros(len(values))
            if name == "text":
                said = (values == true).any(dim=1)
                lengths = (values != 0).sum(dim=1)
                degrees = lengths * torch.where(said, 5.0, 10.0)
            angles = torch.deg2rad(degrees)
            found[name] = torch.stack([angles.cos(), angles.sin()], 1)
        return found


def validator(network, own, pixels=None, batch_size=2, **options):
    return EmbeddingValidator(
        Accelerator(cpu=True),
        network,
        ("image", "text"),
        own,
        pixels or PixelCache(Preprocessing(8)),
        TOKENS,
        batch_size,
        **options,
    )


def test_equal_captions_are_embedded_once_with_the_result_of_all():
    network = Network().train()
    own = rows()
    modes = []
    network.register_forward_hook(lambda module, *_: modes.append(module.training))
    metrics = validator(network, own)(1, {}).metrics
    assert network.counts == {"image": 3, "text": 3}
    assert not any(modes), "no dropout"
    images = [Preprocessing(8)(row["image"].render()) for row in own]
    captions = [caption for row in own for caption in row["references"]]
    ids = SimpleTokenizer(context_length=8)(captions)
    with torch.no_grad():
        found = network({"image": torch.stack(images), "text": ids})
    owners = torch.tensor([0, 0, 1, 1, 2, 2])
    recall = retrieval_recall(found["image"], found["text"], owners)
    assert recall["i2t_r1"] != recall["t2i_r1"]
    expected = {f"val/{name}": value for name, value in recall.items()}
    expected["val/retrieval_r1"] = (recall["i2t_r1"] + recall["t2i_r1"]) / 2
    assert metrics == pytest.approx(expected)


def test_embeddings_that_are_not_finite_are_an_error_that_says_so():
    network = Network()
    network.factor.data.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"step 7.*3 of 3 are NaN"):
        validator(network, rows())(7, {})


def test_validation_counts_triplets_in_order():
    right = Triplet("a", "a true cat", "a cat")
    no_gain = Triplet("a", "a cat", "a cat sits")
    tie = Triplet("a cat", "a cat", "a cat")
    own = [*rows(), *rows()[:1]]
    triplets = [right, no_gain, tie, None]
    metrics = validator(ByLength(), own, triplets=triplets)(1, {}).metrics
    assert metrics["val/specificity_positive"] == pytest.approx(1 / 3)
    assert metrics["val/specificity_negative"] == pytest.approx(2 / 3)
    assert metrics["val/specificity"] == pytest.approx(1 / 2)
    with pytest.raises(ConfigError, match=r"3.*data\.long_captions"):
        validator(ByLength(), rows(), triplets=[None] * 3)


@torch.no_grad()
def test_the_loss_of_a_split_is_that_of_its_whole_batches():
    """Five rows in batches of two: the loss of rows 0 and 1, and of 2 and 3, however
    the forward pass is split.
    """
    pixels = PixelCache(Preprocessing(32, (0.5,) * 3, (0.5,) * 3))
    texts = ["a dog", "one cat", "two cats", "a bird", "no fish"]
    some = []
    for i, text in enumerate(texts):
        row = {
            "image_id": str(i),
            "image": Drawn(50 * i),
            "references": [text],
        }
        some.append({**row, "positive_captions": [f"{text} runs"]})
    objective = partial(positive_augmented, positive_images=0.0, positive_captions=0.5)
    made = [GeneratedPositives(["text"])]
    views = ("rand_augment",)
    collate = PairCollate(pixels, TOKENS, augmentations=views, additions=made)
    network = Network(scale=3.0)

    def loss(size, batch_size):
        validate = validator(network, some, pixels, batch_size)
        return validation_loss(objective, collate, size, validate)

    def by_hand(first, last):
        images = torch.stack([pixels.of(row) for row in some[first:last]])
        own = texts[first:last]
        inputs = {"image": images, "text": TOKENS(own)}
        inputs["text_generated"] = TOKENS([f"{text} runs" for text in own])
        return float(objective(network(inputs), {})[0])

    expected = pytest.approx((by_hand(0, 2) + by_hand(2, 4)) / 2, rel=1e-6)
    assert loss(2, 1) == expected
    with torch.autocast("cpu", torch.bfloat16):  # of the network alone
        assert loss(2, 3) == expected
    # a split of fewer rows is one batch
    assert loss(8, 2) == pytest.approx(by_hand(0, 5), rel=1e-6)
