"""Requests of many workers, scored by few calls of one reward."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rewards.base import RewardError, leaf_rewards
from rewards.mixed import MixedReward
from rewards.registry import REWARDS
from rl_caption.integrations.client import Scores

RELATIVE = frozenset({"bertscore", "consensus", "diversity", "retrieval"})
"""Rewards of the registry whose score of a caption may depend on the other captions of a call."""


class QueueFull(RuntimeError):
    """More captions wait than the queue takes; a request may succeed later."""


@dataclass(eq=False)
class ScoringRequest:
    """N captions that wait for their scores, with columns of N rows."""

    captions: list[str]
    columns: dict[str, list[Any]]
    result: asyncio.Future[Scores] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


def scores_rows_alone(reward: MixedReward) -> bool:
    """Whether the score of a caption is the same whatever else is in the call, so that requests may share one.

    Of rewards that are not of this package that is not known: False.
    """
    classes = {target: name for name, target in REWARDS.items()}
    names = [
        classes.get(f"{type(term).__module__}:{type(term).__name__}", "")
        for term in leaf_rewards(reward)
    ]
    return reward.normalize == "none" and all(name and name not in RELATIVE for name in names)


def score_request(
    reward: MixedReward, captions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> Scores:
    """Score N captions by one call. Raises ``RewardError``; prompts are the column ``prompts``, if there is one."""
    others = {name: rows for name, rows in columns.items() if name != "prompts"}
    terms = reward.terms(columns.get("prompts"), captions, **others)
    return Scores(reward.combine(terms), terms)


class BatchingScorer:
    """Scores requests in the order in which they came, several by one call of the reward where that changes no score.

    Calls take place in one thread; meanwhile the event loop takes further requests. A request whose
    scores fail does not fail those that shared its call.

    Args:
        reward: the mixture.
        max_batch: captions of a call; a larger request has a call of its own.
        window: seconds that the first request waits for others when the reward is idle.
        max_pending: captions that may wait.
    """

    def __init__(
        self, reward: MixedReward, max_batch: int, window: float, max_pending: int
    ) -> None:
        self.reward, self.max_batch, self.window, self.max_pending = (
            reward,
            max_batch,
            window,
            max_pending,
        )
        self.shares_calls = scores_rows_alone(reward)
        # One thread for all calls: each further one would keep memory of its own for the reward's tensors.
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
        self.queue: deque[ScoringRequest] = deque()
        self.arrived = asyncio.Event()
        self.pending = 0
        self.calls = 0
        """Calls of the reward so far."""

    async def score(self, captions: list[str], columns: dict[str, list[Any]]) -> Scores:
        """Wait for the scores of N captions.

        Raises:
            QueueFull: ``max_pending`` captions are waiting. A request larger than that is taken by an empty queue.
            RewardError: the reward failed.
        """
        if self.pending and self.pending + len(captions) > self.max_pending:
            raise QueueFull(
                f"captions that wait: {self.pending}, of at most {self.max_pending} (max_pending)"
            )
        request = ScoringRequest(captions, columns)
        self.pending += len(captions)
        self.queue.append(request)
        self.arrived.set()
        try:
            return await request.result
        finally:
            self.pending -= len(captions)

    async def run(self) -> None:
        """Score requests until cancelled."""
        while True:
            if not self.queue:
                self.arrived.clear()
                await self.arrived.wait()
                if self.shares_calls and self.window:
                    await asyncio.sleep(self.window)
            batch = self._next_batch()
            if not batch:
                continue
            (outcome,) = await asyncio.gather(self._call(batch), return_exceptions=True)
            if isinstance(outcome, BaseException) and len(batch) > 1:  # whose fault it is
                for request in batch:
                    (outcome,) = await asyncio.gather(self._call([request]), return_exceptions=True)
                    _answer([request], outcome)
            else:
                _answer(batch, outcome)

    def _next_batch(self) -> list[ScoringRequest]:
        """The oldest requests that fit into one call; those whose sender has gone away are dropped."""
        batch: list[ScoringRequest] = []
        size = 0
        while self.queue:
            request = self.queue[0]
            if batch and not (
                self.shares_calls
                and size + len(request.captions) <= self.max_batch
                and request.columns.keys() == batch[0].columns.keys()
            ):
                break
            self.queue.popleft()
            if not request.result.cancelled():
                batch.append(request)
                size += len(request.captions)
        return batch

    async def _call(self, batch: Sequence[ScoringRequest]) -> Scores:
        self.calls += 1
        captions = [caption for request in batch for caption in request.captions]
        columns = {
            name: [row for request in batch for row in request.columns[name]]
            for name in batch[0].columns
        }
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self.thread, score_request, self.reward, captions, columns
        )

    async def failing_row(
        self, captions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> int | None:
        """``failing_row`` of the reward, between two of its calls."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.thread, failing_row, self.reward, captions, columns)


def _answer(batch: Sequence[ScoringRequest], outcome: Scores | BaseException) -> None:
    """Give the requests of a call their shares of its scores, or its error."""
    start = 0
    for request in batch:
        end = start + len(request.captions)
        if request.result.cancelled():
            pass
        elif isinstance(outcome, BaseException):
            request.result.set_exception(outcome)
        else:
            terms = {name: scores[start:end] for name, scores in outcome.terms.items()}
            request.result.set_result(Scores(outcome.total[start:end], terms))
        start = end


def failing_row(
    reward: MixedReward, captions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> int | None:
    """The first row that fails by itself, found by bisection; None where none does, or rows do not score alone."""
    if not scores_rows_alone(reward):
        return None

    def fails(start: int, end: int) -> bool:
        try:
            score_request(
                reward,
                captions[start:end],
                {name: rows[start:end] for name, rows in columns.items()},
            )
        except RewardError:
            return True
        return False

    start, end = 0, len(captions)
    while end - start > 1:
        middle = (start + end) // 2
        start, end = (start, middle) if fails(start, middle) else (middle, end)
    return start if captions and fails(start, end) else None
