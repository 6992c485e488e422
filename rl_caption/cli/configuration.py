"""From a command line to a checked configuration: a YAML file of plain values, then overrides.

This is the only file that knows the parser library, which it imports when something is parsed.
"""

import difflib
import json
import re
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from rewards.registry import first_paragraph
from rewards.trust import trust
from rl_caption.cli.programs import PROGRAMS, program_of
from rl_caption.config.shipped import find_config
from rl_caption.runtime.errors import ConfigError, config_errors, section_errors
from rl_caption.runtime.options import (
    alternative_of,
    check_type,
    class_names,
    option_keys,
    shown,
    unknown_keys,
    with_chosen_sections,
    without_null,
    wrong_values,
)

MOST_BYTES = 2**20
"""Largest configuration file: a larger one is data, which the parser would read for hours."""
SYNONYMS = {
    "learning_rate": "train.lr",
    "max_grad_norm": "train.grad_clip_norm",
    "num_train_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "lr_scheduler_type": "train.schedule",
    "per_device_train_batch_size": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "bf16": "train.mixed_precision",
    "fp16": "train.mixed_precision",
    "beta": "train.kl_coef",
    "num_generations": "rollout.num_samples",
    "max_completion_length": "rollout.max_new_tokens",
    "output_dir": "run.dir",
    "logging_steps": "run.log_every",
    "save_steps": "run.save_every",
    "eval_steps": "eval.every",
    "early_stopping_patience": "eval.patience",
}
"""What Transformers and TRL call an option -> its key here (docs/coming_from.md)."""
Config = TypeVar("Config")


class UsageError(SystemExit):
    """The command line cannot be understood; ends the program with code 2 and a message."""

    def __init__(self, message: str) -> None:
        print(f"error: {message}", file=sys.stderr)
        super().__init__(2)


class ConfigFileError(ValueError):
    """A file is not a configuration; the message names the key or line, and what would be right."""


def parse(
    options_class: type[Config], arguments: Sequence[str], program: str, checked: bool = True
) -> Config:
    """Read a configuration from ``--config FILE`` (``find_config``) and overrides, and check it.

    There is one file at most, and it comes first: an override before ``--config`` would be lost
    silently, and a second file would replace dictionaries instead of merging them.

    Args:
        options_class: dataclass of the configuration, or one that stands for several
            (``runtime.options.alternative_of``).
        arguments: of the command line.
        program: its name in messages.
        checked: False makes no configuration, which would check options that depend on each other,
            and returns the values by attribute.

    Raises:
        UsageError: a file that is no configuration, a key that does not exist, or a value of
            another type.
        ConfigError: a value is null or out of its range, or does not fit another.
    """
    from argparse import ArgumentError

    file, words = _file_of(arguments), _switched_on(with_lists(arguments, "--trust"), "--report")
    where = file or program
    values: dict[str, Any] = {}
    options: Any = options_class
    try:
        if file is not None:
            values = read_mapping(find_config(file))
        with config_errors(where):
            options_class, options = _chosen(
                options_class, _merge_overrides(values, _values_of(words))
            )
        parser = _parser(options)
        parser.prog = program
        if file is not None:
            _refuse_foreign(values, options, file)
            if (
                isinstance(train := values.get("train"), dict)
                and train.get("mixed_precision") is False
            ):
                train["mixed_precision"] = "no"  # which YAML reads as false
            _refuse_values(values, options, file)
            _drop_replaced(values, options, words)
            words = [
                f"--config={json.dumps(values, ensure_ascii=False)}",
                *words[1 if "=" in words[0] else 2 :],
            ]
        namespace = parser.parse_args(_with_merged_dictionaries(options, parser, words))
    except (ArgumentError, ConfigFileError, OSError) as error:
        message = str(error)
        if isinstance(error, ArgumentError):
            message = _explain_error(message, options, values, _values_of(arguments)) or message
            message += f"; {program} --help lists every key"
        raise UsageError(f"{program if file is None else f'--config {file}'}: {message}") from error
    if not checked:
        return namespace  # type: ignore[no-any-return]
    with config_errors(where):
        plain = namespace.as_dict()
        trust(class_names(plain))
        config: Config = _instance(options_class, plain)
    return config


def value_at(config: Any, keys: Sequence[str]) -> Any:
    """The value at a dotted key of dataclasses and dictionaries; None where there is none."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else getattr(config, key, None)
    return config


def find_program(arguments: Sequence[str], default: str) -> str:
    """The program that the configuration of a command line is for; ``default`` where it is for
    none.
    """
    try:
        file = _file_of(arguments)
        values = {} if file is None else read_mapping(find_config(file))
    except (ConfigFileError, OSError):  # ``parse`` says what is wrong
        return default
    name = program_of(_merge_overrides(values, _values_of(arguments)))
    return name if name in PROGRAMS else default


def _chosen(options_class: Any, values: dict[str, Any]) -> tuple[Any, Any]:
    """The class that the values of a file and a command line choose, and the one with its sections'
    alternatives.
    """
    chosen = alternative_of(options_class, values)
    return chosen, with_chosen_sections(chosen, values)


def _merge_overrides(values: Any, overrides: Any) -> Any:
    """The values of a file with those of a command line in their place, at any depth."""
    if not (isinstance(values, dict) and isinstance(overrides, dict)):
        return overrides
    return values | {
        key: _merge_overrides(values.get(key), value) for key, value in overrides.items()
    }


@cache
def _parser(options_class: Any) -> Any:
    """The parser of a configuration class; making it takes longer than parsing."""
    from jsonargparse import ArgumentParser

    description = first_paragraph(options_class)
    parser = ArgumentParser(description=description, exit_on_error=False, allow_abbrev=False)
    help_text = (
        "YAML file with any of the keys below, or the name of a recipe (rl-caption configs list)"
    )
    parser.add_argument("--config", action="config", help=help_text)
    parser.add_class_arguments(options_class, None, as_group=False)
    # As mappings: where instances are the default, the parser refuses {}, all of whose options have
    # their defaults.
    tables = {
        key: table
        for key, table in parser.get_defaults().items()
        if isinstance(table, dict) and table
    }
    parser.set_defaults(
        {key: {name: asdict(item) for name, item in table.items()} for key, table in tables.items()}
    )
    return parser


def _instance(annotation: Any, values: Any, key: str = "") -> Any:
    """The plain values at ``key`` as an instance of their annotation: dataclasses, also in tables
    and lists.

    A section checks itself and begins its message with the name of an option, before which ``key``
    is put here.
    """
    annotation = without_null(annotation)
    if values is None or not any(map(is_dataclass, (annotation, *get_args(annotation)))):
        return values
    if get_origin(annotation) is list:
        return [
            _instance(get_args(annotation)[0], value, f"{key}[{index}]")
            for index, value in enumerate(values)
        ]
    if get_origin(annotation) is dict:
        return {
            name: _instance(get_args(annotation)[1], value, f"{key}.{name}")
            for name, value in values.items()
        }
    annotation = alternative_of(annotation, values)
    hints, section = get_type_hints(annotation), f"{key}." if key else ""
    options = {
        name: _instance(hints[name], values[name], section + name)
        for name in hints
        if name in values
    }
    with section_errors(key):
        return annotation(**options)


def _file_of(arguments: Sequence[str]) -> str | None:
    places = [
        index
        for index, word in enumerate(arguments)
        if word == "--config" or word.startswith("--config=")
    ]
    if len(places) > 1:
        raise UsageError(
            "--config is given twice: one file, then overrides such as --train.lr 1e-5"
        )
    if not places:
        return None
    if places[0] != 0:
        raise UsageError(f"--config must come first: {arguments[0]} before it would be overwritten")
    if arguments[0] == "--config" and len(arguments) < 2:
        raise UsageError("--config has no value: expected a file or the name of a recipe")
    return arguments[0].partition("=")[2] if "=" in arguments[0] else arguments[1]


def _refuse_values(values: Any, options_class: type[Any], where: str) -> None:
    wrong = list(wrong_values(values, options_class))
    if wrong:
        raise ConfigError(f"{where}: {'; '.join(wrong)}")


# --- what is wrong, in words of the configuration rather than of the parser
# -------------------------------------------


def _refuse_foreign(values: dict[str, Any], options_class: type[Any], file: str) -> None:
    """Refuse the configuration of another program: that has all of its keys, ``options_class`` has
    not.
    """
    if any(unknown_keys(values, options_class)) and (program := program_of(values)) is not None:
        use = f"rl-caption {program} --config {file}"
        if program == "run":
            raise ConfigFileError(f"this is a pipeline: rl-caption run {file}")
        if " " in program:
            use = "pass it as --config_file"
        raise ConfigFileError(f"this is a configuration of {program}: {use}")


def _explain_error(
    message: str, options_class: type[Any], values: dict[str, Any], overrides: dict[str, Any]
) -> str:
    """What the parser's ``message`` means: keys that do not exist, with the nearest one, or a value
    of another type.

    Args:
        options_class: dataclass of the configuration.
        values: those of the file.
        overrides: those of the command line.
    """
    unknown = list(
        dict.fromkeys(
            (*unknown_keys(values, options_class), *unknown_keys(overrides, options_class))
        )
    )
    if unknown:
        more = f" (and {len(unknown) - 3} more)" if len(unknown) > 3 else ""
        return "; ".join(_no_key(key, options_class) for key in unknown[:3]) + more
    key = re.search(r'Parser key "([^"]+)"', message)
    if key is None:
        return ""
    *section, last = path = key[1].split(".")
    value = value_at(overrides if last in (value_at(overrides, section) or {}) else values, path)
    return "; ".join(_wrong_types(value, _type_at(options_class, path, with_null=True), key[1])[:3])


def _no_key(key: str, options_class: type[Any]) -> str:
    """That there is no such key, and for what else it is, or the nearest one; where none is near,
    its section's.
    """
    section, _, last = key.rpartition(".")
    inner = _type_at(options_class, section.split(".")) if section else options_class
    if others := [*_alternatives_with(last, inner), *_alternatives_with(key, options_class)]:
        return f"there is no key {shown(key)[1:-1]} here: it is for {' or '.join(dict.fromkeys(others))}"
    siblings = list(get_type_hints(inner)) if is_dataclass(inner) else []
    option_names = ["config", *option_keys(options_class)]
    nearest = [SYNONYMS[last]] if SYNONYMS.get(last) in option_names else []
    if not section or any(
        name.startswith(f"{section}.") for name in option_names
    ):  # not in a dict, as a term of the reward
        nearest += difflib.get_close_matches(
            key, [name for name in option_names if name.rpartition(".")[2] == last], 1, 0.0
        )
    nearest += [
        f"{section}.{name}" for name in difflib.get_close_matches(last, siblings, n=1) if section
    ]
    nearest += difflib.get_close_matches(key, option_names, n=1, cutoff=0.8)
    if not section:
        names = {name.rpartition(".")[2]: name for name in reversed(option_names)}
        nearest += [names[name] for name in difflib.get_close_matches(key, names, n=1)]
    hint = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(siblings)}"
    return f"there is no key {shown(key)[1:-1]}{f': {hint}' if nearest or siblings else ''}"


def _alternatives_with(key: str, options_class: Any) -> list[str]:
    """What each of the alternatives to the class ``options_class`` is that has the option ``key``,
    by its docstring.
    """
    base = next(
        (base for base in getattr(options_class, "__mro__", ()) if "alternative" in vars(base)),
        None,
    )
    owners = (
        []
        if base is None
        else [other for other in base.alternatives() if key in option_keys(other)]
    )
    sentences = (re.split(r"[.:;] ", str(owner.__doc__), maxsplit=1)[0] for owner in owners)
    return [sentence[:1].lower() + sentence[1:].replace("``", "") for sentence in sentences]


def _wrong_types(value: Any, annotation: Any, key: str) -> list[str]:
    """A sentence for each value below ``key`` that has not the type of its annotation."""
    inner = next(
        (
            option
            for option in (annotation, *get_args(annotation))
            if isinstance(option, type) and is_dataclass(option)
        ),
        None,
    )
    wrong = list(wrong_values(value, annotation, key))
    if wrong:
        return wrong
    if inner is None or value is None:
        try:
            check_type(value, annotation, key, ConfigError)
        except ConfigError as error:
            return [str(error)]
        return []
    if inner is annotation or type(None) in get_args(
        annotation
    ):  # one such section; otherwise a table or a list of them
        hints = get_type_hints(inner, include_extras=True)
        items = [(item, hints[name], f"{key}.{name}") for name, item in value.items()]
    elif isinstance(value, dict):
        items = [(item, inner, f"{key}.{name}") for name, item in value.items()]
    elif isinstance(value, list):
        items = [(item, inner, f"{key}[{index}]") for index, item in enumerate(value)]
    else:
        return [
            f"{key} is {shown(value)}: expected names, each with "
            f"{', '.join(list(get_type_hints(inner))[:3])}, ..."
        ]
    return [sentence for item in items for sentence in _wrong_types(*item)]


def _values_of(arguments: Sequence[str]) -> dict[str, Any]:
    """The overrides of a command line as nested values; words that are no option with a value are
    left out.
    """
    overrides: dict[str, Any] = {}
    for word, after in zip(arguments, [*arguments[1:], "--"], strict=False):
        option, equals, text = word.partition("=")
        if (
            not option.startswith("--")
            or option == "--config"
            or (not equals and after.startswith("--"))
        ):
            continue
        section, *path = overrides, *option[2:].split(".")
        for key in path[:-1]:
            section[key] = section[key] if isinstance(section.get(key), dict) else {}
            section = section[key]
        section[path[-1]] = _argument(text if equals else after)
    return overrides


# --- words of the command line, before the parser gets them
# -----------------------------------------------------------


def with_lists(arguments: Sequence[str], option: str) -> list[str]:
    """``--compare A B`` is ``--compare=["A", "B"]``, all words up to the next option; so is
    ``--compare=A``, one word.

    Raises ``UsageError`` for ``--model A --model B``, where ``option`` is ``--models``.
    """
    words = list(arguments)
    if option.endswith("s") and sum(word.partition("=")[0] == option[:-1] for word in words) > 1:
        raise UsageError(f"{option[:-1]} is given several times: for several, {option} A B")
    if option not in words:
        return [_as_list(word, option) for word in words]
    start = words.index(option)
    end = next(
        (index for index in range(start + 1, len(words)) if words[index].startswith("--")),
        len(words),
    )
    return [*words[:start], f"{option}={json.dumps(words[start + 1 : end])}", *words[end:]]


def _as_list(word: str, option: str) -> str:
    name, _, value = word.partition("=")
    is_one_word = name == option and value not in ("", "null") and not value.startswith("[")
    return f"{option}={json.dumps([value])}" if is_one_word else word


def _switched_on(arguments: Sequence[str], option: str) -> list[str]:
    """``--report`` without a value is ``--report=true``."""
    followed = zip(arguments, [*arguments[1:], "--"][: len(arguments)], strict=True)
    return [
        f"{option}=true" if word == option and after.startswith("--") else word
        for word, after in followed
    ]


def _drop_replaced(
    values: dict[str, Any], options_class: type[Any], arguments: Sequence[str]
) -> None:
    """Remove from a file's values each table (``--reward.terms``) or list (``--select``) that the
    command line gives.

    Otherwise the parser would complete its items by options of the file's items of the same name or
    index.
    """
    for word in arguments:
        *path, key = word.partition("=")[0][2:].split(".")
        item: Any = (get_args(_type_at(options_class, [*path, key])) or (None,))[-1]
        if (
            word.startswith("--")
            and is_dataclass(item)
            and isinstance(section := value_at(values, path), dict)
        ):
            section.pop(key, None)


def _with_merged_dictionaries(
    options_class: type[Any], parser: Any, arguments: Sequence[str]
) -> list[str]:
    """Replace ``--SECTION.kwargs.KEY VALUE`` by ``--SECTION.kwargs`` with all of its keys.

    The parser cannot set a key of a nested dictionary, and would confuse the number 1 with the text
    "1" in the values that a dictionary has already.
    """
    rest: list[str] = []
    changes: list[tuple[list[str], list[str], str]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        keys = option[2:].split(".") if option.startswith("--") else []
        depth = _dictionary_depth(options_class, keys)
        if depth is None or depth == len(keys):
            rest.append(word)
        elif not (equals or words):
            raise UsageError(f"{word} has no value")
        else:
            changes.append((keys[:depth], keys[depth:], value if equals else words.pop(0)))
    if not changes:
        return rest
    before = parser.parse_args(rest)
    merged: dict[str, dict[str, Any]] = {}
    for section, keys, text in changes:
        inner = merged.setdefault(".".join(section), deepcopy(value_at(before, section) or {}))
        for key in keys[:-1]:
            inner[key] = {} if inner.get(key) is None else inner[key]
            if not isinstance(inner[key], dict):
                option = ".".join([*section, *keys])
                raise UsageError(
                    f"--{option} is {text}, but {key} is {shown(inner[key])}, which has no keys"
                )
            inner = inner[key]
        inner[keys[-1]] = _argument(text)
    return [*rest, *(f"--{section}={json.dumps(values)}" for section, values in merged.items())]


def _argument(text: str) -> Any:
    """The value of a word read as YAML; the word itself where that is text or no YAML (``a # b``
    has no comment).
    """
    try:
        value = load(text)
    except ConfigFileError:
        return text
    return text if isinstance(value, str) else value


def _dictionary_depth(options_class: Any, keys: Sequence[str]) -> int | None:
    """How many parts of a dotted key of ``options_class`` lead to a dictionary of free arguments
    (``kwargs``).
    """
    return next(
        (
            depth
            for depth in range(1, len(keys) + 1)
            if _type_at(options_class, keys[:depth]) is dict
        ),
        None,
    )


def _type_at(annotation: Any, keys: Sequence[str], with_null: bool = False) -> Any:
    """The type at a dotted key of ``annotation``, without the ``None`` of a union; None where there
    is no such key.

    ``with_null`` keeps the last ``None``, and ranges.
    """
    inner = annotation
    for key in keys:
        hints = (
            get_type_hints(annotation, include_extras=with_null) if is_dataclass(annotation) else {}
        )
        inner = (
            hints.get(key) if is_dataclass(annotation) else (get_args(annotation) or (None,))[-1]
        )
        annotation = get_args(inner)[0] if NoneType in get_args(inner) else inner  # X | None
    return inner if with_null else annotation


# --- YAML ---------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """``1e-5`` is a number, as in JSON, and a date is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a configuration file, whose top level maps keys to values.

    Raises:
        ConfigFileError: what ``load`` refuses, or the file is no mapping, too large, or not UTF-8.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ConfigFileError(f"it is larger than {MOST_BYTES >> 20} MiB: expected a configuration")
    try:
        values = load(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"it is not UTF-8: {error}") from error
    if not isinstance(values, dict):
        what = "is empty" if values is None else f"holds {type(values).__name__} {values!r:.80}"
        raise ConfigFileError(f"it {what}: expected a mapping such as train: {{lr: 1.0e-5}}")
    return values


def load(text: str) -> Any:
    """Read YAML made of plain values: mappings with text as keys, lists, text, numbers, true,
    false, null.

    Raises:
        ConfigFileError: it is not YAML, has other values, or a key twice.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, "")
        return loader.construct_document(node)
    except ConfigFileError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigFileError(f"it is not YAML: {error}") from error


def _check_node(node: Any, key: str) -> None:
    """Check that a YAML node, which ``key`` names, has plain values only, and each of its keys
    once.
    """
    if node.tag.rpartition(":")[2] not in ("str", "int", "float", "bool", "null", "map", "seq"):
        raise ConfigFileError(
            f"{_line(node)}: the tag {node.tag}: expected plain values without tags"
        )
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode) or not name.tag.endswith((":str", ":merge")):
                raise ConfigFileError(
                    f"{_line(name)}: a key{f' in {key}' if key else ''} is not text: quote it"
                )
            dotted = f"{key}.{name.value}" if key else name.value
            if name.value in names:
                raise ConfigFileError(f"{_line(name)}: {dotted} is set twice: leave one out")
            names.add(name.value)
            _check_node(value, dotted)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _check_node(item, f"{key}[{index}]")


def _line(where: Any) -> str:
    return f"line {where.start_mark.line + 1}"
