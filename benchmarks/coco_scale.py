"""CIDEr-D's document frequencies and caches at the size of COCO's training split: 113,287 images, five captions each.

    python -m benchmarks.coco_scale [--images 113287] [--references FILE] [--repeats 1] [--json FILE]

Captions are drawn from a trigram model of the captions in FILE (COCO's format) or of a built-in grammar's, with some
rare words strewn in. Every step is measured in a process of its own, against what users of pycocoevalcap's scorer do:
a dict of tuples, pickled, and its ``CiderScorer``. Peak memory is that of the process less what it had before.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from pycocoevalcap.cider.cider_scorer import CiderScorer, precook
from tqdm import tqdm

from benchmarks.cider import in_letters
from benchmarks.harness import Measurement, Timing, add_timing, paired, report, timing_of
from rewards.text.cider import CiderD
from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.tokenize import tokenize

COCO_IMAGES = 113_287
CAPTIONS = 5
BATCH = 50
Figures = dict[str, float]


# Captions


def seed_captions(path: Path | None) -> list[list[str]]:
    """Tokens of the captions that the model is made of."""
    if path is not None:
        return [tokenize(item["caption"]) for item in json.loads(path.read_text())["annotations"]]
    draw = np.random.default_rng(0)

    def some(kind: str, count: int) -> np.ndarray:
        return np.array([f"{kind}-{in_letters(int(number))}" for number in np.minimum(draw.zipf(1.3, 20_000), count)])

    parts = [some("adjective", 400), some("noun", 3000), some("verb", 600), some("preposition", 20), some("noun", 3000)]
    return [
        ["a", *(() if short else (adjective,)), noun, verb, preposition, "the", other]
        for short, adjective, noun, verb, preposition, other in zip(draw.random(20_000) < 0.4, *parts, strict=True)
    ]


class TrigramModel:
    """Next words after two words as often as in the captions it is made of; in some draws after one word."""

    backoff = 0.3
    rare_words, rare = 20_000, 0.004

    def __init__(self, captions: Sequence[Sequence[str]]) -> None:
        """Count what follows what."""
        self.words = ["", *sorted({word for tokens in captions for word in tokens})]  # 0: begin and end
        number = {word: index for index, word in enumerate(self.words)}
        flat = [index for tokens in captions for index in (0, 0, *map(number.__getitem__, tokens), 0)]
        words = np.array(flat)
        inner = np.repeat(True, len(words) - 2)
        lengths = np.cumsum([len(tokens) + 3 for tokens in captions])[:-1]
        inner[lengths - 2] = inner[lengths - 1] = False  # trigrams that reach into the next caption
        triples = np.stack([words[:-2], words[1:-1], words[2:]])[:, inner]
        self.pairs = triples[0] * len(self.words) + triples[1]
        ranks = np.argsort(self.pairs, kind="stable")
        self.pairs, self.after_pair = self.pairs[ranks], triples[2][ranks]
        ranks = np.argsort(triples[1], kind="stable")
        self.singles, self.after_single = triples[1][ranks], triples[2][ranks]

    def draw(self, count: int, seed: int, longest: int = 30) -> list[list[str]]:
        """Captions of 1 to ``longest`` words."""
        draw = np.random.default_rng(seed)
        before, last = np.zeros(count, np.int64), np.zeros(count, np.int64)
        steps = []
        for _ in range(longest):
            chosen = self._next(self.pairs, self.after_pair, before * len(self.words) + last, draw)
            other = self._next(self.singles, self.after_single, last, draw)
            chosen = np.where((draw.random(count) < self.backoff) & (last > 0), other, chosen)
            if steps:
                chosen[steps[-1] == 0] = 0
            steps.append(chosen)
            before, last = last, chosen
        drawn = np.stack(steps, 1)
        tail = np.minimum(draw.zipf(1.2, drawn.shape), self.rare_words) + len(self.words) - 1
        drawn = np.where((drawn > 0) & (draw.random(drawn.shape) < self.rare), tail, drawn)
        words = [*self.words, *(f"rare-{in_letters(number)}" for number in range(self.rare_words))]
        return [[words[index] for index in row if index] or ["empty"] for row in drawn.tolist()]

    @staticmethod
    def _next(contexts: np.ndarray, after: np.ndarray, wanted: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        low, high = np.searchsorted(contexts, wanted), np.searchsorted(contexts, wanted, side="right")
        return after[np.minimum(low + (draw.random(len(wanted)) * (high - low)).astype(np.int64), len(after) - 1)]


def write_captions(folder: Path, images: int, references: Path | None) -> str:
    """Write ``captions.txt``, a line each, five lines an image; say how they compare with those of the model."""
    seeds = seed_captions(references)
    model = TrigramModel(seeds)
    part = 20_000
    with open(folder / "captions.txt", "w") as file:
        for seed in tqdm(range(-(-images // part)), "captions", leave=False, disable=None):
            drawn = model.draw(CAPTIONS * min(part, images - seed * part), seed)
            file.writelines(" ".join(tokens) + "\n" for tokens in drawn)
    alike = model.draw(len(seeds), 10**6)
    made, real = (len(DocumentFrequencies.from_references([part], eos=True)) for part in (alike, seeds))
    return f"as many captions as the model is made of have {made / real:.2f}x as many different n-grams as those"


def read_captions(folder: Path, images: int | None = None) -> Iterator[list[str]]:
    """The captions of each image."""
    with open(folder / "captions.txt") as file:
        lines = (line.rstrip("\n") for line in file)
        yield from itertools.islice(map(list, zip(*[lines] * CAPTIONS, strict=True)), images)


# What is measured, each in a process of its own


def count_arrays(folder: Path) -> tuple[object, Callable[[], object]]:
    """Tokenise and count."""
    tokens = ([tokenize(caption) for caption in captions] for captions in read_captions(folder))
    df = DocumentFrequencies.from_references(tokens, eos=True)
    return df, lambda: df.save(folder / "df.npz")


def count_plain(folder: Path) -> tuple[object, Callable[[], object]]:
    """The same as pycocoevalcap counts, without keeping every caption's n-grams as it does."""
    counts: defaultdict[tuple[str, ...], float] = defaultdict(float)
    images = 0
    for captions in read_captions(folder):
        images += 1
        for ngram in {ngram for caption in captions for ngram in precook(f"{caption} {EOS}", 4)}:
            counts[ngram] += 1

    def save() -> None:
        with open(folder / "df.p", "wb") as file:
            pickle.dump({"document_frequency": dict(counts), "ref_len": images}, file, pickle.HIGHEST_PROTOCOL)

    return counts, save


def load_arrays(folder: Path) -> DocumentFrequencies:
    """Read the file of arrays."""
    return DocumentFrequencies.load(folder / "df.npz")


def load_plain(folder: Path) -> defaultdict[tuple[str, ...], float]:
    """Read the pickle that ``count_plain`` wrote."""
    with open(folder / "df.p", "rb") as file:
        return defaultdict(float, pickle.load(file)["document_frequency"])


def batches(folder: Path) -> list[tuple[list[str], list[list[str]]]]:
    """Two batches of 50 images: five captions of each, taken from the next image, and each caption's references."""
    images = list(read_captions(folder, 3 * BATCH))
    found = []
    for start in (0, BATCH):
        captions = [caption for own in images[start + 1 : start + 1 + BATCH] for caption in own]
        found.append((captions, [own for own in images[start : start + BATCH] for _ in range(CAPTIONS)]))
    return found


def ready_arrays(folder: Path) -> Callable[[list[str], list[list[str]]], list[float]]:
    """The reward, from a file."""
    reward = CiderD(load_arrays(folder))
    reward(None, ["a"], references=[next(read_captions(folder, 1))])
    return lambda captions, references: reward(None, captions, references=references)


def ready_plain(folder: Path) -> Callable[[list[str], list[list[str]]], list[float]]:
    """pycocoevalcap's scorer with frequencies from a pickle."""
    counts = load_plain(folder)

    def score(captions: list[str], references: list[list[str]]) -> list[float]:
        scorer = CiderScorer(n=4, sigma=6.0)
        for caption, own in zip(captions, references, strict=True):
            scorer += (f"{caption} {EOS}", [f"{reference} {EOS}" for reference in own])
        scorer.document_frequency = counts
        return list(scorer.compute_cider())

    return score


COUNT = {"arrays": count_arrays, "plain": count_plain}
LOAD: dict[str, Callable[[Path], object]] = {"arrays": load_arrays, "plain": load_plain}
READY = {"arrays": ready_arrays, "plain": ready_plain}


def memory_mb(peak: bool = False) -> float:
    """Memory of this process in MB, now or at its peak."""
    key = "VmHWM" if peak else "VmRSS"  # getrusage's peak would be the parent's, where that is higher
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024 / 1e6


def child(task: str, variant: str, folder: Path, cpu_time: bool) -> Figures:
    """Measure one task in this process."""
    clock = time.process_time if cpu_time else time.perf_counter
    before, start = memory_mb(), clock()
    found: Figures = {}
    if task == "count":
        kept, save = COUNT[variant](folder)
        found["seconds"] = clock() - start
        found["peak_mb"] = memory_mb(peak=True) - before
        start = clock()
        save()
        found["save_seconds"] = clock() - start
        found["save_peak_mb"] = memory_mb(peak=True) - before
        found["ngrams"] = len(kept)  # type: ignore[arg-type]
    elif task == "load":
        kept = LOAD[variant](folder)
        found["seconds"] = clock() - start
        found["peak_mb"] = memory_mb(peak=True) - before
    else:
        score = READY[variant](folder)
        found["seconds"] = clock() - start
        found["peak_mb"] = memory_mb(peak=True) - before
        for name, batch in zip(("first", "other"), batches(folder), strict=True):
            gc.collect()
            start = clock()
            score(*batch)
            found[f"{name}_seconds"] = clock() - start
        start = clock()
        score(*batch)
        found["again_seconds"] = clock() - start
    return found


def cache_figures(folder: Path, images: int) -> Figures:
    """Memory of the weighted references of ``images`` images, and how long it takes to weigh them."""
    reward = CiderD(load_arrays(folder), cache_images=images)
    read = read_captions(folder, images)
    reward(None, ["a"] * BATCH, references=list(itertools.islice(read, BATCH)))
    every = list(read)
    gc.collect()
    before, start = memory_mb(), time.perf_counter()
    for first in range(0, len(every), BATCH):
        own = every[first : first + BATCH]
        reward(None, ["a"] * len(own), references=own)
    return {"seconds": time.perf_counter() - start, "bytes": (memory_mb() - before) * 1e6 / len(every)}


# The table


def run(task: str, variant: str, folder: Path, timing: Timing, images: int) -> Figures:
    """Figures of a process that does one task."""
    command = [sys.executable, "-m", "benchmarks.coco_scale", "--task", task, "--variant", variant]
    command += ["--folder", str(folder), "--images", str(images), *(["--cpu-time"] * timing.cpu_time)]
    command += ["--threads", "1"] * timing.cpu_time
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def compared(task: str, timing: Timing, folder: Path, images: int) -> dict[str, list[Figures]]:
    """Figures of both ways, in turn."""
    found: dict[str, list[Figures]] = {"arrays": [], "plain": []}
    for _ in range(timing.repeats):
        for variant, figures in found.items():
            figures.append(run(task, variant, folder, timing, images))
    return found


def ratio(
    found: dict[str, list[Figures]], key: str, name: str, baseline: str, unit: str, note: str = ""
) -> Measurement:
    """How many times as fast, or as small, as the plain way."""
    ours, plain = ([figures[key] for figures in found[variant]] for variant in ("arrays", "plain"))
    ratios = paired(plain, ours)
    what = "s" if key.endswith("seconds") else "MB"
    detail = f"{statistics.median(ours):.3g} {what} against {statistics.median(plain):.3g} {what}{note}"
    return Measurement(name, baseline, statistics.median(ratios), unit, detail)


def measure(images: int, references: Path | None, timing: Timing, folder: Path) -> list[Measurement]:
    """All rows."""
    print(f"writing {images * CAPTIONS} captions", file=sys.stderr, flush=True)
    note = write_captions(folder, images, references)
    size = (folder / "captions.txt").stat().st_size / 1e6
    counted = compared("count", timing, folder, images)
    ngrams = counted["arrays"][0]["ngrams"]
    assert ngrams == counted["plain"][0]["ngrams"], "both ways count the same n-grams"
    detail = f"; {images} images, {ngrams / 1e6:.2f} million n-grams of {size:.0f} MB of captions; {note}"
    rows = [
        ratio(counted, "seconds", "document frequencies counted", "dict of tuples", "x as fast", detail),
        ratio(counted, "peak_mb", "memory to count them", "dict of tuples", "x less"),
        ratio(counted, "save_seconds", "written", "pickle", "x as fast"),
    ]
    disk = [(folder / name).stat().st_size / 1e6 for name in ("df.npz", "df.p")]
    rows.append(
        Measurement("their file", "pickle", disk[1] / disk[0], "x less", f"{disk[0]:.3g} MB against {disk[1]:.3g} MB")
    )
    loaded = compared("load", timing, folder, images)
    rows += [
        ratio(loaded, "seconds", "read", "pickle", "x as fast"),
        ratio(loaded, "peak_mb", "memory to read them", "pickle", "x less"),
    ]
    ready = compared("ready", timing, folder, images)
    scorer = "pycocoevalcap's scorer"
    rows += [
        ratio(ready, "seconds", "CIDEr-D from the file to its first score", scorer, "x as fast"),
        ratio(ready, "peak_mb", "memory of that", scorer, "x less"),
        ratio(ready, "first_seconds", "first batch, 250 captions of 50 images", scorer, "x as fast"),
        ratio(ready, "other_seconds", "a batch of other images", scorer, "x as fast"),
        ratio(ready, "again_seconds", "a batch of known images", scorer, "x as fast"),
    ]
    some = min(images, 40_000)
    kept = run("cache", "arrays", folder, timing, some)
    detail = f"{kept['bytes'] / 1e3:.3g} kB an image, {kept['seconds']:.3g} s to weigh those of {some} images"
    whole = kept["bytes"] * COCO_IMAGES / 1e9
    return [*rows, Measurement("references of 113,287 images in the cache", "1 GB", whole, "x the memory", detail)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_timing(parser, repeats=1)
    parser.add_argument("--images", type=int, default=COCO_IMAGES)
    parser.add_argument("--references", type=Path, help="captions in COCO's format; a built-in grammar by default")
    for name in ("--task", "--variant"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.images < 3 * BATCH:
        parser.error(f"--images is {chosen.images}: expected at least {3 * BATCH}")
    if chosen.task == "cache":
        print(json.dumps(cache_figures(chosen.folder, chosen.images)))
    elif chosen.task:
        print(json.dumps(child(chosen.task, chosen.variant, chosen.folder, chosen.cpu_time)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(chosen.images, chosen.references, timing_of(parser, chosen), Path(folder))
        report([rows], chosen.json, chosen.device)


if __name__ == "__main__":
    main()
