"""Chains of growing captions, for specificity rates."""

import pytest

from rewards.text.detail_units import detail_units, prefixes
from rl_caption.data.scenes import ScenesData
from rl_caption.meta_evaluation.specificity import make_chains
from rl_caption.reward_models.triplets import Donor

SCENES = {"num_train": 0, "num_val": 0, "num_test": 14, "num_unseen": 0, "image_size": 32}
ROWS = list(ScenesData(**SCENES).split("test"))
CAPTIONS = [row["long_reference"] for row in ROWS]


def test_chains_are_prefixes_and_units_of_other_images():
    chains = make_chains(CAPTIONS)
    assert make_chains(CAPTIONS, seed=1) != chains
    for caption, chain in zip(CAPTIONS, chains, strict=True):
        assert chain is not None
        assert list(chain.captions) == prefixes(detail_units(caption))
        assert len(chain.negatives) == len(chain.captions) - 1
        for base, positive, negative in zip(chain.captions, chain.captions[1:], chain.negatives, strict=False):
            assert negative.startswith(base)
            assert negative not in (base, positive)


def test_chains_end_where_no_other_image_has_a_unit():
    long = "A dog runs and a cat sits. The sky is blue."
    assert make_chains([long, long]) == [None, None]
    assert make_chains(["A dog."], donors=[Donor("b", ["a cat"])]) == [None]
    (chain,) = make_chains([long], donors=[Donor("b", ["A bus"])])
    assert chain is not None
    assert all(negative == f"{base} A bus" for base, negative in zip(chain.captions, chain.negatives, strict=False))
    (chain,) = make_chains([long], donors=[Donor("b", ["x", detail_units(long)[1], "blue sky the is"])])
    assert chain is None  # the second unit is the true one
    with pytest.raises(ValueError, match="1 image ids for 2 captions"):
        make_chains([long, long], image_ids=["a"])
