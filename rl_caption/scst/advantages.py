"""Advantages of sampled captions: how much better than its baseline a sample scored.
Pure functions of tensors.

``rewards`` are [B, K] of the B images of a whole step, of all micro-batches and
processes, in the order of the step's batch; ``greedy_rewards`` [B] are the rewards of
the greedy captions, or None.

Means are taken in float64, in which the mean of equal float32 rewards is exact: a group
of equal rewards has advantage 0, not 1e-7, which Adam would turn into a whole step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from rl_caption.runtime.errors import ConfigError, errors_of_user_code
from rl_caption.runtime.options import build_target, load_target, shown, target_name
from rl_caption.runtime.types import Scores
from rl_caption.scst import ADVANTAGES

AdvantageFn = Callable[[Tensor, Tensor | None], Tensor]
"""(rewards [B, K], greedy rewards [B] | None) -> advantages [B, K]. If it has an
attribute ``needs_greedy`` that is true, greedy captions are decoded and scored for it.
"""


def greedy(rewards: Tensor, greedy_rewards: Tensor | None) -> Tensor:
    """r_k - r_greedy [B, K]: the self-critical baseline (Rennie et al. 2017, eq. 9).
    Raises ``ValueError`` without greedy rewards.
    """
    if greedy_rewards is None:
        raise ValueError("advantage 'greedy' needs the rewards of the greedy captions")
    return rewards - greedy_rewards.unsqueeze(1)


def leave_one_out(rewards: Tensor, greedy_rewards: Tensor | None = None) -> Tensor:
    """r_k - mean of the other K - 1 = K / (K - 1) (r_k - mean) [B, K] (Luo 2020, "A
    better variant of self-critical sequence training"; Kool et al. 2019). Unbiased.
    Raises ``ValueError`` unless K >= 2.
    """
    samples = rewards.shape[1]
    if samples < 2:
        raise ValueError("advantage 'leave_one_out' needs num_samples of at least 2")
    return (_centre(rewards) * (samples / (samples - 1))).to(rewards.dtype)


def mean(rewards: Tensor, greedy_rewards: Tensor | None = None) -> Tensor:
    """r_k - mean of all K, itself included, [B, K] (Cornia et al. 2020, eq. 8). Raises
    ``ValueError`` unless K >= 2: with K = 1 it would be 0.
    """
    if rewards.shape[1] < 2:
        raise ValueError("advantage 'mean' needs num_samples of at least 2")
    return _centre(rewards).to(rewards.dtype)


def group_norm(rewards: Tensor, greedy_rewards: Tensor | None = None) -> Tensor:
    """(r_k - mean) / (standard deviation of the group + 1e-4), [B, K] (GRPO, Shao et
    al. 2024).

    The standard deviation is the unbiased one, as in TRL. A group of equal rewards has
    advantage 0. Raises ``ValueError`` unless K >= 2.
    """
    if rewards.shape[1] < 2:
        raise ValueError("advantage 'group_norm' needs num_samples of at least 2")
    return (_centre(rewards) / (rewards.double().std(1, keepdim=True) + 1e-4)).to(
        rewards.dtype
    )


def none(rewards: Tensor, greedy_rewards: Tensor | None = None) -> Tensor:
    """r_k [B, K]: plain REINFORCE (Williams 1992)."""
    return rewards.clone()


def _centre(rewards: Tensor) -> Tensor:
    """Rewards [B, K] in float64, minus the mean of each image."""
    return rewards.double() - rewards.double().mean(1, keepdim=True)


def build_advantage(name: str, kwargs: Mapping[str, Any]) -> AdvantageFn:
    """The advantage ``train.advantage`` (a name, or ``package.module:Name``) with
    ``train.advantage_kwargs``.

    Raises:
        ConfigError: an unknown name, a target that cannot be imported or called, an
            unknown or missing option, or a value out of its range.
    """
    target = load_target(name, "train.advantage", ADVANTAGES)
    advantage: AdvantageFn = build_target(
        target, 2, name, kwargs, "train.advantage_kwargs"
    )
    return advantage


def needs_greedy(advantage: AdvantageFn) -> bool:
    """Whether an advantage needs the rewards of the greedy captions."""
    return advantage is greedy or bool(getattr(advantage, "needs_greedy", False))


def step_advantages(
    advantage: AdvantageFn, scores: Sequence[Scores], accelerator: Accelerator
) -> list[Tensor]:
    """Advantages [B, K] of each of this process's micro-batches. Called by every process.

    Rewards are gathered in the order of the step's batch; every process computes the
    advantages of all images of the step and keeps its own. So they do not depend on how
    the step is split.

    Raises:
        ConfigError: ``advantage`` is from outside this package and failed, or returned
            something else than numbers of this shape.
    """
    rewards = torch.cat([score.samples for score in scores])
    baselines = [score.greedy for score in scores if score.greedy is not None]
    greedy_rewards = torch.cat(baselines) if baselines else None
    first, images = (
        accelerator.process_index * len(rewards),
        len(rewards),
    )  # every process has as many
    if accelerator.num_processes > 1:
        rewards = accelerator.gather(rewards.to(accelerator.device)).cpu()
        if greedy_rewards is not None:
            greedy_rewards = accelerator.gather(
                greedy_rewards.to(accelerator.device)
            ).cpu()
    with errors_of_user_code(f"train.advantage {target_name(advantage)}"):
        advantages = advantage(rewards, greedy_rewards)
    if not isinstance(advantages, Tensor) or advantages.shape != rewards.shape:
        answer = (
            f"the shape {list(advantages.shape)}"
            if isinstance(advantages, Tensor)
            else shown(advantages)
        )
        raise ConfigError(
            f"train.advantage returned {answer}: expected a tensor of the shape "
            f"{list(rewards.shape)}"
        )
    return list(
        advantages[first : first + images].split(
            [len(score.samples) for score in scores]
        )
    )
