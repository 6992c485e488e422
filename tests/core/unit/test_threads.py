"""CPU threads: the user's number, else that of the granted cores; set, with how they
wait, before torch is loaded.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from rl_caption.runtime.threads import SPIN_COUNT, granted_cores, set_threads

REPOSITORY = Path(__file__).resolve().parents[3]


def thread_variables(environment, monkeypatch):
    """What ``set_threads`` makes of an environment on four cores, before torch is loaded."""
    monkeypatch.setattr("rl_caption.runtime.threads.granted_cores", lambda: 4)
    monkeypatch.setattr("os.environ", dict(environment))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    set_threads()
    return dict(os.environ)


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, "4"),
        ({"OMP_NUM_THREADS": "1"}, "1"),
        ({"OMP_NUM_THREADS": "9,2"}, "9"),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, "2"),
        ({"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}, "4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "1"),
    ],
)
def test_the_number_of_threads_is_the_users_else_a_share_of_the_cores(
    environment, threads, monkeypatch
):
    expected = {"GOMP_SPINCOUNT": SPIN_COUNT, "OMP_NUM_THREADS": threads}
    found = thread_variables(environment, monkeypatch)
    assert {name: found[name] for name in expected} == expected


def test_how_the_user_lets_threads_wait_is_kept(monkeypatch):
    found = thread_variables({"OMP_WAIT_POLICY": "ACTIVE"}, monkeypatch)
    assert "GOMP_SPINCOUNT" not in found


def test_cores_are_physical_and_those_of_the_affinity(monkeypatch):
    for allowed, physical, cores in ((8, 4, 4), (2, 4, 2), (3, None, 3)):
        affinity = Mock(return_value=range(allowed))
        monkeypatch.setattr(os, "sched_getaffinity", affinity, raising=False)
        monkeypatch.setattr("psutil.cpu_count", Mock(return_value=physical))
        assert granted_cores() == cores


PROBE = """
import os, torch

class Probe:
    __name__, signature, columns, bounds = "probe", "probe", frozenset(), (0, 1)

    def __call__(self, prompts, completions, **columns):
        print(f"threads {os.environ['OMP_NUM_THREADS']} {torch.get_num_threads()}", flush=True)
        return [0.5] * len(completions)
"""
SCORE = ["score", "--reward", "threads_probe:Probe", "--captions", "captions.json"]
MODULE = ["-m", "rl_caption", *SCORE]
SCRIPT = [str(REPOSITORY / "scripts/score.py"), *SCORE[1:]]


def threads_of(command, folder, **variables):
    """Start a program that scores with a reward; OMP_NUM_THREADS and torch's number of
    threads in each of its processes, and the spin counts that libgomp said it read.
    """
    (folder / "threads_probe.py").write_text(PROBE)
    (folder / "captions.json").write_text('[{"image_id": "1", "caption": "a dog"}]')
    own = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    own |= {"PYTHONPATH": str(REPOSITORY), "OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=own | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    read = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    return re.findall(r"threads (\d+ \d+)", done.stdout), set(read)


@pytest.mark.skipif(sys.platform != "linux", reason="torch has libgomp on Linux")
def test_a_program_sets_them_before_torch_is_loaded(tmp_path):
    cores = granted_cores()
    assert threads_of(MODULE, tmp_path) == ([f"{cores} {cores}"], {SPIN_COUNT})
    variables = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "7"}
    assert threads_of(MODULE, tmp_path, **variables) == (["1 1"], {"7"})
