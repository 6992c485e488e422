"""Fluency of captions under a frozen causal language model of Transformers: the mean
log-probability of a token.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rewards.base import as_texts, checked_scores, eos_captions
from rewards.devices import Precision, chunks
from rewards.frozen_model import load_frozen
from rewards.options import Count, check_values


class Perplexity:
    """Fluency: mean log-probability of a caption's tokens under a frozen causal
    language model, in [``floor``, 0].

    (1 / L) Σ_t ln p(w_t | BOS, w_1, ..., w_t-1), in nats: minus the logarithm of the
    caption's perplexity (Jelinek et al. 1977). EOS is the last token of captions that
    ended (column ``finished``), so that captions that break off score lower. Captions
    with more tokens than the model has positions are cut; a caption without a token
    scores ``floor``. The mean favours what is frequent, such as repetitions and stock
    phrases, so give it a small weight beside a term that uses the image or the
    references.

    Args:
        model: folder of a causal language model of Transformers with its tokenizer and
            safetensors weights, or a name on the hub, such as ``gpt2``.
        floor: smallest score, below 0; lower means are clamped. A uniform guess among
            GPT-2's 50,257 tokens is -10.8.
        eos: append EOS as a token to captions that ended.
        device, precision, batch_size: as for ``Icc``.

    Raises:
        ValueError: an argument is wrong, the model cannot be found or loaded, or its
            tokenizer has neither BOS nor EOS.
    """

    __name__ = "perplexity"
    columns: frozenset[str] = frozenset()
    bounds = (-10.0, 0.0)

    def __init__(
        self,
        model: str,
        floor: float = -10.0,
        eos: bool = True,
        device: str | None = None,
        precision: Precision = "fp32",
        batch_size: int = 64,
    ) -> None:
        if not -math.inf < floor < 0:
            raise ValueError(f"floor is {floor}: expected a number below 0")
        check_values(Count, batch_size=batch_size)
        self._frozen = load_frozen(
            "AutoModelForCausalLM", model, self.__name__, device, precision
        )
        self.model = model
        self.floor = float(floor)
        self.eos = eos
        self.precision = precision
        self.bounds = (self.floor, 0.0)
        self.batch_size = batch_size
        read = f"{Path(model).name},{self._frozen.weights},{precision},{'eos' if eos else 'no eos'}"
        self.signature = f"{self.__name__}[{read},floor{self.floor:g}]"
        tokenizer = self._frozen.tokenizer
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        token_ids = [one for one in ids if one is not None]
        self._bos, self._eos = token_ids[:1], token_ids[-1:]
        if not token_ids:
            raise ValueError(
                f"perplexity: the tokenizer of {model!r} has neither BOS nor EOS"
            )

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions; ``finished`` (N booleans, absent: all true) says which end with EOS.

        Raises:
            RewardError: ``finished`` has another length, or a score is not finite.
        """
        texts = as_texts(completions)
        ended = eos_captions(self, columns, len(texts))
        if not texts:
            return []
        words = self._frozen.tokenizer(texts, add_special_tokens=False)["input_ids"]
        rows = []
        for ids, end in zip(words, ended, strict=True):
            tokens = [*self._bos, *ids, *(self._eos if end else [])]
            rows.append(tokens[: self._frozen.longest])
        scores = [self.floor] * len(texts)
        order = [row for row, ids in enumerate(rows) if len(ids) > 1]
        order.sort(key=lambda row: len(rows[row]))
        for batch in chunks(order, self.batch_size, "log-probabilities of captions"):
            totals = self._log_probabilities([rows[row] for row in batch])
            for row, total in zip(batch, totals, strict=True):
                mean = float(np.float32(total) / np.float32(len(rows[row]) - 1))
                # NaN stays, for checked_scores to refuse; a mean of logarithms may round to above 0.
                scores[row] = float(np.clip(mean, *self.bounds))
        return checked_scores(self, scores, len(texts))

    def _log_probabilities(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Sums of the log-probabilities of the tokens after the first of B rows of token ids."""
        import torch

        lengths = torch.tensor([len(row) for row in rows])
        tensors = [torch.tensor(row) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)  # [B, L]
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        ids = ids.to(self._frozen.device)
        mask = mask.to(self._frozen.device)
        with torch.no_grad():
            output = self._frozen.network(input_ids=ids, attention_mask=mask.long())
        logits = output.logits[:, :-1].float().transpose(1, 2)
        values = -torch.nn.functional.cross_entropy(
            logits, ids[:, 1:], reduction="none"
        )
        return (values * mask[:, 1:]).sum(dim=1).tolist()
