"""Cross-entropy training: teacher forcing on the references, before self-critical training."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rl_caption.captioners.base import Captioner
from rl_caption.captioners.tokens import FORBIDDEN_LOGIT
from rl_caption.runtime.engines import Averages, backward_all, global_count
from rl_caption.runtime.types import CaptionBatch


def cross_entropy_sum(
    logits: Tensor, token_ids: Tensor, mask: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Cross-entropy with label smoothing (Szegedy et al. 2016), summed over the tokens
    of ``mask`` [P]; in nats.

    ``label_smoothing`` is the fraction of the target spread evenly over the tokens
    whose logits [P, V] are not ``FORBIDDEN_LOGIT``.
    """
    logprobs = logits.log_softmax(-1)
    target = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        allowed = logits > FORBIDDEN_LOGIT
        spread = torch.where(allowed, logprobs, 0.0).sum(-1) / allowed.sum(-1)
        target = (1 - label_smoothing) * target + label_smoothing * spread
    return -(target * mask).sum()


def xe_loss(
    captioner: Captioner,
    model: nn.Module,
    batch: CaptionBatch,
    tokens: Tensor,
    label_smoothing: float,
    log: Averages,
) -> Tensor:
    """This micro-batch's part of the cross-entropy, a scalar in nats: the mean over the
    ``tokens`` reference tokens of the global batch.
    """
    if batch.targets is None or batch.target_mask is None:
        raise ValueError(
            "the batch has no targets: the loader was made without max_target_tokens"
        )
    learned = batch.target_mask
    computed = (
        learned.flip(-1).cumsum(-1).flip(-1) > 0
    )  # up to the last one; a word that is not learned is still read
    logits = captioner.token_logits(model, batch.inputs, batch.targets, computed)
    loss = cross_entropy_sum(
        logits, batch.targets[computed], learned[computed], label_smoothing
    )
    log.add_sum("loss/xe", loss.item(), learned.sum().item())
    return loss / tokens


def target_count(accelerator: Accelerator, batches: Sequence[CaptionBatch]) -> Tensor:
    """Number of reference tokens to learn in the global batch, a scalar. Called by every process."""
    counts = [
        batch.target_mask.sum() for batch in batches if batch.target_mask is not None
    ]
    return global_count(accelerator, torch.stack(counts).sum())


@dataclass
class CrossEntropyTask:
    """Maximum likelihood of the references; an image is encoded once for all of them.

    ``model`` is ``captioner.policy`` as prepared for (distributed) training.
    """

    accelerator: Accelerator
    captioner: Captioner
    model: nn.Module
    label_smoothing: float = 0.0
    name: str = "xe"
    samples: list[dict[str, Any]] = field(default_factory=list)

    def training_step(
        self, batches: Sequence[CaptionBatch], step: int
    ) -> Iterator[Averages]:
        """Leave the gradient of one optimizer step in the parameters. ``batches`` are
        this process's micro-batches.
        """
        log = Averages()
        tokens = target_count(self.accelerator, batches)
        losses = [
            partial(
                xe_loss,
                self.captioner,
                self.model,
                batch,
                tokens,
                self.label_smoothing,
                log,
            )
            for batch in batches
        ]
        loss = backward_all(self.accelerator, self.model, losses)
        log.add_sum("loss/total", loss, 1 / self.accelerator.num_processes)
        yield log
