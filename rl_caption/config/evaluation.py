"""Configuration of ``evaluate``: a class for each source of captions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rewards.text.tokenize import TOKENIZER
from rl_caption.captioners.config import Decoding
from rl_caption.config.schema import DataConfig, PairsConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Resamples, Section, Seed


class RetrievalConfig(Section):
    """The dual encoder for image-text retrieval (docs/judging.md)."""

    backbone: str | None = None
    """Folder or name of the encoder, as for CLIP-based rewards (docs/rewards.md)."""
    pretrained: str | None = None
    """If ``backbone`` is an architecture: a tag such as ``openai``, or a checkpoint file."""
    kwargs: dict = {}
    """Further options of the encoder, such as ``{device: cuda, precision: fp16, cache_dir:
    FOLDER}``.
    """


class EvaluateConfig(PairsConfig):
    """``evaluate``: captions against references; ``--predictions F --help`` and ``--compare A B
    --help`` list theirs.

    The captions are of a captioner (``model``), of a file (``predictions``), or of two files (``compare``), each of which has keys of its own.
    """

    data: DataConfig = Field(default_factory=DataConfig)
    """Images and captions."""
    split: str | None = None
    """Split of ``data`` or, if they have splits (Karpathy JSON), of ``references``; null is
    ``test``, or all images of references without splits.
    """
    decode: Decoding = Field(default_factory=Decoding)
    """Greedy, beam search or samples; read where a captioner writes the captions."""
    metrics: list[str] | str = ["bleu", "meteor", "rouge", "cider", "spice"]
    """``bleu``, ``meteor``, rouge, cider, spice: a list, or names separated by commas."""
    tokenizer: Literal["auto", "java", "python", "unicode", "char", "none"] = "auto"
    """``java`` (of the COCO toolkit), ``python`` (its reimplementation in this package),
    ``unicode`` or ``char`` (as ``data.tokenizer``), or ``none`` (the text is tokenised already; it
    is only split at spaces). ``auto`` follows ``data.tokenizer``; for ``ptb`` it is ``python``, and
    Java for unusual captions.
    """
    bootstrap: Resamples = 1000
    """Number of bootstrap resamples of images for the 95 % intervals and the paired test; 0
    computes no intervals.
    """
    seed: Seed = 0
    """Of the bootstrap and of sampled captions."""
    judges: dict[str, JudgeConfig] = {}
    """Rewards whose means are further metrics, such as CLIPScore, by their column headings
    (docs/evaluation.md).
    """
    out: str = "evaluation"
    """Folder for ``predictions.json`` and ``scores.json``."""
    report: bool = False
    """Also write ``report.html`` there (docs/report.md)."""

    @classmethod
    def choose(cls, values: Mapping[str, Any]) -> type[EvaluateConfig]:
        """``compare`` or ``predictions`` where one is set, otherwise a captioner."""
        if values.get("compare"):
            return CompareConfig
        return (
            EvaluateModelConfig
            if values.get("predictions") is None
            else EvaluateFileConfig
        )


class EvaluateModelConfig(EvaluateConfig):
    """Captions of a captioner."""

    model: str | None = None
    """Folder of a saved captioner, such as ``runs/NAME/export/best``, or the name of a model on the
    hub.
    """
    prompt: str | list[dict] | None = None
    """Prompt of a model of Transformers; null uses the prompt that was saved with it, if any."""
    rerank: str | None = None
    """Chooses one of several captions of an image: ``consensus`` (the most similar to the others),
    or a reward that needs no references, by its name or as ``package.module:Class``; null chooses
    the first.
    """
    rerank_kwargs: dict = {}
    """Options of ``rerank``."""
    candidates: bool = False
    """Write all captions of an image with their scores to ``candidates.jsonl``, and their diversity
    and the scores of the best of them to ``candidates_scores.json``.
    """

    @model_validator(mode="after")
    def _check_evaluate_model(self) -> Self:
        if self.decode.remove_bad_endings and self.data.tokenizer != TOKENIZER:
            raise ConfigError(
                f"data.tokenizer is {self.data.tokenizer!r}: decode.remove_bad_endings is for "
                "English only"
            )
        check_choice(self.decode, self.rerank, self.candidates)
        return self


class EvaluateFileConfig(EvaluateConfig):
    """Captions of a file."""

    predictions: str | None = None
    """File of captions in COCO result format, or the folder of an evaluation."""
    references: str | None = None
    """File of references that do not belong to a split of ``data``."""


class CompareConfig(EvaluateConfig):
    """Captions of two files, compared by a paired test."""

    compare: list[str] = []
    """Two files of captions in COCO result format, or folders of evaluations. Without
    ``references`` and ``data``, two folders are compared on the data that they name.
    """
    references: str | None = None
    """File of references that do not belong to a split of ``data``."""

    @model_validator(mode="after")
    def _check_compare(self) -> Self:
        if len(self.compare) != 2:
            raise ConfigError(
                f"compare is {self.compare}: expected two files of captions"
            )
        if self.bootstrap < 1:
            raise ConfigError(
                f"bootstrap is {self.bootstrap}: a comparison needs at least 1 resample"
            )
        return self


def check_choice(decode: Decoding, rerank: str | None, candidates: bool) -> None:
    """Check that one caption of each image can be chosen. Raises ``ConfigError``."""
    count = decode.captions_per_image
    if rerank is not None and count < 2:
        several = "decode.num_samples, or decode.num_return_sequences of beam search"
        raise ConfigError(
            f"rerank is {rerank!r}: it chooses among several captions of an image; set {several}"
        )
    if count > 1 and rerank is None and not candidates:
        raise ConfigError(
            f"decode gives {count} captions an image: choose one by rerank, or set candidates"
        )
