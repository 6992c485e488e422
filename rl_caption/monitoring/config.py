"""Configuration of what watches for hacking of the reward; a part of ``ScstConfig``."""

from dataclasses import dataclass, field

from rl_caption.monitoring.rule import Thresholds


@dataclass
class JudgeConfig:
    """One held-out judge.

    Args:
        target: ``package.module:Class`` of a reward, or a name of this package's; null takes the judge's name.
        kwargs: arguments of it.
    """

    target: str | None = None
    kwargs: dict = field(default_factory=dict)


@dataclass
class MonitorConfig:
    """What watches for hacking of the reward, at every validation (docs/hacking.md).

    Args:
        judges: name to held-out reward, none of them a term of the reward; null takes n-gram metrics that the reward
            does not contain.
        thresholds: what counts as evidence.
        stop: end the run at the first alarm.
        best_by: what chooses ``export/best``: a judge's name, ``val/cider``, ``val/reward`` or ``val/reward/TERM``;
            null is ``val/cider`` or, with ``stop``, the first judge.
        kl: log the KL divergence to the starting policy also where ``train.kl_coef`` is 0, which takes the memory of a
            second model.
    """

    judges: dict[str, JudgeConfig] | None = None
    thresholds: Thresholds = field(default_factory=Thresholds)
    stop: bool = False
    best_by: str | None = None
    kl: bool = False
