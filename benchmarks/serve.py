"""The reward server against the same reward called in process, and its memory an hour on.

    python -m benchmarks.serve [--workers 8] [--captions 40] [--memory-seconds 60] [--json FILE]

The reward is 0.5 CIDEr-D + 0.5 RefL-CLIPScore by a small L-CLIP with random weights; ``rl-caption serve`` is a process
of its own. ``workers`` threads ask at once for ``captions`` captions each, of random 64-pixel photos below a folder of
the server, again and again; in process the same captions are scored by one call for each request, one after the other.
Also: the slowest of a hundred requests (p99) against the mean of all in process, and the growth of the server's memory
while captions of ever other numbers and lengths are scored, after it has settled, extrapolated to an hour.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image

from benchmarks.harness import Measurement, Timing, command, compared, timed
from benchmarks.scst_step import random_rows
from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.mixed import MixedReward
from rewards.registry import build
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.integrations.client import RewardClient

IMAGES = 100
SETTLED_MIB = 1.0
"""Memory has settled where it grew by less in ``SETTLED_SECONDS``."""
SETTLED_SECONDS = 20.0
UNSETTLED_SECONDS = 300.0
"""Seconds after which memory that still grows is measured as it is."""
Rows = np.ndarray


def measure(
    timing: Timing, workers: int = 8, captions: int = 40, memory_seconds: float = 60.0
) -> Iterator[Measurement]:
    """Time both, then follow the server's memory; exits with a message if scores differ."""
    draw = np.random.default_rng(0)
    references = [
        row["references"]
        for row in random_rows([f"word{number}" for number in range(2000)], IMAGES)
    ]
    with tempfile.TemporaryDirectory() as folder:
        reward = write_reward(Path(folder), references, timing.device, draw)
        with served(Path(folder)) as (server, url), ThreadPoolExecutor(workers) as pool:
            client = RewardClient(url)
            latencies: list[float] = []

            def draw_request(count: int) -> tuple[list[str], Rows]:
                rows = draw.integers(IMAGES, size=count)
                return [references[row][draw.integers(5)] for row in rows], rows

            def ask(texts: list[str], rows: Rows) -> list[float]:
                start = time.perf_counter()
                images, columns = (
                    [f"photos/{row}.png" for row in rows],
                    [references[row] for row in rows],
                )
                scores = client.score(texts, image=images, references=columns)
                latencies.append(time.perf_counter() - start)
                return scores.total

            requests = [draw_request(captions) for _ in range(workers)]

            def served_scores() -> list[list[float]]:
                return list(pool.map(ask, *zip(*requests, strict=True)))

            def scores_in_process() -> list[list[float]]:
                return [
                    reward(
                        None,
                        texts,
                        image=[Path(folder, f"{row}.png") for row in rows],
                        references=[references[row] for row in rows],
                    )
                    for texts, rows in requests
                ]

            if not np.allclose(served_scores(), scores_in_process(), rtol=1e-5, atol=1e-6):
                raise SystemExit("scores differ")
            latencies.clear()
            times = timed(
                {"served": served_scores, "in process": scores_in_process}, timing, "reward server"
            )
            count = workers * captions
            speed = count / statistics.median(times["served"])
            note = f"; {speed:.0f} captions/s, {workers} workers x {captions} captions"
            yield compared(times, "served", "in process", note=note)
            slow, mean = float(np.quantile(latencies, 0.99)), statistics.mean(times["in process"])
            detail = f"{slow:.3g} s against {mean:.3g} s for all {workers} in process"
            yield Measurement(
                "p99 of a served request",
                f"{workers} calls in process",
                slow / mean,
                "x as long",
                detail,
            )

            def ask_for_others() -> None:
                sizes = draw.integers(1, 2 * captions, size=workers)
                list(pool.map(ask, *zip(*map(draw_request, sizes), strict=True)))

            yield memory_an_hour_on(psutil.Process(server.pid), ask_for_others, memory_seconds)


def write_reward(
    folder: Path, references: list[list[str]], device: str, draw: np.random.Generator
) -> MixedReward:
    """Write photos, document frequencies, L-CLIP and ``mix.yaml`` into ``folder``; the same reward in this process."""
    for number in range(IMAGES):
        pixels = draw.integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    torch.manual_seed(0)
    shape = LCLIPConfig(
        image_width=256, image_heads=4, text_width=256, text_heads=4, embedding_rank=64
    )
    LCLIP(shape).save_pretrained(folder / "lclip")
    df = DocumentFrequencies.from_texts(references, eos=True)
    df.save(folder / "df.npz")
    student = {"backbone": str(folder / "lclip"), "device": device}
    terms = {"cider": {"weight": 0.5}, "ref_l_clipscore": {"weight": 0.5, "kwargs": student}}
    (folder / "mix.yaml").write_text(json.dumps({"df": str(folder / "df.npz"), "terms": terms}))
    rewards = {
        "cider": (build("cider", df=df), 0.5),
        "ref_l_clipscore": (build("ref_l_clipscore", **student), 0.5),
    }
    return MixedReward(rewards)


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``rl-caption serve`` of ``mix.yaml`` with as many CPU threads as this process has, and its address."""
    words = [
        "serve",
        "--reward",
        str(folder / "mix.yaml"),
        "--images.photos",
        str(folder),
        "--port",
        "0",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command_line = [sys.executable, "-m", "rl_caption", *words]
    with subprocess.Popen(
        command_line, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield server, server.stdout.readline().split()[0]
        finally:
            server.terminate()


def memory_an_hour_on(
    server: psutil.Process, ask: Callable[[], None], seconds: float
) -> Measurement:
    """Ask until the server's memory has settled, then for ``seconds`` more; its growth, extrapolated to an hour."""

    def memory_after(duration: float) -> float:
        end = time.monotonic() + duration
        while time.monotonic() < end:
            ask()
        return float(server.memory_info().rss / 2**20)

    start = time.monotonic()
    first = before = memory_after(1.0)
    while (settled := memory_after(SETTLED_SECONDS)) - before >= SETTLED_MIB:
        before = settled
        if time.monotonic() - start > UNSETTLED_SECONDS:
            break
    warm_up = time.monotonic() - start
    begin = time.monotonic()
    hour = (memory_after(seconds) - settled) / (time.monotonic() - begin) * 3600
    detail = (
        f"{first:.0f} MiB at first, {settled:.0f} MiB after {warm_up:.0f} s, then growing by {hour:.0f} MiB an hour "
        f"(extrapolated from {seconds:.0f} s)"
    )
    return Measurement(
        "memory an hour on", "after it has settled", 1 + hour / settled, "x as large", detail
    )


if __name__ == "__main__":
    command(__doc__, measure, workers=8, captions=40, memory_seconds=60.0)
