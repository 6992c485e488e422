"""Configuration of ``reward_model``: what all tasks have in common, and the table of tasks.

Each task is one file of ``rl_caption/reward_models``, with a class of further keys, a
loss, and what builds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveInt

from rl_caption.config.schema import (
    DataConfig,
    EvalConfig,
    RunConfig,
    ScstConfig,
    TrainConfig,
    TrustConfig,
    XeConfig,
)
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Section, load_target

if TYPE_CHECKING:
    from rl_caption.runtime.types import TrainState
    from rl_caption.training.run import Run

TASKS = {
    "contrastive": "rl_caption.reward_models.contrastive:ContrastiveConfig",
    "positive_augmented": "rl_caption.reward_models.pac:PositiveAugmentedConfig",
    "specificity": "rl_caption.reward_models.specs:SpecificityConfig",
    "distill": "rl_caption.reward_models.distill:DistillConfig",
    "language_model": "rl_caption.reward_models.text:LanguageModelConfig",
    "semantic_bottleneck": "rl_caption.reward_models.text:SemanticBottleneckConfig",
    "text_regression": "rl_caption.reward_models.text:TextRegressionConfig",
}
"""Task -> its configuration class."""


class PartConfig(Section):
    """A pretrained image or text encoder of a dual encoder (docs/reward_models.md)."""

    encoder: str | None = None
    """``transformers:NAME``, ``open_clip:ARCHITECTURE/TAG`` or ``package.module:Class``.
    """
    kwargs: dict = {}
    """Options of that class. For a decoder language model (``text``,
    ``transformers:NAME``): ``{bidirectional_blocks: N}`` lets every token attend to all
    tokens of the caption in the last N blocks. For an image encoder of open_clip with
    random weights: ``{vision_cfg: ...}`` changes the architecture's own.
    """
    pretrained: bool = True
    """False starts from random weights, in the shape of the named model; no tag is needed then."""
    train_blocks: NonNegativeInt | None = 0
    """Number of blocks to train, the last; 0 freezes the encoder, null trains all of it."""


class TeacherConfig(Section):
    """The frozen model to distil, or whose text features are read."""

    name: str
    """Open_clip architecture, hub name or local folder, as for the rewards."""
    pretrained: str | None = None
    """If ``name`` is an architecture: a tag such as ``openai``, or a checkpoint file."""
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """``fp32``, ``fp16`` or ``bf16``."""
    batch_size: PositiveInt = 64
    """Images or captions per forward pass."""
    cache_mb: NonNegativeInt = 2048
    """Memory for the teacher's embeddings of the training split, in MiB per process. If
    the embeddings of all images (or all captions) do not fit, they are read from
    ``cache_dir`` or computed again at every step.
    """
    cache_dir: str | None = None
    """Folder that keeps the teacher's embeddings between runs; null keeps them in memory only."""


class CaptionTrainConfig(TrainConfig):
    """Training a reward model on captions."""

    captions: Literal["random", "first"] = "random"
    """Caption of an image that is used in a step: a ``random`` reference, or always the ``first``.
    """


class RewardModelConfig(TrustConfig):
    """``reward_model``: a model that scores captions; ``--task TASK --help`` lists the
    keys of a task.
    """

    task: str = "contrastive"
    """``contrastive`` (InfoNCE on image-caption pairs), ``positive_augmented`` (PAC-S:
    also on generated images and captions), ``specificity`` (SPECS: triplets of growing
    captions), ``distill`` (L-CLIP); from captions only: ``language_model``,
    ``semantic_bottleneck`` and ``text_regression`` (docs/papers.md); or
    ``package.module:Class``, a task of your own.
    """
    data: DataConfig = Field(default_factory=DataConfig)
    """Images and captions."""
    train: TrainConfig = TrainConfig()
    """Optimisation."""
    eval: EvalConfig = EvalConfig()
    """Validation: retrieval, agreement with the teacher, the loss."""
    run: RunConfig = RunConfig()
    """Folder, resume, logs."""
    needs: ClassVar[frozenset[str]] = frozenset({"image", "text"})
    """What every row of the data must have."""

    @classmethod
    def choose(cls, values: Mapping[str, Any]) -> type[RewardModelConfig]:
        """The configuration class of the task. Raises ``ConfigError`` where there is none."""
        name = str(values.get("task") or "contrastive")
        config = load_target(name, "task", TASKS)
        if RewardModelConfig not in getattr(config, "__mro__", ()):
            raise ConfigError(
                f"task is {name!r}: expected a class that inherits from RewardModelConfig"
            )
        return config

    def check(self) -> None:
        """Check options that need files or model libraries, before the data are read.
        Raises ``ConfigError``.
        """

    def fit(self, run: Run) -> TrainState:
        """Build what is trained, and train it. Raises ``ConfigError`` or ``DataError``
        where it cannot be built.
        """
        raise ConfigError(
            f"task is {self.task!r}, whose class does not say what it trains: expected a method fit"
        )


TrainingConfig: TypeAlias = XeConfig | ScstConfig | RewardModelConfig
"""Configuration of any training, which the training loop reads."""
