"""Configurations of the lab's programs."""

from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)

from rl_caption.captioners.config import Decoding
from rl_caption.config.commands import RetrievalConfig
from rl_caption.config.schema import DataConfig, PairsConfig, TrustConfig
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.options import Probability, Section, Seed

Measure = Literal["characters", "words", "actions", "complexity"]
"""Measure of a caption (docs/curation.md)."""


class JudgeSetConfig(TrustConfig):
    """``judge``: how well metrics agree with human judgements of captions (docs/judging.md)."""

    set: str
    """Name of the set of judgements, or ``scenes``, which compares with the facts of
    generated scenes.
    """
    data: str | None = None
    """Folder of the set's files; null is the current one. ``scenes`` has none."""
    images: str | None = None
    """Folder of the set's images; null looks for it in ``data``."""
    metrics: str | list[str] = "bleu,rouge,cider,meteor"
    """Metrics, as a list or separated by commas: cider, bleu (1 to 4), bleu1, rouge,
    meteor, spice, or any reward.
    """
    judges: dict[str, JudgeConfig] = {}
    """Further metrics, by their headings: rewards with options, as in ``evaluate``,
    such as CLIPScore with its backbone.
    """
    set_kwargs: dict = {}
    """Further options of the set, such as ``{held_out: true}`` of foil."""
    partial: bool = False
    """Accept a set whose number of judgements differs from the published one."""
    bootstrap: NonNegativeInt = 1000
    """Number of bootstrap resamples of images for the 95 % intervals; 0 computes none."""
    seed: Seed = 0
    """Random seed of the bootstrap."""
    out: str = "agreement"
    """Folder for ``agreement.md`` and ``agreement.json``."""


class ConcretenessConfig(TrustConfig):
    """``concreteness``: scores of captions, their combination, and targets for a
    student (docs/papers.md).
    """

    captions: str
    """JSON lines or a CSV file with ``caption``, or a text file with one caption per line."""
    scorers: dict[str, JudgeConfig]
    """Rewards that need only the caption, such as SBA and VBA, by their headings."""
    ratings: str | None = None
    """JSON lines, or CSV, ``{caption, rating}`` of human ratings, to which the
    combination is fitted; null writes targets for a student from each scorer.
    """
    source: str | None = None
    """Source and size of both files, for the error of a missing file."""
    standardize: Literal["logit", "median", "none"] = "logit"
    """Standardisation of scores in [0, 1] among captions of equal length: ``logit``
    (the mean of the logit becomes 0.5), ``median`` (the median of the score becomes
    0.5), or ``none``.
    """
    l2: NonNegativeFloat = 1.0
    """Regularisation of the logistic regression: l2 / 2 times the sum of squared
    weights (scikit-learn: 1).
    """
    out: str = "concreteness"
    """Folder for ``scores.jsonl``, ``targets.jsonl`` or ``targets_HEADING.jsonl``, and
    ``combination.json``.
    """


class Selection(Section):
    """One step of the selection, by one score."""

    score: str
    """A name in ``scores``, or ``random``."""
    top: Annotated[float, Field(gt=0, le=10**12)] | None = None
    """Keep this number of captions (below 1: this fraction) with the highest scores; at
    equal scores, the earlier rows.
    """
    bottom: Annotated[float, Field(gt=0, le=10**12)] | None = None
    """Keep this number of captions (below 1: this fraction) with the lowest scores."""
    min: float | None = None
    """Keep scores of at least this value."""
    max: float | None = None
    """Keep scores of at most this value."""


class RecaptionerConfig(Section):
    """The model that writes the captions."""

    target: str | None = "captioner"
    """``captioner`` (trained by this package, or a model of Transformers), ``scenes``
    (exact descriptions of generated scenes), or ``package.module:Class`` of your own;
    in ``positives``, null writes no captions.
    """
    kwargs: dict = {}
    """Options of the recaptioner (docs/recaptioning.md)."""


class TextToImageConfig(Section):
    """The model that generates images from captions."""

    target: str | None = None
    """``diffusers:NAME`` (a pipeline of that package), or ``package.module:Class`` of a
    ``TextToImage``; null generates none.
    """
    kwargs: dict = {}
    """Options of the model (docs/papers.md)."""
    captions: Literal["all", "first"] = "all"
    """Generate an image for ``all`` references of a photo, or only for the ``first``
    (``train.captions: first``).
    """
    batch_size: PositiveInt = 16
    """Captions per batch."""


class PartsConfig(PairsConfig):
    """A program that rewrites a data set part by part."""

    data: DataConfig = Field(default_factory=DataConfig)
    """Images and their captions."""
    splits: list[str] = ["train"]
    """Splits to process; others are kept unchanged. Empty processes all."""
    part_rows: Annotated[int, Field(ge=1, le=10**7)] = 512
    """Rows that are processed at a time, and saved as one part."""
    worker: Annotated[str, Field(pattern=r"^\d+/[1-9]\d*$")] | None = None
    """``K/N``, with K from 0 to N - 1: process only every N-th part, starting with part
    K. A run without it uses the parts of all workers and makes the missing ones.
    """
    out: str = "out"
    """Folder for the output; a folder with parts of other settings is refused."""


class CurateConfig(PartsConfig):
    """``curate``: rank and filter the captions of a data set (docs/curation.md).

    ``data.on_bad: skip`` drops captions of an image that cannot be read; rows of splits
    that are not curated are kept unchanged.
    """

    rules: dict[
        Measure, Annotated[list[float | None], Field(min_length=2, max_length=2)]
    ] = {}
    """``[min, max]`` for each measure of a caption; each bound may be null
    (docs/curation.md lists the measures).
    """
    scores: dict[str, JudgeConfig] = {}
    """Rewards that need no references, by name. ``icc`` is not clipped unless told so."""
    seed: Seed = 0
    """Random seed of the score ``random``."""
    select: list[Selection] = []
    """Steps that select among the captions that follow the rules, in their order."""
    duplicates: Literal["caption", "pair"] | None = None
    """Keep only the first of equal captions, among all data (``caption``) or among the
    captions of one image (``pair``); null keeps all.
    """
    part_rows: Annotated[int, Field(ge=1, le=10**7)] = 20_000
    """Rows that are measured and scored at a time, and saved as one part."""
    out: str = "curated"
    """Folder for ``kept.jsonl``, ``report.md`` and ``parts``."""


class RecaptionConfig(PartsConfig):
    """``recaption``: write a new, long caption of every image of a data set (docs/recaptioning.md)."""

    recaptioner: RecaptionerConfig = Field(default_factory=RecaptionerConfig)
    """The model that writes the captions."""
    out: str = "recaptioned"
    """Folder for ``captions.jsonl``, ``report.md`` and ``parts``."""


class PositivesConfig(PartsConfig):
    """``positives``: generate captions of images, and images of captions, for the
    training of PAC-S (docs/papers.md).
    """

    captions: RecaptionerConfig = RecaptionerConfig(target=None)
    """The model that writes ``positive_captions``, one of each image."""
    images: TextToImageConfig = Field(default_factory=TextToImageConfig)
    """The model that generates ``positive_images``, one of each reference."""
    out: str = "positives"
    """Folder for ``positives.jsonl``, ``report.md``, ``positive_images`` and ``parts``."""


class WriteNegativesConfig(PartsConfig):
    """``negatives``: write false captions of the references of a data set (docs/recaptioning.md)."""

    writer: RecaptionerConfig = RecaptionerConfig(target="language_model")
    """The language model that writes them: ``language_model`` or
    ``package.module:Class``, and its options.
    """
    out: str = "negatives"
    """Folder for ``negatives.jsonl``, ``report.md`` and ``parts``."""


class CompareRetrievalConfig(PairsConfig):
    """``retrieval``: compare dual encoders in image-text retrieval (docs/judging.md)."""

    models: dict[str, RetrievalConfig] = {}
    """Dual encoders, by their headings."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Images and their captions; if rows have ``long_reference``, retrieval by long
    captions is also computed.
    """
    split: str = "test"
    """Split of ``data``."""
    max_images: PositiveInt | None = None
    """Use only the first images, at most this number; null uses all."""
    bootstrap: NonNegativeInt = 1000
    """Number of bootstrap resamples of images for the 95 % intervals; 0 computes none."""
    seed: Seed = 0
    """Random seed of the bootstrap."""
    out: str = "retrieval"
    """Folder for ``retrieval.md`` and ``retrieval.json``."""


class SpecificityRatesConfig(PairsConfig):
    """``specificity``: how often judges reward one more true detail, and penalise a
    false detail (docs/judging.md).
    """

    judges: dict[str, JudgeConfig] = {}
    """Rewards that need no references, by name."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Images; the first caption of each grows (``data.long_captions``: the long one)."""
    split: str = "test"
    """Split of ``data``."""
    max_images: PositiveInt | None = None
    """Use only the first images, at most this number; null uses all."""
    shuffle_rate: Probability = 0.0
    """Fraction of false details whose words are shuffled."""
    seed: Seed = 0
    """Random seed of the choice of false details."""
    out: str = "specificity"
    """Folder for ``specificity.md``."""


class WebConfig(TrustConfig):
    """``web``: caption photos with several captioners, side by side, in a web page."""

    models: list[str] = []
    """Folders of saved captioners, such as ``runs/NAME/export/best``, or names of
    models on the hub.
    """
    judges: dict[str, JudgeConfig] = {}
    """Rewards that score the captions, by their headings, as in ``evaluate``.
    References, if a reward needs them, are typed into the page.
    """
    decode: Decoding = Field(default_factory=Decoding)
    """Greedy, beam search, or one sample."""
    seed: Seed = 0
    """Random seed of samples."""
    host: str = "127.0.0.1"
    """Address to listen on; 127.0.0.1 is reachable only from this machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8765
    """Port to listen on; 0 takes the first free one from 7860 on."""
    max_mb: Annotated[int, Field(ge=1, le=1024)] = 20
    """Largest file size of a photo, in MiB."""


class ShareConfig(Section):
    """``share RUN_OR_EXPORT --repo_id USER/NAME``: a trained model with its card."""

    positional: ClassVar[str] = "path"

    path: str
    """Folder of a run, or of an exported model."""
    repo_id: str | None = None
    """Repository on the hub to upload to, ``USER/NAME``."""
    private: bool = False
    """Make the repository a private one."""
    out: str = "shared"
    """Folder for the model and its card."""
    evaluation: str | None = None
    """Output of ``evaluate``: its scores go on the card."""
    license: str | None = None
    """License of the model, as the hub's identifier, such as ``apache-2.0``."""


class ReproduceConfig(TrustConfig):
    """``reproduce PAPER TABLE --data FOLDER ...``: a table of a paper, published and measured.

    Without a table, ``reproduce`` lists all tables, or the tables of a paper: what each
    table needs, and which of its rows can be made.
    """

    positional: ClassVar[str] = "which"

    which: list[str] = []
    """The paper, and the number of the table in it."""
    data: list[str] = []
    """Folders of data sets, or ``NAME=FOLDER`` for one data set."""
    rows: list[str] | None = None
    """Make only these rows."""
    images: str | None = None
    """Folder of the images; null looks beside the data."""
    model: list[str] = []
    """Weights of a model of the table: ``NAME=BACKBONE`` or
    ``NAME=BACKBONE@PRETRAINED``, as for clipscore.
    """
    partial: bool = False
    """Accept data whose number of judgements differs from the published one."""
    out: str | None = None
    """Folder for ``reproduce.md`` and ``reproduce.json``."""
