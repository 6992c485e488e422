"""Configurations of ``evaluate``, and of the programs that are used from the command
line alone.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from rewards.registry import available
from rl_caption.captioners.config import Decoding
from rl_caption.config.schema import PairsConfig, TrustConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Section, Seed


class RetrievalConfig(Section):
    """The dual encoder for image-text retrieval (docs/judging.md)."""

    backbone: str | None = None
    """Folder or name of the encoder, as for CLIP-based rewards (docs/rewards.md)."""
    pretrained: str | None = None
    """If ``backbone`` is an architecture: a tag such as ``openai``, or a checkpoint file."""
    kwargs: dict = {}
    """Further options of the encoder, such as ``{device: cuda, precision: fp16,
    cache_dir: FOLDER}``.
    """


class RerankConfig(Section):
    """Choice among several captions of an image."""

    rerank: str | None = None
    """Chooses one of several captions of an image: ``consensus`` (the most similar to
    the others), or a reward that needs no references, by its name or as
    ``package.module:Class``; null chooses the first.
    """
    rerank_kwargs: dict = {}
    """Options of ``rerank``."""
    seed: Seed = 0
    """Random seed of sampled captions and, in evaluations, of the bootstrap."""


class EvaluateConfig(PairsConfig, RerankConfig):
    """``evaluate``: score captions against references. The captions come from two files
    (``compare``), from one file (``predictions``) or from a captioner (``model``).
    """

    model: str | None = None
    """Folder of a saved captioner, such as ``runs/NAME/export/best``, or the name of a
    model on the hub.
    """
    prompt: str | list[dict] | None = None
    """Prompt of a model of Transformers; null uses the prompt that was saved with it, if any."""
    predictions: str | None = None
    """File of captions in COCO result format, or the folder of an evaluation."""
    compare: list[str] = []
    """Two files of captions in COCO result format, or folders of evaluations, compared
    by a paired test. Without ``references`` and ``data``, two folders are compared on
    the data that they name.
    """
    references: str | None = None
    """File of references for files of captions, in place of a split of ``data``."""
    split: str | None = None
    """Split of ``data`` or, if they have splits (Karpathy JSON), of ``references``;
    null is ``test``, or all images of references without splits.
    """
    decode: Decoding = Decoding()
    """Greedy, beam search or samples; read where a captioner writes the captions."""
    candidates: bool = False
    """Write all captions of an image with their scores to ``candidates.jsonl``, and
    their diversity and best scores to ``candidates_scores.json``.
    """
    metrics: list[str] | str = ["bleu", "meteor", "rouge", "cider", "spice"]
    """Metrics: ``bleu``, ``meteor``, ``rouge``, ``cider``, ``spice``, as a list or
    separated by commas.
    """
    tokenizer: Literal["auto", "java", "python", "unicode", "char", "none"] = "auto"
    """Tokenizer of the metrics: ``java`` (the COCO toolkit's), ``python`` (its
    reimplementation in this package), ``unicode`` or ``char`` (as ``data.tokenizer``),
    or ``none`` (the text is tokenised already; it is only split at spaces). ``auto``
    follows ``data.tokenizer``; for ``ptb`` it is ``python``, and Java for unusual
    captions.
    """
    bootstrap: NonNegativeInt = 1000
    """Number of bootstrap resamples of images for the 95 % intervals and the paired
    test; 0 computes no intervals.
    """
    judges: dict[str, JudgeConfig] = {}
    """Rewards whose means are further metrics, such as CLIPScore, by their column
    headings (docs/evaluation.md).
    """
    out: str = "evaluation"
    """Folder for ``predictions.json`` and ``scores.json``."""
    report: bool = False
    """Also write ``report.html`` there (docs/report.md)."""

    @model_validator(mode="after")
    def _check_evaluate(self) -> Self:
        sources = (self.model, self.predictions, self.compare)
        if sum(map(bool, sources)) > 1 or len(self.compare) not in (0, 2):
            raise ConfigError(
                f"model, predictions and compare are {sources}: "
                "expected a captioner, a file or two files of captions"
            )
        if self.model and self.references:
            raise ConfigError(
                "references are set: captions of model use the references of data"
            )
        if self.compare and not self.bootstrap:
            raise ConfigError("bootstrap is 0: compare needs resamples")
        return self


class CaptionConfig(TrustConfig, RerankConfig, Decoding):
    """``caption --model RUN/export/best PHOTO|FOLDER ...``: caption photos."""

    positional: ClassVar[str] = "photos"

    photos: list[str]
    """Photos, and folders of photos."""
    model: str
    """Folder of a captioner, such as ``RUN/export/best``, or the name of a model on the hub."""
    prompt: str | None = None
    """Prompt of a model of Transformers; null uses the prompt that was saved with it, if any."""
    on_bad: Literal["fail", "skip"] = "fail"
    """``fail`` stops at an image that cannot be read; ``skip`` leaves it out."""
    out: str | None = None
    """Also write the captions to this JSON file, in COCO result format."""
    candidates: str | None = None
    """Write all captions of a photo with their scores to this JSON lines file."""


class ScoreConfig(TrustConfig):
    """``score --reward NAME --captions F --references F``: score captions in files with any reward."""

    reward: str = Field(
        description=f"{', '.join(available())}, or package.module:Class."
    )
    captions: str
    """File of captions, ``[{image_id, caption}, ...]``, or a folder of ``evaluate``."""
    references: str | None = None
    """File of references: ``{image_id: [str, ...]}``, COCO annotations, Karpathy JSON
    or JSON lines.
    """
    split: str | None = None
    """Split of Karpathy JSON or JSON lines; null takes all."""
    images: str | None = None
    """Folder of the images, for rewards that look at them."""
    df: str | None = None
    """File of document frequencies; null counts them in the references."""
    eos: bool = False
    """Count EOS as a token; published scores are without."""
    tokenizer: Literal["ptb", "unicode", "char", "none"] = "ptb"
    """Tokenizer of n-gram rewards: ``ptb`` (English), ``unicode`` (words of other
    languages), ``char`` (characters of Chinese and Japanese) or ``none`` (split at
    white space).
    """
    kwargs: dict = {}
    """Further options of the reward."""
    out: str | None = None
    """File for the reward, its signature, the mean and the scores."""


class ReportConfig(TrustConfig):
    """``report FOLDER ...``: one page about a run, an evaluation, a comparison, or
    several evaluations.
    """

    positional: ClassVar[str] = "folders"

    folders: list[str]
    """A run, an evaluation or a comparison, or several evaluations."""
    out: str | None = None
    """Folder for ``report.html``; null is the first of ``folders``."""
    images: NonNegativeInt = 200
    """Maximum number of images in the gallery."""


class PrepareCocoConfig(Section):
    """``prepare_coco``: check the counts of COCO captions that the configurations read."""

    folder: str = "data/coco"
    """The folder of ``dataset_coco.json``."""
    subset: bool = False
    """The file is a part of COCO: do not compare the counts."""


class PrepareFeaturesConfig(PairsConfig):
    """``prepare_features TSV ... --out FOLDER``, or ``prepare_features --encoder NAME
    --data.path PATH --out FOLDER``: region features from published files, or of photos
    by a frozen encoder.
    """

    positional: ClassVar[str] = "tsv"

    tsv: list[str] = []
    """Files of bottom-up attention, LXMERT or VinVL."""
    out: str
    """Folder for one ``.npz`` an image."""
    dtype: Literal["float32", "float16"] | None = None
    """Type of the stored features; null is float32 for TSV files, float16 with
    ``encoder``.
    """
    encoder: str | None = None
    """``transformers:NAME``, ``open_clip:ARCHITECTURE/TAG`` or ``package.module:Class``."""
    kwargs: dict = {}
    """Options of the encoder."""
    splits: list[str] | None = None
    """Splits of ``data`` to encode; null takes all. ``data.path`` may be a folder of images, too."""
    device: str | None = None
    """Device, such as ``cpu`` or ``cuda:0``; null is a GPU if there is one."""
    batch_size: PositiveInt = 32
    """Images per forward pass."""
    num_workers: PositiveInt = 4
    """Threads that read images."""

    @model_validator(mode="after")
    def _check_prepare_features(self) -> Self:
        if bool(self.tsv) == (self.encoder is not None and self.data.path is not None):
            raise ConfigError(
                "tsv is not set: name TSV files, or encoder and data.path"
            )
        return self
