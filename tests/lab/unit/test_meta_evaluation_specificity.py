"""Specificity rates by hand, chains of generated scenes, and scoring them with any reward."""

from rewards.text.detail_units import detail_units, prefixes
from rl_caption.lab.config import SpecificityRatesConfig
from rl_caption.lab.meta_evaluation.specificity import (
    Chain,
    make_chains,
    measure_rates,
    released_specificity_rates,
    score_chains,
    specificity_rates,
)

# Steps up: yes, tie, yes | yes. Negatives below: yes, tie, no | yes. Micro: 3/4 and 2/4, where a macro average would
# give (2/3 + 1) / 2 and (1/3 + 1) / 2.
SCORES = [
    Chain([0.1, 0.2, 0.2, 0.3], [0.0, 0.2, 0.4]),
    Chain([-0.5, 0.0], [-0.6]),
]


def test_rates_by_hand():
    assert specificity_rates(SCORES) == (3 / 4, 2 / 4, 2, 4)


def test_the_released_estimator_by_hand():
    # First chain: stored .1 .2 .2, all above 0, n = 2: up 1/2, down 1/2. The second: n = -1,
    # skipped.
    assert released_specificity_rates(SCORES) == (1 / 2, 1 / 2, 1, 2)
    # A cosine below 0 leaves out a step: stored -.1 .1 .2 .3, n = 2, steps (-.1, .1) and (.1, .2).
    negative = Chain([-0.1, 0.1, 0.2, 0.3, 0.1], [0.0, 0.0, 0.0, 0.0])
    assert released_specificity_rates([negative]) == (1, 1 / 2, 1, 2)
    assert specificity_rates([negative]) == (3 / 4, 3 / 4, 1, 4)
    # Macro: chains weigh alike, (1/2 + 1) / 2.
    assert released_specificity_rates([*SCORES, negative])[:2] == (3 / 4, 1 / 2)


class Words:
    """Counts the words that a row's image wants."""

    __name__ = signature = "words"
    columns = frozenset({"image"})
    bounds = (0.0, 100.0)

    def __call__(self, prompts, completions, *, image):
        scores = []
        for text, wanted in zip(completions, image, strict=True):
            scores.append(sum(word in wanted for word in text.split()))
        return scores


def test_any_reward_scores_chains():
    chains = [Chain(["a", "a b", "a b c"], ["a x", "a b y"]), Chain(["b"], ["b z"])]
    scores = score_chains(
        Words(),
        chains,
        {"image": ["ab", "a"]},
    )
    assert scores == [([1, 2, 2], [1, 2]), ([0], [0])]


def test_chains_end_where_no_other_image_has_a_unit():
    long = "A dog runs and a cat sits. The sky is blue."
    assert make_chains([long, long], "aa") == [None, None], "one image"
    chain, short = make_chains([long, "A bus"], "ab")
    assert short is None, "a caption of one unit"
    assert chain is not None
    assert list(chain.captions) == prefixes(detail_units(long))
    assert list(chain.negatives) == [f"{base} A bus" for base in chain.captions[:-1]]
    chain, _ = make_chains([long, "A man waits and a cat sits."], "ab")
    assert chain is None, "the other image's second unit is the true one"


def test_the_program_prints_the_rates_of_a_judge(tmp_path):
    world = {"num_train": 0, "num_val": 0, "num_test": 4, "num_unseen": 0}
    config = SpecificityRatesConfig(
        judges={"length": {"target": "rewards.text.concreteness:CaptionLength"}},
        data={"format": "scenes", "kwargs": world, "long_captions": True},
        max_images=3,
        out=str(tmp_path),
    )
    table = measure_rates(config)
    assert (tmp_path / "specificity.md").read_text() == table + "\n"
    cells = [cell.strip() for cell in table.splitlines()[-1].split("|")]
    assert cells[1:5] == ["length", "100.00", "0.00", "3"]
