"""Requests of many workers, scored by few calls of one reward."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from PIL import Image

from rewards.base import leaf_rewards
from rewards.mixed import MixedReward
from rewards.registry import REWARDS
from rl_caption.integrations.client import Scores

RELATIVE = frozenset({"bertscore", "consensus", "diversity"})
"""Rewards of the registry whose score of a caption may depend on the other captions of a call."""


class QueueFull(RuntimeError):
    """More captions wait than the queue takes; a request may succeed later."""


@dataclass(eq=False)
class ScoringRequest:
    """N captions with columns of N rows; their scores or their error when they have been scored."""

    captions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]
    result: Scores | BaseException | None = None


def scores_rows_alone(reward: MixedReward) -> bool:
    """Whether the score of a caption is the same whatever else is in the call.

    False for rewards that are not of this package, of which that is not known.
    """
    targets = {
        f"{type(term).__module__}:{type(term).__name__}"
        for term in leaf_rewards(reward)
    }
    known = {target for name, target in REWARDS.items() if name not in RELATIVE}
    return reward.normalize == "none" and targets <= known


def score_rows(
    reward: MixedReward, captions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> Scores:
    """Score N captions by one call. Raises ``RewardError``."""
    others = {name: rows for name, rows in columns.items() if name != "prompts"}
    terms = reward.terms(columns.get("prompts"), captions, **others)
    return Scores(reward.combine(terms), terms)


class BatchingScorer:
    """Scores requests in the order in which they came, several by one call of the reward.

    Requests share a call only where that changes no score (``scores_rows_alone``). The request at
    the head of the queue takes along what has arrived behind it; where a shared call fails, each of
    its requests is scored alone, so that the others do not fail.

    Args:
        reward: the mixture.
        max_batch: captions of a call; a larger request has a call of its own.
        window: seconds that a request waits for others when the reward is idle.
        max_pending: captions that may wait.
    """

    def __init__(
        self, reward: MixedReward, max_batch: int, window: float, max_pending: int
    ) -> None:
        self.reward, self.shares_calls = reward, scores_rows_alone(reward)
        self.max_batch, self.window, self.max_pending = max_batch, window, max_pending
        self.thread = ThreadPoolExecutor(
            1
        )  # each further one would keep memory of its own
        self.turn = asyncio.Lock()
        self.queue: list[ScoringRequest] = []
        self.pending = 0

    def warm_up(self) -> None:
        """Score a caption, so that no request waits until models are loaded."""
        columns: dict[str, list[Any]] = {
            "references": [["a dog"]],
            "image": [Image.new("RGB", (64, 64))],
            "image_id": ["0"],
        }
        if self.reward.columns <= columns.keys():
            self.thread.submit(
                score_rows, self.reward, ["a dog runs"], columns
            ).result()

    async def score(
        self, captions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> Scores:
        """Wait for the scores of N captions.

        Raises:
            QueueFull: too many captions wait. An empty queue takes a request of any size.
            RewardError: the reward failed.
        """
        if self.pending and self.pending + len(captions) > self.max_pending:
            raise QueueFull(
                f"{self.pending} captions wait, of at most {self.max_pending}"
            )
        idle = not self.turn.locked()
        request = ScoringRequest(captions, columns)
        self.queue.append(request)
        self.pending += len(captions)
        try:
            async with self.turn:
                if request.result is None:
                    if idle and self.shares_calls:
                        await asyncio.sleep(self.window)
                    await self._score_batch(self._next_batch())
        finally:
            self.pending -= len(captions)
        if isinstance(request.result, Scores):
            return request.result
        assert request.result is not None
        raise request.result

    def _next_batch(self) -> list[ScoringRequest]:
        """Remove the oldest requests that fit into one call from the queue."""
        count, size, columns = 0, 0, self.queue[0].columns.keys()
        for request in self.queue:
            size += len(request.captions)
            fits = self.shares_calls and size <= self.max_batch
            if count and not (fits and request.columns.keys() == columns):
                break
            count += 1
        batch, self.queue = self.queue[:count], self.queue[count:]
        return batch

    async def _score_batch(self, batch: list[ScoringRequest]) -> None:
        captions = [caption for request in batch for caption in request.captions]
        columns = {
            name: [row for request in batch for row in request.columns[name]]
            for name in batch[0].columns
        }
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(
            self.thread, score_rows, self.reward, captions, columns
        )
        (scores,) = await asyncio.gather(call, return_exceptions=True)
        if isinstance(scores, BaseException):
            if len(batch) == 1:
                batch[0].result = scores
                return
            for request in batch:
                await self._score_batch([request])
            return
        start = 0
        for request in batch:
            rows = slice(start, start + len(request.captions))
            terms = {name: values[rows] for name, values in scores.terms.items()}
            request.result = Scores(scores.total[rows], terms)
            start = rows.stop
