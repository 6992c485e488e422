"""Configurations of the lab's programs but ``judge``: concreteness, curation, new columns,
retrieval, the page.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rewards.devices import Precision
from rl_caption.captioners.config import Decoding
from rl_caption.config.evaluation import RetrievalConfig
from rl_caption.config.schema import DataConfig, JudgeConfig, PairsConfig, RewardConfig, TrustConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import (
    BatchSize,
    Range,
    Resamples,
    Seed,
    Steps,
    Tokens,
    Weight,
    Workers,
)


@dataclass
class ConcretenessConfig(TrustConfig):
    """``concreteness``: scores of captions, their combination, and targets for a student
    (docs/papers.md).

    Args:
        captions: JSON lines or a CSV file with ``caption``, or a text file with one caption per
            line.
        ratings: JSON lines, or CSV, ``{caption, rating}`` of human ratings, to which the
            combination is fitted; null writes targets for a student from each scorer.
        source: where both files come from and what they take, in words that the error has where one
            is missing.
        scorers: rewards that need only the caption, such as SBA and VBA, by their headings.
        standardize: of scores in [0, 1], among captions of equal length: ``logit`` (the mean of the
            logit becomes 0.5), ``median`` (the median of the score becomes 0.5), or ``none``.
        length: unit of length.
        bin_width: number of successive lengths that are standardised together; 1 treats each length
            separately.
        margin: scores are clipped to [margin, 1 - margin] before the logit.
        l2: regularisation of the logistic regression: l2 / 2 times the sum of squared weights
            (scikit-learn: 1).
        out: folder for ``scores.jsonl``, ``targets.jsonl`` or ``targets_HEADING.jsonl``, and
            ``combination.json``.
    """

    captions: str
    scorers: dict[str, JudgeConfig] = field(default_factory=dict)
    ratings: str | None = None
    source: str | None = None
    standardize: Literal["logit", "median", "none"] = "logit"
    length: Literal["words", "characters"] = "words"
    bin_width: Annotated[int, Range(min=1, max=1000)] = 1
    margin: Annotated[float, Range(above=0, below=0.5)] = 1e-4
    l2: Weight = 1.0
    out: str = "concreteness"


@dataclass
class Selection:
    """One step of the selection, by one score.

    Args:
        score: a name in ``scores``.
        top: keep this number of captions (below 1: this fraction) with the highest scores. Of equal
            scores, the earlier rows are kept.
        bottom: keep this number of captions (below 1: this fraction) with the lowest scores.
        min: keep scores of at least this.
        max: keep scores of at most this.
    """

    score: str
    top: Annotated[float, Range(above=0, max=10**12)] | None = None
    bottom: Annotated[float, Range(above=0, max=10**12)] | None = None
    min: float | None = None
    max: float | None = None


@dataclass
class RecaptionerConfig:
    """The model that writes the captions.

    Args:
        target: ``captioner`` (trained by this package), ``vision_language`` (Transformers),
            ``scenes`` (exact descriptions of generated scenes), or ``package.module:Class`` of a
            ``Recaptioner``; in ``positives``, null writes no captions.
        kwargs: options of the recaptioner (docs/recaptioning.md).
    """

    target: str | None = "captioner"
    kwargs: dict = field(default_factory=dict)


@dataclass
class TextToImageConfig:
    """The model that generates images from captions.

    Args:
        target: ``diffusers:NAME`` (a pipeline of that package), or ``package.module:Class`` of a
            ``TextToImage``; null generates none.
        kwargs: options of the model (docs/papers.md).
        captions: generate an image for ``all`` references of a photo, or only for the ``first``
            (``train.captions: first``).
        batch_size: captions per batch.
    """

    target: str | None = None
    kwargs: dict = field(default_factory=dict)
    captions: Literal["all", "first"] = "all"
    batch_size: BatchSize = 16


@dataclass
class PartsConfig(PairsConfig):
    """A program that rewrites a data set part by part.

    Args:
        data: images and their captions.
        splits: splits to process; others are kept unchanged. Empty processes all.
        part_rows: rows that are processed at a time, and saved as one part.
        worker: ``K/N``, with K from 0 to N - 1: process only every N-th part, starting with part K.
            A run without it uses the parts of such runs and completes what is missing.
        out: folder for the output; one with parts of other settings is refused.
    """

    data: DataConfig = field(default_factory=DataConfig)
    splits: list[str] = field(default_factory=lambda: ["train"])
    part_rows: Annotated[int, Range(min=1, max=10**7)] = 512
    worker: str | None = None
    out: str = "out"


@dataclass
class CurateConfig(PartsConfig):
    """``curate``: rank and filter the captions of a data set (docs/curation.md).

    Args:
        data: images and their captions; ``data.on_bad: skip`` drops captions of an image that
            cannot be read.
        splits: splits to curate; rows of others are kept unchanged. Empty curates all.
        rules: ``[min, max]`` for each measure of a caption, either of them null (docs/curation.md
            lists the measures).
        scores: rewards that need no references, by name.
        select: steps that select among the captions that follow the rules, in their order.
        duplicates: keep only the first of equal captions: in all the data (``caption``) or of one
            image (``pair``); null keeps all.
        part_rows: rows that are measured and scored at a time, and saved as one part.
        examples: number of captions that the report shows for each reason.
        out: folder for ``kept.jsonl``, ``report.md`` and ``parts``.
    """

    rules: dict[str, list[float | None]] = field(default_factory=dict)
    scores: dict[str, JudgeConfig] = field(default_factory=dict)
    select: list[Selection] = field(default_factory=list)
    duplicates: Literal["caption", "pair"] | None = None
    part_rows: Annotated[int, Range(min=1, max=10**7)] = 20_000
    examples: Annotated[int, Range(min=0, max=1000)] = 5
    out: str = "curated"


@dataclass
class RecaptionConfig(PartsConfig):
    """``recaption``: write a new, long caption of every image of a data set (docs/recaptioning.md).

    Args:
        recaptioner: the model that writes the captions.
        language_model: folder or hub name of a causal language model whose log-probabilities
            compare the old and new captions; null compares only their lengths.
        out: folder for ``captions.jsonl``, ``report.md`` and ``parts``.
    """

    recaptioner: RecaptionerConfig = field(default_factory=RecaptionerConfig)
    language_model: str | None = None
    out: str = "recaptioned"


@dataclass
class PositivesConfig(PartsConfig):
    """``positives``: generate captions of images, and images of captions, for the training of PAC-S
    (docs/papers.md).

    Args:
        captions: the model that writes ``positive_captions``, one of each image.
        images: the model that generates ``positive_images``, one of each reference.
        out: folder for ``positives.jsonl``, ``report.md``, ``positive_images`` and ``parts``.
    """

    captions: RecaptionerConfig = field(default_factory=lambda: RecaptionerConfig(target=None))
    images: TextToImageConfig = field(default_factory=TextToImageConfig)
    out: str = "positives"


@dataclass
class WriteNegativesConfig(PartsConfig):
    """``negatives``: write false captions of the references of a data set (docs/recaptioning.md).

    Args:
        writer: the language model that writes them: ``language_model`` or ``package.module:Class``,
            and its options.
        out: folder for ``negatives.jsonl``, ``report.md`` and ``parts``.
    """

    writer: RecaptionerConfig = field(
        default_factory=lambda: RecaptionerConfig(target="language_model")
    )
    out: str = "negatives"


@dataclass
class LanguageModelConfig:
    """A language model: a local one, or an endpoint; neither where both are null.

    Args:
        model: folder or hub name of a causal language model of Transformers.
        endpoint: an OpenAI-compatible one in its place: ``{url, model, ...}``
            (docs/rewards.md).
        device: of the local model; null takes a GPU where there is one.
        precision: of the local model.
        batch_size: prompts that the local model reads at a time.
        chat_template_kwargs: variables of the chat template, local or behind the endpoint. By
            default thinking is turned off; ``{}`` sends none to the endpoint.
    """

    model: str | None = None
    endpoint: dict | None = None
    device: str | None = None
    precision: Precision = "fp32"
    batch_size: BatchSize = 16
    chat_template_kwargs: dict | None = None

    @property
    def is_set(self) -> bool:
        """Whether it names a model."""
        return self.model is not None or self.endpoint is not None


@dataclass
class QuestionsConfig(PartsConfig):
    """``questions``: write multiple-choice questions of a data set's images
    (docs/rewards.md).

    Args:
        splits: splits to process; others are kept unchanged. Empty processes all.
        writer: the language model that writes questions from the references; where none is set,
            those that the data have are taken.
        reader: the language model that answers them, to refuse what is answered right without a
            caption, or not from the references; where none is set, the writer's.
        count: most questions of an image that the writer is asked for.
        max_new_tokens: most tokens of its answer, which has all questions of an image.
        cache_dir: folder where answers of both models are kept.
        seed: of the order of choices.
        out: folder for ``questions.jsonl``, ``report.md`` and ``parts``.
    """

    splits: list[str] = field(default_factory=list)
    writer: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    reader: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    count: Annotated[int, Range(min=1, max=100)] = 6
    max_new_tokens: Tokens = 1024
    cache_dir: str | None = None
    seed: Seed = 0
    out: str = "questions"


@dataclass
class CompareRetrievalConfig(PairsConfig):
    """``retrieval``: compare dual encoders in image-text retrieval (docs/judging.md).

    Args:
        models: dual encoders, by their headings.
        data: images and their captions; if rows have ``long_reference``, retrieval by long captions
            is also computed.
        split: split of ``data``.
        max_images: use only the first images, at most this number; null uses all.
        bootstrap: number of bootstrap resamples of images for the 95 % intervals; 0 computes none.
        seed: of the bootstrap.
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
    """``web``: caption photos with several captioners, side by side, in a web page.

    Args:
        models: folders of saved captioners, such as ``runs/NAME/export/best``, or names of models
            on the hub; differences to the captions of the first are marked.
        judges: rewards that score the captions, by their headings, as in ``evaluate``. References,
            if a reward needs them, are typed into the page.
        decode: greedy, beam search, or one sample.
        seed: of samples.
        host: address to listen on; 127.0.0.1 is reachable only from this machine.
        port: port to listen on; 0 takes the first free one from 7860 on.
        max_mb: largest file size of a photo, in MiB.
    """

    models: list[str] = field(default_factory=list)
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    decode: Decoding = field(default_factory=Decoding)
    seed: Seed = 0
    host: str = "127.0.0.1"
    port: Annotated[int, Range(min=0, max=65535)] = 8765
    max_mb: Annotated[int, Range(min=1, max=1024)] = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if (count := self.decode.captions_per_image) > 1:
            raise ConfigError(
                f"decode gives {count} captions an image: the page shows one of each captioner"
            )


@dataclass
class ModelCellConfig:
    """How one cell differs from the recipe.

    Args:
        overrides: values by dotted key of the recipe, such as ``{loss.regulator: 3.333}``.
    """

    overrides: dict = field(default_factory=dict)


@dataclass
class JudgedSetConfig:
    """A set of judgements, as in ``judge``.

    Args:
        set: name of the set.
        data: folder of its files.
        images: folder of its images; null looks for it in ``data``.
        set_kwargs: further options of the set.
        partial: accept a set whose number of judgements differs from the published one.
    """

    set: str
    data: str
    images: str | None = None
    set_kwargs: dict = field(default_factory=dict)
    partial: bool = False


@dataclass
class AblateModelsConfig(TrustConfig):
    """``ablate_models``: a grid of reward models from one recipe, and tables of what they are good
    for.

    Args:
        base: recipe of ``reward_model`` that all cells share.
        cells: overrides of each cell, by its label.
        seeds: values of ``train.seed``; each cell is trained with each of them.
        retrieval: split of the recipe's data on which R@1 is computed in both directions; null
            computes none.
        sets: sets of judgements, by their headings: agreement with people, or accuracy on hard
            negatives.
        reward: the reward that scores the sets with the model, such as ``l_clipscore``,
            ``clipscore`` or ``specs``.
        kwargs: further options of the reward.
        jobs: number of runs at a time, each in its own process.
        out: folder of all runs and of ``table.md`` and ``table.json``.
    """

    base: str
    cells: dict[str, ModelCellConfig] = field(default_factory=dict)
    seeds: list[Seed] = field(default_factory=lambda: [0])
    retrieval: str | None = "test"
    sets: dict[str, JudgedSetConfig] = field(default_factory=dict)
    reward: str = "clipscore"
    kwargs: dict = field(default_factory=dict)
    jobs: Workers = 1
    out: str = "runs/ablation_models"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError(
                f"seeds is {self.seeds}: expected different whole numbers, and at least one"
            )


@dataclass
class StressConfig(PairsConfig):
    """``stress``: how a reward can be hacked, before training on it (docs/stress.md).

    Args:
        reward: the reward to test; ``reward.normalize`` must be ``none``, as scores of different
            calls are compared.
        data: images and their captions; the generated world, whose truth is known, unless you name
            your own.
        split: split whose images are used. The first reference of an image is judged, and the
            reward sees the others; on data of your own it sees the second half, and the gold score
            the first.
        train_split: split whose references give document frequencies.
        max_images: use only the first images, at most this number; null uses all.
        model: folder of a saved captioner, or name of one on the hub, whose samples are scored;
            null samples nothing.
        num_samples: captions sampled for each image.
        max_new_tokens: length limit of the samples in tokens, EOS included.
        judges: rewards that the tested one does not see, by name: further gold scores.
        push: a configuration of ``scst``, file or recipe, by which ``model`` is trained on the
            reward; null trains nothing. Reward, data, ``model.init`` and ``run.dir`` are those of
            this test.
        bootstrap: number of bootstrap resamples of images for the 95 % intervals.
        seed: of all choices.
        out: folder for ``stress.json``, ``report.html`` and the run ``push``.
    """

    reward: RewardConfig = field(default_factory=lambda: RewardConfig(terms={}))
    data: DataConfig = field(default_factory=lambda: DataConfig("scenes"))
    split: str = "test"
    train_split: str = "train"
    max_images: Steps | None = 200
    model: str | None = None
    num_samples: Annotated[int, Range(min=2, max=4096)] = 64
    max_new_tokens: Tokens = 20
    judges: dict[str, JudgeConfig] = field(default_factory=dict)
    push: str | None = None
    bootstrap: Annotated[int, Range(min=2, max=10**6)] = 1000
    seed: Seed = 0
    out: str = "stress"
