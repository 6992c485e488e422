"""CHAIR-i and CHAIR-s of captions, and the share of the images' objects that they mention.

Source: Rohrbach et al., "Object Hallucination in Image Captioning", EMNLP 2018, equations 1 and 2,
computed over the whole set as in its code, LisaAnne/Hallucination at ``585f2d9``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewards.text.chair import Chair
from rl_caption.data.base import reward_inputs
from rl_caption.evaluation.metrics import Evaluation

CHAIR_KEYS = ("CHAIR-i", "CHAIR-s", "objects/recall")


def add_chair(
    evaluation: Evaluation,
    rows: Sequence[Mapping[str, Any]],
    captions: Mapping[str, str],
    chair: Chair,
) -> Evaluation:
    """Return ``evaluation`` with the metrics ``CHAIR_KEYS``, each in [0, 1].

    Args:
        evaluation: of ``captions``.
        rows: the images of the captions, in any order, with ``image_id`` and the columns that
            ``chair`` needs.
        captions: image id -> caption.
        chair: finds the objects; its ``measure`` has no effect.

    Raises:
        RewardError: the objects of an image are not known.
    """
    by_id = {row["image_id"]: row for row in rows}
    # Like all other counts, in the order of the captions.
    _, columns = reward_inputs([by_id[image_id] for image_id in captions])
    counts = np.array(chair.counts(list(captions.values()), columns), np.float64)
    total = chair_of_sums(counts.sum(axis=0, keepdims=True), len(captions))[0].tolist()
    per_image = {
        image_id: dict(zip(CHAIR_KEYS, scores, strict=True))
        for image_id, scores in zip(
            captions, chair_of_sums(counts, 1).tolist(), strict=True
        )
    }
    return evaluation.with_metrics(
        dict(zip(CHAIR_KEYS, total, strict=True)),
        per_image,
        f"{evaluation.signature}+CHAIR[{chair.source}]",
        counts=evaluation.counts | {"chair": counts},
    )


def chair_of_sums(sums: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """``CHAIR_KEYS``, [S, 3], of [S, 5] counts (``rewards.text.chair.ChairCounts``) summed over
    ``count`` captions.
    """
    wrong, mentions, captions, recalled, objects = sums.T
    return np.stack(
        [
            wrong / np.maximum(mentions, 1),
            captions / count,
            recalled / np.maximum(objects, 1),
        ],
        axis=1,
    )
