"""Checks of options by their annotations, and classes and functions by name.

The annotation of an option says its type, its choices (``Literal["mean", "max"]``) and its range
(``Annotated[int, Range(min=1)]``); every check of a configuration, of an argument and of a record
in a file reads it. A class or function is named by an entry of a table, or as
``package.module:Name``; it is imported when it is asked for.
"""

import dataclasses
import difflib
import functools
import math
import numbers
import reprlib
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from rewards.base import TARGETS, errors_of_user_code
from rewards.trust import import_outside

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80
_NUMBERS: dict[Any, Any] = {
    int: (int, numbers.Integral),
    float: (int, float, numbers.Real),
}  # also NumPy's
_WIDER: dict[Any, Any] = {**_NUMBERS, tuple: (list, tuple), Path: (str, Path)}


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that an option may have. ``min`` and ``max`` are allowed themselves, ``above``
    and ``below`` not.
    """

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
        if value > self.max:
            return f"at most {self.max:.10g}"
        return "a finite number" if math.isinf(value) else None

    def __str__(self) -> str:
        low = (
            f"more than {self.above:g}"
            if math.isfinite(self.above)
            else f"at least {self.min:.10g}"
        )
        high = (
            f"less than {self.below:g}" if math.isfinite(self.below) else f"at most {self.max:.10g}"
        )
        return f"{low} and {high}"

    __repr__ = __str__  # in --help


Count: TypeAlias = Annotated[int, Range(min=1)]
"""A number of things of which there has to be one."""
Size: TypeAlias = Annotated[int, Range(min=1, max=2**24)]
"""Of a layer, a table or an input; a larger number is not allocated."""


def wrong_values(value: Any, annotation: Any, key: str = "") -> Iterator[str]:
    """Yield a sentence, with key and value, for each thing that is wrong with a value of a
    configuration.

    Wrong are: null where the annotation does not allow it; a number that is out of its range or not
    finite; anything but a dataclass or mapping where a dataclass is expected; text with control
    characters or lone surrogates. That types fit otherwise is left to the parser.

    Args:
        value: of the annotation; of a dataclass its instance, or a mapping or namespace with some
            of its keys.
        annotation: a dataclass of options, or the annotation of one of them.
        key: dotted name of the value.
    """
    options = (
        get_args(annotation)
        if get_origin(annotation) in (Union, types.UnionType)
        else (annotation,)
    )
    options = tuple(option for option in options if option is not types.NoneType)
    if value is None:
        if annotation is not Any and types.NoneType not in get_args(annotation):
            none = {list: "a list ([] is an empty one)", dict: "keys and values ({} has none)"}
            yield f"{key} is null: expected {none.get(_outer(annotation), 'a value')}; leave it out for the default"
        return
    annotation = options[0] if len(options) == 1 else Any
    if dataclasses.is_dataclass(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        values = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
        if values is None:
            yield f"{key} is {short_repr(value)}: expected options such as {', '.join(list(hints)[:3])}"
            return
        for name in [name for name in hints if name in values]:
            yield from wrong_values(values[name], hints[name], f"{key}.{name}" if key else name)
    elif (
        get_origin(annotation) is Annotated
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    ):
        expected = annotation.__metadata__[0].expected(value)
        if expected is not None:
            yield f"{key} is {short_repr(value)}: expected {expected}"
    elif isinstance(value, Mapping):
        inner = get_args(annotation)[1] if get_origin(annotation) is dict else Any
        for name, item in value.items():
            yield from wrong_values(name, str, f"a name in {key}")
            yield from wrong_values(item, inner, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        inners = get_args(annotation) if get_origin(annotation) in (list, tuple) else (Any,)
        for index, item in enumerate(value):
            yield from wrong_values(item, inners[index % len(inners)], f"{key}[{index}]")
    elif isinstance(value, str) and not is_text(value):
        yield f"{key} is {short_repr(value)}: expected text without control characters, in UTF-8"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{key} is {value}: expected a finite number"


@functools.cache
def type_hints(owner: Any) -> dict[str, Any]:
    """The annotations of a class's fields or a function's arguments, with their ranges."""
    return get_type_hints(owner, include_extras=True)


def short_repr(value: Any) -> str:
    """``repr`` of a value for a message: short, whatever is nested in it."""
    return _REPR.repr(value)[:120]


def is_text(value: str) -> bool:
    """Whether text has no control characters but tab and line breaks, and no lone surrogates."""
    return not any(
        (ord(char) < 32 and char not in "\t\n\r") or 0xD800 <= ord(char) < 0xE000 for char in value
    )


def check_type(value: Any, annotation: Any, where: str, error: type[Exception]) -> None:
    """Check that a plain value has a type: ``int``, ``dict[str, list[float]]``, ``str | None``, a
    TypedDict, ...

    A truth value is no number, a whole number is a ``float``, a list is a ``tuple`` of its length,
    a path is text, and a TypedDict may have further keys. A number has to be in the range of its
    annotation.

    Raises:
        error: it has not; the message begins with ``where`` and names the key.
    """
    if get_origin(annotation) is Annotated:
        check_type(value, get_args(annotation)[0], where, error)
        expected = annotation.__metadata__[0].expected(value)
        if expected is not None:
            raise error(f"{where} is {short_repr(value)}: expected {expected}")
        return
    origin, inners = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return
    if is_typeddict(annotation):
        check_type(value, dict, where, error)
        for key, inner in type_hints(annotation).items():
            if key in value:
                inner = (
                    get_args(inner)[0] if get_origin(inner) in (NotRequired, Required) else inner
                )
                check_type(value[key], inner, f"{where}, {key!r}", error)
            elif key in annotation.__required_keys__:
                raise error(f"{where} has no {key!r}")
    elif origin in (Union, types.UnionType):
        best = next((inner for inner in inners if _is_instance(value, inner)), None)
        if best is None:
            raise error(
                f"{where} is {short_repr(value)}: expected "
                f"{' or '.join(dict.fromkeys(map(_type_name, inners)))}"
            )
        check_type(value, best, where, error)
    elif not _is_instance(value, annotation) or (origin is tuple and len(value) != len(inners)):
        raise error(f"{where} is {short_repr(value)}: expected {_type_name(annotation)}")
    elif origin is dict:
        for key, inner in value.items():
            check_type(key, inners[0], f"{where}, key", error)
            check_type(inner, inners[1], f"{where}, {key!r}", error)
    elif origin in (list, tuple):
        for index, inner in enumerate(value):
            check_type(
                inner, inners[index] if origin is tuple else inners[0], f"{where}, [{index}]", error
            )


def check_values(annotation: Any, **values: Any) -> None:
    """Raise ``ValueError`` for the first of ``values``, by name, that is not of the type, among the
    choices or in the range of ``annotation``.
    """
    for name, value in values.items():
        check_type(value, annotation, name, ValueError)


def check_fields(instance: Any) -> None:
    """Check every field of a dataclass by its annotation, as ``check_values`` does."""
    for name, annotation in type_hints(instance.__class__).items():
        check_type(getattr(instance, name), annotation, name, ValueError)


def _outer(annotation: Any) -> Any:
    """A type without its parameters: ``list`` for ``list[int]``."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _outer(get_args(annotation)[0])
    return dict if is_typeddict(annotation) else origin or annotation


def _is_instance(value: Any, annotation: Any) -> bool:
    """Whether ``value`` is of a type, whatever its elements are."""
    outer = _outer(annotation)
    if outer is Literal:
        return any(
            value == choice and type(value) is type(choice) for choice in get_args(annotation)
        )
    if outer is Any or isinstance(value, bool):
        return outer in (Any, bool)
    if not isinstance(outer, type) or getattr(outer, "_is_protocol", False):
        return True  # of a class or function from outside, whose annotations may be anything
    return isinstance(value, _WIDER.get(outer, outer))


def _type_name(annotation: Any) -> str:
    outer = _outer(annotation)
    if outer is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if outer is tuple and get_args(annotation):
        return f"a list of {len(get_args(annotation))}"
    names = {
        dict: "keys and values",
        list: "a list",
        tuple: "a list",
        str: "text",
        int: "a whole number",
        Path: "text",
    }
    names |= {float: "a number", bool: "true or false", types.NoneType: "null"}
    return names.get(outer) or outer.__name__


def load_target(
    name: str,
    key: str,
    table: Mapping[str, str] | None = None,
    error: type[Exception] = ValueError,
    kept: tuple[type[Exception], ...] = (),
    values: tuple[type, ...] = (),
) -> Any:
    """The class or function ``package.module:Name``, or the one that ``table`` has under ``name``.

    Args:
        name: which one.
        key: what names it, such as a key of a configuration; for messages.
        table: short name -> ``package.module:Name``.
        error: type of what is raised.
        kept: types of exceptions of the module's own code that are not turned into an ``error``.
        values: types of what may stand in place of a class or function.

    Raises:
        error: an unknown name, or a target that cannot be imported or called; the message names
            ``key``.
    """
    target = name if ":" in name else (table or {}).get(name)
    if target is None:
        close = difflib.get_close_matches(name, table or {}, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        expected = f"one of {', '.join(table)}, or " if table else ""
        raise error(f"{key} is {name!r}{hint}: expected {expected}package.module:Name")
    module_name, _, attribute = target.partition(":")
    if not all(map(str.isidentifier, [*module_name.split("."), attribute])):
        raise error(f"{key} is {name!r}: expected package.module:Name")
    if target == name:
        TARGETS.setdefault(module_name, f"{key} {name}")
    try:
        with errors_of_user_code(f"{key} {name}", error, kept):
            module = import_outside(module_name)
    except (ImportError, SyntaxError) as failure:
        same = next(
            (entry for entry in (table or {}).values() if entry.endswith(f":{attribute}")), None
        )
        hint = f". Did you mean {same!r}?" if same else ""
        raise error(
            f"{key} is {name!r}: module {module_name!r} cannot be imported: "
            f"{failure}{hint}{_hidden(module_name)}"
        ) from failure
    value = getattr(module, attribute, None)
    if not callable(value) and not isinstance(value, values):
        raise error(
            f"{key} is {name!r}: module {module_name!r} has no class or function "
            f"{attribute!r}{_hidden(module_name)}"
        )
    return value


def _hidden(module_name: str) -> str:
    """A hint where a file of the working directory has the name of an installed package, which is
    imported instead.
    """
    package = module_name.partition(".")[0]
    loaded = getattr(sys.modules.get(package), "__file__", None)
    for mine in (Path(f"{package}.py").resolve(), Path(package).resolve()):
        if loaded and mine.exists() and not Path(loaded).resolve().is_relative_to(mine):
            return f"; {mine} is hidden by the installed package {package!r}: rename it"
    return ""


def target_name(target: Any) -> str:
    """``package.module:Name`` of a class, of a function or one with its options bound, or of the
    class of an object.
    """
    function = getattr(target, "func", target)
    has_name = function if hasattr(function, "__qualname__") else type(function)
    return f"{has_name.__module__}:{has_name.__qualname__}"
