"""Programs that run at the same time, each with its log file, and that end when this process ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from rl_caption.launch import LAUNCHER_VARIABLE, SAME_REQUEST_SECONDS, stop_signals_handled_by

logger = logging.getLogger(__name__)

SECONDS_TO_SAVE = 120.0
"""How long a stopped training may take for its checkpoint."""


@dataclass(frozen=True)
class Job:
    """A command, its name in messages, and the file that its output is appended to."""

    name: str
    command: Sequence[str]
    log: Path


@dataclass(frozen=True)
class EndedJob:
    """How a job ended: exit code, or minus the signal that ended it; running time in seconds."""

    job: Job
    code: int
    seconds: float


def run_jobs(jobs: Sequence[Job], num_parallel: int, devices: Sequence[str] = ()) -> Generator[EndedJob, None, None]:
    """Run all jobs, ``num_parallel`` at a time, and yield each as it ends.

    Whatever ends this iterator early (close it: ``contextlib.closing``) asks the jobs that still run to stop, and
    waits for their checkpoints. On Linux they also end when this process is killed.

    Args:
        jobs: in the order in which they start.
        num_parallel: running at a time.
        devices: names for ``CUDA_VISIBLE_DEVICES``, dealt out to the jobs that run at a time.
    """
    slots: SimpleQueue[int] = SimpleQueue()
    for slot in range(num_parallel):
        slots.put(slot)
    running: dict[int, tuple[Job, subprocess.Popen[bytes]]] = {}
    lock, stopped = threading.Lock(), threading.Event()

    def run(job: Job) -> EndedJob:
        slot, start = slots.get(), time.monotonic()
        try:
            with lock:
                if stopped.is_set():
                    raise CancelledError
                process = _start(job, devices_of(slot, num_parallel, devices))
                running[slot] = job, process
            # The thread that started a job must outlive it: the kernel takes its end for that of the parent.
            return EndedJob(job, process.wait(), time.monotonic() - start)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(num_parallel) as pool:
        try:
            for future in as_completed([pool.submit(run, job) for job in jobs]):
                yield future.result()
        finally:
            with lock:
                stopped.set()
            left = {job.name: process for job, process in running.values() if process.poll() is None}
            if left:
                logger.info(
                    "stopping %s: what trains saves a checkpoint first; the same command goes on from there",
                    ", ".join(left),
                )
            for process in left.values():
                process.terminate()
            deadline = time.monotonic() + SECONDS_TO_SAVE
            for name, process in left.items():
                try:
                    process.wait(max(deadline - time.monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    logger.warning("%s did not stop within %g s and is killed", name, SECONDS_TO_SAVE)
                    process.kill()


def devices_of(slot: int, num_parallel: int, devices: Sequence[str]) -> str | None:
    """The devices of the jobs in a slot; None for all of them, where there are fewer than two jobs or devices."""
    if num_parallel < 2 or len(devices) < 2:
        return None
    share = max(len(devices) // num_parallel, 1)
    first = slot * share % len(devices)
    return ",".join(devices[first : first + share])


def own_devices(count: int, environment: Mapping[str, str]) -> list[str]:
    """Names of the ``count`` GPUs that this process sees, for ``CUDA_VISIBLE_DEVICES``."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in named.split(",")][:count] if named else [str(index) for index in range(count)]


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Turn the first of ``STOP_SIGNALS`` into ``SystemExit``, so that ``finally`` blocks run; a later one ends the
    process at once, unless it arrives within ``SAME_REQUEST_SECONDS``."""
    first: float | None = None

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            raise SystemExit(128 + number)
        if time.monotonic() - first > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    with stop_signals_handled_by(leave):
        yield


def _start(job: Job, devices: str | None) -> subprocess.Popen[bytes]:
    environment = os.environ | {LAUNCHER_VARIABLE: str(os.getpid())}
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        # A session of its own: Ctrl-C reaches this process only, which then asks the job to save and stop.
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
