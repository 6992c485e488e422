"""Ranges of configuration values, checked before anything is loaded."""

from __future__ import annotations

from typing import Any

from rl_caption.captioners.base import TEMPERATURES
from rl_caption.config import ScstConfig
from rl_caption.reward_models.config import TrainingConfig

LOWEST: dict[str, float] = {
    "data.num_workers": 0,
    "data.cache_mb": 0,
    "model.min_count": 1,
    "teacher.batch_size": 1,
    "teacher.cache_mb": 0,
    "loss.l1": 0,
    "loss.cosine": 0,
    "loss.regulator": 0,
    "loss.max_scale": 1,
    "loss.short": 0,
    "loss.pca_rank": 1,
    "loss.positive_images": 0,
    "loss.positive_captions": 0,
    "loss.alpha": 0,
    "loss.beta": 0,
    "loss.gamma": 0,
    "loss.max_margin": 0,
    "model.context_length": 2,
    "model.keep_positions": 0,
    "train.freeze_positions": 0,
    "train.lora_rank": 1,
    "rollout.num_samples": 1,
    "rollout.max_new_tokens": 1,
    "train.max_steps": 1,
    "train.batch_size": 1,
    "train.micro_batch_size": 1,
    "train.warmup_steps": 0,
    "train.decay_every": 1,
    "train.weight_decay": 0,
    "train.num_processes": 1,
    "train.threads": 1,
    "train.seed": 0,
    "train.label_smoothing": 0,
    "train.captions_per_image": 1,
    "train.max_target_tokens": 1,
    "train.kl_coef": 0,
    "train.xe_weight": 0,
    "eval.every": 1,
    "eval.max_images": 1,
    "eval.batch_size": 1,
    "eval.patience": 1,
    "eval.num_beams": 1,
    "run.save_every": 1,
    "run.keep_checkpoints": 1,
    "run.log_every": 1,
    "run.log_samples": 0,
}
"""Smallest value of a key. A key that is null, or that the program does not have, is not checked."""
ABOVE_ZERO = (
    "train.epochs",
    "train.lr",
    "train.decay_epochs",
    "train.grad_clip_norm",
    "train.grad_clip_value",
    "train.lora_alpha",
    "rollout.temperature",
)
NEED_TWO_SAMPLES = frozenset({"leave_one_out", "group_norm"})


def out_of_range(config: TrainingConfig) -> list[str]:
    """What is wrong with the numbers of ``config``, one sentence each: key, value, and what would be right."""
    wrong = []
    for key, lowest in LOWEST.items():
        value = _value(config, key)
        if value is not None and not value >= lowest:
            wrong.append(f"{key} is {value}: expected at least {lowest}")
    for key in ABOVE_ZERO:
        value = _value(config, key)
        if value is not None and not value > 0:
            wrong.append(f"{key} is {value}: expected more than 0")
    if config.train.label_smoothing >= 1:
        wrong.append(f"train.label_smoothing is {config.train.label_smoothing}: expected less than 1")
    if isinstance(config, ScstConfig):
        samples, advantage = config.rollout.num_samples, config.train.advantage
        if advantage in NEED_TWO_SAMPLES and samples < 2:
            wrong.append(f"rollout.num_samples is {samples}: train.advantage {advantage} compares at least 2")
        lowest, highest = TEMPERATURES
        if config.rollout.temperature > 0 and not lowest <= config.rollout.temperature <= highest:
            wrong.append(f"rollout.temperature is {config.rollout.temperature}: expected {lowest:g} to {highest:g}")
        if config.rollout.cuda_graph and config.rollout.dropout:
            wrong.append("rollout.cuda_graph and rollout.dropout are both on: every replay would drop the same units")
        for name, value in vars(config.monitor.thresholds).items():
            if value is not None and not value >= 0:
                wrong.append(f"monitor.thresholds.{name} is {value}: expected at least 0")
    return wrong


def _value(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part, None)
    return config
