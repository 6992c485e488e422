"""Grids of runs, and the comparison of what came of them."""
