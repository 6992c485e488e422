"""The training programs of captioners: from a configuration to a finished run folder."""

import copy
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from rewards.base import Reward
from rewards.mixed import MixedReward
from rewards.registry import load as load_term
from rewards.text.cider import CIDER_DIFFERENCES, CiderD
from rewards.text.tokenize import untested_texts
from rl_caption.captioners.base import Captioner
from rl_caption.captioners.decoding import ReplayedGenerate
from rl_caption.captioners.loading import weights_hash
from rl_caption.config.build import (
    build_captioner,
    build_data,
    build_decoding,
    build_reward,
    check_positions,
    references_of,
)
from rl_caption.config.schema import ModelConfig, ScstConfig, XeConfig, check_best_by
from rl_caption.data.base import Row
from rl_caption.data.checks import check_row_images
from rl_caption.data.loader import Collate
from rl_caption.monitoring.config import MonitorConfig
from rl_caption.monitoring.judges import build_judges
from rl_caption.monitoring.monitor import HackingMonitor
from rl_caption.monitoring.rule import few_images, reference_statistics
from rl_caption.runtime.engines import engine_of, print_main, uses_deepspeed
from rl_caption.runtime.errors import ConfigError, config_errors
from rl_caption.runtime.types import TrainState
from rl_caption.scst.advantages import build_advantage
from rl_caption.scst.cross_entropy import CrossEntropyTask
from rl_caption.scst.objectives import Objective, build_objective
from rl_caption.scst.reward_scales import sample_scores, scale_report
from rl_caption.scst.schedules import AdaptiveKl
from rl_caption.scst.step import SelfCriticalTask
from rl_caption.training.fit import Recipe, fit
from rl_caption.training.run_folder import is_complete
from rl_caption.training.setup import CHECKED_IMAGES, Context, setup
from rl_caption.training.validation import CaptionValidator

CHECKPOINTS = (".pt", ".pth", ".bin", ".safetensors", ".npz")
"""Endings of checkpoint files; a tag of open_clip has none."""


def train_xe(config: XeConfig) -> TrainState:
    """Train a captioner by cross-entropy; the best one by validation CIDEr-D is in ``export/best``
    of ``run.dir``.

    Returns the state in which the run ended: after its last step, or after the step at which a
    signal stopped it and a checkpoint was saved. Called again with the same configuration, it goes
    on from there.

    Raises:
        ConfigError: a setting does not fit the data or the captioner.
        DataError: the data cannot be used.
        CaptionerError: ``model.init`` is no captioner.
        NonFiniteError: a loss or gradient is not finite; the weights are not changed by it.
    """
    train = config.train
    with setup(config) as context:
        captioner = _captioner(
            context, config.model, "train.max_target_tokens", train.max_target_tokens
        )
        context = context.readable(captioner)
        return fit(
            context,
            Recipe(
                captioner.policy,
                lambda model: CrossEntropyTask(
                    context.accelerator, captioner, model, train.label_smoothing
                ),
                Collate(
                    captioner,
                    train.max_target_tokens,
                    train.captions_per_image,
                    config.data.augment,
                    train.seed,
                ),
                CaptionValidator(context, captioner, train.max_target_tokens),
                partial(captioner.save_pretrained, captioner.policy),
                validate_first=config.model.init is not None,
                measured=f"{train.max_target_tokens} tokens, tokenizer {config.data.tokenizer}",
                vocabulary=captioner.vocabulary(),
            ),
        )


def train_scst(config: ScstConfig) -> TrainState:
    """Fine-tune the captioner ``model.init`` by self-critical sequence training.

    The optimizer and the schedule start anew: only the weights come from cross-entropy training.
    The best captioner by ``monitor.best_by`` is in ``export/best`` of ``run.dir``. Returns the
    state in which the run ended, as ``train_xe``.

    Raises:
        RewardError: the reward cannot score, or returns something that is no score.
        ConfigError, DataError, CaptionerError, NonFiniteError: as ``train_xe``.
    """
    if config.model.init is None:
        raise ConfigError(
            "model.init is not set: name a captioner that was trained by cross-entropy"
        )
    rollout, targets = (
        config.rollout,
        config.rollout.max_new_tokens if config.train.xe_weight else None,
    )
    with setup(config) as context:
        if rollout.cuda_graph and engine_of(context.accelerator) == "zero3":
            raise ConfigError(
                "rollout.cuda_graph is on: ZeRO-3 gathers the weights anew at every step; turn it "
                "off"
            )
        captioner = _captioner(
            context, config.model, "rollout.max_new_tokens", rollout.max_new_tokens
        )
        context = context.readable(captioner)
        reward, monitor = _reward_and_monitor(config, context)
        metric = selecting_metric(config.monitor, reward.rewards, monitor.judges)
        task = _self_critical_task(config, context, captioner, reward, monitor.notes)
        if (
            context.checkpoint is None
            and len(reward.rewards) > 1
            and context.accelerator.is_main_process
        ):
            _print_scales(context, task)
        elif context.checkpoint is None and any(
            isinstance(term, CiderD) for term in reward.rewards.values()
        ):
            print_main(context.accelerator, CIDER_DIFFERENCES)
        scorer = _scorer(metric, monitor)
        by = f"tokenizer {config.data.tokenizer}" if scorer is None else scorer.signature
        recipe = Recipe(
            captioner.policy,
            lambda model: replace(task, model=model),
            Collate(captioner, targets, augmentations=config.data.augment, seed=config.train.seed),
            CaptionValidator(context, captioner, rollout.max_new_tokens, monitor),
            partial(captioner.save_pretrained, captioner.policy),
            metric,
            "{:g} to {:g}".format(*(CiderD if scorer is None else scorer).bounds)
            + "; papers print it times 100" * (scorer is None),
            signature=scst_signature(reward, context.train_rows, config, task.objective),
            measured=f"{rollout.max_new_tokens} tokens, {by}",
            vocabulary=captioner.vocabulary(),
            notes=monitor.notes,
        )
        state = fit(context, recipe)
        if config.report:
            _write_report(context)
        return state


def _self_critical_task(
    config: ScstConfig,
    context: Context,
    captioner: Captioner,
    reward: MixedReward,
    notes: dict[str, Any],
) -> SelfCriticalTask:
    """The task, whose model is still to be prepared; ``notes`` are saved with the run.

    Called before the weights of a checkpoint are loaded, so that a reference policy is the one the
    run started from.
    """
    train, rollout = config.train, config.rollout
    objective_of = partial(
        build_objective, train.objective, train.objective_kwargs, train.loss_reduction
    )
    objective = objective_of(train.kl_coef)
    adaptive_kl: AdaptiveKl | None = None
    if train.kl_target is not None:
        adaptive_kl = AdaptiveKl(
            objective_of, train.kl_coef, train.kl_target, train.kl_horizon, notes
        )
    compares = (
        getattr(objective, "needs_reference", False) or adaptive_kl is not None or config.monitor.kl
    )
    return SelfCriticalTask(
        context.accelerator,
        captioner,
        captioner.policy,
        reward,
        build_advantage(train.advantage, train.advantage_kwargs),
        build_decoding(config),
        objective,
        seed=train.seed,
        dropout=rollout.dropout,
        ref_policy=_frozen_copy(captioner, context) if compares else None,
        xe_weight=train.xe_weight,
        label_smoothing=train.label_smoothing,
        generate=ReplayedGenerate(captioner) if rollout.cuda_graph else None,
        updates_per_rollout=train.updates_per_rollout,
        weight_schedules={
            name: term.schedule for name, term in config.reward.terms.items() if term.schedule
        },
        temperature_schedule=rollout.temperature_schedule or (),
        adaptive_kl=adaptive_kl,
    )


def _reward_and_monitor(config: ScstConfig, context: Context) -> tuple[MixedReward, HackingMonitor]:
    """The reward and the monitor of reward hacking; the images that either reads are checked."""
    accelerator, data, tokenizer = context.accelerator, config.data, config.data.tokenizer
    references = references_of(context.val_rows)
    with accelerator.main_process_first():
        texts = references_of(context.train_rows)
        reward = build_reward(config.reward, texts, context.folder, tokenizer)
    with accelerator.main_process_first():
        judges = build_judges(config.monitor.judges, reward, references, tokenizer=tokenizer)
    monitor = HackingMonitor(
        reward,
        judges,
        reference_statistics(references, tokenizer),
        config.monitor.thresholds,
        config.monitor.stop,
        f"{context.validation}, {config.rollout.max_new_tokens} tokens",
    )
    print_main(accelerator, monitor.description)
    warning = few_images(len(references), config.monitor.thresholds) if judges else None
    if warning is not None:
        print_main(accelerator, warning)
    scores = {reward.__name__: reward} | dict(monitor.judges)
    names = [name for name, score in scores.items() if "image" in score.columns]
    if data.features_root is not None and names:
        rows, cache = [*context.train_rows, *context.val_rows], context.folder / CHECKED_IMAGES
        with accelerator.main_process_first():  # the others then find the verdicts in the cache
            check_row_images(rows, " and ".join(names), data.check_images, cache)
    return reward, monitor


def _write_report(context: Context) -> None:
    """Write ``report.html`` if the run is complete."""
    if context.accelerator.is_main_process and is_complete(context.folder):
        from rl_caption.programs.report.program import write_report

        page = write_report(context.folder, context.val_rows)
        print_main(context.accelerator, f"report: {page}" if page else "no report")


def _print_scales(context: Context, task: SelfCriticalTask) -> None:
    """Print the scales of the reward terms; before the model is prepared, so that one process can
    sample alone.
    """
    captions = partial(
        sample_scores,
        task.captioner,
        task.decoding,
        task.seed,
        context.accelerator,
        context.micro_batch_size,
    )
    print_main(
        context.accelerator,
        "reward: " + "\n".join(scale_report(task.reward, context.train_rows, captions)),
    )


def scst_signature(
    reward: MixedReward, rows: Sequence[Row], config: ScstConfig, objective: Objective
) -> str:
    """SacreEOS-style signature of a run (Hu et al. 2023). Runs whose signatures differ have no
    comparable rewards.

    It names the treatment of EOS, document frequencies, metric, baseline and samples; an objective
    other than REINFORCE; the starting policy if ``objective`` needs it, by eight digits of the hash
    of its weights or by its name on the hub; schedules; and how many references in ``rows`` may be
    tokenised differently from the toolkit.
    """
    train, rollout = config.train, config.rollout
    base = {"greedy": "greedy", "leave_one_out": "average"}.get(train.advantage, train.advantage)
    texts = (text for row in rows for text in row["references"])
    scored = reward.signature + untested_texts(reward, texts)
    signature = f"{scored}+{base}{_options(train.advantage_kwargs)}[nspi{rollout.num_samples}{',beam' * rollout.beam_search}]"
    if train.objective != "reinforce":
        signature += f"+{train.objective}{_options(train.objective_kwargs)}"
    if getattr(objective, "needs_reference", False):
        start = config.model.init or ""
        weights = weights_hash(start)
        named = start if weights == start else weights[:8]
        adapted = (
            ""
            if train.kl_target is None
            else f",target{train.kl_target:g},horizon{train.kl_horizon}"
        )
        signature += (
            f"+kl[{train.kl_coef:g},{named}{adapted}]" if train.kl_coef > 0 else f"+ref[{named}]"
        )
    schedules = [(name, term.schedule) for name, term in config.reward.terms.items()]
    for name, points in [*schedules, ("rollout.temperature", rollout.temperature_schedule)]:
        if points:
            signature += (
                f"+schedule[{name},{','.join(f'{step}:{factor:g}' for step, factor in points)}]"
            )
    return signature


def _options(kwargs: Mapping[str, Any]) -> str:
    return (
        f"({','.join(f'{key}={value}' for key, value in sorted(kwargs.items()))})" if kwargs else ""
    )


def check_images_early(config: ScstConfig) -> None:
    """Check the image files that rewards look at, where the captioner reads features, before other
    runs are trained.

    Only for rewards whose class has ``columns``, and not if unusable rows are skipped: the run
    itself checks all. Raises DataError where files are missing.
    """
    if config.data.features_root is None or config.data.on_bad == "skip":
        return
    names = []
    for name, term in config.reward.terms.items():
        with config_errors(f"reward.terms.{name}"):
            columns = getattr(load_term(term.target or name), "columns", None)
        if isinstance(columns, frozenset) and "image" in columns:
            names.append(name)
    if names:
        data = build_data(config.data)
        rows = [*data.split("train"), *data.split(config.eval.split)[: config.eval.max_images]]
        check_row_images(rows, " and ".join(names), check_pixels=False)


def check_weights_early(config: ScstConfig, to_come: Sequence[str]) -> None:
    """Check that the checkpoint files of rewards and judges exist, before the runs that this one
    needs are trained.

    Files in ``to_come``, the folders of those runs, are left out. Raises ConfigError.
    """
    asked = {
        f"reward.terms.{name}.kwargs": term.kwargs for name, term in config.reward.terms.items()
    }
    asked |= {
        f"monitor.judges.{name}.kwargs": judge.kwargs
        for name, judge in (config.monitor.judges or {}).items()
    }
    nested = [
        (f"{key}.{name}", value) for key, kwargs in asked.items() for name, value in kwargs.items()
    ]
    asked |= {key: value for key, value in nested if isinstance(value, dict)}  # of length_router
    folders = [Path(folder).resolve() for folder in to_come]
    for key, kwargs in asked.items():
        file = Path(str(kwargs.get("pretrained")))
        is_made = any(file.resolve().is_relative_to(folder) for folder in folders)
        if file.suffix in CHECKPOINTS and not file.is_file() and not is_made:
            raise ConfigError(f"{key}.pretrained is {str(file)!r}: there is no such file")


def _captioner(context: Context, model: ModelConfig, key: str, max_tokens: int) -> Captioner:
    """The captioner, which must have positions for captions of ``max_tokens`` tokens, the value of
    ``key``.
    """
    data = context.config.data
    captioner = build_captioner(
        model, references_of(context.train_rows), data.cache_mb, data.tokenizer
    )
    if data.features_root is not None and captioner.input_kind == "pixels":
        raise ConfigError(
            f"data.features_root is {data.features_root!r}, but the captioner reads images: leave "
            f"it out, or train one "
            "from scratch with model.kwargs.input_kind regions"
        )
    check_positions(
        captioner, key, max_tokens, rows=itertools.chain(context.train_rows, context.val_rows)
    )
    return captioner


def selecting_metric(config: MonitorConfig, terms: Collection[str], judges: Collection[str]) -> str:
    """Key of the validation metric that chooses ``export/best`` (docs/metrics.md); higher is
    better.

    Raises ConfigError where ``monitor.best_by`` is neither a metric nor one of the run's ``terms``
    and ``judges``.
    """
    name = config.best_by
    if name is None:
        return f"val/judge/{next(iter(judges))}" if config.stop and judges else "val/cider"
    check_best_by(name, terms, judges)
    return f"val/judge/{name}" if name in judges else name


def _scorer(metric: str, monitor: HackingMonitor) -> Reward | MixedReward | None:
    """The reward or judge whose mean is the metric of ``selecting_metric``; None for ``val/cider``."""
    origin, _, name = metric.removeprefix("val/").partition("/")
    if origin == "cider":
        return None
    return (
        monitor.judges[name]
        if origin == "judge"
        else monitor.reward.rewards[name]
        if name
        else monitor.reward
    )


def _frozen_copy(captioner: Captioner, context: Context) -> nn.Module:
    """A frozen copy of the policy; without DeepSpeed, it shares the weights that are not trained."""
    policy = captioner.policy
    frozen = (
        []
        if uses_deepspeed(context.accelerator)
        else [p for p in policy.parameters() if not p.requires_grad]
    )
    memo: dict[int, object] = {id(value): value for value in frozen}
    return copy.deepcopy(policy, memo).eval().requires_grad_(False).to(context.accelerator.device)
