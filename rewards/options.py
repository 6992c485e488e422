"""Checks of options by their annotations, and classes and functions by name.

The annotation of an option says its type, its choices (``Literal["mean", "max"]``) and
its range (``Annotated[int, Field(ge=1)]``); pydantic reads it. A class or function is
named by an entry of a table, or as ``package.module:Name``; it is imported when it is
asked for.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import (
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)

from rewards.base import TARGETS, errors_of_user_code, nearest
from rewards.trust import import_outside

_WORDS = {
    "Value error, ": "",
    "Input should be ": "",
    "List should have ": "",
    "an object": "keys and values",
    "a valid dictionary": "keys and values",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}
_UNION = re.compile(r"str|bool|int|float|dict|.*\[.*\]")

Count = Annotated[int, Field(ge=1)]
"""Number of things, at least 1."""
Size = Annotated[int, Field(ge=1, le=2**24)]
"""Size of a layer, a table or an input, from 1 to 2**24."""


def dotted_key(path: tuple[int | str, ...]) -> str:
    """A path of keys and indices, without types of a union, as text: ``select[0].min``."""
    text = ""
    for entry in path:
        if isinstance(entry, int):
            text += f"[{entry}]"
        elif not _UNION.fullmatch(entry):
            text += f".{entry}"
    return text.lstrip(".")


def sentence(item: Any, key: str) -> str:
    """One error of pydantic as a sentence: key, value, and what would be right."""
    message: str = item["msg"]
    for long, short in _WORDS.items():
        message = message.replace(long, short)
    if item["type"] == "value_error":  # of a rule across keys, whose names it has
        whole = not key or message.startswith(f"{key}.")
        return message if whole else f"{key}.{message}"
    if item["type"] == "missing":
        return f"{key} is not set"
    return f"{key} is {item['input']!r:.120}: expected {message}"


def sentences(
    error: ValidationError, unknown: Callable[[str], str], where: str = ""
) -> str:
    """Sentences about the first three wrong keys, joined by semicolons. ``where`` is
    the key that contains them; ``unknown`` makes the sentence of a key that does not
    exist.
    """
    texts: dict[str, str] = {}
    for item in error.errors(include_url=False):
        key = dotted_key((where, *item["loc"]))
        is_unknown = item["type"] == "extra_forbidden"
        text = unknown(key) if is_unknown else sentence(item, key)
        if key in texts and item["type"] != "value_error":  # another type of a union
            text = f"{texts[key]} or {text.partition(': expected ')[2]}"
        texts[key] = text
    return "; ".join([*texts.values()][:3])


@cache
def adapter(annotation: Any) -> TypeAdapter[Any]:
    """Pydantic's validator of a type, cached."""
    try:
        return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
    except PydanticUserError:  # a TypedDict or a dataclass, which takes none
        return TypeAdapter(annotation)


def check_type(value: Any, annotation: Any, where: str, error: type[Exception]) -> None:
    """Check that a value has a type: ``int``, ``dict[str, list[float]]``, a TypedDict, ...

    Raises ``error``, whose message begins with ``where``, if it has another type.
    """
    try:
        adapter(annotation).validate_python(value, strict=True)
    except ValidationError as found:
        item = found.errors(include_url=False)[0]
        key = dotted_key(item["loc"])
        raise error(sentence(item, f"{where}, {key!r}" if key else where)) from found


def check_values(annotation: Any, **values: Any) -> None:
    """Raise ``ValueError`` for the first of ``values``, by name, that does not fit ``annotation``."""
    for name, value in values.items():
        check_type(value, annotation, name, ValueError)


def check_fields(instance: Any) -> None:
    """Check every field of a dataclass by its annotation, as ``check_values`` does."""
    for name, annotation in get_type_hints(type(instance), include_extras=True).items():
        check_type(getattr(instance, name), annotation, name, ValueError)


def load_target(
    name: str,
    key: str,
    table: Mapping[str, str] | None = None,
    error: type[Exception] = ValueError,
    kept: tuple[type[Exception], ...] = (),
) -> Any:
    """Import the class or function ``package.module:Name``, or the target of ``name``
    in ``table``.

    Args:
        name: ``package.module:Name``, or a key of ``table``.
        key: what names it, such as a key of a configuration; for messages.
        table: short name -> ``package.module:Name``.
        error: type of the exceptions that are raised.
        kept: types of exceptions of the module's own code that are not turned into an ``error``.

    Raises:
        error: an unknown name, or a target that cannot be imported; the message names ``key``.
    """
    target = name if ":" in name else (table or {}).get(name, "")
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        hint = expected = ""
        if table:
            hint = f" (did you mean {nearest(name, table)}?)"
            expected = f"one of {', '.join(table)}, or "
        raise error(f"{key} is {name!r}{hint}: expected {expected}package.module:Name")
    if target == name:
        TARGETS.setdefault(module, f"{key} {name}")
    try:
        with errors_of_user_code(f"{key} {name}", error, kept):
            return getattr(import_outside(module), attribute)
    except (ImportError, AttributeError, SyntaxError, TypeError) as failure:
        raise error(f"{key} is {name!r}: it cannot be imported: {failure}") from failure


def target_name(target: Any) -> str:
    """``package.module:Name`` of a class, of a function, of the function in a
    ``functools.partial``, or of an object's class.
    """
    function = getattr(target, "func", target)
    has_name = function if hasattr(function, "__qualname__") else type(function)
    return f"{has_name.__module__}:{has_name.__qualname__}"
