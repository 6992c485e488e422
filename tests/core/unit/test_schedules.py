"""Schedules are functions of the step; what cannot be meant is refused."""

import numpy as np
import pytest

from rl_caption.cli.configuration import parse
from rl_caption.config.schema import ScstConfig
from rl_caption.integrations.trl.config import GrpoVlmConfig
from rl_caption.runtime.errors import ConfigError
from rl_caption.scst.schedules import factor_at

RAMP = [(10, 0.0), (30, 1.0), (40, 0.5)]


def test_a_schedule_is_linear_between_its_points_and_constant_outside():
    steps = range(60)
    expected = np.interp(steps, *zip(*RAMP, strict=True))
    np.testing.assert_allclose([factor_at(RAMP, step) for step in steps], expected)


@pytest.mark.parametrize(
    ("points", "factors"),
    [
        ([], [1.0, 1.0, 1.0, 1.0]),
        ([(5, 0.25)], [0.25, 0.25, 0.25, 0.25]),
        ([(2, 1.0), (2, 0.5)], [1.0, 1.0, 0.5, 0.5]),
        ([(0, 0.0), (2, 0.0), (2, 3.0), (3, 1.0)], [0.0, 0.0, 3.0, 1.0]),
    ],
)
def test_points_of_one_step_are_a_jump(points, factors):
    assert [factor_at(points, step) for step in range(4)] == factors


def parsed(kind, folder, text, *words):
    file = folder / "a.yaml"
    file.write_text(text)
    return parse(kind, ["--config", str(file), *words], "program")


def test_schedules_in_a_file_and_on_the_command_line(tmp_path):
    text = "reward: {terms: {cider: {schedule: [[0, 1], [200, 0.5]]}}}"
    words = ["--rollout.temperature_schedule", "[[0, 1.5], [100, 1]]"]
    config = parsed(ScstConfig, tmp_path, text, *words)
    points = config.reward.terms["cider"].schedule
    assert [tuple(point) for point in points] == [(0, 1.0), (200, 0.5)]
    points = config.rollout.temperature_schedule
    assert [tuple(point) for point in points] == [(0, 1.5), (100, 1.0)]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "reward: {terms: {cider: {schedule: [[5, 1], [2, 0]]}}}",
            "reward.terms.cider.schedule is [[5, 1], [2, 0]]",
        ),
        (
            "reward: {terms: {cider: {schedule: [[0, -1]]}}}",
            "reward.terms.cider.schedule[0][1] is -1",
        ),
        (
            "rollout: {temperature_schedule: [[0, 1], [9, 0]]}",
            "rollout.temperature_schedule[1][1] is 0",
        ),
        (
            "{rollout: {num_samples: 1}, reward: {normalize: per_group}, train: {advantage: "
            "greedy}}",
            "rollout.num_samples is 1: per_group",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(text, part, tmp_path):
    with pytest.raises(ConfigError) as refused:
        parsed(ScstConfig, tmp_path, text)
    assert part in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "{reward: {normalize: per_term}}",
        "{reward: {terms: {cider: {schedule: [[0, 1.0]]}}}}",
    ],
)
def test_trl_which_adds_the_terms_up_itself_refuses_them(text, tmp_path):
    with pytest.raises(ConfigError, match="reward has"):
        parsed(GrpoVlmConfig, tmp_path, text)
