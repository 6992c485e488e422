"""What tasks that train embeddings share: what the network reads of images and captions, and the
training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rewards.clip.preprocessing import Preprocessing, clip_tokenizer
from rewards.clip.pretrained import ClipText
from rl_caption.reward_models.batch import PairCollate, Texts
from rl_caption.reward_models.losses import Objective
from rl_caption.reward_models.task import EmbeddingTask, Target
from rl_caption.reward_models.validation import EmbeddingValidator
from rl_caption.runtime.engines import print_main
from rl_caption.runtime.types import LOSS, TrainState
from rl_caption.training.loop import train
from rl_caption.training.run import Metric, Run

RETRIEVAL = "val/retrieval_r1"


@dataclass(frozen=True)
class EmbeddingModel:
    """What is trained, and what it reads."""

    network: nn.Module
    """From inputs by name to raw embeddings by name."""
    preprocessing: Preprocessing
    context_length: int
    trims: bool
    """Padding does not change a text embedding, so that token ids may be cut after the longest
    caption of a batch.
    """
    export: Callable[[Path], None]
    is_trained: bool
    """The network starts from trained weights, which are validated before the first step."""
    tokenizer: Any = field(default_factory=lambda: ClipText(clip_tokenizer(), 77))
    """Has ``tokenize``, ``count_tokens`` and ``lengths`` of a ``TextEncoder``."""

    @property
    def texts(self) -> Texts:
        """From captions to the token ids that the network reads."""
        return Texts(self.tokenizer, self.context_length, self.trims)


def text_inputs(run: Run, model: EmbeddingModel, needs_text: bool = True) -> Texts:
    """Token ids of captions. Tells how many captions of validation are too long, if the task
    ``needs_text``.
    """
    tokens = model.texts
    references = [caption for row in run.val_rows for caption in row["references"]]
    cut = tokens.too_long(references) if needs_text else 0
    if cut:
        print_main(
            run.accelerator,
            f"{cut} of {len(references)} validation captions have more than "
            f"{model.context_length} tokens (the model's context_length) and lose their end, as "
            "training captions do",
        )
    return tokens


def train_embeddings(
    run: Run,
    model: EmbeddingModel,
    name: str,
    loss: Objective,
    collate: PairCollate,
    validate: EmbeddingValidator,
    metric: str = RETRIEVAL,
    metric_range: str = "0 to 1",
    target: Target = attrgetter("targets"),
    signature: str = "",
    measured: str | None = None,
    decays: Callable[[str, Tensor], bool] | None = None,
) -> TrainState:
    """Train a task on embeddings, whose ``name`` log lines begin with.

    ``measured`` is what ``metric`` depends on besides the data; None: on the ``signature``.
    """
    network = run.restore(model.network, signature, decays=decays)
    task = EmbeddingTask(run.accelerator, network, loss, target, name)
    by = Metric(
        metric,
        "nats" if metric == LOSS else metric_range,
        signature if measured is None else measured,
    )
    return train(run, task, collate, validate, model.export, by, model.is_trained)
