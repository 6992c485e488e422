"""CIDEr-D as a reward against the reference Python scorer.

    python -m benchmarks.cider [--images 50] [--samples 5] [--references FILE] [--json FILE]

Both score the same captions of the same images against five references each, again and again as training does, with
document frequencies that were counted before: pycocoevalcap's ``CiderScorer`` is given ours. Captions are words
already. Without ``--references`` (a JSON of {"annotations": [{"image_id", "caption"}]}) all are random words.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from pycocoevalcap.cider.cider_scorer import CiderScorer

from benchmarks.harness import Measurement, Timing, add_timing, faster, report, timed, timing_of
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.ngrams import ngram_counts
from rewards.text.tokenize import tokenize


def in_letters(number: int) -> str:
    """A word for a number: letters only, which are one token."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def read_captions(path: Path | None, images: int) -> list[list[str]]:
    """Five tokenised captions of each of at least ``images`` images."""
    if path is None:
        draw = np.random.default_rng(0)
        words = [f"word-{in_letters(number)}" for number in range(2000)]
        return [[" ".join(draw.choice(words, draw.integers(8, 13))) for _ in range(5)] for _ in range(images)]
    grouped = defaultdict(list)
    for item in json.loads(path.read_text())["annotations"]:
        grouped[item["image_id"]].append(" ".join(tokenize(item["caption"])))
    return [captions[:5] for captions in grouped.values() if len(captions) >= 5]


def reference_scorer(
    captions: Sequence[str], references: Sequence[Sequence[str]], counts: defaultdict[tuple[str, ...], float]
) -> list[float]:
    """pycocoevalcap's scorer with cached document frequencies, as self-critical code bases use it."""
    scorer = CiderScorer(n=4, sigma=6.0)
    for caption, own in zip(captions, references, strict=True):
        scorer += (caption, own)
    scorer.document_frequency = counts
    return list(scorer.compute_cider())


def ngrams_of(corpus: Sequence[Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Every n-gram of the corpus, again and again."""
    for captions in corpus:
        for caption in captions:
            yield from ngram_counts(caption.split())


def measure(images: int, samples: int, path: Path | None, timing: Timing) -> list[Measurement]:
    """Time the scorers on samples that are other images' references, with some words of the own ones."""
    corpus = read_captions(path, images)[:images]
    draw = np.random.default_rng(1)
    captions, references = [], []
    for own in corpus:
        for _ in range(samples):
            other = corpus[draw.integers(images)][draw.integers(5)].split()
            captions.append(" ".join([*own[draw.integers(5)].split()[:6], *other[5:]]))
            references.append(own)
    counted = DocumentFrequencies.from_references(([caption.split() for caption in own] for own in corpus), eos=False)
    counts = defaultdict(float, {ngram: counted[ngram] for ngram in ngrams_of(corpus)})
    # The reference scorer takes the number of captions that it scores for the number of documents.
    reward = CiderD(DocumentFrequencies(counts, float(np.log(float(len(captions)))), eos=False), eos=False)
    expected = reference_scorer(captions, references, counts)
    found = reward(None, captions, references=references)
    if not np.array_equal(np.asarray(expected), np.asarray(found)):
        raise SystemExit(f"scores differ by {np.abs(np.asarray(expected) - np.asarray(found)).max()}")
    theirs = "pycocoevalcap's scorer"
    ours: dict[str, Callable[[], object]] = {
        "CIDEr-D reward": partial(reward, None, captions, references=references),
    }
    rows = []
    for name, variant in ours.items():  # each right after the other scorer, as in training after other work
        times = timed({name: variant, theirs: partial(reference_scorer, captions, references, counts)}, timing, name)
        note = f"; {len(captions)} captions, 5 references each, scores equal to the bit"
        rows.append(faster(times, name, theirs, note))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_timing(parser, repeats=20)
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--samples", type=int, default=5, help="captions of each image")
    parser.add_argument("--references", type=Path, help="captions in COCO's format; random words by default")
    chosen = parser.parse_args(arguments)
    rows = measure(chosen.images, chosen.samples, chosen.references, timing_of(parser, chosen))
    report([rows], chosen.json, chosen.device)


if __name__ == "__main__":
    main()
