"""What tasks that train embeddings share: what the network reads of images and captions, and the
training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rewards.clip.dual import PretrainedDual
from rewards.clip.preprocessing import Preprocessing, clip_tokenizer, embed_by_length
from rewards.clip.pretrained import ClipText
from rewards.devices import chunks
from rl_caption.config.schema import DataConfig
from rl_caption.data.encode_features import made_by, read_record
from rl_caption.reward_models.batch import (
    FeatureCache,
    PairCollate,
    PixelCache,
    Texts,
    plain_form,
)
from rl_caption.reward_models.encoders import TrainedDual, is_frozen
from rl_caption.reward_models.losses import Objective
from rl_caption.reward_models.task import EmbeddingTask, Target
from rl_caption.reward_models.teacher import embed_distributed
from rl_caption.reward_models.validation import EmbeddingValidator
from rl_caption.runtime.engines import print_main
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.types import LOSS, TrainState
from rl_caption.training.loop import Metric, train
from rl_caption.training.run import Run

TEXTS = 4096
"""Captions that a frozen text encoder embeds at a time, sorted by length."""
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
    dual: PretrainedDual | None = None
    """The network's dual encoder, if it has one, whose frozen encoders may run before training."""


def image_inputs(data: DataConfig, model: EmbeddingModel) -> PixelCache | FeatureCache:
    """Pixels, or the features of ``data.features_root`` where a frozen encoder made them.

    Raises:
        ConfigError: the features are not those of the model's image encoder, or it has none.
    """
    network = model.network
    if data.features_root is None:
        return PixelCache(model.preprocessing, data.cache_mb * 2**20)
    pool = None
    if isinstance(network, TrainedDual):
        encoder = network.dual.image_encoder
        pool = partial(torch.mean, dim=1)  # nothing trained comes before it, so once is enough
    else:
        tower: Any = network.get_submodule("towers.image")
        encoder = tower.encoder
    if encoder is None:
        raise ConfigError(
            "data.features_root holds features of a frozen encoder, but the student has none: "
            "leave it out"
        )
    if not made_by(data.features_root, encoder):
        source = (read_record(data.features_root) or {}).get(
            "encoder", "an encoder that it does not name"
        )
        raise ConfigError(
            f"data.features_root {data.features_root} has features of {source}: expected those of "
            f"the model's image "
            "encoder, with its weights and preprocessing; make them by prepare_features"
        )
    return FeatureCache(pool, data.cache_mb * 2**20)


def text_inputs(
    run: Run,
    model: EmbeddingModel,
    needs_text: bool = True,
    stored: bool = False,
    plain_captions: float = 0.0,
) -> Texts:
    """Token ids; or the features of a frozen text encoder, where they fit ``data.cache_mb``.

    Args:
        run: has the captions.
        model: has the tokenizer, and the text encoder.
        needs_text: whether the task learns from captions.
        stored: the task learns no texts but those of the rows, so that features can be computed
            before.
        plain_captions: fraction of the texts that are in plain form.
    """
    dual, accelerator, length = model.dual, run.accelerator, model.context_length
    if dual is None:
        tokens = Texts(ClipText(clip_tokenizer(), length), length, model.trims)
    else:
        tokens = Texts(dual.text_encoder, length)
    references = [caption for row in run.val_rows for caption in row["references"]]
    cut = tokens.too_long(references) if needs_text else 0
    if cut:
        print_main(
            accelerator,
            f"{cut} of {len(references)} validation captions have more than {length} tokens (the "
            f"model's "
            "context_length) and lose their end, as training captions do",
        )
    if dual is None:
        return tokens
    rows = [*run.train_rows, *run.val_rows]
    texts = [
        text for row in rows for text in (*row["references"], *row.get("positive_captions", ()))
    ]
    if plain_captions:
        texts += [plain_form(text) for text in texts]
    distinct = list(dict.fromkeys(texts))
    fits = len(distinct) * 4 * dual.text_head.norm.normalized_shape[0] <= run.cache_bytes
    if not (stored and fits and is_frozen(dual.text_encoder)):
        return tokens
    features = embed_distributed(accelerator, distinct, partial(_frozen_features, run, dual))
    index = {text: number for number, text in enumerate(distinct)}
    return Texts(dual.text_encoder, length, features=features, index=index)


@torch.no_grad()
def _frozen_features(run: Run, dual: PretrainedDual, captions: list[str]) -> Tensor:
    """Features of captions by the frozen text encoder, computed sorted by length."""
    device = run.accelerator.device
    dual.to(device).text_encoder.eval()
    most = run.eval_batch_size * dual.context_length
    features = []
    for texts in chunks(captions, TEXTS, "features of captions by the frozen text encoder"):
        ids = dual.tokenize(texts)
        lengths = dual.text_encoder.lengths(ids)
        features.append(embed_by_length(dual.text_features, ids, lengths, most, str(device)).cpu())
    return torch.cat(features)


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
