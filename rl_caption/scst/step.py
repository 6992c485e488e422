"""Self-critical sequence training: the step, as the papers have it (Rennie et al. 2017; Luo 2020)."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from rewards.mixed import MixedReward
from rl_caption.captioners.base import Captioner
from rl_caption.captioners.config import Decoding
from rl_caption.runtime.engines import (
    Averages,
    autocast,
    backward_all,
    dropout_off,
    global_count,
)
from rl_caption.runtime.types import CaptionBatch, Rollout, Scores
from rl_caption.runtime.zero import engine_of, gathered_parameters
from rl_caption.scst.advantages import AdvantageFn, step_advantages
from rl_caption.scst.cross_entropy import target_count, xe_loss
from rl_caption.scst.objectives import (
    Objective,
    Reinforce,
    kl_to_reference,
    sum_and_count,
    token_logprobs_and_entropy,
)
from rl_caption.scst.rollout import (
    log_rollout,
    sample_captions,
    score_rollouts,
    with_greedy_captions,
)
from rl_caption.scst.schedules import Points, factor_at, scheduled_weights


@dataclass
class MicroBatch:
    """One micro-batch of this process during a step. Tensors are on the process's device."""

    batch: CaptionBatch
    encoded: CaptionBatch
    """The same batch, with the image encoder's outputs as inputs if the encoder need
    not run again.
    """
    rollout: Rollout
    scores: Scores
    advantages: Tensor
    """Advantages of the samples, [B, K]."""
    old_logprobs: Tensor | None = None
    """Log-probabilities [B, K, L] of the sampled tokens in nats, under the policy that
    sampled; kept from the first update.
    """
    ref_logprobs: Tensor | None = None
    """Log-probabilities [B, K, L] under the frozen starting policy, also computed in
    the first update; None without a starting policy.
    """


@dataclass
class SelfCriticalTask:
    """Self-critical training; ``training_step`` samples, scores, and leaves the
    gradient of the objective.

    Args:
        captioner: its ``policy`` draws the samples.
        model: the same policy as prepared for (distributed) training.
        decoding: number of samples K, temperature, length limit, and whether the greedy
            caption is decoded too.
        dropout: keep dropout on while sampling and in the loss.
        ref_policy: frozen starting policy, whose log-probabilities the objective
            receives; None if it needs none.
        xe_weight: weight of the cross-entropy on the references (a token mean), which
            is added to the objective.
        label_smoothing: label smoothing of the cross-entropy.
        updates_per_rollout: optimizer updates on the samples of one step.
        weight_schedules: reward term -> (step, factor) points of its weight.
        temperature_schedule: (step, factor) points of the sampling temperature.
    """

    accelerator: Accelerator
    captioner: Captioner
    model: nn.Module
    reward: MixedReward
    advantage: AdvantageFn
    decoding: Decoding
    objective: Objective = field(default_factory=Reinforce)
    seed: int = 0
    dropout: bool = False
    ref_policy: nn.Module | None = None
    xe_weight: float = 0.0
    label_smoothing: float = 0.0
    updates_per_rollout: int = 1
    weight_schedules: Mapping[str, Points] = field(default_factory=dict)
    temperature_schedule: Points = ()
    name: str = "scst"
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Captions and rewards of the newest step, for ``samples.jsonl``."""

    def training_step(
        self, batches: Sequence[CaptionBatch], step: int
    ) -> Iterator[Averages]:
        """Leave the gradient of each update in the parameters. ``batches`` are this
        process's micro-batches.

        Yields what is to be logged, once per update; the caller updates the weights in between.
        """
        log = Averages()
        reward, decoding = self._apply_schedules(step, log)
        with dropout_off(self.model, enabled=not self.dropout):
            started = time.perf_counter()
            encoded, rollouts = self._sample(batches, decoding, step)
            sampled = time.perf_counter()
            scores = score_rollouts(reward, rollouts, batches, self.accelerator)
            scored = time.perf_counter()
            advantages = step_advantages(self.advantage, scores, self.accelerator)
            device = self.accelerator.device
            micros = [
                MicroBatch(batch, states, rollout, *send_to_device(tensors, device))
                for batch, states, rollout, *tensors in zip(
                    batches, encoded, rollouts, scores, advantages, strict=True
                )
            ]
            # Losses are means over the global batch, so their counts come before any backward pass.
            count = global_count(
                self.accelerator,
                torch.stack([self._count(micro) for micro in micros]).sum(0),
            )
            targets = (
                target_count(self.accelerator, batches) if self.xe_weight else None
            )
            for update in range(self.updates_per_rollout):
                losses = [
                    partial(self._policy_loss, micro, count, log) for micro in micros
                ]
                if targets is not None:
                    losses += [
                        partial(self._xe_loss, micro, targets, log) for micro in micros
                    ]
                loss = backward_all(self.accelerator, self.model, losses)
                log.add_sum("loss/total", loss, 1 / self.accelerator.num_processes)
                log.add("time/update", time.perf_counter() - scored)
                if update == 0:
                    log.add("time/rollout", sampled - started)
                    log.add("time/reward", scored - sampled)
                    self.samples = log_rollout(
                        batches,
                        rollouts,
                        scores,
                        advantages,
                        log,
                        self.reward.tokenizer,
                    )
                yield log
                for micro in micros:  # the weights have changed
                    micro.encoded = _without_graph(micro)
                log, scored = Averages(), time.perf_counter()

    def _sample(
        self, batches: Sequence[CaptionBatch], decoding: Decoding, step: int
    ) -> tuple[list[CaptionBatch], list[Rollout]]:
        """Encode the images and sample their captions, without a gradient through the samples.

        A single micro-batch keeps the gradient of its image states, which the loss then
        reads: its images are encoded once. Under ZeRO-3 the weights are gathered once
        for all micro-batches.
        """
        policy = self.captioner.policy
        with_gradient = (
            len(batches) == 1
            and not self.dropout
            and engine_of(self.accelerator) == "plain"
        )
        encoded, rollouts = [], []
        with gathered_parameters(self.accelerator, self.model):
            for batch in batches:
                with torch.set_grad_enabled(with_gradient), autocast(self.accelerator):
                    encoded.append(
                        replace(
                            batch,
                            inputs=self.captioner.image_states(policy, batch.inputs),
                        )
                    )
            for batch, states in zip(batches, encoded, strict=True):
                with autocast(self.accelerator):
                    rollouts.append(self._sample_batch(batch, states, decoding, step))
        return encoded, rollouts

    def _sample_batch(
        self, batch: CaptionBatch, encoded: CaptionBatch, decoding: Decoding, step: int
    ) -> Rollout:
        """Sample the captions of a micro-batch; with dropout, greedy captions are
        decoded apart, without dropout.
        """
        captioner, policy = self.captioner, self.captioner.policy
        apart = self.dropout and decoding.with_greedy
        drawn = decoding.replace(with_greedy=False) if apart else decoding
        rollout = sample_captions(captioner, policy, encoded, drawn, self.seed, step)
        if not apart:
            return rollout
        return with_greedy_captions(captioner, policy, batch, decoding, rollout)

    def _apply_schedules(
        self, step: int, log: Averages
    ) -> tuple[MixedReward, Decoding]:
        """The reward and the decoding options of ``step``."""
        reward, decoding = self.reward, self.decoding
        if self.weight_schedules:
            reward = reward.with_weights(
                scheduled_weights(reward, self.weight_schedules, step)
            )
            for name in self.weight_schedules:
                log.add(f"schedule/weight/{name}", reward.weights[name])
        if self.temperature_schedule:
            temperature = decoding.temperature * factor_at(
                self.temperature_schedule, step
            )
            decoding = decoding.replace(temperature=temperature)
            log.add("schedule/temperature", temperature)
        return reward, decoding

    @torch.no_grad()
    def _count(self, micro: MicroBatch) -> Tensor:
        """Count that the objective divides by, a scalar or [T]. It may not depend on
        log-probabilities, so zeros stand for them.
        """
        mask = micro.rollout.mask
        zeros = torch.zeros(mask.shape, device=mask.device)
        reference = None if self.ref_policy is None else zeros
        return sum_and_count(
            self.objective,
            zeros,
            zeros,
            reference,
            mask,
            micro.scores,
            micro.advantages,
        )[1]

    def _policy_loss(self, micro: MicroBatch, count: Tensor, log: Averages) -> Tensor:
        """This micro-batch's part of the objective's mean over the global batch; a scalar."""
        mask = micro.rollout.mask
        logprobs, entropy = self._token_logprobs(
            self.model, micro.encoded, micro.rollout
        )
        log.add("policy/entropy", entropy)
        if micro.old_logprobs is None:
            micro.old_logprobs = logprobs.detach()
            micro.ref_logprobs = self._ref_logprobs(
                _without_graph(micro), micro.rollout
            )
        reference = micro.ref_logprobs
        if reference is not None:
            log.add(
                "policy/kl", kl_to_reference(logprobs.detach()[mask], reference[mask])
            )
        total, _, metrics = sum_and_count(
            self.objective,
            logprobs,
            micro.old_logprobs,
            reference,
            mask,
            micro.scores,
            micro.advantages,
        )
        for name, (value, number) in metrics.items():
            log.add_sum(name, float(value), float(number))
        return (total / count).sum()

    def _token_logprobs(
        self, model: nn.Module, batch: CaptionBatch, rollout: Rollout
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities [B, K, L] of the sampled tokens, 0 after EOS, and the
        entropies [P] of the P tokens.
        """
        mask, row = rollout.mask, None
        if self.dropout:  # a prefix that is scored once would lose the same units for all its captions
            logits = self.captioner.token_logits(
                model, batch.inputs, rollout.token_ids, mask
            )
        else:
            logits, row = self.captioner.prefix_logits(
                model, batch.inputs, rollout.token_ids, mask
            )
        logprobs, entropy = token_logprobs_and_entropy(
            logits, rollout.token_ids[mask], rollout.temperature, row
        )
        return logprobs.new_zeros(mask.shape).masked_scatter(mask, logprobs), entropy

    def _ref_logprobs(self, batch: CaptionBatch, rollout: Rollout) -> Tensor | None:
        """Log-probabilities [B, K, L] under the starting policy, in the policy's
        precision, so that equal weights have no divergence; None without a starting
        policy.
        """
        if self.ref_policy is None:
            return None
        with torch.no_grad(), autocast(self.accelerator):
            return self._token_logprobs(self.ref_policy, batch, rollout)[0]

    def _xe_loss(self, micro: MicroBatch, targets: Tensor, log: Averages) -> Tensor:
        batch = _without_graph(micro)
        return self.xe_weight * xe_loss(
            self.captioner, self.model, batch, targets, self.label_smoothing, log
        )


def _without_graph(micro: MicroBatch) -> CaptionBatch:
    """The images for a further pass: their states, unless these have a graph, which one
    backward pass uses up.
    """
    return (
        micro.batch
        if any(tensor.requires_grad for tensor in micro.encoded.inputs.values())
        else micro.encoded
    )
