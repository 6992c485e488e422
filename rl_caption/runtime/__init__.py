"""Foundations of the other folders: errors, options of user code, data types of a
training step, processes and engines.
"""
