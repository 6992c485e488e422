"""Learning-rate schedules at hand-computed points."""

from __future__ import annotations

import pytest

from rl_caption.training.schedules import make_schedule, schedule_factor, steps_between_decays


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "step", "noam"])
def test_warm_up_is_linear_and_ends_at_the_peak(kind: str) -> None:
    factors = [schedule_factor(step, kind, 4, 100) for step in range(4)]
    assert factors == [0.25, 0.5, 0.75, 1.0]
    if kind != "noam":
        assert schedule_factor(4, kind, 4, 100) == 1.0


@pytest.mark.parametrize(
    ("kind", "step", "factor"),
    [
        ("constant", 99, 1.0),
        ("linear", 10, 1.0),
        ("linear", 55, 0.5),
        ("linear", 100, 0.0),
        ("linear", 200, 0.0),
        ("cosine", 40, 0.75),
        ("cosine", 55, 0.5),
        ("cosine", 100, 0.0),
        ("step", 29, 1.0),
        ("step", 30, 0.8),
        ("step", 50, 0.64),
        ("noam", 9, 1.0),
        ("noam", 39, 0.5),
    ],
)
def test_decay(kind: str, step: int, factor: float) -> None:
    warmup = 10
    assert schedule_factor(step, kind, warmup, 100, decay=0.8, decay_every=20) == pytest.approx(factor)


def test_without_warm_up_the_first_step_is_at_the_peak() -> None:
    assert [schedule_factor(0, kind, 0, 10) for kind in ("constant", "linear", "cosine", "step", "noam")] == [1.0] * 5


def test_an_unknown_schedule_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="'exponential' is not one of"):
        make_schedule("exponential", 0, 10, 0.8, 10)
    assert make_schedule("linear", 0, 10, 0.8, 10)(5) == 0.5


def test_epochs_between_decays_become_steps() -> None:
    assert steps_between_decays(1000, None, 11328) == 1000
    assert steps_between_decays(1000, 3, 11328) == 33984, "3 epochs of 113,287 images in steps of 10"
    assert steps_between_decays(1000, 0.5, 7) == 4
    assert steps_between_decays(1000, 0.1, 2) == 1
