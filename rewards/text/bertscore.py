"""BERTScore of captions against references, by the package ``bert-score`` of its authors.

Source: Zhang et al., "BERTScore: Evaluating Text Generation with BERT", ICLR 2020,
section 3, F1. Captions and references go to the model's own tokenizer as they are,
without PTB tokenisation.
"""

import importlib
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewards.base import (
    RewardError,
    as_texts,
    checked_scores,
    naming,
    optional,
    reference_lists,
)
from rewards.frozen_model import most_tokens
from rewards.options import Count, check_values


class BertScore:
    """BERTScore F1 of each caption: the best over the references of its image, in [-1,
    1]; no rescaling.

    Values of one model lie in a small range (0.85 to 0.95, say), and compare with
    values of the same model, layer and package only. A caption without a word gets 0,
    as in the package.

    Args:
        model: folder of a Transformers model with its tokenizer, or a name on the hub,
            such as ``roberta-large``, the package's choice for English.
        layers: layer whose embeddings are compared, from 1; None is the package's
            choice for models that it knows.
        device: such as ``cuda``; None is the GPU where there is one.
        batch_size: captions at once, at least 1; changes scores by rounding only.

    Raises:
        ValueError: the package or the model is not there, or ``layers`` is needed or out of range.
    """

    __name__ = "bertscore"
    columns = frozenset({"references"})
    bounds = (-1.0, 1.0)

    def __init__(
        self,
        model: str,
        layers: int | None = None,
        device: str | None = None,
        batch_size: int = 64,
    ) -> None:
        check_values(Count, batch_size=batch_size)
        from rewards.model_files import fingerprint

        package = optional(
            "bert_score", "the reward 'bertscore' needs", "'rl-caption[bertscore]'"
        )
        default_layers = importlib.import_module("bert_score.utils").model2layers
        if layers is None and model not in default_layers:
            raise ValueError(
                f"bertscore: set layers for the model {model!r}: bert-score has no default for it"
            )
        self.layers = layers if layers is not None else int(default_layers[model])
        self.model = model
        self.batch_size = batch_size
        what = (
            f"bertscore: the model {model!r} with layers {self.layers} cannot be used"
        )
        with naming(what, (OSError, ValueError, AssertionError)):
            _check_code(model)
            self._scorer = package.BERTScorer(
                model_type=model,
                num_layers=self.layers,
                device=device,
                batch_size=batch_size,
            )
        _mend_tokenizer(self._scorer, model)
        version = importlib.metadata.version("bert-score")
        which = f"{Path(model).name},{fingerprint(self._scorer._model.state_dict())[:12]},L{self.layers},no-idf"
        self.signature = f"BERTScore-F1[{which}]+bert-score{version}"

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions by the column ``references``.

        Raises:
            RewardError: as ``reference_lists``, or a reference has no word, or a score
                is not finite.
        """
        texts = as_texts(completions)
        references = reference_lists(columns, self.__name__, len(texts))
        for row, captions in enumerate(references):
            for caption in captions:
                if not caption.strip():
                    raise RewardError(
                        f"reward {self.__name__!r}: row {row} has a reference without a word"
                    )
        scores = [0.0] * len(texts)
        rows = [row for row, text in enumerate(texts) if text.strip()]
        if rows:
            values = self._scorer.score(
                [texts[row] for row in rows],
                [list(references[row]) for row in rows],
                batch_size=self.batch_size,
            )[2].tolist()
            for row, value in zip(rows, values, strict=True):
                scores[row] = value
        return checked_scores(self, scores, len(texts))


def _check_code(model: str) -> None:
    """Refuse a model that needs code of its own: bert-score would ask at the terminal
    whether to run it.
    """
    from transformers import AutoConfig, AutoTokenizer

    from rewards.model_files import transformers_options

    options = transformers_options(model)
    for loader in (AutoConfig, AutoTokenizer):
        loader.from_pretrained(model, **options)


def _mend_tokenizer(scorer: Any, model: str) -> None:
    """Give the tokenizer a maximal length and the space before the first word, on which
    GPT-2's and RoBERTa's tokens depend; bert-score asks for it at every call, which
    Transformers 5 silently ignores.
    """
    from transformers import AutoTokenizer, GPT2Tokenizer, RobertaTokenizer

    if isinstance(scorer._tokenizer, GPT2Tokenizer | RobertaTokenizer):
        scorer._tokenizer = AutoTokenizer.from_pretrained(
            model, use_fast=False, add_prefix_space=True, trust_remote_code=False
        )
    scorer._tokenizer.model_max_length = most_tokens(
        scorer._model.config, scorer._tokenizer
    )
