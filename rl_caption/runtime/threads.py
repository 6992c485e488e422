"""CPU threads of a program: how many there are, how they wait for each other, and what the user asked for.

The OpenMP runtime of torch reads the environment once, when torch is loaded. So ``set_threads`` comes first in every
program, and this module imports nothing heavy.
"""

import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

NUM_THREADS = "OMP_NUM_THREADS"
CHOSEN_THREADS = "RL_CAPTION_THREADS"
"""Environment variable with the ``OMP_NUM_THREADS`` that a program of this package chose: it is not the user's."""
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
SPIN_COUNT = "1000"
"""Rounds of a loop (about 10 microseconds) in which a thread of libgomp waits for the others before it sleeps; by
default 300,000. With none at all (``OMP_WAIT_POLICY=PASSIVE``) the small operations of decoding are slower."""
LAUNCHED = ("ACCELERATE_MIXED_PRECISION", "LOCAL_WORLD_SIZE")
"""``accelerate launch`` sets the first, ``torchrun`` the second."""
ACCELERATE_PROGRAMS = (
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "rl_caption.runtime.launch",
)
OTHER_LAUNCHERS = (
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "deepspeed.launcher.launch",
)


def set_threads() -> None:
    """Set number and wait of this process's CPU threads in its environment; where torch is loaded, it is too late."""
    if "torch" not in sys.modules:
        os.environ.update(thread_variables(os.environ, user_environment(), granted_cores()))


def thread_variables(
    environment: Mapping[str, str], user: Mapping[str, str], cores: int
) -> dict[str, str]:
    """The variables that a program adds to its ``environment`` before torch is loaded.

    The number of threads is that of ``user``, the environment in which the user started the program or its launcher;
    where it says none, the share of one of ``LOCAL_WORLD_SIZE`` processes in the ``cores``.
    """
    threads = user_threads(user)
    if threads is not None:
        return wait_variables(environment) | {NUM_THREADS: str(threads)}
    processes = environment.get("LOCAL_WORLD_SIZE", "")
    share = str(
        max(cores // int(processes), 1) if processes.isdecimal() and int(processes) else cores
    )
    return wait_variables(environment) | {NUM_THREADS: share, CHOSEN_THREADS: share}


def wait_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable that lets threads sleep soon while they wait; none where the user set one of ``WAIT_VARIABLES``.

    By default they spin for milliseconds. As soon as another program has one of the cores, they take the time that the
    thread they wait for needs.
    """
    return (
        {}
        if any(name in environment for name in WAIT_VARIABLES)
        else {"GOMP_SPINCOUNT": SPIN_COUNT}
    )


def user_threads(user: Mapping[str, str]) -> int | None:
    """``OMP_NUM_THREADS`` (the first number of a list) where the user set it to a number of threads, else None."""
    value = user.get(NUM_THREADS, "")
    first = value.partition(",")[0].strip()
    if value == user.get(CHOSEN_THREADS) or not (first.isascii() and first.isdecimal()):
        return None
    return int(first) or None


def cpu_threads(processes: int, environment: Mapping[str, str] = os.environ) -> int:
    """CPU threads of each of ``processes`` on this machine: OMP_NUM_THREADS of the user, else a share of the cores."""
    return user_threads(user_environment(environment)) or max(granted_cores() // processes, 1)


def user_environment(environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """The environment in which the user started this program; under launchers, that of the outermost one.

    Launchers set OMP_NUM_THREADS, mostly to 1, where the user did not. ``--num_cpu_threads_per_process`` of
    ``accelerate launch`` is the user's, too, and stands in its place.
    """
    if not any(name in environment for name in LAUNCHED):
        return environment
    import psutil

    user = environment
    # psutil's errors mean a process that has just ended or belongs to another user: no launcher to be asked.
    with contextlib.suppress(psutil.Error):
        for ancestor in psutil.Process().parents():
            call = parse_launcher(ancestor.cmdline())
            if call is not None:
                user = {}  # what the launcher set is not the user's, even if its own environment cannot be read
                user = ancestor.environ() | threads_of_command(call)
    return user


def threads_of_command(command: Sequence[str]) -> dict[str, str]:
    """``--num_cpu_threads_per_process`` of a launcher's command line as ``OMP_NUM_THREADS``."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        option, _, value = word.partition("=")
        if option.replace("-", "_") == "__num_cpu_threads_per_process":
            return {NUM_THREADS: value or following}
    return {}


def parse_launcher(command_line: Sequence[str]) -> list[str] | None:
    """Program and arguments of ``accelerate launch``, ``torchrun`` or a relative; None of another command line."""
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
        if name == "accelerate":
            return [name, *tokens[1:]] if tokens[:1] == ["launch"] else None
        return [name, *tokens] if name in ACCELERATE_PROGRAMS + OTHER_LAUNCHERS else None
    return None


def granted_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may use: its CPU affinity, and the limits of its control groups, rounded down.

    Two processors that are threads of one core count once. ``root`` holds ``proc`` and ``sys``; where they say
    nothing, as on macOS, all processors count.
    """
    processors = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = set()
    for number in processors:
        siblings = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        cores.add(siblings.read_text() if siblings.is_file() else f"{number}\n")
    return max(int(min(len(cores), group_limit(root))), 1)


def group_limit(root: Path = Path("/")) -> float:
    """Processors' time that the control groups of this process leave it (versions 1 and 2); infinite without a limit.

    A limit holds for the groups below, too. In a container the path of the group may be that of the machine, which is
    not there: the limit is then the one at the top.
    """
    groups = root / "proc/self/cgroup"
    limits = [math.inf]
    for line in groups.read_text().splitlines() if groups.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount, group = root / "sys/fs/cgroup" / ("cpu" if controllers else ""), PurePosixPath(path)
        limits += [_quota(mount / above.relative_to("/")) for above in (group, *group.parents)]
    return min(limits)


def _quota(folder: Path) -> float:
    """The limit that one control group sets."""
    second, first = folder / "cpu.max", [folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"]
    try:
        words = (
            second.read_text().split() if second.is_file() else [file.read_text() for file in first]
        )
        quota, period = map(int, words)
    except (OSError, ValueError):  # there is no limit: no such file, or "max"
        return math.inf
    return quota / period if quota > 0 else math.inf
