"""Where 64-bit keys stand among very many: tables that find most of them with one look."""

from __future__ import annotations

import numpy as np

from rewards.text.ngram_table import Array, find

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


class KeyIndex:
    """Index of keys in an ascending array of different ones, by hashing; binary search in millions takes longer.

    A table has room for two to four times its keys. Where two want a slot, the loser goes to the next table; what loses
    in all of them is searched for.
    """

    def __init__(self, keys: Array) -> None:
        self.keys = keys
        self._tables: list[tuple[np.uint64, np.uint64, Array]] = []
        left = np.arange(len(keys), dtype=np.int32)
        for multiplier in _MULTIPLIERS:
            shift = 64 - max(8, (2 * len(left)).bit_length())
            table = np.full(1 << (64 - shift), -1, np.int32)
            self._tables.append((np.uint64(multiplier), np.uint64(shift), table))
            slots = self._slots(keys[left], len(self._tables) - 1)
            table[slots] = left
            left = left[table[slots] != left]
            if not len(left):
                break

    def _slots(self, keys: Array, number: int) -> Array:
        multiplier, shift, _ = self._tables[number]
        return ((keys.view(np.uint64) * multiplier) >> shift).view(np.int64)

    def find(self, wanted: Array) -> Array:
        """Index of each of ``wanted`` [M] int64, -1 for what is not there."""
        if not len(self.keys):
            return np.full(len(wanted), -1, np.int32)
        # ``take`` is faster than square brackets.
        found = self._tables[0][2].take(self._slots(wanted, 0))
        # Nobody has the slot, or another key. Index -1 takes the last key, which is not wanted there: it has its slot.
        (left,) = np.nonzero(self.keys.take(found) != wanted)
        left = left[found.take(left) >= 0]
        for number in range(1, len(self._tables)):
            if not len(left):
                return found
            keys = wanted.take(left)
            again = self._tables[number][2].take(self._slots(keys, number))
            found[left] = again
            left = left[(again >= 0) & (self.keys.take(again) != keys)]
        if len(left):
            found[left] = find(self.keys, wanted[left])
        return found
