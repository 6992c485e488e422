"""One optimizer step of any embedding model: a loss over the embeddings of the whole global batch.

Contrastive losses compare every pair of the batch, so their gradient is no sum over
micro-batches. As in GradCache (Gao et al. 2021, "Scaling Deep Contrastive Learning
Batch Size under Memory Limited Setup") the step embeds all micro-batches without a
graph, takes the gradient of the loss with respect to the embeddings of the global
batch, and sends each micro-batch's part of it back through a second forward pass. The
result does not depend on how the batch was split over micro-batches and processes, as
long as the network has no batch norm (``check_batch_norm``).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rl_caption.reward_models.batch import PairBatch
from rl_caption.reward_models.losses import Embeddings, Objective
from rl_caption.runtime.engines import Averages, backward_all

Target: TypeAlias = Callable[[PairBatch], dict[str, Tensor]]
"""Function from a batch to the targets of the objective by name: a teacher's embeddings
[B, D], or the batch's own. They are on the batch's device and have no gradient.
"""


@dataclass
class EmbeddingTask:
    """One training step on a loss of the embeddings of the whole global batch.

    Args:
        accelerator: owns devices, processes and the backward pass.
        model: as prepared for (distributed) training; from a batch's ``inputs`` to raw
            embeddings [B, D] by name, and scalars that are parameters of the loss, such
            as ``scale``.
        objective: the loss.
        target: gives the targets of a batch for the objective.
        name: name in log lines.
    """

    accelerator: Accelerator
    model: nn.Module
    objective: Objective
    target: Target = attrgetter("targets")
    name: str = "reward_model"
    samples: list[dict[str, Any]] = field(default_factory=list)

    def training_step(
        self, batches: Sequence[PairBatch], step: int
    ) -> Iterator[Averages]:
        """Leave the gradient of one optimizer step in the parameters. ``batches`` are
        this process's micro-batches.
        """
        target = concatenate([self.target(batch) for batch in batches])
        passes: list[Callable[[], Tensor]] = []
        if len(batches) == 1:
            outputs = self.model(batches[0].inputs)
            gradients, log = self._gradients(outputs, target)
            passes.append(partial(_surrogate, outputs, gradients, 1.0))
        else:
            device = self.accelerator.device
            devices = [device] if device.type == "cuda" else []
            # The second passes have the random numbers (dropout) of the first ones.
            with torch.no_grad(), torch.random.fork_rng(devices):
                embedded = [self.model(batch.inputs) for batch in batches]
            gradients, log = self._gradients(concatenate(embedded), target)
            start = 0
            for batch in batches:
                rows = slice(start, start + len(batch.rows))
                start += len(batch.rows)
                batch_gradients = {
                    name: value[rows] if value.ndim else value
                    for name, value in gradients.items()
                }
                weight = 1 / len(batches)
                passes.append(
                    partial(self._second_pass, batch, batch_gradients, weight)
                )
        backward_all(self.accelerator, self.model, passes)
        yield log

    def _second_pass(
        self, batch: PairBatch, gradients: Embeddings, weight: float
    ) -> Tensor:
        return _surrogate(self.model(batch.inputs), gradients, weight)

    def _gradients(
        self, embeddings: Embeddings, target: Embeddings
    ) -> tuple[dict[str, Tensor], Averages]:
        """Gradient of the global batch's loss with respect to this process's
        embeddings, and what is logged.

        Every process computes the whole loss. Gradients are summed over processes, so
        the gradient of a scalar, which every process has, is divided by their number.
        """
        rank = self.accelerator.process_index
        processes = self.accelerator.num_processes
        leaves = {
            name: self._gather(value).requires_grad_()
            for name, value in embeddings.items()
        }
        loss, metrics = self.objective(
            leaves, {name: self._gather(value) for name, value in target.items()}
        )
        leaf_gradients = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True
        )
        gradients = {}
        for (name, leaf), gradient in zip(leaves.items(), leaf_gradients, strict=True):
            gradient = torch.zeros_like(leaf) if gradient is None else gradient
            gradients[name] = (
                gradient.chunk(processes)[rank] if leaf.ndim else gradient / processes
            )
        log = Averages()
        for name, value in {"loss/total": loss, **metrics}.items():
            log.add(name, value)
        return gradients, log

    def _gather(self, rows: Tensor) -> Tensor:
        """Gather rows [B, ...] of P processes to [P B, ...], float32, in the global
        batch's order; scalars stay.
        """
        rows = rows.detach().float()
        if rows.ndim == 0 or self.accelerator.num_processes == 1:
            return rows.clone()
        return self.accelerator.gather(rows.contiguous())


def _surrogate(outputs: Embeddings, gradients: Embeddings, weight: float) -> Tensor:
    """Scalar with the loss's gradient: the sum of embeddings times their gradients.

    A scalar appears in every micro-batch, so its gradient is multiplied by ``weight``.
    """
    terms = [
        (value.float() * gradients[name]).sum() * (1.0 if value.ndim else weight)
        for name, value in outputs.items()
        if value.requires_grad
    ]
    return torch.stack(terms).sum()


def concatenate(micro_batches: Sequence[Embeddings]) -> dict[str, Tensor]:
    """Concatenate the rows of micro-batches; scalars are equal in all and stay."""
    return {
        name: torch.cat([embeddings[name] for embeddings in micro_batches])
        if value.ndim
        else value
        for name, value in micro_batches[0].items()
    }
