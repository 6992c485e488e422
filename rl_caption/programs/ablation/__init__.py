"""Grids of runs, and the comparison of their results."""
