"""Options and their ranges, and the classes and functions that a configuration names.

A class or function is named by a name from one of this package's tables, or as
``package.module:Name``; it is imported when it is asked for. Its arguments are its options, and
``Annotated[float, Range(min=0)]`` is an option with a range.
"""

import dataclasses
import functools
import inspect
import types
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from functools import partial, update_wrapper
from typing import Annotated, Any, TypeAlias, get_args, get_origin, get_type_hints

import rewards.options
from rewards.options import Range, check_type, wrong_values
from rewards.options import is_text as is_text
from rewards.options import short_repr as shown
from rewards.options import target_name as target_name
from rewards.trust import trust
from rl_caption.runtime.errors import KEPT, ConfigError, config_errors, errors_of_user_code

CLASS_KEYS = ("target", "encoder", "image_encoder")
"""Keys, also of ``kwargs``, whose values may name a class outside this package."""
_hints = functools.cache(get_type_hints)
load_target = partial(rewards.options.load_target, error=ConfigError, kept=KEPT)
"""The class or function ``package.module:Name``, or an entry of a table: see ``rewards.options``.
"""


# Upper bounds are far beyond any use: they stop a slip of the keyboard before it becomes an
# allocation.
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
"""Below, float32 cannot hold logits / temperature; above, it cannot distinguish forbidden tokens.
"""
Temperature: TypeAlias = Annotated[float, TEMPERATURES]
Fraction: TypeAlias = Annotated[float, Range(min=0, max=1)]
Probability: TypeAlias = Annotated[float, Range(min=0, below=1)]
"""Of dropout, smoothing or a running average: 1 would leave nothing."""


def alternative_of(options_class: Any, values: Mapping[str, Any]) -> Any:
    """The configuration class that ``values``, of a file and a command line, choose.

    A class that stands for several has a classmethod ``alternative``, from the values of its keys
    to one of them, which is a subclass; and a classmethod ``alternatives``, all of them. Any other
    class stands for itself.
    """
    return (
        options_class.alternative(values) if "alternative" in vars(options_class) else options_class
    )


def with_chosen_sections(options_class: Any, values: Mapping[str, Any]) -> Any:
    """``options_class``, or a subclass whose sections have the classes that ``values`` choose, at
    any depth.
    """
    sections = []
    for option in dataclasses.fields(options_class):
        section, value = _hints(options_class)[option.name], values.get(option.name)
        if isinstance(section, type) and dataclasses.is_dataclass(section):
            inner = value if isinstance(value, Mapping) else {}
            chosen = with_chosen_sections(alternative_of(section, inner), inner)
            sections += [(option.name, chosen)] if chosen is not section else []
    return _with_sections(options_class, tuple(sections)) if sections else options_class


@functools.cache
def _with_sections(options_class: Any, sections: tuple[tuple[str, Any], ...]) -> type[Any]:
    options = [
        (name, section, dataclasses.field(default_factory=section)) for name, section in sections
    ]
    names = {"__doc__": options_class.__doc__, "__module__": options_class.__module__}
    return dataclasses.make_dataclass(
        options_class.__name__, options, bases=(options_class,), namespace=names
    )


def unknown_keys(value: Any, annotation: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted name of each key of ``value``, at any depth, that the dataclasses of
    ``annotation`` do not have.

    ``value`` are the plain values of a file, and ``key`` is the dotted name of ``value`` itself.
    """
    inner = get_args(annotation)[-1] if get_origin(annotation) in (dict, list) else None
    if isinstance(value, Mapping):
        hints = get_type_hints(annotation) if dataclasses.is_dataclass(annotation) else None
        for name, item in value.items():
            dotted = f"{key}.{name}" if key else str(name)
            if hints is not None and name not in hints:
                yield dotted
            else:
                yield from unknown_keys(
                    item, without_null(inner if hints is None else hints[name]), dotted
                )
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_keys(item, inner, f"{key}[{index}]")


def option_keys(annotation: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted names of all options of a dataclass and of the dataclasses in it; not of
    tables of those.
    """
    for name, hint in _hints(annotation).items():
        dotted, inner = f"{key}.{name}" if key else name, without_null(hint)
        yield dotted
        if dataclasses.is_dataclass(inner):
            yield from option_keys(inner, dotted)


def without_null(annotation: Any) -> Any:
    """``X`` of ``X | None``; any other annotation as it is."""
    options = [option for option in get_args(annotation) if option is not types.NoneType]
    return (
        options[0] if types.NoneType in get_args(annotation) and len(options) == 1 else annotation
    )


def class_names(value: Any, key: str = "") -> Iterator[str]:
    """Yield the classes that a configuration names, at ``trust`` and at ``CLASS_KEYS``: its user
    lets them run.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            yield from class_names(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from class_names(item, key)
    elif isinstance(value, str) and (key == "trust" or (key in CLASS_KEYS and ":" in value)):
        yield value


def add_trust(parser: ArgumentParser) -> None:
    """Add the option ``--trust package.module:Class`` (see ``TrustConfig``), which may be repeated."""

    def consent(name: str) -> None:
        trust([name])

    help_text = "a class outside this package that a saved model's config.json may name (docs/reliability.md)"
    parser.add_argument(
        "--trust", type=consent, action="append", metavar="package.module:Class", help=help_text
    )


def options_of(target: Any, skip: int) -> dict[str, inspect.Parameter]:
    """The arguments of a class, or those of a function after the first ``skip``."""
    parameters = list(inspect.signature(target).parameters.values())
    return {
        parameter.name: parameter
        for parameter in (parameters if isinstance(target, type) else parameters[skip:])
    }


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
        arguments: the arguments.
        key: from the name of an argument to its configuration key, for messages.
        required: whether missing arguments are wrong, too.
    """
    options = options_of(target, skip)
    named = {
        key: argument
        for key, argument in options.items()
        if argument.kind not in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
    }
    takes = f"it takes: {', '.join(named) or 'no options'}"
    takes_any = any(argument.kind is argument.VAR_KEYWORD for argument in options.values())
    unknown = [] if takes_any else [argument for argument in arguments if argument not in named]
    wrong = [
        f"{key(argument)} is not an option of {name} (it is {shown(arguments[argument])}); {takes}"
        for argument in unknown
    ]
    if required:
        missing = [
            argument
            for argument, option in named.items()
            if option.default is option.empty and argument not in arguments
        ]
        wrong += [f"{key(argument)} is not set: {name} needs it; {takes}" for argument in missing]
    try:
        constructor = target.__init__
        hints = get_type_hints(
            constructor if isinstance(target, type) else target, include_extras=True
        )
    except NameError:  # imported for type checkers only
        hints = {}
    for argument, value in arguments.items():
        try:
            check_type(value, hints.get(argument, Any), key(argument), ConfigError)
            wrong += wrong_values(value, hints.get(argument, Any), key(argument))
        except ConfigError as error:
            wrong.append(str(error))
    return wrong


def check_options(target: Any, skip: int, name: str, kwargs: Mapping[str, Any], key: str) -> None:
    """Check ``kwargs``, the value of ``key``, as ``wrong_arguments`` does. Raises ``ConfigError``."""
    wrong = wrong_arguments(target, skip, name, kwargs, lambda option: f"{key}.{option}")
    if wrong:
        raise ConfigError("; ".join(wrong))


def build_target(target: Any, skip: int, name: str, kwargs: Mapping[str, Any], key: str) -> Any:
    """An instance of a class that can be called, or a function with its options bound; see
    ``check_options``.

    Raises ``ConfigError`` also where it cannot be called with ``skip`` arguments.
    """
    check_options(target, skip, name, kwargs, key)
    where = f"{key.removesuffix('kwargs').rstrip('._')} is {name!r}"
    if isinstance(target, type):
        with config_errors(f"{key}: {name} cannot be made"), errors_of_user_code(f"{key}: {name}"):
            instance = target(**kwargs)
        if not callable(instance):
            raise ConfigError(f"{where}: its instances cannot be called")
    else:
        instance = update_wrapper(partial(target, **kwargs), target) if kwargs else target
    try:
        inspect.signature(instance).bind(*range(skip))
    except ValueError:  # of some functions in C, no signature is known
        return instance
    except TypeError as error:
        takes = f"it is called with {skip} argument(s), and takes {inspect.signature(instance)}"
        raise ConfigError(f"{where}: {takes}: {error}") from error
    return instance
