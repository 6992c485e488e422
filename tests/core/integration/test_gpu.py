"""On a GPU, in float32: the captions, rewards and losses of a CPU, in one process, under
DDP and ZeRO-2.

``RL_CAPTION_REHEARSE_GPU=1`` runs everything on the CPU, to see before a GPU is there
that the commands are right.
"""

import os
import subprocess
import sys

import pytest
import torch
import yaml
from torch.distributed.elastic.utils.distributed import get_free_port

from benchmarks.engine_memory import environment, launched
from tests.conftest import REPOSITORY
from tests.training_for_tests import assert_close_runs, lines, scst_config, xe_config

REHEARSAL = os.environ.get("RL_CAPTION_REHEARSE_GPU") == "1"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (REHEARSAL or torch.cuda.is_available()), reason="needs a GPU"
    ),
]

STEPS = 4 if REHEARSAL else 20
OPTIONS = {
    "train.max_steps": STEPS,
    "eval.every": STEPS,
    "run.log_samples": 8,
    "train.lr": 1e-3,
    "train.kl_coef": 0.0,
}
ON_CPU = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
WAYS = ("plain", "DDP", "ZeRO-2")
SECONDS = 900 if REHEARSAL else 120
"""A run that takes longer hangs; on the CPU all ways compete for its cores."""


def start_run(program, config, folder, variables):
    """Start ``python -m rl_caption PROGRAM`` as a process of its own: a fork could not use the GPU."""
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    if REHEARSAL and "WORLD_SIZE" not in variables:
        variables = ON_CPU
    with folder.with_suffix(".log").open("w") as log:
        line = [sys.executable, "-m", "rl_caption", program, "--config", str(file)]
        return subprocess.Popen(
            line, cwd=REPOSITORY, env=os.environ | variables, stdout=log, stderr=log
        )


def wait_for(process, folder):
    """Wait for the end of a run, which has to be a good one."""
    try:
        code: int | str = process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = f"none within {SECONDS} s"
    assert code == 0, f"exit code {code}\n{folder.with_suffix('.log').read_text()}"


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The same self-critical run on the CPU and in every way that is tested, all at the same time."""
    root = tmp_path_factory.mktemp("gpu")
    xe = xe_config(root / "xe", **{"model.kwargs.dropout": 0.0, "train.max_steps": 30})
    wait_for(start_run("xe", xe, root / "xe", ON_CPU), root / "xe")
    own = [item for item in request.session.items if item.module is request.module]
    tested = {item.callspec.params["way"] for item in own}
    variables = {
        "CPU": ON_CPU,
        "DDP": launched(0, 1, get_free_port()),
        "ZeRO-2": launched(0, 1, get_free_port()) | environment("zero2"),
    }
    started = {}
    for way in sorted(tested | {"CPU"}):
        folder = root / way
        config = scst_config(folder, root / "xe/export/best", **OPTIONS)
        started[way] = start_run("scst", config, folder, variables.get(way, {})), folder
    return started


@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps_are_those_of_a_cpu_to_the_token(way, runs):
    for process, folder in (runs["CPU"], runs[way]):
        wait_for(process, folder)
    folder, on_cpu = runs[way][1], runs["CPU"][1]
    assert len(lines(folder, "samples.jsonl")) == STEPS * 8
    assert_close_runs(folder, on_cpu, rel=1e-3)
