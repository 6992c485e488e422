"""Specificity rate: how often a metric rewards one more true detail, and how often it
penalises a false one.

Source: Chen et al., "SPECS", EMNLP 2025, equations 1 and 2. Caption i grows unit by
unit, c_i1, ..., c_iK (units as in ``rewards.text.detail_units``), and n_ik is c_ik with
a unit of another image in place of its own next one. With S the metric and T the number
of all steps k = 1 .. K - 1 over all captions,

    SR_pos = 1/T sum_ik [S(c_i,k+1) > S(c_ik)]          SR_neg = 1/T sum_ik [S(n_ik) < S(c_ik)]

Both inequalities are strict, so a tie fails, and every step weighs the same (micro
average). The paper prints the inequality of SR_neg the other way round; this is the
direction that its text and its loss mean. A metric that ignores the caption has rates 0
and 0, a guessing metric 0.5 and 0.5, a metric that rewards length alone 1 and 0: read
both.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from rewards.base import Reward, score_captions
from rewards.text.detail_units import detail_units_of
from rl_caption.config.build import build_data
from rl_caption.data.base import Row
from rl_caption.data.files import write_text
from rl_caption.data.scenes.world import Draws
from rl_caption.evaluation import check_writable
from rl_caption.evaluation.results import markdown
from rl_caption.lab.config import SpecificityRatesConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.reward_models.triplets import (
    Donor,
    append_unit,
    negative_unit,
    shuffled_words,
)


class Chain(NamedTuple):
    """A caption of one image that grows by one detail a step, c_1 to c_K, K >= 2; and a
    false next detail at each step; or the scores of these texts.
    """

    captions: Sequence[Any]
    """[K] captions or their scores, c_1 to c_K."""
    negatives: Sequence[Any]
    """[K - 1] false captions or their scores, n_1 to n_K-1."""


class SpecificityRates(NamedTuple):
    """SR_pos and SR_neg, both in [0, 1], and the numbers of captions and of steps (T)."""

    positive: float
    negative: float
    captions: int
    steps: int


def measure_rates(config: SpecificityRatesConfig) -> str:
    """Compute the rates of each judge on the first caption of each image, write them to
    ``specificity.md``, and return the table.

    Raises:
        ConfigError: a judge cannot be made.
        DataError: the data cannot be read.
        RewardError: a judge failed.
    """
    folder = check_writable(config.out)
    judges = build_judges(config.judges, None, [], "judges")
    data = build_data(config.data)
    rows = list(data[config.split][: config.max_images])
    lines = []
    for name, judge in judges.items():
        scores = score_rows(judge, rows, config.seed, config.shuffle_rate)
        rates = specificity_rates(scores)
        percent = [f"{100 * rate:.2f}" for rate in rates[:2]]
        lines.append(
            [
                name,
                *percent,
                *map(str, rates[2:]),
                judge.signature,
            ]
        )
    headings = ["judge", "SR_pos, %", "SR_neg, %", "captions", "steps", "signature"]
    table = markdown(headings, lines)
    write_text(folder / "specificity.md", table + "\n")
    return table


def specificity_rates(scores: Sequence[Chain]) -> SpecificityRates:
    """Compute SR_pos and SR_neg of scored chains by equations 1 and 2."""
    up, down = [], []
    for chain in scores:
        for step, false in enumerate(chain.negatives):
            up.append(chain.captions[step + 1] > chain.captions[step])
            down.append(false < chain.captions[step])
    count = len(up)
    return SpecificityRates(
        sum(up) / count,
        sum(down) / count,
        len(scores),
        count,
    )


def released_specificity_rates(cosines: Sequence[Chain]) -> SpecificityRates:
    """Compute the rates as the released code does, for comparison with the published
    95.37 and 90.37 only.

    It differs from the equations in what is averaged: the last caption of a chain is
    never stored; of the others, n = (number of cosines above 0) - 1; captions with n <=
    1 are skipped; the first n steps are averaged for each caption, then over captions
    (macro average). So cosines below 0 leave out steps and captions, and which ones
    depends on the metric. The released code's cosines are in half precision, with more
    ties.
    """
    rates, steps = [], 0
    for chain in cosines:
        stored = chain.captions[: len(chain.negatives)]
        count = sum(cosine > 0 for cosine in stored) - 1
        if count > 1:
            own = Chain(stored[: count + 1], chain.negatives[:count])
            rates.append(specificity_rates([own]))
            steps += count
    if not rates:
        raise ValueError(
            f"all of {len(cosines)} captions are skipped: none has three stored cosines above 0"
        )
    positive, negative, *_ = (
        math.fsum(own) / len(rates) for own in zip(*rates, strict=True)
    )
    return SpecificityRates(positive, negative, len(rates), steps)


def make_chains(
    captions: Sequence[str],
    image_ids: Sequence[Hashable],
    seed: int = 0,
    shuffle_rate: float = 0.0,
) -> list[Chain | None]:
    """Grow N captions unit by unit, with a negative at each step, made as in
    ``make_triplets``.

    A chain ends early where no other image has a unit for its next negative. It is None
    where that leaves fewer than two captions, or the caption has only one unit. The
    result depends on the arguments alone.

    Args:
        captions: [N] whole captions.
        image_ids: [N] image of each caption; no unit is taken from a caption of the
            same image.
        seed: random seed of the units of negatives.
        shuffle_rate: fraction of negative units whose words are shuffled. The released
            evaluation shuffles none, so that a metric cannot win by noticing broken
            English.
    """
    units = detail_units_of(captions)
    donors = list(map(Donor, image_ids, units))
    chains: list[Chain | None] = []
    for caption, (owner, details) in zip(captions, donors, strict=True):
        draws = Draws("chain", seed, str(owner), caption)
        grown, negatives = list(accumulate(details)), []
        for step in range(1, len(details)):
            unit = negative_unit(donors, step, owner, details[step], draws)
            if unit is None:
                break
            if draws.chance(shuffle_rate):
                unit = shuffled_words(unit, draws)
            negatives.append(append_unit(grown[step - 1], unit))
        chain = Chain(grown[: len(negatives) + 1], negatives)
        chains.append(chain if negatives else None)
    return chains


def score_rows(
    reward: Reward, rows: Sequence[Row], seed: int = 0, shuffle_rate: float = 0.0
) -> list[Chain]:
    """Score the chains that grow from the first reference of each row."""
    captions = [row["references"][0] for row in rows]
    ids = [row["image_id"] for row in rows]
    chains, images = [], []
    all_chains = make_chains(captions, ids, seed, shuffle_rate)
    for chain, row in zip(all_chains, rows, strict=True):
        if chain is not None:
            chains.append(chain)
            images.append(row["image"])
    return score_chains(reward, chains, {"image": images})


def score_chains(
    reward: Reward, chains: Sequence[Chain], columns: Mapping[str, Sequence[Any]]
) -> list[Chain]:
    """Score every text of N chains with a reward; ``columns`` have N rows: ``image``,
    ...
    """
    texts: list[str] = []
    owners: list[int] = []
    for number, chain in enumerate(chains):
        chain_texts = [*chain.captions, *chain.negatives]
        texts += chain_texts
        owners += [number] * len(chain_texts)
    values = {name: [column[n] for n in owners] for name, column in columns.items()}
    where = f"reward {reward.__name__!r}"
    scores = iter(score_captions(reward, where, None, texts, values))
    return [
        Chain(*([next(scores) for _ in chain_texts] for chain_texts in chain))
        for chain in chains
    ]
