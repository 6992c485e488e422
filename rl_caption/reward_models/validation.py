"""Validation of embedding models: image-text retrieval in a split, agreement with the teacher,
specificity.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from rl_caption.data.base import Row
from rl_caption.evaluation.retrieval import retrieval_recall
from rl_caption.reward_models.batch import PairCollate, PixelCache, Texts
from rl_caption.reward_models.losses import Objective
from rl_caption.reward_models.task import concatenate
from rl_caption.reward_models.teacher import Teacher, embed_distributed
from rl_caption.reward_models.triplets import Triplet, triplet_texts
from rl_caption.runtime.engines import autocast, dropout_off
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.types import LOSS, Validation
from rl_caption.training.run import NonFiniteError

DRAWN_AT = -1
"""The step by which the loss of validation draws captions and positives; no step of training has
this number.
"""
MOST_PIXELS = 256 * 2**20
"""Most bytes of validation pixels that a process keeps besides ``data.cache_mb``: 1,783 images of
224 x 224.
"""
REMEDY = "a lower train.lr, or train.mixed_precision bf16 or no, is the usual remedy"


@dataclass(frozen=True)
class ValidationLoss:
    """The loss of training on a validation split, in nats: the mean over batches of ``size`` rows
    in the split's order.

    A contrastive loss grows with its batch, so a last batch of fewer rows is left out; a split of
    fewer than ``size`` rows is one batch. Captions and positives are the same at every validation,
    and images are not augmented. The result does not depend on how the forward pass is split over
    micro-batches and processes.
    """

    objective: Objective
    collate: PairCollate
    size: int

    def __call__(
        self,
        accelerator: Accelerator,
        network: nn.Module,
        rows: Sequence[Row],
        pixels: PixelCache,
        batch_size: int,
    ) -> float:
        """The loss of ``rows``, each process embedding some of the batches. ``batch_size`` is rows
        of one forward pass.
        """
        collate = replace(self.collate, pixels=pixels, augmentations=())
        device, size = accelerator.device, min(self.size, len(rows))
        starts = range(0, len(rows) - size + 1, size)
        total = 0.0
        for start in starts[accelerator.process_index :: accelerator.num_processes]:
            outputs, targets = [], []
            for first in range(start, start + size, batch_size):
                part = rows[first : min(first + batch_size, start + size)]
                batch = collate([(row, DRAWN_AT) for row in part]).to(device)
                embedded = network(batch.inputs)
                outputs.append(
                    {name: value.float() for name, value in embedded.items()}
                )
                targets.append(batch.targets)
            with torch.autocast(device.type, enabled=False):  # float32, as in training
                total += float(
                    self.objective(concatenate(outputs), concatenate(targets))[0]
                )
        losses = accelerator.gather(
            torch.tensor([total], dtype=torch.float32, device=device)
        )
        return float(losses.sum()) / len(starts)


class EmbeddingValidator:
    """Validates an embedding model on a split; called by every process, with equal results in all.

    All images of ``rows`` and all their references are embedded, equal captions only once. It gives

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
        towers: those that the network has.
        batch_size: images, or captions, of one forward pass of one process.
        triplets: one for each row, or None where its caption has none.
        negatives: (index of a row, true caption, false caption).
        loss: gives ``val/loss``.

    Raises:
        ConfigError: no triplet counts.
        NonFiniteError: an embedding of the teacher is NaN or infinite.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        network: nn.Module,
        towers: Sequence[str],
        rows: Sequence[Row],
        pixels: PixelCache,
        tokens: Texts,
        batch_size: int,
        teacher: Teacher | None = None,
        triplets: Sequence[Triplet | None] | None = None,
        negatives: Sequence[tuple[int, str, str]] = (),
        loss: ValidationLoss | None = None,
    ) -> None:
        needed = (
            -(-len(rows) // accelerator.num_processes)
            * 3
            * pixels.preprocessing.size**2
        )
        if needed <= MOST_PIXELS:  # a cache of their own
            pixels = PixelCache(pixels.preprocessing, needed)
        self.accelerator, self.network, self.towers = accelerator, network, towers
        self.rows, self.pixels = rows, pixels
        self.tokens, self.batch_size, self.triplets, self.loss = (
            tokens,
            batch_size,
            triplets,
            loss,
        )
        captions = [caption for row in rows for caption in row["references"]]
        self.owners = np.repeat(
            np.arange(len(rows)), [len(row["references"]) for row in rows]
        )
        self.distinct = {
            caption: index for index, caption in enumerate(dict.fromkeys(captions))
        }
        self.repeat = [self.distinct[caption] for caption in captions]
        self.grown, self.fits = triplet_texts(triplets or (), tokens)
        if triplets is not None and not self.fits.any():
            raise ConfigError(
                f"none of {len(triplets)} validation captions has two details within "
                f"{tokens.context_length} tokens: the task specificity needs long captions "
                "(data.long_captions: true)"
            )
        self.paired = all("image" in row and row["references"] for row in rows)
        self.negatives = negatives if self.paired else ()
        paired_towers = ("image", "text") if self.paired else towers
        self.expected: dict[str, Tensor] = {}
        if teacher is not None:
            if "image" in paired_towers:
                images = embed_distributed(accelerator, rows, teacher.image_embeddings)
                self.expected["image"] = images
            if "text" in paired_towers:
                texts = embed_distributed(
                    accelerator, [*self.distinct], teacher.text_embeddings
                )
                self.expected["text"] = texts[self.repeat]
            remedy = "teacher.precision fp32 is the usual remedy"
            _check_finite(self.expected, "the teacher's", remedy)

    def __call__(self, step: int, logged: Mapping[str, float]) -> Validation:
        """Embed the split with the network as it is at ``step``; ``NonFiniteError`` as for the
        teacher.
        """
        with torch.no_grad(), dropout_off(self.network), autocast(self.accelerator):
            embeddings = self.expected | self._embeddings()
            metrics = {}
            if self.loss is not None:
                metrics[LOSS] = self.loss(
                    self.accelerator,
                    self.network,
                    self.rows,
                    self.pixels,
                    self.batch_size,
                )
        _check_finite(embeddings, f"validation at step {step}: the model's", REMEDY)
        if not all(map(math.isfinite, metrics.values())):
            raise NonFiniteError(
                f"validation at step {step}: the loss is {metrics[LOSS]}; {REMEDY}"
            )
        for tower in [tower for tower in self.towers if tower in self.expected]:
            cosines = F.cosine_similarity(
                embeddings[tower], self.expected[tower], dim=-1
            )
            metrics[f"val/teacher_cosine_{tower}"] = float(cosines.mean())
        if self.paired:
            images, texts = embeddings["image"].numpy(), embeddings["text"].numpy()
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
            true, false = _nearer(image, positive, base), _nearer(image, base, negative)
            metrics["val/specificity_positive"] = true
            metrics["val/specificity_negative"] = false
            metrics["val/specificity"] = (true + false) / 2
        return Validation(metrics)

    def _embeddings(self) -> dict[str, Tensor]:
        """Of images, captions, texts of triplets, and the true and false captions of negatives, by
        name.
        """
        embedded = partial(embed_all, self.accelerator, self.network, self.batch_size)
        embeddings = {}
        if "image" in self.towers:
            prepare = lambda rows: torch.stack([self.pixels.of(row) for row in rows])  # noqa: E731
            embeddings["image"] = embedded("image", prepare, self.rows)
        if "text" in self.towers:
            embeddings["text"] = embedded("text", self.tokens, [*self.distinct])[
                self.repeat
            ]
        for name in self.grown if self.triplets else ():
            embeddings[name] = embedded("text", self.tokens, self.grown[name])
        for column, name in ((1, "true"), (2, "false")) if self.negatives else ():
            texts = [pair[column] for pair in self.negatives]
            embeddings[name] = embedded("text", self.tokens, texts)
        return embeddings


def embed_all(
    accelerator: Accelerator,
    network: nn.Module,
    batch_size: int,
    name: str,
    prepare: Callable[[list], Tensor],
    items: Sequence,
) -> Tensor:
    """The network's embeddings ``name`` of N items, [N, D] on the CPU, in batches and by all
    processes.
    """

    def embed(share: list) -> Tensor:
        rows = []
        for start in range(0, len(share), batch_size):
            batch = prepare(share[start : start + batch_size]).to(accelerator.device)
            rows.append(network({name: batch})[name].float())
        return torch.cat(rows)

    return embed_distributed(accelerator, items, embed)


def _nearer(images: Tensor, texts: Tensor, others: Tensor) -> float:
    """Fraction of N images [N, D] whose text [N, D] has a higher cosine than the other text [N, D];
    ties fail.
    """
    near, far = (
        F.cosine_similarity(images, candidates, dim=-1)
        for candidates in (texts, others)
    )
    return float((near > far).float().mean())


def _check_finite(embeddings: Mapping[str, Tensor], whose: str, remedy: str) -> None:
    for tower, rows in embeddings.items():
        bad = int((~rows.isfinite().all(dim=1)).sum())
        if bad:
            raise NonFiniteError(
                f"{whose} {tower} embeddings: {bad} of {len(rows)} are NaN or infinite; {remedy}"
            )
