"""Validation of embedding models: image-text retrieval in a split, agreement with the
teacher, specificity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from rewards.clip.pretrained import Texts
from rl_caption.data.base import Row
from rl_caption.evaluation.retrieval import retrieval_recall
from rl_caption.reward_models.batch import PairCollate, PixelCache
from rl_caption.reward_models.losses import Objective
from rl_caption.reward_models.task import concatenate
from rl_caption.reward_models.teacher import Teacher, embed_distributed
from rl_caption.reward_models.triplets import Triplet, triplet_texts
from rl_caption.runtime.engines import autocast, dropout_off, print_main
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.types import LOSS, Validation
from rl_caption.training.run import NonFiniteError

DRAWN_AT = -1
"""Step for the draws of captions and positives in the validation loss; no training step
has this number.
"""
REMEDY = "a lower train.lr, or train.mixed_precision bf16 or no, is the usual remedy"


def validation_loss(
    objective: Objective,
    collate: PairCollate,
    size: int,
    validator: EmbeddingValidator,
) -> float:
    """The loss of training on a validation split, in nats: the mean over batches of
    ``size`` rows in the split's order, each process embedding some of them.

    A contrastive loss grows with its batch, so a last batch of fewer rows is left out;
    a split of fewer than ``size`` rows is one batch. Captions and positives are the
    same at every validation, and images are not augmented. The result does not depend
    on how the forward pass is split over micro-batches, of the validator's
    ``batch_size`` rows, and processes.
    """
    collate = replace(collate, pixels=validator.pixels, augmentations=())
    accelerator = validator.accelerator
    device = accelerator.device
    rows = validator.rows
    size = min(size, len(rows))
    starts = range(0, len(rows) - size + 1, size)
    total = 0.0
    for start in starts[accelerator.process_index :: accelerator.num_processes]:
        outputs = []
        targets = []
        for first in range(start, start + size, validator.batch_size):
            chunk = rows[first : min(first + validator.batch_size, start + size)]
            batch = collate([(row, DRAWN_AT) for row in chunk]).to(device)
            embedded = validator.network(batch.inputs)
            outputs.append({name: value.float() for name, value in embedded.items()})
            targets.append(batch.targets)
        with torch.autocast(device.type, enabled=False):  # float32, as in training
            loss, _ = objective(concatenate(outputs), concatenate(targets))
        total += float(loss)
    losses = torch.tensor([total], dtype=torch.float32, device=device)
    return float(accelerator.gather(losses).sum()) / len(starts)


@dataclass
class EmbeddingValidator:
    """Validates an embedding model on a split. Every process must call it; results are
    equal in all.

    All images of ``rows`` and all their references are embedded, equal captions once.
    Metrics, all in [0, 1] or cosines, are

    - ``val/i2t_r1`` and so on, recalls of image-text retrieval, and ``val/retrieval_r1``, the mean
      of recall at 1 both ways. A model of one tower is paired with the teacher's other tower. There
      is no retrieval where a row lacks its image or references;
    - ``val/teacher_cosine_image`` and ``..._text``, mean cosines to the teacher's embeddings;
    - ``val/specificity_positive`` and ``..._negative``, fractions of triplets whose texts score in
      the right order;
    - ``val/hard_negatives``, the fraction of ``negatives`` in which the true caption has the higher
      cosine.

    Args:
        network: maps inputs by name to raw embeddings by name.
        towers: towers of the network, ``image``, ``text`` or both.
        batch_size: images, or captions, of one forward pass of one process.
        triplets: one for each row, or None where its caption has none.
        negatives: (index of a row, true caption, false caption).
        loss: ``validation_loss`` of the training, which gives ``val/loss``.

    Raises:
        ConfigError: no triplet counts.
        NonFiniteError: an embedding of the teacher is NaN or infinite.
    """

    accelerator: Accelerator
    network: nn.Module
    towers: Sequence[str]
    rows: Sequence[Row]
    pixels: PixelCache
    tokens: Texts
    batch_size: int
    teacher: InitVar[Teacher | None] = None
    triplets: Sequence[Triplet | None] | None = None
    negatives: Sequence[tuple[int, str, str]] = ()
    loss: Callable[[EmbeddingValidator], float] | None = None

    def __post_init__(self, teacher: Teacher | None) -> None:
        captions = [caption for row in self.rows for caption in row["references"]]
        counts = [len(row["references"]) for row in self.rows]
        self.owners = np.repeat(np.arange(len(self.rows)), counts)
        self.distinct = list(dict.fromkeys(captions))
        places = {caption: place for place, caption in enumerate(self.distinct)}
        self.repeat = [places[caption] for caption in captions]
        cut = self.tokens.too_long(captions) if "text" in self.towers else 0
        if cut:
            print_main(
                self.accelerator,
                f"{cut} of {len(captions)} validation captions have more than "
                f"{self.tokens.context_length} tokens (the model's context_length) and lose their "
                "end, as training captions do",
            )
        self.grown, self.fits = triplet_texts(self.triplets or (), self.tokens)
        if self.triplets is not None and not self.fits.any():
            raise ConfigError(
                f"none of {len(self.triplets)} validation captions has two details within "
                f"{self.tokens.context_length} tokens: the task specificity needs long captions "
                "(data.long_captions: true)"
            )
        self.paired = all("image" in row and row["references"] for row in self.rows)
        if not self.paired:
            self.negatives = ()
        needed = ("image", "text") if self.paired else self.towers
        self.expected: dict[str, Tensor] = {}
        if teacher is not None:
            for tower in needed:
                embed = partial(teacher.embed, tower)
                self.expected[tower] = self._embed_all(tower, embed)
        remedy = "teacher.precision fp32 is the usual remedy"
        _check_finite(self.expected, "the teacher's", remedy)

    def __call__(self, step: int, logged: Mapping[str, float]) -> Validation:
        """Embed the split with the network at ``step``, and compute the metrics. Raises
        ``NonFiniteError`` where an embedding or the loss is not finite.
        """
        metrics = {}
        with torch.no_grad(), dropout_off(self.network), autocast(self.accelerator):
            embeddings = self.expected | self._embeddings()
            if self.loss is not None:
                metrics[LOSS] = self.loss(self)
        where = f"validation at step {step}:"
        _check_finite(embeddings, f"{where} the model's", REMEDY)
        if not math.isfinite(metrics.get(LOSS, 0.0)):
            raise NonFiniteError(f"{where} the loss is {metrics[LOSS]}; {REMEDY}")
        for tower in self.towers:
            if tower in self.expected:
                cosines = F.cosine_similarity(
                    embeddings[tower], self.expected[tower], dim=-1
                )
                metrics[f"val/teacher_cosine_{tower}"] = float(cosines.mean())
        if self.paired:
            images = embeddings["image"].numpy()
            texts = embeddings["text"].numpy()
            recall = retrieval_recall(images, texts, self.owners)
            metrics |= {f"val/{name}": value for name, value in recall.items()}
            metrics["val/retrieval_r1"] = (recall["i2t_r1"] + recall["t2i_r1"]) / 2
        if self.negatives:
            opposed = embeddings["image"][[row for row, _, _ in self.negatives]]
            metrics["val/hard_negatives"] = _nearer(
                opposed, embeddings["true"], embeddings["false"]
            )
        if self.triplets is not None:
            image, base, positive, negative = (
                embeddings[name][self.fits.bool()]
                for name in ("image", "base", "positive", "negative")
            )
            true = _nearer(image, positive, base)
            false = _nearer(image, base, negative)
            metrics["val/specificity_positive"] = true
            metrics["val/specificity_negative"] = false
            metrics["val/specificity"] = (true + false) / 2
        return Validation(metrics)

    def _embeddings(self) -> dict[str, Tensor]:
        """Embeddings of images, captions, texts of triplets, and true and false
        captions of negatives, by name.
        """
        embeddings = {}
        for tower in self.towers:
            embeddings[tower] = self._embed_all(tower, partial(self._embed, tower))
        texts = dict(self.grown) if self.triplets else {}
        if self.negatives:
            _, true, false = zip(*self.negatives, strict=True)
            texts |= {"true": [*true], "false": [*false]}
        embed = partial(self._embed, "text")
        for name, column in texts.items():
            embeddings[name] = embed_distributed(self.accelerator, column, embed)
        return embeddings

    def _embed_all(self, tower: str, embed: Callable[[list], Tensor]) -> Tensor:
        """Embeddings of all rows, or of all references, equal ones embedded once: [N,
        D] on the CPU, by all processes.
        """
        items: Sequence[Any] = self.rows if tower == "image" else self.distinct
        embedded = embed_distributed(self.accelerator, items, embed)
        return embedded if tower == "image" else embedded[self.repeat]

    def _embed(self, tower: str, items: list) -> Tensor:
        """The network's embeddings of rows or captions [N, D], in batches."""
        embedded = []
        for start in range(0, len(items), self.batch_size):
            chunk = items[start : start + self.batch_size]
            if tower == "image":
                batch = torch.stack([self.pixels.of(row) for row in chunk])
            else:
                batch = self.tokens(chunk)
            inputs = {tower: batch.to(self.accelerator.device)}
            embedded.append(self.network(inputs)[tower].float())
        return torch.cat(embedded)


def _nearer(images: Tensor, texts: Tensor, others: Tensor) -> float:
    """Fraction of N images [N, D] whose text [N, D] has a higher cosine than the other
    text [N, D]; ties fail.
    """
    near = F.cosine_similarity(images, texts, dim=-1)
    return float((near > F.cosine_similarity(images, others, dim=-1)).float().mean())


def _check_finite(embeddings: Mapping[str, Tensor], whose: str, remedy: str) -> None:
    for tower, rows in embeddings.items():
        bad = int((~rows.isfinite().all(dim=1)).sum())
        if bad:
            raise NonFiniteError(
                f"{whose} {tower} embeddings: {bad} of {len(rows)} are NaN or infinite; {remedy}"
            )
