"""Configuration of what watches for hacking of the reward; a part of ``ScstConfig``."""

from dataclasses import dataclass, field

from rl_caption.monitoring.rule import Thresholds


@dataclass
class JudgeConfig:
    """One held-out judge.

    Args:
        target: name of a reward of this package, or ``package.module:Class`` of another; null uses
            the judge's name.
        kwargs: options of the reward.
    """

    target: str | None = None
    kwargs: dict = field(default_factory=dict)


@dataclass
class MonitorConfig:
    """Detection of reward hacking at every validation (docs/scst.md).

    Args:
        judges: held-out rewards by name, none of them a term of the reward; null uses the n-gram
            metrics that are not in the reward.
        thresholds: what counts as evidence.
        stop: end the run at the first alarm.
        best_by: metric that chooses ``export/best``: a judge's name, ``val/cider``, ``val/reward``
            or ``val/reward/TERM``; null is ``val/cider`` or, with ``stop``, the first judge.
        kl: log the KL divergence to the starting policy even if ``train.kl_coef`` is 0. This needs
            the memory of a second model.
    """

    judges: dict[str, JudgeConfig] | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    stop: bool = False
    best_by: str | None = None
    kl: bool = False
