"""Grids of self-critical runs from one starting checkpoint, and the comparison of what came of
them.
"""
