"""EasyR1: rewards of a batch of captions, by a server.

``worker.reward.reward_function=.../rl_caption/integrations/easyr1.py:compute_score``,
``worker.reward.reward_function_kwargs='{"url": "http://HOST:8400"}'``. EasyR1 passes no image: ``ground_truth`` is a
JSON object of columns, such as ``{"image": "coco/1.jpg", "references": ["..."]}``.
"""

from collections.abc import Sequence
from typing import Any

from rl_caption.integrations.client import RewardClient, columns_of

REWARD_NAME = "rl_caption"
REWARD_TYPE = "batch"


def compute_score(
    reward_inputs: Sequence[dict[str, Any]], url: str | None = None, **_: Any
) -> list[dict[str, float]]:
    """The reward of each caption (``response``) and its terms, ``{"overall", "TERM": ...}``.

    Raises:
        ServerError: as ``RewardClient.score``.
        ValueError: as ``columns_of``.
    """
    columns = columns_of(
        [reward_input["ground_truth"] for reward_input in reward_inputs], "ground_truth"
    )
    scores = RewardClient(url).score(
        [reward_input["response"] for reward_input in reward_inputs], **columns
    )
    return [
        {"overall": total} | {name: values[row] for name, values in scores.terms.items()}
        for row, total in enumerate(scores.total)
    ]
