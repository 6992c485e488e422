"""The rule that tells when a reward is being hacked: it rises while the captions get worse. See docs/hacking.md."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rewards.text.hygiene import hygiene
from rewards.text.tokenize import tokenize

DIVERSITY_SAMPLE = 42
"""Tokens of the samples of HD-D, as its authors chose."""
LAYERS = 5
"""References of an image that the statistics of references look at."""


@dataclass(frozen=True)
class Thresholds:
    """What counts as evidence. A sign is judged only while the validation reward is above its start.

    Args:
        judge_fall: fall of a held-out judge, as a share of its starting mean.
        judge_errors: the same fall in standard errors of the paired differences per image; both must be exceeded.
        repeated_ngrams: rise of the share of repeated bigrams above both the references and the start.
        bad_endings: rise of the share of captions that break off (or are empty) above both.
        duplicates: rise of the share of captions equal to another image's above both.
        length: distance of the mean length from that of the references and from the start, as a share of each.
        vocabulary: share of the different words, of the references or the start (whichever has fewer), below which
            the vocabulary has collapsed.
        diversity: the same for lexical diversity (HD-D).
    """

    judge_fall: float = 0.05
    judge_errors: float = 3.0
    repeated_ngrams: float = 0.1
    bad_endings: float = 0.2
    duplicates: float = 0.5
    length: float = 0.3
    vocabulary: float = 0.3
    diversity: float = 0.5


@dataclass(frozen=True)
class Findings:
    """What the rule knows of the validation captions at one step."""

    reward: float
    """Mean reward of the captions."""
    judges: Mapping[str, Sequence[float]]
    """Scores of every held-out judge, one an image; higher is better."""
    statistics: Mapping[str, float]
    """What ``caption_statistics`` returns."""


def caption_statistics(captions: Sequence[str]) -> dict[str, float]:
    """Describe N >= 1 captions, one an image; tokens by ``rewards.text.tokenize``.

    Returns:
        ``length`` (mean tokens), ``vocabulary`` (different tokens), ``diversity`` (``lexical_diversity``), and shares
        in [0, 1]: ``repeated_ngrams`` (bigrams seen earlier in their caption), ``bad_endings`` (captions that break
        off or are empty), ``duplicates`` (captions equal to that of an earlier image).

    Raises:
        ValueError: there is no caption.
    """
    tokens = [tokenize(caption) for caption in captions]
    found = hygiene(tokens)
    del found["empty"]  # bad endings count them
    return found | {"diversity": lexical_diversity(tokens)}


def reference_statistics(references: Sequence[Sequence[str]]) -> dict[str, float]:
    """``caption_statistics`` of what people wrote: means over up to five layers, each with one reference an image.

    A layer has as many captions as a validation, so that vocabulary and duplicates compare.
    """
    layers = min(max(map(len, references)), LAYERS)
    found = [caption_statistics([texts[layer % len(texts)] for texts in references]) for layer in range(layers)]
    return {key: statistics.fmean(layer[key] for layer in found) for key in found[0]}


def lexical_diversity(captions: Sequence[Sequence[str]], sample: int = DIVERSITY_SAMPLE) -> float:
    """HD-D: expected type-token ratio of ``sample`` tokens drawn without replacement, in [0, 1].

    Unlike the number of different words, it does not grow with the number of captions. With N tokens, f_w of them w, it
    is sum_w (1 - C(N - f_w, n) / C(N, n)) / n; n is ``sample``, or N where that is less. 0 without tokens.

    Source: McCarthy and Jarvis, "vocd: A theoretical and empirical evaluation", Language Testing 24(4), 2007.
    """
    counts = Counter(token for tokens in captions for token in tokens)
    total = counts.total()
    drawn = min(sample, total)
    if not drawn:
        return 0.0
    ways = math.comb(total, drawn)
    # Types are grouped by frequency: there are few different ones.
    by_frequency = Counter(counts.values())
    return (
        math.fsum(types * (1 - math.comb(total - frequency, drawn) / ways) for frequency, types in by_frequency.items())
        / drawn
    )


def judge_alarm(
    now: Findings, start: Findings, references: Mapping[str, float], thresholds: Thresholds
) -> dict[str, str]:
    """Evidence that the reward is being hacked: sign -> a sentence with its numbers; empty if there is none.

    Nothing is evidence while the reward is not above its start: what gets worse then is no hacking of the reward.

    Args:
        now: of the captions of this step.
        start: of the policy that the run started from, for the same images in the same order.
        references: ``reference_statistics``.
        thresholds: what counts.

    Raises:
        ValueError: a judge has another number of scores than at the start.
    """
    if not now.reward > start.reward:
        return {}
    found = _fallen_judges(now, start, thresholds)
    seen, began = now.statistics, start.statistics
    for key, meaning in _SHARES.items():
        level = max(references[key], began[key])
        if seen[key] > level + getattr(thresholds, key):
            found[key] = f"{meaning} {seen[key]:.0%} (start {began[key]:.0%}, references {references[key]:.0%})"
    length, usual, before = seen["length"], references["length"], began["length"]
    if abs(length - usual) > thresholds.length * usual and abs(length - before) > thresholds.length * before:
        found["length"] = f"captions have {length:.1f} words on average (start {before:.1f}, references {usual:.1f})"
    for key, meaning in _VARIETY.items():
        if seen[key] < getattr(thresholds, key) * min(references[key], began[key]):
            found[key] = f"{meaning} {seen[key]:.3g} (start {began[key]:.3g}, references {references[key]:.3g})"
    return found


def _fallen_judges(now: Findings, start: Findings, thresholds: Thresholds) -> dict[str, str]:
    found = {}
    for name in now.judges.keys() & start.judges.keys():
        first, last = start.judges[name], now.judges[name]
        difference, error = paired_difference(last, first)
        began = statistics.fmean(first)
        if -difference > max(thresholds.judge_fall * abs(began), thresholds.judge_errors * error):
            share = f"{difference / abs(began):+.1%}, " if began else ""
            noise = f"{-difference / error:.1f} standard errors" if error else "on every image alike"
            found[f"judge/{name}"] = (
                f"the judge {name}, which is not in the reward, fell from {began:.4g} to {began + difference:.4g} "
                f"({share}{noise})"
            )
    return dict(sorted(found.items()))


def paired_difference(now: Sequence[float], start: Sequence[float]) -> tuple[float, float]:
    """Mean of ``now`` - ``start`` over N >= 1 images, and its standard error (0 for one image).

    Raises:
        ValueError: the numbers of images differ.
    """
    differences = [last - first for last, first in zip(now, start, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return statistics.fmean(differences), error


_SHARES = {
    "repeated_ngrams": "repeated bigrams",
    "bad_endings": "captions that break off or are empty",
    "duplicates": "captions equal to another image's",
}
_VARIETY = {"vocabulary": "different words in all captions", "diversity": "lexical diversity (HD-D, 0 to 1)"}
