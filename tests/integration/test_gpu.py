"""On a GPU, in float32: the captions, rewards and losses of a CPU, also with a replayed decode and under DDP."""

from pathlib import Path

import pytest
import torch

from tests.training_for_tests import assert_close_runs, checked_run, lines, run, run_together, scst_config, xe_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

STEPS = 20
OPTIONS = {"train.max_steps": STEPS, "eval.every": STEPS, "run.log_samples": 8, "train.lr": 1e-3, "train.kl_coef": 0.0}
ON_CPU = {"ACCELERATE_USE_CPU": "true"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captioner that was trained on the CPU, without dropout."""
    folder = tmp_path_factory.mktemp("start") / "xe"
    checked_run(xe_config(folder, **{"model.kwargs.dropout": 0.0, "train.max_steps": 30}), folder, environment=ON_CPU)
    return folder / "export/best"


@pytest.fixture(scope="module")
def on_cpu(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cpu") / "scst"
    checked_run(scst_config(folder, start, **OPTIONS), folder, "scst", environment=ON_CPU)
    return folder


@pytest.mark.parametrize("way", ["plain", "replayed", "one process under DDP"])
def test_twenty_steps_are_those_of_a_cpu_to_the_token(way: str, start: Path, on_cpu: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scst"
    config = scst_config(folder, start, **OPTIONS, **{"rollout.cuda_graph": way == "replayed"})
    ended = run_together(1, config, folder, "scst")[0] if "DDP" in way else run(config, folder, "scst")
    assert ended.code == 0, ended.output
    assert len(lines(folder, "samples.jsonl")) == STEPS * 8
    assert_close_runs(folder, on_cpu, rel=1e-3)
