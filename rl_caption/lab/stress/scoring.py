"""Scores of captions of rows by a reward, by held-out judges, and by the oracle of the generated world."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rewards.base import Reward, RewardError, score_captions
from rewards.mixed import MixedReward
from rl_caption.data.base import Row, reward_inputs
from rl_caption.data.scenes import oracle
from rl_caption.errors import ConfigError
from rl_caption.evaluation.confidence import Floats

ORACLE = "oracle F1"
"""Heading of the gold score of the generated world."""


class RowCaption(NamedTuple):
    """A caption of row ``row``; ``finished`` says whether it ended with EOS."""

    row: int
    text: str
    finished: bool = True


class Scorer:
    """Scores captions of ``rows`` by ``reward``; each distinct caption of a row is scored once.

    Raises ``ConfigError`` where the reward needs a column that the rows lack; ``name`` is its key in messages.
    """

    def __init__(self, reward: Reward | MixedReward, rows: Sequence[Row], name: str = "reward") -> None:
        missing = sorted(reward.columns - {"finished"} - reward_inputs(rows)[1].keys())
        if missing:
            raise ConfigError(f"{name} needs the columns {missing}, which not every row of the data has")
        self.reward, self.rows, self.name = reward, rows, name
        self.scores: dict[RowCaption, float] = {}

    def __call__(self, captions: Sequence[RowCaption]) -> Floats:
        """[N] scores of N captions. ``RewardError`` names the first image and caption on which the reward fails."""
        new = [caption for caption in dict.fromkeys(captions) if caption not in self.scores]
        if new:
            try:
                scores = self._score(new)
            except RewardError:
                for caption in new:
                    try:
                        self._score([caption])
                    except RewardError as error:
                        image = self.rows[caption.row]["image_id"]
                        raise RewardError(f"image {image!r}, caption {caption.text!r}: {error}") from error
                raise
            self.scores |= zip(new, scores, strict=True)
        return np.array([self.scores[caption] for caption in captions], np.float64)

    def _score(self, captions: Sequence[RowCaption]) -> list[float]:
        rows = [self.rows[caption.row] for caption in captions]
        prompts, columns = reward_inputs(rows, [caption.finished for caption in captions])
        return score_captions(self.reward, self.name, prompts, [caption.text for caption in captions], columns)


class OracleReward:
    """The oracle's F1 of captions of generated scenes as a ``Reward``, in [0, 1] (docs/scenes.md)."""

    __name__ = "oracle"
    columns: frozenset[str] = frozenset({"image_id"})
    bounds = (0.0, 1.0)
    signature = "scenes-oracle-f1"

    def __init__(self, rows: Iterable[Row]) -> None:
        self.scenes = {row["image_id"]: row["scene"] for row in rows}

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score N captions by the column ``image_id``."""
        pairs = zip(completions, columns["image_id"], strict=True)
        return [oracle(text, self.scenes[image_id]).f1 for text, image_id in pairs]


def gold_scorers(rows: Sequence[Row], judges: Mapping[str, Reward]) -> dict[str, Scorer]:
    """What captions are judged by: the oracle where all rows are generated scenes, then the ``judges``, by heading."""
    gold: dict[str, Scorer] = {}
    if all(row.get("scene") is not None for row in rows):
        gold[ORACLE] = Scorer(OracleReward(rows), rows, "oracle")
    return gold | {name: Scorer(judge, rows, f"judges.{name}") for name, judge in judges.items()}
