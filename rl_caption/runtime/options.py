"""Sections of a configuration, ranges of their options, and the classes that a configuration names.

A class or function is named by a name from one of this package's tables, or as
``package.module:Name``; it is imported when it is asked for. Its arguments are its options, and
``Annotated[float, Field(ge=0)]`` is an option with a range.
"""

from collections.abc import Iterator, Mapping
from functools import partial, update_wrapper
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

import rewards.options
from rewards.options import check_type as check_type
from rewards.options import options_of as options_of
from rewards.options import target_name as target_name
from rewards.options import wrong_arguments as wrong_arguments
from rl_caption.runtime.errors import (
    KEPT,
    ConfigError,
    config_errors,
    errors_of_user_code,
)

shown = rewards.options.short_repr
CLASS_KEYS = ("target", "encoder", "image_encoder")
"""Keys, also of ``kwargs``, whose values may name a class outside this package."""
load_target = partial(rewards.options.load_target, error=ConfigError, kept=KEPT)
"""The class or function ``package.module:Name``, or an entry of a table: see ``rewards.options``.
"""


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
    """The key of the words of a command line that belong to no option."""

    @classmethod
    def choose(cls, values: Mapping[str, Any]) -> type[Self]:
        """The subclass for the merged ``values`` of a file and a command line, where a section has
        alternatives.
        """
        return cls

    def replace(self, **changes: Any) -> Self:
        """A copy with some of its values changed, and checked."""
        return type(self)(**dict(self) | changes)


# Upper bounds are far beyond any use: they stop a slip of the keyboard before it becomes an
# allocation.
Seed: TypeAlias = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""What Python, NumPy and PyTorch all accept."""
Steps: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]
"""A number of steps, images or words."""
BatchSize: TypeAlias = Annotated[int, Field(ge=1, le=10**6)]
Tokens: TypeAlias = Annotated[int, Field(ge=1, le=16384)]
"""Length of a caption."""
Beams: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
LengthPenalty: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
Mebibytes: TypeAlias = Annotated[int, Field(ge=0, le=2**24)]
Workers: TypeAlias = Annotated[int, Field(ge=1, le=65536)]
"""Processes or threads."""
LearningRate: TypeAlias = Annotated[float, Field(gt=0, le=100)]
Positive: TypeAlias = Annotated[float, Field(gt=0, le=10**9)]
Weight: TypeAlias = Annotated[float, Field(ge=0, le=10**6)]
"""Of a term of a loss, or a threshold."""
Rank: TypeAlias = Annotated[int, Field(ge=1, le=65536)]
Positions: TypeAlias = Annotated[int, Field(ge=0, le=16384)]
Resamples: TypeAlias = Annotated[int, Field(ge=0, le=10**6)]
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
"""Below, float32 cannot hold logits / temperature; above, it cannot distinguish forbidden tokens.
"""
Temperature: TypeAlias = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Probability: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
"""Of dropout, smoothing or a running average: 1 would leave nothing."""


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
    elif isinstance(value, str) and (
        key == "trust" or (key in CLASS_KEYS and ":" in value)
    ):
        yield value


def check_options(
    target: Any, skip: int, name: str, kwargs: Mapping[str, Any], key: str
) -> None:
    """Check ``kwargs``, the value of ``key``, as ``wrong_arguments`` does. Raises ``ConfigError``."""
    wrong = wrong_arguments(
        target, skip, name, kwargs, lambda option: f"{key}.{option}"
    )
    if wrong:
        raise ConfigError("; ".join(wrong))


def build_target(
    target: Any, skip: int, name: str, kwargs: Mapping[str, Any], key: str
) -> Any:
    """An instance of a class, or a function with its options bound; see ``check_options``."""
    check_options(target, skip, name, kwargs, key)
    if isinstance(target, type):
        with (
            config_errors(f"{key}: {name} cannot be made"),
            errors_of_user_code(f"{key}: {name}"),
        ):
            return target(**kwargs)
    return update_wrapper(partial(target, **kwargs), target) if kwargs else target
