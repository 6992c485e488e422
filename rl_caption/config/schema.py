"""Configuration of trainings. ``cli`` fills it from YAML and the command line,
``build.py`` reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rewards.registry import REWARDS, load
from rl_caption.captioners.config import AnyModel, ModelConfig, NewModelConfig
from rl_caption.monitoring.config import MonitorConfig
from rl_caption.runtime.errors import ConfigError, config_errors
from rl_caption.runtime.options import (
    LengthPenalty,
    Probability,
    Section,
    Seed,
    Temperature,
)
from rl_caption.scst import OBJECTIVES

NEED_TWO_SAMPLES = frozenset(
    {"leave_one_out", "mean", "group_norm", "per_group"}
    | (set(OBJECTIVES) - {"reinforce", "ppo_clip"})
)
"""Advantages, objectives and ``reward.normalize`` that compare samples of an image."""

Augmentation = Literal["horizontal", "vertical", "transpose", "crop", "rand_augment"]


class DataConfig(Section):
    """The images and their captions."""

    format: str = "karpathy"
    """``karpathy`` (one JSON with splits), ``jsonl`` (one JSON object a line),
    ``scenes`` (generated world), ``hub`` (what the library ``datasets`` reads: the hub,
    Parquet, CSV, tar shards); published layouts ``coco`` (annotations, such as NoCaps),
    ``sharegpt4v``, ``dci`` and ``urban1k``. Only for reward models: ``images`` (a
    folder) or ``captions`` (a text file), which train one tower of L-CLIP, and
    ``caption_targets`` (captions with a number each), for ``text_regression``.
    """
    target: str | None = None
    """``package.module:Name`` of a format outside this package (docs/data.md); null
    uses ``format``.
    """
    path: str | None = None
    """The JSON file, or the folder that holds it; the folder of ``images``; the file or
    folder of ``captions``; the name on the hub.
    """
    source: str | None = None
    """Source and size of the files, for the error of a missing ``path``."""
    image_root: str | None = None
    """Folder of the images, absolute or relative to the folder of the JSON."""
    image_extension: str | None = None
    """Extension of the image files, such as ``.jpg``, where it is not the one in the JSON."""
    flatten: bool = False
    """Ignore the folders (``filepath``) in the JSON."""
    columns: dict[str, str] | None = None
    """Columns of ``jsonl`` and ``hub`` in another layout: name here -> name there, such
    as ``{image: image_file, references: description}`` (docs/data.md).
    """
    features_root: str | None = None
    """Region features: a folder with one file per image, or one HDF5 file. Relative
    paths start from the working directory.
    """
    features_kwargs: dict = {}
    """Options of stored features, such as ``{dim: 2048, max_regions: 100}``
    (docs/data.md).
    """
    augment: list[Augmentation] = []
    """Random augmentations of the training images: ``horizontal``, ``vertical``,
    ``transpose``, ``crop``. Choose only augmentations that keep the captions true.
    ``rand_augment`` is for reward models only.
    """
    tokenizer: Literal["ptb", "unicode", "char"] = "ptb"
    """Splits captions into words for n-gram rewards, document frequencies, validation,
    the monitor and the vocabulary of a new captioner: ``ptb`` (English, as the COCO
    toolkit), ``unicode`` (other languages with spaces between words) or ``char``
    (characters of Chinese and Japanese); docs/languages.md.
    """
    on_bad: Literal["fail", "skip"] = "fail"
    """``fail`` stops at unusable images and captions; ``skip`` leaves them out and reports them."""
    check_images: bool = True
    """Decode every image before training starts."""
    num_workers: NonNegativeInt = 0
    """Processes that load images; 0 loads them in the main process."""
    cache_mb: NonNegativeInt = 1024
    """Memory for decoded images, or for the visual tokens of a vision-language model whose
    vision tower is frozen, in MiB per process; 0 keeps none.
    """
    long_captions: bool = False
    """Use the long description of an image (``long_reference``) as its only caption, in
    training, rewards and validation (``jsonl`` and ``scenes`` only).
    """
    num_frames: PositiveInt | None = None
    """The files are videos (folders of frames, animated images or video files); use
    this number of frames of each, from the centres of equal segments (docs/rewards.md).
    Null: the files are images.
    """
    kwargs: dict = {}
    """Further options of the format, such as ``{num_train: 2000, seed: 1}`` for ``scenes``."""

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        from rl_caption.data.formats import check_format

        check_format(self)
        return self


def _ascending(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    if points != sorted(points, key=itemgetter(0)):
        raise PydanticCustomError("order", "steps in ascending order")
    return points


Schedule = Annotated[
    list[tuple[NonNegativeInt, NonNegativeFloat]],
    AfterValidator(_ascending),
]
"""Points (step, factor): linear in between, constant before the first and after the
last; equal steps are a jump.
"""


class RewardTerm(Section):
    """One reward of the mixture."""

    weight: float = 1.0
    """Factor of the raw score in the total."""
    target: str | None = None
    """Name of a reward of this package, or ``package.module:Class`` of another; null
    uses the term's name.
    """
    kwargs: dict = {}
    """Options of the reward."""
    schedule: Schedule | None = None
    """Points ``[step, factor]``: the weight is multiplied by the factor, which is
    linear between two points and constant before the first and after the last. Two
    points at one step are a jump (docs/scst.md). Null keeps the weight.
    """


class TrustConfig(Section):
    """Classes that saved models may use."""

    trust: list[str] = []
    """Classes outside this package, as ``package.module:Class``, that the
    ``config.json`` of a saved model may name. They are imported and called with the
    arguments in that file (docs/reliability.md). A class that this configuration names
    itself, such as ``model.target``, need not be listed.
    """


class PairsConfig(TrustConfig):
    """A configuration whose ``data`` are images with captions, for a captioner."""

    data: DataConfig = Field(default_factory=DataConfig)
    """Images and captions."""


class RewardConfig(Section):
    """The reward of sampled captions: a weighted sum of terms."""

    terms: dict[str, RewardTerm] = {"cider": RewardTerm()}
    """Weight and options of each term, by its name."""
    normalize: Literal["none", "per_term", "per_group"] = "none"
    """``none`` adds raw scores. ``per_term`` adds z-scores of each term over all
    samples of an optimizer step, so that the scales of the terms do not matter;
    ``per_group`` over the samples of each image.
    """
    df: str | None = None
    """File of document frequencies for CIDEr-D, also where ``diversity`` uses it; null
    counts them in the training split, with one document per image.
    """
    eos: bool = True
    """Count EOS as a word in candidates, references and document frequencies."""

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        for name, term in self.terms.items():
            target = term.target or name
            if target not in REWARDS:
                with config_errors(f"terms.{name}"):
                    load(target)
        if self.terms and not any(term.weight for term in self.terms.values()):
            raise ConfigError(
                f"terms {', '.join(self.terms)} all have weight 0: expected at least one other"
            )
        return self


class RolloutConfig(Section):
    """Sampling of captions."""

    num_samples: PositiveInt = 5
    """Captions sampled per image (K)."""
    temperature: Temperature = 1.0
    """Softmax temperature, both for sampling and for the log-probabilities in the loss."""
    temperature_schedule: (
        Annotated[
            list[tuple[NonNegativeInt, PositiveFloat]], AfterValidator(_ascending)
        ]
        | None
    ) = None
    """Points ``[step, factor]`` for the temperature, as ``schedule`` of a reward term;
    factors are above 0.
    """
    max_new_tokens: PositiveInt = 24
    """Length limit in tokens, EOS included."""
    dropout: bool = False
    """Keep dropout on while sampling and in the loss, as the first self-critical
    implementations did; off keeps the update on-policy.
    """
    beam_search: bool = False
    """Use the K captions of a beam search of width K (length penalty 1) instead of
    samples; for objectives that compare the captions of an image, as in the DiCO paper.
    """


class TrainConfig(Section):
    """Optimisation, common to every training."""

    max_steps: PositiveInt | None = None
    """Optimizer steps; null uses ``epochs``."""
    epochs: PositiveFloat = 1.0
    """Passes over the training images, used where ``max_steps`` is null."""
    batch_size: PositiveInt = 50
    """Images per optimizer step, over all processes and accumulation steps."""
    micro_batch_size: PositiveInt | None = None
    """Images per forward pass of one process; null is ``batch_size`` / processes. A
    smaller value accumulates gradients, which does not change the step.
    """
    lr: PositiveFloat = 5e-4
    """Peak learning rate of Adam."""
    schedule: Literal["constant", "linear", "cosine", "step", "noam"] = "constant"
    """``constant``; ``linear`` or ``cosine`` decay to 0; ``step`` (multiplied by
    ``decay`` every ``decay_every`` steps or ``decay_epochs`` epochs); or ``noam``
    (inverse square root). All begin with ``warmup_steps`` of linear warm-up.
    """
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Factor of the schedule ``step``."""
    decay_every: PositiveInt = 1000
    """Optimizer steps between two decays of the schedule ``step``."""
    decay_epochs: PositiveFloat | None = None
    """Epochs between two decays of the schedule ``step``, instead of ``decay_every``."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Coefficients beta1 and beta2 of Adam."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay (AdamW)."""
    grad_clip_norm: PositiveFloat | None = 1.0
    """Largest gradient norm; null does not clip."""
    grad_clip_value: PositiveFloat | None = None
    """Largest absolute gradient, as in self-critical.pytorch (0.1); null does not clip."""
    mixed_precision: Literal["no", "bf16", "fp16", "auto"] = "no"
    """``no``, ``bf16``, ``fp16`` or ``auto`` (bf16 if the device supports it, else no)."""
    tf32: bool = False
    """On a GPU, compute float32 matrix products and convolutions in TF32 (10 bits of
    mantissa): several times as fast, but results differ from a CPU's.
    """
    num_processes: PositiveInt | None = None
    """Required number of processes; null accepts the number that the launcher started."""
    threads: PositiveInt | None = None
    """CPU threads per process; null uses OMP_NUM_THREADS or, if that is not set,
    divides the physical cores among the processes of the machine.
    """
    seed: Seed = 0
    """Random seed of weights, data order and samples."""


class XeTrainConfig(TrainConfig):
    """Cross-entropy training."""

    label_smoothing: Probability = 0.1
    """Label smoothing of the cross-entropy."""
    captions_per_image: PositiveInt | None = 5
    """References of an image that are used in one step; null uses all."""
    max_target_tokens: PositiveInt = 24
    """References are cut off at this number of tokens, EOS included."""


class ScstTrainConfig(TrainConfig):
    """Self-critical training."""

    lr: PositiveFloat = 5e-6
    """Peak learning rate of Adam."""
    advantage: str = "leave_one_out"
    """Baseline of a sample: ``leave_one_out`` (mean of the other samples), ``greedy``
    (classic SCST), ``mean``, ``group_norm`` (GRPO) or ``none``; or
    ``package.module:Name`` (docs/scst.md).
    """
    advantage_kwargs: dict[str, Any] = {}
    """Options of the advantage."""
    objective: str = "reinforce"
    """The loss: ``reinforce``, ``ppo_clip`` (also for GRPO), ``dico``, ``seq_nll``,
    ``risk``, ``max_margin``, ``multi_margin`` or ``softmax_margin``; or
    ``package.module:Name`` (docs/scst.md).
    """
    objective_kwargs: dict[str, Any] = {}
    """Options of the objective, except ``loss_reduction`` and ``kl_coef``."""
    updates_per_rollout: PositiveInt = 1
    """Optimizer updates per step, each on all samples of the step. All other keys count steps."""
    loss_reduction: Literal["token", "sequence"] = "token"
    """``token`` (mean over tokens) or ``sequence`` (mean over captions). The two losses
    differ by a factor of about the caption length: change ``lr`` together with it.
    """
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence to the frozen starting policy, per token; 0 loads no
    second model.
    """
    xe_weight: NonNegativeFloat = 0.0
    """Weight of an additional cross-entropy loss on the references (mean over tokens)."""
    label_smoothing: Probability = 0.0
    """Label smoothing of the cross-entropy of ``xe_weight``."""


class EvalConfig(Section):
    """Validation during training."""

    every: PositiveInt | None = None
    """Optimizer steps between two validations; null validates once per epoch. One more
    follows the last step.
    """
    split: str = "val"
    """Name of the split."""
    max_images: PositiveInt | None = None
    """Use only the first images of the split, at most this number; null uses all."""
    batch_size: PositiveInt = 64
    """Largest number of images per forward pass of one process."""
    patience: PositiveInt | None = None
    """Stop after this number of validations in a row without a better value of the
    metric that chooses the best model (CIDEr-D for captioners, unless
    ``monitor.best_by`` names another); null never stops early.
    """


class CaptionEvalConfig(EvalConfig):
    """Validation of a captioner during training."""

    num_beams: PositiveInt | None = None
    """Width of beam search; null decodes greedily."""
    length_penalty: LengthPenalty | None = None
    """Length penalty of beam search: a caption's summed log-probabilities are divided
    by length**length_penalty; null is 0 (the sum).
    """


class RunConfig(Section):
    """Folder, checkpoints and logs of a run."""

    dir: str = "runs/run"
    """The run's folder."""
    resume: bool | str = "auto"
    """``auto`` continues from the newest checkpoint if the configuration is the same,
    or starts a new run; ``true`` continues with a changed configuration, too; ``false``
    starts a new run, and refuses a folder that holds one; or the path of a checkpoint
    to continue from.
    """
    save_every: PositiveInt | None = None
    """Optimizer steps between two checkpoints; null saves at every validation."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints to keep, the newest."""
    log_every: PositiveInt = 10
    """Optimizer steps between two log lines."""
    log_samples: NonNegativeInt = 2
    """Number of images whose samples are written to ``samples.jsonl`` at every log line
    (of the main process only).
    """
    trackers: list[str] = []
    """Trackers of Accelerate, such as ``tensorboard`` and ``wandb``, in addition to
    ``metrics.jsonl``.
    """


def _check_target(model: ModelConfig) -> ModelConfig:
    if model.target is not None:
        from rl_caption.captioners.loading import captioner_class

        captioner_class(model.target, "model.target", vars(model).get("kwargs"))
    return model


CheckedModel = Annotated[AnyModel, AfterValidator(_check_target)]
"""A captioner to train; a class from outside and its options are checked."""


class XeConfig(PairsConfig):
    """``xe``: a captioner by cross-entropy."""

    model: CheckedModel = Field(default_factory=NewModelConfig)
    """The captioner."""
    train: XeTrainConfig = XeTrainConfig()
    """Optimisation."""
    eval: CaptionEvalConfig = CaptionEvalConfig()
    """Validation."""
    run: RunConfig = RunConfig()
    """Folder, resume, logs."""


class ScstConfig(PairsConfig):
    """``scst``: a captioner by self-critical sequence training."""

    model: CheckedModel = Field(default_factory=NewModelConfig)
    """The captioner; ``model.init`` is the one to start from."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    reward: RewardConfig = RewardConfig()
    """The reward of sampled captions."""
    train: ScstTrainConfig = ScstTrainConfig()
    """Optimisation."""
    eval: CaptionEvalConfig = CaptionEvalConfig()
    """Validation."""
    monitor: MonitorConfig = MonitorConfig()
    """Detection of reward hacking."""
    run: RunConfig = RunConfig()
    """Folder, resume, logs."""
    report: bool = True
    """Write ``report.html`` into the run's folder at the end (docs/report.md)."""

    @model_validator(mode="after")
    def _check_scst(self) -> Self:
        from rl_caption.scst.advantages import build_advantage
        from rl_caption.scst.objectives import build_objective

        rollout, train = self.rollout, self.train
        if train.updates_per_rollout > 1 and train.objective == "reinforce":
            raise ConfigError(
                f"train.updates_per_rollout is {train.updates_per_rollout}: train.objective "
                "reinforce needs samples of the current policy; use ppo_clip"
            )
        names = {train.advantage, train.objective, self.reward.normalize}
        comparing = ", ".join(sorted(names & NEED_TWO_SAMPLES))
        if comparing and rollout.num_samples < 2:
            raise ConfigError(
                f"rollout.num_samples is {rollout.num_samples}: {comparing} compares at least 2"
            )
        of_samples = ", ".join(sorted(names & {"reinforce", "ppo_clip", "greedy"}))
        if rollout.beam_search and of_samples:
            raise ConfigError(
                f"rollout.beam_search is on: {of_samples} needs samples of the policy; use an "
                "objective that compares the captions of an image, such as dico"
            )
        build_advantage(train.advantage, train.advantage_kwargs)
        kwargs = train.objective_kwargs
        build_objective(train.objective, kwargs, train.loss_reduction, train.kl_coef)
        usual = (
            "cider",
            "rouge_l",
            "bleu4",
        )  # which of them a run has depends on its terms
        judges = usual if self.monitor.judges is None else self.monitor.judges
        check_best_by(self.monitor.best_by, self.reward.terms, judges)
        return self


def check_best_by(
    name: str | None, terms: Iterable[str], judges: Iterable[str]
) -> None:
    """Check ``monitor.best_by`` of a run with these reward terms and judges. Raises
    ``ConfigError``.
    """
    metrics = [*judges, "val/cider", "val/reward"]
    metrics += [f"val/reward/{term}" for term in terms]
    if name is not None and name not in metrics:
        raise ConfigError(f"monitor.best_by is {name!r}: expected one of {metrics}")
