"""Errors that a user can mend, printed as one message instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """A configuration is not usable; the message names the key, the value, and what would be right."""


def expected_errors() -> tuple[type[Exception], ...]:
    """The errors whose message says what would be right. Imported on demand: this is only needed once one is raised."""
    from rewards.base import RewardError
    from rewards.judging.sets import JudgingSetError
    from rl_caption.captioners.base import CaptionerError
    from rl_caption.checkpoint import CheckpointError
    from rl_caption.data.base import DataError
    from rl_caption.engines import EngineError
    from rl_caption.evaluation import EvaluationError, JavaError
    from rl_caption.launch import LaunchError
    from rl_caption.report.errors import ReportError
    from rl_caption.trainer import NonFiniteError

    return (
        ConfigError,
        CaptionerError,
        DataError,
        EngineError,
        EvaluationError,
        JavaError,
        JudgingSetError,
        CheckpointError,
        LaunchError,
        ReportError,
        RewardError,
        NonFiniteError,
        OSError,
    )


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
