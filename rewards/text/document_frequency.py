"""In how many documents of a corpus each n-gram occurs: the part of CIDEr that does not depend on the caption."""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from tqdm import tqdm

from rewards.arrays import UNREADABLE_ARRAY, member, read_array
from rewards.files import atomic_write
from rewards.text.ngrams import Array, NGram, NGramTable, count_documents, numbered, table_of_counts, table_of_rows
from rewards.text.tokenize import TOKENIZER

EOS = "<eos>"
"""The end-of-sentence token, where it counts as a word."""
LARGEST_LOGARITHM = 50.0
"""No corpus has e^50 documents."""


class DocumentFrequencies:
    """Immutable n-gram document frequencies. Looking up an unknown n-gram gives 0 and stores nothing.

    They are held in arrays (``table``). The first look-up of a single n-gram makes a dict of all, which takes about
    ten times the memory; CIDEr-D uses the arrays.

    Attributes:
        table: the n-grams and their counts.
        documents: number of documents (images, or captions).
        log_documents: its natural logarithm, as the scorer uses it.
        n: longest n-grams that are counted.
        eos: whether every caption was counted with ``<eos>`` at its end.
        tokenizer: name of the tokenisation; ``ptb`` is ``rewards.text.tokenize``.
        document: what one document is: an ``image`` with all its captions (the published way), or a ``caption``.
    """

    table: NGramTable
    documents: int
    log_documents: float
    n: int
    eos: bool
    tokenizer: str
    document: str
    _inverse_by_count: dict[float, float]

    def __init__(
        self,
        counts: Mapping[NGram, float] | NGramTable,
        log_documents: float,
        *,
        n: int = 4,
        eos: bool,
        tokenizer: str = TOKENIZER,
        document: str = "image",
    ) -> None:
        """Wrap counts that exist already; ``from_references`` makes them.

        Raises:
            ValueError: ``document`` is unknown, ``log_documents`` is not the logarithm of at least one document, an
                n-gram has more than ``n`` words, or is counted in more documents than there are (counts and number
                are of different corpora).
        """
        if document not in ("image", "caption"):
            raise ValueError(f"document is {document!r}: expected 'image' or 'caption'")
        if not 0 <= log_documents <= LARGEST_LOGARITHM:
            raise ValueError(f"log_documents is {log_documents!r}: expected the logarithm of one document or more")
        documents = round(math.exp(log_documents))
        table = counts if isinstance(counts, NGramTable) else table_of_counts(counts, n)
        if table.counts.max(initial=0) > documents:
            ngram, count = table.most_frequent()
            raise ValueError(
                f"n-gram {ngram} occurs in {count} of {documents} documents: the counts and the number of documents "
                "are not of one corpus"
            )
        values = {
            # The logarithm is NumPy's, once per distinct count, so that scores equal the reference scorer's to the bit.
            "_inverse_by_count": {
                count: float(log_documents - np.log(max(1.0, float(count))))
                for count in {0, *numbered(table.counts)[1].tolist()} - {-1}
            },
            "document": document,
            "documents": documents,
            "eos": eos,
            "log_documents": float(log_documents),
            "n": n,
            "table": table,
            "tokenizer": tokenizer,
        }
        for array in (table.keys, table.counts):
            array.flags.writeable = False
        self.__dict__.update(values)

    @classmethod
    def from_references(
        cls,
        references: Iterable[Sequence[Sequence[str]]],
        *,
        document: Literal["image", "caption"] = "image",
        eos: bool,
        n: int = 4,
        tokenizer: str = TOKENIZER,
    ) -> Self:
        """Count the n-grams of a corpus.

        Args:
            references: for each image, once, the tokens of each of its captions, without EOS.
            document: ``image`` counts an n-gram once per image (CIDEr as published); ``caption`` once per caption
                (M2 Transformer and GRIT), which gives other scores.
            eos: count ``<eos>`` at the end of every caption.
            n: longest n-grams.
            tokenizer: name of the tokenisation that made the tokens.

        Raises:
            ValueError: there is no caption.
        """
        images = tqdm(references, "document frequencies", unit="image", leave=False, delay=2, disable=None)
        parts = images if document == "image" else ([caption] for captions in images for caption in captions)
        table, documents = count_documents(parts, n, [EOS] if eos else [])
        if documents == 0:
            raise ValueError("document frequencies need at least one image with captions; there is none")
        logarithm = float(np.log(float(documents)))
        return cls(table, logarithm, n=n, eos=eos, tokenizer=tokenizer, document=document)

    def __getitem__(self, ngram: NGram) -> float:
        """Return the number of documents with this n-gram, 0 for an unknown one."""
        return self._counts.get(ngram, 0)

    def __contains__(self, ngram: object) -> bool:
        """Whether the n-gram occurs in the corpus."""
        return ngram in self._counts

    def __len__(self) -> int:
        """Return the number of different n-grams."""
        return len(self.table)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse: every score depends on these numbers."""
        raise AttributeError(f"document frequencies are immutable; cannot set {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by content."""
        return _rebuild, (self.table, self.log_documents, self.n, self.eos, self.tokenizer, self.document)

    def __repr__(self) -> str:
        """Describe the corpus in one line."""
        return (
            f"DocumentFrequencies({len(self)} n-grams in {self.documents} documents, one per {self.document}, "
            f"tokenizer={self.tokenizer!r}, eos={self.eos}, fingerprint={self.fingerprint!r})"
        )

    def inverse(self, ngram: NGram) -> float:
        """Return ln(documents) - ln(max(1, document frequency)) of an n-gram; unknown ones get ln(documents)."""
        return self._inverse_by_count[self._counts.get(ngram, 0)]

    def inverses(self, ids: Array) -> tuple[Array, Array]:
        """``inverse`` of the n-grams with these ids [M] in ``table`` (-1: an unknown one), and its square: [M], [M]."""
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

    def items(self) -> Iterator[tuple[NGram, float]]:
        """Every n-gram with the number of documents that have it, by length, then by words."""
        return iter(self._counts.items())

    @cached_property
    def _counts(self) -> dict[NGram, float]:
        counts: dict[NGram, float] = {}
        for order in range(1, self.table.n + 1):
            counts.update(zip(self.table.ngrams(order), self.table.rows(order)[1].tolist(), strict=True))
        return counts

    @cached_property
    def _inverse_by_id(self) -> tuple[Array, Array, Array]:
        """Indices [V + G + 1] by n-gram id into the D different inverse frequencies [D] and squares [D]; last: unknown.

        Squares are Python's powers, which the reference scorer takes: NumPy's differ in one last digit of 1,200.
        """
        index, unique = numbered(self.table.counts)
        inverses = [*(self._inverse_by_count[max(count, 0)] for count in unique.tolist()), self.log_documents]
        by_id = np.append(index.astype(np.int32), np.int32(len(unique)))
        return by_id, np.array(inverses), np.array([value**2 for value in inverses])

    @cached_property
    def fingerprint(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the content: equal for equal corpora, whatever their order."""
        return _digest(self._arrays())

    def save(self, path: str | Path) -> None:
        """Write an ``.npz`` of plain arrays (no pickle), whole or not at all.

        Raises:
            ValueError: a word has a line break, by which words are told apart in the file.
            OSError: the file cannot be written.
        """
        path = Path(path)
        broken = [word for word in self.table.words if "\n" in word]
        if broken:
            raise ValueError(f"{path} was not written: the word {broken[0]!r} has a line break; tokens have none")
        arrays = self._arrays()
        arrays["fingerprint"] = _bytes_array(self.fingerprint)
        with atomic_write(path) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote.

        Raises:
            ValueError: the file is not such a file, or its content does not match its fingerprint.
        """
        try:
            arrays = _read(path)
            fingerprint, found = arrays.pop("fingerprint").tobytes().decode(), _digest(arrays)
            if found != fingerprint:
                raise ValueError(f"it is damaged, its content has fingerprint {found}, it was saved as {fingerprint}")
            header = json.loads(arrays["header"].tobytes())
            vocabulary = arrays["vocabulary"].tobytes().decode()
            orders = range(1, header["n"] + 1)
            table = table_of_rows(
                vocabulary.split("\n") if vocabulary else [],
                [arrays[f"ngrams_{order}"] for order in orders],
                [arrays[f"counts_{order}"] for order in orders],
            )
            made = cls(table, **header)
        except FileNotFoundError:
            raise
        except (*UNREADABLE_ARRAY, IndexError, AttributeError) as error:
            raise ValueError(
                f"{path} does not hold document frequencies: {error or type(error).__name__}. Expected a file written "
                "by DocumentFrequencies.save; use load_legacy_pickle for pickles of other packages"
            ) from error
        made.__dict__["fingerprint"] = found
        return made

    def _arrays(self) -> dict[str, np.ndarray]:
        """Return the content in a canonical order: sorted vocabulary, sorted n-grams."""
        header = {name: getattr(self, name) for name in ("log_documents", "n", "eos", "tokenizer", "document")}
        arrays = {
            "header": _bytes_array(json.dumps(header, sort_keys=True)),
            "vocabulary": _bytes_array("\n".join(self.table.words)),
        }
        for order in range(1, self.n + 1):
            rows, counts = self.table.rows(order)
            arrays[f"ngrams_{order}"], arrays[f"counts_{order}"] = rows, counts.astype(np.float64)
        return arrays


def _read(path: str | Path) -> dict[str, Array]:
    with zipfile.ZipFile(path) as archive:
        arrays = {}
        for name in archive.namelist():
            with member(archive, name.removesuffix(".npy")) as (file, size):
                arrays[name.removesuffix(".npy")] = read_array(file, size)
        return arrays


def _rebuild(
    table: NGramTable, log_documents: float, n: int, eos: bool, tokenizer: str, document: str
) -> DocumentFrequencies:
    return DocumentFrequencies(table, log_documents, n=n, eos=eos, tokenizer=tokenizer, document=document)


def _bytes_array(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].dtype.str}{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()[:16]
