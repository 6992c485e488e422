"""Advantages of sampled captions: how much better than its baseline a sample scored. Pure functions of tensors.

An advantage sees the B images of a whole step, of all micro-batches and processes, in the order of the step's batch.

Means are taken in float64, where those of equal float32 rewards are exact: a group of equal rewards has advantage 0,
not 1e-7, of which Adam would make a whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from rl_caption.types import Scores

AdvantageFn = Callable[[Tensor, Tensor | None], Tensor]
"""(rewards [B, K], rewards of the greedy captions [B] or None) -> advantages [B, K]. Where it has a true attribute
``needs_greedy``, greedy captions are decoded."""


def greedy(rewards: Tensor, greedy_rewards: Tensor | None) -> Tensor:
    """Self-critical baseline: the reward of the greedy caption (Rennie et al. 2017, eq. 9).

    Args:
        rewards: [B, K].
        greedy_rewards: [B].

    Returns:
        r_k - r_greedy, [B, K].
    """
    if greedy_rewards is None:
        raise ValueError("advantage 'greedy' needs the rewards of the greedy captions")
    return rewards - greedy_rewards.unsqueeze(1)


def leave_one_out(rewards: Tensor, greedy_rewards: Tensor | None = None) -> Tensor:
    """Baseline of a sample: the mean of the other K - 1 (Luo 2020, "A better variant of self-critical sequence
    training"; Kool et al. 2019). Unbiased, needs K >= 2.

    Args:
        rewards: [B, K].
        greedy_rewards: unused.

    Returns:
        r_k - mean of the others = K / (K - 1) (r_k - mean), [B, K].
    """
    samples = rewards.shape[1]
    if samples < 2:
        raise ValueError("advantage 'leave_one_out' needs num_samples of at least 2")
    return (_centred(rewards) * (samples / (samples - 1))).to(rewards.dtype)


def mean(rewards: Tensor, greedy_rewards: Tensor | None = None) -> Tensor:
    """Baseline of a sample: the mean of all K, itself included (Cornia et al. 2020, eq. 8), [B, K] -> [B, K]."""
    return _centred(rewards).to(rewards.dtype)


def group_norm(rewards: Tensor, greedy_rewards: Tensor | None = None) -> Tensor:
    """Mean-centred and divided by the group's standard deviation plus 1e-4 (GRPO, Shao et al. 2024), [B, K] -> [B, K].

    The standard deviation is the unbiased one, as in TRL. A group of equal rewards has advantage 0.
    """
    if rewards.shape[1] < 2:
        raise ValueError("advantage 'group_norm' needs num_samples of at least 2")
    return (_centred(rewards) / (rewards.double().std(1, keepdim=True) + 1e-4)).to(rewards.dtype)


def none(rewards: Tensor, greedy_rewards: Tensor | None = None) -> Tensor:
    """No baseline: plain REINFORCE (Williams 1992), [B, K] -> [B, K]."""
    return rewards.clone()


def _centred(rewards: Tensor) -> Tensor:
    """[B, K] float64, less the mean of each image."""
    return rewards.double() - rewards.double().mean(1, keepdim=True)


def needs_greedy(advantage: AdvantageFn) -> bool:
    """Whether an advantage asks for the rewards of the greedy captions."""
    return advantage is greedy or bool(getattr(advantage, "needs_greedy", False))


def step_advantages(advantage: AdvantageFn, scores: Sequence[Scores], accelerator: Accelerator) -> list[Tensor]:
    """Advantages [B, K] of each of this process's micro-batches. Called by every process.

    Every process computes those of all images of the step, gathered in the order of the step's batch, and keeps its
    own: they do not depend on how the step is split.

    Raises:
        ValueError: ``advantage`` returned another shape.
    """
    rewards = torch.cat([score.samples for score in scores])
    baselines = [score.greedy for score in scores if score.greedy is not None]
    greedy_rewards = torch.cat(baselines) if baselines else None
    first, images = accelerator.process_index * len(rewards), len(rewards)  # every process has as many
    if accelerator.num_processes > 1:
        rewards = accelerator.gather(rewards.to(accelerator.device)).cpu()
        if greedy_rewards is not None:
            greedy_rewards = accelerator.gather(greedy_rewards.to(accelerator.device)).cpu()
    advantages = advantage(rewards, greedy_rewards)
    if advantages.shape != rewards.shape:
        raise ValueError(f"the advantages of rewards {list(rewards.shape)} have the shape {list(advantages.shape)}")
    return list(advantages[first : first + images].split([len(score.samples) for score in scores]))
