"""Images a second: JPEG files of 640 x 480 to batches of 224 x 224 pixels, in one process.

    python -m benchmarks.loading [--images 64] [--json FILE]

The baseline opens, decodes and resizes each image with Pillow's defaults, as a short dataset class does.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.harness import Measurement, Timing, command, compared, timed
from rl_caption.captioners.transformer import TransformerCaptioner
from rl_caption.data.base import Row
from rl_caption.data.loader import Collate

SIZE = 224


def write_images(folder: Path, count: int) -> list[Path]:
    """JPEG files of random colours, upsampled from 80 x 60."""
    draw = np.random.default_rng(0)
    paths = [folder / f"{number}.jpg" for number in range(count)]
    for path in paths:
        small = Image.fromarray(draw.integers(0, 256, (60, 80, 3), dtype=np.uint8))
        small.resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=90)
    return paths


def load_plainly(paths: Sequence[Path]) -> torch.Tensor:
    """Baseline: pixels [B, 3, S, S] in [-1, 1]."""
    images = [Image.open(path).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC) for path in paths]
    pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1 for image in images]
    return torch.stack(pixels)


def measure(timing: Timing, images: int = 64) -> Iterator[Measurement]:
    """One batch of all images: decoded from the files, and from the cache of decoded images."""
    with tempfile.TemporaryDirectory() as name:
        paths = write_images(Path(name), images)
        rows: list[Row] = [{"image_id": path.name, "image": str(path), "references": ["a"]} for path in paths]
        shape = {"image_size": SIZE, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2}
        variants: dict[str, Callable[[], object]] = {"Pillow": partial(load_plainly, paths)}
        for what, size in (("images, decoded", 0), ("images, cached", 2**30)):
            captioner = TransformerCaptioner.from_scratch([["a"]], min_count=1, cache_bytes=size, **shape)
            variants[what] = partial(Collate(captioner), [(row, 0) for row in rows])
        times = timed(variants, timing, "loading images")
    for what in list(variants)[1:]:
        yield compared(times, what, "Pillow", note=f"; {images / statistics.median(times[what]):.0f} images/s")


if __name__ == "__main__":
    command(__doc__, measure, images=64)
