"""Code from outside that fails: one error that names the target and its key, and then the user's own line."""

import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rewards.base import RewardError
from rl_caption.errors import ConfigError, errors_of_user_code
from rl_caption.launch import stop_requests


def no_key() -> Any:
    return {}["caption"]


def no_file() -> Any:
    return open("nowhere/at/all")


def leaves() -> Any:
    sys.exit(0)


def in_a_library() -> Any:
    return signal.Signals(1000)


@pytest.mark.parametrize(
    ("call", "line", "raised"),
    [
        (no_key, 'return {}["caption"]', "KeyError: 'caption'"),
        (no_file, 'return open("nowhere/at/all")', "FileNotFoundError"),
        (leaves, "sys.exit(0)", "SystemExit: 0"),
        (in_a_library, "return signal.Signals(1000)", "ValueError: 1000 is not a valid Signals"),
    ],
)
def test_the_target_comes_first_and_then_the_own_line(call: Callable[[], Any], line: str, raised: str) -> None:
    with pytest.raises(ConfigError) as failed, errors_of_user_code("data.target x:Y"):
        call()
    message = str(failed.value)
    assert message.startswith(f"data.target x:Y: {__file__}, line ")
    assert line in message
    assert raised in message


def test_what_is_not_the_users_passes() -> None:
    with pytest.raises(RewardError, match="as it is"), errors_of_user_code("key"):
        raise RewardError("as it is")
    with pytest.raises(ConfigError, match="inner: "), errors_of_user_code("outer"), errors_of_user_code("inner"):
        no_key()


def test_a_signal_ends_the_program_while_a_users_code_runs() -> None:
    with pytest.raises(SystemExit, match="143"), stop_requests(leave=True), errors_of_user_code("key"):
        signal.raise_signal(signal.SIGTERM)
