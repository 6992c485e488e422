"""The training programs of captioners: from a configuration to a finished run folder."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from rewards.mixed import MixedReward
from rewards.text.tokenize import untested_texts
from rl_caption.captioners.base import Captioner
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import weights_hash
from rl_caption.config.build import (
    build_captioner,
    build_decoding,
    build_reward,
    check_positions,
    references_of,
)
from rl_caption.config.schema import ScstConfig, XeConfig, check_best_by
from rl_caption.data.base import Row
from rl_caption.data.checks import check_row_images
from rl_caption.data.loader import Collate
from rl_caption.monitoring.judges import build_judges
from rl_caption.monitoring.monitor import HackingMonitor
from rl_caption.monitoring.rule import reference_statistics
from rl_caption.runtime.engines import print_main
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.types import TrainState
from rl_caption.runtime.zero import uses_deepspeed
from rl_caption.scst.advantages import build_advantage
from rl_caption.scst.cross_entropy import CrossEntropyTask
from rl_caption.scst.objectives import Objective, build_objective
from rl_caption.scst.step import SelfCriticalTask
from rl_caption.training.checkpoint import is_complete, read_state
from rl_caption.training.loop import Validate, train
from rl_caption.training.run import CHECKED_IMAGES, Run, open_run
from rl_caption.training.validation import validate_captions

MODE = "captioner_mode"
"""Key of a checkpoint's note: the mode in which its run scored and sampled captions."""


def train_xe(config: XeConfig) -> TrainState:
    """Train a captioner by cross-entropy; the best one by validation CIDEr-D is in
    ``export/best`` of ``run.dir``.

    Returns the state in which the run ended: after its last step, or after the step at
    which a signal stopped it and a checkpoint was saved. Called again with the same
    configuration, it goes on from there.

    Raises:
        ConfigError: a setting does not fit the data or the captioner.
        DataError: the data cannot be used.
        CaptionerError: ``model.init`` is no captioner.
        NonFiniteError: a loss or gradient is not finite; the weights are not changed by it.
    """
    options, tokens = config.train, config.train.max_target_tokens
    with open_run(config) as run:
        captioner = make_captioner(run, config, "train.max_target_tokens", tokens)
        model = run.restore(
            captioner.policy,
            vocabulary=captioner.vocabulary(),
            notes=share_mode(run, captioner),
        )
        return train(
            run,
            CrossEntropyTask(
                run.accelerator, captioner, model, options.label_smoothing
            ),
            Collate(
                captioner,
                tokens,
                options.captions_per_image,
                config.data.augment,
                options.seed,
            ),
            make_validation(run, config, captioner, tokens),
            partial(captioner.save_pretrained, captioner.policy),
            "val/cider",
            f"{tokens} tokens, tokenizer {config.data.tokenizer}",
            validate_first=config.model.init is not None,
        )


def train_scst(config: ScstConfig) -> TrainState:
    """Fine-tune the captioner ``model.init`` by self-critical sequence training.

    The optimizer and the schedule start anew: only the weights come from cross-entropy
    training. The best captioner by ``monitor.best_by`` is in ``export/best`` of
    ``run.dir``. Returns the state in which the run ended, as ``train_xe``.

    Raises:
        RewardError: the reward failed, or returned something that is no score.
        ConfigError, DataError, CaptionerError, NonFiniteError: as ``train_xe``.
    """
    if config.model.init is None:
        raise ConfigError(
            "model.init is not set: name a captioner, or train one: rl-caption run own"
        )
    tokens = config.rollout.max_new_tokens
    with open_run(config) as run:
        captioner = make_captioner(run, config, "rollout.max_new_tokens", tokens)
        reward, monitor = make_reward(run, config)
        monitor.notes |= share_mode(run, captioner)
        targets = tokens if config.train.xe_weight else None
        state = train(
            run,
            make_task(run, config, captioner, reward, monitor.notes),
            Collate(captioner, targets, None, config.data.augment, config.train.seed),
            make_validation(run, config, captioner, tokens, monitor),
            partial(captioner.save_pretrained, captioner.policy),
            *make_metric(config, monitor),
        )
        if (
            run.accelerator.is_main_process
            and config.report
            and is_complete(run.folder)
        ):
            from rl_caption.programs.report.page import write_report

            write_report(run.folder, run.val_rows)
        return state


def make_task(
    run: Run,
    config: ScstConfig,
    captioner: Captioner,
    reward: MixedReward,
    notes: dict[str, Any],
) -> SelfCriticalTask:
    """Self-critical training of the captioner. Restores its policy and ``notes`` from
    the run's checkpoint if there is one.
    """
    options, rollout = config.train, config.rollout
    advantage = build_advantage(options.advantage, options.advantage_kwargs)
    objective = build_objective(
        options.objective,
        options.objective_kwargs,
        options.loss_reduction,
        options.kl_coef,
    )
    ref_policy = None
    if getattr(objective, "needs_reference", False) or config.monitor.kl:
        # Before the weights of a checkpoint are loaded: a copy of the starting policy.
        ref_policy = _frozen_copy(captioner.policy, run.accelerator)
    signature = scst_signature(reward, run.train_rows, config, objective)
    return SelfCriticalTask(
        run.accelerator,
        captioner,
        run.restore(captioner.policy, signature, captioner.vocabulary(), notes),
        reward,
        advantage,
        build_decoding(rollout, advantage),
        objective,
        seed=options.seed,
        dropout=rollout.dropout,
        ref_policy=ref_policy,
        xe_weight=options.xe_weight,
        label_smoothing=options.label_smoothing,
        updates_per_rollout=options.updates_per_rollout,
        weight_schedules={
            name: term.schedule
            for name, term in config.reward.terms.items()
            if term.schedule
        },
        temperature_schedule=rollout.temperature_schedule or (),
    )


def make_captioner(
    run: Run, config: XeConfig | ScstConfig, key: str, max_tokens: int
) -> Captioner:
    """Build the captioner. Raises ``ConfigError`` where it has no positions for
    captions of ``max_tokens`` tokens, the value of ``key``.
    """
    data = config.data
    captioner = build_captioner(
        config.model, references_of(run.train_rows), data.cache_mb, data.tokenizer
    )
    if data.features_root is not None and captioner.input_kind == "pixels":
        raise ConfigError(
            f"data.features_root is {data.features_root!r}, but the captioner reads images: leave "
            "it out, or train one from scratch with model.kwargs.input_kind regions"
        )
    rows = itertools.chain(run.train_rows, run.val_rows)
    check_positions(captioner, key, max_tokens, rows)
    return captioner


def share_mode(run: Run, captioner: Any) -> dict[str, Any]:
    """Set the captioner's mode in every process to the first process's, or to the
    checkpoint's; return it as a note. Only vision-language models have modes.
    """
    mode = getattr(captioner.policy, "mode", None)
    if mode is None:
        return {}
    saved = {} if run.checkpoint is None else read_state(run.checkpoint).notes
    (values,) = broadcast_object_list([saved.get(MODE, list(mode))])
    captioner.policy.mode = type(mode)(*values)
    return {MODE: values}


def make_validation(
    run: Run,
    config: XeConfig | ScstConfig,
    captioner: Captioner,
    max_new_tokens: int,
    monitor: HackingMonitor | None = None,
) -> Validate:
    """Function that captions and scores the validation images as ``eval`` says."""
    options = config.eval
    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        num_beams=options.num_beams or 1,
        length_penalty=options.length_penalty or 0.0,
        batch_size=options.batch_size,
    )
    return partial(
        validate_captions, run, captioner, decoding, config.data.tokenizer, monitor
    )


def make_reward(run: Run, config: ScstConfig) -> tuple[MixedReward, HackingMonitor]:
    """Build the reward and the monitor of reward hacking, and check the images that
    they read.
    """
    accelerator, data, tokenizer = run.accelerator, config.data, config.data.tokenizer
    references = references_of(run.val_rows)
    with accelerator.main_process_first():
        reward = build_reward(
            config.reward, references_of(run.train_rows), run.folder, tokenizer
        )
        judges = build_judges(
            config.monitor.judges, reward, references, tokenizer=tokenizer
        )
    monitor = HackingMonitor(
        reward,
        judges,
        reference_statistics(references, tokenizer),
        config.monitor.thresholds,
        config.monitor.stop,
        f"{run.validation}, {config.rollout.max_new_tokens} tokens",
    )
    print_main(accelerator, monitor.description)
    scores = {reward.__name__: reward} | dict(monitor.judges)
    names = [name for name, score in scores.items() if "image" in score.columns]
    if data.features_root is not None and names:
        rows = [*run.train_rows, *run.val_rows]
        # The others then find the verdicts in the cache.
        with accelerator.main_process_first():
            check_row_images(
                rows,
                " and ".join(names),
                data.check_images,
                run.folder / CHECKED_IMAGES,
            )
    return reward, monitor


def scst_signature(
    reward: MixedReward, rows: Sequence[Row], config: ScstConfig, objective: Objective
) -> str:
    """SacreEOS-style signature of a run (Hu et al. 2023). Rewards of runs with
    different signatures cannot be compared.

    It names the treatment of EOS, document frequencies, metric, baseline and samples;
    an objective other than REINFORCE; the starting policy if ``objective`` needs it
    (name on the hub, or eight digits of the hash of its weights); schedules; and how
    many references in ``rows`` may be tokenised differently from the toolkit.
    """
    options, rollout = config.train, config.rollout
    base = "average" if options.advantage == "leave_one_out" else options.advantage
    base += _kwargs(options.advantage_kwargs)
    texts = (text for row in rows for text in row["references"])
    fields = [
        reward.signature + untested_texts(reward, texts),
        f"{base}[nspi{rollout.num_samples}{',beam' * rollout.beam_search}]",
    ]
    if options.objective != "reinforce":
        fields.append(options.objective + _kwargs(options.objective_kwargs))
    if getattr(objective, "needs_reference", False):
        start = str(config.model.init)
        weights = weights_hash(start)
        start = start if weights == start else weights[:8]
        kl = f"kl[{options.kl_coef:g},{start}]"
        fields.append(kl if options.kl_coef > 0 else f"ref[{start}]")
    schedules = {name: term.schedule for name, term in config.reward.terms.items()}
    schedules["rollout.temperature"] = rollout.temperature_schedule
    for name, points in schedules.items():
        if points:
            said = ",".join(f"{step}:{factor:g}" for step, factor in points)
            fields.append(f"schedule[{name},{said}]")
    return "+".join(fields)


def _kwargs(kwargs: Mapping[str, Any]) -> str:
    said = ",".join(f"{key}={value}" for key, value in sorted(kwargs.items()))
    return f"({said})" if said else ""


def make_metric(config: ScstConfig, monitor: HackingMonitor) -> tuple[str, str]:
    """Log key of the metric that chooses ``export/best``, and how it is measured.

    Raises ConfigError where ``monitor.best_by`` is neither a metric nor one of the
    run's terms and judges.
    """
    reward, judges, name = monitor.reward, monitor.judges, config.monitor.best_by
    if name is None:
        name = next(iter(judges)) if config.monitor.stop and judges else "val/cider"
    check_best_by(name, reward.rewards, judges)
    tokens = f"{config.rollout.max_new_tokens} tokens"
    if name == "val/cider":
        return name, f"{tokens}, tokenizer {config.data.tokenizer}"
    if name in judges:
        return f"val/judge/{name}", f"{tokens}, {judges[name].signature}"
    return name, f"{tokens}, {reward.signature}"


def _frozen_copy(policy: nn.Module, accelerator: Accelerator) -> nn.Module:
    """A frozen copy of the policy; without DeepSpeed, it shares the weights that are
    not trained.
    """
    shared = [] if uses_deepspeed(accelerator) else policy.parameters()
    memo = {id(value): value for value in shared if not value.requires_grad}
    copied = copy.deepcopy(policy, memo)
    return copied.eval().requires_grad_(False).to(accelerator.device)
