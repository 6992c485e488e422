"""CPU threads of a program: how many there are, and how they wait for each other.

The OpenMP runtime of torch reads the environment once, when torch is loaded. So
``set_threads`` comes first in every program, and this module imports nothing heavy.
"""

import os
import sys

NUM_THREADS = "OMP_NUM_THREADS"
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SPIN_COUNT = "3000"
"""Rounds of a loop in which a thread of libgomp waits for the others before it sleeps
(300,000 by default). Few rounds cost time on an idle machine; many cost more beside
other work, because a waiting thread keeps a core from the thread that it waits for
(docs/performance.md)."""
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "LOCAL_WORLD_SIZE")
"""``accelerate launch`` sets the first, ``torchrun`` the second."""


def set_threads() -> None:
    """Set the CPU threads of this process in its environment; too late where torch is loaded."""
    if "torch" not in sys.modules:
        let_threads_sleep()
        processes = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        os.environ[NUM_THREADS] = str(cpu_threads(processes))


def let_threads_sleep() -> None:
    """Let waiting threads of libgomp sleep after ``SPIN_COUNT`` rounds, unless the user
    says how they wait.
    """
    if not any(name in os.environ for name in WAIT_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def cpu_threads(processes: int) -> int:
    """CPU threads of each of ``processes`` on this machine: ``OMP_NUM_THREADS`` where
    the user set it, or a share of the cores.

    Launchers set it to 1 where the user did not, so 1 under a launcher counts as not
    set: ``train.threads 1`` asks for one thread there.
    """
    first = os.environ.get(NUM_THREADS, "").partition(",")[0]
    launched = any(name in os.environ for name in LAUNCHED)
    if first.isdecimal() and int(first) > int(launched):
        return int(first)
    return max(granted_cores() // processes, 1)


def granted_cores() -> int:
    """Physical cores that this process may use, as far as its CPU affinity says.

    A container's limit of CPU time is not read: ``OMP_NUM_THREADS`` says it.
    """
    import psutil

    affinity = getattr(os, "sched_getaffinity", None)
    allowed = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(min(allowed, psutil.cpu_count(logical=False) or allowed), 1)
