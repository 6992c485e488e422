"""Processes: how many train together, how signals end them, and which of them writes to a run folder.

Several natural commands silently start another number of training processes than they were asked for: ``accelerate
launch --cpu --num_processes 2`` runs one process, and ``torchrun --nproc_per_node 2`` on a machine without a GPU runs
two copies that never exchange a gradient. ``check_processes`` finds that out before the first step.

``python -m rl_caption.runtime.launch`` is ``accelerate launch`` for schedulers: it passes SIGTERM, SIGINT and
SIGHUP on, and waits until the training has saved its checkpoint.
"""

if __name__ == "__main__":  # before the imports below, which take a while
    from rl_caption.__main__ import leave_on_interrupt

    leave_on_interrupt()

import contextlib
import ctypes
import errno
import io
import logging
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil
from filelock import FileLock, Timeout

from rl_caption.runtime.errors import UserError
from rl_caption.runtime.threads import ACCELERATE_PROGRAMS, parse_launcher, wait_variables

logger = logging.getLogger(__name__)

WORLD_SIZE_VARIABLES = (
    "WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "PMI_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
)
OFF = ("", "0", "false", "no", "n", "f", "off")
FLAGS = (
    "ACCELERATE_USE_CPU",
    "ACCELERATE_USE_DEEPSPEED",
    "ACCELERATE_DEBUG_MODE",
    "ACCELERATE_CPU_AFFINITY",
)
REFUSED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        ("", "1", "auto"),
        "train.batch_size and train.micro_batch_size say how gradients are accumulated; Accelerate would divide them",
    ),
    "ACCELERATE_DYNAMO_BACKEND": (
        ("", "no"),
        "models are not compiled here: accelerate launch --dynamo_backend no",
    ),
    "ACCELERATE_USE_FSDP": (
        OFF,
        "FSDP is not supported: take configs/accelerate/deepspeed_zero3.yaml, which shards the same",
    ),
    "ACCELERATE_USE_MEGATRON_LM": (OFF, "Megatron-LM is not supported"),
    "ACCELERATE_USE_PARALLELISM_CONFIG": (OFF, "tensor and context parallelism are not supported"),
    "ACCELERATE_FP8_BACKEND": (
        ("", "no", "auto", "te", "ao"),
        "optimizers in 8 bits are not supported",
    ),
    "ONEDNN_DEFAULT_FPMATH_MODE": (
        ("", "strict"),
        "it rounds float32 to bf16; train.mixed_precision is for that",
    ),
    "DNNL_DEFAULT_FPMATH_MODE": (
        ("", "strict"),
        "it rounds float32 to bf16; train.mixed_precision is for that",
    ),
    "NVIDIA_TF32_OVERRIDE": (("", "0"), "train.tf32 is for that"),
}
"""Environment variable -> values that change no number, in small letters; and why others are refused."""
RECORDED = (
    "ACCELERATE_", "ATEN_", "CUBLAS", "CUDA_", "CUDNN_", "DNNL_", "DS_", "FLASH_ATTENTION_", "KMP_", "MKL_", "NCCL_",
    "NPY_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_", "TIMM_", "TORCH", "TRANSFORMERS_", "USE_HUB_KERNELS",
)  # fmt: skip
"""Beginnings of the names of variables that choose kernels, and so the last digits; ``env.json`` has those set."""
LAUNCHER_VARIABLE = "RL_CAPTION_LAUNCHER"
"""Environment variable by which a program of this package tells the processes that it starts its own process id."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's ``mallopt``."""
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which schedulers, Ctrl-C and closed terminals ask a program to end."""
SAME_REQUEST_SECONDS = 2.0
"""Signals within this time are one request: a launcher passes on a signal that its whole process group got, too."""


class LaunchError(UserError, RuntimeError):
    """The processes that run are not the ones that were asked for; the message holds a command that works."""


def check_processes(num_processes_running: int, expected: int | None = None) -> None:
    """Raise LaunchError on every process unless as many processes train together as were asked for.

    ``num_processes_running`` is ``Accelerator.num_processes``, the number that exchanges gradients. It is compared with
    ``expected`` (``train.num_processes``), with the launcher's environment (``WORLD_SIZE``), and with the command line
    of ``accelerate launch`` and its configuration file.
    """
    running = num_processes_running
    started = processes_started(os.environ)
    if started is not None and started[1] != running:
        name, count = started
        raise LaunchError(
            f"{count} processes were started ({name}={count}), but this one trains in a group of {running}: they would "
            f"train separate copies of the model. {_advice(expected or count)}"
        )
    requested = processes_requested_by_launcher()
    if requested is not None and requested != running:
        raise LaunchError(
            f"`accelerate launch` was asked for {requested} processes and started {running}: with --cpu, or without "
            "--multi_gpu on a machine that has fewer than two GPUs, it starts one whatever the number. "
            + _advice(expected or requested)
        )
    if expected is not None and expected != running:
        raise LaunchError(
            f"train.num_processes is {expected}, but {running} train together. {_advice(expected)} Or set "
            f"train.num_processes to {running}."
        )


def check_environment(environment: Mapping[str, str] = os.environ, tf32: bool = False) -> None:
    """Refuse environment variables that would change numbers (``REFUSED``), and values of a launcher's variables that
    are none. docs/reliability.md has the table.

    With ``tf32`` (``train.tf32``), ``NVIDIA_TF32_OVERRIDE`` may be 1 instead of 0. Raises LaunchError, which names the
    variable and its value.
    """
    for name, (allowed, reason) in REFUSED.items():
        allowed = ("", "1") if tf32 and name == "NVIDIA_TF32_OVERRIDE" else allowed
        if environment.get(name, "").strip().lower() not in allowed:
            raise LaunchError(
                f"the environment variable {name} is {environment[name]!r}: {reason}. Unset it"
            )
    for name in FLAGS:
        if environment.get(name, "").strip().lower() not in (
            *OFF,
            "1",
            "true",
            "yes",
            "y",
            "t",
            "on",
        ):
            raise LaunchError(
                f"the environment variable {name} is {environment[name]!r}: expected true or false"
            )
    ranges = dict.fromkeys(WORLD_SIZE_VARIABLES, (1, 10**6)) | dict.fromkeys(
        RANK_VARIABLES, (-1, 10**6)
    )
    ranges |= {"MASTER_PORT": (0, 65535), "ACCELERATE_DEEPSPEED_ZERO_STAGE": (0, 3)}
    for name, (least, most) in ranges.items():
        value = environment.get(name)
        number = (
            int(value) if value is not None and re.fullmatch(r"\s*-?[0-9]{1,9}\s*", value) else None
        )
        if value is not None and (number is None or not least <= number <= most):
            expected = f"expected a whole number, {least} to {most}"
            raise LaunchError(f"the environment variable {name} is {value!r}: {expected}")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if {rank, size} <= environment.keys() and int(environment[rank]) >= int(environment[size]):
            values = f"{rank} is {environment[rank]}, {size} is {environment[size]}"
            raise LaunchError(
                f"environment variables: {values}, but ranks count from 0: expected a smaller {rank}"
            )


def recorded_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables that choose kernels and so may change the last digits (``RECORDED``), sorted."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(RECORDED)}


def processes_started(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The environment variable by which a launcher says how many processes it started, and that number, or None.

    Raises LaunchError if the variable is no positive whole number.
    """
    for name in WORLD_SIZE_VARIABLES:
        value = environment.get(name)
        if value is None:
            continue
        if not value.strip().isdecimal() or int(value) < 1:
            raise LaunchError(
                f"the environment variable {name} is {value!r}: expected a whole number of at least 1"
            )
        return name, int(value)
    return None


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Ask glibc's allocator to keep freed memory for the next tensors; returns whether it does.

    Otherwise large blocks are given back and mapped anew, and the kernel fills every page with zeros again
    (docs/performance.md). Without glibc, or if the user set ``MALLOC_*`` or ``glibc.malloc`` in GLIBC_TUNABLES, nothing
    is changed.
    """
    names = [*environment, *environment.get("GLIBC_TUNABLES", "").split(":")]
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith(("MALLOC_", "glibc.malloc")) for name in names):
        return False
    return bool(
        mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1)
    )  # no block is mapped, nothing given back


def processes_requested_by_launcher() -> int | None:
    """The number of processes, on all machines, that the ``accelerate launch`` above this process was asked for.

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
                program, *arguments = call
                return (
                    requested_processes(arguments, Path(ancestor.cwd()))
                    if program in ACCELERATE_PROGRAMS
                    else None
                )
    return None


def requested_processes(arguments: Sequence[str], folder: Path) -> int | None:
    """The number of processes that these arguments of ``accelerate launch`` ask for; None if they do not say.

    ``folder`` is the launcher's working directory, which a relative ``--config_file`` starts from.
    """
    from accelerate.commands.config import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            parsed = launch_command_parser().parse_args(list(arguments))
    except (
        SystemExit
    ):  # the launcher was of another version, whose options this parser does not know
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
    """A shell command that trains with ``num_processes`` processes on this machine.

    ``script`` is the program and its arguments; by default those of this process.
    """
    import torch

    if script is None:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        script = (
            sys.argv
            if spec is None
            else ["--module", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
        )
    settings = "--num_machines 1 --mixed_precision no --dynamo_backend no"
    on_cpu = torch.cuda.device_count() == 0
    if num_processes == 1:
        return f"accelerate launch {'--cpu ' if on_cpu else ''}--num_processes 1 {settings} {shlex.join(script)}"
    options = f"--multi_gpu --num_processes {num_processes} {settings} --main_process_port 0"
    return f"{'ACCELERATE_USE_CPU=true ' if on_cpu else ''}accelerate launch {options} {shlex.join(script)}"


def _advice(num_processes: int) -> str:
    processes = "process" if num_processes == 1 else "processes that train together"
    return f"To start {num_processes} {processes}:\n  {launch_command(num_processes)}\n"


def die_with_launcher() -> bool:
    """On Linux, ask the kernel for a SIGTERM when the launcher that started this process ends in any way.

    Otherwise a killed launcher leaves training processes behind, which write to the run folder at the same time as the
    next attempt. Returns whether that was asked for. It is not if the parent is no launcher: a training that a shell or
    ``nohup`` started outlives its terminal. Call it early, before heavy imports.
    """
    if sys.platform != "linux":
        return False
    parent, named = os.getppid(), os.environ.get(LAUNCHER_VARIABLE, "")
    if named.isdecimal() and not psutil.pid_exists(
        int(named)
    ):  # it ended while this process started
        os.kill(os.getpid(), signal.SIGTERM)
    try:
        if named != str(parent) and parse_launcher(psutil.Process(parent).cmdline()) is None:
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
    before = {
        number: earlier for number, earlier in before.items() if earlier is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def stop_requests(leave: bool = False) -> Iterator[Callable[[], bool]]:
    """Inside the ``with``, the first of ``STOP_SIGNALS`` makes the yielded function return True. With ``leave``, it
    raises ``SystemExit`` instead, so that ``finally`` blocks run. A second signal ends the process at once.

    Signals within ``SAME_REQUEST_SECONDS`` of the first, and the one that the kernel sends when the launcher ends
    (``die_with_launcher``), do not count as a second one.
    """
    first: float | None = None
    parent = os.getppid()

    def note(number: int, frame: FrameType | None) -> None:
        """Remember the first signal; a later one ends at once."""
        nonlocal first
        if first is None:
            first = time.monotonic()
            if leave:
                raise SystemExit(128 + number)
        elif time.monotonic() - first > SAME_REQUEST_SECONDS and os.getppid() == parent:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    with stop_signals_handled_by(note):
        yield lambda: first is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """``accelerate launch`` that passes ``STOP_SIGNALS`` on to the training processes and waits for them to save.

    Accelerate's own launcher ends at once and leaves its process behind, so that a scheduler takes the job for ended;
    with several processes it kills them after 30 s. Returns 0 where all processes ended with 0, as they do when they
    have saved; 128 + signal where they were stopped before that; a failing process's code otherwise.
    """
    from accelerate.commands.launch import launch_command as launch
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    die_with_launcher()
    os.environ.update(wait_variables(os.environ))  # for the processes that it starts
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
        return (
            128 + stopped[0]
            if stopped
            else error.returncode
            if error.returncode > 0
            else 128 - error.returncode
        )
    except ChildFailedError:
        if not stopped:
            raise
        return 128 + stopped[0]
    return 0


@contextlib.contextmanager
def run_lock(
    run_dir: str | Path, wait_seconds: float = 120.0, poll_seconds: float = 0.2
) -> Iterator[Path]:
    """Inside the ``with``, no other training writes to the run folder. The main process holds the lock.

    It is a ``filelock`` on ``<run>/.lock``, in which the holder writes its pid and host; the kernel drops it when the
    holder ends in any way. Raises LaunchError if the folder cannot be written to, or if another process still holds the
    lock after ``wait_seconds`` (a training that got SIGTERM may still be saving).
    """
    path = Path(run_dir) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise LaunchError(f"cannot write to the run folder {path.parent}: {error}") from error

    def in_use() -> str:
        holder = path.read_text(encoding="utf-8").strip() or "(pid unknown)"
        return f"the run folder {path.parent} is in use by process {holder}"

    lock = FileLock(path, fallback_to_soft=False)  # a soft lock would outlive a killed holder
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if wait_seconds > 0:
                logger.warning("%s: waiting up to %g s for it to end", in_use(), wait_seconds)
            lock.acquire(timeout=wait_seconds, poll_interval=poll_seconds)
    except Timeout as error:
        raise LaunchError(
            f"{in_use()}, for longer than {wait_seconds:g} s: stop that training first, or choose another run folder"
        ) from error
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in (
            errno.ENOLCK,
            errno.ENOTSUP,
            errno.ENOSYS,
        ):
            raise
        logger.warning(
            "%s: this file system has no locks (%s); start only one training here", path, error
        )
    path.write_text(f"{os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
    try:
        yield path
    finally:
        path.write_text("", encoding="utf-8")
        lock.release()


if __name__ == "__main__":
    sys.exit(main())
