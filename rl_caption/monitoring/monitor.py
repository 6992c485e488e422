"""Monitor of reward hacking: looks for its signs in the greedy captions of every
validation.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from rewards.base import Reward, score_captions
from rewards.mixed import MixedReward, moments
from rl_caption.data.base import Row, reward_inputs
from rl_caption.monitoring.rule import (
    Findings,
    Peak,
    Thresholds,
    caption_statistics,
    judge_alarm,
    policy_signs,
    updated_peaks,
)
from rl_caption.runtime.types import Validation

DIGITS = 6
"""Decimals of the scores that are kept with a checkpoint."""


@dataclass
class HackingMonitor:
    """Judges validation captions, compares them with the starting policy's, and raises the alarm.

    Args:
        reward: reward of the training.
        judges: name -> held-out reward, not a term of ``reward``.
        references: ``reference_statistics`` of the validation images.
        thresholds: limits whose violation counts as evidence.
        stop: an alarm ends the run.
        validation: says which images are captioned, and how. If a checkpoint has
            another value, the comparison starts anew.
        notes: saved with the run. ``hacking`` has ``start`` (findings of the starting
            policy and their step), ``peaks`` (the judges' best validations),
            ``first_alarm`` (step and evidence) and ``signs`` (of the newest warning).
    """

    reward: MixedReward
    judges: Mapping[str, Reward]
    references: Mapping[str, float]
    thresholds: Thresholds = field(default_factory=Thresholds)
    stop: bool = False
    validation: str = ""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """One line for the log: the judges."""
        judges = [
            f"{name} [{one.signature}, {one.bounds}]"
            for name, one in self.judges.items()
        ]
        said = ", ".join(judges) or "none, only gross signs of hacking are detected"
        return f"monitor: held-out judges, not in the reward: {said}"

    def inspect(
        self,
        step: int,
        rows: Sequence[Row],
        captions: Sequence[str],
        finished: Sequence[bool],
        policy: Mapping[str, float] = MappingProxyType({}),
    ) -> tuple[Validation, Findings]:
        """Judge one caption of each of N images, the same images at every call. The
        first call is for the starting policy.

        ``finished``, [N], says which captions ended with EOS. ``policy`` has
        ``entropy`` and ``kl`` of the newest training step, where they are known.
        Returns the validation (values to log, messages, reason to stop) and the
        findings behind it.

        Raises:
            RewardError: the reward or a judge failed.
        """
        prompts, columns = reward_inputs(rows, finished)
        terms = self.reward.terms(prompts, captions, **columns)
        judges = {}
        for name, judge in self.judges.items():
            scores = score_captions(
                judge, f"judge {name!r}", prompts, list(captions), columns
            )
            judges[name] = [round(score, DIGITS) for score in scores]
        memory = self.notes.setdefault("hacking", {})
        is_start = memory.get("start", {}).get("signatures") != self._signatures
        if is_start:
            start = {
                "step": step,
                "signatures": self._signatures,
                "scales": self._scales(terms),
            }
            memory |= {"start": start, "peaks": {}, "signs": []}
            memory.setdefault("first_alarm", None)
        start = memory["start"]
        means = {name: statistics.fmean(values) for name, values in terms.items()}
        total = math.fsum(
            weight * means[name] / start["scales"][name]
            for name, weight in self.reward.weights.items()
        )
        now = Findings(
            total, judges, caption_statistics(captions, self.reward.tokenizer)
        )
        if is_start:
            start["findings"] = asdict(now)
        # There is no training step before the start: the first one that is known stands for it.
        start["policy"] = {**policy, **start.get("policy", {})}
        peaks = {name: Peak(**peak) for name, peak in memory["peaks"].items()}
        memory["peaks"] = {
            name: asdict(peak) for name, peak in updated_peaks(peaks, now, step).items()
        }
        began, messages, evidence = Findings(**start["findings"]), [], {}
        if not is_start:
            evidence = judge_alarm(now, began, self.references, self.thresholds, peaks)
            if total > began.reward:
                evidence |= policy_signs(policy, start["policy"], self.thresholds)
        elif step > 0:
            messages.append(
                "monitor: the checkpoint has no values of the starting policy under "
                "this reward, these judges and this validation; captions are compared "
                f"with those of step {step} instead"
            )
        warnings, stop = self._alarm(step, now, evidence)
        return Validation(
            self._metrics(now, means, evidence), messages + warnings, stop
        ), now

    @property
    def _signatures(self) -> dict[str, str]:
        """Signatures that the numbers depend on. The reward's signature includes its
        weights and normalisation.
        """
        judges = {
            f"judge/{name}": judge.signature for name, judge in self.judges.items()
        }
        return {"validation": self.validation, "reward": self.reward.signature} | judges

    def _scales(self, terms: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Divisor of each term's mean: 1 or, for z-scored terms, the standard deviation
        of the starting captions' scores.
        """
        if self.reward.normalize == "none":
            return dict.fromkeys(terms, 1.0)
        return {name: moments(values).std or 1.0 for name, values in terms.items()}

    def _metrics(
        self, now: Findings, terms: Mapping[str, float], evidence: Mapping[str, str]
    ) -> dict[str, float]:
        ratio = now.statistics["length"] / self.references["length"]
        metrics = {"val/reward": now.reward, "hacking/alarm": float(bool(evidence))}
        for name, value in terms.items():
            metrics[f"val/reward/{name}"] = value
        for name, scores in now.judges.items():
            metrics[f"val/judge/{name}"] = statistics.fmean(scores)
        for name, value in now.statistics.items():
            if name != "length":
                metrics[f"val/hacking/{name}"] = value
        return metrics | {"val/hacking/length_ratio": ratio}

    def _alarm(
        self, step: int, now: Findings, evidence: Mapping[str, str]
    ) -> tuple[list[str], str | None]:
        """A warning, if the signs differ from the newest warning's, and the reason to
        end the run, if any.
        """
        memory = self.notes["hacking"]
        changed = sorted(evidence) != memory["signs"]
        memory["signs"] = sorted(evidence)
        if not evidence:
            return [], None
        if memory["first_alarm"] is None:
            memory["first_alarm"] = {"step": step, "evidence": list(evidence.values())}
        began = memory["start"]["findings"]["reward"]
        text = (
            f"the reward rose from {began:.4g} to {now.reward:.4g} on the validation "
            f"images, but the captions got worse: {'; '.join(evidence.values())}"
        )
        warnings = [
            f"WARNING, signs of reward hacking: {text}. See docs/scst.md"
        ] * changed
        return warnings, f"monitor.stop: {text}" if self.stop else None
