"""CIDEr-D as a reward against pycocoevalcap's Python scorer.

    python -m benchmarks.cider [--images 50] [--samples 5] [--json FILE]

Both score the same captions against five references each, again and again as training
does, with the same document frequencies, counted before. A caption begins as a
reference of its image and ends as a reference of another image. Scores must be equal to
the last bit.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from benchmarks.harness import Measurement, Timing, command, compared, timed
from benchmarks.scst_step import random_rows
from rewards.text.cider import CiderD
from rewards.text.document_frequency import DocumentFrequencies


def toolkit_scores(
    captions: Sequence[str],
    references: Sequence[Sequence[str]],
    counts: Mapping[tuple[str, ...], float],
) -> list[float]:
    """CIDEr-D [N] by pycocoevalcap's scorer with kept document frequencies, as
    self-critical code bases use it.
    """
    from pycocoevalcap.cider.cider_scorer import CiderScorer

    scorer = CiderScorer(n=4, sigma=6.0)
    for caption, own in zip(captions, references, strict=True):
        scorer += (caption, own)
    scorer.document_frequency = counts
    return list(scorer.compute_cider())


def measure(
    timing: Timing, images: int = 50, samples: int = 5
) -> Iterator[Measurement]:
    """Time both; exits with a message if their scores differ."""
    draw = np.random.default_rng(1)
    corpus = [
        row["references"]
        for row in random_rows([f"word{number}" for number in range(2000)], images)
    ]
    captions = []
    columns = []
    for own in corpus:
        for _ in range(samples):
            begin = own[draw.integers(5)]
            end = corpus[draw.integers(images)][draw.integers(5)]
            captions.append(" ".join([*begin.split()[:6], *end.split()[5:]]))
            columns.append(own)
    table = DocumentFrequencies.from_texts(corpus, eos=False).table
    # The toolkit takes the number of captions that it scores for the number of documents.
    reward = CiderD(
        DocumentFrequencies(table, float(np.log(float(len(captions)))), eos=False),
        eos=False,
    )
    counts = defaultdict(float, table.items())
    expected = toolkit_scores(captions, columns, counts)
    found = reward(None, captions, references=columns)
    if not np.array_equal(expected, found):
        raise SystemExit(
            f"scores differ by {np.abs(np.asarray(expected) - np.asarray(found)).max()}"
        )
    ours = "CIDEr-D reward"
    theirs = "pycocoevalcap's scorer"
    variants: dict[str, Callable[[], object]] = {
        ours: partial(reward, None, captions, references=columns),
        theirs: partial(toolkit_scores, captions, columns, counts),
    }
    note = f"; {len(captions)} captions, 5 references each, scores equal to the bit"
    yield compared(
        timed(variants, Timing("cpu", timing.repeats), ours), ours, theirs, note=note
    )


if __name__ == "__main__":
    command(__doc__, measure, repeats=20, images=50, samples=5)
