"""Recorded runs: ``python -m tests.recorded``."""
