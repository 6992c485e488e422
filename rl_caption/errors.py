"""Errors that a user can mend, printed as one message instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A configuration is not usable; the message names the key, the value, and what would be right."""


EXPECTED = {
    "rewards.base": ("RewardError",),
    "rl_caption.captioners.base": ("CaptionerError",),
    "rl_caption.training.checkpoint": ("CheckpointError",),
    "rl_caption.data.base": ("DataError",),
    "rl_caption.engines": ("EngineError",),
    "rl_caption.errors": ("ConfigError",),
    "rl_caption.evaluation": ("EvaluationError", "JavaError"),
    "rl_caption.launch": ("LaunchError",),
    "rl_caption.report.read": ("ReportError",),
    "rl_caption.training.loop": ("NonFiniteError",),
}
"""Module -> its errors whose message says what would be right."""


def expected_errors() -> tuple[type[Exception], ...]:
    """The errors of ``EXPECTED`` that can have been raised, those of imported modules, and ``OSError``."""
    found = (getattr(sys.modules.get(module), name, None) for module, names in EXPECTED.items() for name in names)
    return (*(error for error in found if error is not None), OSError)


@contextmanager
def user_errors() -> Iterator[None]:
    """End the program with code 1 and the message of an expected error; anything else is a defect and is raised."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        if not isinstance(error, expected_errors()):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
