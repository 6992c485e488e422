"""How fast images reach the model: JPEG files of 640 x 480 to batches of 224 x 224 pixels, in this process.

    python -m benchmarks.loading [--images 64] [--json FILE]

The baseline opens, decodes and resizes each image with Pillow's defaults, as a short data set class does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.harness import Measurement, Timing, add_timing, faster, report, timed, timing_of
from rl_caption.captioners.transformer import TransformerCaptioner
from rl_caption.data.base import Row
from rl_caption.data.loader import Collate

SIZE = 224


def write_images(folder: Path, count: int) -> list[Path]:
    """JPEG files of coloured blots."""
    draw = np.random.default_rng(0)
    paths = [folder / f"{number}.jpg" for number in range(count)]
    for path in paths:
        blots = Image.fromarray(draw.integers(0, 256, (60, 80, 3), dtype=np.uint8))
        blots.resize((640, 480), Image.Resampling.BICUBIC).save(path, quality=90)
    return paths


def load_plainly(paths: Sequence[Path]) -> torch.Tensor:
    """Baseline: [B, 3, S, S] in [-1, 1]."""
    images = [Image.open(path).convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC) for path in paths]
    pixels = [torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1 for image in images]
    return torch.stack(pixels)


def measure(images: int, timing: Timing) -> list[Measurement]:
    """A batch of all images: decoded anew, and from the cache of decoded images."""
    with tempfile.TemporaryDirectory() as name:
        paths = write_images(Path(name), images)
        rows: list[Row] = [{"image_id": path.name, "image": str(path), "references": ["a"]} for path in paths]
        shape = {"image_size": SIZE, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2}
        variants: dict[str, Callable[[], object]] = {"Pillow": partial(load_plainly, paths)}
        for what, size in (("decoded anew", 0), ("from the cache", 2**30)):
            captioner = TransformerCaptioner.from_scratch([["a"]], min_count=1, cache_bytes=size, **shape)
            variants[what] = partial(Collate(captioner), [(row, 0) for row in rows])
        times = timed(variants, timing, "loading images")
    found = []
    for what in list(variants)[1:]:
        each = images / sorted(times[what])[len(times[what]) // 2]
        found.append(faster(times, what, "Pillow", f"; {each:.0f} images/s"))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_timing(parser)
    parser.add_argument("--images", type=int, default=64)
    chosen = parser.parse_args(arguments)
    report([measure(chosen.images, timing_of(parser, chosen))], chosen.json, chosen.device)


if __name__ == "__main__":
    main()
