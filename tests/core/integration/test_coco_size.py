"""Cross-entropy on a data set of COCO's size reaches its first step in bounded time and memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.training_for_tests import lines, xe_config

IMAGES = {"train": 82_783, "restval": 30_504, "val": 5_000, "test": 5_000}
CAPTIONS = 616_767
LINKED = 10
"""Files that the images are links to, as a file may have 65,000."""
CPU_SECONDS, GIGABYTES = 45.0, 1.2
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime, used.ru_maxrss)
"""
"""A small process between: a child's peak memory begins with that of the process that starts it."""


def write_coco(folder: Path) -> Path:
    """Karpathy JSON with as many images and captions as COCO; all images are links."""
    photos = folder / "images"
    photos.mkdir(parents=True)
    for number in range(LINKED):
        Image.new("RGB", (64, 48), "green").save(photos / f"{number}.jpg")
    splits = [split for split, count in IMAGES.items() for _ in range(count)]
    six = CAPTIONS - 5 * len(splits)
    path = folder / "dataset_coco.json"
    with path.open("w") as file:
        for number, split in enumerate(splits):
            if number >= LINKED:
                os.link(photos / f"{number % LINKED}.jpg", photos / f"{number}.jpg")
            sentences = []
            for text in range(5 + (number < six)):
                words = [f"word{(number * (at + 3) + text) % 9000}" for at in range(10)]
                sentences.append({"raw": " ".join(words), "tokens": words})
            record = {"filename": f"{number}.jpg", "cocoid": number, "split": split}
            file.write('{"images": [' if number == 0 else ",\n")
            file.write(json.dumps({**record, "sentences": sentences}))
        file.write("]}")
    return path


@pytest.mark.slow
def test_the_first_step_is_soon_reached(tmp_path):
    data = {
        "path": str(write_coco(tmp_path)),
        "image_root": "images",
        "check_images": False,
    }
    config = xe_config(
        tmp_path / "run", data=data, **{"train.max_steps": 1, "eval.max_images": 8}
    )
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = [
        sys.executable,
        "-m",
        "rl_caption",
        "xe",
        "--config",
        str(tmp_path / "config.yaml"),
    ]
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, *command],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds, kibibytes = map(float, measured.stdout.splitlines()[-1].split())
    assert [
        line["step"] for line in lines(tmp_path / "run") if "loss/total" in line
    ] == [1]
    assert seconds <= CPU_SECONDS
    assert kibibytes / 2**20 <= GIGABYTES
