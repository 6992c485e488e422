"""Processes: how many train together, how signals end them, and which of them writes to
a run folder.

``torchrun --nproc_per_node 2`` on a machine without a GPU may run two copies that never
exchange a gradient: ``check_processes`` finds that out before the first step.

``python -m rl_caption.runtime.launch`` is ``accelerate launch`` for schedulers: it
passes SIGTERM, SIGINT and SIGHUP on, and waits until the training has saved its
checkpoint.
"""

if __name__ == "__main__":  # before the imports below, which take a while
    from rl_caption.__main__ import leave_on_interrupt

    leave_on_interrupt()

import contextlib
import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import psutil
from filelock import FileLock, Timeout

from rl_caption.runtime.errors import UserError
from rl_caption.runtime.threads import let_threads_sleep

logger = logging.getLogger(__name__)

WORLD_SIZE_VARIABLES = (
    "WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)
"""Variables by which a launcher says how many processes it started."""
OFF = ("", "0", "false", "no")
REFUSED = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("", "1", "auto"),  # divides gradients
    "ACCELERATE_DYNAMO_BACKEND": ("", "no"),
    "ACCELERATE_USE_FSDP": OFF,
    "ACCELERATE_USE_MEGATRON_LM": OFF,
    "ACCELERATE_USE_PARALLELISM_CONFIG": OFF,
    "NVIDIA_TF32_OVERRIDE": ("", "0"),  # rounds float32; train.tf32 says so
    "ONEDNN_DEFAULT_FPMATH_MODE": ("", "strict"),  # likewise, to bf16
    "DNNL_DEFAULT_FPMATH_MODE": ("", "strict"),
}
"""Environment variable -> values that change no number; others are refused."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameters of glibc's ``mallopt``."""
START = (
    "Start them with accelerate launch (on CPUs with ACCELERATE_USE_CPU=true) "
    "--num_processes"
)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which schedulers, Ctrl-C and closed terminals ask a program to end."""
SAME_REQUEST_SECONDS = 2.0
"""Signals within this time are one request: a launcher passes on what its process group got, too.
"""


class LaunchError(UserError, RuntimeError):
    """The processes that run are not the ones that were asked for."""


def check_processes(running: int, expected: int | None = None) -> None:
    """Raise LaunchError on every process unless as many train together as were asked for.

    Args:
        running: ``Accelerator.num_processes``, the number that exchanges gradients.
        expected: ``train.num_processes``. The launcher's environment (``WORLD_SIZE``)
            is compared, too.
    """
    for name, count in (processes_started(), ("train.num_processes", expected)):
        if count not in (None, running):
            raise LaunchError(
                f"{name}={count}, but {running} train together: others would train separate "
                f"copies of the model. {START} {count}"
            )


def check_environment() -> None:
    """Raise LaunchError for an environment variable that would change numbers (``REFUSED``)."""
    for name, allowed in REFUSED.items():
        value = os.environ.get(name, "")
        if value.lower() not in allowed:
            raise LaunchError(
                f"the environment variable {name} is {value!r}, which this package does not train "
                "with: unset it (train.micro_batch_size accumulates gradients, train.tf32 and "
                "train.mixed_precision round, and configs/accelerate/deepspeed_zero3.yaml shards)"
            )


def processes_started() -> tuple[str, int]:
    """The variable by which a launcher says how many processes it started, and their number."""
    for name in WORLD_SIZE_VARIABLES:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return name, int(value)
    return "WORLD_SIZE", 1


def keep_freed_memory() -> None:
    """Ask glibc's allocator to keep freed memory for the next tensors.

    Otherwise large blocks are given back and mapped anew, and the kernel fills every
    page with zeros again (docs/performance.md). Without glibc, or if the user set
    ``MALLOC_*`` or ``GLIBC_TUNABLES``, nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    asked = re.search(r"\bMALLOC_|GLIBC_TUNABLES", " ".join(os.environ))
    if mallopt is not None and asked is None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, -1)


@contextlib.contextmanager
def stop_signals_handled_by(
    handler: Callable[[int, FrameType | None], None],
) -> Iterator[None]:
    """Context in which ``handler`` is called for ``STOP_SIGNALS``; ignored signals
    (``nohup``) stay ignored.
    """
    before = {}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def stop_requests(leave: bool = False) -> Iterator[Callable[[], bool]]:
    """Context in which the first of ``STOP_SIGNALS`` makes the yielded function return
    True.

    A second signal, ``SAME_REQUEST_SECONDS`` later or more, ends the process at once.
    With ``leave``, the first signal raises ``SystemExit``, so that ``finally`` blocks
    run. Where the block ends after a SIGINT, ``KeyboardInterrupt`` is raised: a shell's
    ``&&`` must not go on.
    """
    first: tuple[int, float] | None = None

    def note(number: int, frame: FrameType | None) -> None:
        """Note the first signal; end at once where another request comes."""
        nonlocal first
        if first is None:
            first = number, time.monotonic()
            if leave:
                raise SystemExit(128 + number)
        elif time.monotonic() - first[1] > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    with stop_signals_handled_by(note):
        yield lambda: first is not None
    if first is not None and first[0] == signal.SIGINT:
        raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """``accelerate launch`` that passes ``STOP_SIGNALS`` on and waits for the training to save.

    Accelerate's own launcher ends at once and leaves its process behind, so that a
    scheduler takes the job for ended; with several processes it kills them after 30 s.

    Returns:
        0 where all processes ended with 0, as they do when they have saved; 128 + signal where
        they were stopped before that; a failing process's code otherwise.
    """
    from accelerate.commands.launch import launch_command as launch
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    let_threads_sleep()  # threads of the processes that it starts
    # torchrun's own handlers, which would kill the processes after a time, get another signal.
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    stopped: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        """Send the signal to the training; before there is one, end."""
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
        if stopped:
            return 128 + stopped[0]
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    except ChildFailedError:
        if not stopped:
            raise
        return 128 + stopped[0]
    return 0


@contextlib.contextmanager
def run_lock(run_dir: str | Path, wait_seconds: float = 120.0) -> Iterator[None]:
    """Context in which no other training writes to the run folder. The main process
    holds the lock.

    It is a ``filelock`` on ``<run>/.lock``; the kernel drops it when the holder ends in
    any way. Raises LaunchError if another process still holds it after ``wait_seconds``
    (a training that got SIGTERM may still be saving).
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    # A soft lock, filelock's fallback, would outlive a killed holder.
    lock = FileLock(folder / ".lock", fallback_to_soft=False)
    try:
        with contextlib.suppress(Timeout):
            lock.acquire(timeout=0)
        if not lock.is_locked:
            logger.warning("%s is in use: waiting for it", folder)
            lock.acquire(timeout=wait_seconds)
    except Timeout as error:
        raise LaunchError(
            f"the run folder {folder} is in use by another process: stop it, or choose another "
            "run.dir"
        ) from error
    except (OSError, NotImplementedError) as error:
        logger.warning(
            "%s has no file locks (%s): start only one training here", folder, error
        )
    try:
        yield
    finally:
        lock.release()


if __name__ == "__main__":
    sys.exit(main())
