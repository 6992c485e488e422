"""Options: their ranges, which stand in annotations, and the classes and functions that a configuration names.

What is named is a name from a table of this package's, or ``package.module:Name`` of something outside it; nothing is
imported before it is asked for. Its arguments are its options, and ``Annotated[float, Range(min=0)]`` is an option with
its range.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import math
import types
from collections.abc import Iterator, Mapping
from functools import partial, update_wrapper
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin, get_type_hints

from rl_caption.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that an option may have. ``min`` and ``max`` are allowed themselves, ``above`` and ``below`` not."""

    min: float = -math.inf
    max: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def expected(self, value: float) -> str | None:
        """What would be right instead of ``value``; None if it is in the range."""
        if value != value:
            return f"a number, {self}"
        if value <= self.above:
            return f"more than {self.above:g}"
        if value < self.min:
            return f"at least {self.min:.10g}"
        if value >= self.below < math.inf:
            return f"less than {self.below:g}"
        return f"at most {self.max:.10g}" if value > self.max else None

    def __str__(self) -> str:
        low = f"more than {self.above:g}" if math.isfinite(self.above) else f"at least {self.min:.10g}"
        high = f"less than {self.below:g}" if math.isfinite(self.below) else f"at most {self.max:.10g}"
        return f"{low} and {high}"

    __repr__ = __str__  # in --help


# Upper bounds are far beyond any use: they stop a slip of the keyboard before it becomes an allocation.
Seed: TypeAlias = Annotated[int, Range(min=0, max=2**32 - 1)]
"""What Python, NumPy and PyTorch all accept."""
Steps: TypeAlias = Annotated[int, Range(min=1, max=10**9)]
"""A number of steps, images or words."""
BatchSize: TypeAlias = Annotated[int, Range(min=1, max=10**6)]
Tokens: TypeAlias = Annotated[int, Range(min=1, max=16384)]
"""Length of a caption."""
Beams: TypeAlias = Annotated[int, Range(min=1, max=1024)]
LengthPenalty: TypeAlias = Annotated[float, Range(min=-100, max=100)]
Mebibytes: TypeAlias = Annotated[int, Range(min=0, max=2**24)]
Workers: TypeAlias = Annotated[int, Range(min=1, max=65536)]
"""Processes or threads."""
LearningRate: TypeAlias = Annotated[float, Range(above=0, max=100)]
Positive: TypeAlias = Annotated[float, Range(above=0, max=10**9)]
Weight: TypeAlias = Annotated[float, Range(min=0, max=10**6)]
"""Of a term of a loss, or a threshold."""
Rank: TypeAlias = Annotated[int, Range(min=1, max=65536)]
Positions: TypeAlias = Annotated[int, Range(min=0, max=16384)]
Resamples: TypeAlias = Annotated[int, Range(min=0, max=10**6)]
TEMPERATURES = Range(min=1e-6, max=1e6)
"""Below, float32 cannot hold logits / temperature; above, it cannot distinguish forbidden tokens."""
Temperature: TypeAlias = Annotated[float, TEMPERATURES]
Fraction: TypeAlias = Annotated[float, Range(min=0, max=1)]
Probability: TypeAlias = Annotated[float, Range(min=0, below=1)]
"""Of dropout, smoothing or a running average: 1 would leave nothing."""


def wrong_values(value: Any, kind: Any, key: str = "") -> Iterator[str]:
    """Yield what is wrong with ``value``: a sentence each, with key and value.

    Wrong is null where the annotation does not have it, a number out of its range or not finite, something else where
    a dataclass is meant, and text with control characters or lone surrogates; other types are the parser's.

    Args:
        value: of the annotation ``kind``; of a dataclass its instance, or a mapping or namespace with some of its keys.
        kind: a dataclass of options, or the annotation of one of them.
        key: dotted name of the value.
    """
    options = [option for option in get_args(kind) if option is not types.NoneType] if _is_union(kind) else [kind]
    if value is None:
        if kind is not Any and types.NoneType not in get_args(kind):
            yield f"{key} is null: expected a value; leave the line out for the default"
        return
    kind = options[0] if len(options) == 1 else Any
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        given = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
        if given is None:
            yield f"{key} is {shown(value)}: expected options such as {', '.join(list(hints)[:3])}"
            return
        for name in [name for name in hints if name in given]:
            yield from wrong_values(given[name], hints[name], f"{key}.{name}" if key else name)
    elif get_origin(kind) is Annotated and isinstance(value, int | float) and not isinstance(value, bool):
        expected = kind.__metadata__[0].expected(value)
        if expected is not None:
            yield f"{key} is {shown(value)}: expected {expected}"
    elif isinstance(value, Mapping):
        inner = get_args(kind)[1] if get_origin(kind) is dict else Any
        for name, item in value.items():
            yield from wrong_values(name, str, f"a name in {key}")
            yield from wrong_values(item, inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        inners = get_args(kind) if get_origin(kind) in (list, tuple) else (Any,)
        for index, item in enumerate(value):
            yield from wrong_values(item, inners[index % len(inners)], f"{key}[{index}]")
    elif isinstance(value, str) and not is_text(value):
        yield f"{key} is {shown(value)}: expected text without control characters, in UTF-8"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key} is {value}: expected a finite number"


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def shown(value: Any) -> str:
    """The value as a message shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_text(value: str) -> bool:
    """Whether a file can be named so: no NUL or other control characters, no lone surrogates."""
    return not any((ord(char) < 32 and char not in "\t\n\r") or 0xD800 <= ord(char) < 0xE000 for char in value)


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
