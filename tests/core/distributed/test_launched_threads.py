"""The number of CPU threads, and how they wait, under real launchers."""

import sys

import pytest

from rl_caption.runtime.threads import SPIN_COUNT, granted_cores
from tests.core.unit.test_threads import MODULE, SCRIPT, threads_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="torch has libgomp on Linux"),
]
ONE = (
    "--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
)
ACCELERATE = ["-m", "accelerate.commands.launch", *ONE.split()]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize(
    ("command", "threads"),
    [
        ([*ACCELERATE, *SCRIPT], [granted_cores()]),
        ([*TORCHRUN, *MODULE], 2 * [max(granted_cores() // 2, 1)]),
    ],
)
def test_threads_under_a_launcher(command, threads, tmp_path):
    found, spins = threads_of(command, tmp_path)
    assert [int(numbers.split()[0]) for numbers in found] == threads
    assert SPIN_COUNT in spins
