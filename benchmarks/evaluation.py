"""The Karpathy test table without METEOR and SPICE, by this package and by pycocoevalcap, in one
run.

    python -m benchmarks.evaluation [--images 5000] [--json FILE]

Captions are random words, as many as the Karpathy test split has. Both start from captions as written and end with BLEU-1 to 4,
ROUGE-L and CIDEr; pycocoevalcap tokenises with Java. The detail says whether all scores are equal
to the last bit. Needs Java.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.harness import Measurement, Timing, command, compared, timed
from benchmarks.scst_step import random_rows
from rewards.text.tokenize import _scan
from rl_caption.evaluation import JavaError, evaluate_captions, find_java

METRICS = ("bleu", "rouge", "cider")
IMAGES = 5000
"""Of the Karpathy test split, with five references each."""
Captions = dict[str, str]
References = dict[str, list[str]]


def by_package(captions: Captions, references: References) -> dict[str, float]:
    """Scores of this package, with the tokenizer's cache empty, as a program finds it."""
    _scan.cache_clear()
    return evaluate_captions(captions, references, metrics=METRICS).metrics


def by_toolkit(captions: Captions, references: References) -> dict[str, float]:
    """Scores of pycocoevalcap, under this package's names."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    tokenizer = PTBTokenizer()
    written = tokenizer.tokenize(
        {key: [{"caption": text} for text in references[key]] for key in captions}
    )
    found = tokenizer.tokenize(
        {key: [{"caption": text}] for key, text in captions.items()}
    )
    with contextlib.redirect_stdout(io.StringIO()):
        bleu, _ = Bleu(4).compute_score(written, found)
    scores = {f"BLEU-{n + 1}": value for n, value in enumerate(bleu)}
    return scores | {
        "ROUGE-L": Rouge().compute_score(written, found)[0],
        "CIDEr": Cider().compute_score(written, found)[0],
    }


def generated(images: int) -> tuple[Captions, References]:
    """A caption and five references of each image; the caption is one of its references with words
    of another image's.
    """
    words = [f"word{number}" for number in range(9000)]
    rows = random_rows(words, images)
    references = {row["image_id"]: row["references"] for row in rows}
    captions = {}
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        first = row["references"][0].split()
        second = other["references"][1].split()
        captions[row["image_id"]] = (
            " ".join(["A", *first[:7], "and", *second[7:]]) + "."
        )
    return captions, references


def compare(captions: Captions, references: References) -> str:
    """Whether both give the same scores."""
    ours = by_package(captions, references)
    theirs = by_toolkit(captions, references)
    unequal = [key for key, value in theirs.items() if ours[key] != value]
    return (
        f"differ: {', '.join(unequal)}"
        if unequal
        else f"{len(theirs)} scores equal to the bit"
    )


def measure(timing: Timing, images: int = IMAGES) -> Iterator[Measurement]:
    """Elapsed time of both, because the toolkit's tokenizer is a process of its own."""
    try:
        find_java()
    except JavaError as error:
        raise SystemExit(f"pycocoevalcap's tokenizer needs Java: {error}") from error
    captions, references = generated(images)
    note = f"; {len(captions)} images, {compare(captions, references)}"
    variants: dict[str, Callable[[], object]] = {
        "evaluation": partial(by_package, captions, references),
        "pycocoevalcap with Java": partial(by_toolkit, captions, references),
    }
    times = timed(variants, Timing("cpu", timing.repeats), "evaluation")
    yield compared(times, *variants, note=note)


if __name__ == "__main__":
    command(__doc__, measure, repeats=1, images=IMAGES)
