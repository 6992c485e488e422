"""Specificity rate: how often a metric pays for a true detail more, and how often it charges for a false one.

Source: Chen et al., "SPECS", EMNLP 2025, equations 1 and 2. Caption i grows unit by unit, c_i1, ..., c_iK (units as in
``rewards.text.detail_units``), and n_ik is c_ik with a unit of another image in place of its own next one. With S the
metric and T the number of all steps k = 1 .. K - 1 over all captions,

    SR_pos = 1/T sum_ik [S(c_i,k+1) > S(c_ik)]          SR_neg = 1/T sum_ik [S(n_ik) < S(c_ik)]

Both inequalities are strict, so a tie fails, and every step weighs the same (micro average). The paper prints the
inequality of SR_neg the other way round; this is the direction that its text and its loss mean. A metric that ignores
the caption has 0 and 0, one that guesses 0.5 and 0.5, one that pays for length alone 1 and 0: read both.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from tqdm import tqdm

from rewards.base import Reward, checked_scores
from rewards.text.detail_units import Tagger, detail_units_of
from rl_caption.data.scenes.draws import Draws
from rl_caption.reward_models.triplets import Donor, continued, negative_unit, shuffled_words


class Chain(NamedTuple):
    """A caption of one image, growing by one detail a step, and a false step at each place."""

    captions: Sequence[str]
    """[K] c_1 to c_K, K >= 2."""
    negatives: Sequence[str]
    """[K - 1] n_1 to n_K-1."""


class ChainScores(NamedTuple):
    """Scores of the texts of one ``Chain``."""

    captions: Sequence[float]
    """[K]"""
    negatives: Sequence[float]
    """[K - 1]"""


class SpecificityRates(NamedTuple):
    """SR_pos and SR_neg, both in [0, 1]."""

    positive: float
    negative: float
    captions: int
    """Captions that were counted."""
    steps: int
    """T, steps that were counted."""


def specificity_rates(scores: Sequence[ChainScores]) -> SpecificityRates:
    """Compute SR_pos and SR_neg of scored chains by equations 1 and 2.

    Raises:
        ValueError: no chain, one of fewer than two captions or with another number of negatives than steps, or a score
            that is not finite; the message names the chain.
    """
    _check(scores)
    up = [after > before for chain in scores for before, after in zip(chain.captions, chain.captions[1:], strict=False)]
    down = [false < before for chain in scores for before, false in zip(chain.captions, chain.negatives, strict=False)]
    return SpecificityRates(sum(up) / len(up), sum(down) / len(down), len(scores), len(up))


def released_specificity_rates(cosines: Sequence[ChainScores]) -> SpecificityRates:
    """Compute the rates as the released code does, for comparison with the published 95.37 and 90.37 only.

    It differs from the equations in what is averaged: the last caption of a chain is never stored; of the others,
    n = (number of cosines above 0) - 1; captions with n <= 1 are skipped; the first n steps are averaged for each
    caption, then over captions (macro average). So cosines below 0 leave out steps and captions, and which ones depends
    on the metric. The code works on cosines in half precision, which ties more; give it what you have.

    Raises:
        ValueError: as for ``specificity_rates``, or every caption is skipped.
    """
    _check(cosines)
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
        raise ValueError(f"all of {len(cosines)} captions are skipped: none has three stored cosines above 0")
    positive, negative = (math.fsum(column) / len(rates) for column in zip(*rates, strict=True))
    return SpecificityRates(positive, negative, len(rates), steps)


def make_chains(
    captions: Sequence[str],
    seed: int = 0,
    shuffle_rate: float = 0.0,
    image_ids: Sequence[Hashable] | None = None,
    donors: Sequence[Donor] | None = None,
    tagger: Tagger | None = None,
    processes: int = 1,
) -> list[Chain | None]:
    """Grow N captions unit by unit, with a negative at each step.

    Negatives are made as those of ``make_triplets``: the next unit is replaced by one of another image. A chain ends
    early where no other image has a unit for it.

    Args:
        captions: [N] whole captions.
        seed: which units; the result is a pure function of the arguments.
        shuffle_rate: share of negative units whose words are shuffled; none as in the released evaluation, so that a
            metric cannot win by noticing broken English.
        image_ids: [N] no unit is taken from a caption of the same image. None: equal captions are one image's.
        donors: captions to take units from; None takes all N.
        tagger, processes: as for ``detail_units_of``.

    Returns:
        [N] chains of 2 captions or more; None where a caption has one unit, or no step has a negative.

    Raises:
        ValueError: another number of ``image_ids``.
    """
    if image_ids is not None and len(image_ids) != len(captions):
        raise ValueError(f"{len(image_ids)} image ids for {len(captions)} captions: expected one for each")
    units = detail_units_of(captions, processes, tagger)
    owners = list(captions) if image_ids is None else list(image_ids)
    pool = [Donor(owner, own) for owner, own in zip(owners, units, strict=True)] if donors is None else donors
    chains: list[Chain | None] = []
    for caption, own, owner in zip(captions, units, owners, strict=True):
        draws = Draws("chain", seed, str(owner), caption)
        grown, negatives = list(accumulate(own)), []
        for place in range(1, len(own)):
            unit = negative_unit(pool, place, owner, own[place], draws)
            if unit is None:
                break
            shuffled = shuffled_words(unit, draws) if draws.chance(shuffle_rate) else unit
            negatives.append(continued(grown[place - 1], shuffled))
        chains.append(Chain(grown[: len(negatives) + 1], negatives) if negatives else None)
    return chains


def score_chains(
    reward: Reward, chains: Sequence[Chain], columns: Mapping[str, Sequence[Any]], batch_size: int = 512
) -> list[ChainScores]:
    """Score every text of every chain with any reward.

    Args:
        reward: a metric whose scores of one image compare.
        chains: [N].
        columns: [N] values each of what the reward needs: ``image``, ``image_id``, ``references``, ...
        batch_size: texts a call; a call has texts of consecutive chains.

    Returns:
        [N] scores.

    Raises:
        RewardError: the reward cannot score a text, or returns what is no score.
        ValueError: ``batch_size`` is below 1, or a column has another length.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size = {batch_size}: expected at least 1")
    for name, column in columns.items():
        if len(column) != len(chains):
            raise ValueError(f"column {name!r} has {len(column)} items for {len(chains)} captions")
    texts = [(number, text) for number, chain in enumerate(chains) for text in (*chain.captions, *chain.negatives)]
    found: list[float] = []
    for start in tqdm(range(0, len(texts), batch_size), desc="specificity", unit="batch", delay=2, disable=None):
        part = texts[start : start + batch_size]
        own = {name: [column[number] for number, _ in part] for name, column in columns.items()}
        found += checked_scores(reward, reward(None, [text for _, text in part], **own), len(part))
    scores, place = [], 0
    for chain in chains:
        middle, end = place + len(chain.captions), place + len(chain.captions) + len(chain.negatives)
        scores.append(ChainScores(found[place:middle], found[middle:end]))
        place = end
    return scores


def _check(scores: Sequence[ChainScores]) -> None:
    if not scores:
        raise ValueError("no captions: expected at least one that grows")
    for number, chain in enumerate(scores):
        if len(chain.captions) < 2 or len(chain.negatives) != len(chain.captions) - 1:
            raise ValueError(
                f"chain {number} has {len(chain.captions)} captions and {len(chain.negatives)} negatives: expected at "
                "least 2 captions and one negative fewer"
            )
        for value in (*chain.captions, *chain.negatives):
            if not math.isfinite(value):
                raise ValueError(f"chain {number} has the score {value!r}: expected finite numbers")
