"""Checks of options by their annotations, and classes and functions by name.

The annotation of an option says its type, its choices (``Literal["mean", "max"]``) and its range
(``Annotated[int, Field(ge=1)]``); pydantic reads it. A class or function is named by an entry of a
table, or as ``package.module:Name``; it is imported when it is asked for.
"""

import difflib
import inspect
import json
import re
import reprlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeAlias, get_type_hints

from pydantic import (
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    create_model,
)

from rewards.base import TARGETS, errors_of_user_code
from rewards.trust import import_outside

VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
_REPR = reprlib.Repr()
_WORDS = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "more than",
}
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80

_UNION = re.compile(r"str|bool|int|float|dict|.*\[.*\]")

Count: TypeAlias = Annotated[int, Field(ge=1)]
"""A number of things of which there has to be one."""
Size: TypeAlias = Annotated[int, Field(ge=1, le=2**24)]
"""Of a layer, a table or an input; a larger number is not allocated."""


def short_repr(value: Any) -> str:
    """``repr`` of a value for a message: short, whatever is nested in it."""
    return _REPR.repr(value)[:120]


def dotted(path: tuple[int | str, ...]) -> str:
    """A path of keys and indices, without types of a union, as text: ``select[0].min``."""
    text = ""
    for part in path:
        if not _UNION.fullmatch(str(part)):
            text += (
                f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
            )
    return text


def sentence(item: Any, key: str) -> str:
    """One error of pydantic as a sentence: key, value, and what would be right."""
    message: str = item["msg"].removeprefix("Value error, ")
    if (
        item["type"] == "value_error"
    ):  # raised by a rule across keys, whose names it has
        return f"{key}.{message}" if key else message
    if item["type"] == "missing":
        return f"{key} is not set"
    if item["type"] in ("model_type", "dict_type"):
        message = "keys and values"
    message = message.removeprefix("Input should be ")
    for long, short in _WORDS.items():
        message = message.replace(long, short)
    return f"{key} is {short_repr(item['input'])}: expected {message}"


@cache
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
    except (
        PydanticUserError
    ):  # a TypedDict or a dataclass, which takes no configuration
        return TypeAdapter(annotation)


def check_type(value: Any, annotation: Any, where: str, error: type[Exception]) -> None:
    """Check that a value has a type: ``int``, ``dict[str, list[float]]``, a TypedDict, ...

    Raises ``error``, whose message begins with ``where``, where it has not.
    """
    try:
        _adapter(annotation).validate_python(value, strict=True)
    except ValidationError as found:
        item = found.errors(include_url=False)[0]
        key = dotted(item["loc"])
        if item["type"] == "missing":
            raise error(f"{where} has no {key!r}") from found
        raise error(sentence(item, f"{where}, {key!r}" if key else where)) from found


def check_values(annotation: Any, **values: Any) -> None:
    """Raise ``ValueError`` for the first of ``values``, by name, that does not fit ``annotation``."""
    for name, value in values.items():
        check_type(value, annotation, name, ValueError)


def check_fields(instance: Any) -> None:
    """Check every field of a dataclass by its annotation, as ``check_values`` does."""
    for name, annotation in get_type_hints(type(instance), include_extras=True).items():
        check_type(getattr(instance, name), annotation, name, ValueError)


def options_of(target: Any, skip: int = 0) -> dict[str, inspect.Parameter]:
    """The parameters of a class, or of a function after its first ``skip``."""
    try:
        signature = inspect.signature(target, eval_str=True)
    except NameError:  # a type that is imported for type checkers only
        signature = inspect.signature(target)
    parameters = list(signature.parameters.values())
    options = parameters if isinstance(target, type) else parameters[skip:]
    return {option.name: option for option in options}


def wrong_arguments(
    target: Any,
    skip: int,
    name: str,
    arguments: Mapping[str, Any],
    key: Callable[[str], str],
    required: bool = True,
) -> list[str]:
    """A sentence for each thing that is wrong with the arguments of ``target``.

    Args:
        target: a class or a function.
        skip: number of a function's first parameters that are not options.
        name: of the target, for messages.
        arguments: plain values, as a configuration has them.
        key: from the name of an argument to its configuration key, for messages.
        required: whether missing arguments are wrong, too.
    """
    options = options_of(target, skip)
    takes = [name for name, option in options.items() if option.kind not in VARIADIC]
    fields: dict[str, Any] = {}
    for option in takes:
        annotation = options[option].annotation
        try:
            known = not isinstance(annotation, str) and _adapter(annotation)
        except (PydanticUserError, TypeError):
            known = None
        is_required = required and options[option].default is inspect.Parameter.empty
        fields[option] = (annotation if known else Any, ... if is_required else None)
    takes_any = any(option.kind is option.VAR_KEYWORD for option in options.values())
    rules = ConfigDict(
        extra="allow" if takes_any else "forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
    )
    model = create_model("Options", __config__=rules, **fields)
    try:
        model.model_validate_json(json.dumps(arguments), strict=True)
    except ValidationError as error:
        sentences = []
        for item in error.errors(include_url=False):
            option, *rest = map(str, item["loc"])
            where = dotted((key(option), *item["loc"][1:]))
            if item["type"] == "extra_forbidden":
                close = difflib.get_close_matches(option, takes, 1)
                hint = f"did you mean {close[0]}? " if close else ""
                text = f"{where} is not an option of {name} (it is {short_repr(item['input'])}): "
                text += f"{hint}it takes {', '.join(takes) or 'no options'}"
                sentences.append(text)
            elif item["type"] == "missing" and not rest:
                sentences.append(f"{where} is not set: {name} needs it")
            else:
                sentences.append(sentence(item, where))
        return list(dict.fromkeys(sentences))
    return []


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
    said = f"{key} is {name!r}"
    target = name if ":" in name else (table or {}).get(name, "")
    module_name, _, attribute = target.partition(":")
    if not all(map(str.isidentifier, [*module_name.split("."), attribute])):
        close = difflib.get_close_matches(name, table or {}, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        expected = f"one of {', '.join(table)}, or " if table else ""
        raise error(f"{said}{hint}: expected {expected}package.module:Name")
    if target == name:
        TARGETS.setdefault(module_name, f"{key} {name}")
    try:
        with errors_of_user_code(f"{key} {name}", error, kept):
            module = import_outside(module_name)
    except (ImportError, SyntaxError) as failure:
        raise error(
            f"{said}: module {module_name!r} cannot be imported: {failure}"
        ) from failure
    value = getattr(module, attribute, None)
    if not callable(value) and not isinstance(value, values):
        raise error(
            f"{said}: module {module_name!r} has no class or function {attribute!r}"
        )
    return value


def target_name(target: Any) -> str:
    """``package.module:Name`` of a class, of a function or one with its options bound, or of the
    class of an object.
    """
    function = getattr(target, "func", target)
    has_name = function if hasattr(function, "__qualname__") else type(function)
    return f"{has_name.__module__}:{has_name.__qualname__}"
