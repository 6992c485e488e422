"""Document frequencies at the size of COCO's training split: 113,287 images, five captions each.

    python -m benchmarks.studies.coco_scale [--images 113287] [--references FILE] [--repeats 1] [--json FILE]

Captions are drawn from a trigram model of the captions in FILE (COCO's format) or of a built-in grammar, with some rare
words. Every task is measured in a process of its own, against what users of pycocoevalcap do: a dict of tuples,
pickled, and its ``CiderScorer``. Peak memory is that of the process less what it had before the task.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from pycocoevalcap.cider.cider_scorer import CiderScorer, precook

from benchmarks.cider import in_letters
from benchmarks.harness import Measurement, Timing, command, paired
from rewards.text.cider import CiderD
from rewards.text.document_frequency import EOS, DocumentFrequencies
from rewards.text.tokenize import tokenize

COCO_IMAGES, CAPTIONS, BATCH = 113_287, 5, 50
Score = Callable[[list[str], list[list[str]]], object]


def grammar_captions() -> list[list[str]]:
    """Tokens of 20,000 captions of a noun, a verb and another noun."""
    draw = np.random.default_rng(0)

    def some(kind: str, count: int) -> list[str]:
        return [f"{kind}-{in_letters(int(number))}" for number in np.minimum(draw.zipf(1.3, 20_000), count)]

    parts = [some("adjective", 400), some("noun", 3000), some("verb", 600), some("preposition", 20), some("noun", 3000)]
    return [
        ["a", *(() if short else (adjective,)), noun, verb, preposition, "the", other]
        for short, adjective, noun, verb, preposition, other in zip(draw.random(20_000) < 0.4, *parts, strict=True)
    ]


class TrigramModel:
    """The next word after two words, as often as in given captions; in some draws after one word."""

    backoff = 0.3
    rare_words, rare = 20_000, 0.004

    def __init__(self, captions: Sequence[Sequence[str]]) -> None:
        self.words = ["", *sorted({word for tokens in captions for word in tokens})]  # 0: begin and end
        number = {word: index for index, word in enumerate(self.words)}
        words = np.array([index for tokens in captions for index in (0, 0, *map(number.__getitem__, tokens), 0)])
        inner = np.repeat(True, len(words) - 2)
        ends = np.cumsum([len(tokens) + 3 for tokens in captions])[:-1]
        inner[ends - 2] = inner[ends - 1] = False  # trigrams that reach into the next caption
        first, second, third = np.stack([words[:-2], words[1:-1], words[2:]])[:, inner]
        pairs = first * len(self.words) + second
        self.after_pair, self.after_word = (
            (contexts[ranks], third[ranks])
            for contexts in (pairs, second)
            for ranks in (np.argsort(contexts, kind="stable"),)
        )

    def draw(self, count: int, seed: int, longest: int = 30) -> list[list[str]]:
        """Captions of 1 to ``longest`` words."""
        draw = np.random.default_rng(seed)

        def after(table: tuple[np.ndarray, np.ndarray], wanted: np.ndarray) -> np.ndarray:
            low, high = np.searchsorted(table[0], wanted), np.searchsorted(table[0], wanted, side="right")
            return table[1][np.minimum(low + (draw.random(count) * (high - low)).astype(np.int64), len(table[1]) - 1)]

        steps = [np.zeros(count, np.int64)] * 2
        for step in range(longest):
            chosen = after(self.after_pair, steps[-2] * len(self.words) + steps[-1])
            other = after(self.after_word, steps[-1])
            chosen = np.where((draw.random(count) < self.backoff) & (steps[-1] > 0), other, chosen)
            if step:
                chosen[steps[-1] == 0] = 0
            steps.append(chosen)
        drawn = np.stack(steps[2:], 1)
        tail = np.minimum(draw.zipf(1.2, drawn.shape), self.rare_words) + len(self.words) - 1
        drawn = np.where((drawn > 0) & (draw.random(drawn.shape) < self.rare), tail, drawn)
        words = [*self.words, *(f"rare-{in_letters(number)}" for number in range(self.rare_words))]
        return [[words[index] for index in row if index] or ["empty"] for row in drawn.tolist()]


def write_captions(folder: Path, images: int, references: str | None) -> None:
    """Write ``captions.txt``: a caption in a line, five lines for an image."""
    seeds = grammar_captions()
    if references is not None:
        seeds = [tokenize(item["caption"]) for item in json.loads(Path(references).read_text())["annotations"]]
    model, part = TrigramModel(seeds), 20_000
    with open(folder / "captions.txt", "w") as file:
        for start in range(0, images, part):
            drawn = model.draw(CAPTIONS * min(part, images - start), start // part)
            file.writelines(" ".join(tokens) + "\n" for tokens in drawn)


def read_captions(folder: Path, images: int | None = None) -> Iterator[list[str]]:
    """The captions of each image."""
    with open(folder / "captions.txt") as file:
        lines = (line.rstrip("\n") for line in file)
        yield from itertools.islice(map(list, zip(*[lines] * CAPTIONS, strict=True)), images)


def batches(folder: Path) -> list[tuple[list[str], list[list[str]]]]:
    """Two batches of 50 images: five captions of each, taken from the next image, and each caption's references."""
    images = list(read_captions(folder, 3 * BATCH))
    found = []
    for start in (0, BATCH):
        captions = [caption for own in images[start + 1 : start + 1 + BATCH] for caption in own]
        found.append((captions, [own for own in images[start : start + BATCH] for _ in range(CAPTIONS)]))
    return found


class Arrays:
    """This package."""

    file = "df.npz"

    def count(self, folder: Path) -> DocumentFrequencies:
        tokens = ([tokenize(caption) for caption in captions] for captions in read_captions(folder))
        return DocumentFrequencies.from_references(tokens, eos=True)

    def save(self, counted: DocumentFrequencies, folder: Path) -> None:
        counted.save(folder / self.file)

    def load(self, folder: Path) -> DocumentFrequencies:
        return DocumentFrequencies.load(folder / self.file)

    def ready(self, folder: Path) -> Score:
        reward = CiderD(self.load(folder))
        reward(None, ["a"], references=[next(read_captions(folder, 1))])
        return lambda captions, references: reward(None, captions, references=references)


class Tuples:
    """A dict of tuples as pycocoevalcap's scorer takes it, without keeping every caption's n-grams as it does."""

    file = "df.p"

    def count(self, folder: Path) -> dict[tuple[str, ...], float]:
        counts: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for captions in read_captions(folder):
            for ngram in {ngram for caption in captions for ngram in precook(f"{caption} {EOS}", 4)}:
                counts[ngram] += 1
        return counts

    def save(self, counted: dict[tuple[str, ...], float], folder: Path) -> None:
        (folder / self.file).write_bytes(pickle.dumps(dict(counted), pickle.HIGHEST_PROTOCOL))

    def load(self, folder: Path) -> defaultdict[tuple[str, ...], float]:
        return defaultdict(float, pickle.loads((folder / self.file).read_bytes()))

    def ready(self, folder: Path) -> Score:
        counts = self.load(folder)

        def score(captions: list[str], references: list[list[str]]) -> object:
            scorer = CiderScorer(n=4, sigma=6.0)
            for caption, own in zip(captions, references, strict=True):
                scorer += (f"{caption} {EOS}", [f"{reference} {EOS}" for reference in own])
            scorer.document_frequency = counts
            return scorer.compute_cider()

        return score


WAYS = {"arrays": Arrays(), "tuples": Tuples()}


def memory_mb(key: str) -> float:
    """Memory of this process in MB: VmRSS now, VmHWM at its peak (getrusage's would include the parent's)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) * 1024 / 1e6


def take(task: str, way: str, folder: Path) -> dict[str, float]:
    """Measure one task in this process."""
    before, start = memory_mb("VmRSS"), time.perf_counter()
    result = getattr(WAYS[way], task)(folder)
    found = {"s": time.perf_counter() - start, "MB": max(memory_mb("VmHWM") - before, 0.004)}  # a page at least
    if task == "count":
        start = time.perf_counter()
        WAYS[way].save(result, folder)
        found |= {"saved, s": time.perf_counter() - start, "n-grams": len(result)}
    elif task == "ready":
        first, other = batches(folder)
        for name, batch in {"first": first, "other": other, "again": other}.items():
            gc.collect()
            start = time.perf_counter()
            result(*batch)
            found[f"{name}, s"] = time.perf_counter() - start
    return found


def measure(timing: Timing, images: int = COCO_IMAGES, references: str | None = None) -> Iterator[Measurement]:
    """All rows; both ways in turn."""
    if images < 3 * BATCH:
        raise SystemExit(f"--images is {images}: expected at least {3 * BATCH}")
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        folder = Path(name)
        write_captions(folder, images, references)
        for task in ("count", "load", "ready"):
            found[task] = {way: [] for way in WAYS}
            for _ in range(timing.repeats):
                for way, figures in found[task].items():
                    figures.append(pool.submit(take, task, way, folder).result())
        sizes = [(folder / way.file).stat().st_size / 1e6 for way in WAYS.values()]
    (ngrams,) = {figures["n-grams"] for way in found["count"].values() for figures in way}
    scorer, note = "pycocoevalcap's scorer", f"; {images} images, {ngrams / 1e6:.2f} million n-grams"
    for task, key, what, baseline in (
        ("count", "s", "document frequencies counted", "dict of tuples"),
        ("count", "MB", "memory to count them", "dict of tuples"),
        ("count", "saved, s", "written", "pickle"),
        ("load", "s", "read", "pickle"),
        ("load", "MB", "memory to read them", "pickle"),
        ("ready", "s", "CIDEr-D from the file to its first score", scorer),
        ("ready", "first, s", "first batch, 250 captions of 50 images", scorer),
        ("ready", "other, s", "a batch of other images", scorer),
        ("ready", "again, s", "a batch of known images", scorer),
    ):
        ours, theirs = ([figures[key] for figures in found[task][way]] for way in WAYS)
        detail = f"{statistics.median(ours):.3g} against {statistics.median(theirs):.3g} {key[-2:].strip()}{note}"
        unit = "x less" if key == "MB" else "x as fast"
        yield Measurement(what, baseline, statistics.median(paired(theirs, ours)), unit, detail)
    yield Measurement("file", "pickle", sizes[1] / sizes[0], "x less", f"{sizes[0]:.3g} MB against {sizes[1]:.3g} MB")


if __name__ == "__main__":
    command(__doc__, measure, repeats=1, images=COCO_IMAGES, references=None)
