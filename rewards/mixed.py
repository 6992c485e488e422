"""Rewards of rewards: a weighted sum, with the scores of every term available on their own, and a
choice by length.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from rewards.base import (
    Reward,
    RewardError,
    as_texts,
    checked_scores,
    required_column,
    score_captions,
)
from rewards.build import RewardBuilder
from rewards.options import Count, check_values
from rewards.text.tokenize import TOKENIZER, tokenizer_of

Normalize = Literal["none", "per_term", "per_group"]
ROUNDING = 1e-6
"""A standard deviation below this fraction of the largest absolute score is rounding (embeddings
are float32).
"""

LOG_KEYS = frozenset({"total", "std", "greedy"})
"""Names that no term may have: ``reward/NAME`` is a log key of the whole reward (docs/metrics.md).
"""


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation (divisor N) of one term's scores."""

    mean: float
    std: float


def moments(scores: Sequence[float]) -> Moments:
    """Return mean and standard deviation of N scores.

    A standard deviation that is only rounding (``ROUNDING``) counts as 0; without scores, both are
    0. Sums are exact, so the result depends neither on the order of the scores nor on the number of
    processes.
    """
    if not scores:
        return Moments(0.0, 0.0)
    std = statistics.pstdev(scores)
    return Moments(statistics.fmean(scores), std if std > ROUNDING * max(map(abs, scores)) else 0.0)


def z_scores(scores: Sequence[float], of: Moments) -> list[float]:
    """Return the z-scores (r - mean) / std of N scores; if std is 0, they are all 0."""
    return [(score - of.mean) / of.std if of.std else 0.0 for score in scores]


def masked_by_length(
    scores: Sequence[float],
    captions: Sequence[str],
    references: Sequence[Sequence[str]],
    ratio: tuple[float, float],
    tokenizer: str = TOKENIZER,
) -> list[float]:
    """Set the scores of captions that are too short or too long to 0: length-conditional reward
    masking.

    A score is kept if the length of the caption divided by the mean length of its references is
    within ``ratio``, ends included. Lengths are numbers of tokens of ``tokenizer``. Source: Ye et
    al., "BalCapRL", 2026, with ratios of 0.5 and 2. Raises ``RewardError`` if a caption has no
    reference.
    """
    (low, high), tokenize = ratio, tokenizer_of(tokenizer)
    masked = []
    for row, (score, caption, texts) in enumerate(zip(scores, captions, references, strict=True)):
        if not texts:
            raise RewardError(f"caption {row} has no reference to compare its length with")
        length, expected = (
            len(tokenize(caption)),
            statistics.fmean(len(tokenize(text)) for text in texts),
        )
        masked.append(score if low * expected <= length <= high * expected else 0.0)
    return masked


class MixedReward:
    """Weighted sum of rewards, sum_t w_t r_t, or of their z-scores, sum_t w_t (r_t - mean_t) /
    std_t.

    Of raw scores (``normalize="none"``), ``bounds`` follow from those of the terms and the weights.
    Z-scores (``per_term``, ``per_group``) are relative to other captions: they have no bounds, and
    totals of different calls do not compare. ``columns`` is the union over the terms.

    Args:
        terms: log key -> (reward, weight).
        normalize: ``none`` adds raw scores; ``per_term`` and ``per_group`` add z-scores of every
            term. The caller of ``combine`` decides over which captions: all of a step
            (``per_term``), or those of an image (``per_group``).
        length_ratios: log key -> (smallest, largest) length relative to the references; outside of
            it the term scores 0 (``masked_by_length``). Needs the column ``references``.
        tokenizer: one of ``rewards.text.tokenize.TOKENIZERS``, in whose tokens lengths are counted;
            a trainer also uses it for its statistics of captions.

    Raises:
        ValueError: there is no term, a weight is not a finite number, ``normalize`` is unknown, a
            length ratio belongs to no term, or it belongs to a term whose best score is 0, or a
            term has a name of ``LOG_KEYS``.
    """

    __name__ = "total"

    def __init__(
        self,
        terms: Mapping[str, tuple[Reward, float]],
        normalize: Normalize = "none",
        length_ratios: Mapping[str, tuple[float, float]] = MappingProxyType({}),
        tokenizer: str = TOKENIZER,
    ) -> None:
        check_values(Normalize, normalize=normalize)
        if not terms:
            raise ValueError("a mixed reward needs at least one term")
        if used := sorted(LOG_KEYS & terms.keys()):
            raise ValueError(
                f"reward term {used[0]!r}: the log key reward/{used[0]} is in use, rename the term"
            )
        for name, (_, weight) in terms.items():
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not math.isfinite(weight)
            ):
                raise ValueError(
                    f"reward term {name!r} has the weight {weight!r}: expected a finite number"
                )
        if not length_ratios.keys() <= terms.keys():
            raise ValueError(
                f"length_ratios has {list(length_ratios)}: expected names of terms, {list(terms)}"
            )
        for name in length_ratios:
            low, high = terms[name][0].bounds
            if high <= 0:
                raise ValueError(
                    f"reward term {name!r} has a length ratio, and scores from {low:g} to "
                    f"{high:g}: captions of other "
                    "lengths, which score 0, would have the best score. Leave it out"
                )
        self.rewards = {name: reward for name, (reward, _) in terms.items()}
        self.weights = {name: float(weight) for name, (_, weight) in terms.items()}
        self.length_ratios, self.tokenizer = dict(length_ratios), tokenizer
        self.columns: frozenset[str] = frozenset().union(
            *(reward.columns for reward in self.rewards.values())
        )
        if self.length_ratios:
            self.columns |= {"references"}
        self.normalize = normalize
        ends = []
        for name, weight in self.weights.items():
            low, high = self.rewards[name].bounds
            if name in length_ratios:
                low, high = min(low, 0.0), max(high, 0.0)
            if weight:  # of 0, an infinite bound adds none
                ends.append(sorted((weight * low, weight * high)))
        self.bounds = (math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends))
        if normalize != "none":
            self.bounds = (-math.inf, math.inf)

    @property
    def signature(self) -> str:
        """``0.5*[...]+0.5*[...]``; with z-scores ``per_term(...)`` of that; for one raw term of
        weight 1, its own.

        A term with a length ratio is written ``length0.5-2(...)``, and ``length0.5-2,char(...)``
        with a tokenizer other than ``ptb``.
        """
        labels = {name: reward.signature for name, reward in self.rewards.items()}
        words = "" if self.tokenizer == TOKENIZER else f",{self.tokenizer}"
        labels |= {
            name: f"length{low:g}-{high:g}{words}({labels[name]})"
            for name, (low, high) in self.length_ratios.items()
        }
        if self.normalize == "none" and list(self.weights.values()) == [1.0]:
            return next(iter(labels.values()))
        terms = "+".join(f"{weight:g}*[{labels[name]}]" for name, weight in self.weights.items())
        return terms if self.normalize == "none" else f"{self.normalize}({terms})"

    def with_weights(self, weights: Mapping[str, float]) -> MixedReward:
        """The same mixture with other weights."""
        terms = {name: (reward, weights[name]) for name, reward in self.rewards.items()}
        return MixedReward(terms, self.normalize, self.length_ratios, self.tokenizer)

    def terms(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> dict[str, list[float]]:
        """Score N captions by every term: log key -> N raw scores, masked by length where the term
        has a ratio.

        Raises:
            RewardError: as ``score_captions``.
        """
        scores = {}
        for name, reward in self.rewards.items():
            scores[name] = score_captions(
                reward, f"reward term {name!r}", prompts, completions, columns
            )
        if self.length_ratios:
            texts = as_texts(completions)
            references = required_column(columns, "references", "length_ratios", len(texts))
            for name, ratio in self.length_ratios.items():
                scores[name] = masked_by_length(
                    scores[name], texts, references, ratio, self.tokenizer
                )
        return scores

    def combine(
        self, terms: Mapping[str, Sequence[float]], of: Mapping[str, Moments] | None = None
    ) -> list[float]:
        """Return the weighted sums [N] of the raw scores of ``terms`` (log key -> N scores).

        ``of`` are the moments of every term that z-scores are computed with, for example over all
        captions of a step or over the samples of an image; None uses the moments of these N
        captions.
        """
        if self.normalize != "none":
            term_moments = (
                of if of is not None else {name: moments(terms[name]) for name in self.weights}
            )
            terms = {name: z_scores(terms[name], term_moments[name]) for name in self.weights}
        rows = zip(*(terms[name] for name in self.weights), strict=True)
        weights = list(self.weights.values())
        return [
            math.fsum(weight * score for weight, score in zip(weights, row, strict=True))
            for row in rows
        ]

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the weighted sum; z-scores are those over these N captions. Raises as
        ``terms``.

        As a z-score a single caption scores 0, and a trainer that calls this in several processes
        normalises in each separately (``rl_caption`` uses all samples of a step, or those of an
        image, instead). The mean of every term is passed to TRL's ``log_metric``, where ``columns``
        has it, as ``reward/<term>``.
        """
        terms = self.terms(prompts, completions, **columns)
        log_metric = columns.get("log_metric")
        if log_metric is not None and completions:
            for name, values in terms.items():
                log_metric(f"reward/{name}", math.fsum(values) / len(values))
        return checked_scores(self, self.combine(terms), len(completions))


class LengthRouter:
    """A short-caption score below a number of tokens, a long-caption score from there on.

    The SPECS paper recommends CLIP below 60 tokens and SPECS above. Tokens are those of CLIP's BPE,
    without start and end. Both scores of the default pair are in [0, 1], but they come from two
    encoders, so a score below the threshold does not compare with one above it.

    Args:
        short: a reward, or ``{name, **arguments}`` of one of the registry, for captions of fewer
            than ``threshold`` tokens; a mapping without a name is ``clipscore`` with ``w`` 1.
        long: the same for all other captions; without a name it is ``specs``.
        threshold: tokens, at least 1.
        tokenizer: one of ``rewards.text.tokenize.TOKENIZERS``, for those of the two rewards that
            have an argument ``tokenizer`` and do not set it.

    Raises:
        ValueError: the threshold is below 1, or a reward cannot be built.
    """

    __name__ = "length_router"
    columns: frozenset[str]
    bounds: tuple[float, float]
    inner_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "short": {"name": "clipscore", "w": 1.0},
        "long": {"name": "specs"},
    }
    """Arguments that are rewards or mappings of name and arguments, and the mapping of one without
    a name.
    """

    def __init__(
        self,
        short: Reward | Mapping[str, Any],
        long: Reward | Mapping[str, Any],
        threshold: int = 60,
        tokenizer: str = TOKENIZER,
    ) -> None:
        check_values(Count, threshold=threshold)
        self.threshold = threshold
        builder = RewardBuilder(tokenizer=tokenizer)
        first, last = (
            builder.build_inner(key, side, self.inner_rewards[key])
            if isinstance(side, Mapping)
            else side
            for key, side in (("short", short), ("long", long))
        )
        self.rewards = {"short": first, "long": last}
        self.columns = first.columns | last.columns
        ends = list(zip(first.bounds, last.bounds, strict=True))
        self.bounds = (min(ends[0]), max(ends[1]))
        self.signature = (
            f"{self.__name__}[<{threshold} CLIP tokens: {first.signature}; else: {last.signature}]"
        )

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions, each by the score for its length; columns of N items are split as the
        captions are.

        Raises:
            RewardError: one of the two failed; the message names it.
        """
        from rewards.clip.preprocessing import count_tokens

        texts = as_texts(completions)
        for name in sorted(self.columns):
            required_column(columns, name, self.__name__, len(texts))
        is_long = [count_tokens(text) >= self.threshold for text in texts]
        scores = [0.0] * len(texts)
        for length, reward in self.rewards.items():
            rows = [row for row, over in enumerate(is_long) if over == (length == "long")]
            if not rows:
                continue
            row_columns = {
                name: _rows_of(column, rows, len(texts)) for name, column in columns.items()
            }
            row_prompts = None if prompts is None else [prompts[row] for row in rows]
            first = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
            where = f"{self.__name__}, {length} captions (rows {first})"
            row_scores = score_captions(
                reward, where, row_prompts, [texts[row] for row in rows], row_columns
            )
            for row, score in zip(rows, row_scores, strict=True):
                scores[row] = score
        return scores


def _rows_of(column: Any, rows: Sequence[int], count: int) -> Any:
    """The items of ``rows`` of a column of ``count`` items; anything else, such as ``log_metric``,
    unchanged.
    """
    is_column = (
        isinstance(column, Sequence) and not isinstance(column, str) and len(column) == count
    )
    return [column[row] for row in rows] if is_column else column
