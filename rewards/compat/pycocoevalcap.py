"""``PTBTokenizer``, ``Bleu``, ``Cider``, ``Rouge`` and ``Meteor`` with the calls and
results of pycocoevalcap 1.2.

``from rewards.compat.pycocoevalcap import PTBTokenizer, Bleu, Cider, Rouge`` in place
of the imports from pycocoevalcap gives the same numbers to the last bit, without Java
and without torch. ``Meteor`` runs pycocoevalcap's own, which needs Java.

``gts`` and ``res`` are dictionaries with the same keys: image id -> list of tokenised
references, and image id -> list of one tokenised caption. Where the original stops at
an ``assert``, a ``ValueError`` names the image; and ``Bleu`` prints nothing.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewards.text.bleu import bleu_counts, bleu_of_counts
from rewards.text.cider import cider_d
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.rouge import rouge_l
from rewards.text.tokenize import tokenize_lines

Captions = Mapping[Hashable, list[str]]


class PTBTokenizer:
    """Stanford's PTB tokenizer with the toolkit's list of punctuation, by
    ``rewards.text.tokenize.tokenize_lines``.

    Equal to the Java program for the captions on which the two were compared
    (``rewards.text.tokenize.is_tested``). A line break within a caption counts as a
    space.
    """

    def tokenize(
        self, captions_for_image: Mapping[Hashable, Sequence[Mapping[str, str]]]
    ) -> dict[Hashable, list[str]]:
        """Image id -> list of ``{"caption": text}`` becomes image id -> list of tokens
        joined by spaces.
        """
        ids = [
            image_id
            for image_id, captions in captions_for_image.items()
            for _ in captions
        ]
        lines = tokenize_lines(
            [
                item["caption"]
                for captions in captions_for_image.values()
                for item in captions
            ]
        )
        tokens: dict[Hashable, list[str]] = {}
        for image_id, line in zip(ids, lines, strict=True):
            tokens.setdefault(image_id, []).append(line)
        return tokens


class Bleu:
    """BLEU-1 to BLEU-n of a set and of each caption, with the closest reference length."""

    def __init__(self, n: int = 4) -> None:
        self._n = n

    def compute_score(
        self, gts: Captions, res: Captions, verbose: int = 1
    ) -> tuple[list[float], list[list[float]]]:
        """n scores of the set, in [0, 1], and n lists of the scores of N captions;
        ``verbose`` changes nothing.
        """
        counts = [
            bleu_counts(
                caption.split(),
                [reference.split() for reference in references],
                self._n,
            )
            for caption, references in _pairs(gts, res)
        ]
        scores = [bleu_of_counts(row) for row in counts]
        total = bleu_of_counts([sum(column) for column in zip(*counts, strict=True)])
        return total, [list(column) for column in zip(*scores, strict=True)]

    def method(self) -> str:
        """The name of the metric."""
        return "Bleu"


class Cider:
    """CIDEr-D, which the toolkit calls CIDEr, with the document frequencies of ``gts``; in [0, 10].

    ``n`` and ``sigma`` as in the original; ``test`` and ``refs`` are ignored there, too.
    """

    def __init__(
        self, test: Any = None, refs: Any = None, n: int = 4, sigma: float = 6.0
    ) -> None:
        if n != 4:
            raise ValueError(
                f"n is {n}: expected 4, the only number that the original counts n-grams up to"
            )
        self._sigma = sigma

    def compute_score(
        self, gts: Captions, res: Captions
    ) -> tuple[np.float64, NDArray[np.float64]]:
        """The mean over N captions, and their scores [N]; one image alone has the score 0."""
        pairs = _pairs(gts, res)
        references = [
            [reference.split() for reference in captions] for _, captions in pairs
        ]
        df = DocumentFrequencies.from_references(references, eos=False)
        scores = np.array(
            cider_d(
                [caption.split() for caption, _ in pairs],
                references,
                df,
                sigma=self._sigma,
            )
        )
        return np.mean(scores), scores

    def method(self) -> str:
        """The name of the metric."""
        return "CIDEr"


class Rouge:
    """ROUGE-L with beta 1.2, in [0, 1]; words are split at spaces alone, as in the original."""

    beta = 1.2

    def calc_score(self, candidate: list[str], refs: list[str]) -> float:
        """The score of a list of one caption against its references."""
        return rouge_l(
            candidate[0].split(" "),
            [reference.split(" ") for reference in refs],
            self.beta,
        )

    def compute_score(
        self, gts: Captions, res: Captions
    ) -> tuple[np.float64, NDArray[np.float64]]:
        """The mean over N captions, and their scores [N]."""
        scores = np.array(
            [
                self.calc_score([caption], references)
                for caption, references in _pairs(gts, res)
            ]
        )
        return np.mean(scores), scores

    def method(self) -> str:
        """The name of the metric."""
        return "Rouge"


class Meteor:
    """pycocoevalcap's METEOR, whose Java program starts with the first score."""

    def compute_score(self, gts: Captions, res: Captions) -> tuple[float, list[float]]:
        """The score of the set, and the scores of N captions."""
        from pycocoevalcap.meteor.meteor import Meteor as JavaMeteor

        score: tuple[float, list[float]] = JavaMeteor().compute_score(gts, res)
        return score

    def method(self) -> str:
        """The name of the metric."""
        return "METEOR"


def _pairs(gts: Captions, res: Captions) -> list[tuple[str, list[str]]]:
    """Caption and references of each image, in the order of ``gts``. Raises
    ``ValueError`` with the image's id.
    """
    if not gts or gts.keys() != res.keys():
        lone = sorted(map(repr, gts.keys() ^ res.keys()))
        raise ValueError(
            f"gts has {len(gts)} images, res has {len(res)}; in one alone: "
            f"{', '.join(lone[:5]) or 'none'}"
        )
    for image_id, references in gts.items():
        if type(res[image_id]) is not list or len(res[image_id]) != 1:
            raise ValueError(
                f"res of image {image_id!r} is {res[image_id]!r:.80}: expected a list of one "
                f"caption"
            )
        if type(references) is not list or not references:
            raise ValueError(
                f"gts of image {image_id!r} is {references!r:.80}: expected a list of references"
            )
    return [(res[image_id][0], references) for image_id, references in gts.items()]
