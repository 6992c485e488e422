"""Configurations of the programs ``concreteness``, ``curate``, ``recaption``, ``positives``, ``retrieval``, ``web``."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl_caption.config.checks import decoding_of, wrong_decoding
from rl_caption.config.schema import DataConfig, DecodeConfig, JudgeConfig, RetrievalConfig, TrustConfig
from rl_caption.errors import ConfigError
from rl_caption.options import BatchSize, Range, Resamples, Seed, Steps, Weight, Workers


@dataclass
class ConcretenessConfig(TrustConfig):
    """``concreteness``: scores of captions, their combination, and targets for a student (docs/icc.md).

    Args:
        captions: JSON lines with ``caption``, or a text file with a caption a line.
        ratings: JSON lines ``{caption, rating}`` by people, from which the combination is fitted; null writes targets
            of a student for each scorer.
        scorers: heading to a reward that sees the caption alone, such as SBA and VBA.
        standardize: by length, of scores in [0, 1]: ``logit`` (the logit has mean 0.5 within each length), ``median``
            (the median of the score is 0.5), or ``none``.
        length: unit of length.
        bin_width: lengths that are standardised together: 1 is each its own.
        margin: scores are clipped to [margin, 1 - margin] before the logit.
        l2: of the logistic regression: its penalty is l2 / 2 times the sum of squared weights (scikit-learn: 1).
        out: folder for ``scores.jsonl``, ``targets.jsonl`` or ``targets_HEADING.jsonl``, and ``combination.json``.
    """

    captions: str
    scorers: dict[str, JudgeConfig] = field(default_factory=dict)
    ratings: str | None = None
    standardize: Literal["logit", "median", "none"] = "logit"
    length: Literal["words", "characters"] = "words"
    bin_width: Annotated[int, Range(min=1, max=1000)] = 1
    margin: Annotated[float, Range(above=0, below=0.5)] = 1e-4
    l2: Weight = 1.0
    out: str = "concreteness"


@dataclass
class Selection:
    """One step of the selection: which of the captions that are left stay, by one score.

    Args:
        score: a name in ``scores``.
        top: keep those with the highest scores: so many, or below 1 this fraction. Equal scores: the earlier rows.
        bottom: keep those with the lowest scores, likewise.
        min: keep scores of at least so much.
        max: keep scores of at most so much.
    """

    score: str
    top: Annotated[float, Range(above=0, max=10**12)] | None = None
    bottom: Annotated[float, Range(above=0, max=10**12)] | None = None
    min: float | None = None
    max: float | None = None


@dataclass
class CurateConfig(TrustConfig):
    """``curate``: rank and filter the captions of a data set (docs/curation.md).

    Args:
        data: a file, JSON lines (``.jsonl``), Parquet (``.parquet``) or Karpathy JSON (``.json``), or a folder of such
            files, which are read in the order of their names.
        image_root: folder that relative paths of images start from, relative to that of each file; null is that folder.
        image_column: of JSON lines and Parquet: the path of the image.
        caption_column: of JSON lines and Parquet: the caption, or a list of captions of the image.
        split: that is curated; rows of other splits are kept as they are. Rows without a split belong to it.
        rules: measure of a caption to ``[least, most]``, either of them null (docs/curation.md has the measures).
        text_column: of JSON lines and Parquet: text in the image, for the measure ``text_overlap``.
        scores: name to any reward that needs no references.
        select: steps, in their order, among the captions that follow the rules.
        duplicates: which of equal captions are dropped, all but the first: ``caption`` anywhere in the data, ``pair``
            with the same image; null keeps them.
        on_bad: an image that cannot be read: ``fail`` stops, ``skip`` drops its captions.
        part_rows: rows that are measured and scored at a time, and kept on disk as one part.
        worker: ``K/N``: only measure and score every N-th part from part K (0 to N - 1) on; a run without it goes on
            from what such runs left, also when they were stopped.
        num_workers: threads that check images.
        examples: captions that the report shows of each reason.
        seed: of these examples.
        out: folder for ``kept.jsonl``, ``report.md`` and ``parts``.
    """

    data: str
    image_root: str | None = None
    image_column: str = "image"
    caption_column: str = "references"
    split: str = "train"
    rules: dict[str, list[float | None]] = field(default_factory=dict)
    text_column: str | None = None
    scores: dict[str, JudgeConfig] = field(default_factory=dict)
    select: list[Selection] = field(default_factory=list)
    duplicates: Literal["caption", "pair"] | None = None
    on_bad: Literal["fail", "skip"] = "fail"
    part_rows: Annotated[int, Range(min=1, max=10**7)] = 20_000
    worker: str | None = None
    num_workers: Workers = 4
    examples: Annotated[int, Range(min=0, max=1000)] = 5
    seed: Seed = 0
    out: str = "curated"


@dataclass
class RecaptionerConfig:
    """Who writes the captions.

    Args:
        target: ``captioner`` (one of ours), ``vision_language`` (Transformers), ``scenes`` (exact descriptions of
            generated scenes), or ``package.module:Class`` of a ``Recaptioner``; null, of ``positives``, writes none.
        kwargs: arguments of it (docs/recaptioning.md).
    """

    target: str | None = "captioner"
    kwargs: dict = field(default_factory=dict)


@dataclass
class TextToImageConfig:
    """What makes images of captions.

    Args:
        target: ``diffusers:NAME`` (a pipeline of that package), ``scenes`` (drawings of the generated world), or
            ``package.module:Class`` of a ``TextToImage``; null makes none.
        kwargs: arguments of it (docs/pac.md).
        captions: an image of ``all`` references of a photo, or of the ``first`` alone (``train.captions: first``).
        batch_size: captions at a time.
    """

    target: str | None = None
    kwargs: dict = field(default_factory=dict)
    captions: Literal["all", "first"] = "all"
    batch_size: BatchSize = 16


@dataclass
class PartsConfig(TrustConfig):
    """A program that writes a data set anew, part by part.

    Args:
        data: images and their captions.
        splits: those that are worked on; the others are kept as they are. Empty takes all.
        part_rows: rows that are worked on at a time, and kept on disk as one part.
        worker: ``K/N``: only work on every N-th part from part K (0 to N - 1) on; a run without it goes on from what
            such runs left, also when they were stopped.
        out: folder for what is written; it refuses parts that were made by other settings.
    """

    data: DataConfig = field(default_factory=DataConfig)
    splits: list[str] = field(default_factory=lambda: ["train"])
    part_rows: Annotated[int, Range(min=1, max=10**7)] = 512
    worker: str | None = None
    out: str = "out"


@dataclass
class RecaptionConfig(PartsConfig):
    """``recaption``: write a new, long caption of every image of a data set (docs/recaptioning.md).

    Args:
        recaptioner: who writes the captions.
        language_model: folder or hub name of a causal language model, by which captions before and after are compared;
            null compares their lengths alone.
        out: folder for ``captions.jsonl``, ``report.md`` and ``parts``.
    """

    recaptioner: RecaptionerConfig = field(default_factory=RecaptionerConfig)
    language_model: str | None = None
    out: str = "recaptioned"


@dataclass
class PositivesConfig(PartsConfig):
    """``positives``: generated captions of images, and images of captions, as PAC-S learns from (docs/pac.md).

    Args:
        captions: who writes ``positive_captions`` of each image.
        images: what makes ``positive_images``, one of each reference.
        out: folder for ``positives.jsonl``, ``report.md``, ``positive_images`` and ``parts``.
    """

    captions: RecaptionerConfig = field(default_factory=lambda: RecaptionerConfig(target=None))
    images: TextToImageConfig = field(default_factory=TextToImageConfig)
    out: str = "positives"


@dataclass
class CompareRetrievalConfig(TrustConfig):
    """``retrieval``: image-text retrieval by dual encoders, side by side (docs/judging.md).

    Args:
        models: heading to a dual encoder.
        data: images and their captions; where rows have ``long_reference``, these are a second set of texts.
        split: of ``data``.
        max_images: the first so many images; null takes all.
        bootstrap: resamples of images for the 95 % intervals; 0 computes none.
        seed: of the resamples.
        out: folder for ``retrieval.md`` and ``retrieval.json``.
    """

    models: dict[str, RetrievalConfig] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    split: str = "test"
    max_images: Steps | None = None
    bootstrap: Resamples = 1000
    seed: Seed = 0
    out: str = "retrieval"


@dataclass
class WebConfig(TrustConfig):
    """``web``: a page in the browser that captions photos by several captioners, side by side.

    Args:
        models: folders of saved captioners, such as ``runs/NAME/export/best``, or names of models on the hub; changes
            are shown against the first.
        judges: heading to a reward that scores the captions, as in ``evaluate``: of captions and images, or of
            references, which are typed into the page.
        decode: greedy, beam search, or one sample.
        seed: of samples.
        host: address that is listened on; 127.0.0.1 is this machine alone.
        port: 0 takes a free one.
        max_images: photos that the page takes at a time.
        max_mb: largest file of a photo, in MiB.
        max_megapixels: most pixels of a photo, in millions.
    """

    models: list[str] = field(default_factory=list)
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    seed: Seed = 0
    host: str = "127.0.0.1"
    port: Annotated[int, Range(min=0, max=65535)] = 8765
    max_images: Annotated[int, Range(min=1, max=10**4)] = 50
    max_mb: Annotated[int, Range(min=1, max=1024)] = 20
    max_megapixels: Annotated[float, Range(above=0, max=178)] = 64.0

    def __post_init__(self) -> None:
        wrong = wrong_decoding(self.decode, None, candidates=True)
        count = 1 if wrong else decoding_of(self.decode).captions_per_image
        if count > 1:
            wrong = [f"decode gives {count} captions an image: the page shows one of each captioner"]
        if wrong:
            raise ConfigError("; ".join(wrong))
