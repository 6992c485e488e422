"""Runs that are interrupted where they write or read, to go on later."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest


@contextmanager
def interrupted(owner: Any, name: str, after: int) -> Iterator[None]:
    """What is within ends in ``KeyboardInterrupt``: at the call of a function that follows
    ``after`` whole ones.
    """
    original, calls = getattr(owner, name), []

    def stopped(*args: Any, **kwargs: Any) -> Any:
        if len(calls) == after:
            raise KeyboardInterrupt
        calls.append(name)
        return original(*args, **kwargs)

    with patch.object(owner, name, stopped), pytest.raises(KeyboardInterrupt):
        yield
