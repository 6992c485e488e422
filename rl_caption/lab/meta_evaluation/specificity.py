"""Specificity rate: how often a metric rewards one more true detail, and how often it penalises a
false one.

Source: Chen et al., "SPECS", EMNLP 2025, equations 1 and 2. Caption i grows unit by unit, c_i1,
..., c_iK (units as in ``rewards.text.detail_units``), and n_ik is c_ik with a unit of another image
in place of its own next one. With S the metric and T the number of all steps k = 1 .. K - 1 over
all captions,

    SR_pos = 1/T sum_ik [S(c_i,k+1) > S(c_ik)]          SR_neg = 1/T sum_ik [S(n_ik) < S(c_ik)]

Both inequalities are strict, so a tie fails, and every step weighs the same (micro average). The
paper prints the inequality of SR_neg the other way round; this is the direction that its text and
its loss mean. A metric that ignores the caption has 0 and 0, one that guesses 0.5 and 0.5, one that
rewards length alone 1 and 0: read both.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from rewards.base import Reward, score_captions
from rewards.build import RewardBuilder
from rewards.text.detail_units import detail_units_of
from rl_caption.config.build import build_data, usable_split
from rl_caption.data.files import write_text
from rl_caption.data.scenes.world import Draws
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import SpecificityRatesConfig
from rl_caption.reward_models.triplets import (
    Donor,
    append_unit,
    negative_unit,
    shuffled_words,
)
from rl_caption.runtime.errors import config_errors


class Chain(NamedTuple):
    """A caption of one image that grows by one detail a step, c_1 to c_K, K >= 2; and a false next
    detail at each step.

    ``captions`` are [K], ``negatives``, n_1 to n_K-1, [K - 1].
    """

    captions: Sequence[str]
    negatives: Sequence[str]


class ChainScores(NamedTuple):
    """Scores of the texts of one ``Chain``, [K] and [K - 1]."""

    captions: Sequence[float]
    negatives: Sequence[float]


class SpecificityRates(NamedTuple):
    """SR_pos and SR_neg, both in [0, 1], and how many captions and steps (T) they are of."""

    positive: float
    negative: float
    captions: int
    steps: int


def measure_rates(config: SpecificityRatesConfig) -> str:
    """Write ``specificity.md``, the rates of each judge on the first caption of each image, and
    return it.

    Raises:
        ConfigError: a judge cannot be made.
        DataError: the data cannot be read.
        RewardError: a judge failed.
    """
    folder, builder = check_writable(config.out), RewardBuilder()
    judges = {}
    for name, options in config.judges.items():
        with config_errors(f"judges.{name}"):
            judges[name] = builder.build(options.target or name, options.kwargs)
    data = build_data(config.data)
    rows = list(data.split(usable_split(data, config.split))[: config.max_images])
    captions = [row["references"][0] for row in rows]
    ids = [row["image_id"] for row in rows]
    grown = make_chains(captions, config.seed, config.shuffle_rate, ids)
    places = [place for place, one in enumerate(grown) if one is not None]
    chains = [one for one in grown if one is not None]
    images = {"image": [rows[place]["image"] for place in places]}
    lines = []
    for name, judge in judges.items():
        rates = specificity_rates(score_chains(judge, chains, images))
        percent = [f"{100 * rate:.2f}" for rate in rates[:2]]
        lines.append([name, *percent, *map(str, rates[2:]), judge.signature])
    headings = ["judge", "SR_pos, %", "SR_neg, %", "captions", "steps", "signature"]
    table = markdown(headings, lines)
    write_text(folder / "specificity.md", table + "\n")
    return table


def specificity_rates(scores: Sequence[ChainScores]) -> SpecificityRates:
    """Compute SR_pos and SR_neg of scored chains by equations 1 and 2."""
    up, down = [], []
    for chain in scores:
        for step, false in enumerate(chain.negatives):
            up.append(chain.captions[step + 1] > chain.captions[step])
            down.append(false < chain.captions[step])
    return SpecificityRates(
        sum(up) / len(up), sum(down) / len(down), len(scores), len(up)
    )


def released_specificity_rates(cosines: Sequence[ChainScores]) -> SpecificityRates:
    """Compute the rates as the released code does, for comparison with the published 95.37 and
    90.37 only.

    It differs from the equations in what is averaged: the last caption of a chain is never stored;
    of the others, n = (number of cosines above 0) - 1; captions with n <= 1 are skipped; the first
    n steps are averaged for each caption, then over captions (macro average). So cosines below 0
    leave out steps and captions, and which ones depends on the metric. The code works on cosines in
    half precision, which ties more.
    """
    rates, steps = [], 0
    for chain in cosines:
        stored = chain.captions[: len(chain.negatives)]
        count = sum(cosine > 0 for cosine in stored) - 1
        if count > 1:
            up = sum(stored[k + 1] > stored[k] for k in range(count)) / count
            down = sum(stored[k] > chain.negatives[k] for k in range(count)) / count
            rates.append((up, down))
            steps += count
    if not rates:
        raise ValueError(
            f"all of {len(cosines)} captions are skipped: none has three stored cosines above 0"
        )
    positive, negative = (
        math.fsum(column) / len(rates) for column in zip(*rates, strict=True)
    )
    return SpecificityRates(positive, negative, len(rates), steps)


def make_chains(
    captions: Sequence[str],
    seed: int = 0,
    shuffle_rate: float = 0.0,
    image_ids: Sequence[Hashable] | None = None,
) -> list[Chain | None]:
    """Grow N captions unit by unit, with a negative at each step, made as those of
    ``make_triplets``.

    A chain ends early where no other image has a unit for its next negative. It is None where that
    leaves fewer than two captions, or the caption has only one unit. The result depends on the
    arguments alone.

    Args:
        captions: [N].
        seed: decides which units negatives are made of.
        shuffle_rate: fraction of negative units whose words are shuffled. The released evaluation
            shuffles none, so that a metric cannot win by noticing broken English.
        image_ids: [N]; no unit is taken from a caption of the same image. Without them, equal
            captions are taken to be of one image.
    """
    units = detail_units_of(captions)
    owners = list(captions) if image_ids is None else list(image_ids)
    donors = [
        Donor(owner, unit_texts)
        for owner, unit_texts in zip(owners, units, strict=True)
    ]
    chains: list[Chain | None] = []
    for caption, unit_texts, owner in zip(captions, units, owners, strict=True):
        draws = Draws("chain", seed, str(owner), caption)
        grown, negatives = list(accumulate(unit_texts)), []
        for step in range(1, len(unit_texts)):
            unit = negative_unit(donors, step, owner, unit_texts[step], draws)
            if unit is None:
                break
            shuffled = (
                shuffled_words(unit, draws) if draws.chance(shuffle_rate) else unit
            )
            negatives.append(append_unit(grown[step - 1], shuffled))
        chains.append(
            Chain(grown[: len(negatives) + 1], negatives) if negatives else None
        )
    return chains


def score_chains(
    reward: Reward, chains: Sequence[Chain], columns: Mapping[str, Sequence[Any]]
) -> list[ChainScores]:
    """Score every text of N chains with a reward; ``columns`` are [N] values of what it needs:
    ``image``, ...
    """
    texts: list[str] = []
    owners: list[int] = []
    for number, chain in enumerate(chains):
        own = [*chain.captions, *chain.negatives]
        texts += own
        owners += [number] * len(own)
    values = {
        name: [column[number] for number in owners] for name, column in columns.items()
    }
    scores = iter(
        score_captions(reward, f"reward {reward.__name__!r}", None, texts, values)
    )
    return [
        ChainScores(
            [next(scores) for _ in chain.captions],
            [next(scores) for _ in chain.negatives],
        )
        for chain in chains
    ]
