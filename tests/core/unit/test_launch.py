"""Launching: which process counts are refused, whom a training dies with, and who holds a run folder."""

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_caption.runtime import engines, launch
from rl_caption.runtime.launch import LaunchError, check_processes, requested_processes, run_lock
from rl_caption.runtime.threads import parse_launcher

REPOSITORY = Path(__file__).resolve().parents[3]
LONG_ENOUGH_S = 60.0


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every test as a plain process, whatever the tests themselves were started by."""
    for name in (
        *launch.WORLD_SIZE_VARIABLES,
        "LOCAL_RANK",
        "ACCELERATE_USE_CPU",
        "ACCELERATE_USE_DEEPSPEED",
        "ACCELERATE_MIXED_PRECISION",
    ):
        monkeypatch.delenv(name, raising=False)


def wait_for(file: Path) -> str:
    """The content of a file that another process is to write; a test fails where it never does."""
    deadline = time.monotonic() + LONG_ENOUGH_S
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} was not written"
        time.sleep(0.02)
    return file.read_text()


@pytest.mark.parametrize(
    ("command_line", "expected"),
    [
        ("python /venv/bin/accelerate launch --cpu s.py", "accelerate --cpu s.py"),
        ("/usr/bin/python3.11 -u /venv/bin/accelerate-launch s.py", "accelerate-launch s.py"),
        (
            "python -X dev -m accelerate.commands.launch --cpu s.py",
            "accelerate.commands.launch --cpu s.py",
        ),
        ("python3 /venv/bin/torchrun --nproc_per_node 2 s.py", "torchrun --nproc_per_node 2 s.py"),
        ("python -m rl_caption.runtime.launch --cpu s.py", "rl_caption.runtime.launch --cpu s.py"),
        ("python -m torch.distributed.run s.py", "torch.distributed.run s.py"),
        ("python /venv/bin/accelerate env", None),
        ("python scripts/scst.py accelerate launch --num_processes 2", None),
        ("bash -c torchrun", None),
    ],
)
def test_parse_launcher(command_line: str, expected: str | None) -> None:
    assert parse_launcher(command_line.split()) == (expected.split() if expected else None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--cpu --num_processes 2 s.py", 2),
        ("--config_file two.yaml s.py", 2),
        ("--config_file two.yaml --num_processes 4 s.py", 4),
        ("--config_file undecided.yaml s.py", None),
        ("s.py --num_processes 5", 6),
        ("--no_such_option s.py", None),
        ("--cpu s.py", None),
        ("--num_processes 1 s.py", 1),
    ],
)
def test_requested_processes(arguments, expected, tmp_path, monkeypatch):
    default = tmp_path / (
        "default.yaml"
        if arguments.endswith(("--cpu s.py", "--num_processes 1 s.py", "5"))
        else "none.yaml"
    )
    monkeypatch.setattr("accelerate.commands.config.default_config_file", str(default))
    (tmp_path / "default.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 6\n")
    (tmp_path / "two.yaml").write_text("distributed_type: 'NO'\nnum_processes: 2\n")
    (tmp_path / "undecided.yaml").write_text("distributed_type: MULTI_GPU\n")
    assert requested_processes(arguments.split(), tmp_path) == expected


@pytest.mark.parametrize(
    ("running", "expected", "world_size", "requested", "reason", "advised"),
    [
        (1, None, None, None, None, 0),
        (1, 1, None, None, None, 0),
        (2, 2, "2", 2, None, 0),
        (1, None, "2", None, "WORLD_SIZE=2", 2),
        (1, None, None, 2, "2 processes .* 1", 2),
        (1, 2, None, None, r"train\.num_processes is 2, but 1", 2),
        (2, 1, None, None, r"train\.num_processes is 1, but 2", 1),
    ],
)
def test_number_of_processes(
    running, expected, world_size, requested, reason, advised, monkeypatch
):
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(launch, "processes_requested_by_launcher", lambda: requested)
    if reason is None:
        check_processes(running, expected)
        return
    with pytest.raises(LaunchError, match=reason) as caught:
        check_processes(running, expected)
    assert f"--num_processes {advised} " in str(caught.value)
    for value in ("", "two", "0"):
        monkeypatch.setenv("WORLD_SIZE", value)
        with pytest.raises(LaunchError, match=f"WORLD_SIZE is '{value}'"):
            check_processes(running)


def test_launch_command_quotes_and_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    command = launch.launch_command(2, ["scripts/scst.py", "--config", "my run.yaml"])
    assert command.startswith(
        "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 "
    )
    assert command.endswith(" scripts/scst.py --config 'my run.yaml'")
    assert " --cpu --num_processes 1 " in launch.launch_command(1, ["s.py"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert launch.launch_command(2, ["s.py"]).startswith(
        "accelerate launch --multi_gpu --num_processes 2 "
    )


def test_accelerator_kwargs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: None)
    assert engines.accelerator_kwargs() == {}, "a single process needs nothing"
    monkeypatch.setenv("LOCAL_RANK", "1")
    on_cpu = engines.accelerator_kwargs()
    assert on_cpu.keys() == {"cpu", "kwargs_handlers"}
    assert on_cpu["cpu"] is True
    assert [handler.gradient_as_bucket_view for handler in on_cpu["kwargs_handlers"]] == [True]
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    (handler,) = engines.accelerator_kwargs()["kwargs_handlers"]
    assert handler.backend == "gloo"
    import torch

    monkeypatch.setattr(
        "torch.accelerator.current_accelerator", lambda check_available: torch.device("cuda")
    )
    assert engines.accelerator_kwargs() == {}
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    assert engines.accelerator_kwargs() == {"kwargs_handlers": on_cpu["kwargs_handlers"]}


PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, sys.argv[1], sys.argv[2]]).wait()
"""
CHILD = """
import pathlib, signal, sys, time
from rl_caption.runtime.launch import die_with_launcher
folder = pathlib.Path(sys.argv[1])
def end(how):
    (folder / "end.part").write_text(how)
    (folder / "end.part").rename(folder / "end")
    sys.exit(0)
signal.signal(signal.SIGTERM, lambda number, frame: end("terminated"))
(folder / "answer.part").write_text(f"{die_with_launcher()}")
(folder / "answer.part").rename(folder / "answer")
deadline = time.monotonic() + 60
while time.monotonic() < deadline and not (folder / "stop").exists():
    time.sleep(0.02)
end("survived")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel interface is Linux's")
@pytest.mark.parametrize(("parent_name", "dies"), [("torchrun", True), ("some_shell", False)])
def test_killed_launcher_takes_its_training_along_and_a_shell_does_not(parent_name, dies, tmp_path):
    (tmp_path / parent_name).write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    command = [
        sys.executable,
        str(tmp_path / parent_name),
        str(tmp_path / "child.py"),
        str(tmp_path),
    ]
    parent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    try:
        assert wait_for(tmp_path / "answer") == str(dies)
        parent.kill()
        parent.wait()
        if not dies:
            (tmp_path / "stop").touch()
        assert wait_for(tmp_path / "end") == ("terminated" if dies else "survived")
    finally:
        (tmp_path / "stop").touch()
        parent.kill()
        parent.wait()


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
    ids=["done", "failed", "stopped before training"],
)
def test_the_launcher_ends_with_the_code_of_its_process(script, code, tmp_path, monkeypatch):
    for name in (launch.LAUNCHER_VARIABLE, "PET_SIGNALS_TO_HANDLE", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # put back afterwards
    (tmp_path / "script.py").write_text(script)
    config = str(REPOSITORY / "configs/accelerate/cpu.yaml")
    assert launch.main(["--config_file", config, str(tmp_path / "script.py")]) == code


SIGNALLED = """
import os, signal, sys, time
from rl_caption.runtime import launch
seconds, ignored = float(sys.argv[1]), sys.argv[2] == "ignored"
launch.SAME_REQUEST_SECONDS = seconds
if ignored:  # by nohup
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
with launch.stop_requests() as asked:
    os.kill(os.getpid(), signal.SIGHUP)
    print(asked(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print(asked(), flush=True)
"""


@pytest.mark.parametrize(
    ("seconds", "hangup", "code", "printed"),
    [
        (60, "heard", 0, "True\nTrue\n"),
        (0, "heard", -signal.SIGTERM, "True\n"),
        (0, "ignored", 0, "False\nTrue\n"),
    ],
    ids=["one request", "a second request", "nohup"],
)
def test_the_first_signal_asks_and_a_later_one_ends(
    seconds: float, hangup: str, code: int, printed: str
) -> None:
    command = [sys.executable, "-c", SIGNALLED, str(seconds), hangup]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (code, printed), done.stderr


HOLDER = """
import sys, time
from rl_caption.runtime.launch import run_lock
with run_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
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


def assert_refused(folder: Path, reason: str) -> None:
    with pytest.raises(LaunchError, match=reason), run_lock(folder, wait_seconds=0.0):
        pass


def assert_free(folder: Path) -> None:
    with run_lock(folder, wait_seconds=0.0) as path:
        assert path.read_text().startswith(f"{os.getpid()} on ")
    assert path.read_text() == ""


def test_held_lock_is_refused_with_the_pid_until_its_holder_is_killed(holder, tmp_path):
    for _ in range(2):
        assert_refused(tmp_path / "run", rf"in use by process {holder.pid} on \S+")
    holder.kill()
    holder.wait()
    assert_free(tmp_path / "run")


def test_waits_for_a_holder_that_ends(holder, tmp_path, caplog):
    assert holder.stdin is not None
    release = threading.Timer(0.5, holder.stdin.close)
    release.start()
    with run_lock(tmp_path / "run", wait_seconds=LONG_ENOUGH_S, poll_seconds=0.02) as path:
        assert path.read_text().startswith(f"{os.getpid()} on ")
    release.join()
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"in use by process {holder.pid}" in message


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with run_lock(tmp_path):
        assert "has no locks" in caplog.text


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file/run", r"cannot write to the run folder .*file/run")


PAGE_FAULTS = """
import resource
from rl_caption.runtime.launch import keep_freed_memory
print(int(keep_freed_memory()))
b"1" * 64_000_000
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    b"1" * 64_000_000  # 16,000 pages of 4 KB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ({}, 1),
        ({"MALLOC_ARENA_MAX": "2"}, 0),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}, 0),
    ],
)
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_the_memory_of_freed_tensors_is_kept_but_where_the_user_set_the_allocator(
    own: dict[str, str], kept: int
) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")
    }
    done = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS],
        env=environment | own,
        capture_output=True,
        text=True,
        check=True,
    )
    asked, faults = map(int, done.stdout.split())
    assert asked == kept
    assert (faults < 1000) == bool(kept)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "x"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR"),
        ("ACCELERATE_USE_FSDP", "true"),
        ("ACCELERATE_USE_MEGATRON_LM", "1"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
        ("ACCELERATE_FP8_BACKEND", "MSAMP"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"),
        ("DNNL_DEFAULT_FPMATH_MODE", "ANY"),
        ("NVIDIA_TF32_OVERRIDE", "1"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("WORLD_SIZE", "two"),
        ("WORLD_SIZE", ""),
        ("RANK", "1.5"),
        ("LOCAL_RANK", "x"),
        ("MASTER_PORT", "x"),
        ("MASTER_PORT", "65536"),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "4"),
        ("ACCELERATE_USE_CPU", "maybe"),
    ],
)
def test_variables_that_change_numbers_or_are_none_are_refused_by_name(
    name: str, value: str
) -> None:
    with pytest.raises(LaunchError, match=f"{name} is {value!r}"):
        launch.check_environment({name: value})


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
            "ACCELERATE_DYNAMO_BACKEND": "NO",
            "ACCELERATE_USE_FSDP": "0",
        },
        {
            "RANK": "1",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_PORT": "0",
        },
        {"LOCAL_RANK": "-1", "ACCELERATE_USE_CPU": "true", "ACCELERATE_FP8_BACKEND": "TE"},
        {"NVIDIA_TF32_OVERRIDE": "0", "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT"},
    ],
)
def test_variables_that_change_nothing_pass(environment: dict[str, str]) -> None:
    launch.check_environment(environment)


def test_the_override_of_tf32_may_say_what_the_configuration_says() -> None:
    launch.check_environment({"NVIDIA_TF32_OVERRIDE": "1"}, tf32=True)
    with pytest.raises(LaunchError, match="NVIDIA_TF32_OVERRIDE"):
        launch.check_environment({"NVIDIA_TF32_OVERRIDE": "0"}, tf32=True)


@pytest.mark.parametrize(
    ("rank", "size"), [("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
)
def test_a_rank_of_no_process_is_refused(rank: str, size: str) -> None:
    with pytest.raises(LaunchError, match=f"{rank} is 2, {size} is 2"):
        launch.check_environment({rank: "2", size: "2"})


def test_variables_that_choose_kernels_are_recorded_and_no_secrets() -> None:
    environment = {
        "MKL_CBWR": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "HF_TOKEN": "secret",
        "HOME": "/root",
    }
    assert launch.recorded_environment(environment) == {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
    }
