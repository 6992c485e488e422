"""Names of splits as data sets write them."""

import difflib

from rl_caption.data.base import DataError
from rl_caption.data.plain_files import shown

STANDARD_SPLITS = ("train", "restval", "val", "test")
OTHER_NAMES = {"validation": "val", "valid": "val", "dev": "val"}
"""Usual names of the standard splits -> the names here."""
MISTAKEN = {"training": "train", "testing": "test"}
"""Names that are likely meant as standard splits."""


def standard_split(name: str) -> str:
    """The standard split that is meant by a name (``Train``, ``validation``), or else the name."""
    plain = name.strip().casefold()
    split = OTHER_NAMES.get(plain, plain)
    return split if split in STANDARD_SPLITS else name


def split_name(name: object, where: str, restval: str = "train") -> str:
    """The split of a row; ``restval`` is ``train`` unless told otherwise.

    ``validation`` (``valid``, ``dev``) is ``val``. Any other name that is no misspelling, such as
    ``test_unseen``, is a split of its own.

    Raises:
        DataError: the name is misspelt; the message begins with ``where`` and says what is
            expected.
    """
    known = ", ".join(STANDARD_SPLITS)
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"{where}: the split is {shown(name)}: expected a text, such as {known}")
    split = standard_split(name)
    if split == "restval":
        return restval
    if split in STANDARD_SPLITS:
        return split
    plain = name.strip().casefold()
    meant = difflib.get_close_matches(plain, [*STANDARD_SPLITS, *OTHER_NAMES], 1, cutoff=0.8)
    # What goes on after a known name, such as testA or val2, is no misspelling.
    if plain in MISTAKEN or (meant and not plain.startswith(meant[0])):
        expected = MISTAKEN.get(plain) or meant[0]
        raise DataError(
            f"{where}: the split is {name!r}: did you mean {expected!r}? Known splits are {known}"
        )
    return name
