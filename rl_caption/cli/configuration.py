"""The loader: a YAML file, the files it is based on, and words of a command line make
one checked configuration.
"""

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError

from rewards.base import naming, nearest
from rewards.options import adapter, sentences
from rewards.registry import first_paragraph
from rewards.trust import trust
from rl_caption.cli.programs import PROGRAMS
from rl_caption.config.shipped import find_config
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Section, class_names

Config = TypeVar("Config", bound=Section)
Options = Sequence[tuple[Sequence[str], Sequence[str]]]
"""Dotted keys and texts of a command line."""
OF_PARSER = ("config", "help", "print_config")
"""Options of every program."""
OF_CLASSES = {"target", "format", "encoder"}
"""Keys that name a class, whose options are in the key ``kwargs`` beside them."""
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
"""Name of an option in Transformers or TRL -> its key here (docs/coming_from.md)."""
LIMITS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
}
WIDTH = 100
"""Columns of ``--help``."""


class Words(dict[str, Any]):
    """Options of a command line by key, nested. Each changes one entry, also of a
    table.
    """

    texts: Sequence[str] | None = None
    """Texts given for this key itself; they apply before the texts of keys inside it.
    """


def parse(section_type: type[Config], words: Sequence[str], program: str) -> Config:
    """Load the configuration of a command line: ``--config FILE``, then ``--section.key value``.

    ``--help``, ``--help SECTION`` and ``--print_config`` print and leave. Raises
    ``ConfigError``, which names the key, the value and what would be right.
    """
    options = split_words(section_type, words)
    asked = {path[0]: " ".join(texts) for path, texts in options}
    file = asked.get("config")
    where = program if file is None else f"{program} --config {file}"
    with naming(where, (ConfigError,), ConfigError):
        values = merged_values(section_type, file, options)
        if "help" in asked:
            chosen = section_type.choose(values)
            print("\n".join(help_lines(chosen, asked["help"])))
            sys.exit(0)

        def explain(key: str) -> str:
            """Message for an unknown key. Raises ``ConfigError`` for another program's
            file.
            """
            command = file and command_of(values)
            if command:
                raise ConfigError(f"it is for another program: {command} {file}")
            return _no_key(section_type, key)

        trust(class_names(values))
        try:
            config = section_type.of(values)
        except ValidationError as error:
            raise ConfigError(sentences(error, explain)) from error
    if "print_config" in asked:
        plain = config.model_dump(mode="json")
        print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
        sys.exit(0)
    return config


def merged_values(
    section_type: type[Section], file: str | Path | None, options: Options = ()
) -> dict[str, Any]:
    """The plain values of a file, its base files and a command line, before they are checked."""
    values = {} if file is None else read_file(find_config(file), section_type)
    tree = Words()
    for path, texts in options:
        if path[0] not in OF_PARSER:
            node = tree
            for key in path:
                node = node.setdefault(key, Words())
            node.clear()
            node.texts = texts
    return merge(section_type, values, tree)


# --- files ----------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML loader with the scalars of YAML 1.2: ``1e-5`` is a number; ``no``, dates and
    ``1:30`` are text. Keys are text; a repeated key is an error.
    """

    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Read keys as text. Raises ``YAMLError`` for a key that is set twice."""
        names: list[Any] = []
        for key, _ in node.value:
            if key.value != "<<":
                key.tag = self.DEFAULT_SCALAR_TAG
            if key.value in names:
                line = f"line {key.start_mark.line + 1}"
                raise yaml.YAMLError(f"{line}: {key.value} is set twice: leave one out")
            names.append(key.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern in {
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?\d[\d_]*",
    "float": r"[-+]?((\.\d+|\d[\d_]*(\.\d*)?)([eE][-+]?\d+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN)",
    "merge": r"<<",
}.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), None
    )


def read_file(path: Path, section_type: type[Section] = Section) -> dict[str, Any]:
    """Values of a file, merged over its ``base`` files (paths relative to it, or
    recipes).
    """
    overrides = read_mapping(path)
    bases = overrides.pop("base", [])
    values: dict[str, Any] = {}
    for name in [bases] if isinstance(bases, str) else bases:
        beside = path.parent / name
        file = beside if beside.is_file() else find_config(name)
        values = merge(section_type, values, read_file(file, section_type))
    return merge(section_type, values, overrides)


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level maps keys to plain values. Raises ``ConfigError``."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), _Loader)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {values!r:.80}: expected keys and values")
    return values


# --- annotations ----------------------------------------------------------------------------------


def _branches(annotation: Any) -> Sequence[Any]:
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def section_of(annotation: Any, values: Any = None) -> type[Section] | None:
    """The section class of a key with these values; None for tables and plain values."""
    for one in _branches(annotation):
        if isinstance(one, type) and issubclass(one, Section):
            return one.choose(values if isinstance(values, dict) else {})
    return None


def inner(annotation: Any, key: str, values: Any) -> Any:
    """Type annotation of a key in values, or of a table's entry; Any where it is
    unknown.
    """
    section = section_of(annotation, values)
    if section is not None:
        field = section.model_fields.get(key)
        return field.annotation if field else Any
    for one in _branches(annotation):
        if get_origin(one) in (dict, list):
            return get_args(one)[-1]
    return Any


def keys_of(
    section_type: type[Section], prefix: str = ""
) -> Iterator[tuple[str, type[Section]]]:
    """Yield the dotted name and the section of each key, also of the keys inside
    sections, tables and alternatives.
    """
    for name, field in section_type.model_fields.items():
        key, value_type = f"{prefix}{name}", field.annotation
        section, inside = section_of(value_type), f"{key}."
        if section is None:
            section, inside = section_of(inner(value_type, "", {})), f"{key}.NAME."
        if section is None:
            yield key, section_type
            continue
        for one in alternatives(section):
            yield from keys_of(one, inside)


def alternatives(section_type: type[Section]) -> list[type[Section]]:
    """Alternative classes of a section; its values choose one."""
    owner = next(one for one in section_type.__mro__ if "choose" in vars(one))
    if owner is Section:
        return [section_type]
    classes = [owner]
    for one in classes:
        classes += one.__subclasses__()
    return classes


def command_of(values: Mapping[str, Any]) -> str | None:
    """The command that takes a file with these values; None if there is none."""
    if "stages" in values:
        return "rl-caption run"
    if "compute_environment" in values:
        return "accelerate launch --config_file"
    for name, program in PROGRAMS.items():
        with suppress(ConfigError, ValidationError):
            if program.config and resolve_name(program.config).of(values):
                return f"rl-caption {name} --config"
    return None


def merge(annotation: Any, below: Any, above: Any) -> Any:
    """Merge ``above`` over ``below``, two values of a key with this annotation.

    Sections merge key by key. A table of sections, and a section whose alternative
    changes, are replaced; ``kwargs`` are dropped where the class that they are for
    changes. A null deletes the value below where the key cannot be null. ``Words``
    change single entries, also of tables.
    """
    if isinstance(above, Words) and above.texts is not None:
        plain = merge(annotation, below, _value(annotation, above.texts))
        if not above:
            return plain
        if isinstance(plain, dict | None):
            below = plain
    if not isinstance(above, dict):
        return above
    result = dict(below) if isinstance(below, dict) else {}
    both = result if annotation is Any else merge(Any, result, above)
    section = section_of(annotation, both)
    if section is None:
        if inner(annotation, "", {}) is not Any and not isinstance(above, Words):
            result.clear()
    elif section_of(annotation, result) is not section:
        result.clear()
    else:
        changed = {name for name in above if both.get(name) != result.get(name)}
        gone = {f"{name}_kwargs" for name in changed}
        gone |= {"kwargs"} if changed & OF_CLASSES else set()
        for name in gone.intersection(result):
            del result[name]
    for key in above:
        value_type = inner(annotation, key, both)
        value = merge(value_type, result.get(key), above[key])
        can_be_null = value_type is Any or NoneType in get_args(value_type)
        if value is None and key in result and not can_be_null:
            del result[key]
        else:
            result[key] = value
    return result


# --- words ----------------------------------------------------------------------------------------


def split_words(section_type: type[Section], words: Sequence[str]) -> Options:
    """The dotted key and the texts of each ``--a.b.c text`` or ``--a.b.c=text``.

    Words that follow no option belong to the positional key. In a program that has
    one, an option takes one word, an option for a list takes all, a switch none.
    """
    positional = section_type.positional
    options: list[tuple[list[str], list[str]]] = []
    free: list[str] = []
    room = 0
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            options.append((name.split("."), [text] if equals else []))
            room = 0 if equals else len(words)
            value_type = inner(section_type, name, {})
            takes_one = all(
                get_origin(one) is not list for one in _branches(value_type)
            )
            if positional and room and takes_one:
                room = 1 - (value_type is bool)
        elif word == "-h":
            options.append((["help"], []))
        elif room:
            room -= 1
            options[-1][1].append(word)
        else:
            free.append(word)
    if free and not positional:
        raise ConfigError(f"{free[0]!r} is not an option: expected --section.key value")
    return [*options, ([positional], free)] if free else options


def _value(annotation: Any, texts: Sequence[str]) -> Any:
    """Value of an option: the first of YAML, text, list of YAML and list of texts that
    its key accepts; True for an option without text.
    """
    plain: list[Any] = []
    for text in texts:
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError:
            value = text
        plain.append(text if isinstance(value, str) else value)
    readings: list[Any] = [*plain, *texts] if len(texts) == 1 else []
    readings += [plain, [*texts]] if texts else [True]
    for reading in readings if readings[0] is not None else ():
        with suppress(ValidationError):
            adapter(annotation).validate_json(json.dumps(reading), strict=True)
            return reading
    return readings[0]


# --- errors and help ------------------------------------------------------------------------------


def _no_key(section_type: type[Section], key: str) -> str:
    """Message for an unknown key: the alternative that has it, or the nearest key."""
    keys: dict[str, type[Section]] = {}
    for one in alternatives(section_type):
        keys |= dict(keys_of(one))
    if key in keys:
        return f"there is no key {key} here: it is for {first_paragraph(keys[key])}"
    last = key.rpartition(".")[2]
    names = (f".{last}", SYNONYMS.get(last, key))
    same = [one for one in keys if one.endswith(names)]
    suggestion = nearest(key, same or [*section_type.model_fields, *keys])
    return f"there is no key {key}: did you mean {suggestion}?"


def help_lines(section_type: type[Section], section: str) -> Iterator[str]:
    """Lines of ``--help``: key, type, default, range and description of each option."""
    if not section:
        yield from textwrap.wrap(first_paragraph(section_type), WIDTH)
        yield "\n--config  FILE, or the name of a recipe (rl-caption configs list)"
    for key, owner in dict(keys_of(section_type)).items():
        if section and not f"{key}.".startswith(f"{section}."):
            continue
        field = owner.model_fields[key.rpartition(".")[2]]
        value_type: Any = Annotated[field.annotation, field]
        option = TypeAdapter(value_type).json_schema()
        head = f"--{key}  {_type_name(option)}"
        if "default" in option:
            head += f" = {json.dumps(option['default'])}"
        yield from textwrap.wrap(head, WIDTH, subsequent_indent=" " * 6)
        about = textwrap.fill(option.get("description", ""), WIDTH - 6)
        yield textwrap.indent(about, " " * 6)


def _type_name(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words: ``integer >= 1 or null``."""
    if "anyOf" in schema:
        return " or ".join(map(_type_name, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    name = schema.get("type", schema.get("const", "any"))
    if "items" in schema:
        name += f" of {_type_name(schema['items'])}"
    signs = [key for key in LIMITS if key in schema]
    return name + ",".join(f" {LIMITS[key]} {schema[key]:g}" for key in signs)
