"""Sources of hard negatives: false captions of an image (``negatives.source`` of the
task ``contrastive``).
"""

from typing import Protocol

import numpy as np

from rl_caption.data.base import DataError, Row


class NegativeSource(Protocol):
    """A source of hard negatives: the generated world, a language model, a column of the data."""

    def __call__(
        self, row: Row, caption: str, generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        """Return pairs (kind, false caption), the preferred ones first; a pure function
        of the arguments.
        """
        ...


class ColumnNegatives:
    """Hard negatives of the dataset itself, a ``NegativeSource``: the column
    ``negatives``, one list per reference.
    """

    def __call__(
        self, row: Row, caption: str, generator: np.random.Generator
    ) -> list[tuple[str, str]]:
        """The negatives of the reference, in random order. Raises ``DataError`` where
        the row has none for it.
        """
        column = row.get("negatives")
        if column is None or caption not in row["references"]:
            raise DataError(
                f"image {row['image_id']!r} has no negatives for {caption!r}: expected that column"
            )
        entries = column[row["references"].index(caption)]
        return [
            ("data", entries[index]) for index in generator.permutation(len(entries))
        ]


NEGATIVES = {
    "scenes": "rl_caption.data.scenes.negatives:SceneNegatives",
    "data": "rl_caption.data.negatives:ColumnNegatives",
}
"""Name of a ``NegativeSource`` -> ``module:Name``."""
