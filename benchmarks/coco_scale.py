"""Reading, document frequencies and caches at the size of COCO's training split: 113,287 images, five captions each.

    python -m benchmarks.coco_scale [--images 113287] [--references FILE] [--repeats 1] [--json FILE]

Captions are drawn from a trigram model of the captions in FILE (COCO's format) or of a built-in grammar's, with some
rare words strewn in. Every step is measured in a process of its own, against what users of pycocoevalcap's scorer do:
a dict of tuples, pickled, and its ``CiderScorer``; reading Karpathy's JSON, against ``json.loads`` of all of it. Peak
memory is that of the process less what it had before.
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
from collections.abc import Callable, Sequence
from pathlib import Path

from pycocoevalcap.cider.cider_scorer import CiderScorer, precook

from benchmarks.coco_captions import CAPTIONS, read_captions, write_captions, write_splits
from benchmarks.harness import Measurement, Timing, add_timing, paired, report, timing_of
from rewards.text.cider import CiderD
from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.tokenize import tokenize
from rl_caption.data.base import Row
from rl_caption.data.karpathy import KarpathyData

COCO_IMAGES = 113_287
BATCH = 50
Figures = dict[str, float]


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


def splits_streamed(folder: Path) -> Sequence[Row]:
    """Rows of Karpathy's JSON, as trainings read them."""
    return KarpathyData(folder).split("train")


def splits_whole(folder: Path) -> list[Row]:
    """The same rows of all of the JSON at once."""
    records = json.loads((folder / "dataset.json").read_bytes())["images"]
    return [
        {
            "image_id": str(record["cocoid"]),
            "image": str(folder / record["filepath"] / record["filename"]),
            "references": [sentence["raw"] for sentence in record["sentences"]],
        }
        for record in records
    ]


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
LOAD: dict[str, dict[str, Callable[[Path], object]]] = {
    "load": {"arrays": load_arrays, "plain": load_plain},
    "splits": {"arrays": splits_streamed, "plain": splits_whole},
}
READY = {"arrays": ready_arrays, "plain": ready_plain}


def memory_mb(peak: bool = False) -> float:
    """Memory of this process in MB, now or at its peak."""
    key = "VmHWM" if peak else "VmRSS"  # getrusage's peak would be the parent's, where that is higher
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024 / 1e6


def grown_mb(before: float, peak: bool = False) -> float:
    """How much memory has grown; a page at least, as tiny corpora find room in what the process has."""
    return max(memory_mb(peak) - before, 0.004)


def child(task: str, variant: str, folder: Path, cpu_time: bool) -> Figures:
    """Measure one task in this process."""
    clock = time.process_time if cpu_time else time.perf_counter
    before, start = memory_mb(), clock()
    found: Figures = {}
    if task == "count":
        kept, save = COUNT[variant](folder)
        found["seconds"] = clock() - start
        found["peak_mb"] = grown_mb(before, peak=True)
        start = clock()
        save()
        found["save_seconds"] = clock() - start
        found["save_peak_mb"] = grown_mb(before, peak=True)
        found["ngrams"] = len(kept)  # type: ignore[arg-type]
    elif task in LOAD:
        kept = LOAD[task][variant](folder)
        found["seconds"] = clock() - start
        found["peak_mb"] = grown_mb(before, peak=True)
        found["kept_mb"] = grown_mb(before)
    else:
        score = READY[variant](folder)
        found["seconds"] = clock() - start
        found["peak_mb"] = grown_mb(before, peak=True)
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
    write_splits(folder)
    size = (folder / "dataset.json").stat().st_size / 1e6
    splits = compared("splits", timing, folder, images)
    rows += [
        ratio(splits, "seconds", f"Karpathy's JSON ({size:.0f} MB) to rows", "json.loads", "x as fast"),
        ratio(splits, "peak_mb", "memory while it is read", "json.loads", "x less"),
        ratio(splits, "kept_mb", "memory of the process from then on", "json.loads", "x less"),
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
