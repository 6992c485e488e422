"""ICC: how visually concrete a caption is, by a text model distilled from two
bottlenecks (docs/rewards.md).

Source: Yanuka, Alper, Averbuch-Elor and Giryes, "ICC: Quantifying Image Caption
Concreteness for Multimodal Dataset Curation", Findings of ACL 2024.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rewards.base import as_texts, checked_scores
from rewards.devices import Precision, chunks
from rewards.frozen_model import load_frozen
from rewards.options import Count, check_values


class Icc:
    """ICC: concreteness of a caption by a text model, which sees neither image nor
    references, in [0, 1].

    The score is the single logit of a sequence-classification model, without a sigmoid.
    It was trained by squared error on values in [0, 1] and may lie outside. An
    ungrammatical list of nouns scores high (0.89 in the paper), so use it as a guard
    beside CIDEr-D or CLIPScore and not alone. Captions go to the model's own tokenizer
    unchanged; captions with more tokens than the model has positions are cut.

    Args:
        model: folder of a model of Transformers with one label, its tokenizer and
            safetensors weights, or a name on the hub, such as ``moranyanuka/icc``.
        clip: clip scores to [0, 1]; False returns the logit, as the released example does.
        device: such as ``cuda``; None is the process's current CUDA device if there is
            one, else the CPU.
        precision: ``fp32``, ``fp16`` or ``bf16``, of weights and activations.
        batch_size: captions at once, at least 1; changes scores by rounding only.

    Raises:
        ValueError: an argument is wrong, or the model cannot be found or loaded, has
            another number of labels than one, or no trained head.
    """

    __name__ = "icc"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, 1.0)

    def __init__(
        self,
        model: str = "moranyanuka/icc",
        clip: bool = True,
        device: str | None = None,
        precision: Precision = "fp32",
        batch_size: int = 64,
    ) -> None:
        check_values(Count, batch_size=batch_size)
        self._frozen = load_frozen(
            "AutoModelForSequenceClassification",
            model,
            self.__name__,
            device,
            precision,
        )
        labels = self._frozen.network.config.num_labels
        if labels != 1:
            raise ValueError(
                f"icc: the model {model!r} has {labels} labels: expected one, the concreteness"
            )
        self.model = model
        self.clip = clip
        self.precision = precision
        self.batch_size = batch_size
        self.bounds = (0.0, 1.0) if clip else (-math.inf, math.inf)
        form = "clipped" if clip else "logit"
        self.signature = (
            f"ICC[{Path(model).name},{self._frozen.weights},{precision},{form}]"
        )

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions. ``RewardError`` where a score is not finite."""
        import torch

        texts = as_texts(completions)
        tokenizer = self._frozen.tokenizer
        if not texts:
            return []
        rows = [
            tokenizer(text, truncation=True, max_length=self._frozen.longest)
            for text in texts
        ]
        scores = [0.0] * len(texts)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]["input_ids"]))
        for batch in chunks(order, self.batch_size, "concreteness of captions"):
            batch_rows = [rows[row] for row in batch]
            inputs = tokenizer.pad(
                batch_rows, padding_side="right", return_tensors="pt"
            ).to(self._frozen.device)
            with torch.no_grad():
                logits = self._frozen.network(**inputs).logits[:, 0].float()
            for row, score in zip(batch, logits.tolist(), strict=True):
                # NaN stays, for checked_scores to refuse.
                scores[row] = float(np.clip(score, *self.bounds))
        return checked_scores(self, scores, len(texts))
