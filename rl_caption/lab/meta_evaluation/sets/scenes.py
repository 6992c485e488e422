"""Captions of generated scenes, whose truth is known: references and hard negatives,
rated by the oracle.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from rewards.text.tokenize import tokenize
from rl_caption.data.base import Row
from rl_caption.data.scenes import ScenesData, hard_negatives, oracle
from rl_caption.lab.meta_evaluation.sets.base import Files, Judged, JudgementSet


def scenes(
    files: Files, num_images: Annotated[int, Field(ge=1)] = 400, seed: int = 0
) -> list[JudgementSet]:
    """Generate ``num_images`` scenes; rate their captions by the oracle's F1, and pair
    references with hard negatives, which ``seed`` chooses.
    """
    data = ScenesData(
        num_train=0,
        num_val=0,
        num_test=num_images,
        num_unseen=0,
    )
    return rate_captions(data["test"], seed)


def rate_captions(rows: Sequence[Row], seed: int = 0) -> list[JudgementSet]:
    """Rate, for each scene, its first reference and hard negatives of it (at most one
    of each kind, chosen by ``seed``). Metrics see the other references, except
    references with the same tokens as the first.

    All rated captions are lower-case tokens joined by spaces, as a captioner writes
    them. The oracle reads both forms alike.
    """
    rated: list[Judged] = []
    pairs: list[Judged] = []
    for row in rows:
        image_id, image, scene = row["image_id"], row["image"], row["scene"]
        true, *plain = [" ".join(tokenize(text)) for text in row["references"]]
        further = zip(row["references"][1:], plain, strict=True)
        others = [[text for text, words in further if words != true]]
        captions = [true]
        for kind, text in hard_negatives(
            scene,
            row["references"][0],
            seed,
        ):
            captions.append(" ".join(tokenize(text)))
            pair = Judged(
                image_id,
                (true, captions[-1]),
                kind=kind,
                references=others,
                image=image,
            )
            pairs.append(pair)
        for text in dict.fromkeys(captions):
            f1 = oracle(text, scene).f1
            rated.append(
                Judged(
                    image_id,
                    [text],
                    f1,
                    references=others,
                    image=image,
                )
            )
    return [
        JudgementSet(
            "scenes, oracle F1",
            rated,
            "the rating is the F1 of the facts of a caption against the scene",
            within_images=True,
        ),
        JudgementSet(
            "scenes, hard negatives",
            pairs,
            "the reference scores higher than the hard negative made from it; equal scores are "
            "wrong",
        ),
    ]
