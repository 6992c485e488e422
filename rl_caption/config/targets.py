"""What a configuration names: a class or function ``package.module:Name``, or a name from a table of this package's.

Options are arguments; their ranges are in the annotations (``Annotated[float, Range(min=0)]``), as in configurations.
Nothing is imported before it is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from functools import partial, update_wrapper
from typing import Any, get_type_hints

from rl_caption.config.ranges import wrong_values
from rl_caption.errors import ConfigError


def load_target(name: str, key: str, known: Mapping[str, str] | None = None) -> Any:
    """The class or function ``package.module:Name``, or the one that ``known`` has under ``name``.

    Raises:
        ConfigError: an unknown name, or a target that cannot be imported or called; the message names ``key``.
    """
    target = name if ":" in name else (known or {}).get(name)
    if target is None:
        close = difflib.get_close_matches(name, known or {}, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        expected = f"one of {', '.join(known)}, or " if known else ""
        raise ConfigError(f"{key} is {name!r}{hint}: expected {expected}package.module:Name")
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:  # ValueError: the name is empty
        raise ConfigError(f"{key} is {name!r}: module {module_name!r} cannot be imported: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{key} is {name!r}: module {module_name!r} has no class or function {attribute!r}")
    return found


def options_of(target: Any, skip: int) -> dict[str, inspect.Parameter]:
    """The arguments of a class, or those of a function after the first ``skip``."""
    parameters = list(inspect.signature(target).parameters.values())
    return {each.name: each for each in (parameters if isinstance(target, type) else parameters[skip:])}


def check_options(target: Any, skip: int, name: str, kwargs: Mapping[str, Any], key: str) -> None:
    """Check ``kwargs``, the value of ``key``, against the options of ``target``, which is called ``name``.

    Raises:
        ConfigError: an unknown or missing option, or a value out of its range.
    """
    options = options_of(target, skip)
    takes = ", ".join(map(str, options.values())) or "no options"
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in options.values())
    unknown = [] if takes_any else sorted(set(kwargs) - set(options))
    if unknown:
        raise ConfigError(f"{key}.{unknown[0]} is no option of {name}; it takes: {takes}")
    required = [each.name for each in options.values() if each.default is each.empty and each.kind not in variable]
    missing = [each for each in required if each not in kwargs]
    if missing:
        raise ConfigError(f"{key}.{missing[0]} is not set: {name} needs it; it takes: {takes}")
    constructor = target.__init__
    try:
        hints = get_type_hints(constructor if isinstance(target, type) else target, include_extras=True)
    except NameError:  # imported for type checkers only
        hints = {}
    wrong = [each for k, value in kwargs.items() for each in wrong_values(value, hints.get(k, Any), f"{key}.{k}")]
    if wrong:
        raise ConfigError("; ".join(wrong))


def build_target(target: Any, skip: int, name: str, kwargs: Mapping[str, Any], key: str) -> Any:
    """An instance of a class that can be called, or a function with its options bound; see ``check_options``."""
    check_options(target, skip, name, kwargs, key)
    if not isinstance(target, type):
        return update_wrapper(partial(target, **kwargs), target) if kwargs else target
    try:
        made = target(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {name} cannot be made: {error}") from error
    if not callable(made):
        raise ConfigError(f"{key.removesuffix('_kwargs')} is {name!r}: its instances cannot be called")
    return made
