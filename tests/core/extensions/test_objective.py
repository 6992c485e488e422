"""An objective from outside: a class in a file of one's own, and its name in the
configuration (docs/scst.md).
"""

from dataclasses import dataclass
from typing import Annotated

import pytest
import torch
from pydantic import Field
from torch import Tensor

from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.types import Scores
from rl_caption.scst.objectives import Metrics, Reinforce, build_objective
from tests.captioners_for_tests import tiny_captioner
from tests.steps_for_tests import (
    assert_equal_gradients,
    batches_of,
    gradient,
    scst_task,
)
from tests.training_for_tests import checked_run, lines, scst_config

NAME = "tests.core.extensions.test_objective:ClippedReinforce"


@dataclass(frozen=True)
class ClippedReinforce:
    """REINFORCE as a mean over captions, with advantages clipped to [-limit, limit];
    logs how far the policy went.
    """

    limit: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    needs_reference = True

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Tensor | None,
        mask: Tensor,
        scores: Scores,
        advantages: Tensor,
    ) -> tuple[Tensor, Tensor, Metrics]:
        assert ref_logprobs is not None
        assert advantages.shape == scores.samples.shape == mask.shape[:2]
        captions = mask.any(-1).sum()
        moved = (logprobs - ref_logprobs).detach().sum()
        weights = advantages.clamp(-self.limit, self.limit).unsqueeze(-1)
        return (
            -(weights * logprobs).sum(),
            captions,
            {"policy/moved": (moved, captions)},
        )


def test_a_run_trains_with_it(start, tmp_path):
    options = {"train.kl_coef": 0.0, "train.objective": NAME}
    options["train.objective_kwargs"] = {"limit": 0.5}
    ended = checked_run(scst_config(tmp_path, start, **options), tmp_path, "scst")
    logged = lines(tmp_path, "metrics.jsonl")
    moved = [line["policy/moved"] for line in logged if "policy/moved" in line]
    assert len(moved) == 4
    assert moved[0] == pytest.approx(0.0, abs=1e-5), "it is the starting policy"
    assert moved[-1] != 0
    assert f"+{NAME}(limit=0.5)" in ended.output, "the signature names it"


def test_the_count_may_be_any_total_of_weights():
    captioner, found, total = tiny_captioner(), [], 0.25
    for count in (torch.tensor(1.0), torch.tensor(total)):
        task = scst_task(
            captioner,
            objective=lambda *given, count=count: (-given[0].sum(), count, {}),
        )
        found.append(gradient(captioner, task, batches_of(captioner, 4, 4)))
    assert_equal_gradients(
        found[0], {name: total * value for name, value in found[1].items()}, atol=1e-5
    )


@pytest.mark.parametrize(
    "objective",
    [
        lambda logprobs, *others: -logprobs.sum(),
        lambda logprobs, *others: (1.0, 2.0, {}),
        lambda logprobs, *others: logprobs.nothing(),
    ],
)
def test_a_wrong_answer_is_an_error_of_the_objective(objective):
    captioner = tiny_captioner()
    task = scst_task(captioner)
    task.objective = objective
    with pytest.raises(ConfigError, match=r"^train\.objective"):
        next(task.training_step(batches_of(captioner, 4, 4), 0))


@pytest.mark.parametrize(
    ("name", "kwargs", "shared", "part"),
    [
        ("nowhere.at_all:Loss", {}, {}, "nowhere.at_all"),
        (NAME, {"limit": 0}, {}, "train.objective_kwargs.limit is 0"),
        ("reinforce", {"kl_coef": 0.1}, {}, "train.kl_coef"),
        ("dico", {}, {"kl_coef": 0.1}, "train.kl_coef is 0.1"),
        ("risk", {}, {"loss_reduction": "sequence"}, "train.loss_reduction"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(name, kwargs, shared, part):
    with pytest.raises(ConfigError) as refused:
        build_objective(name, kwargs, **shared)
    assert part in str(refused.value)


def test_reinforce_takes_the_keys_that_it_has():
    assert build_objective("reinforce", {}, "sequence", 0.3) == Reinforce(
        "sequence", 0.3
    )
    assert vars(build_objective(NAME, {})) == {"limit": 1.0}
    assert not Reinforce(kl_coef=0.0).needs_reference
    assert Reinforce(kl_coef=1e-4).needs_reference
