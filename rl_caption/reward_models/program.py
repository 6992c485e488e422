"""The training program of reward models: from a configuration to a finished run folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rewards.clip.dual import PretrainedDual
from rewards.clip.preprocessing import Preprocessing, clip_tokenizer, embed_by_length, preprocessing_of
from rewards.clip.pretrained import ClipText
from rewards.devices import chunks
from rl_caption.config.reward_models import CLIP_TASKS, TEXT_TASKS, RewardModelConfig
from rl_caption.data.base import DataError, Row
from rl_caption.data.checks import check_row_images
from rl_caption.data.encode_features import made_by, recorded
from rl_caption.data.negatives import NEGATIVES, POSITIVES, NegativeSource
from rl_caption.engines import print_main
from rl_caption.errors import ConfigError, errors_of_user_code, naming
from rl_caption.options import check_type, load_target
from rl_caption.reward_models import losses
from rl_caption.reward_models.batch import (
    FeatureCache,
    PairCollate,
    PixelCache,
    StepTriplets,
    Texts,
    check_positives,
    donors_of,
    hard_negatives,
    plain_form,
)
from rl_caption.reward_models.checks import check_batch_norm, check_config, trains_dual
from rl_caption.reward_models.distillation import (
    Teacher,
    Tower,
    build_dual,
    build_tower,
    copy_patch_embedding,
    embed_distributed,
    load_teacher,
    names_teacher,
    save_tower,
)
from rl_caption.reward_models.encoders import (
    ClipTowers,
    DualTowers,
    Towers,
    is_frozen,
    pretrained_clip,
    pretrained_dual,
    random_clip,
    save_clip,
    train_only,
)
from rl_caption.reward_models.grammar import train_grammar
from rl_caption.reward_models.task import EmbeddingTask
from rl_caption.reward_models.text_models import train_text_model
from rl_caption.reward_models.triplets import make_triplets
from rl_caption.reward_models.validation import EmbeddingValidator, ValidationLoss
from rl_caption.training.loop import Trainer
from rl_caption.training.setup import CHECKED_IMAGES, Context, setup
from rl_caption.types import LOSS, TrainState

TEXTS = 4096
"""Captions that a frozen text encoder embeds at a time, sorted by length."""
TOWERS_OF: dict[str, tuple[Tower, ...]] = dict.fromkeys((*CLIP_TASKS, "distill_dual"), ("image", "text")) | {
    "distill_image": ("image",),
    "distill_text": ("text",),
}
_METRICS = {
    "specificity": "val/specificity",
    "distill_image": "val/teacher_cosine_image",
    "distill_text": "val/teacher_cosine_text",
}
"""Task -> metric that chooses its best model; ``val/retrieval_r1`` of tasks that are not here."""
_LOSSES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "contrastive": (losses.contrastive, ("short", "pca_rank", "hard", "hard_scale")),
    "positive_augmented": (losses.positive_augmented, ("positive_images", "positive_captions")),
    "specificity": (
        losses.specificity,
        ("alpha", "beta", "gamma", "margin_units", "max_margin", "fixed_margin", "symmetric"),
    ),
}
"""Task -> its loss, and the keys of the section ``loss`` that are options of it. Distillation: see ``objective``."""


@dataclass(frozen=True)
class EmbeddingModel:
    """What is trained, and what it reads."""

    network: nn.Module
    """From inputs by name to raw embeddings by name."""
    preprocessing: Preprocessing
    context_length: int
    trims: bool
    """Padding does not change a text embedding, so that token ids may be cut after the longest caption of a batch."""
    export: Callable[[Path], None]
    is_trained: bool
    """The network starts from trained weights, which are validated before the first step."""
    dual: PretrainedDual | None = None
    """The network's dual encoder, if it has one, whose frozen encoders may run before training."""


def train_reward_model(config: RewardModelConfig) -> TrainState:
    """Train a dual encoder, a tower of one, or a text model; the best by validation lies in ``export/best``.

    Raises:
        ConfigError: see ``check_config``, ``check_batch_norm`` and what builds the models.
    """
    check_config(config)
    if config.task == "grammar":
        return train_grammar(config)
    if config.task in TEXT_TASKS:
        return train_text_model(config)
    towers = TOWERS_OF[config.task]
    with setup(config, needs=towers) as context:
        teacher = None if config.task in CLIP_TASKS else load_teacher(context.accelerator, config, towers)
        model = _encoder(config) if teacher is None else _student(context, config, teacher)
        check_batch_norm(model.network, config.train, context.accelerator.num_processes)
        if teacher is not None:
            _check_images(config, context, teacher)
        positives, pixels, tokens = _positives(config, context), _images(config, model), _texts(config, context, model)
        collate, loss = _collate(config, context, pixels, tokens, positives), objective(config)
        validate = _validator(config, context, model.network, pixels, tokens, teacher, collate, loss)
        if teacher is not None:
            teacher.prepare(context.train_rows, config.train.captions, config.teacher.cache_mb * 2**20)
        signature = "" if teacher is None else f"{config.task}[{teacher.backbone.signature}]"
        metric = config.eval.best_by or _METRICS.get(config.task, "val/retrieval_r1")
        own = f"train.batch_size {config.train.batch_size}, {config.loss}, {config.negatives}"
        state = context.start(signature, metric, measured=own if config.eval.best_by else signature)
        decays = _decays(config.train.freeze_positions) if config.task in CLIP_TASKS else None
        network, optimizer = context.prepare(model.network, decays)
        return Trainer(
            context,
            EmbeddingTask(context.accelerator, network, loss, teacher or attrgetter("targets"), config.task),
            network,
            optimizer,
            collate,
            state,
            validate=validate,
            export=model.export,
            metric_range="nats" if metric == LOSS else "0 to 1" if len(towers) > 1 else "-1 to 1",
            validate_first=model.is_trained,
        ).fit()


def _check_images(config: RewardModelConfig, context: Context, teacher: Teacher) -> None:
    """Check that the teacher can read the images, also where the student reads features of them."""
    if isinstance(context.train_rows[0].get("image"), list | tuple):
        raise ConfigError(f"task {config.task} reads images, the data are videos: expected contrastive")
    if config.data.features_root is not None and not teacher.reads_features:
        rows = [*context.train_rows, *context.val_rows]  # whose images are not checked yet
        check_row_images(rows, "the teacher", config.data.check_images, context.folder / CHECKED_IMAGES)


def _validator(
    config: RewardModelConfig,
    context: Context,
    network: nn.Module,
    pixels: PixelCache | FeatureCache,
    tokens: Texts,
    teacher: Teacher | None,
    collate: PairCollate,
    loss: losses.Objective,
) -> EmbeddingValidator:
    rows, triplets = context.val_rows, None
    if config.task == "specificity":  # of first references, always the same; false details keep their word order
        captions = [row["references"][0] for row in rows]
        triplets = make_triplets(captions, [row["image_id"] for row in rows], config.train.seed, 0.0)
    return EmbeddingValidator(
        context.accelerator,
        network,
        TOWERS_OF[config.task],
        rows,
        pixels,
        tokens,
        config.eval.batch_size,
        teacher,
        triplets,
        _validation_negatives(config, collate.negatives, rows),
        ValidationLoss(loss, collate, config.train.batch_size) if config.eval.best_by == LOSS else None,
    )


def _collate(
    config: RewardModelConfig,
    context: Context,
    pixels: PixelCache | FeatureCache,
    tokens: Texts,
    positives: list[str],
) -> PairCollate:
    train, loss, wanted, rows = config.train, config.loss, config.negatives, context.train_rows
    towers = TOWERS_OF[config.task]
    triplets = negatives = paraphrases = None
    if loss.short and train.short_captions == "references":
        bare = [row["image_id"] for row in rows if not row["short_references"]]
        if bare:
            raise DataError(
                f"{len(bare)} of {len(rows)} training images have no references besides the long one (first: "
                f"{bare[0]!r}), of which train.short_captions references draws: add some, or take first_sentence"
            )
    if config.task == "specificity":
        donors = donors_of(rows) if train.negatives == "data" else None
        triplets = StepTriplets(
            rows, train.batch_size, train.seed, train.captions, train.shuffle_rate, train.shuffle_per, donors
        )
    if wanted.count:
        kwargs = dict(wanted.kwargs)
        if wanted.source == "rules":
            kwargs["captions"] = [caption for row in rows for caption in row["references"]]
        negatives = _caption_source(NEGATIVES, "negatives.source", wanted.source, kwargs, rows)
    if wanted.positives:
        paraphrases = _caption_source(POSITIVES, "negatives.positive_source", wanted.positive_source, {}, rows)
    return PairCollate(
        pixels if "image" in towers else None,
        tokens if "text" in towers else None,
        train.captions,
        config.data.augment,
        train.seed,
        train.short_captions if loss.short else None,
        triplets,
        train.plain_captions,
        positives,
        groups=loss.false_negatives == "mask",
        sentences=train.sentences,
        negatives=negatives,
        num_negatives=wanted.count,
        negatives_share=wanted.share,
        paraphrases=paraphrases,
        paraphrases_share=wanted.positives,
    )


def _caption_source(
    known: Mapping[str, str], key: str, name: str, kwargs: Mapping[str, Any], rows: Sequence[Row]
) -> Any:
    """The source of captions that ``key`` names, tried on the first row; a column of the data on all rows."""
    source = load_target(name, key, known)
    with naming(f"{key}: {name} cannot be made", (TypeError, ValueError)), errors_of_user_code(f"{key} {name}"):
        made = source(**kwargs)
    if ":" in name:
        made = _UserSource(made, f"{key} {name}", list[tuple[str, str]] if known is NEGATIVES else list[str])
    generator = np.random.default_rng(0)
    for row in rows if name == "data" else rows[:1]:  # a column that is absent, or scenes that are none
        made(row, row["references"][0], generator)
    return made


@dataclass(frozen=True)
class _UserSource:
    """A source of captions from outside: what it returns is checked, and errors in its code name it."""

    source: Any
    name: str
    returns: Any

    def __call__(self, row: Row, caption: str, generator: np.random.Generator) -> Any:
        with errors_of_user_code(self.name, error=DataError):
            captions = self.source(row, caption, generator)
        check_type(captions, self.returns, f"{self.name}: what it returned of image {row['image_id']!r}", DataError)
        return captions


def _validation_negatives(
    config: RewardModelConfig, source: NegativeSource | None, rows: Sequence[Row]
) -> list[tuple[int, str, str]]:
    """Index of a row, its first caption and a false caption; the same at every validation.

    ``ConfigError`` where the source has none, and the best model is to be chosen by them.
    """
    if source is None:
        return []
    count, seed = config.negatives.count, config.train.seed
    captions = [(index, row, row["references"][0]) for index, row in enumerate(rows)]
    found = [
        (index, caption, text)
        for index, row, caption in captions
        for text, counted in zip(*hard_negatives(source, count, row, caption, seed, -1), strict=True)
        if counted
    ]
    if not found and config.eval.best_by == "val/hard_negatives":
        raise ConfigError(
            f"eval.best_by is 'val/hard_negatives', but negatives.source {config.negatives.source} has none for the "
            f"first captions of {config.eval.split}: leave it out, or choose other negatives"
        )
    return found


def _decays(frozen_positions: int) -> Callable[[str, Tensor], bool]:
    """CLIP's rule: weight decay for matrices, none for gains, biases and the temperature (Radford et al. 2021).

    Where text positions are frozen, their table has no decay either: it would move them without a gradient.
    """
    return lambda name, parameter: parameter.ndim > 1 and not (frozen_positions and name == "clip.positional_embedding")


def _positives(config: RewardModelConfig, context: Context) -> list[str]:
    """The kinds of generated positives that the loss reads, after a check that the rows have them."""
    if config.task != "positive_augmented":
        return []
    weights = {"image": config.loss.positive_images, "text": config.loss.positive_captions}
    wanted = [kind for kind, weight in weights.items() if weight]
    splits = {"train": context.train_rows} | (
        {config.eval.split: context.val_rows} if config.eval.best_by == LOSS else {}
    )
    check, cache = config.data.check_images, context.folder / CHECKED_IMAGES
    with context.accelerator.main_process_first():  # the others then find the verdicts in the cache
        for split, rows in splits.items():
            check_positives(rows, wanted, config.train.captions, check, cache, split)
    return wanted


def objective(config: RewardModelConfig) -> losses.Objective:
    """The loss of a task; weights of distillation that are null get the defaults of the released code."""
    towers, loss = TOWERS_OF[config.task], config.loss
    if config.task in _LOSSES:
        function, names = _LOSSES[config.task]
        options = {name: getattr(loss, name) for name in names}
        if config.task == "contrastive":
            options["label_smoothing"] = config.train.label_smoothing
        return partial(function, **options)
    distance, regulator = losses.TOWER_WEIGHT[len(towers)], losses.REGULATOR_WEIGHT if len(towers) > 1 else 0.0
    return partial(
        losses.distillation,
        towers=towers,
        l1=distance if loss.l1 is None else loss.l1,
        cosine=distance if loss.cosine is None else loss.cosine,
        regulator=regulator if loss.regulator is None else loss.regulator,
        reduction=loss.regulator_reduction,
        hard=loss.hard,
    )


def _encoder(config: RewardModelConfig) -> EmbeddingModel:
    """The dual encoder to train: one of pretrained parts, or an open_clip model."""
    model, train, trained = config.model, config.train, config.model.init is not None
    if trains_dual(model):
        dual = pretrained_dual(model)
        network = DualTowers(dual, config.loss.max_scale)
        export = dual.save_pretrained
        return EmbeddingModel(network, dual.preprocessing, dual.context_length, True, export, trained, dual)
    if model.init is not None:
        clip, shape, preprocessing = pretrained_clip(model.name, model.init, model.context_length, model.keep_positions)
    else:
        clip, shape = random_clip(model.name, model.kwargs)
        preprocessing = preprocessing_of(clip.visual)
    towers = ClipTowers(clip, config.loss.max_scale, train.freeze_positions)
    if config.task == "positive_augmented":
        train_only(clip, train.trainable, train.lora_rank, train.lora_alpha)
    length, export = int(clip.context_length), partial(save_clip, clip, shape)
    return EmbeddingModel(towers, preprocessing, length, towers.trims, export, trained)


def _images(config: RewardModelConfig, model: EmbeddingModel) -> PixelCache | FeatureCache:
    """Pixels, or the features of ``data.features_root`` where a frozen encoder made them."""
    data, network = config.data, model.network
    if data.features_root is None:
        return PixelCache(model.preprocessing, data.cache_mb * 2**20)
    pool = None
    if isinstance(network, DualTowers):
        encoder = network.dual.image_encoder
        if not network.dual.config.cell_width:
            pool = network.dual.pool_image  # nothing trained comes before it, so once is enough
    else:
        tower: Any = network.get_submodule("towers.image")
        encoder = tower.encoder
    if encoder is None:
        raise ConfigError(
            "data.features_root holds features of a frozen encoder, but the student has none: leave it out"
        )
    if not made_by(data.features_root, encoder):
        source = (recorded(data.features_root) or {}).get("encoder", "an encoder that it does not name")
        raise ConfigError(
            f"data.features_root {data.features_root} has features of {source}: expected those of the model's image "
            "encoder, with its weights and preprocessing; make them by prepare_features"
        )
    return FeatureCache(pool, data.cache_mb * 2**20)


def _texts(config: RewardModelConfig, context: Context, model: EmbeddingModel) -> Texts:
    """Token ids, or the features of a frozen text encoder where they fit ``data.cache_mb`` and captions are known."""
    dual, accelerator, length = model.dual, context.accelerator, model.context_length
    if dual is None:
        tokens = Texts(ClipText(clip_tokenizer(), length), length, model.trims)
    else:
        tokens = Texts(dual.text_encoder, length)
    references = [caption for row in context.val_rows for caption in row["references"]]
    cut = tokens.too_long(references) if "text" in TOWERS_OF[config.task] else 0
    if cut:
        print_main(
            accelerator,
            f"{cut} of {len(references)} validation captions have more than {length} tokens (the model's "
            "context_length) and lose their end, as training captions do",
        )
    if dual is None:
        return tokens
    rows = [*context.train_rows, *context.val_rows]
    texts = [text for row in rows for text in (*row["references"], *row.get("positive_captions", ()))]
    if config.train.plain_captions:
        texts += [plain_form(text) for text in texts]
    distinct = list(dict.fromkeys(texts))
    edited = config.negatives.count or config.negatives.positives
    changing = config.task == "specificity" or config.loss.short or edited or config.train.sentences
    fits = len(distinct) * 4 * dual.text_head.norm.normalized_shape[0] <= config.data.cache_mb * 2**20
    if not is_frozen(dual.text_encoder) or changing or not fits:
        return tokens
    dual.to(accelerator.device).text_encoder.eval()

    @torch.no_grad()
    def embed(captions: list[str]) -> Tensor:
        """Features of captions, sorted by length."""
        found = []
        for part in chunks(captions, TEXTS, "features of captions by the frozen text encoder"):
            ids = dual.tokenize(part)
            lengths, most = dual.text_encoder.lengths(ids), config.eval.batch_size * dual.context_length
            found.append(embed_by_length(dual.text_features, ids, lengths, most, str(accelerator.device)).cpu())
        return torch.cat(found)

    features = embed_distributed(accelerator, distinct, embed)
    index = {text: number for number, text in enumerate(distinct)}
    return Texts(dual.text_encoder, length, features=features, index=index)


def _student(context: Context, config: RewardModelConfig, teacher: Teacher) -> EmbeddingModel:
    model, train, fingerprint = config.model, config.train, teacher.backbone.fingerprint
    towers: dict[str, nn.Module]
    export: Callable[[Path], None]
    if config.task == "distill_dual":
        folders: dict[Tower, str | None] = {"image": model.image_init, "text": model.text_init}
        dual = build_dual(model.init, folders, model.kwargs, teacher.width, fingerprint)
        for kind, folder in folders.items():
            if folder is not None and not names_teacher(folder):
                print_main(
                    context.accelerator,
                    f"WARNING: model.{kind}_init {folder} does not record its teacher: make sure that it was distilled "
                    "from the teacher of this run",
                )
        trained = model.init is not None or None not in (model.image_init, model.text_init)
        if train.freeze_text and (model.init is not None or model.text_init is not None):
            dual.text.requires_grad_(False)
        towers, shape, export = {"image": dual.image, "text": dual.text}, dual.config, dual.save_pretrained
    else:
        kind = "image" if config.task == "distill_image" else "text"
        tower: Any = build_tower(kind, model.init, model.kwargs, teacher.width)
        if kind == "image" and train.freeze_patch_embed:
            frozen = copy_patch_embedding(tower, teacher.backbone.model)
            print_main(context.accelerator, f"copied from the teacher and frozen: {', '.join(frozen)}")
        towers, shape, trained = {kind: tower}, tower.config, model.init is not None
        export = partial(save_tower, tower, kind, teacher=fingerprint)
    image: Any = towers.get("image")
    preprocessing = Preprocessing(shape.image_size) if image is None else image.preprocessing
    theirs = teacher.backbone.preprocessing
    if config.data.augment and "image" in teacher.towers and theirs != preprocessing:
        raise ConfigError(
            f"data.augment is set, but the teacher reads {theirs} and the student {preprocessing}: both must see the "
            "same view. Give the student the teacher's image_size, or leave data.augment out"
        )
    trims = shape.pad_attention == "masked"
    return EmbeddingModel(Towers(towers), preprocessing, shape.context_length, trims, export, trained)
