"""The reward server against the same reward called in process.

    python -m benchmarks.serve [--workers 8] [--captions 40] [--json FILE]

The reward is 0.5 CIDEr-D + 0.5 RefL-CLIPScore by a small L-CLIP with random weights; ``rl-caption
serve`` is a process of its own. ``workers`` threads ask at once for ``captions`` captions each, of
random 64-pixel photos below a folder of the server, again and again; in process the same captions
are scored by one call for each request, one after the other.
Also: the slowest of a hundred requests (p99) against the mean of all in process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
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


def measure(
    timing: Timing, workers: int = 8, captions: int = 40
) -> Iterator[Measurement]:
    """Time both; exits with a message if scores differ."""
    draw = np.random.default_rng(0)
    words = [f"word{number}" for number in range(2000)]
    references = [row["references"] for row in random_rows(words, IMAGES)]
    requests = []
    for _ in range(workers):
        rows = draw.integers(IMAGES, size=captions).tolist()
        requests.append(([references[row][draw.integers(5)] for row in rows], rows))
    latencies: list[float] = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(workers) as pool:
        folder = Path(name)
        reward = write_reward(folder, references, timing.device, draw)
        with served(folder) as url:
            client = RewardClient(url)

            def ask(texts: list[str], rows: list[int]) -> list[float]:
                start = time.perf_counter()
                images = [f"photos/{row}.png" for row in rows]
                columns = [references[row] for row in rows]
                scores = client.score(texts, image=images, references=columns)
                latencies.append(time.perf_counter() - start)
                return scores.total

            def call(texts: list[str], rows: list[int]) -> list[float]:
                images = [folder / f"{row}.png" for row in rows]
                columns = [references[row] for row in rows]
                return reward(None, texts, image=images, references=columns)

            variants = {
                "served": lambda: list(pool.map(ask, *zip(*requests, strict=True))),
                "in process": lambda: [call(*request) for request in requests],
            }
            scores = [variant() for variant in variants.values()]
            if not np.allclose(*scores, rtol=1e-5, atol=1e-6):
                raise SystemExit("scores differ")
            latencies.clear()
            times = timed(variants, timing, "reward server")
    speed = workers * captions / statistics.median(times["served"])
    note = f"; {speed:.0f} captions/s, {workers} workers x {captions} captions"
    yield compared(times, "served", "in process", note=note)
    slow = float(np.quantile(latencies, 0.99))
    mean = statistics.mean(times["in process"])
    detail = f"{slow:.3g} s against {mean:.3g} s for all {workers} in process"
    baseline = f"{workers} calls in process"
    yield Measurement(
        "p99 of a served request", baseline, slow / mean, "x as long", detail
    )


def write_reward(
    folder: Path, references: list[list[str]], device: str, draw: np.random.Generator
) -> MixedReward:
    """Write photos, document frequencies, L-CLIP and ``mix.yaml`` into ``folder``; the same reward
    in this process.
    """
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
    terms = {
        "cider": {"weight": 0.5},
        "ref_l_clipscore": {"weight": 0.5, "kwargs": student},
    }
    (folder / "mix.yaml").write_text(
        json.dumps({"df": str(folder / "df.npz"), "terms": terms})
    )
    rewards = {
        "cider": (build("cider", df=df), 0.5),
        "ref_l_clipscore": (build("ref_l_clipscore", **student), 0.5),
    }
    return MixedReward(rewards)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of ``rl-caption serve`` of ``mix.yaml`` with as many CPU threads as this process
    has.
    """
    words = f"serve --reward {folder}/mix.yaml --images.photos {folder} --port 0"
    line = [sys.executable, "-m", "rl_caption", *words.split()]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0]
        finally:
            server.terminate()


if __name__ == "__main__":
    command(__doc__, measure, workers=8, captions=40)
