"""OpenRLHF: the reward of a query, by a function in a file or by HTTP."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from rl_caption.integrations.client import RewardClient, columns_of

END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "</s>",
    "<eos>",
    "<|end|>",
)
"""Tokens that end a caption, which OpenRLHF leaves in a query."""
TAG = re.compile(r"</?[^<>\s]+>$")


def caption_of(query: str, prompt: str) -> tuple[str, bool]:
    """The caption in a query, which is the prompt, the caption and perhaps ``END_TOKENS``, and whether it ended.

    Raises:
        ValueError: the query does not begin with the prompt, or ends with a token that may be a special one.
    """
    if not query.startswith(prompt):
        raise ValueError(f"the query {query!r:.80} does not begin with its prompt {prompt!r:.80}")
    return cut_end_tokens(query[len(prompt) :])


def cut_end_tokens(text: str) -> tuple[str, bool]:
    """A caption without ``END_TOKENS``, and whether there was one. Raises ``ValueError`` for other tokens there."""
    caption = text.rstrip()
    while ending := next((token for token in END_TOKENS if caption.endswith(token)), None):
        caption = caption.removesuffix(ending).rstrip()
    if tag := TAG.search(caption):
        raise ValueError(
            f"the caption ends with {tag[0]!r}, an unknown token: expected none, or {', '.join(END_TOKENS)}"
        )
    return caption.strip(), caption != text.rstrip()


@lru_cache(maxsize=1)
def _client() -> RewardClient:
    return RewardClient()


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any
) -> dict[str, Any]:
    """``--reward.remote_url FILE.py``: rewards of queries, by the server at ``RL_CAPTION_URL``.

    A label is a JSON object of columns, such as ``{"image": "coco/1.jpg", "references": ["..."]}``. Raises
    ``ServerError`` and ``ValueError``.
    """
    captions = [caption_of(query, prompt) for query, prompt in zip(queries, prompts, strict=True)]
    columns = columns_of(labels, "label") | {"finished": [ended for _, ended in captions]}
    scores = _client().score([caption for caption, _ in captions], **columns)
    return {"rewards": scores.total, "scores": scores.total, "extra_logs": scores.terms}
