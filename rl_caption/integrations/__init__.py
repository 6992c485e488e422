"""Rewards in other frameworks: a server that scores captions, its client, an adapter
for each framework.

The client and the adapters need nothing but the standard library and their framework.
"""
