"""capevalkit: a reward as a metric of its benchmarks, ``evaluate_metric(benchmark=NAME, metric=as_metric(reward))``."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Sample(Protocol):
    """capevalkit's ``CaptionSample``."""

    id: str
    image: str
    references: list[str]
    prediction: str | None


def as_metric(reward: Any) -> Callable[[Sequence[Sample]], dict[str, float]]:
    """A function from samples to ``{id: score}``, for a reward of ``rewards`` or any with its call (no server).

    The function raises ``ValueError`` for a sample without a prediction, and what the reward raises.
    """

    def metric(samples: Sequence[Sample]) -> dict[str, float]:
        """Scores by id."""
        captions = []
        for sample in samples:
            if sample.prediction is None:
                raise ValueError(f"sample {sample.id!r} has no prediction")
            captions.append(sample.prediction)
        columns = {
            "image": [sample.image for sample in samples],
            "image_id": [sample.image for sample in samples],
            "references": [sample.references for sample in samples],
        }
        scores = reward(None, captions, **columns)
        return {sample.id: score for sample, score in zip(samples, scores, strict=True)}

    return metric
