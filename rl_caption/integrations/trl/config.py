"""Configuration of ``grpo_vlm``: dataclasses only, as in ``rl_caption.config.schema``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rl_caption.config.schema import DataConfig, PairsConfig, RewardConfig, RolloutConfig
from rl_caption.evaluation import DEFAULT_METRICS
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import (
    BatchSize,
    Beams,
    LearningRate,
    Positive,
    Range,
    Rank,
    Seed,
    Steps,
    Weight,
    Workers,
)

ADDS_UP = "TRL adds up the terms itself"


@dataclass
class VlmConfig:
    """The vision-language model.

    Args:
        name: hub name or folder of a decoder-only model whose processor has a chat template.
        revision: revision on the hub; null is the newest.
        dtype: of the weights; ``auto`` is float32, or with LoRA that of ``train.mixed_precision``. In bfloat16 weights
            the small updates of a learning rate below 1e-5 are rounded away.
        freeze: patterns of the names of parameters (``*visual*``) that are not trained and get no LoRA; null is the
            vision tower, ``[]`` freezes nothing.
        prompt: the instruction, for rows without a ``prompt`` of their own.
        processor_kwargs: options of the processor, such as ``{max_pixels: 200704}`` of Qwen2-VL, which limits the
            tokens per image.
    """

    name: str = "Qwen/Qwen2-VL-2B-Instruct"
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    freeze: list[str] | None = None
    prompt: str = "Describe this image in one sentence."
    processor_kwargs: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ConfigError(f"prompt is {self.prompt!r}: expected what the model is asked")


@dataclass
class VlmLoraConfig:
    """LoRA adapters, merged into the weights at the export.

    Args:
        r: rank.
        alpha: the adapters' output is scaled by alpha / r.
        target_modules: suffixes of the names of linear layers to adapt; not the language-model head.
    """

    r: Rank = 16
    alpha: Rank = 32
    target_modules: list[str] = field(
        default_factory=lambda: [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ]
    )


@dataclass
class VlmRolloutConfig(RolloutConfig):
    """How captions are sampled. Further arguments:

    Args:
        engine: what samples: the model itself (``transformers``), or ``vllm`` on GPUs, by the options of TRL in
            ``train.kwargs`` (``vllm_mode``, ``vllm_gpu_memory_utilization``, ``vllm_importance_sampling_correction``).
    """

    engine: Literal["transformers", "vllm"] = "transformers"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_samples < 2:
            raise ConfigError(f"num_samples is {self.num_samples}: expected at least 2")
        alone = "TRL samples captions itself, at one temperature"
        _refuse_unused("", self, ("temperature_schedule", "beam_search", "cuda_graph"), alone)


@dataclass
class VlmTrainConfig:
    """Optimisation.

    Args:
        max_steps: optimizer steps; null uses ``epochs``.
        epochs: passes over the training images, used where ``max_steps`` is null.
        batch_size: images per optimizer step, over all processes and accumulation steps, each with
            ``rollout.num_samples`` captions.
        micro_batch_size: images per forward pass of one process; null is ``batch_size`` / processes.
        lr: peak learning rate of AdamW: about 1e-5 with LoRA, 1e-6 without.
        schedule: ``constant``, or ``linear`` or ``cosine`` decay to 0, after the warm-up.
        warmup_steps: optimizer steps of linear warm-up.
        weight_decay: decoupled weight decay.
        grad_clip_norm: largest gradient norm.
        kl_coef: weight of the KL divergence to the starting model (TRL's ``beta``): in the loss (GRPO) or subtracted
            from the reward (RLOO). Needs a second model, except with LoRA or 0.
        mask_truncated: captions without EOS do not count in the loss. Their rewards still count in the baseline.
        mixed_precision: ``no``, ``bf16``, ``fp16`` or ``auto`` (bf16 if the device supports it, else no).
        gradient_checkpointing: recompute activations in the backward pass, to save memory.
        num_processes: required number of processes; null accepts the number that the launcher started.
        threads: CPU threads per process; null uses OMP_NUM_THREADS or, if that is not set, divides the physical cores
            among the processes of the machine.
        seed: of adapters, data order and samples.
        kwargs: further options of TRL's ``GRPOConfig`` or ``RLOOConfig``, such as ``{loss_type: dr_grpo}``, except
            those that other keys set.
    """

    max_steps: Steps | None = None
    epochs: Positive = 1.0
    batch_size: BatchSize = 8
    micro_batch_size: BatchSize | None = 1
    lr: LearningRate = 1e-5
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Range(min=0, max=10**9)] = 0
    weight_decay: Weight = 0.0
    grad_clip_norm: Positive = 1.0
    kl_coef: Weight = 0.0
    mask_truncated: bool = False
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    gradient_checkpointing: bool = True
    num_processes: Workers | None = None
    threads: Workers | None = None
    seed: Seed = 0
    kwargs: dict = field(default_factory=dict)


@dataclass
class VlmEvalConfig:
    """The evaluation after the last step, as by ``evaluate``.

    Args:
        split: name of the split; null evaluates nothing.
        max_images: use only the first images of the split, at most this number; null uses all.
        before: also evaluate the starting model, before training.
        batch_size: images per forward pass of one process.
        num_beams: beam width; 1 is greedy.
        metrics: as in ``evaluate``.
        tokenizer: as in ``evaluate``; ``auto`` follows ``data.tokenizer``.
        judges: rewards whose means are further metrics, by their column headings.
    """

    split: str | None = "test"
    max_images: Steps | None = None
    before: bool = False
    batch_size: BatchSize = 8
    num_beams: Beams = 1
    metrics: list[str] = field(
        default_factory=lambda: ["bleu", "meteor", "rouge", "cider", "spice"]
    )
    tokenizer: Literal["auto", "java", "python", "unicode", "char"] = "auto"
    judges: dict[str, JudgeConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.metrics) - set(DEFAULT_METRICS)):
            raise ConfigError(
                f"metrics has {unknown}: expected some of {', '.join(DEFAULT_METRICS)}"
            )


@dataclass
class VlmRunConfig:
    """Where a run lives and how it is watched.

    Args:
        dir: the run's folder.
        resume: ``auto`` continues from the newest complete checkpoint if the configuration is the same, or starts a new
            run; ``true`` continues with a changed configuration, too; ``false`` starts a new run, and refuses a folder
            that holds one; or the path of a checkpoint to continue from.
        save_every: optimizer steps between two checkpoints; one more follows the last step.
        keep_checkpoints: number of checkpoints to keep, the newest.
        log_every: optimizer steps between two log lines.
        trackers: ``tensorboard``, ``wandb``, ... through Transformers, in addition to ``metrics.jsonl``.
    """

    dir: str = "runs/grpo_vlm"
    resume: bool | str = "auto"
    save_every: Steps = 100
    keep_checkpoints: Steps = 2
    log_every: Steps = 10
    trackers: list[str] = field(default_factory=list)


@dataclass
class GrpoVlmConfig(PairsConfig):
    """``grpo_vlm``: fine-tune a decoder-only vision-language model with TRL's trainers.

    Args:
        trainer: ``grpo`` or ``rloo``.
        model: the model to fine-tune.
        lora: LoRA adapters; null trains all weights that are not frozen.
        data: images and captions; ``cache_mb`` is not used.
        rollout: sampling.
        reward: the reward of sampled captions.
        train: optimisation.
        eval: evaluation of the trained model.
        run: folder, resume, logs.
    """

    trainer: Literal["grpo", "rloo"] = "grpo"
    model: VlmConfig = field(default_factory=VlmConfig)
    lora: VlmLoraConfig | None = field(default_factory=VlmLoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: VlmRolloutConfig = field(
        default_factory=lambda: VlmRolloutConfig(num_samples=8, max_new_tokens=48)
    )
    reward: RewardConfig = field(default_factory=RewardConfig)
    train: VlmTrainConfig = field(default_factory=VlmTrainConfig)
    eval: VlmEvalConfig = field(default_factory=VlmEvalConfig)
    run: VlmRunConfig = field(default_factory=VlmRunConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reward.normalize != "none":
            scaled = "GRPO's own is train.kwargs {multi_objective_aggregation: normalize_then_sum}"
            raise ConfigError(
                f"reward.normalize is {self.reward.normalize!r}: {ADDS_UP}, expected none; {scaled}"
            )
        for name, term in self.reward.terms.items():
            if "." in name or "/" in name:
                raise ConfigError(
                    f"reward.terms has {name!r}: a part of a log key, expected neither dots nor slashes"
                )
            _refuse_unused(f"reward.terms.{name}", term, ("schedule", "length_ratio"), ADDS_UP)
        _refuse_unused("data", self.data, ("features_root",), "a vision-language model sees pixels")
        _refuse_unused("data", self.data, ("augment",), "this program has no augmentation")
        if self.model.dtype == "float16" and self.lora is None:
            overflows = "its optimizer steps overflow, expected auto or float32"
            raise ConfigError(f"model.dtype is 'float16' without lora: {overflows}")


def _refuse_unused(section: str, options: Any, keys: Sequence[str], why: str) -> None:
    for key in keys:
        if (value := getattr(options, key)) not in (None, False, []):
            raise ConfigError(
                f"{section}{'.' if section else ''}{key} is {value!r}: {why}, leave it out"
            )
