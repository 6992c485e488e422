"""Processes: how many train together, how long they live, and who may write to a run folder.

Several natural commands start another number of training processes than they were asked for, and end with 0:
``accelerate launch --cpu --num_processes 2`` runs one process, and ``torchrun --nproc_per_node 2`` on a machine without
a GPU runs two copies that never exchange a gradient. Here that is found out before the first step.

``python -m rl_caption.launch`` is ``accelerate launch`` for schedulers: it passes SIGTERM, SIGINT and SIGHUP on, and
waits until the training has saved its checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

import psutil

logger = logging.getLogger(__name__)

WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "LOCAL_WORLD_SIZE")
ACCELERATE_PROGRAMS = ("accelerate", "accelerate-launch", "accelerate.commands.launch", "rl_caption.launch")
OTHER_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.launch")
LAUNCHER_VARIABLE = "RL_CAPTION_LAUNCHER"
"""Environment variable in which a program of this package that starts others gives them its process id."""
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""What schedulers, Ctrl-C and closed terminals send to a program that is to end."""
SAME_REQUEST_SECONDS = 2.0
"""Signals so close together are one request: a launcher passes on what its whole process group got."""


class LaunchError(RuntimeError):
    """The processes that run are not the ones that were asked for; the message holds a command that works."""


@dataclass(frozen=True)
class LauncherCall:
    """A launcher's command line: its program, such as ``torchrun``, and the arguments after it."""

    program: str
    arguments: tuple[str, ...]

    @property
    def is_accelerate(self) -> bool:
        return self.program in ACCELERATE_PROGRAMS


def check_processes(num_processes_running: int, expected: int | None = None) -> None:
    """Stop unless the number of processes that was asked for is the number that trains together.

    Call it right after the ``Accelerator`` is built, on every process.

    Args:
        num_processes_running: ``Accelerator.num_processes``, the number that exchanges gradients.
        expected: the number that the configuration asks for (``train.num_processes``); None when it does not say.

    Raises:
        LaunchError: the configuration, the launcher's environment (``WORLD_SIZE``) or the command line of
            ``accelerate launch`` (its configuration file included) asks for another number.
    """
    started = processes_started(os.environ)
    if started is not None and started[1] != num_processes_running:
        name, count = started
        raise LaunchError(
            f"{count} processes were started ({name}={count}), but this one trains in a group of "
            f"{num_processes_running}: they would train separate copies of the model. "
            + _advice(count if expected is None else expected)
        )
    requested = processes_requested_by_launcher()
    if requested is not None and requested != num_processes_running:
        raise LaunchError(
            f"`accelerate launch` was asked for {requested} processes and started {num_processes_running}: with --cpu, "
            "or without --multi_gpu on a machine that has fewer than two GPUs, it starts one whatever the number. "
            + _advice(requested if expected is None else expected)
        )
    if expected is not None and expected != num_processes_running:
        raise LaunchError(
            f"train.num_processes is {expected}, but {num_processes_running} train together. "
            f"{_advice(expected)} Or set train.num_processes to {num_processes_running}."
        )


def processes_started(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the variable by which a launcher says how many processes it started, and the number; None without one.

    Raises:
        LaunchError: the variable is not a whole number of at least 1.
    """
    for name in WORLD_SIZE_VARIABLES:
        value = environment.get(name)
        if value is None:
            continue
        if not value.strip().isdecimal() or int(value) < 1:
            raise LaunchError(f"the environment variable {name} is {value!r}: expected a whole number of at least 1")
        return name, int(value)
    return None


def processes_requested_by_launcher() -> int | None:
    """Return the number of processes that the ``accelerate launch`` above this process was asked for, in all.

    None when no such launcher runs, or its arguments and configuration file do not say.
    """
    # Every launcher of Accelerate sets this variable, so processes that it did not start need not be searched.
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return None
    # psutil's errors mean a process that has just ended or belongs to another user: not a launcher to be asked.
    with contextlib.suppress(psutil.Error):
        for ancestor in psutil.Process().parents():
            call = parse_launcher(ancestor.cmdline())
            if call is not None:
                return requested_processes(call.arguments, Path(ancestor.cwd())) if call.is_accelerate else None
    return None


def parse_launcher(command_line: Sequence[str]) -> LauncherCall | None:
    """Recognise the command line of ``accelerate launch``, ``torchrun`` or a relative, however Python was called."""
    tokens = list(command_line)
    while tokens:
        token = tokens.pop(0)
        name = os.path.basename(token)
        if token == "-m" and tokens:
            name = tokens.pop(0)
        elif token in ("-X", "-W") and tokens:
            tokens.pop(0)
            continue
        elif token.startswith("-") or name.lower().startswith("python"):
            continue
        if name == "accelerate" and tokens[:1] != ["launch"]:
            return None
        if name in ACCELERATE_PROGRAMS:
            return LauncherCall(name, tuple(tokens[1:] if name == "accelerate" else tokens))
        return LauncherCall(name, tuple(tokens)) if name in OTHER_LAUNCHERS else None
    return None


def requested_processes(arguments: Sequence[str], folder: Path) -> int | None:
    """Return the number of processes that these arguments of ``accelerate launch`` ask for; None if they do not say.

    Args:
        arguments: everything after ``accelerate launch``.
        folder: the launcher's working directory, which a relative ``--config_file`` starts from.
    """
    from accelerate.commands.config import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            parsed = launch_command_parser().parse_args(list(arguments))
    except SystemExit:  # the launcher was of another version, whose options this parser does not know
        return None
    if parsed.tpu or parsed.num_processes is not None:
        return None if parsed.tpu else parsed.num_processes
    if parsed.config_file is not None:
        config_file = str(folder / parsed.config_file)
    elif os.path.isfile(default_config_file) and not parsed.cpu:
        config_file = default_config_file
    else:
        return None
    count = getattr(load_config_from_file(config_file), "num_processes", None)
    return count if count is not None and count > 0 else None


def launch_command(num_processes: int, script: Sequence[str] | None = None) -> str:
    """Return a shell command that starts ``num_processes`` processes which train together on this machine.

    Args:
        num_processes: how many.
        script: the program and its arguments; default: those of this process.
    """
    import torch

    program = shlex.join(_own_command() if script is None else script)
    settings = "--num_machines 1 --mixed_precision no --dynamo_backend no"
    on_cpu = torch.cuda.device_count() == 0
    if num_processes == 1:
        return f"accelerate launch {'--cpu ' if on_cpu else ''}--num_processes 1 {settings} {program}"
    command = (
        f"accelerate launch --multi_gpu --num_processes {num_processes} {settings} --main_process_port 0 {program}"
    )
    return f"ACCELERATE_USE_CPU=true {command}" if on_cpu else command


def _own_command() -> list[str]:
    """Return this process's program and arguments as ``accelerate launch`` takes them."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return list(sys.argv)
    return ["--module", spec.name.removesuffix(".__main__"), *sys.argv[1:]]


def _advice(num_processes: int) -> str:
    together = "process" if num_processes == 1 else "processes that train together"
    return f"To start {num_processes} {together}:\n  {launch_command(num_processes)}\n"


def accelerator_kwargs() -> dict[str, Any]:
    """Return arguments for ``Accelerator``: a launcher's processes find each other, without a GPU too (Accelerate alone
    then ignores launchers, unless ``ACCELERATE_USE_CPU=true``), and DDP's gradients lie in its buckets."""
    if int(os.environ.get("LOCAL_RANK", "-1")) < 0:
        return {}
    import torch
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    from rl_caption.training.distributed.engines import deepspeed_without_compiler, wanted_engine

    device = torch.accelerator.current_accelerator()
    # Apple's GPU takes part in no process group, so processes that train together are on the CPU there too.
    on_cpu = device is None or device.type == "mps"
    if wanted_engine() != "deepspeed":
        handlers = {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]}
        return handlers | {"cpu": True} if on_cpu else handlers
    if not on_cpu:
        return {}
    deepspeed_without_compiler()
    # cpu=True would quietly turn DeepSpeed into plain data parallelism.
    return {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}


def die_with_launcher() -> bool:
    """On Linux, ask the kernel for a SIGTERM when the launcher that started this process ends in any way.

    A killed launcher otherwise leaves training processes that nobody watches, and that write to the run folder
    together with the next attempt. Does nothing when the parent is no launcher: a training under a shell or ``nohup``
    outlives its terminal as usual. Call it early, before heavy imports.

    Returns:
        Whether the signal is now set.
    """
    if sys.platform != "linux":
        return False
    parent, named = os.getppid(), os.environ.get(LAUNCHER_VARIABLE, "")
    if named.isdecimal() and not psutil.pid_exists(int(named)):  # it ended while this process started
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        own = named == str(parent)
        if not own and parse_launcher(psutil.Process(parent).cmdline()) is None:
            return False
    except psutil.Error:  # it has just ended, or belongs to another user
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(number)}")
    if os.getppid() != parent:  # the launcher ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGTERM)
    return True


@contextlib.contextmanager
def stop_signals_handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside the ``with``, ``handler`` is called for ``STOP_SIGNALS``; ignored ones (``nohup``) stay ignored."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = {number: earlier for number, earlier in before.items() if earlier is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Inside the ``with``, one of ``STOP_SIGNALS`` only makes the yielded function return True; a later one ends the
    process at once.

    Not later ones, but parts of the first: what arrives within ``SAME_REQUEST_SECONDS``, and what the kernel sends when
    the launcher ends (``die_with_launcher``).
    """
    first: float | None = None
    parent = os.getppid()

    def note(number: int, frame: FrameType | None) -> None:
        """The handler of these signals."""
        nonlocal first
        if first is None:
            first = time.monotonic()
        elif time.monotonic() - first > SAME_REQUEST_SECONDS and os.getppid() == parent:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    with stop_signals_handled_by(note):
        yield lambda: first is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """``accelerate launch`` that passes ``STOP_SIGNALS`` on to the training processes and waits for them to save.

    Accelerate's own launcher ends at once and leaves its process behind, so that a scheduler takes the job for ended;
    with several processes it kills them after 30 s and ends with code 1 and a traceback.

    Args:
        arguments: of ``accelerate launch``; default: of this process.

    Returns:
        0 where all processes ended with 0, as they do when they have saved; 128 + signal where they were stopped before
        there was anything to save; a failing process's code otherwise.
    """
    from accelerate.commands.launch import launch_command as launch
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    die_with_launcher()
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    # torchrun's own handlers, which would kill the processes after a time, are put on another signal.
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    stopped: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        """Send the signal to the processes of the training, or end where there is none yet."""
        children = psutil.Process().children()
        if not children:
            raise SystemExit(128 + number)
        stopped.append(number)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.send_signal(number)

    try:
        with stop_signals_handled_by(pass_on):
            launch(launch_command_parser().parse_args(arguments))
    except subprocess.CalledProcessError as error:
        return 128 + stopped[0] if stopped else error.returncode if error.returncode > 0 else 128 - error.returncode
    except ChildFailedError:
        if not stopped:
            raise
        return 128 + stopped[0]
    return 0


class RunLock:
    """Context manager: at most one training writes to a run folder; to be held by the main process.

    The lock is ``flock`` on ``<run>/.lock``, which the kernel drops when its holder ends in any way, so a killed
    training leaves nothing to clean up. The file stays: deleting it would let two processes lock two files of one name.

    Args:
        run_dir: the run folder; created when missing.
        wait_seconds: how long to wait for another holder, such as a training that still saves after SIGTERM.
        poll_seconds: time between two attempts.
    """

    def __init__(self, run_dir: str | Path, wait_seconds: float = 120.0, poll_seconds: float = 0.2) -> None:
        self.path = Path(run_dir) / ".lock"
        self.wait_seconds = wait_seconds
        self.poll_seconds = poll_seconds
        self._file: IO[str] | None = None

    def __enter__(self) -> RunLock:
        """Take the lock.

        Raises:
            LaunchError: another process held it for all of ``wait_seconds`` (its pid and host are named), or the
                folder cannot be written to.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path, "a+", encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"cannot write to the run folder {self.path.parent}: {error}") from error
        with contextlib.ExitStack() as on_failure:
            on_failure.enter_context(file)
            self._acquire(file)
            _overwrite(file, f"{os.getpid()} on {socket.gethostname()}\n")
            on_failure.pop_all()
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import fcntl

        assert self._file is not None
        _overwrite(self._file, "")
        # Unlocked by name: a forked worker may still have the file open, and would keep the lock alive.
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()
        self._file = None

    def _acquire(self, file: IO[str]) -> None:
        import fcntl

        deadline = time.monotonic() + self.wait_seconds
        announced = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                logger.warning("%s: this file system has no locks (%s); start only one training here", self.path, error)
                return
            holder = self._holder()
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"the run folder {self.path.parent} is in use by process {holder}, for longer than "
                    f"{self.wait_seconds:g} s: stop that training first, or choose another run folder"
                )
            if not announced:
                announced = True
                logger.warning(
                    "the run folder %s is in use by process %s: waiting up to %g s for it to end",
                    self.path.parent,
                    holder,
                    self.wait_seconds,
                )
            time.sleep(self.poll_seconds)

    def _holder(self) -> str:
        return self.path.read_text(encoding="utf-8").strip() or "(pid unknown)"


def _overwrite(file: IO[str], text: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(text)
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
