"""Rewards as metrics: any reward scores the captions that are evaluated; its mean is the metric ``judge/NAME``."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rewards.base import Reward, RewardError, checked_scores
from rl_caption.data.base import reward_inputs
from rl_caption.evaluation.judge import JUDGE, Evaluation, EvaluationError

logger = logging.getLogger(__name__)


def check_judges(judges: Mapping[str, Reward], rows: Sequence[Mapping[str, Any]], source: str) -> None:
    """See to it that ``rows`` have what the judges need, before anything long starts.

    Args:
        judges: name -> reward.
        rows: of the images whose captions are to be judged.
        source: where they come from, for messages, such as ``split 'test'``.

    Raises:
        EvaluationError: which judge, which column the rows lack, or how many image files are not there.
    """
    _, columns = reward_inputs(rows)
    for name, reward in judges.items():
        missing = sorted(reward.columns - columns.keys())
        if "image" in missing:
            raise EvaluationError(
                f"judges.{name}: the reward {reward.__name__!r} looks at images, and {source} has none: judge captions "
                "of a split of data, whose rows have their images"
            )
        if missing:
            raise EvaluationError(
                f"judges.{name}: the reward {reward.__name__!r} needs the columns {missing}, and {source} has "
                f"{list(columns)}"
            )
        if "image" in reward.columns:
            files = [image for image in columns["image"] if isinstance(image, str | Path)]
            lost = [str(file) for file in files if not Path(file).is_file()]
            if lost:
                raise EvaluationError(
                    f"judges.{name}: the reward {reward.__name__!r} looks at images, and {len(lost)} of {len(rows)} of "
                    f"{source} are not there, such as {lost[0]!r}: set data.image_root to their folder"
                )


def add_judges(
    evaluation: Evaluation,
    rows: Sequence[Mapping[str, Any]],
    captions: Mapping[str, str],
    judges: Mapping[str, Reward],
) -> Evaluation:
    """Add what the judges say of the captions, each in one call.

    Args:
        evaluation: of the same captions.
        rows: one for each caption: ``image_id`` and what the judges need of ``references``, ``image``, ``prompt``.
        captions: image id -> caption.
        judges: name -> reward.

    Returns:
        ``evaluation`` with ``judge/NAME``, the mean over the captions in the reward's own range, which is in
        ``bounds``; the scores of each image; and the rewards' signatures.

    Raises:
        RewardError: a judge failed, or a score is not finite; the message names the judge.
    """
    prompts, columns = reward_inputs(rows)
    texts = [captions[row["image_id"]] for row in rows]
    means: dict[str, float] = {}
    per_image = {image_id: dict(values) for image_id, values in evaluation.per_image.items()}
    for name, reward in tqdm(judges.items(), desc="judges", unit="judge", disable=None if judges else True):
        logger.info("scoring %d captions by %s", len(texts), name)
        try:
            scores = checked_scores(reward, reward(prompts, texts, **columns), len(texts))
        except RewardError as error:
            raise RewardError(f"judges.{name}: {error}") from error
        means[JUDGE + name] = math.fsum(scores) / len(scores)
        for row, score in zip(rows, scores, strict=True):
            per_image.setdefault(row["image_id"], {})[JUDGE + name] = score
    return replace(
        evaluation,
        metrics=evaluation.metrics | means,
        signature=signed(evaluation.signature, {name: reward.signature for name, reward in judges.items()}),
        per_image=per_image,
        bounds=evaluation.bounds | {JUDGE + name: reward.bounds for name, reward in judges.items()},
    )


def signed(signature: str, judges: Mapping[str, str]) -> str:
    """The signature of an evaluation with those of its judges (name -> signature), each as ``+judge/NAME[...]``."""
    parts = [f"+{JUDGE}{name}[{own}]" for name, own in judges.items()]
    return signature + "".join(part for part in parts if part not in signature)
