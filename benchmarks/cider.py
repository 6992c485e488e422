"""CIDEr-D as a reward against pycocoevalcap's Python scorer.

    python -m benchmarks.cider [--images 50] [--samples 5] [--references FILE] [--json FILE]

Both score the same captions against five references each, again and again as training does, with the same document
frequencies, counted before. Captions are random words, or those of FILE, a JSON of {"annotations": [{"image_id",
"caption"}]}. Scores must be equal to the last bit.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from pycocoevalcap.cider.cider_scorer import CiderScorer

from benchmarks.harness import Measurement, Timing, command, compared, timed
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies, ngram_counts
from rewards.text.tokenize import tokenize


def in_letters(number: int) -> str:
    """A word of letters for a number, which the tokenizer keeps as one token."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def read_captions(path: str | None, images: int) -> list[list[str]]:
    """Five tokenised captions of each image: random words without a file."""
    if path is None:
        draw = np.random.default_rng(0)
        words = [f"word-{in_letters(number)}" for number in range(2000)]
        return [[" ".join(draw.choice(words, draw.integers(8, 13))) for _ in range(5)] for _ in range(images)]
    grouped = defaultdict(list)
    for item in json.loads(Path(path).read_text())["annotations"]:
        grouped[item["image_id"]].append(" ".join(tokenize(item["caption"])))
    return [captions[:5] for captions in grouped.values() if len(captions) >= 5][:images]


def toolkit_scores(
    captions: Sequence[str], references: Sequence[Sequence[str]], counts: Mapping[tuple[str, ...], float]
) -> list[float]:
    """pycocoevalcap's scorer with cached document frequencies, as self-critical code bases use it."""
    scorer = CiderScorer(n=4, sigma=6.0)
    for caption, own in zip(captions, references, strict=True):
        scorer += (caption, own)
    scorer.document_frequency = counts
    return list(scorer.compute_cider())


def measure(timing: Timing, images: int = 50, samples: int = 5, references: str | None = None) -> Iterator[Measurement]:
    """Time both on captions that join the beginning of an own reference and the end of another image's."""
    corpus = read_captions(references, images)
    draw = np.random.default_rng(1)
    captions, columns = [], []
    for own in corpus:
        for _ in range(samples):
            other = corpus[draw.integers(len(corpus))][draw.integers(5)].split()
            captions.append(" ".join([*own[draw.integers(5)].split()[:6], *other[5:]]))
            columns.append(own)
    counted = DocumentFrequencies.from_references(([caption.split() for caption in own] for own in corpus), eos=False)
    every = (ngram for own in corpus for caption in own for ngram in ngram_counts(caption.split()))
    counts = defaultdict(float, {ngram: counted[ngram] for ngram in every})
    # The toolkit takes the number of captions that it scores for the number of documents.
    reward = CiderD(DocumentFrequencies(counts, float(np.log(float(len(captions)))), eos=False), eos=False)
    expected, found = toolkit_scores(captions, columns, counts), reward(None, captions, references=columns)
    if not np.array_equal(expected, found):
        raise SystemExit(f"scores differ by {np.abs(np.asarray(expected) - np.asarray(found)).max()}")
    ours, theirs = "CIDEr-D reward", "pycocoevalcap's scorer"
    variants: dict[str, Callable[[], object]] = {
        ours: partial(reward, None, captions, references=columns),
        theirs: partial(toolkit_scores, captions, columns, counts),
    }
    note = f"; {len(captions)} captions, 5 references each, scores equal to the bit"
    yield compared(timed(variants, timing, ours), ours, theirs, note=note)


if __name__ == "__main__":
    command(__doc__, measure, repeats=20, images=50, samples=5, references=None)
