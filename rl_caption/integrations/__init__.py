"""Rewards in other frameworks: a server that scores captions, its client, and one thin adapter for each framework.

``client`` and the adapters need nothing but the standard library, so that they import in a worker without torch.
"""
