"""Requests of many workers, scored by few calls of one reward."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rewards.base import leaf_rewards
from rewards.mixed import MixedReward
from rewards.registry import REWARDS
from rl_caption.integrations.client import Scores

RELATIVE = frozenset({"bertscore", "consensus", "diversity"})
"""Rewards of the registry whose score of a caption may depend on the other captions of a call."""


class QueueFull(RuntimeError):
    """The queue of captions is full; the same request may succeed later."""


@dataclass(eq=False)
class ScoringRequest:
    """N captions with columns of N rows, and the future of their scores."""

    captions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    scores: asyncio.Future[Scores]


def scores_rows_alone(reward: MixedReward) -> bool:
    """Whether the score of a caption is the same whatever else is in the call.

    False for rewards outside this package, for which it is not known.
    """
    targets = {
        f"{type(term).__module__}:{type(term).__name__}"
        for term in leaf_rewards(reward)
    }
    independent = {target for name, target in REWARDS.items() if name not in RELATIVE}
    return reward.normalize == "none" and targets <= independent


class BatchingScorer:
    """Scores requests in the order of arrival, several by one call of the reward.

    Requests share a call only where that changes no score (``scores_rows_alone``). The
    request at the head of the queue is batched with the waiting ones behind it. Where a
    shared call fails, each of its requests is scored alone, so that the others do not
    fail.

    Args:
        reward: the mixture.
        max_batch: most captions of a call; a larger request has a call of its own.
        max_pending: most captions that may wait.
    """

    def __init__(self, reward: MixedReward, max_batch: int, max_pending: int) -> None:
        self.reward, self.shares_calls = reward, scores_rows_alone(reward)
        self.max_batch, self.max_pending = max_batch, max_pending
        # One thread: each further thread would keep memory of its own.
        self.thread = ThreadPoolExecutor(1)
        self.turn = asyncio.Lock()
        self.queue: deque[ScoringRequest] = deque()
        self.pending = 0

    async def score(
        self, captions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> Scores:
        """Queue N captions and wait for their scores.

        Raises:
            QueueFull: too many captions wait. An empty queue takes a request of any size.
            RewardError: the reward failed.
        """
        if self.pending and self.pending + len(captions) > self.max_pending:
            raise QueueFull(
                f"{self.pending} captions wait, of at most {self.max_pending}"
            )
        scores: asyncio.Future[Scores] = asyncio.Future()
        self.queue.append(ScoringRequest(captions, columns, scores))
        self.pending += len(captions)
        try:
            async with self.turn:
                if not scores.done():
                    await self._score_batch(self._next_batch())
        finally:
            self.pending -= len(captions)
        return await scores

    def _next_batch(self) -> list[ScoringRequest]:
        """Remove the oldest requests that fit into one call from the queue."""
        batch = [self.queue.popleft()]
        size, columns = len(batch[0].captions), batch[0].columns.keys()
        while self.shares_calls and self.queue:
            size += len(self.queue[0].captions)
            if size > self.max_batch or self.queue[0].columns.keys() != columns:
                break
            batch.append(self.queue.popleft())
        return batch

    async def _score_batch(self, batch: Sequence[ScoringRequest]) -> None:
        captions = [caption for request in batch for caption in request.captions]
        columns: dict[str, Any] = {"prompts": None}
        for name in batch[0].columns:
            columns[name] = [row for request in batch for row in request.columns[name]]
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self.thread, self._score_rows, captions, columns)
        await asyncio.wait([call])
        error = call.exception()
        if error and len(batch) == 1:
            batch[0].scores.set_exception(error)
            return
        if error:
            for request in batch:
                await self._score_batch([request])
            return
        scores, start = call.result(), 0
        for request in batch:
            rows = slice(start, start + len(request.captions))
            terms = {name: values[rows] for name, values in scores.terms.items()}
            request.scores.set_result(Scores(scores.total[rows], terms))
            start = rows.stop

    def _score_rows(self, captions: list[str], columns: dict[str, Any]) -> Scores:
        terms = self.reward.terms(completions=captions, **columns)
        return Scores(self.reward.combine(terms), terms)
