"""CPU threads: the user's number, else that of the granted cores; set, with how they wait, before torch is loaded."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_caption.runtime.threads import (
    SPIN_COUNT,
    cpu_threads,
    granted_cores,
    group_limit,
    thread_variables,
    user_environment,
    wait_variables,
)

REPOSITORY = Path(__file__).resolve().parents[3]
LAUNCHER = ["/env/bin/python", "/env/bin/accelerate", "launch"]


@pytest.mark.parametrize(
    ("environment", "user", "expected"),
    [
        ({}, {}, {"OMP_NUM_THREADS": "4", "RL_CAPTION_THREADS": "4"}),
        (
            {"OMP_NUM_THREADS": ""},
            {"OMP_NUM_THREADS": ""},
            {"OMP_NUM_THREADS": "4", "RL_CAPTION_THREADS": "4"},
        ),
        ({"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3"}, {"OMP_NUM_THREADS": "3"}),
        ({"OMP_NUM_THREADS": "9,2"}, {"OMP_NUM_THREADS": "9,2"}, {"OMP_NUM_THREADS": "9"}),
        (
            {"OMP_NUM_THREADS": "many"},
            {"OMP_NUM_THREADS": "many"},
            {"OMP_NUM_THREADS": "4", "RL_CAPTION_THREADS": "4"},
        ),
        (
            {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"},
            {},
            {"OMP_NUM_THREADS": "2", "RL_CAPTION_THREADS": "2"},
        ),
        (
            {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"},
            {"OMP_NUM_THREADS": "1"},
            {"OMP_NUM_THREADS": "1"},
        ),
        ({"LOCAL_WORLD_SIZE": "9"}, {}, {"OMP_NUM_THREADS": "1", "RL_CAPTION_THREADS": "1"}),
        ({"LOCAL_WORLD_SIZE": "0"}, {}, {"OMP_NUM_THREADS": "4", "RL_CAPTION_THREADS": "4"}),
    ],
)
def test_the_number_of_threads_is_the_users_else_a_share_of_the_cores(
    environment: dict[str, str], user: dict[str, str], expected: dict[str, str]
) -> None:
    variables = thread_variables(environment, user, cores=4)
    assert variables == {"GOMP_SPINCOUNT": SPIN_COUNT} | expected


def test_what_a_program_chose_is_not_the_users_choice_for_the_programs_that_it_starts() -> None:
    chosen = thread_variables({}, {}, cores=4)
    assert thread_variables(chosen, chosen, cores=2) == {
        "OMP_NUM_THREADS": "2",
        "RL_CAPTION_THREADS": "2",
    }
    kept = thread_variables({}, {"OMP_NUM_THREADS": "3"}, cores=4)
    assert thread_variables(kept, kept, cores=2) == {"OMP_NUM_THREADS": "3"}
    changed = chosen | {"OMP_NUM_THREADS": "1"}
    assert thread_variables(changed, changed, cores=4) == {"OMP_NUM_THREADS": "1"}


def test_how_the_user_lets_threads_wait_is_kept() -> None:
    assert wait_variables({"HOME": "/"}) == {"GOMP_SPINCOUNT": SPIN_COUNT}
    assert (
        wait_variables({"OMP_WAIT_POLICY": "ACTIVE"})
        == wait_variables({"GOMP_SPINCOUNT": "7"})
        == {}
    )


class Process:
    """In place of a process of psutil."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str] | None, above: Any = None
    ) -> None:
        self.command, self.environment, self.above = command, environment, above

    def cmdline(self) -> list[str]:
        return self.command

    def environ(self) -> dict[str, str]:
        if self.environment is None:
            raise psutil.AccessDenied
        return dict(self.environment)

    def parents(self) -> list[Any]:
        return [] if self.above is None else [self.above, *self.above.parents()]


SHELL = Process(["bash"], {"OMP_NUM_THREADS": "5"})


@pytest.mark.parametrize(
    ("above", "threads"),
    [
        (SHELL, 1),
        (Process([*LAUNCHER, "s.py"], {}, SHELL), 8),
        (Process([*LAUNCHER, "s.py"], {"OMP_NUM_THREADS": "3"}, SHELL), 3),
        (
            Process(
                [*LAUNCHER, "--num_cpu_threads_per_process", "6", "s.py"], {"OMP_NUM_THREADS": "3"}
            ),
            6,
        ),
        (Process([*LAUNCHER, "--num-cpu-threads-per-process=6", "s.py"], {}), 6),
        (
            Process(
                ["python", "-m", "torch.distributed.run"],
                {"OMP_NUM_THREADS": "1"},
                Process(LAUNCHER, {}),
            ),
            8,
        ),
        (Process([*LAUNCHER, "s.py"], None), 8),
    ],
    ids=[
        "by hand",
        "not set",
        "set",
        "option",
        "option with =",
        "launcher of a launcher",
        "unreadable",
    ],
)
def test_what_a_launcher_sets_is_not_taken_for_the_users(
    above: Process, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.Process", lambda: Process(["python"], {}, above))
    monkeypatch.setattr("rl_caption.runtime.threads.granted_cores", lambda: 8)
    for variable in ("LOCAL_WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        assert cpu_threads(1, {"OMP_NUM_THREADS": "1", variable: "1"}) == threads
    assert user_environment({"OMP_NUM_THREADS": "2"}) == {"OMP_NUM_THREADS": "2"}, (
        "there is no launcher"
    )
    assert cpu_threads(3, {}) == 2
    assert cpu_threads(16, {}) == 1


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000\n"}, 3.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "600000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:cpu,cpuacct:/docker/1\n3:cpuset:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            math.inf,
        ),
    ],
    ids=[
        "no groups",
        "no limit",
        "max",
        "v2",
        "above",
        "smallest",
        "v1 in a container",
        "v1 without limit",
    ],
)
def test_limits_of_control_groups(files: dict[str, str], limit: float, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert group_limit(tmp_path) == limit


def test_cores_are_physical_and_those_of_affinity_and_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    write(
        tmp_path,
        {siblings.format(number): f"{number % 4},{number % 4 + 4}\n" for number in range(8)},
    )
    for allowed, cores in ({*range(8)}, 4), ({0, 4}, 1), ({0, 1, 5}, 2):
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda _, allowed=allowed: allowed, raising=False
        )
        assert granted_cores(tmp_path) == cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)}, raising=False)
    for quota, cores in ("250000", 2), ("50000", 1), ("900000", 4):
        write(
            tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
        )
        assert granted_cores(tmp_path) == cores
    assert granted_cores(tmp_path / "no such folder") == 8, (
        "nothing says which processors share a core"
    )


PROBE = """
import os, torch

class Probe:
    __name__, signature, columns, bounds = "probe", "probe", frozenset(), (0, 1)

    def __call__(self, prompts, completions, **columns):
        print(f"threads {os.environ['OMP_NUM_THREADS']} {torch.get_num_threads()}", flush=True)
        return [0.5] * len(completions)
"""
SCORE = ["score", "--reward", "threads_probe:Probe", "--captions", "captions.json"]


def threads_of(command: list[str], folder: Path, **variables: str) -> tuple[list[str], set[str]]:
    """Start a program that scores with a reward; OMP_NUM_THREADS and torch's number of threads in each of its
    processes, and the spin counts that libgomp said it read."""
    (folder / "threads_probe.py").write_text(PROBE)
    (folder / "captions.json").write_text('[{"image_id": "1", "caption": "a dog"}]')
    dropped = (
        "OMP_NUM_THREADS",
        "GOMP_SPINCOUNT",
        "OMP_WAIT_POLICY",
        "RL_CAPTION_THREADS",
        "LOCAL_WORLD_SIZE",
    )
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_DISPLAY_ENV": "verbose",
        "HF_HOME": str(folder),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    return re.findall(r"threads (\d+ \d+)", done.stdout), set(read)


MODULE, SCRIPT = ["-m", "rl_caption", *SCORE], [str(REPOSITORY / "scripts/score.py"), *SCORE[1:]]


@pytest.mark.skipif(sys.platform != "linux", reason="torch has libgomp on Linux")
@pytest.mark.parametrize("command", [MODULE, SCRIPT], ids=["module", "script"])
def test_a_program_sets_them_before_torch_is_loaded(command: list[str], tmp_path: Path) -> None:
    cores = granted_cores()
    assert threads_of(command, tmp_path) == ([f"{cores} {cores}"], {SPIN_COUNT})
    assert threads_of(command, tmp_path, OMP_NUM_THREADS="1", GOMP_SPINCOUNT="7") == (
        ["1 1"],
        {"7"},
    )
