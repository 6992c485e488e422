"""CPU threads of a program: how many there are, and how they wait for each other.

The OpenMP runtime of torch reads the environment once, when torch is loaded. So ``set_threads``
comes first in every program, and this module imports nothing heavy.
"""

import os
import sys
from collections.abc import Mapping

NUM_THREADS = "OMP_NUM_THREADS"
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SPIN_COUNT = "3000"
"""Rounds of a loop in which a thread of libgomp waits for the others before it sleeps (300,000 by
default). Few rounds cost time on an idle machine; many cost more beside other work, because a
waiting thread keeps a core from the thread that it waits for (docs/performance.md)."""
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "LOCAL_WORLD_SIZE")
"""``accelerate launch`` sets the first, ``torchrun`` the second."""


def set_threads() -> None:
    """Set the CPU threads of this process in its environment; too late where torch is loaded."""
    if "torch" not in sys.modules:
        os.environ.update(thread_variables(os.environ, granted_cores()))


def thread_variables(environment: Mapping[str, str], cores: int) -> dict[str, str]:
    """The variables that a program adds to its ``environment`` before torch is loaded.

    The number of threads is the user's (``user_threads``), or else this process's share of
    ``cores`` among the ``LOCAL_WORLD_SIZE`` processes of a launcher.
    """
    wait = (
        {} if any(name in environment for name in WAIT_VARIABLES) else wait_variables()
    )
    threads = user_threads(environment)
    if threads is not None:
        return wait | {NUM_THREADS: str(threads)}
    processes = environment.get("LOCAL_WORLD_SIZE", "")
    count = int(processes) if processes.isdecimal() else 1
    share = str(max(cores // max(count, 1), 1))
    return wait | {NUM_THREADS: share}


def wait_variables() -> dict[str, str]:
    """The variable that lets waiting threads of libgomp sleep after ``SPIN_COUNT`` rounds."""
    return {"GOMP_SPINCOUNT": SPIN_COUNT}


def user_threads(environment: Mapping[str, str]) -> int | None:
    """``OMP_NUM_THREADS`` where the user set it, else None.

    Launchers set it to 1 where the user did not, so 1 under a launcher counts as not set:
    ``train.threads 1`` asks for one thread there.
    """
    value = environment.get(NUM_THREADS, "")
    launched = any(name in environment for name in LAUNCHED)
    if launched and value == "1":
        return None
    first = value.partition(",")[0].strip()
    return int(first) or None if first.isascii() and first.isdecimal() else None


def cpu_threads(processes: int, environment: Mapping[str, str] = os.environ) -> int:
    """CPU threads of each of ``processes`` on this machine: the user's, or a share of the cores."""
    return user_threads(environment) or max(granted_cores() // processes, 1)


def granted_cores() -> int:
    """Physical cores that this process may use, as far as its CPU affinity says.

    A container's limit of CPU time is not read: ``OMP_NUM_THREADS`` says it.
    """
    import psutil

    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(min(allowed, psutil.cpu_count(logical=False) or allowed), 1)
