"""Processes that run at the same time, each with a log file, and that end when this process ends."""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

logger = logging.getLogger(__name__)

SECONDS_TO_SAVE = 120.0
"""How long a stopped training may take for its checkpoint."""


class Job(NamedTuple):
    """A command, its name in messages, and the file that its output is appended to."""

    name: str
    command: Sequence[str]
    log: Path


class EndedJob(NamedTuple):
    """How a job ended: exit code, or minus the signal that ended it; running time in seconds."""

    job: Job
    code: int
    seconds: float


def run_jobs(
    jobs: Sequence[Job], devices: Sequence[str | None] = (None,)
) -> Generator[EndedJob, None, None]:
    """Run all jobs, as many at a time as there are ``devices``, and yield each when it has ended.

    Each of ``devices`` is the ``CUDA_VISIBLE_DEVICES`` of one running job; None leaves the variable
    as it is. Closing the generator early (``contextlib.closing``) asks the running jobs to stop and
    waits for their checkpoints.
    """
    free: SimpleQueue[str | None] = SimpleQueue()
    for names in devices:
        free.put(names)
    started: list[tuple[Job, subprocess.Popen[bytes]]] = []
    lock, stopped = threading.Lock(), threading.Event()

    def run(job: Job) -> EndedJob:
        """Start a job on the next free device and wait for its end."""
        names, start = free.get(), time.monotonic()
        try:
            with lock:
                if stopped.is_set():
                    raise CancelledError
                process = _start(job, names)
                started.append((job, process))
            return EndedJob(job, process.wait(), time.monotonic() - start)
        finally:
            free.put(names)

    with ThreadPoolExecutor(len(devices)) as pool:
        try:
            waiting = {pool.submit(run, job) for job in jobs}
            while (
                waiting
            ):  # not for ever: a signal that comes just before the wait is handled after it
                ended, waiting = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in ended:
                    yield future.result()
        finally:
            with lock:
                stopped.set()
            _stop([(job, process) for job, process in started if process.poll() is None])


def _start(job: Job, devices: str | None) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    job.log.parent.mkdir(parents=True, exist_ok=True)
    # A session of its own: Ctrl-C reaches this process only, which then asks the job to save and
    # stop.
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def _stop(running: Sequence[tuple[Job, subprocess.Popen[bytes]]]) -> None:
    if running:
        names = ", ".join(job.name for job, _ in running)
        logger.info(
            "stopping %s: running trainings save a checkpoint first; the same command continues "
            "from it",
            names,
        )
    for _, process in running:
        process.terminate()
    deadline = time.monotonic() + SECONDS_TO_SAVE
    for job, process in running:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            logger.warning("%s did not stop within %g s and is killed", job.name, SECONDS_TO_SAVE)
            process.kill()


def share_devices(
    num_parallel: int, count: int, environment: Mapping[str, str]
) -> list[str | None]:
    """``CUDA_VISIBLE_DEVICES`` for each job that runs at a time, out of the ``count`` GPUs that
    this process sees.

    It is None, which leaves all GPUs visible, where there are fewer than two jobs or GPUs.
    """
    if num_parallel < 2 or count < 2:
        return [None] * num_parallel
    names = environment.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "") or ",".join(
        map(str, range(count))
    )
    devices, size = names.split(",")[:count], max(count // num_parallel, 1)
    firsts = [slot * size % count for slot in range(num_parallel)]
    return [",".join(devices[first : first + size]) for first in firsts]
