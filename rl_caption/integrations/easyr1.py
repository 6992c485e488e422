"""EasyR1: rewards of a batch of captions by ``rl-caption serve`` (docs/serve.md)."""

from collections.abc import Sequence
from typing import Any

from rl_caption.integrations.client import RewardClient, columns_of

REWARD_NAME = "rl_caption"
REWARD_TYPE = "batch"


def compute_score(
    reward_inputs: Sequence[dict[str, Any]], url: str | None = None, **_: Any
) -> list[dict[str, float]]:
    """The reward of each ``response`` and its terms; ``ground_truth`` is a JSON object of columns."""
    captions = [row["response"] for row in reward_inputs]
    columns = columns_of([row["ground_truth"] for row in reward_inputs])
    scores = RewardClient(url).score(captions, **columns)
    return [
        {"overall": total}
        | {name: values[row] for name, values in scores.terms.items()}
        for row, total in enumerate(scores.total)
    ]
