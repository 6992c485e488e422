"""Self-critical sequence training: the step, as the papers have it (Rennie et al. 2017; Luo 2020)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rewards.mixed import MixedReward
from rl_caption.captioners.base import Captioner, Decoding, Generate
from rl_caption.engines import autocast, engine_of, whole_weights
from rl_caption.scst.advantages import AdvantageFn
from rl_caption.scst.cross_entropy import target_count, xe_loss
from rl_caption.scst.logprobs import token_logprobs, token_logprobs_and_entropy
from rl_caption.scst.objectives import (
    LossReduction,
    kl_penalty,
    kl_to_reference,
    policy_gradient_sum,
    reduction_count,
)
from rl_caption.scst.rollout import log_rollout, sample_captions
from rl_caption.scst.scoring import score_rollouts
from rl_caption.training.accumulation import Averages, backward_all, dropout_off, global_count
from rl_caption.types import CaptionBatch, Rollout


@dataclass
class SelfCriticalTask:
    """One policy, one reward, one objective.

    Args:
        accelerator: owns devices and the backward pass.
        captioner: the seam to the model; ``captioner.policy`` samples.
        model: the policy as prepared for (distributed) training.
        reward: scores captions.
        advantage: rewards [B, K] (and greedy ones [B]) to advantages [B, K].
        decoding: K, temperature, length limit, and whether the greedy caption is decoded too.
        loss_reduction: ``token`` or ``sequence`` mean.
        seed: of the samples.
        dropout: keep dropout on, in sampling and scoring.
        ref_policy: frozen starting policy; needed where ``kl_coef`` is above 0, elsewhere only to log the divergence.
        kl_coef: weight of the KL penalty, token mean.
        xe_weight: weight of the cross-entropy on the references, token mean.
        label_smoothing: of that cross-entropy.
        generate: in place of the captioner's own, such as ``captioners.replay.ReplayedGenerate``.
    """

    accelerator: Accelerator
    captioner: Captioner
    model: nn.Module
    reward: MixedReward
    advantage: AdvantageFn
    decoding: Decoding
    loss_reduction: LossReduction = "token"
    seed: int = 0
    dropout: bool = False
    ref_policy: nn.Module | None = None
    kl_coef: float = 0.0
    xe_weight: float = 0.0
    label_smoothing: float = 0.0
    generate: Generate | None = None
    name: str = "scst"
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Captions and rewards of the newest step, for the log."""

    def training_step(self, batches: Sequence[CaptionBatch], step: int) -> Averages:
        """Leave the gradient of one optimizer step in the parameters. ``batches`` are this process's micro-batches."""
        log = Averages()
        with dropout_off(self.model, enabled=not self.dropout):
            started = time.perf_counter()
            # With one micro-batch, the states that captions are drawn from can be those that they are scored with.
            once = len(batches) == 1 and not self.dropout and engine_of(self.accelerator) == "plain"
            with whole_weights(self.accelerator, self.model):  # once for all micro-batches
                encoded = [self._encoded(batch, once) for batch in batches]
                rollouts = [self._sample(batch, step) for batch in encoded]
            sampled = time.perf_counter()
            scores = score_rollouts(self.reward, rollouts, batches, self.accelerator)
            scored = time.perf_counter()
            advantages = [self.advantage(score.samples, score.greedy) for score in scores]
            # The means are over the global batch: accumulation and data parallelism leave the step as it is.
            counts = [reduction_count(rollout.mask, self.loss_reduction) for rollout in rollouts]
            count = global_count(self.accelerator, torch.stack(counts).sum())
            tokens = global_count(self.accelerator, torch.stack([r.mask.sum() for r in rollouts]).sum())
            losses = [
                partial(self._policy_loss, *parts, count, tokens, log)
                for parts in zip(batches, encoded, rollouts, advantages, strict=True)
            ]
            if self.xe_weight:
                targets = target_count(self.accelerator, batches)
                losses += [partial(self._xe_loss, *parts, targets, log) for parts in zip(batches, encoded, strict=True)]
            share = backward_all(self.accelerator, self.model, losses)
        log.add_sum("loss/total", share, 1 / self.accelerator.num_processes)
        log.add("time/rollout", sampled - started)
        log.add("time/reward", scored - sampled)
        log.add("time/update", time.perf_counter() - scored)
        self.samples = log_rollout(batches, rollouts, scores, advantages, log)
        return log

    def _encoded(self, batch: CaptionBatch, gradient: bool) -> CaptionBatch:
        with torch.set_grad_enabled(gradient), autocast(self.accelerator):
            return replace(batch, inputs=self.captioner.image_states(self.captioner.policy, batch.inputs))

    def _sample(self, batch: CaptionBatch, step: int) -> Rollout:
        with torch.no_grad(), autocast(self.accelerator):
            policy, decoding = self.captioner.policy, self.decoding
            return sample_captions(self.captioner, policy, batch, decoding, self.seed, step, self.generate)

    def _policy_loss(
        self,
        batch: CaptionBatch,
        encoded: CaptionBatch,
        rollout: Rollout,
        advantages: Tensor,
        count: Tensor,
        tokens: Tensor,
        log: Averages,
    ) -> Tensor:
        temperature, mask = self.decoding.temperature, rollout.mask
        # What follows is [P], the tokens of all captions one after the other; ``place`` is where their logits are.
        ids = rollout.token_ids[mask]
        logits, place = self._logits(self.model, encoded, rollout)
        logprobs, entropy = token_logprobs_and_entropy(logits, ids, temperature, place)
        policy = policy_gradient_sum(logprobs, advantages, mask)
        log.add_sum("loss/policy", policy.item(), reduction_count(mask, self.loss_reduction).item())
        log.add("policy/entropy", entropy)
        loss = policy / count
        if self.ref_policy is not None:
            with torch.no_grad():
                with autocast(self.accelerator):  # computed as the policy is, so that equal weights have no divergence
                    ref_logits, place = self._logits(self.ref_policy, _lasting(batch, encoded), rollout)
                ref_logprobs = token_logprobs(ref_logits, ids, temperature, place)
                log.add("policy/kl", kl_to_reference(logprobs, ref_logprobs))
            if self.kl_coef:
                loss = loss + self.kl_coef * kl_penalty(logprobs, ref_logprobs).sum() / tokens
        return loss

    def _logits(self, model: nn.Module, batch: CaptionBatch, rollout: Rollout) -> tuple[Tensor, Tensor | None]:
        if self.dropout:  # equal beginnings would have to be equally noisy
            return self.captioner.token_logits(model, batch.inputs, rollout.token_ids, rollout.mask), None
        return self.captioner.prefix_logits(model, batch.inputs, rollout.token_ids, rollout.mask)

    def _xe_loss(self, batch: CaptionBatch, encoded: CaptionBatch, targets: Tensor, log: Averages) -> Tensor:
        batch = _lasting(batch, encoded)
        return self.xe_weight * xe_loss(self.captioner, self.model, batch, targets, self.label_smoothing, log)


def _lasting(batch: CaptionBatch, encoded: CaptionBatch) -> CaptionBatch:
    """What other passes read: states with gradient are the policy's alone, and good for one backward pass."""
    return batch if any(tensor.requires_grad for tensor in encoded.inputs.values()) else encoded
