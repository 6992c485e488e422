"""Configuration of ``evaluate``: a class for each source of captions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rewards.text.tokenize import TOKENIZER
from rl_caption.captioners.config import Decoding
from rl_caption.config.schema import DataConfig, PairsConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Resamples, Seed


@dataclass
class RetrievalConfig:
    """The dual encoder for image-text retrieval (docs/evaluation.md).

    Args:
        backbone: folder or name of the encoder, as for CLIP-based rewards (docs/rewards.md); in
            ``evaluate``, null computes no recall.
        pretrained: if ``backbone`` is an architecture: a tag such as ``openai``, or a checkpoint
            file.
        kwargs: further options of the encoder, such as ``{device: cuda, precision: fp16, cache_dir:
            FOLDER}``.
    """

    backbone: str | None = None
    pretrained: str | None = None
    kwargs: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backbone is None and (self.pretrained is not None or self.kwargs):
            raise ConfigError("backbone is not set, which pretrained and kwargs need")


@dataclass
class EvaluateConfig(PairsConfig):
    """``evaluate``: captions against references; ``--predictions F --help`` and ``--compare A B
    --help`` list theirs.

    The captions are of a captioner (``model``, or an ensemble of ``models``), of a file
    (``predictions``), or of two files (``compare``), each of which has keys of its own.

    Args:
        data: images and captions.
        split: split of ``data`` or, if they have splits (Karpathy JSON), of ``references``; null is
            ``test``, or all images of references without splits.
        decode: greedy, beam search or samples; read where a captioner writes the captions.
        metrics: bleu, meteor, rouge, cider, spice: a list, or names separated by commas.
        tokenizer: ``java`` (of the COCO toolkit), ``python`` (its reimplementation in this
            package), ``unicode`` or ``char`` (as ``data.tokenizer``), or ``none`` (the text is
            tokenised already; it is only split at spaces). ``auto`` follows ``data.tokenizer``; for
            ``ptb`` it is ``python``, and Java for unusual captions.
        bootstrap: number of bootstrap resamples of images for the 95 % intervals and the paired
            test; 0 computes no intervals.
        seed: of the bootstrap and of sampled captions.
        judges: rewards whose means are further metrics, such as CLIPScore, by their column headings
            (docs/evaluation.md).
        chair: options of the reward ``chair`` (docs/rewards.md) except ``measure``, such as
            ``{synonyms: FILE, objects: FILE}``: computes hallucinated objects as CHAIR-i and
            CHAIR-s; empty computes none.
        retrieval: how often captions, and references, retrieve their image (recall).
        out: folder for ``predictions.json`` and ``scores.json``.
        report: also write ``report.html`` there (docs/report.md).
    """

    data: DataConfig = field(default_factory=DataConfig)
    split: str | None = None
    decode: Decoding = field(default_factory=Decoding)
    metrics: list[str] | str = field(
        default_factory=lambda: ["bleu", "meteor", "rouge", "cider", "spice"]
    )
    tokenizer: Literal["auto", "java", "python", "unicode", "char", "none"] = "auto"
    bootstrap: Resamples = 1000
    seed: Seed = 0
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    chair: dict = field(default_factory=dict)
    retrieval: RetrievalConfig = field(default_factory=RetrievalConfig)
    out: str = "evaluation"
    report: bool = False

    @classmethod
    def alternative(cls, values: Mapping[str, Any]) -> type[EvaluateConfig]:
        """The class for ``compare`` or ``predictions`` where one is set, otherwise that for
        captioners.
        """
        if values.get("compare"):
            return CompareConfig
        return EvaluateModelConfig if values.get("predictions") is None else EvaluateFileConfig

    @classmethod
    def alternatives(cls) -> tuple[type[EvaluateConfig], ...]:
        """The three classes."""
        return EvaluateModelConfig, EvaluateFileConfig, CompareConfig

    def reference_file(self) -> str | None:
        """A file of references, in place of ``data``."""
        return None


@dataclass
class EvaluateModelConfig(EvaluateConfig):
    """Captions of a captioner. Further arguments:

    Args:
        model: folder of a saved captioner, such as ``runs/NAME/export/best``, or the name of a
            model on the hub.
        models: several captioners with one vocabulary, instead of ``model``: an ensemble.
        ensemble: what the ensemble averages at every token: ``probabilities`` or
            ``log_probabilities``.
        prompt: prompt of a model of Transformers; null uses the prompt that was saved with it, if
            any.
        rerank: chooses one of several captions of an image: ``consensus`` (the most similar to the
            others), or a reward that needs no references, by its name or as
            ``package.module:Class``; null chooses the first.
        rerank_kwargs: options of ``rerank``.
        candidates: write all captions of an image with their scores to ``candidates.jsonl``, and
            their diversity and the scores of the best of them to ``candidates_scores.json``.
    """

    model: str | None = None
    models: list[str] = field(default_factory=list)
    ensemble: Literal["probabilities", "log_probabilities"] = "probabilities"
    prompt: str | list[dict] | None = None
    rerank: str | None = None
    rerank_kwargs: dict = field(default_factory=dict)
    candidates: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None and self.models:
            raise ConfigError(f"model is {self.model!r} and models is {self.models}: set only one")
        if self.decode.remove_bad_endings and self.data.tokenizer != TOKENIZER:
            raise ConfigError(
                f"decode.remove_bad_endings is for English only, but data.tokenizer is "
                f"{self.data.tokenizer!r}"
            )
        check_choice(self.decode, self.rerank, self.candidates)

    @property
    def captioners(self) -> list[str]:
        """``models``, or ``model`` alone."""
        return self.models or [str(self.model)]


@dataclass
class EvaluateFileConfig(EvaluateConfig):
    """Captions of a file. Further arguments:

    Args:
        predictions: file of captions in COCO result format, or the folder of an evaluation.
        references: file of references that do not belong to a split of ``data``.
    """

    predictions: str | None = None
    references: str | None = None

    def reference_file(self) -> str | None:
        """``references``."""
        return self.references


@dataclass
class CompareConfig(EvaluateConfig):
    """Captions of two files, compared by a paired test. Further arguments:

    Args:
        compare: two files of captions in COCO result format, or folders of evaluations. Without
            ``references`` and ``data``, two folders are compared on the data that they name.
        references: file of references that do not belong to a split of ``data``.
    """

    compare: list[str] = field(default_factory=list)
    references: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.compare) != 2:
            raise ConfigError(f"compare is {self.compare}: expected two files of captions")
        if self.bootstrap < 1:
            raise ConfigError(
                f"bootstrap is {self.bootstrap}: a comparison needs at least 1 resample"
            )

    def reference_file(self) -> str | None:
        """``references``."""
        return self.references


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
            f"decode gives {count} captions an image: choose one by rerank, or keep all by "
            f"candidates"
        )
