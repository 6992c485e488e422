"""Configuration of ``reward_model``: dataclasses only."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from rl_caption.config.schema import DataConfig, EvalConfig, RunConfig, ScstConfig, TrainConfig, TrustConfig, XeConfig
from rl_caption.options import BatchSize, Fraction, Mebibytes, Positions, Positive, Range, Rank, Weight

Method: TypeAlias = Literal[
    "contrastive",
    "positive_augmented",
    "specificity",
    "distill_image",
    "distill_text",
    "distill_dual",
    "grammar",
    "language_model",
    "semantic_bottleneck",
    "text_regression",
]
CLIP_TASKS: tuple[Method, ...] = ("contrastive", "positive_augmented", "specificity")
"""Those that train an open_clip model or a dual encoder; ``distill_...`` distil one."""
TEXT_TASKS: tuple[Method, ...] = ("language_model", "semantic_bottleneck", "text_regression")
"""Those that train a model of captions alone, for ICC."""


@dataclass
class PartConfig:
    """A pretrained image or text encoder, a part of a dual encoder (docs/reward_models.md).

    Args:
        encoder: ``transformers:NAME``, ``open_clip:ARCHITECTURE/TAG``, ``timm:NAME`` (images), or
            ``package.module:Class``.
        kwargs: options of that class. For a decoder language model (``text``, ``transformers:NAME``):
            ``{bidirectional_blocks: N}`` lets every token attend to all tokens of the caption in the last N blocks. For
            an image encoder of open_clip with random weights: ``{vision_cfg: ...}`` changes that of the architecture.
        pretrained: false starts from random weights, in the shape of the named model; no tag is needed then.
        train_blocks: number of blocks to train, the last; 0 freezes the encoder, null trains all of it.
    """

    encoder: str | None = None
    kwargs: dict = field(default_factory=dict)
    pretrained: bool = True
    train_blocks: Annotated[int, Range(min=0, max=1024)] | None = 0


@dataclass
class EncoderConfig:
    """The model to train.

    Args:
        name: architecture of an open_clip model (``contrastive``, ``positive_augmented``, ``specificity``), such as
            ``ViT-B-32``.
        kwargs: shape of a model with random weights. For an open_clip model: its model JSON
            ``{embed_dim, vision_cfg, text_cfg}``, merged into that of ``name``. Otherwise: options of ``LCLIPConfig``.
        image: pretrained image encoder, which forms a dual encoder together with ``text`` (``contrastive``,
            ``positive_augmented``, ``specificity``). The projection heads start from random weights; ``kwargs`` are
            options of ``DualConfig``, such as ``{embed_dim: 256, hidden: 1024, dropout: 0.5}``.
        text: pretrained text encoder. For ``grammar``: the encoder below the head, unless ``init`` is set; the
            ``kwargs`` of the model are then ``{hidden, kernel, dropout, context_length}`` of the head, and
            ``train_blocks`` also applies to an encoder from ``init``.
        init: weights to start from: the folder of an open_clip model or of a dual encoder of pretrained parts; with
            ``name``, a tag of open_clip such as ``openai`` or a checkpoint file, also one of Long-CLIP.
            For ``distill_image`` and ``distill_text``: the export of such a run. For ``distill_dual``: an L-CLIP. For
            ``grammar``: an L-CLIP or its text tower, below a new head; or a trained head.
        image_init: ``distill_dual``: the export of ``distill_image``; null starts from random weights.
        text_init: ``distill_dual``: the export of ``distill_text``; null starts from random weights.
        context_length: of an open_clip model: stretch the positions of the text tower of ``init`` to this number, as
            Long-CLIP does (77 to 248).
        keep_positions: number of positions, the first, that are not stretched; 20 in Long-CLIP.
        language_model: ``semantic_bottleneck``: folder or hub name of the frozen causal language model (Transformers).
    """

    name: str | None = None
    kwargs: dict = field(default_factory=dict)
    image: PartConfig = field(default_factory=PartConfig)
    text: PartConfig = field(default_factory=PartConfig)
    init: str | None = None
    image_init: str | None = None
    text_init: str | None = None
    context_length: Annotated[int, Range(min=2, max=16384)] | None = None
    keep_positions: Positions = 20
    language_model: str | None = None


@dataclass
class TeacherConfig:
    """The frozen model to distil.

    Args:
        name: open_clip architecture, hub name or local folder, as for the rewards.
        pretrained: if ``name`` is an architecture: a tag such as ``openai``, or a checkpoint file.
        precision: ``fp32``, ``fp16`` or ``bf16``.
        batch_size: images or captions per forward pass.
        cache_mb: memory for the teacher's embeddings of the training split, in MiB per process. If those of all images
            (or all captions) do not fit, they are read from ``cache_dir`` or computed again at every step.
        cache_dir: folder that keeps the teacher's embeddings between runs; null keeps them in memory only.
    """

    name: str | None = None
    pretrained: str | None = None
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    batch_size: BatchSize = 64
    cache_mb: Mebibytes = 2048
    cache_dir: str | None = None


@dataclass
class LossConfig:
    """Weights of the terms of the loss; docs/reward_models.md, pac.md and specs.md. Null is the published code's value.

    Args:
        l1: mean absolute difference to the teacher's raw embedding, per tower. Null: 1/2 for one tower, 1/6 for both.
        cosine: 1 - cosine to the teacher's embedding, per tower. Null: 1/2 for one tower, 1/6 for both.
        regulator: the Similarity Regulator (``distill_dual`` only); 0 leaves it out. Null: 1/30.
        regulator_reduction: ``mean``, over diagonal and other pairs separately (released code), or ``sum`` (paper).
        false_negatives: ``contrastive``: ``mask`` removes false negatives from the softmax: other pairs of the same
            image or the same caption, and hard negatives that are captions of the image. ``keep`` keeps them, as CLIP
            does.
        max_scale: of an open_clip model: largest logit scale (inverse temperature).
        short: ``contrastive``: weight of Long-CLIP's second term, between short captions and the principal components
            of the images; 0 leaves it out, 1 in Long-CLIP.
        pca_rank: number of principal components.
        hard: weight of an additional loss on hard negatives; 0 leaves it out. ``contrastive``: each image chooses
            between its caption and the hard negatives of that caption only (FSC-CLIP). Distillation: a hard negative
            should change the student's embedding of the caption in the same direction as the teacher's (1 - cosine).
        hard_scale: ``contrastive``: logit scale of that loss; large, because a single edit changes the cosine little.
        positive_images: ``positive_augmented``: weight of the term between captions and images generated from them.
        positive_captions: ``positive_augmented``: weight of the term between images and captions generated from them;
            0 leaves a term out.
        alpha: ``specificity``: weight of the contrastive term.
        beta: ``specificity``: weight of the positive hinge: one more true detail scores higher.
        gamma: ``specificity``: weight of the negative hinge: one more false detail scores lower.
        margin_units: unit of the hinges: ``logit`` (cosine times the learned scale; released code) or ``cosine``.
        max_margin: largest dynamic margin, in this unit; null is 1.5 logits or a cosine of 0.015.
        fixed_margin: ``specificity``: this margin of both hinges, in this unit, in place of the dynamic ones.
        symmetric: ``specificity``: contrastive term in both directions; false is caption to image (released code).
    """

    l1: Weight | None = None
    cosine: Weight | None = None
    regulator: Weight | None = None
    regulator_reduction: Literal["mean", "sum"] = "mean"
    false_negatives: Literal["keep", "mask"] = "keep"
    max_scale: Annotated[float, Range(min=1, max=10**6)] = 100.0
    short: Weight = 0.0
    pca_rank: Rank = 32
    hard: Weight = 0.0
    hard_scale: Annotated[float, Range(min=1, max=10**6)] = 50.0
    positive_images: Weight = 0.05
    positive_captions: Weight = 0.1
    alpha: Weight = 1.0
    beta: Weight = 8.0
    gamma: Weight = 0.8
    margin_units: Literal["logit", "cosine"] = "logit"
    max_margin: Weight | None = None
    fixed_margin: Weight | None = None
    symmetric: bool = False


@dataclass
class NegativesConfig:
    """Hard negatives: false captions in the softmax of an image, in addition to those of the batch (NegCLIP).

    Args:
        count: hard negatives per caption; 0 uses none.
        source: ``rules`` (part-of-speech tags), ``scenes`` (exact, of generated scenes), ``data`` (the column
            ``negatives`` of JSON lines), or ``package.module:Class`` of a ``NegativeSource``.
        kwargs: options of the source, such as ``{kinds: [replace_relation, swap_attribute]}``.
        share: fraction of the captions of a step that get negatives.
        positives: ``contrastive``: fraction of the captions of a step that are replaced by a paraphrase; their
            negatives are made from the paraphrase.
        positive_source: source of paraphrases: ``data`` (the column ``positive_captions``), ``scenes`` (exact, of
            generated scenes), or ``package.module:Class`` of a ``PositiveSource``.
    """

    count: Annotated[int, Range(min=0, max=64)] = 0
    source: str = "rules"
    kwargs: dict = field(default_factory=dict)
    share: Fraction = 1.0
    positives: Fraction = 0.0
    positive_source: str = "data"


@dataclass
class RewardModelTrainConfig(TrainConfig):
    """Training a reward model; ``label_smoothing`` is read by ``contrastive``. Further arguments:

    Args:
        captions: caption of an image that is used in a step: a ``random`` reference, or always the ``first``.
        trainable: ``positive_augmented``: train the final ``projections`` of both towers and the temperature (PAC-S),
            ``lora`` in both towers (PAC-S++), or ``all`` weights.
        lora_rank: rank of LoRA.
        lora_alpha: the LoRA update is scaled by ``lora_alpha / lora_rank``.
        plain_captions: of an open_clip model: fraction of captions that are lower-cased and lose their punctuation, as
            the output of captioners with a word vocabulary; for rewards of such captioners.
        freeze_patch_embed: ``distill_image``: copy the patch projection, the class token and, if they fit, the position
            embeddings from the teacher, and freeze them.
        freeze_text: ``distill_dual``: freeze the text tower; one with random weights is always trained.
        short_captions: ``contrastive`` with ``loss.short``: the short caption is the ``first_sentence`` of the caption
            (Long-CLIP), or a random one of the image's short ``references`` (with ``data.long_captions``).
        sentences: ``contrastive``, ``positive_augmented``: ``[min, max]`` number of sentences of each caption to use,
            chosen at random at every step, in their order; null uses whole captions.
        freeze_positions: of an open_clip model: number of position embeddings, the first, to freeze; 20 in Long-CLIP, 0
            in SPECS.
        shuffle_rate: ``specificity``: fraction of false details whose words are shuffled.
        negatives: ``specificity``: take false details from the other captions of the ``batch`` (paper), or from the
            first caption of all images of the training ``data`` (released code).
        shuffle_per: decide about shuffling for each false detail (``unit``; paper) or each caption (``row``; released
            code).
    """

    captions: Literal["random", "first"] = "random"
    trainable: Literal["projections", "lora", "all"] = "projections"
    lora_rank: Rank = 4
    lora_alpha: Positive = 1.0
    plain_captions: Fraction = 0.0
    freeze_patch_embed: bool = True
    freeze_text: bool = True
    short_captions: Literal["first_sentence", "references"] = "first_sentence"
    sentences: list[Annotated[int, Range(min=1, max=1000)]] | None = None
    freeze_positions: Positions = 0
    shuffle_rate: Fraction = 0.9
    negatives: Literal["batch", "data"] = "batch"
    shuffle_per: Literal["unit", "row"] = "unit"


@dataclass
class RewardModelEvalConfig(EvalConfig):
    """Validation of a reward model during training. Further arguments:

    Args:
        best_by: metric that chooses ``export/best`` and that ``patience`` watches: ``val/loss`` (``contrastive``,
            ``positive_augmented``), the loss on the validation split; ``val/hard_negatives`` (``contrastive``,
            ``distill_dual``), how often the true caption scores higher than its hard negatives; null is the default of
            the task, such as ``val/retrieval_r1``.
    """

    best_by: Literal["val/loss", "val/hard_negatives"] | None = None


@dataclass
class RewardModelConfig(TrustConfig):
    """``reward_model``: a dual encoder, a tower of one, or a text model.

    Args:
        task: ``contrastive`` (InfoNCE on image-caption pairs), ``positive_augmented`` (PAC-S: also on generated images
            and captions), ``specificity`` (SPECS: triplets of growing captions), ``distill_image`` and ``distill_text``
            (stage 1 of L-CLIP, one tower), ``distill_dual`` (stage 2, both), ``grammar`` (a head on a text encoder, for
            the reward of that name); from captions only: ``language_model``, ``semantic_bottleneck`` and
            ``text_regression`` (docs/icc.md).
        warm_start: configurations of reward models to train first, unless they are done.
        model: the model to train.
        teacher: the model to distil.
        loss: weights of the terms of the loss.
        negatives: ``contrastive``, ``distill_text``, ``distill_dual``: false captions of each image.
        data: images and captions.
        train: optimisation.
        eval: validation: retrieval, agreement with the teacher, the loss.
        run: folder, resume, logs.
    """

    task: Method = "contrastive"
    warm_start: list[str] = field(default_factory=list)
    model: EncoderConfig = field(default_factory=EncoderConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: RewardModelTrainConfig = field(default_factory=RewardModelTrainConfig)
    eval: RewardModelEvalConfig = field(default_factory=RewardModelEvalConfig)
    run: RunConfig = field(default_factory=RunConfig)


TrainingConfig: TypeAlias = XeConfig | ScstConfig | RewardModelConfig
"""What the loop around every training reads."""
