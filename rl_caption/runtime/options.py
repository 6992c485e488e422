"""Sections of a configuration, ranges of their options, and the classes that a configuration names.

A class or function is named by a name from one of this package's tables, or as
``package.module:Name``; it is imported when it is asked for. Its arguments are its
options, and ``Annotated[float, Field(ge=0)]`` is an option with a range.
"""

import inspect
import json
import re
from collections.abc import Collection, Mapping
from functools import partial, update_wrapper
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PydanticUserError,
    ValidationError,
)

import rewards.options
from rewards.options import adapter, sentences
from rewards.options import check_type as check_type
from rewards.options import target_name as target_name
from rl_caption.runtime.errors import (
    KEPT,
    ConfigError,
    config_errors,
    errors_of_user_code,
)

CLASS_KEYS = ("target", "encoder", "image_encoder")
"""Keys, also of ``kwargs``, whose values may name a class outside this package."""
load_target = partial(rewards.options.load_target, error=ConfigError, kept=KEPT)
"""The class or function ``package.module:Name``, or an entry of a table: see ``rewards.options``.
"""
shown = "{!r:.120}".format
"""A value in a message."""


class Section(BaseModel):
    """Keys of one subject in a configuration; wrong values are refused when it is made."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    positional: ClassVar[str] = ""
    """Key that gets the words of a command line that belong to no option."""

    @classmethod
    def choose(cls, values: Mapping[str, Any]) -> type[Self]:
        """The subclass for the merged ``values`` of a file and a command line, where a
        section has alternatives.
        """
        return cls

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """The section with these plain values, of the class that they choose."""
        return cls.choose(values).model_validate_json(json.dumps(values))

    def replace(self, **changes: Any) -> Self:
        """A copy with some of its values changed, and checked."""
        return type(self)(**dict(self) | changes)


Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""Seed that Python, NumPy and PyTorch all accept."""
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
"""Range of a sampling temperature: below it, float32 cannot hold logits / temperature;
above it, forbidden tokens cannot be distinguished.
"""
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]
LengthPenalty = Annotated[float, Field(ge=-100, le=100)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
"""Probability of dropout, smoothing or a running average, in [0, 1): 1 would leave
nothing.
"""


def class_names(values: Mapping[str, Any]) -> list[str]:
    """The classes that a configuration names, at ``trust`` and at ``CLASS_KEYS``: its
    user lets them run.
    """
    named = rf'"(?:{"|".join(CLASS_KEYS)})": "([^"]+:[^"]+)"'
    return [
        *(values.get("trust") or ()),
        *re.findall(named, json.dumps(values, ensure_ascii=False)),
    ]


def as_words(values: Mapping[str, Any]) -> list[str]:
    """Values by key, as words of a command line."""
    words = []
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"--{key}={text}")
    return words


def options_of(target: Any, skip: int = 0) -> dict[str, inspect.Parameter]:
    """The parameters of a class, or of a function after its first ``skip``."""
    try:
        signature = inspect.signature(target, eval_str=True)
    except NameError:  # a type that is imported for type checkers only
        signature = inspect.signature(target)
    options = list(signature.parameters.items())
    return dict(options if isinstance(target, type) else options[skip:])


def check_options(
    target: Any,
    skip: int,
    name: str,
    kwargs: Mapping[str, Any],
    key: str,
    beside: Collection[str] = (),
    required: bool = True,
) -> None:
    """Check ``kwargs``, the value of ``key``, by the signature of ``target``.

    Args:
        target: a class or a function.
        skip: number of a function's first parameters that are not options.
        name: name of the target, for messages.
        kwargs: plain values, as a configuration has them.
        key: key whose value ``kwargs`` is.
        beside: options that are keys beside ``key``, not inside it.
        required: whether missing options are errors, too.

    Raises:
        ConfigError: an option is wrong; the message names the first.
    """
    options = options_of(target, skip)
    signature = inspect.Signature([*options.values()])
    takes = ", ".join(options) or "no options"
    section = key.rpartition(".")[0] if beside else key
    with config_errors(f"{section}: {name} takes {takes}"):
        (signature.bind if required else signature.bind_partial)(**kwargs)
    for option in options.keys() & kwargs:
        where = f"{section if option in beside else key}.{option}"
        try:
            checker = adapter(options[option].annotation)
            checker.validate_json(json.dumps(kwargs[option]), strict=True)
        except ValidationError as error:
            raise ConfigError(sentences(error, str, where)) from error
        except (NameError, PydanticUserError, TypeError):
            pass  # a type that pydantic does not know


def build_target(
    target: Any, skip: int, name: str, kwargs: Mapping[str, Any], key: str
) -> Any:
    """An instance of a class, or a function with its options bound; see ``check_options``."""
    check_options(target, skip, name, kwargs, key)
    if not isinstance(target, type):
        return update_wrapper(partial(target, **kwargs), target) if kwargs else target
    with config_errors(f"{key}: {name}"), errors_of_user_code(f"{key}: {name}"):
        return target(**kwargs)
