"""The references of images as n-grams' places among the document frequencies: one image's, and those of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rewards.text.key_index import KeyIndex
from rewards.text.ngram_table import Array

IMAGE_BITS = 40
"""In keys of an image's n-grams, the place has so many bits and the number of the image those above."""


class PackedReferences(NamedTuple):
    """The n-grams of one image's R references.

    Attributes:
        places: [G] ascending places of their n-grams.
        counts: [G, R] how often each reference has them, in one byte where that holds it.
        norms: [R, n] Euclidean norms of each order's tf-idf vector.
        lengths: [R] number of bigrams: tokens - 1.
    """

    places: Array
    counts: Array
    norms: Array
    lengths: Array


@dataclass(frozen=True, eq=False)
class Bank:
    """The references of B images side by side; images with fewer than R references are padded with zeros.

    Attributes:
        keys: [sum of G] ascending: image * 2^40 + place.
        counts: [sum of G, R] how often each reference has the n-gram.
        norms: [n, B, R].
        lengths: [B, R] numbers of bigrams.
        references: [B] numbers of references.
    """

    keys: Array
    counts: Array
    norms: Array
    lengths: Array
    references: Array

    @staticmethod
    def of(images: Sequence[PackedReferences]) -> Bank:
        """Put the references of all images of a call side by side."""
        every_place, every_count, every_norm, every_length = zip(*images, strict=True)
        numbers = np.fromiter(map(len, every_length), np.int64, len(images))
        sizes = np.fromiter(map(len, every_place), np.int64, len(images))
        most = int(numbers.max())
        keys = np.repeat(np.arange(len(images)) << IMAGE_BITS, sizes)
        keys |= np.concatenate(every_place)
        rows = np.arange(most) < numbers[:, None]  # [B, R]
        lengths = np.zeros(rows.shape, np.int32)
        lengths[rows] = np.concatenate(every_length)
        norms = np.zeros((*rows.shape, images[0].norms.shape[1]))
        norms[rows] = np.concatenate(every_norm)
        if rows.all():
            counts = np.concatenate(every_count)
        else:
            counts = np.zeros((len(keys), most), np.result_type(*{own.dtype for own in every_count}))
            ends = np.cumsum(sizes)
            for own, start, end in zip(every_count, ends - sizes, ends, strict=True):
                counts[start:end, : own.shape[1]] = own
        return Bank(keys, counts, np.ascontiguousarray(norms.transpose(2, 0, 1)), lengths, numbers)

    def has_extra(self, size: int) -> bool:
        """Whether there are n-grams beyond the ``size`` of the document frequencies."""
        return bool(((self.keys & ((1 << IMAGE_BITS) - 1)) >= size).any())

    def rows(self, places: Array, owner: Array) -> Array:
        """Rows [M] of ``counts`` for n-grams at ``places`` [M] in the references of images ``owner`` [M]; -1: none."""
        return KeyIndex(self.keys).find(places | (owner << IMAGE_BITS))
