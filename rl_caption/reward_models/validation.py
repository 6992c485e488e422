"""Validation of embedding models: retrieval among the images and captions of a split, agreement with the teacher."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from rewards.judging.retrieval import retrieval_recall
from rl_caption.accumulation import dropout_off
from rl_caption.data.base import Row
from rl_caption.reward_models.batch import PixelCache, TokenCache
from rl_caption.reward_models.teacher import Teacher, shared_out
from rl_caption.types import Validation


def embedding_validator(
    accelerator: Accelerator,
    network: nn.Module,
    towers: Sequence[str],
    rows: Sequence[Row],
    pixels: PixelCache,
    tokens: TokenCache,
    batch_size: int,
    teacher: Teacher | None = None,
) -> Callable[[int], Validation]:
    """A function of the step that judges the model as it is; called by every process, with equal results in all.

    All images of ``rows`` and all their references are embedded. ``val/i2t_r1`` and so on are retrieval recalls; a
    tower that the model does not have is the teacher's. ``val/retrieval_r1`` is the mean of recall at 1 both ways.
    ``val/teacher_cosine_image`` and ``..._text`` are mean cosines to the teacher's embeddings.

    Args:
        accelerator: devices and processes.
        network: from inputs by name to raw embeddings by name.
        towers: those that ``network`` has.
        rows: of the validation split.
        pixels, tokens: prepare what the network reads.
        batch_size: images, or captions, at a time in each process.
        teacher: where there is one.
    """
    captions = [caption for row in rows for caption in row["references"]]
    owners = torch.tensor([index for index, row in enumerate(rows) for _ in row["references"]])
    expected: dict[str, Tensor] = {}
    if teacher is not None:
        expected["image"] = shared_out(accelerator, rows, teacher.image_embeddings)
        expected["text"] = shared_out(accelerator, captions, teacher.text_embeddings)

    def embedded(name: str, prepare: Callable[[list], Tensor], items: Sequence) -> Tensor:
        def embed(mine: list) -> Tensor:
            chunks = [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]
            return torch.cat([network({name: prepare(chunk).to(accelerator.device)})[name].float() for chunk in chunks])

        return shared_out(accelerator, items, embed)

    def validate(step: int) -> Validation:
        found = dict(expected)
        with torch.no_grad(), dropout_off(network), accelerator.autocast():
            if "image" in towers:
                found["image"] = embedded("image", lambda mine: torch.stack([pixels(row) for row in mine]), rows)
            if "text" in towers:
                found["text"] = embedded("text", tokens, captions)
        metrics = {
            f"val/teacher_cosine_{tower}": float(F.cosine_similarity(found[tower], expected[tower], dim=-1).mean())
            for tower in towers
            if tower in expected
        }
        recall = retrieval_recall(found["image"], found["text"], owners)
        metrics |= {f"val/{name}": value for name, value in recall.items()}
        metrics["val/retrieval_r1"] = (recall["i2t_r1"] + recall["t2i_r1"]) / 2
        return Validation(metrics)

    return validate
