"""Runs that are interrupted where they write or read, to go on later."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest


@contextmanager
def interrupted(owner, name, after):
    """What is within ends in ``KeyboardInterrupt``: at the call of a function that
    follows ``after`` whole ones.
    """
    original, calls = getattr(owner, name), []

    def stopped(*args, **kwargs):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(name)
        return original(*args, **kwargs)

    with patch.object(owner, name, stopped), pytest.raises(KeyboardInterrupt):
        yield
