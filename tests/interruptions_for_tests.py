"""Interruption of runs where they write or read."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest


@contextmanager
def interrupted(owner, name, after):
    """Context manager whose block is interrupted by ``KeyboardInterrupt``, at the call
    of a function after ``after`` complete calls.
    """
    original, calls = getattr(owner, name), []

    def stopped(*args, **kwargs):
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(name)
        return original(*args, **kwargs)

    with patch.object(owner, name, stopped), pytest.raises(KeyboardInterrupt):
        yield
