"""Mistakes that a configuration shows by itself, found before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from rewards.mixed import LOG_KEYS
from rewards.text.tokenize import TOKENIZER
from rl_caption.captioners.config import Decoding
from rl_caption.config.reward_models import UNPAIRED, RewardModelConfig, learners
from rl_caption.config.schema import (
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    ScstConfig,
    ScstTrainConfig,
    TrainConfig,
)
from rl_caption.data.formats import wrong_options
from rl_caption.errors import ConfigError
from rl_caption.options import TEMPERATURES, wrong_values
from rl_caption.scst import ADVANTAGES, OBJECTIVES

NEED_TWO_SAMPLES = frozenset({"leave_one_out", "group_norm"} | (set(OBJECTIVES) - {"reinforce", "ppo_clip"}))


def check(config: Any) -> None:
    """Raise ConfigError where a configuration has ``mistakes``."""
    wrong = mistakes(config)
    if wrong:
        raise ConfigError("; ".join(wrong))


def mistakes(config: Any) -> list[str]:
    """What is wrong with a configuration of any program: values out of range, options that do not fit each other.

    One sentence for each mistake, with the key, the value, and what would be right.
    """
    wrong = list(wrong_values(config, type(config)))
    if wrong:
        return wrong
    if isinstance(config, ScstConfig):
        wrong += _wrong_rollout(config.rollout, config.train)
        wrong += _wrong_schedules(config.reward, config.rollout)
        wrong += _wrong_kl(config.rollout, config.train)
        wrong += _wrong_names(config.train)
        # Which of the usual judges a run has depends on what its terms are.
        judges = ("cider", "rouge_l", "bleu4") if config.monitor.judges is None else config.monitor.judges
        wrong += wrong_best_by(config.monitor.best_by, config.reward.terms, judges)
    if isinstance(getattr(config, "reward", None), RewardConfig):
        wrong += _wrong_reward(config.reward)
    if isinstance(config, EvaluateConfig):
        wrong += _wrong_evaluation(config)
    if isinstance(getattr(config, "model", None), ModelConfig):
        wrong += _wrong_captioner(config.model)
    if isinstance(getattr(config, "train", None), TrainConfig):
        wrong += _wrong_schedule(config.train)
    if isinstance(getattr(config, "data", None), DataConfig):
        wrong += _wrong_data(config.data, "data")
        wrong += () if isinstance(config, RewardModelConfig) else _unfit_captions(config.data)
    if isinstance(getattr(config, "data", None), dict):  # of a grid
        known = [field.name for field in dataclasses.fields(DataConfig)]
        wrong += [
            f"data.{key} is not an option: expected {', '.join(known)}" for key in config.data if key not in known
        ]
    if hasattr(config, "scenes"):
        wrong += _wrong_data(config.scenes.data, "scenes.data")
    return wrong


def _wrong_rollout(rollout: RolloutConfig, train: ScstTrainConfig) -> Iterator[str]:
    for key, name in (("advantage", train.advantage), ("objective", train.objective)):
        if name in NEED_TWO_SAMPLES and rollout.num_samples < 2:
            yield f"rollout.num_samples is {rollout.num_samples}: train.{key} {name} compares at least 2"
    if train.updates_per_rollout > 1 and train.objective == "reinforce":
        yield (
            f"train.updates_per_rollout is {train.updates_per_rollout}: train.objective reinforce needs samples of the "
            "current policy, which they are no longer after the first update; use ppo_clip"
        )
    if rollout.beam_search:
        if train.objective in ("reinforce", "ppo_clip"):
            yield (
                f"rollout.beam_search is on: train.objective {train.objective} needs samples of the policy; use an "
                "objective that compares the captions of an image, such as dico"
            )
        if train.advantage == "greedy":
            yield "rollout.beam_search is on: no greedy captions are decoded for train.advantage greedy"
        yield from [
            f"rollout.{key} is {value}: it is for samples, but rollout.beam_search is on"
            for key, value, default in (
                ("cuda_graph", rollout.cuda_graph, False),
                ("temperature", rollout.temperature, 1),
                ("temperature_schedule", rollout.temperature_schedule, None),
            )
            if value != default
        ]
        if rollout.num_samples < 2:
            yield f"rollout.num_samples is {rollout.num_samples}: beam search has a width of at least 2"
    if rollout.cuda_graph and rollout.dropout:
        yield "rollout.cuda_graph and rollout.dropout are both on: every replay would drop the same units"


def _wrong_reward(reward: RewardConfig) -> Iterator[str]:
    terms = reward.terms
    if terms and not any(term.weight for term in terms.values()):
        yield f"reward.terms {', '.join(terms)} all have weight 0: expected at least one other weight"
    yield from (
        f"reward.terms.{name}: the log key reward/{name} is in use, rename the term"
        for name in sorted(LOG_KEYS & terms.keys())
    )


def _wrong_schedules(reward: RewardConfig, rollout: RolloutConfig) -> Iterator[str]:
    """What is wrong with the reward's terms and with what changes over the steps."""
    schedules = {f"reward.terms.{name}.schedule": term.schedule for name, term in reward.terms.items()}
    for key, points in (schedules | {"rollout.temperature_schedule": rollout.temperature_schedule}).items():
        steps = [step for step, _ in points or ()]
        if steps != sorted(steps):
            yield f"{key} has the steps {steps}: expected them in ascending order"
    for step, factor in rollout.temperature_schedule or ():
        expected = TEMPERATURES.expected(rollout.temperature * factor)
        if expected is not None:
            found = f"{rollout.temperature:g} x {factor:g} at step {step}"
            yield f"rollout.temperature_schedule makes the temperature {found}: expected {expected}"
    if rollout.temperature_schedule and rollout.cuda_graph:
        yield "rollout.cuda_graph and rollout.temperature_schedule are both set: a graph has one temperature"
    for name, term in reward.terms.items():
        if term.length_ratio is not None and term.length_ratio[0] >= term.length_ratio[1]:
            yield f"reward.terms.{name}.length_ratio is {list(term.length_ratio)}: expected the smaller number first"
    if reward.normalize == "per_group" and rollout.num_samples < 2:
        yield f"rollout.num_samples is {rollout.num_samples}: reward.normalize per_group compares at least 2"


def wrong_best_by(name: str | None, terms: Iterable[str], judges: Iterable[str]) -> Iterator[str]:
    """What is wrong with ``monitor.best_by`` where a run has these reward terms and judges."""
    known = [*judges, "val/cider", "val/reward", *(f"val/reward/{term}" for term in terms)]
    if name is not None and name not in known:
        yield f"monitor.best_by is {name!r}: expected one of {known}"


def _wrong_kl(rollout: RolloutConfig, train: ScstTrainConfig) -> list[str]:
    """What is wrong with the adaptive KL coefficient."""
    if train.kl_target is None:
        default = ScstTrainConfig.kl_horizon
        if train.kl_horizon != default:
            return [f"train.kl_horizon is {train.kl_horizon}: train.kl_target is not set, leave it out"]
        return []
    if train.kl_coef == 0:
        return [f"train.kl_target is {train.kl_target:g}: train.kl_coef, which it adapts, is 0, expected more"]
    captions = train.batch_size * rollout.num_samples
    least = captions // 5 + 1  # below, one step may make the coefficient 0
    if train.kl_horizon < least:
        return [f"train.kl_horizon is {train.kl_horizon}: a step has {captions} captions, expected at least {least}"]
    return []


def _wrong_names(train: ScstTrainConfig) -> list[str]:
    """What is wrong with the advantage and the objective. The usual ones are not imported."""
    try:
        if train.advantage not in ADVANTAGES or train.advantage_kwargs:
            from rl_caption.scst.advantages import build_advantage

            build_advantage(train.advantage, train.advantage_kwargs)
        if train.objective != "reinforce" or train.objective_kwargs:
            from rl_caption.scst.objectives import build_objective

            build_objective(train.objective, train.objective_kwargs, train.loss_reduction, train.kl_coef)
    except ConfigError as error:
        return [str(error)]
    return []


def _wrong_captioner(model: ModelConfig) -> list[str]:
    """What is wrong with a captioner from outside."""
    if model.target is None:
        return []
    from rl_caption.captioners.loading import captioner_class

    if model.tokenizer is not None:
        return [f"model.tokenizer is {model.tokenizer!r}: it is not for model.target {model.target!r}, leave it out"]
    try:
        captioner_class(model.target, "model.target", model.kwargs if model.init is None else None)
    except ConfigError as error:
        return [str(error)]
    return []


def _wrong_schedule(train: TrainConfig) -> list[str]:
    default = TrainConfig()
    given = [key for key in ("decay", "decay_every", "decay_epochs") if getattr(train, key) != getattr(default, key)]
    if given and train.schedule != "step":
        return [
            f"train.{key} is {getattr(train, key)}: train.schedule {train.schedule} has no such decay, leave it out "
            "or set the schedule to step"
            for key in given
        ]
    if {"decay_every", "decay_epochs"} <= set(given):
        return [
            f"train.decay_every is {train.decay_every} and train.decay_epochs is {train.decay_epochs}: set only one"
        ]
    return []


def _wrong_data(data: DataConfig, key: str) -> list[str]:
    try:
        return wrong_options(data, key)
    except ConfigError as error:
        return [str(error)]


def _unfit_captions(data: DataConfig) -> Iterator[str]:
    """What is wrong with data for a captioner."""
    if data.target is None and data.format in UNPAIRED:
        yield (
            f"data.format is {data.format!r}, which only the task {learners(data.format)} of reward models reads: "
            "choose a format of images with captions, karpathy or jsonl"
        )
    if data.features_root is not None and data.augment:
        yield (
            f"data.augment is {data.augment}: stored features cannot be augmented; leave it out, or store random "
            "views (data.features_kwargs.views)"
        )
    if "rand_augment" in data.augment:
        yield "data.augment has 'rand_augment', which only reward models read: leave it out"


def _wrong_evaluation(config: EvaluateConfig) -> Iterator[str]:
    if config.references is not None and config.predictions is None and not config.compare:
        yield f"references is {config.references!r}: it is for predictions; a model is evaluated on a split of data"
    if config.retrieval.backbone is None and (config.retrieval.pretrained is not None or config.retrieval.kwargs):
        yield "retrieval.pretrained and retrieval.kwargs need retrieval.backbone, which is not set"
    if config.model is not None or config.models:
        if config.decode.remove_bad_endings and config.data.tokenizer != TOKENIZER:
            yield f"decode.remove_bad_endings is for English only, but data.tokenizer is {config.data.tokenizer!r}"
        yield from wrong_decoding(config.decode, config.rerank, config.candidates)
        return
    if config.prompt is not None:
        yield f"prompt is {config.prompt!r}: it is for captions of a model, but model is not set"
    if config.rerank is not None or config.candidates:
        key, value = ("rerank", config.rerank) if config.rerank is not None else ("candidates", True)
        yield f"{key} is {value!r}: it is for captions of a model, but model is not set"


def wrong_decoding(decode: Decoding, rerank: str | None, candidates: bool) -> list[str]:
    """What is wrong with ``decode``, or with a choice among the captions that it gives."""
    count = decode.captions_per_image
    if rerank is not None and count < 2:
        several = "decode.num_samples, or decode.num_return_sequences of beam search"
        return [f"rerank is {rerank!r}: it chooses among several captions of an image; set {several}"]
    if count > 1 and rerank is None and not candidates:
        return [f"decode gives {count} captions an image: choose one by rerank, or keep all by candidates"]
    return []
