"""One process and two train the same reward models: negatives come from the whole global batch."""

from pathlib import Path

import pytest
import torch

from tests.reward_models_for_tests import chain
from tests.training_for_tests import (
    changed,
    run_arguments,
    run_arguments_together,
    untimed,
    weights,
    write_pipeline,
)

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SHORT = {"train.max_steps": 3, "eval.every": 3}
RUNS = ("teacher", "image", "text", "dual", "pac", "long", "specific")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """The chain by one process, and by two, each by one command: false details, too,
    come from the global batch.
    """
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    for folder in (one, two):
        configs = {
            name: changed(config, SHORT) for name, config in chain(folder).items()
        }
        stages = {name: ("reward_model", configs[name]) for name in RUNS}
        words = ["run", str(write_pipeline(folder, **stages))]
        if folder == one:
            ended = run_arguments(words, folder / "log")
            assert ended.code == 0, ended.output
    for rank, child in enumerate(run_arguments_together(2, words, two / "specific")):
        assert child.code == 0, f"rank {rank}:\n{child.output}"
    return one, two


@pytest.mark.parametrize("name", RUNS)
def test_both_take_the_same_steps(trained, name):
    one, two = (folder / name for folder in trained)
    assert "2 process(es)" in (trained[1] / "specific.0.log").read_text()
    alone, together = untimed(one), untimed(two)
    assert [line["step"] for line in alone] == [line["step"] for line in together]
    for a, b in zip(alone, together, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    a, b = (weights(folder / "checkpoints/step-00000003") for folder in (one, two))
    for key in a:
        # The bias of the keys has no gradient but rounding errors, which Adam scales up to full
        # steps.
        if not key.endswith(("in_proj_bias", "qkv.bias")):
            assert torch.allclose(a[key], b[key], atol=1e-4), key
