"""Captions of generated scenes, whose truth is known: references and hard negatives, rated by the
oracle.
"""

from collections.abc import Sequence

from rewards.text.tokenize import tokenize
from rl_caption.config.build import build_data, usable_split
from rl_caption.data.base import DataError, Row
from rl_caption.data.scenes import hard_negatives, oracle
from rl_caption.lab.meta_evaluation.config import ScenesConfig
from rl_caption.lab.meta_evaluation.sets import Judged, JudgementSet


def scenes_sets(config: ScenesConfig, seed: int) -> list[JudgementSet]:
    """Read the scenes of a configuration; see ``rate_captions``."""
    data = build_data(config.data)
    return rate_captions(
        data.split(usable_split(data, config.split))[: config.max_images], seed
    )


def rate_captions(rows: Sequence[Row], seed: int = 0) -> list[JudgementSet]:
    """Collect the captions of R scenes, rate them by the oracle's F1, and pair references with
    their hard negatives.

    Rated are, for each scene, its first reference and hard negatives of it (at most one of each
    kind, chosen by ``seed``). Metrics see the other references, less those with the same tokens as
    the first.

    All rated captions are lower-case tokens joined by spaces, as a captioner writes them. The
    oracle reads both forms alike.

    Raises:
        DataError: a row has no scene, or fewer than two different references.
    """
    rated: list[Judged] = []
    pairs: list[Judged] = []
    for row in rows:
        image_id, image, scene = row["image_id"], row["image"], row.get("scene")
        if scene is None:
            raise DataError(
                f"image {image_id!r} has no scene: only data.format scenes knows it"
            )
        true, *rest = row["references"]
        others = [text for text in rest if _plain(text) != _plain(true)]
        if not others:
            raise DataError(
                f"image {image_id!r} has no reference besides the judged one"
            )
        negatives = [
            (kind, _plain(text)) for kind, text in hard_negatives(scene, true, seed)
        ]
        for text in dict.fromkeys([_plain(true), *(text for _, text in negatives)]):
            rating = oracle(text, scene).f1
            rated.append(
                Judged(image_id, [text], rating, references=[others], image=image)
            )
        for kind, false in negatives:
            captions = _plain(true), false
            pairs.append(
                Judged(image_id, captions, kind=kind, references=[others], image=image)
            )
    convention = "the rating is the F1 of the facts of a caption against the scene"
    judgement_sets = [
        JudgementSet("scenes, oracle F1", rated, convention, within_images=True)
    ]
    if pairs:
        convention = (
            "the reference scores higher than the hard negative made from it; equal scores are "
            "wrong"
        )
        judgement_sets.append(JudgementSet("scenes, hard negatives", pairs, convention))
    return judgement_sets


def _plain(text: str) -> str:
    return " ".join(tokenize(text))
