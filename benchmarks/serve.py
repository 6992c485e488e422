"""The reward server against the same reward called in process.

    python -m benchmarks.serve [--workers 8] [--captions 40] [--json FILE]

The reward is 0.5 CIDEr-D + 0.5 RefL-CLIPScore by a small L-CLIP with random weights. ``workers`` threads ask at once
for ``captions`` captions each, of random 64-pixel photos below a folder of the server, again and again; in process the
same captions are scored by one call for each request, one after the other. Also: the slowest of a hundred requests
(p99) against the mean of all in process, and memory of the process an hour on, extrapolated from the run.
"""

import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch
import uvicorn
from PIL import Image

from benchmarks.harness import Measurement, Timing, command, compared, timed
from benchmarks.scst_step import random_rows
from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.mixed import MixedReward
from rewards.registry import build
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.integrations.client import RewardClient
from rl_caption.integrations.config import ServeConfig
from rl_caption.integrations.server import build_app

IMAGES = 100


def measure(timing: Timing, workers: int = 8, captions: int = 40) -> Iterator[Measurement]:
    """Time both; exits with a message if scores differ."""
    draw = np.random.default_rng(0)
    references = [row["references"] for row in random_rows([f"word{number}" for number in range(2000)], IMAGES)]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(IMAGES):
            pixels = draw.integers(0, 255, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(Path(folder, f"{number}.png"))
        torch.manual_seed(0)
        shape = LCLIPConfig(image_width=256, image_heads=4, text_width=256, text_heads=4, embedding_rank=64)
        LCLIP(shape).save_pretrained(Path(folder, "lclip"))
        df = DocumentFrequencies.from_texts(references, eos=True)
        student = build("ref_l_clipscore", backbone=str(Path(folder, "lclip")), device=timing.device)
        reward = MixedReward({"cider": (build("cider", df=df), 0.5), "ref_l_clipscore": (student, 0.5)})
        requests = []
        for _ in range(workers):
            rows = draw.integers(IMAGES, size=captions)
            texts = [references[row][draw.integers(5)] for row in rows]
            requests.append((texts, rows))

        def in_process() -> list[list[float]]:
            return [
                reward(
                    None,
                    texts,
                    image=[Path(folder, f"{row}.png") for row in rows],
                    references=[references[row] for row in rows],
                )
                for texts, rows in requests
            ]

        app = build_app(ServeConfig(images={"photos": folder}), reward)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        with socket.socket() as listener, ThreadPoolExecutor(workers) as pool:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            running = threading.Thread(target=server.run, args=([listener],), daemon=True)
            running.start()
            client = RewardClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
            latencies: list[float] = []

            def ask(texts: list[str], rows: np.ndarray) -> list[float]:
                start = time.perf_counter()
                scores = client.score(
                    texts,
                    image=[f"photos/{row}.png" for row in rows],
                    references=[references[row] for row in rows],
                )
                latencies.append(time.perf_counter() - start)
                return scores.total

            def served() -> list[list[float]]:
                return list(pool.map(ask, *zip(*requests, strict=True)))

            if not np.allclose(served(), in_process(), rtol=1e-5, atol=1e-6):
                raise SystemExit("scores differ")
            for _ in range(3):  # caches and allocators settle
                served()
            latencies.clear()
            before = psutil.Process().memory_info().rss
            times = timed({"served": served, "in process": in_process}, timing, "reward server")
            growth = psutil.Process().memory_info().rss - before
            server.should_exit = True
            running.join()
    count = workers * captions
    note = f"; {count / statistics.median(times['served']):.0f} captions/s, {workers} workers x {captions} captions"
    yield compared(times, "served", "in process", note=note)
    slow, mean = float(np.quantile(latencies, 0.99)), statistics.mean(times["in process"])
    detail = f"{slow:.3g} s against {mean:.3g} s for all {workers} in process"
    yield Measurement("p99 of a served request", f"{workers} calls in process", slow / mean, "x as long", detail)
    hour = growth / sum(times["served"] + times["in process"]) * 3600
    detail = f"{before / 2**20:.0f} MiB, growing by {hour / 2**20:.0f} MiB an hour (extrapolated)"
    yield Measurement("memory an hour on", "after warm-up", 1 + hour / before, "x as large", detail)


if __name__ == "__main__":
    command(__doc__, measure, workers=8, captions=40)
