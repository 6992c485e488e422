"""OpenRLHF: the reward of a query, by a function in a file or by HTTP."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rl_caption.integrations.client import RewardClient, columns_of

SPECIAL_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<eos>", "<|end|>")
"""Endings that OpenRLHF leaves in a query."""


def caption_of(query: str, prompt: str) -> str:
    """The caption in a query, which is the prompt, the caption, and perhaps special tokens of the model.

    Raises:
        ValueError: the query does not begin with the prompt.
    """
    if not query.startswith(prompt):
        raise ValueError(f"the query {query!r:.80} does not begin with its prompt {prompt!r:.80}")
    caption = query[len(prompt) :].rstrip()
    while ending := next((token for token in SPECIAL_TOKENS if caption.endswith(token)), None):
        caption = caption.removesuffix(ending).rstrip()
    return caption.strip()


@lru_cache(maxsize=1)
def _client() -> RewardClient:
    return RewardClient()


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any) -> dict[str, Any]:
    """``--reward.remote_url FILE.py``: rewards of queries, by the server at ``RL_CAPTION_URL``.

    A label is a JSON object of columns, such as ``{"image": "coco/1.jpg", "references": ["..."]}``. Raises
    ``ServerError`` and ``ValueError``.
    """
    columns = columns_of(labels, "label")
    captions = [caption_of(query, prompt) for query, prompt in zip(queries, prompts, strict=True)]
    scores = _client().score(captions, **columns)
    return {"rewards": scores.total, "scores": scores.total, "extra_logs": scores.terms}
