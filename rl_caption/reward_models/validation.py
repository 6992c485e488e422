"""Validation of embedding models: retrieval among the images and captions of a split, agreement with the teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from rl_caption.config.build import ConfigError
from rl_caption.data.base import Row
from rl_caption.reward_models.batch import PixelCache, TokenCache, triplet_texts
from rl_caption.reward_models.retrieval import retrieval_recall
from rl_caption.reward_models.teacher import Teacher, shared_out
from rl_caption.reward_models.triplets import Triplet
from rl_caption.training.engines import autocast, dropout_off
from rl_caption.training.loop import NonFiniteError
from rl_caption.types import Validation

MOST_PIXELS = 256 * 2**20
"""Bytes of a process for pixels of validation images, beside ``data.cache_mb``: 1,783 images of 224 pixels a side."""


def embedding_validator(
    accelerator: Accelerator,
    network: nn.Module,
    towers: Sequence[str],
    rows: Sequence[Row],
    pixels: PixelCache,
    tokens: TokenCache,
    batch_size: int,
    teacher: Teacher | None = None,
    triplets: Sequence[Triplet | None] | None = None,
) -> Callable[[int, Mapping[str, float]], Validation]:
    """A function of the step that judges the model as it is; called by every process, with equal results in all.

    All images of ``rows`` and all their references are embedded, equal captions once. ``val/i2t_r1`` and so on are
    retrieval recalls; a tower that the model does not have is the teacher's. ``val/retrieval_r1`` is the mean of recall
    at 1 both ways. ``val/teacher_cosine_image`` and ``..._text`` are mean cosines to the teacher's embeddings.
    ``val/specificity_positive`` and ``..._negative`` are the shares of triplets whose texts are in order.

    Args:
        accelerator: devices and processes.
        network: from inputs by name to raw embeddings by name.
        towers: those that ``network`` has.
        rows: of the validation split.
        pixels, tokens: prepare what the network reads.
        batch_size: images, or captions, at a time in each process.
        teacher: where there is one.
        triplets: one for each row, or None; no argument leaves these shares out.

    Raises:
        ConfigError: no triplet counts.
        NonFiniteError: an embedding is NaN or infinite; by the function that is returned, or at once for the teacher's.
    """
    texts = _Texts(rows)
    pixels = validation_pixels(pixels, -(-len(rows) // accelerator.num_processes))
    grown, fits = ({}, torch.zeros(0)) if triplets is None else _grown_texts(triplets, tokens)
    expected = {} if teacher is None else _teachers(accelerator, teacher, rows, texts)

    def embedded(name: str, prepare: Callable[[list], Tensor], items: Sequence) -> Tensor:
        def embed(mine: list) -> Tensor:
            chunks = [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]
            return torch.cat([network({name: prepare(chunk).to(accelerator.device)})[name].float() for chunk in chunks])

        return shared_out(accelerator, items, embed)

    def validate(step: int, logged: Mapping[str, float]) -> Validation:
        """Embed the split with the network as it is at ``step``."""
        found = dict(expected)
        with torch.no_grad(), dropout_off(network), autocast(accelerator):
            if "image" in towers:
                found["image"] = embedded("image", lambda mine: torch.stack([pixels(row) for row in mine]), rows)
            if "text" in towers:
                found["text"] = embedded("text", tokens, texts.distinct)[texts.places]
            for name in grown:
                found[name] = embedded("text", tokens, grown[name])
        remedy = "a lower train.lr, or train.mixed_precision bf16 or no, is the usual remedy"
        _check_finite(found, f"validation at step {step}: the model's", remedy)
        metrics = _metrics(found, expected, towers, texts.owners)
        return Validation(metrics if triplets is None else metrics | _specificity(found, fits.bool()))

    return validate


def _grown_texts(triplets: Sequence[Triplet | None], tokens: TokenCache) -> tuple[dict[str, list[str]], Tensor]:
    """``triplet_texts``, of which one at least counts."""
    grown, fits = triplet_texts(triplets, tokens)
    if not fits.any():
        raise ConfigError(
            f"none of {len(triplets)} validation captions has two details within {tokens.context_length} tokens: "
            "specificity wants long captions (data.long_captions: true)"
        )
    return grown, fits


class _Texts:
    """The references of R rows, equal ones once."""

    def __init__(self, rows: Sequence[Row]) -> None:
        captions = [caption for row in rows for caption in row["references"]]
        self.owners = torch.tensor([index for index, row in enumerate(rows) for _ in row["references"]])
        """[N] the row of each reference."""
        self.distinct = list(dict.fromkeys(captions))
        position = {caption: index for index, caption in enumerate(self.distinct)}
        self.places = [position[caption] for caption in captions]
        """[N] where each reference is in ``distinct``."""


def _teachers(accelerator: Accelerator, teacher: Teacher, rows: Sequence[Row], texts: _Texts) -> dict[str, Tensor]:
    """The teacher's embeddings of images and references, checked."""
    found = {
        "image": shared_out(accelerator, rows, teacher.image_embeddings),
        "text": shared_out(accelerator, texts.distinct, teacher.text_embeddings)[texts.places],
    }
    _check_finite(found, "the teacher's", "a wider teacher.precision, fp32, is the usual remedy")
    return found


def _metrics(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], towers: Sequence[str], owners: Tensor
) -> dict[str, float]:
    metrics = {
        f"val/teacher_cosine_{tower}": float(F.cosine_similarity(found[tower], expected[tower], dim=-1).mean())
        for tower in towers
        if tower in expected
    }
    recall = retrieval_recall(found["image"], found["text"], owners)
    metrics |= {f"val/{name}": value for name, value in recall.items()}
    return metrics | {"val/retrieval_r1": (recall["i2t_r1"] + recall["t2i_r1"]) / 2}


def _specificity(found: Mapping[str, Tensor], fits: Tensor) -> dict[str, float]:
    """Shares of triplets where the true detail raises the cosine, and where the false one lowers it; ties fail."""
    image = found["image"][fits]
    base, positive, negative = (
        F.cosine_similarity(image, found[name][fits], dim=-1) for name in ("base", "positive", "negative")
    )
    rates = {"positive": float((positive > base).float().mean()), "negative": float((base > negative).float().mean())}
    return {f"val/specificity_{name}": rate for name, rate in rates.items()} | {
        "val/specificity": sum(rates.values()) / 2
    }


def validation_pixels(pixels: PixelCache, images: int) -> PixelCache:
    """What prepares the ``images`` that this process validates: with memory for all of them where that is little.

    They are wanted at every validation, so training images, which may fill ``pixels``, must not crowd them out.
    """
    needed = images * 3 * pixels.preprocessing.size**2
    return PixelCache(pixels.preprocessing, needed) if needed <= MOST_PIXELS else pixels


def _check_finite(found: Mapping[str, Tensor], whose: str, remedy: str) -> None:
    for tower, rows in found.items():
        bad = int((~rows.isfinite().all(dim=1)).sum())
        if bad:
            raise NonFiniteError(f"{whose} {tower} embeddings: {bad} of {len(rows)} are NaN or infinite; {remedy}")
