"""Speed of cutting captions into detail units, and agreement of the default tagger with others.

    python -m benchmarks.studies.detail_units --captions FILE.jsonl --key caption --taggers nltk spacy:en_core_web_sm

FILE has a JSON object with a caption under KEY in each line; without it, the generated world's long descriptions are
taken. Prints units per caption, captions per second of processor time, and for each tagger how many tokens are in the
same class (of the grammar) as by the default tagger, and the F1 of the positions of the cuts.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from rewards.text.detail_units import (
    BrillTagger,
    NltkTagger,
    Tagger,
    detail_units,
    detail_units_of,
    word_class,
)
from rl_caption.data.scenes import ScenesData


def read(path: Path | None, key: str, count: int) -> list[str]:
    """Captions of a file, or of the generated world."""
    if path is None:
        return [row["long_reference"] for row in ScenesData(count, 0, 0, 0).split("train")]
    return [json.loads(line)[key] for line in path.read_text().splitlines() if line.strip()][:count]


class SpacyTagger:
    """The tagger of an installed spaCy pipeline, such as the package ``en_core_web_sm``."""

    def __init__(self, model: str = "en_core_web_sm") -> None:
        import spacy

        self.pipeline = spacy.load(
            model, exclude=["parser", "ner", "lemmatizer", "attribute_ruler", "senter"]
        )

    def __call__(self, sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """A tag for each token of each sentence."""
        from spacy.tokens import Doc

        documents = self.pipeline.pipe(
            [Doc(self.pipeline.vocab, words=list(words)) for words in sentences]
        )
        return [[token.tag_ for token in document] for document in documents]


def sentences_of(caption: str) -> list[list[str]]:
    """The tokens of each sentence of a caption, as taggers are given them."""
    found: list[list[str]] = []

    def recorded(sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        found.extend(map(list, sentences))
        return [[""] * len(words) for words in sentences]

    detail_units(caption, recorded)
    return found


def named(name: str) -> Tagger:
    """A tagger by its name on the command line."""
    kind, _, model = name.partition(":")
    if kind == "nltk":
        return NltkTagger()
    if kind == "spacy":
        return SpacyTagger(*filter(None, [model]))
    raise SystemExit(f"--taggers {name}: expected nltk, spacy or spacy:MODEL")


def tag_agreement(one: Tagger, other: Tagger, captions: Sequence[str]) -> float:
    """Fraction of tokens to which both give the same class."""
    sentences = [sentence for caption in captions for sentence in sentences_of(caption)]
    pairs = [
        (word_class(a), word_class(b))
        for own, others in zip(one(sentences), other(sentences), strict=True)
        for a, b in zip(own, others, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def cut_agreement(one: Tagger, other: Tagger, captions: Sequence[str]) -> float:
    """F1 of the characters at which units end inside captions, in [0, 1]."""
    common = total = 0
    for caption in captions:
        ends = [
            set(accumulate(map(len, detail_units(caption, tagger)[:-1]))) for tagger in (one, other)
        ]
        common += len(ends[0] & ends[1])
        total += len(ends[0]) + len(ends[1])
    return 2 * common / total


def main() -> None:
    """Read the command line, print Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--captions", type=Path, help="JSON lines; default: the generated world's long descriptions"
    )
    parser.add_argument("--key", default="caption")
    parser.add_argument("--count", type=int, default=4000, help="at most so many captions")
    parser.add_argument("--taggers", nargs="*", default=[])
    arguments = parser.parse_args()
    captions = read(arguments.captions, arguments.key, arguments.count)
    detail_units_of(["A dog runs."])  # loads the tagger
    start = time.process_time()
    units = detail_units_of(captions)
    seconds = time.process_time() - start
    words = statistics.fmean(len(caption.split()) for caption in captions)
    numbers = [len(own) for own in units]
    print(
        f"{len(captions)} captions, {words:.1f} words and {statistics.fmean(numbers):.1f} units a caption",
        end=" ",
    )
    print(f"(median {statistics.median(numbers):g}, {min(numbers)} to {max(numbers)})")
    print(f"{len(captions) / seconds:.0f} captions per second of computing")
    for name in arguments.taggers:
        tagger = named(name)
        tags, cuts = (
            agreement(BrillTagger(), tagger, captions)
            for agreement in (tag_agreement, cut_agreement)
        )
        print(
            f"{name}: {100 * tags:.1f} % of tokens in the same class, F1 of cuts {cuts:.3f}, 0 to 1"
        )


if __name__ == "__main__":
    main()
