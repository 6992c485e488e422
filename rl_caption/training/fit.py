"""The harness of every training: what differs between trainings is a ``Recipe``.

with setup(config) as context:
    fit(context, Recipe(network, task, collate, validate, export, metric))
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rl_caption.runtime.types import TrainState, Validation
from rl_caption.training.loop import Task, Trainer
from rl_caption.training.setup import Context


@dataclass(frozen=True)
class Recipe:
    """What one training has of its own.

    Args:
        network: what is trained; its parameters that require a gradient.
        task: from the network, as prepared for (distributed) training, to the step.
        collate: from (row, step) pairs to a micro-batch.
        validate: from a step, and what its newest step logged, to a verdict on the model. Called by
            every process.
        export: writes the model to a folder.
        metric: the validation metric that chooses the best model.
        metric_range: of ``metric`` (higher is better, but for ``LOSS``), for log lines.
        validate_first: validate before the first step: the model to start from is a trained one.
        decays: ``decays(name, parameter)`` tells whether ``train.weight_decay`` applies to a
            parameter; None: to all.
        signature: what the numbers of the reward or teacher depend on; resuming compares it.
        measured: what ``metric`` depends on besides the model, the validation images and ``eval``.
        vocabulary: the model's tokens and their ids; resuming compares them.
        notes: values that outlive a restart; those of a checkpoint are put into it.
    """

    network: nn.Module
    task: Callable[[nn.Module], Task]
    collate: Callable[[Any], Any]
    validate: Callable[[int, Mapping[str, float]], Validation]
    export: Callable[[Path], None]
    metric: str = "val/cider"
    metric_range: str = "0 to 10"
    validate_first: bool = True
    decays: Callable[[str, Tensor], bool] | None = None
    signature: str = ""
    measured: str = ""
    vocabulary: Mapping[str, int] | None = None
    notes: dict[str, Any] | None = None


def fit(context: Context, recipe: Recipe) -> TrainState:
    """Train from the start or from the checkpoint of ``context``; the best model lies in
    ``export/best``.

    Raises:
        CheckpointError: the recipe, the data or the configuration is not that of the checkpoint.
        NonFiniteError: a loss or gradient is not finite; the weights are not changed by it.
    """
    state = context.start(
        recipe.signature, recipe.metric, recipe.notes, recipe.measured, recipe.vocabulary
    )
    network, optimizer = context.prepare(recipe.network, recipe.decays)
    return Trainer(
        context,
        recipe.task(network),
        network,
        optimizer,
        recipe.collate,
        state,
        recipe.validate,
        recipe.export,
        recipe.metric_range,
        recipe.validate_first,
    ).fit()
