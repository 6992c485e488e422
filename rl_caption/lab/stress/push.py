"""A push: self-critical training on the reward at several KL coefficients, and what became of the captions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from rl_caption.captioners.config import SavedModelConfig
from rl_caption.config.schema import (
    CaptionEvalConfig,
    DataConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ScstConfig,
    ScstTrainConfig,
)
from rl_caption.data.base import Row
from rl_caption.monitoring.config import MonitorConfig
from rl_caption.monitoring.scoring import RowCaption, Score
from rl_caption.programs.report.read import read_run
from rl_caption.programs.train import train_scst
from rl_caption.training.run_folder import is_complete

STATISTICS = {
    "length": "val/length",
    "length_ratio": "val/hacking/length_ratio",
    "repeated_ngrams": "val/hacking/repeated_ngrams",
    "vocabulary": "val/hacking/vocabulary",
}
"""Statistics of the validation captions -> their log keys (docs/metrics.md)."""


class Push(TypedDict):
    """A run of ``scst``: lists have one entry for each validation, of which the first is of the starting policy."""

    kl_coef: float
    seed: int
    step: list[int]
    reward: list[float]
    """Means over the validation images."""
    gold: list[float]
    kl: list[float | None]
    """Divergence of the samples from the starting policy at the newest training step, nats per token."""
    statistics: dict[str, list[float]]
    alarms: list[int]
    """Steps of the validations at which the monitor raised the alarm."""
    evidence: list[str]
    """What the first alarm said."""


def push_config(
    folder: Path,
    model: str,
    data: DataConfig,
    reward: RewardConfig,
    kl_coef: float,
    seed: int,
    steps: int,
    tokens: int,
) -> ScstConfig:
    """The configuration of a run: that of ``configs/scenes_scst_watched.yaml``, ``steps`` steps long."""
    every = max(steps // 10, 1)
    return ScstConfig(
        model=SavedModelConfig(init=model),
        data=data,
        rollout=RolloutConfig(num_samples=5, max_new_tokens=tokens),
        reward=reward,
        train=ScstTrainConfig(
            max_steps=steps,
            batch_size=32,
            lr=2e-4,
            warmup_steps=min(20, steps),
            kl_coef=kl_coef,
            seed=seed,
        ),
        eval=CaptionEvalConfig(every=every, max_images=200, batch_size=200),
        monitor=MonitorConfig(best_by="val/reward", kl=True),
        run=RunConfig(dir=str(folder), save_every=steps, keep_checkpoints=1, log_every=every),
        report=False,
    )


def push(config: ScstConfig, rows: Sequence[Row], gold: Score) -> Push | None:
    """Train unless that is done, and score the captions of the validations by ``gold``, on the validation ``rows``.

    None where a signal ended the training, which goes on at the next call. Raises as ``train_scst``.
    """
    folder = Path(config.run.dir)
    if not is_complete(folder):
        train_scst(config)
    if not is_complete(folder):
        return None
    run, numbers = read_run(folder), {row["image_id"]: number for number, row in enumerate(rows)}
    rewards = run.series("val/reward")
    steps = [step for step, _ in rewards]
    gold_means = []
    for step in steps:
        captions = [
            RowCaption(numbers[image_id], text) for image_id, text in run.predictions(step).items()
        ]
        gold_means.append(float(gold(captions).mean()))
    divergences = run.series("policy/kl")
    before = [[value for at, value in divergences if at <= step] for step in steps]
    return Push(
        kl_coef=config.train.kl_coef,
        seed=config.train.seed,
        step=steps,
        reward=[value for _, value in rewards],
        gold=gold_means,
        kl=[values[-1] if values else None for values in before],
        statistics={
            name: [value for _, value in run.series(key)] for name, key in STATISTICS.items()
        },
        alarms=run.alarms,
        evidence=list(run.first_alarm.get("evidence", [])),
    )
