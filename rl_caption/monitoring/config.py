"""Configuration of the detection of reward hacking; a part of ``ScstConfig``."""

from pydantic import Field

from rl_caption.monitoring.rule import Thresholds
from rl_caption.runtime.options import Section


class JudgeConfig(Section):
    """One held-out judge."""

    target: str | None = None
    """Name of a reward of this package, or ``package.module:Class`` of another; null
    uses the judge's name.
    """
    kwargs: dict = {}
    """Options of the reward."""


class MonitorConfig(Section):
    """Detection of reward hacking at every validation (docs/scst.md)."""

    judges: dict[str, JudgeConfig] | None = None
    """Held-out rewards by name, which may not be terms of the reward; null uses the
    n-gram metrics that are not in the reward.
    """
    thresholds: Thresholds = Field(default_factory=Thresholds)
    """Limits whose violation counts as evidence."""
    stop: bool = False
    """End the run at the first alarm."""
    best_by: str | None = None
    """Metric that chooses ``export/best``: a judge's name, ``val/cider``,
    ``val/reward`` or ``val/reward/TERM``; null is ``val/cider`` or, with ``stop``, the
    first judge.
    """
    kl: bool = False
    """Log the KL divergence to the starting policy even if ``train.kl_coef`` is 0. This
    needs the memory of a second model.
    """
