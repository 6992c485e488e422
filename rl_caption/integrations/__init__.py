"""Rewards in other frameworks: a server that scores captions, its client, and an
adapter for each framework.

The client and the adapters need only the standard library and their framework.
"""
