"""Document frequencies of n-grams (in how many documents of a corpus each occurs):
counting, files, and pickles of other packages.
"""

import hashlib
import json
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Self

import numpy as np
from tqdm.auto import tqdm

from rewards.base import naming
from rewards.files import UNREADABLE_ARRAY, atomic_write
from rewards.text.ngrams import (
    Array,
    NGram,
    NGramTable,
    count_documents,
    table_of_counts,
    table_of_rows,
)
from rewards.text.tokenize import TOKENIZER, tokenizer_of

EOS = "<eos>"
"""The end-of-sentence token, where it counts as a word."""


@dataclass(frozen=True, eq=False, repr=False)
class DocumentFrequencies:
    """Immutable n-gram document frequencies of a corpus.

    Attributes:
        table: the n-grams and the number of documents that have them.
        log_documents: natural logarithm of the number of documents, at least 0.
        eos: whether every caption was counted with ``<eos>`` at its end.
        n: longest n-grams that are counted.
        tokenizer: name of the tokenisation, one of ``rewards.text.tokenize.TOKENIZERS``.

    Raises ``ValueError`` for values out of range, or where an n-gram is in more
    documents than there are.
    """

    table: NGramTable
    log_documents: float
    eos: bool
    n: int = 4
    tokenizer: str = TOKENIZER

    def __post_init__(self) -> None:
        if self.table.counts.max(initial=0) > self.documents:
            ngram, count = max(self.table.items(), key=lambda item: item[1])
            raise ValueError(
                f"n-gram {ngram} occurs in {count} of {self.documents} documents"
            )

    @classmethod
    def from_references(
        cls,
        references: Iterable[Sequence[Sequence[str]]],
        *,
        eos: bool,
        n: int = 4,
        tokenizer: str = TOKENIZER,
    ) -> Self:
        """Count the n-grams of a corpus, given as the tokens of each caption of each
        image, without EOS. One document is an image with all its captions.

        Raises ``ValueError`` if there is no image.
        """
        bar = tqdm(
            references,
            "document frequencies",
            unit="image",
            leave=False,
            delay=2,
            disable=None,
        )
        table, documents = count_documents(bar, n, [EOS] if eos else [])
        if documents == 0:
            raise ValueError(
                "document frequencies need at least one image with captions"
            )
        return cls(table, float(np.log(float(documents))), eos, n, tokenizer)

    @classmethod
    def from_texts(
        cls,
        references: Iterable[Sequence[str]],
        *,
        eos: bool,
        n: int = 4,
        tokenizer: str = TOKENIZER,
    ) -> Self:
        """As ``from_references``, but of untokenised captions, which ``tokenizer`` splits."""
        split = tokenizer_of(tokenizer)
        tokens = ([split(caption) for caption in captions] for captions in references)
        return cls.from_references(tokens, eos=eos, n=n, tokenizer=tokenizer)

    @classmethod
    def from_counts(
        cls,
        counts: Mapping[NGram, float],
        log_documents: float,
        *,
        n: int = 4,
        **fields: Any,
    ) -> Self:
        """Make document frequencies of counts of n-grams of up to ``n`` words;
        ``fields`` are other attributes.
        """
        return cls(table_of_counts(counts, n), log_documents, n=n, **fields)

    @property
    def documents(self) -> int:
        """Number of documents, which are images."""
        return round(math.exp(self.log_documents))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the attributes, not what is computed from them."""
        attributes = (self.table, self.log_documents, self.eos, self.n, self.tokenizer)
        return type(self), attributes

    def inverses(self, ids: Array) -> tuple[Array, Array]:
        """Inverse document frequencies ln(D) - ln(max(1, df)) of n-gram ids [M], and
        their squares: float64 [M], [M].

        An id of -1 is an unknown n-gram, with df = 0.
        """
        index, inverses, squares = self._inverse_by_id
        kinds = index.take(ids)
        return inverses.take(kinds), squares.take(kinds)

    @cached_property
    def word_ids(self) -> dict[str, int]:
        """Word -> its id in ``table``."""
        return dict(zip(self.table.words, range(len(self.table.words)), strict=True))

    @property
    def all_zero(self) -> bool:
        """Whether every n-gram is in every document, so that each inverse document frequency is 0."""
        counts = self.table.counts
        return bool((counts[counts > 0] == self.documents).all())

    @cached_property
    def _inverse_by_id(self) -> tuple[Array, Array, Array]:
        """Index [V + G + 1] by n-gram id, the last for unknown ones, into the distinct
        idf and their squares.

        For equality with the reference scorer to the last bit, logarithms are NumPy's
        of single numbers and squares are Python's powers, which differ from NumPy's in
        the last digit of one in 1,200.
        """
        counts, index = np.unique(self.table.counts, return_inverse=True)
        inverses = []
        for count in counts.tolist():
            inverses.append(float(self.log_documents - np.log(max(1.0, float(count)))))
        inverses.append(self.log_documents)
        by_id = np.append(index.astype(np.int32), np.int32(len(counts)))
        return by_id, np.array(inverses), np.array([value**2 for value in inverses])

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the content: equal for equal
        corpora in any order.
        """
        return _digest(self._arrays())

    def save(self, path: str | Path) -> None:
        """Write an ``.npz`` of plain arrays atomically. Raises ``ValueError`` if a word
        has a line break, or ``OSError``.
        """
        if any("\n" in word for word in self.table.words):
            raise ValueError(f"{path} was not written: a word has a line break")
        arrays = self._arrays()
        arrays["fingerprint"] = _bytes_array(self.fingerprint)
        with atomic_write(path) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote. Raises ``ValueError`` for other files and for
        content of another fingerprint.
        """
        where = f"{path} does not hold document frequencies that DocumentFrequencies.save wrote"
        with naming(where, (*UNREADABLE_ARRAY, AttributeError)):
            with np.load(path) as stored:
                arrays = dict(stored)
            fingerprint = arrays.pop("fingerprint").tobytes().decode()
            digest = _digest(arrays)
            if digest != fingerprint:
                raise ValueError(
                    f"it is damaged: its fingerprint is {digest}, not {fingerprint}"
                )
            header = json.loads(arrays["header"].tobytes())
            header.pop("document")
            vocabulary = arrays["vocabulary"].tobytes().decode()
            orders = range(1, header["n"] + 1)
            table = table_of_rows(
                vocabulary.split("\n") if vocabulary else [],
                [arrays[f"ngrams_{order}"] for order in orders],
                [arrays[f"counts_{order}"] for order in orders],
            )
            frequencies = cls(table, **header)
        frequencies.__dict__["fingerprint"] = digest
        return frequencies

    def _arrays(self) -> dict[str, Array]:
        """The content in canonical order: vocabulary and n-grams sorted."""
        # The fingerprint counts what a document is, too.
        names = ("log_documents", "n", "eos", "tokenizer")
        header = {name: getattr(self, name) for name in names} | {"document": "image"}
        arrays = {
            "header": _bytes_array(json.dumps(header, sort_keys=True)),
            "vocabulary": _bytes_array("\n".join(self.table.words)),
        }
        for order in range(1, self.n + 1):
            rows, counts = self.table.rows(order)
            arrays[f"ngrams_{order}"] = rows
            arrays[f"counts_{order}"] = counts.astype(np.float64)
        return arrays


def _bytes_array(text: str) -> Array:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _digest(arrays: dict[str, Array]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].dtype.str}{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()[:16]


_ADMITTED = {
    *product(
        ("builtins", "__builtin__"),
        ("dict", "float", "int", "long", "str", "tuple", "unicode"),
    ),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy", "dtype"),
    ("collections", "defaultdict"),
    ("_codecs", "encode"),
}


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles dicts, tuples, strings and numbers; refuses any other name before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(
                f"it contains {module}.{name}: expected plain data"
            )
        return super().find_class(module, name)


def load_legacy_pickle(path: str | Path) -> DocumentFrequencies:
    """Read a pickle with the keys ``document_frequency`` (tuple of words -> count) and
    ``ref_len``, running nothing.

    ``ref_len`` is the number of images (ruotianluo/self-critical.pytorch and its
    family) if it is a whole number, else its logarithm (YehLi/xmodaler). Pickles of
    Python 2 are read as Latin-1. EOS was counted if the token ``<eos>`` occurs.

    Raises:
        ValueError: the pickle asks for anything but plain data, or its content is something else.
    """
    unreadable = (pickle.UnpicklingError, TypeError, AttributeError, *UNREADABLE_ARRAY)
    with naming(f"{path} cannot be read", unreadable):
        with open(path, "rb") as file:
            content = _PlainUnpickler(file, encoding="latin1").load()
        length = float(content["ref_len"])
        stored = content["document_frequency"]
        counts: dict[NGram, float] = {}
        for ngram, count in stored.items():
            if not isinstance(ngram, tuple):
                raise ValueError(f"n-gram {ngram!r}: expected a tuple of words")
            counts[tuple(map(_utf8, ngram))] = float(count)
        # Whole numbers are numbers of images: the logarithm of a whole number above 1 never is one.
        logarithm = length or math.nan
        if length > 0 and length == int(length):
            logarithm = float(np.log(length))
        if not counts or not 0 <= logarithm <= 50:
            raise ValueError(f"ref_len is {length:g}, of {len(counts)} n-grams")
    if all(word.isdecimal() for ngram in counts for word in ngram):
        raise ValueError(
            f"{path} has indices: expected words (coco-train-words.p, not -idxs.p)"
        )
    with naming(f"{path}: ref_len is {length:g}"):
        return DocumentFrequencies.from_counts(
            counts, logarithm, n=max(map(len, counts)), eos=(EOS,) in counts
        )


def _utf8(word: str) -> str:
    """Undo the reading as Latin-1 where Python 2 had stored UTF-8 bytes."""
    if word.isascii():
        return word
    try:
        return word.encode("latin1").decode()
    except UnicodeError:
        return word
