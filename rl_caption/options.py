"""Options and their ranges, and the classes and functions that a configuration names.

A class or function is named by a name from one of this package's tables, or as ``package.module:Name``; it is imported
when it is asked for. Its arguments are its options, and ``Annotated[float, Range(min=0)]`` is an option with a range.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import reprlib
import types
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from functools import partial, update_wrapper
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints, is_typeddict

from rewards.base import TARGETS
from rewards.trust import import_outside, trust
from rl_caption.errors import ConfigError, config_errors, errors_of_user_code

CLASS_KEYS = ("target", "encoder", "image_encoder")
"""Keys, also of ``kwargs``, whose values may name a class outside this package."""
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80
_hints = functools.cache(get_type_hints)


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
    """Yield a sentence, with key and value, for each thing that is wrong with ``value``.

    Wrong are: null where the annotation does not allow it; a number that is out of its range or not finite; anything
    but a dataclass or mapping where a dataclass is expected; text with control characters or lone surrogates. That
    types fit otherwise is left to the parser.

    Args:
        value: of the annotation ``kind``; of a dataclass its instance, or a mapping or namespace with some of its keys.
        kind: a dataclass of options, or the annotation of one of them.
        key: dotted name of the value.
    """
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    options = tuple(option for option in options if option is not types.NoneType)
    if value is None:
        if kind is not Any and types.NoneType not in get_args(kind):
            none = {list: "a list ([] is an empty one)", dict: "keys and values ({} has none)"}
            yield f"{key} is null: expected {none.get(_outer(kind), 'a value')}; leave it out for the default"
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


def alternative_of(kind: Any, values: Mapping[str, Any]) -> Any:
    """The configuration class that ``values``, of a file and a command line, choose.

    A class that stands for several has a classmethod ``alternative``, from the values of its keys to one of them, which
    is a subclass; and a classmethod ``alternatives``, all of them. Any other class stands for itself.
    """
    return kind.alternative(values) if "alternative" in vars(kind) else kind


def with_chosen_sections(kind: Any, values: Mapping[str, Any]) -> Any:
    """``kind``, or a subclass whose sections have the classes that ``values`` choose, at any depth."""
    sections = []
    for option in dataclasses.fields(kind):
        section, value = _hints(kind)[option.name], values.get(option.name)
        if isinstance(section, type) and dataclasses.is_dataclass(section):
            inner = value if isinstance(value, Mapping) else {}
            chosen = with_chosen_sections(alternative_of(section, inner), inner)
            sections += [(option.name, chosen)] if chosen is not section else []
    return _with_sections(kind, tuple(sections)) if sections else kind


def with_defaults(values: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Values of a configuration class with the default of every key that they lack, also in sections.

    The keys of other alternatives of ``kind`` or of a section are there, too: where a class has lost a key to another
    alternative, values that were stored before have it.
    """
    complete = dict(values)
    base = next((base for base in kind.__mro__ if "alternative" in vars(base)), None)
    for alternative in (kind,) if base is None else (alternative_of(base, values), *base.alternatives()):
        for option in dataclasses.fields(alternative):
            section = _hints(alternative)[option.name]
            if isinstance(section, type) and dataclasses.is_dataclass(section):
                inner = complete.get(option.name, {})
                complete[option.name] = with_defaults(inner, section) if isinstance(inner, Mapping) else inner
            elif option.name not in complete and option.default_factory is not dataclasses.MISSING:
                complete[option.name] = option.default_factory()
            elif option.name not in complete and option.default is not dataclasses.MISSING:
                complete[option.name] = option.default
    return complete


@functools.cache
def _with_sections(kind: Any, sections: tuple[tuple[str, Any], ...]) -> type[Any]:
    options = [(name, section, dataclasses.field(default_factory=section)) for name, section in sections]
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return dataclasses.make_dataclass(kind.__name__, options, bases=(kind,), namespace=names)


def unknown_keys(value: Any, kind: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted name of each key of ``value``, at any depth, that the dataclasses of ``kind`` do not have.

    ``value`` are the plain values of a file, and ``key`` is the dotted name of ``value`` itself.
    """
    inner = get_args(kind)[-1] if get_origin(kind) in (dict, list) else None
    if isinstance(value, Mapping):
        hints = get_type_hints(kind) if dataclasses.is_dataclass(kind) else None
        for name, item in value.items():
            dotted = f"{key}.{name}" if key else str(name)
            if hints is not None and name not in hints:
                yield dotted
            else:
                yield from unknown_keys(item, _without_null(inner if hints is None else hints[name]), dotted)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown_keys(item, inner, f"{key}[{index}]")


def option_keys(kind: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted names of all options of a dataclass and of the dataclasses in it; not of tables of those."""
    for name, hint in _hints(kind).items():
        dotted, inner = f"{key}.{name}" if key else name, _without_null(hint)
        yield dotted
        if dataclasses.is_dataclass(inner):
            yield from option_keys(inner, dotted)


def _without_null(kind: Any) -> Any:
    """``X`` of ``X | None``; any other annotation as it is."""
    options = [option for option in get_args(kind) if option is not types.NoneType]
    return options[0] if types.NoneType in get_args(kind) and len(options) == 1 else kind


def shown(value: Any) -> str:
    """``repr`` of a value for a message: short, whatever is nested in it."""
    return _REPR.repr(value)[:120]


def is_text(value: str) -> bool:
    """Whether text has no control characters but tab and line breaks, and no lone surrogates."""
    return not any((ord(char) < 32 and char not in "\t\n\r") or 0xD800 <= ord(char) < 0xE000 for char in value)


def check_type(value: Any, kind: Any, where: str, error: type[Exception]) -> None:
    """Check that a plain value has a type: ``int``, ``dict[str, list[float]]``, ``str | None``, a TypedDict, ...

    A truth value is no number, a whole number is a ``float``, a list is a ``tuple`` of its length, a path is text, and
    a TypedDict may have further keys.

    Raises:
        error: it has not; the message begins with ``where`` and names the key.
    """
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return
    if is_typeddict(kind):
        check_type(value, dict, where, error)
        for key, inner in _hints(kind).items():
            if key in value:
                check_type(value[key], inner, f"{where}, {key!r}", error)
            elif key in kind.__required_keys__:
                raise error(f"{where} has no {key!r}")
    elif origin in (Union, types.UnionType):
        best = next((part for part in parts if _is_a(value, part)), None)
        if best is None:
            raise error(f"{where} is {shown(value)}: expected {' or '.join(dict.fromkeys(map(_named, parts)))}")
        check_type(value, best, where, error)
    elif not _is_a(value, kind) or (origin is tuple and len(value) != len(parts)):
        raise error(f"{where} is {shown(value)}: expected {_named(kind)}")
    elif origin is dict:
        for key, inner in value.items():
            check_type(key, parts[0], f"{where}, key", error)
            check_type(inner, parts[1], f"{where}, {key!r}", error)
    elif origin in (list, tuple):
        for index, inner in enumerate(value):
            check_type(inner, parts[index] if origin is tuple else parts[0], f"{where}, [{index}]", error)


def _outer(kind: Any) -> Any:
    """A type without its parameters: ``list`` for ``list[int]``."""
    origin = get_origin(kind)
    if origin is Annotated:
        return _outer(get_args(kind)[0])
    return dict if is_typeddict(kind) else origin or kind


def _is_a(value: Any, kind: Any) -> bool:
    """Whether ``value`` is of a type, whatever its elements are."""
    outer = _outer(kind)
    if outer is Literal:
        return any(value == each and type(value) is type(each) for each in get_args(kind))
    if outer is Any or isinstance(value, bool):
        return outer in (Any, bool)
    wider: dict[Any, Any] = {float: (int, float), tuple: (list, tuple), Path: (str, Path)}
    if not isinstance(outer, type) or getattr(outer, "_is_protocol", False):
        return True  # of a class or function from outside, whose annotations may be anything
    return isinstance(value, wider.get(outer, outer))


def _named(kind: Any) -> str:
    outer = _outer(kind)
    if outer is Literal:
        return " or ".join(map(str, get_args(kind)))
    if outer is tuple and get_args(kind):
        return f"a list of {len(get_args(kind))}"
    names = {dict: "keys and values", list: "a list", tuple: "a list", str: "text", int: "a whole number", Path: "text"}
    names |= {float: "a number", bool: "true or false", types.NoneType: "null"}
    return names.get(outer) or outer.__name__


def class_names(value: Any, key: str = "") -> Iterator[str]:
    """Yield the classes that a configuration names, at ``trust`` and at ``CLASS_KEYS``: its user lets them run."""
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
    parser.add_argument("--trust", type=consent, action="append", metavar="package.module:Class", help=help_text)


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
    if target == name:
        TARGETS.setdefault(module_name, f"{key} {name}")
    try:
        with errors_of_user_code(f"{key} {name}"):
            module = import_outside(module_name)
    except ConfigError:
        raise
    except (ImportError, ValueError, SyntaxError) as error:  # ValueError: the name is empty
        raise ConfigError(f"{key} is {name!r}: module {module_name!r} cannot be imported: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{key} is {name!r}: module {module_name!r} has no class or function {attribute!r}")
    return found


def target_name(target: Any) -> str:
    """``package.module:Name`` of a class, of a function or one with its options bound, or of the class of an object."""
    function = getattr(target, "func", target)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def options_of(target: Any, skip: int) -> dict[str, inspect.Parameter]:
    """The arguments of a class, or those of a function after the first ``skip``."""
    parameters = list(inspect.signature(target).parameters.values())
    return {each.name: each for each in (parameters if isinstance(target, type) else parameters[skip:])}


def wrong_arguments(
    target: Any, skip: int, name: str, given: Mapping[str, Any], key: Callable[[str], str], required: bool = True
) -> list[str]:
    """A sentence for each thing that is wrong with the arguments of ``target``.

    Args:
        target: a class or a function.
        skip: number of a function's first parameters that are not options.
        name: of the target, for messages.
        given: the arguments.
        key: from the name of an argument to its configuration key, for messages.
        required: whether missing arguments are wrong, too.
    """
    options = options_of(target, skip)
    named = {key: each for key, each in options.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    takes = f"it takes: {', '.join(map(str, options.values())) or 'no options'}"
    takes_any = any(each.kind is each.VAR_KEYWORD for each in options.values())
    unknown = [] if takes_any else [each for each in given if each not in named]
    wrong = [f"{key(each)} is not an option of {name} (it is {shown(given[each])}); {takes}" for each in unknown]
    if required:
        missing = [each for each, option in named.items() if option.default is option.empty and each not in given]
        wrong += [f"{key(each)} is not set: {name} needs it; {takes}" for each in missing]
    try:
        constructor = target.__init__
        hints = get_type_hints(constructor if isinstance(target, type) else target, include_extras=True)
    except NameError:  # imported for type checkers only
        hints = {}
    for each, value in given.items():
        try:
            check_type(value, hints.get(each, Any), key(each), ConfigError)
            wrong += wrong_values(value, hints.get(each, Any), key(each))
        except ConfigError as error:
            wrong.append(str(error))
    return wrong


def check_options(target: Any, skip: int, name: str, kwargs: Mapping[str, Any], key: str) -> None:
    """Check ``kwargs``, the value of ``key``, as ``wrong_arguments`` does. Raises ``ConfigError``."""
    wrong = wrong_arguments(target, skip, name, kwargs, lambda option: f"{key}.{option}")
    if wrong:
        raise ConfigError("; ".join(wrong))


def build_target(target: Any, skip: int, name: str, kwargs: Mapping[str, Any], key: str) -> Any:
    """An instance of a class that can be called, or a function with its options bound; see ``check_options``.

    Raises ``ConfigError`` also where it cannot be called with ``skip`` arguments.
    """
    check_options(target, skip, name, kwargs, key)
    where = f"{key.removesuffix('kwargs').rstrip('._')} is {name!r}"
    if isinstance(target, type):
        with config_errors(f"{key}: {name} cannot be made"), errors_of_user_code(f"{key}: {name}"):
            made = target(**kwargs)
        if not callable(made):
            raise ConfigError(f"{where}: its instances cannot be called")
    else:
        made = update_wrapper(partial(target, **kwargs), target) if kwargs else target
    try:
        inspect.signature(made).bind(*range(skip))
    except ValueError:  # of some functions in C, no signature is known
        return made
    except TypeError as error:
        takes = f"it is called with {skip} argument(s), and takes {inspect.signature(made)}"
        raise ConfigError(f"{where}: {takes}: {error}") from error
    return made
