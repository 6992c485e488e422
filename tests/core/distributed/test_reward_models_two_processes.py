"""One process and two train the same reward models: negatives come from the whole global batch."""

from pathlib import Path

import pytest
import torch
import yaml

from tests.reward_models_for_tests import chain
from tests.training_for_tests import changed, checked_run, run_two, untimed, weights

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SHORT = {"train.max_steps": 3, "eval.every": 3}
RUNS = ("teacher", "image", "text", "dual", "pac", "long", "specific")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The chain by one process, and by two, each by one command: false details, too, come from the
    global batch.
    """
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    for folder in (one, two):
        configs = {name: changed(config, SHORT) for name, config in chain(folder).items()}
        configs["specific"]["warm_start"] = [
            str(folder / f"{name}.yaml") for name in ("dual", "pac", "long")
        ]
        for name, config in configs.items():
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
        if folder == one:
            checked_run(configs["specific"], one / "specific", "reward_model")
    for rank, child in enumerate(run_two(configs["specific"], two / "specific", "reward_model")):
        assert child.code == 0, f"rank {rank}:\n{child.output}"
    return one, two


@pytest.mark.parametrize("name", RUNS)
def test_both_take_the_same_steps(trained: tuple[Path, Path], name: str) -> None:
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
