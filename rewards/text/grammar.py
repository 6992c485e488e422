"""Grammar of captions: the probability that a trained head takes one for a sentence that a person wrote."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewards.base import as_texts, checked_scores, naming
from rewards.devices import DTYPES, Precision, chunks, default_device
from rewards.options import Count, check_values
from rewards.text.tokenize import TOKENIZER, tokenize


class Grammar:
    """Grammar: probability under a trained head that a caption is no broken sentence, in [0, 1]; text only.

    Source: Cho et al., "Fine-grained Image Captioning with CLIP Reward", Findings of NAACL 2022. As in the training of
    the head, captions are lower-cased and stripped of punctuation (``rewards.text.tokenize``). A caption without a word
    scores 0. Captions that are too long for the encoder are cut.

    Args:
        head: folder that the task ``grammar`` of ``reward_model`` exported.
        device, precision, batch_size: as for ``Icc``.

    Raises:
        ValueError: an argument is wrong, or the head cannot be loaded.
    """

    __name__ = "grammar"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, 1.0)
    tokenizer = TOKENIZER

    def __init__(
        self,
        head: str | Path,
        device: str | None = None,
        precision: Precision = "fp32",
        batch_size: int = 256,
    ) -> None:
        check_values(Precision, precision=precision)
        check_values(Count, batch_size=batch_size)
        import torch

        from rewards.clip.grammar_head import GrammarModel
        from rewards.model_files import fingerprint

        self.head, self.precision, self.batch_size = Path(head), precision, batch_size
        self.device = default_device(device)
        with naming(f"grammar: the head {str(self.head)!r} cannot be loaded"):
            network = GrammarModel.from_pretrained(self.head)
        weights = fingerprint(network.state_dict(), network.config)[:12]
        self.signature = f"{self.__name__}[{self.head.name},{weights},{precision}]+{self.tokenizer}"
        self._network = network.to(device=self.device, dtype=getattr(torch, DTYPES[precision]))

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions; no column is needed.

        Raises:
            RewardError: a score is not finite.
        """
        import torch

        texts = [" ".join(tokenize(text)) for text in as_texts(completions)]
        scores = [0.0] * len(texts)
        order = sorted(
            (row for row, text in enumerate(texts) if text), key=lambda row: len(texts[row])
        )
        for batch in chunks(order, self.batch_size, "grammar of captions"):
            ids = self._network.tokenize([texts[row] for row in batch]).to(self.device)
            with torch.no_grad():
                probabilities = self._network(ids).float().sigmoid().tolist()
            for row, score in zip(batch, probabilities, strict=True):
                scores[row] = score
        return checked_scores(self, scores, len(texts))
