"""Real launchers: two processes train together, or the job stops.

Each test starts a ten-line program that adds one number per process, on the CPU.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

REPOSITORY = Path(__file__).resolve().parents[3]
TRAINING = """
import sys
import torch
from accelerate import Accelerator
from rl_caption.runtime.engines import accelerator_kwargs
from rl_caption.runtime.launch import check_processes
accelerator = Accelerator(**(accelerator_kwargs() if sys.argv[1] == "prepared" else {}))
check_processes(accelerator.num_processes)
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum").item()
sys.stdout.write(f"rank {accelerator.process_index} of {accelerator.num_processes}: sum {total:g}\\n")
accelerator.end_training()
"""
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = ["accelerate.commands.launch"]
ADVISED = (
    "--multi_gpu --num_processes 2 --main_process_port 0 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no"
)


def start(
    launcher: list[str], tmp_path: Path, way: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the program under ``python -m LAUNCHER...``, seeing no GPU and none of the
    user's default configuration.
    """
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    launcher_sets = re.compile("RANK|WORLD_SIZE|MASTER_|ACCELERATE_")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not launcher_sets.search(name)
    }
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(tmp_path),
        **variables,
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")])
    )
    command = [sys.executable, "-m", *launcher, str(script), way]
    return subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("launcher", "way", "variables"),
    [
        ([*ACCELERATE, *ADVISED.split()], "bare", {"ACCELERATE_USE_CPU": "true"}),
        (TORCHRUN, "prepared", {}),
    ],
)
def test_two_processes_train(launcher, way, variables, tmp_path):
    done = start(launcher, tmp_path, way, **variables)
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2: sum 3" in done.stdout
    assert "rank 1 of 2: sum 3" in done.stdout


def test_unsynchronised_copies_are_stopped_with_advice(tmp_path):
    done = start(TORCHRUN, tmp_path, "bare")
    assert done.returncode != 0, done.stdout
    assert "sum" not in done.stdout, "it trained all the same"
    assert "WORLD_SIZE=2" in done.stderr
    assert "--num_processes 2" in done.stderr
