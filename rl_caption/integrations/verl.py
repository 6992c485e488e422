"""verl: the reward of one caption, by a server; verl's reward workers have no GPU.

``reward.custom_reward_function.path=.../rl_caption/integrations/verl.py``, ``.name=compute_score``,
``.reward_kwargs.url=http://HOST:8400``. The image and the references travel in ``extra_info``.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rl_caption.integrations.client import RewardClient


@lru_cache(maxsize=8)
def _client(url: str | None) -> RewardClient:
    return RewardClient(url)


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    url: str | None = None,
    columns: tuple[str, ...] = ("image", "image_id", "references"),
    finished: bool | None = None,
    **_: Any,
) -> dict[str, float]:
    """The reward of the caption ``solution_str`` and its terms, ``{"score", "TERM": ...}``.

    Args:
        ground_truth: the references, where ``extra_info`` has none: a list of strings, or one.
        extra_info: columns of the row, such as ``{"image": "coco/1.jpg", "references": ["..."]}``.
        url: of the server; None takes the environment variable ``RL_CAPTION_URL``.
        columns: those of ``extra_info`` that are sent.
        finished: whether the caption ended with EOS, which verl tells its reward managers alone
            (``verl_manager.ServedRewardManager``); None sends nothing, and it counts as ended.

    Raises:
        ServerError: as ``RewardClient.score``.
    """
    row = {name: value for name, value in (extra_info or {}).items() if name in columns}
    if "references" not in row and ground_truth is not None:
        row["references"] = [ground_truth] if isinstance(ground_truth, str) else list(ground_truth)
    if finished is not None:
        row["finished"] = finished
    scores = await _client(url).score_async(
        [solution_str], **{name: [value] for name, value in row.items()}
    )
    return {"score": scores.total[0]} | {name: values[0] for name, values in scores.terms.items()}
