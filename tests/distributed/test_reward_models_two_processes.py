"""One process and two train the same reward models: negatives come from the whole global batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.reward_models_for_tests import chain
from tests.training_for_tests import run, run_two, untimed, weights

pytestmark = pytest.mark.distributed

STAGES = ("teacher", "image", "text", "dual")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The chain by one process, and by two, each by one command."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    for folder in (one, two):
        for name, config in chain(folder).items():
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    ended = run(chain(one)["dual"], one / "dual", "reward_model")
    assert ended.code == 0, ended.output
    for rank, child in enumerate(run_two(chain(two)["dual"], two / "dual", "reward_model")):
        assert child.code == 0, f"rank {rank}:\n{child.output}"
    return one, two


@pytest.mark.parametrize("stage", STAGES)
def test_both_take_the_same_steps(trained: tuple[Path, Path], stage: str) -> None:
    one, two = (folder / stage for folder in trained)
    assert "2 process(es)" in (trained[1] / "dual.0.log").read_text()
    alone, together = untimed(one), untimed(two)
    assert [line["step"] for line in alone] == [line["step"] for line in together]
    for a, b in zip(alone, together, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    a, b = (weights(folder / "checkpoints/step-00000006") for folder in (one, two))
    for name in a:
        # The bias of the keys has no gradient but rounding errors, which Adam scales up to full steps.
        if not name.endswith("in_proj_bias") and not name.endswith("qkv.bias"):
            assert torch.allclose(a[name], b[name], atol=1e-4), name


EQUAL_CAPTIONS = """
import sys
import torch
from accelerate import Accelerator
from rl_caption.reward_models.batch import PairBatch
from rl_caption.reward_models.objectives import Contrastive
from rl_caption.reward_models.task import EmbeddingTask, caption_target
from rl_caption.stage import leave_process_group
class Layer(torch.nn.Linear):
    def forward(self, inputs):
        found = {name: super(Layer, self).forward(rows) for name, rows in inputs.items()}
        return found | {"scale": torch.tensor(9.0)}
def step(accelerator):
    rank, processes = accelerator.process_index, accelerator.num_processes
    torch.manual_seed(3)
    pairs, layer = torch.randn(2, 8, 5), Layer(5, 7)
    image, text = (rows.chunk(processes)[rank] for rows in pairs)
    size = 8 // processes
    captions = "abacdabe"[rank * size : (rank + 1) * size]
    batch = PairBatch([{}] * size, {"image": image, "text": text}, list(captions))
    task = EmbeddingTask(accelerator, accelerator.prepare(layer), Contrastive(), caption_target)
    log = task.training_step([batch], 0)
    return f"{log.reduce(accelerator)['loss/total']} {layer.weight.grad.norm().item()}"
sys.stdout.write(step(Accelerator(cpu=True)))
leave_process_group()
"""
"""Equal captions lie on both processes; their texts differ, as only then the loss depends on which are equal."""


def test_captions_are_compared_across_processes(tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(EQUAL_CAPTIONS)
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--redirects", "1:3"]
    found = []
    for start in ([], [*launcher, "--log-dir", str(tmp_path)]):
        done = subprocess.run(
            [sys.executable, *start, str(script)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append([float(number) for number in done.stdout.split()])
    assert len(found[0]) == 2
    assert found[1] == pytest.approx(found[0], rel=1e-5)
