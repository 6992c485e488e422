"""Captions as many and as various as COCO's, drawn from a trigram model, in a file and in Karpathy's format."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from benchmarks.cider import in_letters
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.tokenize import tokenize

CAPTIONS = 5
"""Of an image."""


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


def write_splits(folder: Path) -> None:
    """Write these captions as ``dataset.json``, with all that Karpathy's file of COCO says of an image."""
    with open(folder / "dataset.json", "w") as file:
        file.write('{"dataset": "coco", "images": [')
        for number, captions in enumerate(read_captions(folder)):
            ids = range(CAPTIONS * number, CAPTIONS * (number + 1))
            sentences = [
                {"tokens": caption.split(), "raw": f"{caption} .", "imgid": number, "sentid": sentence}
                for sentence, caption in zip(ids, captions, strict=True)
            ]
            record = {
                "filepath": "train2014", "filename": f"COCO_train2014_{number:012d}.jpg", "imgid": number,
                "cocoid": number, "split": "train", "sentids": list(ids), "sentences": sentences,
            }  # fmt: skip
            file.write(", " * (number > 0) + json.dumps(record))
        file.write("]}")
