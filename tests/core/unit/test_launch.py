"""Launching: which process counts are refused, how signals end a run, and who holds a run folder."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rl_caption.runtime import launch
from rl_caption.runtime.launch import LaunchError, check_processes, run_lock

REPOSITORY = Path(__file__).resolve().parents[3]


def run_python(*words, **variables):
    """Run code in a new process, without the tests' own settings of the allocator."""
    own = {name: os.environ[name] for name in os.environ if "MALLOC_" not in name}
    return subprocess.run(
        [sys.executable, "-c", *words],
        env=own | {"PYTHONPATH": str(REPOSITORY)} | variables,
        capture_output=True,
        text=True,
    )


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """Start every test as a plain process, whatever the tests themselves were started by."""
    for name in (
        *launch.WORLD_SIZE_VARIABLES,
        "LOCAL_RANK",
        "ACCELERATE_USE_CPU",
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_MIXED_PRECISION",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("running", "expected", "world_size", "reason", "advised"),
    [
        (1, 1, None, None, 0),
        (2, 2, "2", None, 0),
        (1, None, "2", "WORLD_SIZE=2", 2),
        (1, 2, None, "train.num_processes=2, but 1", 2),
        (2, 1, "2", "train.num_processes=1, but 2", 1),
    ],
)
def test_number_of_processes(
    running, expected, world_size, reason, advised, monkeypatch
):
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    if reason is None:
        check_processes(running, expected)
        return
    with pytest.raises(LaunchError, match=reason) as caught:
        check_processes(running, expected)
    assert f"--num_processes {advised}" in str(caught.value)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        (
            "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)",
            128 + signal.SIGTERM,
        ),
    ],
)
def test_the_launcher_ends_with_the_code_of_its_process(
    script, code, tmp_path, monkeypatch
):
    for name in ("PET_SIGNALS_TO_HANDLE", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # put back afterwards
    (tmp_path / "script.py").write_text(script)
    config = str(REPOSITORY / "configs/accelerate/cpu.yaml")
    assert launch.main(["--config_file", config, str(tmp_path / "script.py")]) == code


SIGNALLED = """
import os, signal, sys, time
from rl_caption.runtime import launch
seconds, ignored = float(sys.argv[1]), sys.argv[2] == "ignored"
launch.SAME_REQUEST_SECONDS = seconds
signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)  # nohup ignores it
with launch.stop_requests() as asked:
    os.kill(os.getpid(), signal.SIGHUP)
    print(asked(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print(asked(), flush=True)
"""
INTERRUPTED = """
import os, signal, sys
from rl_caption.runtime.launch import stop_requests
try:
    with stop_requests() as asked:
        os.kill(os.getpid(), signal.SIGINT)
        print(asked(), flush=True)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("seconds", "hangup", "code", "printed"),
    [
        (60, "heard", 0, "True\nTrue\n"),
        (0, "heard", -signal.SIGTERM, "True\n"),
        (0, "ignored", 0, "False\nTrue\n"),
    ],
)
def test_the_first_signal_asks_and_a_later_one_ends(seconds, hangup, code, printed):
    done = run_python(SIGNALLED, str(seconds), hangup)
    assert (done.returncode, done.stdout) == (code, printed), done.stderr


def test_the_end_of_a_block_that_ctrl_c_stopped_is_an_interruption():
    assert run_python(INTERRUPTED).stdout == "True\ninterrupted\n"


HOLDER = """
import sys, time
from rl_caption.runtime.launch import run_lock
with run_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of ``tmp_path / 'run'`` until it reads a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_held_lock_is_refused_until_its_holder_is_killed(holder, tmp_path):
    for _ in range(2):
        with (
            pytest.raises(LaunchError, match=str(tmp_path / "run")),
            run_lock(tmp_path / "run", wait_seconds=0.0),
        ):
            pass
    holder.kill()
    holder.wait()
    with run_lock(tmp_path / "run", wait_seconds=0.0):
        pass


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def flock(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with run_lock(tmp_path):
        assert "has no file locks" in caplog.text


PAGE_FAULTS = """
import resource
from rl_caption.runtime.launch import keep_freed_memory
keep_freed_memory()
b"1" * 64_000_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    b"1" * 64_000_000  # 16,000 pages of 4 KB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ({}, True),
        ({"MALLOC_ARENA_MAX": "2"}, False),
    ],
)
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_the_memory_of_freed_tensors_is_kept_but_where_the_user_set_the_allocator(
    own, kept
):
    done = run_python(PAGE_FAULTS, **own)
    assert (int(done.stdout) < 1000) == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        ("ACCELERATE_USE_FSDP", "true"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
        ("DNNL_DEFAULT_FPMATH_MODE", "any"),
    ],
)
def test_variables_that_change_numbers_are_refused_by_name(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=f"{name} is {value!r}"):
        launch.check_environment()


def test_variables_that_change_nothing_pass(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "0")
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT")
    launch.check_environment()
