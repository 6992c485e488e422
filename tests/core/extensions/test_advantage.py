"""An advantage from outside: a function in a file of one's own, and its name in the
configuration (docs/scst.md).
"""

from typing import Annotated

import pytest
import torch
from pydantic import Field
from torch import Tensor

from rl_caption.config.build import build_decoding
from rl_caption.config.schema import RolloutConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.scst.advantages import build_advantage
from tests.captioners_for_tests import tiny_captioner
from tests.steps_for_tests import (
    batches_of,
    scst_task,
)
from tests.training_for_tests import checked_run, lines, run_two, scst_config

NAME = "tests.core.extensions.test_advantage:step_norm"


def step_norm(
    rewards: Tensor,
    greedy_rewards: Tensor | None,
    epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-4,
) -> Tensor:
    """Mean-centred by image, divided by the standard deviation of the whole step's rewards; [B, K]
    -> [B, K].
    """
    centred = rewards.double() - rewards.double().mean(1, keepdim=True)
    return (centred / (rewards.double().std() + epsilon)).to(rewards.dtype)


class Halfway:
    """A baseline between 0 and the greedy caption's reward."""

    needs_greedy = True

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, rewards: Tensor, greedy_rewards: Tensor | None) -> Tensor:
        assert greedy_rewards is not None
        return rewards - self.share * greedy_rewards.unsqueeze(1)


OPTIONS = {
    "train.advantage": NAME,
    "train.advantage_kwargs": {"epsilon": 0.01},
    "rollout.num_samples": 3,
}


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_trains_with_it_in_one_process_or_two(start, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    ended = checked_run(scst_config(one, start, **OPTIONS), one, "scst")
    assert f"+{NAME}(epsilon=0.01)[nspi3]" in ended.output, "the signature names it"
    for rank in run_two(
        scst_config(two, start, **OPTIONS, **{"train.micro_batch_size": 2}), two, "scst"
    ):
        assert rank.code == 0, rank.output
    alone, together = (
        [line for line in lines(folder, "metrics.jsonl") if "advantage/abs" in line]
        for folder in (one, two)
    )
    assert len(alone) == 4
    for a, b in zip(alone, together, strict=True):
        assert a["advantage/abs"] > 0.1
        assert a["advantage/abs"] == pytest.approx(b["advantage/abs"], rel=1e-5)
        assert a["loss/total"] == pytest.approx(b["loss/total"], rel=1e-4, abs=1e-6)


def test_greedy_captions_are_decoded_where_it_asks_for_them():
    rollout, name = RolloutConfig(), "tests.core.extensions.test_advantage:Halfway"
    assert not build_decoding(rollout, build_advantage("leave_one_out", {})).with_greedy
    advantage = build_advantage(name, {"share": 0.5})
    assert build_decoding(rollout, advantage).with_greedy
    assert (
        advantage(torch.ones(2, 3), torch.full((2,), 4.0)).tolist() == [[-1.0] * 3] * 2
    )


def test_an_option_that_it_does_not_have_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"train.advantage_kwargs: .*'rewards'"):
        build_advantage(NAME, {"rewards": 1})


@pytest.mark.parametrize(
    "advantage",
    [
        lambda rewards, greedy: rewards.mean(1, keepdim=True),
        lambda rewards, greedy: rewards.tolist(),
        lambda rewards, greedy: rewards / greedy["missing"],
    ],
)
def test_a_wrong_answer_is_an_error_of_the_advantage(advantage):
    captioner = tiny_captioner()
    task = scst_task(captioner)
    task.advantage = advantage
    with pytest.raises(ConfigError, match=r"^train\.advantage"):
        next(task.training_step(batches_of(captioner, 4, 4), 0))
