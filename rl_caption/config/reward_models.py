"""Configuration of ``reward_model``: what all tasks have in common, and the table of tasks.

Each task is one file of ``rl_caption/reward_models``, with a class of further keys, a loss, and
what builds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from rewards.text.tokenize import TOKENIZER
from rl_caption.config.schema import (
    UNPAIRED,
    DataConfig,
    EvalConfig,
    RunConfig,
    ScstConfig,
    TrainConfig,
    TrustConfig,
    XeConfig,
)
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import BatchSize, Mebibytes, Range, load_target

if TYPE_CHECKING:
    from rl_caption.runtime.types import TrainState
    from rl_caption.training.run import Run

TASKS = {
    "contrastive": "rl_caption.reward_models.contrastive:ContrastiveConfig",
    "positive_augmented": "rl_caption.reward_models.positive_augmented:PositiveAugmentedConfig",
    "specificity": "rl_caption.reward_models.specificity:SpecificityConfig",
    "distill_image": "rl_caption.reward_models.distillation:DistillImageConfig",
    "distill_text": "rl_caption.reward_models.distillation:DistillTextConfig",
    "distill_dual": "rl_caption.reward_models.distillation:DistillDualConfig",
    "language_model": "rl_caption.reward_models.text_models:LanguageModelConfig",
    "semantic_bottleneck": "rl_caption.reward_models.text_models:SemanticBottleneckConfig",
    "text_regression": "rl_caption.reward_models.text_models:TextRegressionConfig",
}
"""Task -> its configuration class."""


@dataclass
class PartConfig:
    """A pretrained image or text encoder of a dual encoder (docs/reward_models.md).

    Args:
        encoder: ``transformers:NAME``, ``open_clip:ARCHITECTURE/TAG``, ``timm:NAME`` (images), or
            ``package.module:Class``.
        kwargs: options of that class. For a decoder language model (``text``,
            ``transformers:NAME``): ``{bidirectional_blocks: N}`` lets every token attend to all
            tokens of the caption in the last N blocks. For an image encoder of open_clip with
            random weights: ``{vision_cfg: ...}`` changes that of the architecture.
        pretrained: false starts from random weights, in the shape of the named model; no tag is
            needed then.
        train_blocks: number of blocks to train, the last; 0 freezes the encoder, null trains all of
            it.
    """

    encoder: str | None = None
    kwargs: dict = field(default_factory=dict)
    pretrained: bool = True
    train_blocks: Annotated[int, Range(min=0, max=1024)] | None = 0


@dataclass
class TeacherConfig:
    """The frozen model to distil, or whose text features are read.

    Args:
        name: open_clip architecture, hub name or local folder, as for the rewards.
        pretrained: if ``name`` is an architecture: a tag such as ``openai``, or a checkpoint file.
        precision: ``fp32``, ``fp16`` or ``bf16``.
        batch_size: images or captions per forward pass.
        cache_mb: memory for the teacher's embeddings of the training split, in MiB per process. If
            those of all images (or all captions) do not fit, they are read from ``cache_dir`` or
            computed again at every step.
        cache_dir: folder that keeps the teacher's embeddings between runs; null keeps them in
            memory only.
    """

    name: str | None = None
    pretrained: str | None = None
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    batch_size: BatchSize = 64
    cache_mb: Mebibytes = 2048
    cache_dir: str | None = None

    @property
    def folder(self) -> str | None:
        """The local folder that it names; None where it is a name of open_clip or on the hub."""
        is_name = (
            self.name is None or self.pretrained is not None or self.name.startswith("hf-hub:")
        )
        return None if is_name or "/" not in str(self.name) else self.name


@dataclass
class CaptionTrainConfig(TrainConfig):
    """Training a reward model on captions. Further arguments:

    Args:
        captions: caption of an image that is used in a step: a ``random`` reference, or always the
            ``first``.
    """

    captions: Literal["random", "first"] = "random"


@dataclass
class RewardModelConfig(TrustConfig):
    """``reward_model``: a model that scores captions; ``--task TASK --help`` lists the keys of a
    task.

    Args:
        task: ``contrastive`` (InfoNCE on image-caption pairs), ``positive_augmented`` (PAC-S: also
            on generated images and captions), ``specificity`` (SPECS: triplets of growing
            captions), ``distill_image`` and ``distill_text`` (stage 1 of L-CLIP, one tower),
            ``distill_dual`` (stage 2, both); from captions only: ``language_model``,
            ``semantic_bottleneck`` and ``text_regression`` (docs/papers.md); or
            ``package.module:Class``, a task of your own.
        data: images and captions.
        train: optimisation.
        eval: validation: retrieval, agreement with the teacher, the loss.
        run: folder, resume, logs.
    """

    task: str = "contrastive"
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    run: RunConfig = field(default_factory=RunConfig)

    needs = frozenset({"image", "text"})
    """What every row of the data must have."""
    unpaired = frozenset[str]()
    """Those of ``UNPAIRED`` that the task learns from."""

    @classmethod
    def alternative(cls, values: Mapping[str, Any]) -> type[RewardModelConfig]:
        """The configuration class of the task that the values of a file and a command line name.

        Raises:
            ConfigError: there is no such task.
        """
        name = str(values.get("task") or "contrastive")
        config = load_target(name, "task", TASKS)
        if not (isinstance(config, type) and issubclass(config, RewardModelConfig)):
            raise ConfigError(
                f"task is {name!r}: expected a configuration class that inherits from "
                f"RewardModelConfig"
            )
        return config

    @classmethod
    def alternatives(cls) -> tuple[type[RewardModelConfig], ...]:
        """The configuration classes of the tasks of this package."""
        return tuple(cls.alternative({"task": task}) for task in TASKS)

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` where the data are not for this task."""
        super().__post_init__()
        data = self.data
        if data.target is None and data.format in set(UNPAIRED) - self.unpaired:
            raise ConfigError(
                f"data.format is {data.format!r}, which the task {self.task} does not read, but "
                f"{learners(data.format)}"
            )
        if data.tokenizer != TOKENIZER:
            raise ConfigError(
                f"data.tokenizer is {data.tokenizer!r}: it is for captioners; reward models have "
                f"their own tokenizers"
            )
        if data.features_kwargs.keys() - {"pattern", "views"}:
            raise ConfigError(
                f"data.features_kwargs is {data.features_kwargs}: reward models read only pattern "
                f"and views"
            )
        for key in ("augment", "features_root") if "image" not in self.needs else ():
            if value := getattr(data, key):
                raise ConfigError(
                    f"data.{key} is {value!r}, but the task {self.task} reads no images: leave it "
                    f"out"
                )
        if data.features_root is not None and data.augment:
            raise ConfigError(
                "data.features_root and data.augment are both set, but stored features have one "
                "view: leave augment out"
            )

    def check(self) -> None:
        """Check what takes files or the libraries of models, before there are data; raises
        ``ConfigError``.
        """

    def folders(self) -> dict[str, str | None]:
        """Configuration key -> the local folder that the run starts from."""
        return {}

    def fit(self, run: Run) -> TrainState:
        """Build what is trained, and train it. Raises ``ConfigError`` or ``DataError`` where it
        cannot be built.
        """
        raise ConfigError(
            f"task is {self.task!r}, whose class does not say what it trains: expected a method fit"
        )


def learners(unpaired: str) -> str:
    """The tasks that learn from one of ``UNPAIRED``, separated by "or"."""
    return " or ".join(
        task for task in TASKS if unpaired in RewardModelConfig.alternative({"task": task}).unpaired
    )


TrainingConfig: TypeAlias = XeConfig | ScstConfig | RewardModelConfig
"""What the loop around every training reads."""
