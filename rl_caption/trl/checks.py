"""What is wrong with a configuration of ``grpo_vlm.py``, told before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from accelerate.utils import parse_flag_from_env

from rl_caption import config_checks
from rl_caption.evaluation import DEFAULT_METRICS
from rl_caption.trl.config import GrpoVlmConfig


def mistakes(config: GrpoVlmConfig) -> list[str]:
    """What is wrong with ``config``, one sentence each: key, value, and what would be right."""
    wrong = config_checks.mistakes(config)
    if config.rollout.num_samples < 2:
        wrong.append(f"rollout.num_samples is {config.rollout.num_samples}: expected at least 2")
    if config.data.features_root is not None:
        wrong.append(f"data.features_root is {config.data.features_root!r}: a vision-language model sees pixels, null")
    if config.data.augment:
        wrong.append(f"data.augment is {config.data.augment}: this program has no augmentation, expected []")
    if config.reward.normalize != "none":
        wrong.append(
            f"reward.normalize is {config.reward.normalize!r}: TRL adds up the terms itself, expected none; GRPO's own "
            "is train.kwargs {multi_objective_aggregation: normalize_then_sum}"
        )
    for name in config.reward.terms:
        if "." in name or "/" in name:
            wrong.append(f"reward.terms.{name}: the name is part of a log key, expected neither dots nor slashes")
    if not any(term.weight for term in config.reward.terms.values()):
        wrong.append(f"reward.terms {list(config.reward.terms)} all have weight 0: expected one that rewards something")
    if config.model.dtype == "float16" and config.lora is None:
        wrong.append("model.dtype is 'float16' without lora: its optimizer steps overflow, expected auto or float32")
    unknown = sorted(set(config.eval.metrics) - set(DEFAULT_METRICS))
    if unknown:
        wrong.append(f"eval.metrics has {unknown}: known are {list(DEFAULT_METRICS)}")
    if not config.model.prompt.strip():
        wrong.append(f"model.prompt is {config.model.prompt!r}: expected what the model is asked")
    return wrong


def missing_libraries(config: GrpoVlmConfig) -> list[str]:
    """Libraries that ``config`` needs and that are not installed."""
    wanted = ["trl", "datasets", *(["peft"] if config.lora is not None else [])]
    return [name for name in wanted if find_spec(name) is None]


def unusable_arguments(given: dict[str, Any], known: set[str], taken: set[str], kind: str) -> list[str]:
    """What is wrong with ``train.kwargs``: arguments that ``kind`` does not have, or that other keys set."""
    unknown, double = sorted(set(given) - known), sorted(set(given) & taken)
    wrong = []
    if unknown:
        wrong.append(f"train.kwargs has {unknown}: {kind} of this version of TRL has no such argument")
    if double:
        wrong.append(f"train.kwargs has {double}: other keys of this configuration set them, see docs/trl.md")
    return wrong


def sharding(arguments: Any) -> str | None:
    """The engine that TRL's ``arguments`` or the launcher chose, where it shards the weights."""
    if getattr(getattr(arguments, "deepspeed_plugin", None), "zero_stage", 0) == 3:
        return "DeepSpeed ZeRO-3"
    # Accelerate's launcher says it by this variable, which does not change the arguments.
    return "FSDP" if arguments.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP") else None
