"""Configuration: dataclasses only. ``cli`` fills them from YAML and the command line, ``build.py``
reads them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from rewards.mixed import LOG_KEYS
from rl_caption.captioners.config import LoraConfig as LoraConfig
from rl_caption.captioners.config import ModelConfig as ModelConfig
from rl_caption.captioners.config import NewModelConfig
from rl_caption.monitoring.config import JudgeConfig as JudgeConfig
from rl_caption.monitoring.config import MonitorConfig
from rl_caption.runtime.errors import ConfigError, section_errors
from rl_caption.runtime.options import (
    TEMPERATURES,
    BatchSize,
    Beams,
    LearningRate,
    LengthPenalty,
    Mebibytes,
    Positive,
    Probability,
    Range,
    Seed,
    Steps,
    Temperature,
    Tokens,
    Weight,
    Workers,
    wrong_values,
)
from rl_caption.scst import ADVANTAGES, OBJECTIVES

NEED_TWO_SAMPLES = frozenset(
    {"leave_one_out", "mean", "group_norm"} | (set(OBJECTIVES) - {"reinforce", "ppo_clip"})
)
"""Advantages and objectives that compare samples of an image."""


@dataclass
class DataConfig:
    """The images and their captions.

    Args:
        format: ``karpathy`` (one JSON with splits), ``jsonl`` (one JSON object a line), ``scenes``
            (generated world), ``hub`` (what the library ``datasets`` reads: the hub, Parquet, CSV,
            tar shards); published layouts ``coco`` (annotations, such as NoCaps), ``sharegpt4v``,
            ``dci`` and ``urban1k``. Only for reward models: ``images`` (a folder) or ``captions``
            (a text file), which train one tower of L-CLIP, and ``caption_targets`` (captions with a
            number each), for ``text_regression``.
        target: ``package.module:Name`` of a format outside this package (docs/data.md); null uses
            ``format``.
        path: the JSON file, or the folder that holds it; the folder of ``images``; the file or
            folder of ``captions``; the name on the hub.
        source: where the files come from and what they take, in words that the error has where
            ``path`` is missing.
        image_root: folder of the images, absolute or relative to the folder of the JSON.
        image_extension: extension of the image files, such as ``.jpg``, where it is not the one in
            the JSON.
        flatten: ignore the folders (``filepath``) in the JSON.
        columns: of ``jsonl`` and ``hub`` in another layout: name here -> name there, such as
            ``{image: image_file, references: description}`` (docs/data.md).
        features_root: region features: a folder with one file per image, or one HDF5 file. Relative
            paths start from the working directory.
        features_kwargs: how features are stored, such as ``{dim: 2048, max_regions: 100}``
            (docs/data.md).
        augment: random augmentations of the training images: ``horizontal``, ``vertical``,
            ``transpose``, ``crop``, ``shift``, ``rotate``. Choose only those after which captions
            are still true. ``rand_augment`` is for reward models only.
        tokenizer: splits captions into words for n-gram rewards, document frequencies, validation,
            the monitor and the vocabulary of a new captioner: ``ptb`` (English, as the COCO
            toolkit), ``unicode`` (other languages with spaces between words) or ``char``
            (characters of Chinese and Japanese); docs/languages.md.
        on_bad: ``fail`` stops at unusable images and captions; ``skip`` leaves them out and reports
            them.
        check_images: decode every image before training starts.
        num_workers: processes that load images; 0 loads them in the main process.
        cache_mb: memory for decoded and resized images, in MiB per process; 0 keeps none.
        long_captions: use the long description of an image (``long_reference``) as its only
            caption, in training, rewards and validation (``jsonl`` and ``scenes`` only).
        num_frames: the files are videos (folders of frames, animated images or video files); use
            this number of frames of each, from the centres of equal segments (docs/rewards.md). Null:
            the files are images.
        kwargs: further options of the format, such as ``{num_train: 2000, seed: 1}`` for
            ``scenes``.
    """

    format: Literal[
        "karpathy",
        "jsonl",
        "hub",
        "coco",
        "sharegpt4v",
        "dci",
        "urban1k",
        "scenes",
        "images",
        "captions",
        "caption_targets",
    ] = "karpathy"
    target: str | None = None
    path: str | None = None
    source: str | None = None
    image_root: str | None = None
    image_extension: str | None = None
    flatten: bool = False
    columns: dict[str, str] | None = None
    features_root: str | None = None
    features_kwargs: dict = field(default_factory=dict)
    augment: list[
        Literal["horizontal", "vertical", "transpose", "crop", "shift", "rotate", "rand_augment"]
    ] = field(default_factory=list)
    tokenizer: Literal["ptb", "unicode", "char"] = "ptb"
    on_bad: Literal["fail", "skip"] = "fail"
    check_images: bool = True
    num_workers: Annotated[int, Range(min=0, max=1024)] = 0
    cache_mb: Mebibytes = 1024
    long_captions: bool = False
    num_frames: Annotated[int, Range(min=1, max=4096)] | None = None
    kwargs: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        from rl_caption.data.formats import wrong_options

        try:
            wrong = wrong_options(self)
        except ConfigError as error:
            wrong = [str(error)]
        if wrong:
            raise ConfigError("; ".join(wrong).removeprefix("data."))

    def check_pairs(self) -> None:
        """Check that these can be images with captions, for a captioner. Raises ``ConfigError``
        otherwise.
        """
        if self.target is None and self.format in UNPAIRED:
            raise ConfigError(
                f"format is {self.format!r}, which only reward models read: choose a format of "
                f"images with captions, "
                "such as karpathy or jsonl"
            )
        if self.features_root is not None and self.augment:
            raise ConfigError(
                f"augment is {self.augment}: stored features cannot be augmented; leave it out, or "
                f"store random views "
                "(data.features_kwargs.views)"
            )
        if "rand_augment" in self.augment:
            raise ConfigError(
                "augment has 'rand_augment', which only reward models read: leave it out"
            )


UNPAIRED = ("images", "captions", "caption_targets")
"""Formats of data without captions, or without images."""
Schedule: TypeAlias = list[tuple[Annotated[int, Range(min=0, max=10**9)], Weight]]
"""Points (step, factor): linear in between, constant before the first and after the last; equal
steps are a jump.
"""


def _check_ascending(key: str, points: Schedule | None) -> None:
    steps = [step for step, _ in points or ()]
    if steps != sorted(steps):
        raise ConfigError(f"{key} has the steps {steps}: expected them in ascending order")


@dataclass
class RewardTerm:
    """One reward of the mixture.

    Args:
        weight: factor of the raw score in the total.
        target: name of a reward of this package, or ``package.module:Class`` of another; null uses
            the term's name.
        kwargs: options of the reward.
        schedule: points ``[step, factor]``: the weight is multiplied by the factor, which is linear
            between two points and constant before the first and after the last. Two points at one
            step are a jump (docs/scst.md). Null keeps the weight.
        length_ratio: ``[min, max]``, such as ``[0.5, 2]``: a caption scores 0 if its length,
            divided by the mean length of its references, is outside of this range. Null allows all
            lengths.
    """

    weight: Annotated[float, Range(min=-(10**6), max=10**6)] = 1.0
    target: str | None = None
    kwargs: dict = field(default_factory=dict)
    schedule: Schedule | None = None
    length_ratio: tuple[Weight, Weight] | None = None

    def __post_init__(self) -> None:
        _check_ascending("schedule", self.schedule)
        if self.length_ratio is not None and self.length_ratio[0] >= self.length_ratio[1]:
            raise ConfigError(
                f"length_ratio is {list(self.length_ratio)}: expected the smaller number first"
            )


@dataclass
class TrustConfig:
    """Which code saved models may run.

    Args:
        trust: classes outside this package, as ``package.module:Class``, that the ``config.json``
            of a saved model may name. They are imported and called with the arguments in that file
            (docs/reliability.md). A class that this configuration names itself, such as
            ``model.target``, need not be listed.
    """

    trust: list[str] = field(default_factory=list, kw_only=True)

    def __post_init__(self) -> None:
        if wrong := list(wrong_values(self, type(self))):
            raise ConfigError("; ".join(wrong))


@dataclass
class PairsConfig(TrustConfig):
    """A configuration whose ``data`` are images with captions, for a captioner
    (``DataConfig.check_pairs``).
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        with section_errors("data"):
            vars(self)["data"].check_pairs()


@dataclass
class RewardConfig:
    """The reward of sampled captions: a weighted sum of terms.

    Args:
        terms: weight and options of each term, by its name.
        normalize: ``none`` adds raw scores. ``per_term`` adds z-scores of each term over all
            samples of an optimizer step, so that the scales of the terms do not matter;
            ``per_group`` over the samples of each image.
        df: file of document frequencies for CIDEr-D, also where ``diversity`` uses it; null counts
            them in the training split, with one document per image.
        eos: count EOS as a word in candidates, references and document frequencies.
    """

    terms: dict[str, RewardTerm] = field(default_factory=lambda: {"cider": RewardTerm()})
    normalize: Literal["none", "per_term", "per_group"] = "none"
    df: str | None = None
    eos: bool = True

    def __post_init__(self) -> None:
        if self.terms and not any(term.weight for term in self.terms.values()):
            raise ConfigError(
                f"terms {', '.join(self.terms)} all have weight 0: expected at least one other "
                f"weight"
            )
        for name in sorted(LOG_KEYS & self.terms.keys()):
            raise ConfigError(f"terms.{name}: the log key reward/{name} is in use, rename the term")


@dataclass
class RolloutConfig:
    """How captions are sampled.

    Args:
        num_samples: captions sampled per image (K).
        temperature: softmax temperature, both for sampling and for the log-probabilities in the
            loss.
        temperature_schedule: points ``[step, factor]`` for the temperature, as ``schedule`` of a
            reward term.
        max_new_tokens: length limit in tokens, EOS included.
        dropout: keep dropout on while sampling and in the loss, as the first self-critical
            implementations did; off keeps the update on-policy.
        cuda_graph: decode with a CUDA graph, which is captured at the first step: the same captions
            in less time. Needs a CUDA device, inputs of few sizes, no ZeRO-3 and ``dropout`` off.
        beam_search: use the K captions of a beam search of width K (length penalty 1) instead of
            samples; for objectives that compare the captions of an image, as in the DiCO paper.
    """

    num_samples: Annotated[int, Range(min=1, max=4096)] = 5
    temperature: Temperature = 1.0
    temperature_schedule: Schedule | None = None
    max_new_tokens: Tokens = 24
    dropout: bool = False
    cuda_graph: bool = False
    beam_search: bool = False

    def __post_init__(self) -> None:
        if self.beam_search:
            defaults = {"cuda_graph": False, "temperature": 1, "temperature_schedule": None}
            for key in [key for key, value in defaults.items() if getattr(self, key) != value]:
                raise ConfigError(
                    f"{key} is {getattr(self, key)}: it is for samples, but rollout.beam_search is "
                    f"on"
                )
            if self.num_samples < 2:
                raise ConfigError(
                    f"num_samples is {self.num_samples}: beam search has a width of at least 2"
                )
        if self.cuda_graph and self.dropout:
            raise ConfigError(
                "cuda_graph and rollout.dropout are both on: every replay would drop the same units"
            )
        if self.cuda_graph and self.temperature_schedule:
            raise ConfigError(
                "cuda_graph and rollout.temperature_schedule are both set: a graph has one "
                "temperature"
            )
        _check_ascending("temperature_schedule", self.temperature_schedule)
        for step, factor in self.temperature_schedule or ():
            expected = TEMPERATURES.expected(self.temperature * factor)
            if expected is not None:
                product = f"{self.temperature:g} x {factor:g} at step {step}"
                raise ConfigError(
                    f"temperature_schedule makes the temperature {product}: expected {expected}"
                )


@dataclass
class TrainConfig:
    """Optimisation, common to every training.

    Args:
        max_steps: optimizer steps; null uses ``epochs``.
        epochs: passes over the training images, used where ``max_steps`` is null.
        batch_size: images per optimizer step, over all processes and accumulation steps.
        micro_batch_size: images per forward pass of one process; null is ``batch_size`` /
            processes. A smaller value accumulates gradients, which does not change the step.
        lr: peak learning rate of Adam.
        schedule: ``constant``; ``linear`` or ``cosine`` decay to 0; ``step`` (multiplied by
            ``decay`` every ``decay_every`` steps or ``decay_epochs`` epochs); or ``noam`` (inverse
            square root). All begin with ``warmup_steps`` of linear warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        decay: factor of the schedule ``step``.
        decay_every: optimizer steps between two decays of the schedule ``step``.
        decay_epochs: epochs between two decays of the schedule ``step``, instead of
            ``decay_every``.
        betas: of Adam.
        weight_decay: decoupled weight decay (AdamW).
        grad_clip_norm: largest gradient norm; null does not clip.
        grad_clip_value: largest absolute gradient, as in self-critical.pytorch (0.1); null does not
            clip.
        mixed_precision: ``no``, ``bf16``, ``fp16`` or ``auto`` (bf16 if the device supports it,
            else no).
        tf32: on a GPU, compute float32 matrix products and convolutions in TF32 (10 bits of
            mantissa): several times as fast, but the results differ from those of a CPU.
        num_processes: required number of processes; null accepts the number that the launcher
            started.
        threads: CPU threads per process; null uses OMP_NUM_THREADS or, if that is not set, divides
            the physical cores among the processes of the machine.
        seed: of weights, data order and samples.
    """

    max_steps: Steps | None = None
    epochs: Positive = 1.0
    batch_size: BatchSize = 50
    micro_batch_size: BatchSize | None = None
    lr: LearningRate = 5e-4
    schedule: Literal["constant", "linear", "cosine", "step", "noam"] = "constant"
    warmup_steps: Annotated[int, Range(min=0, max=10**9)] = 0
    decay: Annotated[float, Range(above=0, max=1)] = 0.8
    decay_every: Steps = 1000
    decay_epochs: Positive | None = None
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    weight_decay: Weight = 0.0
    grad_clip_norm: Positive | None = 1.0
    grad_clip_value: Positive | None = None
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] = "no"
    tf32: bool = False
    num_processes: Workers | None = None
    threads: Workers | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        decays = {"decay": 0.8, "decay_every": 1000, "decay_epochs": None}
        changed = [key for key, default in decays.items() if getattr(self, key) != default]
        if changed and self.schedule != "step":
            raise ConfigError(
                f"{changed[0]} is {getattr(self, changed[0])}: train.schedule {self.schedule} has "
                f"no such decay, leave "
                "it out or set the schedule to step"
            )
        if {"decay_every", "decay_epochs"} <= set(changed):
            raise ConfigError(
                f"decay_every is {self.decay_every} and train.decay_epochs is {self.decay_epochs}: "
                f"set only one"
            )


@dataclass
class XeTrainConfig(TrainConfig):
    """Cross-entropy training. Further arguments:

    Args:
        label_smoothing: of the cross-entropy.
        captions_per_image: references of an image that are used in one step; null uses all.
        max_target_tokens: references are cut off at this number of tokens, EOS included.
    """

    label_smoothing: Probability = 0.1
    captions_per_image: Steps | None = 5
    max_target_tokens: Tokens = 24


@dataclass
class ScstTrainConfig(TrainConfig):
    """Self-critical training. Further arguments:

    Args:
        advantage: baseline of a sample: ``leave_one_out`` (mean of the other samples), ``greedy``
            (classic SCST), ``mean``, ``group_norm`` (GRPO) or ``none``; or ``package.module:Name``
            (docs/scst.md).
        advantage_kwargs: options of the advantage.
        objective: the loss: ``reinforce``, ``ppo_clip`` (also for GRPO), ``dico``, ``seq_nll``,
            ``risk``, ``max_margin``, ``multi_margin`` or ``softmax_margin``; or
            ``package.module:Name`` (docs/scst.md).
        objective_kwargs: options of the objective, except ``loss_reduction`` and ``kl_coef``.
        updates_per_rollout: optimizer updates per step, each on all samples of the step. All other
            keys count steps.
        loss_reduction: ``token`` (mean over tokens) or ``sequence`` (mean over captions). The two
            losses differ by a factor of about the caption length: change ``lr`` together with it.
        kl_coef: weight of the KL divergence to the frozen starting policy, per token; 0 loads no
            second model.
        kl_target: adapt ``kl_coef`` at every step so that the divergence (``policy/kl``, nats per
            token) approaches this value; null keeps ``kl_coef`` constant.
        kl_horizon: number of captions over which a deviation from ``kl_target`` is corrected.
        xe_weight: weight of an additional cross-entropy loss on the references (mean over tokens).
        label_smoothing: of that cross-entropy.
    """

    lr: LearningRate = 5e-6
    advantage: str = "leave_one_out"
    advantage_kwargs: dict[str, Any] = field(default_factory=dict)
    objective: str = "reinforce"
    objective_kwargs: dict[str, Any] = field(default_factory=dict)
    updates_per_rollout: Annotated[int, Range(min=1, max=1000)] = 1
    loss_reduction: Literal["token", "sequence"] = "token"
    kl_coef: Weight = 0.0
    kl_target: Positive | None = None
    kl_horizon: Steps = 10_000
    xe_weight: Weight = 0.0
    label_smoothing: Probability = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.updates_per_rollout > 1 and self.objective == "reinforce":
            raise ConfigError(
                f"updates_per_rollout is {self.updates_per_rollout}: train.objective reinforce "
                f"needs samples of the "
                "current policy, which they are no longer after the first update; use ppo_clip"
            )
        if self.kl_target is None and self.kl_horizon != ScstTrainConfig.kl_horizon:
            raise ConfigError(
                f"kl_horizon is {self.kl_horizon}: train.kl_target is not set, leave it out"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ConfigError(
                f"kl_target is {self.kl_target:g}: train.kl_coef, which it adapts, is 0, expected "
                f"more"
            )

    def check_names(self) -> None:
        """Check the advantage, the objective and their options; the usual ones are not imported.

        Raises ``ConfigError``, whose message names the whole key.
        """
        if self.advantage not in ADVANTAGES or self.advantage_kwargs:
            from rl_caption.scst.advantages import build_advantage

            build_advantage(self.advantage, self.advantage_kwargs)
        if self.objective != "reinforce" or self.objective_kwargs:
            from rl_caption.scst.objectives import build_objective

            build_objective(
                self.objective, self.objective_kwargs, self.loss_reduction, self.kl_coef
            )


@dataclass
class EvalConfig:
    """Validation during training.

    Args:
        every: optimizer steps between two validations; null validates once per epoch. One more
            follows the last step.
        split: name of the split.
        max_images: use only the first images of the split, at most this number; null uses all.
        batch_size: images per forward pass of one process; all of them where there are fewer.
        patience: stop after this number of validations in a row without a better value of the
            metric that chooses the best model (CIDEr-D for captioners, unless ``monitor.best_by``
            names another); null never stops early.
    """

    every: Steps | None = None
    split: str = "val"
    max_images: Steps | None = None
    batch_size: BatchSize = 64
    patience: Steps | None = None


@dataclass
class CaptionEvalConfig(EvalConfig):
    """Validation of a captioner during training. Further arguments:

    Args:
        num_beams: width of beam search; null decodes greedily.
        length_penalty: of beam search: log-probabilities are divided by length**length_penalty;
            null is 0 (their sum).
    """

    num_beams: Beams | None = None
    length_penalty: LengthPenalty | None = None


@dataclass
class RunConfig:
    """Where a run lives and how it is watched.

    Args:
        dir: the run's folder.
        resume: ``auto`` continues from the newest checkpoint if the configuration is the same, or
            starts a new run; ``true`` continues with a changed configuration, too; ``false`` starts
            a new run, and refuses a folder that holds one; or the path of a checkpoint to continue
            from.
        save_every: optimizer steps between two checkpoints; null saves at every validation.
        keep_checkpoints: number of checkpoints to keep, the newest.
        log_every: optimizer steps between two log lines.
        log_samples: number of images whose samples are written to ``samples.jsonl`` at every log
            line (of the main process only).
        trackers: ``tensorboard``, ``wandb``, ... through Accelerate, in addition to
            ``metrics.jsonl``.
        log_captions: number of validation images, the first ones, whose captions and scores are
            shown as a table in ``wandb``, ``trackio`` and ``tensorboard`` at every validation of a
            captioner; 0 shows none.
    """

    dir: str = "runs/run"
    resume: bool | str = "auto"
    save_every: Steps | None = None
    keep_checkpoints: Steps = 2
    log_every: Steps = 10
    log_samples: Annotated[int, Range(min=0, max=10**6)] = 2
    trackers: list[str] = field(default_factory=list)
    log_captions: Annotated[int, Range(min=0, max=1000)] = 4


def check_model_target(model: ModelConfig) -> None:
    """Check the class of a captioner from outside, and its options. Raises ``ConfigError``."""
    if model.target is not None:
        from rl_caption.captioners.loading import captioner_class

        captioner_class(model.target, "model.target", vars(model).get("kwargs"))


@dataclass
class XeConfig(PairsConfig):
    """``xe``: a captioner by cross-entropy.

    Args:
        model: the captioner.
        data: images and captions.
        train: optimisation.
        eval: validation.
        run: folder, resume, logs.
    """

    model: ModelConfig = field(default_factory=NewModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: XeTrainConfig = field(default_factory=XeTrainConfig)
    eval: CaptionEvalConfig = field(default_factory=CaptionEvalConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_model_target(self.model)


@dataclass
class ScstConfig(PairsConfig):
    """``scst``: a captioner by self-critical sequence training.

    Args:
        model: the captioner; ``model.init`` is the one to start from.
        data: images and captions.
        rollout: sampling.
        reward: the reward of sampled captions.
        train: optimisation.
        eval: validation.
        monitor: detection of reward hacking.
        run: folder, resume, logs.
        report: write ``report.html`` into the run's folder at the end (docs/report.md).
    """

    model: ModelConfig = field(default_factory=NewModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    train: ScstTrainConfig = field(default_factory=ScstTrainConfig)
    eval: CaptionEvalConfig = field(default_factory=CaptionEvalConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    run: RunConfig = field(default_factory=RunConfig)
    report: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_model_target(self.model)
        rollout, train = self.rollout, self.train
        for key, name in (("advantage", train.advantage), ("objective", train.objective)):
            if name in NEED_TWO_SAMPLES and rollout.num_samples < 2:
                raise ConfigError(
                    f"rollout.num_samples is {rollout.num_samples}: train.{key} {name} compares at "
                    f"least 2"
                )
        if self.reward.normalize == "per_group" and rollout.num_samples < 2:
            raise ConfigError(
                f"rollout.num_samples is {rollout.num_samples}: reward.normalize per_group "
                f"compares at least 2"
            )
        if rollout.beam_search and train.objective in ("reinforce", "ppo_clip"):
            raise ConfigError(
                f"rollout.beam_search is on: train.objective {train.objective} needs samples of "
                f"the policy; use an "
                "objective that compares the captions of an image, such as dico"
            )
        if rollout.beam_search and train.advantage == "greedy":
            raise ConfigError(
                "rollout.beam_search is on: no greedy captions are decoded for train.advantage "
                "greedy"
            )
        captions = train.batch_size * rollout.num_samples
        least = captions // 5 + 1  # below, one step may make the coefficient 0
        if train.kl_target is not None and train.kl_horizon < least:
            raise ConfigError(
                f"train.kl_horizon is {train.kl_horizon}: a step has {captions} captions, expected "
                f"at least {least}"
            )
        train.check_names()
        # Which of the usual judges a run has depends on what its terms are.
        judges = (
            ("cider", "rouge_l", "bleu4") if self.monitor.judges is None else self.monitor.judges
        )
        check_best_by(self.monitor.best_by, self.reward.terms, judges)


def check_best_by(name: str | None, terms: Iterable[str], judges: Iterable[str]) -> None:
    """Check ``monitor.best_by`` of a run with these reward terms and judges. Raises
    ``ConfigError``.
    """
    metrics = [*judges, "val/cider", "val/reward", *(f"val/reward/{term}" for term in terms)]
    if name is not None and name not in metrics:
        raise ConfigError(f"monitor.best_by is {name!r}: expected one of {metrics}")
