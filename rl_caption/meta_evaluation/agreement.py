"""Agreement of metrics with the oracle over judged captions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rewards.base import Reward
from rl_caption.meta_evaluation.captions import JudgedCaptions
from rl_caption.meta_evaluation.correlation import UndefinedCorrelation, grouped_tau_b, kendall_tau_b, kendall_tau_c
from rl_caption.meta_evaluation.pairwise import pairwise_accuracy


@dataclass(frozen=True)
class Agreement:
    """How one metric agrees with oracle F1. A correlation that is not defined is None and ``notes`` says why."""

    signature: str
    tau_b: float | None
    """Kendall's tau_b over all captions of all images, in [-1, 1]; likewise ``tau_c``."""
    tau_c: float | None
    within_image_tau_b: float | None
    """Mean over images of tau_b among the captions of one image, in [-1, 1]."""
    images: int
    """Images in that mean: those whose captions differ in F1."""
    constant_images: int
    """Of these, images to whose captions the metric gives one score; they count 0."""
    accuracy: dict[str, float]
    """Kind of hard negative -> share of pairs with the true caption strictly above, in [0, 1]; ``all`` is overall."""
    notes: list[str] = field(default_factory=list)


def agreement(metric: Reward, judged: JudgedCaptions) -> Agreement:
    """Score all judged captions in one call and compare.

    Raises:
        RewardError: the metric cannot score them.
        ValueError: fewer than two captions, or no hard negative.
    """
    texts = [caption.text for caption in judged.captions]
    return scores_agreement(metric(None, texts, **judged.columns()), judged, metric.signature)


def scores_agreement(scores: Sequence[float], judged: JudgedCaptions, signature: str = "") -> Agreement:
    """Compare [N] scores of the judged captions with oracle F1.

    Raises:
        ValueError: another number of scores, one that is not finite, fewer than two captions, or no hard negative.
    """
    f1 = [caption.f1 for caption in judged.captions]
    groups = [caption.row for caption in judged.captions]
    notes: list[str] = []
    tau_b = tau_c = within = None
    images = constant = 0
    try:
        tau_b, tau_c = kendall_tau_b(scores, f1), kendall_tau_c(scores, f1)
    except UndefinedCorrelation as error:
        notes.append(f"over all captions: {error}")
    try:
        grouped = grouped_tau_b(scores, f1, groups)
        within, images, constant = grouped.mean, grouped.groups, grouped.constant_scores
    except UndefinedCorrelation as error:
        notes.append(f"within images: {error}")
    accuracy = pairwise_accuracy(
        [scores[pair.correct] for pair in judged.pairs],
        [scores[pair.wrong] for pair in judged.pairs],
        [pair.kind for pair in judged.pairs],
    )
    return Agreement(signature, tau_b, tau_c, within, images, constant, accuracy, notes)
