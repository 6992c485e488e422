"""The task ``specificity``, SPECS: triplets of growing captions, for a long-context
CLIP (docs/papers.md).

Source: Chen et al., SPECS, EMNLP 2025, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from pydantic import NonNegativeFloat
from torch import Tensor
from torch.nn import functional as F

from rewards.clip.pretrained import Texts
from rewards.text.detail_units import default_tagger, detail_units_of
from rl_caption.data.base import Row
from rl_caption.data.loader import row_generator, step_indices
from rl_caption.reward_models.batch import Addition, Captions, caption_index
from rl_caption.reward_models.clip_models import (
    ClipConfig,
    ClipLossConfig,
    ClipTrainConfig,
    train_embeddings,
)
from rl_caption.reward_models.losses import (
    Embeddings,
    Objective,
    contrastive_metrics,
    info_nce,
)
from rl_caption.reward_models.triplets import (
    Donor,
    Triplet,
    make_triplets,
    triplet_texts,
)
from rl_caption.runtime.options import Fraction
from rl_caption.runtime.types import TrainState
from rl_caption.training.run import Run

LARGEST_MARGIN = 1.5
"""Largest dynamic margin of SPECS's code, in logits: a cosine of 0.015 at CLIP's largest scale, 100.
"""


def specificity(
    student: Embeddings,
    target: Embeddings,
    alpha: float = 1.0,
    beta: float = 8.0,
    gamma: float = 0.8,
    max_margin: float = LARGEST_MARGIN,
    symmetric: bool = False,
    fixed_margin: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """SPECS: a caption with one more true detail scores higher, one with a false detail
    lower (Chen et al., section 3).

    ``alpha * InfoNCE(image, text) + beta * hinge(s(positive) - s(base)) + gamma *
    hinge(s(base) - s(negative))`` with s the cosine to the image. ``hinge(gaps)`` is
    the mean of relu(margin - gap) over the rows with a triplet, 0 where no row has one;
    each hinge has its own ``dynamic_margin``, or both have ``fixed_margin`` (the
    paper's Table 5). Terms are logged unweighted.

    ``student`` has ``image``, ``text``, ``text_base``, ``text_positive``,
    ``text_negative`` and ``scale``; ``target`` has ``triplet`` [B]. Margins are in
    logits, cosines times scale (released code). ``symmetric`` is as in ``info_nce``.
    """
    counts = target["triplet"]
    scale = student["scale"]
    counted = counts.sum().clamp(min=1)
    base, positive, negative = (
        scale * F.cosine_similarity(student["image"], student[f"text_{name}"], dim=-1)
        for name in ("base", "positive", "negative")
    )
    contrast = info_nce(student["image"], student["text"], scale, symmetric=symmetric)
    loss = alpha * contrast
    metrics = contrastive_metrics(student) | {"specificity/contrastive": contrast}
    hinges = {
        "positive": (beta, positive - base),
        "negative": (gamma, base - negative),
    }
    for name, (weight, gaps) in hinges.items():
        margin = gaps.new_tensor(fixed_margin or 0.0)
        if fixed_margin is None:
            margin = dynamic_margin(gaps, counts, max_margin)
        term = (F.relu(margin - gaps) * counts).sum() / counted
        loss = loss + weight * term
        metrics[f"specificity/{name}_hinge"] = term
        metrics[f"specificity/{name}_margin"] = margin
        metrics[f"specificity/{name}_rate"] = ((gaps > 0) * counts).sum() / counted
    return loss, metrics


def dynamic_margin(gaps: Tensor, counts: Tensor, largest: float) -> Tensor:
    """Mean of the [B] gaps that count (``counts`` 1, else 0), clamped to [0,
    ``largest``] and detached; a scalar.

    A gap is the better text's score less the worse text's: the margin asks of every row
    the mean gap of the batch (SPECS, section 3). 0 where no row counts.
    """
    mean = (gaps * counts).sum() / counts.sum().clamp(min=1)
    return mean.detach().clamp(0, largest)


class SpecificityLossConfig(ClipLossConfig):
    """The loss of SPECS."""

    alpha: NonNegativeFloat = 1.0
    """Weight of the contrastive term."""
    beta: NonNegativeFloat = 8.0
    """Weight of the positive hinge: one more true detail scores higher."""
    gamma: NonNegativeFloat = 0.8
    """Weight of the negative hinge: one more false detail scores lower."""
    max_margin: NonNegativeFloat = LARGEST_MARGIN
    """Largest dynamic margin, in logits: cosines times the learned scale (released code)."""
    fixed_margin: NonNegativeFloat | None = None
    """Margin of both hinges, in logits, in place of the dynamic margins; null is
    dynamic.
    """
    symmetric: bool = False
    """Contrastive term in both directions; false is caption to image (released code)."""


class SpecificityTrainConfig(ClipTrainConfig):
    """Training on triplets."""

    shuffle_rate: Fraction = 0.9
    """Fraction of false details whose words are shuffled."""
    negatives: Literal["batch", "data"] = "batch"
    """Take false details from the other captions of the ``batch`` (paper), or from the
    first caption of all images of the training ``data`` (released code).
    """


class SpecificityConfig(ClipConfig):
    """``reward_model --task specificity``: SPECS."""

    task: Literal["specificity"] = "specificity"
    loss: SpecificityLossConfig = SpecificityLossConfig()
    train: SpecificityTrainConfig = SpecificityTrainConfig()

    def check(self) -> None:
        """See ``RewardModelConfig.check``."""
        default_tagger()  # of the optional package textblob

    def objective(self) -> Objective:
        """``specificity`` with the weights of this configuration."""
        return partial(specificity, **self.loss.model_dump(exclude={"max_scale"}))

    def fit(self, run: Run) -> TrainState:
        """See ``RewardModelConfig.fit``."""
        train = self.train
        rows = run.train_rows
        model = self.build_model(run.accelerator.num_processes)
        donors = donors_of(rows) if train.negatives == "data" else None
        triplets = StepTriplets(
            rows,
            model.texts,
            train.batch_size,
            train.seed,
            train.captions,
            train.shuffle_rate,
            donors,
        )
        captions = [row["references"][0] for row in run.val_rows]  # always the same
        ids = [row["image_id"] for row in run.val_rows]
        fixed = make_triplets(captions, ids, train.seed, shuffle_rate=0.0)
        return train_embeddings(
            run,
            self,
            model,
            "val/specificity",
            additions=[triplets],
            validated={"triplets": fixed},
        )


@dataclass
class StepTriplets:
    """Adds the texts of the triplets of a step: ``text_base``, ``text_positive`` and
    ``text_negative``.

    Triplets are made of the step's global batch, ``batch_size`` images of the training
    ``rows``; texts fit into ``tokens``' context.

    False details come from the whole global batch, or from ``donors``, so that every
    process and micro-batch has the same triplets for its rows. The other fields are
    arguments of ``PairCollate`` and ``make_triplets``.
    """

    rows: Sequence[Row]
    tokens: Texts
    batch_size: int
    seed: int
    captions: Captions
    shuffle_rate: float
    donors: Sequence[Donor] | None = None
    _step: int = field(default=-1, init=False)
    _triplets: dict[str, Triplet | None] = field(default_factory=dict, init=False)

    def __call__(
        self, items: Sequence[tuple[Row, int]], captions: list[str]
    ) -> Addition:
        triplets = [self.of_step(step)[row["image_id"]] for row, step in items]
        columns, counts = triplet_texts(triplets, self.tokens)
        return Addition(
            {f"text_{name}": column for name, column in columns.items()},
            {"triplet": counts},
        )

    def of_step(self, step: int) -> dict[str, Triplet | None]:
        """Image id -> its triplet; None where its caption has fewer than two details."""
        if step != self._step:
            order = step_indices(len(self.rows), self.batch_size, step, self.seed)
            batch = {row["image_id"]: row for row in map(self.rows.__getitem__, order)}
            chosen = []
            for row in batch.values():
                index = caption_index(row, self.captions, self.seed, step)
                chosen.append(row["references"][index])
            seed = int(row_generator(self.seed, step, "triplets").integers(2**31))
            triplets = make_triplets(
                chosen, [*batch], seed, self.shuffle_rate, self.donors
            )
            self._step = step
            self._triplets = dict(zip(batch, triplets, strict=True))
        return self._triplets


def donors_of(rows: Sequence[Row]) -> list[Donor]:
    """The first reference of each row, cut into detail units that false details are taken from."""
    units = detail_units_of([row["references"][0] for row in rows])
    return list(map(Donor, [row["image_id"] for row in rows], units))
