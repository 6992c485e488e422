"""Scores of captions of rows by a reward."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rewards.base import Reward, score_captions
from rewards.mixed import MixedReward
from rl_caption.data.base import Row, reward_inputs
from rl_caption.evaluation.confidence import Floats


class RowCaption(NamedTuple):
    """A caption of row ``row``; ``finished`` says whether it ended with EOS."""

    row: int
    text: str
    finished: bool = True


Score = Callable[[Sequence[RowCaption]], Floats]
"""[N] scores of N captions."""


class Scorer:
    """Scores captions of ``rows`` by ``reward``; each distinct caption of a row is scored once.

    ``name`` is the reward's key in messages.
    """

    def __init__(
        self, reward: Reward | MixedReward, rows: Sequence[Row], name: str = "reward"
    ) -> None:
        self.reward, self.rows, self.name = reward, rows, name
        self.scores: dict[RowCaption, float] = {}

    def __call__(self, captions: Sequence[RowCaption]) -> Floats:
        """[N] scores of N captions. Raises ``RewardError``."""
        new = [
            caption for caption in dict.fromkeys(captions) if caption not in self.scores
        ]
        if new:
            rows = [self.rows[caption.row] for caption in new]
            prompts, columns = reward_inputs(
                rows, [caption.finished for caption in new]
            )
            texts = [caption.text for caption in new]
            scores = score_captions(self.reward, self.name, prompts, texts, columns)
            self.scores |= zip(new, scores, strict=True)
        return np.array([self.scores[caption] for caption in captions], np.float64)
