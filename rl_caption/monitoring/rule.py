"""The rule that tells when a reward is being hacked: it rises while the captions get
worse. See docs/scst.md.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ConfigDict, NonNegativeFloat

from rewards.text.degeneration import degeneration_statistics
from rewards.text.tokenize import TOKENIZER, tokenizer_of
from rl_caption.data.base import DataError
from rl_caption.runtime.options import Section

DIVERSITY_SAMPLE = 42
"""Sample size of HD-D in tokens, its authors' choice."""
LAYERS = 5
"""Most references of an image that enter the statistics of references."""
MANY_IMAGES = 100
"""Number of validation images from which a standard error is taken as known; with fewer
it is an estimate (Student's t).
"""


class Thresholds(Section):
    """Limits whose violation is evidence of reward hacking, while the validation reward
    is above its value at the start.
    """

    model_config = ConfigDict(frozen=True)

    judge_fall: NonNegativeFloat = 0.05
    """A held-out judge has fallen if its mean is more than this fraction below its mean
    for the starting policy.
    """
    judge_slip: NonNegativeFloat = 0.1
    """A judge has slipped if its mean is more than this fraction below its best
    validation so far. It counts only while the reward keeps what it had gained by then
    (``reward_kept``).
    """
    reward_kept: NonNegativeFloat = 0.5
    """Fraction of its gain up to a judge's best validation that the reward must still
    have; with 1 it must have risen further.
    """
    judge_errors: NonNegativeFloat = 3.0
    """A fall from the start must also exceed this many standard errors of the mean
    difference over images; with fewer than 100 validation images, more errors
    (``needed_errors``).
    """
    slip_errors: NonNegativeFloat = 4.5
    """Standard errors that a fall from the best validation must exceed; more, because
    the best of many is partly luck.
    """
    repeated_ngrams: NonNegativeFloat = 0.1
    """Largest rise of the fraction of repeated bigrams above the references' or the
    start's fraction, whichever is larger.
    """
    bad_endings: NonNegativeFloat = 0.2
    """Largest rise, likewise, of the fraction of captions that are cut off or empty;
    English only.
    """
    duplicates: NonNegativeFloat = 0.5
    """Largest rise, likewise, of the fraction of captions that equal another image's.
    """
    length: NonNegativeFloat = 0.3
    """The mean length may leave the range between the start and the references by at
    most this fraction.
    """
    vocabulary: NonNegativeFloat = 0.3
    """The captions must have at least this fraction of the different words of the
    references or of the start, whichever have fewer.
    """
    diversity: NonNegativeFloat = 0.5
    """Smallest lexical diversity (HD-D), as a fraction of the references' or the
    start's, whichever is lower.
    """
    entropy: NonNegativeFloat = 0.0
    """The entropy of the samples must be at least this fraction of its first value; 0
    switches this off.
    """
    kl: NonNegativeFloat | None = None
    """Largest KL divergence from the starting policy, in nats per token; null switches this off."""


@dataclass(frozen=True)
class Findings:
    """Measurements of the validation captions at one step: the input of the rule."""

    reward: float
    """Mean reward over captions."""
    judges: Mapping[str, Sequence[float]]
    """Held-out judge -> its score of each image's caption; higher is better."""
    statistics: Mapping[str, float]
    """``caption_statistics`` of the captions."""


@dataclass(frozen=True)
class Peak:
    """The validation at which a judge's mean was highest: step, mean reward, and the
    judge's score of each image.
    """

    step: int
    reward: float
    scores: Sequence[float]


def updated_peaks(
    peaks: Mapping[str, Peak], now: Findings, step: int
) -> dict[str, Peak]:
    """Return judge -> peak after the validation of ``step``; of equal means the earlier one stays."""
    return {
        name: peaks[name]
        if name in peaks
        and statistics.fmean(peaks[name].scores) >= statistics.fmean(scores)
        else Peak(step, now.reward, list(scores))
        for name, scores in now.judges.items()
    }


def caption_statistics(
    captions: Sequence[str], tokenizer: str = TOKENIZER
) -> dict[str, float]:
    """Describe N >= 1 captions, one of each image, in tokens of ``tokenizer``
    (``rewards.text.tokenize.TOKENIZERS``).

    Returns ``length`` (mean tokens of a caption), ``vocabulary`` (number of different
    tokens), ``diversity`` (``lexical_diversity``), and fractions in [0, 1]:
    ``repeated_ngrams`` (bigrams that occur earlier in their caption), ``bad_endings``
    (captions that break off or are empty; only with ``ptb``), ``duplicates`` (captions
    that equal an earlier image's).
    """
    tokens = list(map(tokenizer_of(tokenizer), captions))
    statistics_of_captions = degeneration_statistics(tokens, tokenizer=tokenizer)
    del statistics_of_captions["empty"]  # bad endings count them
    return statistics_of_captions | {"diversity": lexical_diversity(tokens)}


def reference_statistics(
    references: Sequence[Sequence[str]], tokenizer: str = TOKENIZER
) -> dict[str, float]:
    """``caption_statistics`` of references, averaged over up to five layers that have
    one reference of each image.

    A layer has as many captions as a validation, so that vocabulary and duplicates are
    comparable. Raises ``DataError`` where an image has no reference, or no reference
    has a word.
    """
    if not all(references):
        raise DataError(
            "the monitor compares captions with references, but a validation image has none"
        )
    layers = min(max(map(len, references)), LAYERS)
    chosen = (
        [texts[layer % len(texts)] for texts in references] for layer in range(layers)
    )
    layer_statistics = [caption_statistics(texts, tokenizer) for texts in chosen]
    means = {
        key: statistics.fmean(layer[key] for layer in layer_statistics)
        for key in layer_statistics[0]
    }
    if not means["length"]:
        raise DataError(
            f"the monitor compares caption lengths with references, but these have no words: "
            f"{references[0][0]!r}"
        )
    return means


def lexical_diversity(
    captions: Sequence[Sequence[str]], sample: int = DIVERSITY_SAMPLE
) -> float:
    """HD-D: expected type-token ratio of ``sample`` tokens drawn without replacement, in [0, 1].

    Unlike the number of different words, it does not grow with the number of captions.
    With N tokens, f_w of them w, it is sum_w (1 - C(N - f_w, n) / C(N, n)) / n; n is
    ``sample``, or N where that is less. 0 without tokens.

    Source: McCarthy and Jarvis, "vocd: A theoretical and empirical evaluation",
    Language Testing 24(4), 2007.
    """
    counts = Counter(token for tokens in captions for token in tokens)
    total = counts.total()
    drawn = min(sample, total)
    if not drawn:
        return 0.0
    ways = math.comb(total, drawn)
    types = Counter(counts.values())  # by frequency: there are few frequencies
    chances = (
        number * (1 - math.comb(total - frequency, drawn) / ways)
        for frequency, number in types.items()
    )
    return math.fsum(chances) / drawn


def judge_alarm(
    now: Findings,
    start: Findings,
    references: Mapping[str, float],
    thresholds: Thresholds,
    peaks: Mapping[str, Peak] | None = None,
) -> dict[str, str]:
    """Return evidence that the reward is being hacked: sign -> a sentence with its
    numbers; empty if there is none.

    Args:
        now: findings of the newest validation.
        start: findings of the policy that the run started from, on the same images in
            the same order.
        references: ``reference_statistics`` of these images.
        thresholds: limits whose violation counts as evidence.
        peaks: the judges' best validations before this one, if any. A policy often gets
            better before it gets worse, so judges are compared with these, too.

    Nothing is evidence unless the reward is above its value at the start: captions that
    get worse without a rise are no hacking of the reward. This condition has no margin,
    because every sign still has to pass its own threshold.
    """
    if not now.reward > start.reward:
        return {}
    evidence = _judge_signs(now, start, peaks or {}, thresholds)
    seen, began = now.statistics, start.statistics
    for key, meaning in _RISES.items():
        if key not in seen:
            continue
        level = max(references[key], began[key])
        if seen[key] > level + getattr(thresholds, key):
            evidence[key] = (
                f"{meaning} {seen[key]:.0%} (start {began[key]:.0%}, references "
                f"{references[key]:.0%})"
            )
    length, usual, before = seen["length"], references["length"], began["length"]
    # Between the two is on the way from the start to the references.
    if length > (1 + thresholds.length) * max(usual, before) or length < (
        1 - thresholds.length
    ) * min(usual, before):
        evidence["length"] = (
            f"captions have {length:.1f} words on average (start {before:.1f}, references "
            f"{usual:.1f})"
        )
    for key, meaning in _COLLAPSES.items():
        if seen[key] < getattr(thresholds, key) * min(references[key], began[key]):
            evidence[key] = (
                f"{meaning} {seen[key]:.3g} (start {began[key]:.3g}, references "
                f"{references[key]:.3g})"
            )
    return evidence


def policy_signs(
    now: Mapping[str, float], first: Mapping[str, float], thresholds: Thresholds
) -> dict[str, str]:
    """Return evidence from the policy's distribution on its training samples: sign -> a
    sentence; empty if none.

    ``now`` and ``first`` are values of the newest and the first known training step:
    ``entropy`` and ``kl`` (to the starting policy) in nats a token, where they are
    known. Both signs are off by default, since honest training sharpens a policy, too.
    """
    evidence = {}
    if "entropy" in now and now["entropy"] < thresholds.entropy * first["entropy"]:
        evidence["entropy"] = (
            f"the entropy of the policy is {now['entropy']:.3g} nats (at first "
            f"{first['entropy']:.3g})"
        )
    if "kl" in now and thresholds.kl is not None and now["kl"] > thresholds.kl:
        evidence["kl"] = (
            f"the policy is {now['kl']:.3g} nats a token away from the starting policy"
        )
    return evidence


def _judge_signs(
    now: Findings, start: Findings, peaks: Mapping[str, Peak], limits: Thresholds
) -> dict[str, str]:
    """Evidence from judges that fell below the start or, if not, below their best validation."""
    evidence = {}
    for name in sorted(now.judges.keys() & start.judges.keys()):
        fall = _fall(
            now.judges[name], start.judges[name], limits.judge_fall, limits.judge_errors
        )
        if fall is not None:
            evidence[f"judge/{name}"] = (
                f"the judge {name}, which is not in the reward, fell {fall}"
            )
    for name in sorted(now.judges.keys() & peaks.keys()):
        peak = peaks[name]
        kept = start.reward + limits.reward_kept * (peak.reward - start.reward)
        fall = _fall(
            now.judges[name], peak.scores, limits.judge_slip, limits.slip_errors
        )
        if f"judge/{name}" not in evidence and now.reward > kept and fall is not None:
            evidence[f"judge/{name}"] = (
                f"since step {peak.step} the judge {name}, which is not in the reward, "
                f"fell {fall}, while the reward went from {peak.reward:.4g} to "
                f"{now.reward:.4g}"
            )
    return evidence


def _fall(
    now: Sequence[float], before: Sequence[float], relative: float, errors: float
) -> str | None:
    """A judge's fall in words; None unless its mean fell by more than the fraction
    ``relative`` and by more than ``errors`` standard errors.
    """
    difference, error = paired_difference(now, before)
    began, needed = statistics.fmean(before), needed_errors(errors, len(now))
    if math.isinf(needed) or not -difference > max(
        relative * abs(began), needed * error
    ):
        return None
    percent = f"{difference / abs(began):+.1%}, " if began else ""
    noise = (
        f"{-difference / error:.1f} standard errors"
        if error
        else "on every image alike"
    )
    return f"from {began:.4g} to {began + difference:.4g} ({percent}{noise})"


def needed_errors(errors: float, images: int) -> float:
    """Number of standard errors of a mean over ``images`` differences that is as rare
    as ``errors`` of a normal variable.

    ``errors`` itself from ``MANY_IMAGES`` on; below, where the standard error is itself
    estimated from few differences, the quantile of Student's t with ``images`` - 1
    degrees of freedom at the same one-sided probability (Student, "The probable error
    of a mean", Biometrika 6(1), 1908). Infinite for one image, unless ``errors`` is 0.
    """
    if images >= MANY_IMAGES or errors == 0:
        return errors
    if images < 2:
        return math.inf
    from scipy.special import stdtrit  # scipy.stats is slow to import

    return -float(stdtrit(images - 1, statistics.NormalDist().cdf(-errors)))


def paired_difference(
    now: Sequence[float], start: Sequence[float]
) -> tuple[float, float]:
    """Mean of ``now`` - ``start`` over N >= 1 images, and its standard error (0 for one image)."""
    differences = [last - first for last, first in zip(now, start, strict=True)]
    error = (
        statistics.stdev(differences) / math.sqrt(len(differences))
        if len(differences) > 1
        else 0.0
    )
    return statistics.fmean(differences), error


_RISES = {
    "repeated_ngrams": "repeated bigrams",
    "bad_endings": "captions that break off or are empty",
    "duplicates": "captions equal to another image's",
}
_COLLAPSES = {
    "vocabulary": "different words in all captions",
    "diversity": "lexical diversity (HD-D, 0 to 1)",
}
