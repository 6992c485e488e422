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
        kwargs: arguments of that class. Of a decoder language model (``text``, ``transformers:NAME``)
            ``{bidirectional_blocks: N}``: in its last N blocks every token attends to all tokens of the caption. Of an
            image encoder of open_clip with random weights ``{vision_cfg: ...}``, over that of the architecture.
        pretrained: false starts a model of a library from random weights, in the shape of the one that is named; a tag
            is then not needed.
        train_blocks: train its last blocks, so many; 0 freezes it, null trains all of it.
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
        kwargs: the shape, from random weights. Of an open_clip model, its model JSON
            ``{embed_dim, vision_cfg, text_cfg}``, merged into that of ``name``. Otherwise arguments of ``LCLIPConfig``.
        image: pretrained image encoder, which with ``text`` makes a dual encoder (``contrastive``,
            ``positive_augmented``, ``specificity``); its heads are random, in the shape of ``kwargs``: arguments of
            ``DualConfig`` such as ``{embed_dim: 256, hidden: 1024, dropout: 0.5}``.
        text: pretrained text encoder. ``grammar``: what the head stands on, where ``init`` names none; ``kwargs`` are
            then ``{hidden, kernel, dropout, context_length}`` of the head, and ``train_blocks`` is of either encoder.
        init: weights to go on from. The folder of an open_clip model or of a dual encoder of pretrained parts; with
            ``name`` a tag of open_clip such as ``openai`` or a checkpoint file, also in Long-CLIP's layout.
            ``distill_image``, ``distill_text``: a folder that such a run exported. ``distill_dual``: that of an L-CLIP.
            ``grammar``: that of an L-CLIP or of its text tower, which the head is put on; or of a head.
        image_init: ``distill_dual``: the folder that ``distill_image`` exported; null starts from random weights.
        text_init: ``distill_dual``: the folder that ``distill_text`` exported; null starts from random weights.
        context_length: of an open_clip model: stretch the text tower of ``init`` to so many tokens, as Long-CLIP does
            (77 to 248).
        keep_positions: the first positions, which are not stretched; 20 in Long-CLIP.
        language_model: ``semantic_bottleneck``: the frozen causal language model of Transformers, a folder or hub name.
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
        name: open_clip architecture, hub id or local folder, as for the rewards.
        pretrained: with an architecture: a tag such as ``openai``, or a checkpoint file.
        precision: ``fp32``, ``fp16`` or ``bf16``.
        batch_size: images or captions of one forward pass.
        cache_mb: memory for its embeddings of the training split, in MiB a process; images, or captions, that do not
            fit are read from ``cache_dir``, or embedded, at every step instead.
        cache_dir: folder that keeps its embeddings of images and captions between runs; null keeps them in memory only.
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
        l1: distance (mean absolute difference) of raw embeddings, a tower. Null: 1/2 for one tower, 1/6 for both.
        cosine: 1 - cosine to the teacher's embedding, a tower. Null: the same.
        regulator: the Similarity Regulator, ``distill_dual`` only; 0 leaves it out. Null: 1/30.
        regulator_reduction: ``mean`` over diagonal and other pairs each (released code), or ``sum`` (paper).
        false_negatives: ``contrastive``: ``mask`` leaves pairs of the same image or the same caption, other than the
            own pair, out of the softmax, and hard negatives that are an image's caption; ``keep`` has all as negatives,
            as CLIP does.
        max_scale: of an open_clip model: largest factor of the cosines (inverse temperature).
        short: ``contrastive``: weight of Long-CLIP's second term, between short captions and the principal components
            of the images; 0 leaves it out, 1 in Long-CLIP.
        pca_rank: how many components.
        hard: weight of a further term of hard negatives; 0 leaves it out. ``contrastive``: an image picks its caption
            among its own alone (FSC-CLIP). Distillation: 1 - cosine of what each changes in the student's embedding of
            the caption and in the teacher's.
        hard_scale: ``contrastive``: factor of the cosines in that term; large, as one edit of a caption changes its
            cosine little.
        positive_images: ``positive_augmented``: weight of the term between captions and images generated for them.
        positive_captions: of the term between images and captions generated for them; 0 leaves either out.
        alpha: ``specificity``: weight of the contrastive term.
        beta: of the positive hinge: one more true detail scores higher.
        gamma: of the negative hinge: one more false detail scores lower.
        margin_units: of the hinges: ``logit`` (cosines times the learnt factor; released code) or ``cosine``.
        max_margin: largest dynamic margin, in these units; null is 1.5 logits or 0.015.
        symmetric: contrastive term of ``specificity`` in both directions; false is caption to image (released code).
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
    symmetric: bool = False


@dataclass
class NegativesConfig:
    """Hard negatives: false captions that the softmax of an image has besides those of the batch (NegCLIP).

    Args:
        count: of each caption; 0 has none.
        source: ``rules`` (part-of-speech tags), ``scenes`` (exact, of generated scenes), ``data`` (the column
            ``negatives`` of JSON lines), or ``package.module:Class`` of a ``NegativeSource``.
        kwargs: arguments of the source, such as ``{kinds: [replace_relation, swap_attribute]}``.
        share: fraction of the captions of a step that get negatives.
        positives: ``contrastive``: fraction of the captions of a step in whose place a paraphrase is learnt;
            negatives are made from that.
        positive_source: of these: ``data`` (the column ``positive_captions``), ``scenes`` (exact paraphrases, of
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
        captions: the caption of an image that a step learns: a ``random`` reference, or always the ``first``.
        trainable: ``positive_augmented``: the last ``projections`` of both towers and the temperature (PAC-S), ``lora``
            (low-rank updates in both towers, PAC-S++), or ``all``.
        lora_rank: of these updates.
        lora_alpha: their scale is ``lora_alpha / lora_rank``.
        plain_captions: of an open_clip model: fraction of captions learnt in lower case without punctuation, the form
            that a captioner with a vocabulary of words writes; for rewards of such captioners.
        freeze_patch_embed: ``distill_image``: copy patch projection, class token and, where they fit, positions from
            the teacher, and freeze them.
        freeze_text: ``distill_dual``: freeze the text tower; one with random weights is always trained.
        short_captions: ``contrastive`` with ``loss.short``: the short caption is the ``first_sentence`` of the caption
            (Long-CLIP), or a random one of the image's short ``references`` (``data.long_captions``).
        sentences: ``contrastive``, ``positive_augmented``: learn a random ``[least, most]`` of the sentences of each
            caption, in their order, others at every step; null learns whole captions.
        freeze_positions: of an open_clip model: freeze so many first positions; 20 in Long-CLIP's training, 0 in
            SPECS's.
        shuffle_rate: ``specificity``: fraction of false details whose words are shuffled.
        negatives: ``specificity``: false details come from the other captions of the ``batch`` (paper) or from all
            captions of the training ``data`` (released code), the first of each image.
        shuffle_per: ``unit`` draws for each false detail (paper), ``row`` once for each caption (released code).
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
        best_by: what chooses ``export/best`` and what ``patience`` waits for: ``val/loss`` (``contrastive``,
            ``positive_augmented``) is the loss of the validation split, lower is better; ``val/hard_negatives``
            (``contrastive``, ``distill_dual``) how often the true caption wins; null is the task's own metric, such as
            ``val/retrieval_r1``.
    """

    best_by: Literal["val/loss", "val/hard_negatives"] | None = None


@dataclass
class RewardModelConfig(TrustConfig):
    """``reward_model``: a dual encoder, a tower of one, or a text model.

    Args:
        task: ``contrastive`` (InfoNCE on image-caption pairs), ``positive_augmented`` (PAC-S: also on generated images
            and captions), ``specificity`` (SPECS: triplets of growing captions), ``distill_image`` and ``distill_text``
            (stage 1 of L-CLIP, one tower), ``distill_dual`` (stage 2, both), ``grammar`` (a head over a text encoder,
            for the reward of that name); of captions alone ``language_model``, ``semantic_bottleneck`` and
            ``text_regression`` (docs/icc.md).
        warm_start: configurations of reward models to train first, where they are not there yet.
        model: what is trained.
        teacher: what is distilled.
        loss: weights of its terms.
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
