"""What a configuration names: a name of this package, or ``package.module:Name`` of a class or function outside it."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from rl_caption.errors import ConfigError


def load_target(name: str, known: Mapping[str, str], key: str) -> Any:
    """Import a class or function.

    Args:
        name: one of ``known``, or ``package.module:Name``.
        known: name -> ``package.module:Name``.
        key: the configuration's key, for messages.

    Raises:
        ConfigError: the name is unknown, or the target cannot be imported or called.
    """
    target = name if ":" in name else known.get(name)
    if target is None:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"{key} is {name!r}{hint}: expected one of {', '.join(known)}, or package.module:Name")
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:  # ValueError: the name is empty
        raise ConfigError(f"{key} is {name!r}: module {module_name!r} cannot be imported: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{key} is {name!r}: module {module_name!r} has no class or function {attribute!r}")
    return found
