"""Stress tests of a reward before training: probes, best of n, a search for exploits."""
