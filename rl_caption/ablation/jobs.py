"""Programs that run beside each other, each with its log file, and that end when this process ends."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rl_caption.launch import LAUNCHER_VARIABLE, stop_signals_handled_by

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


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    started: float


def run_jobs(
    jobs: Sequence[Job], at_once: int, devices: Sequence[str] = (), poll_seconds: float = 0.1
) -> Generator[EndedJob, None, None]:
    """Run all jobs, ``at_once`` at a time, and yield each as it ends; the next one has started by then.

    Whatever ends this iterator early (close it: ``contextlib.closing``) asks the jobs that still run to stop, and
    waits for their checkpoints. On Linux they also end when this process is killed.

    Args:
        jobs: in the order in which they start.
        at_once: running at a time.
        devices: names for ``CUDA_VISIBLE_DEVICES``; each of several jobs at a time has its share of several devices.
        poll_seconds: between two looks at the jobs.
    """
    waiting, running = list(jobs), dict[int, _Running]()

    def fill() -> None:
        for slot in range(at_once):
            if slot not in running and waiting:
                with _signals_held():  # a job that has started but is not noted would be left behind
                    running[slot] = _start(waiting.pop(0), devices_of(slot, at_once, devices))

    try:
        fill()
        while running:
            ended = []
            for slot, run in list(running.items()):
                code = run.process.poll()
                if code is not None:
                    del running[slot]
                    ended.append(EndedJob(run.job, code, time.monotonic() - run.started))
            fill()
            yield from ended
            if not ended:
                time.sleep(poll_seconds)
    finally:
        _stop(list(running.values()))


def devices_of(slot: int, at_once: int, devices: Sequence[str]) -> str | None:
    """The devices that the jobs of a slot see; None for all of them, where jobs or devices are fewer than two."""
    if at_once < 2 or len(devices) < 2:
        return None
    share = max(len(devices) // at_once, 1)
    first = slot * share % len(devices)
    return ",".join(devices[first : first + share])


def own_devices(count: int, environment: Mapping[str, str]) -> list[str]:
    """Names of the GPUs that this process sees, for ``CUDA_VISIBLE_DEVICES``; ``count`` is their number."""
    named = environment.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in named.split(",")][:count] if named else [str(index) for index in range(count)]


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Turn ``STOP_SIGNALS`` into ``SystemExit``, so that ``finally`` blocks run; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with stop_signals_handled_by(leave):
        yield


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let ``STOP_SIGNALS`` wait until the end of the ``with``; in the main thread only, which alone gets them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    # Not a signal mask: the jobs would inherit it, and could not be stopped.
    with stop_signals_handled_by(lambda number, frame: arrived.append(number)):
        yield
    for number in arrived:
        signal.raise_signal(number)


def _start(job: Job, device: str | None) -> _Running:
    environment = os.environ | {LAUNCHER_VARIABLE: str(os.getpid())}
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = device
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        # A session of its own: Ctrl-C reaches this process only, which then asks the job to save and stop.
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return _Running(job, process, time.monotonic())


def _stop(running: Sequence[_Running]) -> None:
    if not running:
        return
    logger.info(
        "stopping %s: what trains saves a checkpoint first; the same command goes on from there",
        ", ".join(run.job.name for run in running),
    )
    with _signals_held():
        for run in running:
            run.process.terminate()
    deadline = time.monotonic() + SECONDS_TO_SAVE
    for run in running:
        try:
            run.process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            logger.warning("%s did not stop within %g s and is killed", run.job.name, SECONDS_TO_SAVE)
            run.process.kill()
            run.process.wait()
