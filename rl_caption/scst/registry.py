"""Advantages and objectives by name. Nothing is imported before it is asked for.

One of this package is a line here; one from outside needs no line: its name is ``package.module:Name``, that of a class
whose instances are called, or of a function. Options are the arguments of the class, or those of the function that
follow its tensors; their ranges stand in the annotations (``Annotated[float, Range(min=0)]``), as in configurations.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, get_type_hints

from rl_caption.config.ranges import wrong_values
from rl_caption.errors import ConfigError

if TYPE_CHECKING:
    from rl_caption.config.schema import ScstTrainConfig
    from rl_caption.scst.advantages import AdvantageFn
    from rl_caption.scst.objectives import Objective

ADVANTAGES = {
    "leave_one_out": "rl_caption.scst.advantages:leave_one_out",
    "greedy": "rl_caption.scst.advantages:greedy",
    "mean": "rl_caption.scst.advantages:mean",
    "group_norm": "rl_caption.scst.advantages:group_norm",
    "none": "rl_caption.scst.advantages:none",
}
OBJECTIVES = {"reinforce": "rl_caption.scst.objectives:Reinforce"}
"""Name -> ``module:Name``."""


def build_advantage(name: str, kwargs: Mapping[str, Any]) -> AdvantageFn:
    """The advantage ``train.advantage`` with the options ``train.advantage_kwargs``.

    Raises:
        ConfigError: an unknown name, a target that cannot be imported or called, an unknown or missing option, or a
            value out of its range.
    """
    target = _load(name, ADVANTAGES, "train.advantage")
    made: AdvantageFn = _build(target, 2, name, kwargs, "train.advantage_kwargs")
    return made


def build_objective(name: str, kwargs: Mapping[str, Any], shared: Mapping[str, tuple[Any, Any]]) -> Objective:
    """The objective ``train.objective`` with the options ``train.objective_kwargs``.

    Args:
        name, kwargs: as configured.
        shared: options with keys of their own, such as ``train.kl_coef``: name -> (value, default). An objective that
            has no such option is refused where the value is not the default.

    Raises:
        ConfigError: as for ``build_advantage``.
    """
    target = _load(name, OBJECTIVES, "train.objective")
    takes = _options(target, 5)
    options = dict(kwargs)
    for key, (value, default) in shared.items():
        if key in kwargs:
            raise ConfigError(f"train.objective_kwargs.{key} is set: its key is train.{key}")
        if key in takes:
            options[key] = value
        elif value != default:
            raise ConfigError(f"train.{key} is {value!r}: train.objective {name} has no such option")
    made: Objective = _build(target, 5, name, options, "train.objective_kwargs")
    return made


def shared_options(train: ScstTrainConfig) -> dict[str, tuple[Any, Any]]:
    """``shared`` of ``build_objective``."""
    default = type(train)()
    return {key: (getattr(train, key), getattr(default, key)) for key in ("loss_reduction", "kl_coef")}


def _load(name: str, known: Mapping[str, str], key: str) -> Any:
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


def _options(target: Any, tensors: int) -> dict[str, inspect.Parameter]:
    """The arguments of a class, or those of a function that follow its tensors."""
    parameters = list(inspect.signature(target).parameters.values())
    return {each.name: each for each in (parameters if isinstance(target, type) else parameters[tensors:])}


def _build(target: Any, tensors: int, name: str, kwargs: Mapping[str, Any], key: str) -> Any:
    options = _options(target, tensors)
    free = [each.kind is each.VAR_KEYWORD for each in options.values()]
    takes = ", ".join(map(str, options.values())) or "no options"
    unknown = [] if any(free) else sorted(set(kwargs) - set(options))
    if unknown:
        raise ConfigError(f"{key}.{unknown[0]} is no option of {name}; it takes: {takes}")
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    missing = [
        each.name
        for each in options.values()
        if each.default is each.empty and each.kind not in variable and each.name not in kwargs
    ]
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
    if not isinstance(target, type):
        return update_wrapper(partial(target, **kwargs), target) if kwargs else target
    try:
        made = target(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {name} cannot be made: {error}") from error
    if not callable(made):
        raise ConfigError(f"{key.removesuffix('_kwargs')} is {name!r}: its instances cannot be called")
    return made
