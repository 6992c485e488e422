"""Where tokens that are computed stand among those that are not."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the P tokens that are computed stand in a grid of rows and columns.

    Attributes:
        rows, columns: of the grid.
        places: [P] ascending places in the flattened grid; None where all of it is computed.
        sources: [rows·columns] which of the P tokens a place of the grid has the states of, where one stands for
            several; of places without a token any. None where each stands for itself.
    """

    rows: int
    columns: int
    places: Tensor | None = None
    sources: Tensor | None = None

    def queries(self, states: Tensor) -> Tensor:
        """[P, D] -> [rows, columns, D], zeros where nothing is computed."""
        if self.places is not None:
            grid = states.new_zeros(self.rows * self.columns, states.shape[-1])
            grid[self.places] = states  # index_copy_ would keep ``states`` for its backward pass
            states = grid
        return states.unflatten(0, (self.rows, self.columns))

    def keys(self, states: Tensor) -> Tensor:
        """[P, D] -> [rows, columns, D], the states of every token, its own or those of the one that stands for it."""
        if self.sources is None:
            return self.queries(states)
        return states.index_select(0, self.sources).unflatten(0, (self.rows, self.columns))

    def gather(self, grid: Tensor) -> Tensor:
        """[rows, columns, D] -> [P, D]."""
        flat = grid.flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)
