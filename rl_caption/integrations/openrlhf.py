"""OpenRLHF: a reward that asks ``rl-caption serve`` at ``RL_CAPTION_URL`` (docs/serve.md)."""

import re
from collections.abc import Sequence
from typing import Any

from rl_caption.integrations.client import RewardClient, columns_of

SPECIAL_TOKENS = re.compile(r"(?:<[^<>\s]+>)+(?!\Z)")
LAST_TOKENS = re.compile(r"(?:\s*<[^<>\s]+>)+\s*$")


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any
) -> dict[str, Any]:
    """Rewards of N queries. A label is a JSON object of columns (``columns_of``).
    Raises ``ServerError``.
    """
    texts = [after_prompt(*pair) for pair in zip(queries, prompts, strict=True)]
    captions = [LAST_TOKENS.sub("", text) for text in texts]
    finished = [LAST_TOKENS.search(text) is not None for text in texts]
    scores = RewardClient().score(captions, **columns_of(labels), finished=finished)
    return {"rewards": scores.total, "scores": scores.total, "extra_logs": scores.terms}


def after_prompt(query: str, prompt: str) -> str:
    """The text after the prompt in a query, whose image tokens may be repeated. Raises
    ``ValueError`` where the query does not contain the prompt.
    """
    end = 0
    for piece in SPECIAL_TOKENS.split(prompt):
        start = query.find(piece, end)
        if start < 0:
            raise ValueError(
                f"the query {query!r:.80} does not contain its prompt {prompt!r:.80}"
            )
        end = start + len(piece)
    return query[end:].strip()
