"""The loader: a YAML file, the files it is based on, and words of a command line make one checked
configuration.
"""

import difflib
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError

from rewards.options import dotted, sentence, short_repr
from rewards.registry import first_paragraph
from rewards.trust import trust
from rl_caption.cli.programs import LAUNCHER_KEYS, installed_programs
from rl_caption.config.shipped import find_config
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.options import Section, class_names

Config = TypeVar("Config", bound=Section)
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
USAGES = {
    "run": "rl-caption run",
    "accelerate launch": "accelerate launch --config_file",
}
"""How files are used that are no configuration of one program."""
TABLES: dict[Any, str] = {dict: ".NAME.", list: "[0]."}
"""How keys of the sections in a table are written."""
WIDTH = 100
"""Columns of ``--help``."""


class Entries(dict[str, Any]):
    """Values of a command line, each of which changes one entry, also of a table."""


def load(
    section_type: type[Config],
    file: str | Path | None = None,
    words: Sequence[str] = (),
) -> Config:
    """Load a configuration from a file or the name of a recipe, and ``--section.key value`` words.

    Raises ``ConfigError``, which names the key, the value and what would be right.
    """
    values = merged_values(section_type, file, words)
    trust(class_names(values))
    chosen = section_type.choose(values)
    try:
        return chosen.model_validate_json(json.dumps(values))
    except ValidationError as error:
        program = None if file is None or fits(chosen, values) else program_of(values)
        if program is not None:
            usage = USAGES.get(program, f"rl-caption {program} --config")
            raise ConfigError(f"it is for another program: {usage} {file}") from error
        raise ConfigError("; ".join(_sentences(chosen, values, error))) from error


def merged_values(
    section_type: type[Section],
    file: str | Path | None = None,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """The plain values of a file, its base files and a command line, before they are checked."""
    values = {} if file is None else read_file(find_config(file), section_type)
    options = split_words(section_type, words)
    guess = Entries()  # which decides alternatives
    for path, texts in options:
        _set(guess, path, _readings(texts)[0])
    guess = merge(section_type, values, guess)
    entries = Entries()
    for path, texts in options:
        _set(
            entries, path, _value(annotation_at(section_type, path, guess), path, texts)
        )
    merged: dict[str, Any] = merge(section_type, values, entries)
    return merged


# --- files ----------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Scalars as in YAML 1.2: ``1e-5`` is a number; ``no``, dates and ``1:30`` are text."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping, whose keys are text and stand once."""
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            line = f"line {key.start_mark.line + 1}"
            if not key.tag.endswith((":str", ":merge")):
                raise ValueError(f"{line}: a key is not text: quote it")
            if key.value in names:
                raise ValueError(f"{line}: {key.value} is set twice: leave one out")
            names.add(key.value)
        return node


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?\d[\d_]*", list("-+0123456789")),
    ("float", r"[-+]?(\.\d+|\d[\d_]*(\.\d*)?)([eE][-+]?\d+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first
    )


def read_file(path: Path, section_type: type[Section] = Section) -> dict[str, Any]:
    """The values of a file over those of its ``base`` files, which are relative to it, or recipes."""
    own = read_mapping(path)
    bases = own.pop("base", [])
    values: dict[str, Any] = {}
    for name in [bases] if isinstance(bases, str) else bases:
        beside = path.parent / name
        base = read_file(
            beside if beside.is_file() else find_config(name), section_type
        )
        values = merge(section_type, values, base)
    merged: dict[str, Any] = merge(section_type, values, own)
    return merged


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML file whose top level maps keys to plain values. Raises ``ConfigError``."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8-sig"), _Loader)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds {short_repr(values)}: expected keys and values"
        )
    return values


# --- annotations ----------------------------------------------------------------------------------


def members(annotation: Any) -> list[Any]:
    """The types that a key may have, without the metadata of their annotations."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [member for inner in get_args(annotation) for member in members(inner)]
    return [annotation]


def sections_of(annotation: Any) -> list[type[Section]]:
    """The section classes that a key may have; several are alternatives."""
    types = members(annotation)
    return [one for one in types if isinstance(one, type) and issubclass(one, Section)]


def section_of(annotation: Any, values: Any) -> type[Section] | None:
    """The section class of a key with these values; None for what is no section."""
    found = sections_of(annotation)
    return (
        found[0].choose(values if isinstance(values, Mapping) else {})
        if found
        else None
    )


def annotation_at(annotation: Any, path: Sequence[str], values: Any) -> Any:
    """The annotation of a dotted key; Any where nothing is known of it."""
    for key in path:
        section = section_of(annotation, values)
        if section is None:
            tables = [
                get_args(one) for one in members(annotation) if get_origin(one) is dict
            ]
            annotation = tables[0][1] if tables else Any
        else:
            annotation = (
                section.model_fields[key].annotation
                if key in section.model_fields
                else Any
            )
        values = values.get(key) if isinstance(values, Mapping) else None
    return annotation


# --- merging --------------------------------------------------------------------------------------


def merge(annotation: Any, below: Any, above: Any) -> Any:
    """``above`` over ``below``, values of a key with this annotation.

    Sections merge. A table of sections, and a section whose alternative changes, are replaced;
    ``kwargs`` go where the class that they are for changes. A null deletes what is below where the
    key cannot be null. ``Entries`` change single entries, also of tables.
    """
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    changes = section_of(annotation, below) is not section_of(annotation, below | above)
    is_table = annotation_at(annotation, [""], {}) is not Any
    replaces = changes or (is_table and not isinstance(above, Entries))
    result = {} if replaces else _without_options_of_others(below, above)
    for key, value in above.items():
        inner = annotation_at(annotation, [key], below | above)
        if (
            value is None
            and key in result
            and not {None, NoneType, Any} & {*members(inner)}
        ):
            del result[key]
        else:
            result[key] = merge(inner, result.get(key), value)
    return result


def _without_options_of_others(
    below: dict[str, Any], above: Mapping[str, Any]
) -> dict[str, Any]:
    """``below`` without the options of classes that ``above`` changes."""
    result = {}
    for key, value in below.items():
        names = (
            ["target", "format", "encoder"]
            if key == "kwargs"
            else [key.removesuffix("_kwargs")]
        )
        changed = [
            name for name in names if name in above and above[name] != below.get(name)
        ]
        if not (key.endswith("kwargs") and changed):
            result[key] = value
    return result


# --- words ----------------------------------------------------------------------------------------


def split_words(
    section_type: type[Section], words: Sequence[str]
) -> list[tuple[list[str], list[str]]]:
    """The dotted key and the texts of each ``--a.b.c text`` or ``--a.b.c=text``.

    Words of no option are those of the positional key.
    """
    positional = section_type.positional
    options: list[tuple[list[str], list[str]]] = []
    free: list[str] = []
    room = 0
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            options.append((name.split("."), [text] if equals else []))
            annotation = annotation_at(section_type, [name], {})
            if equals or (positional and annotation is bool):
                room = 0
            elif positional and not any(
                get_origin(one) is list for one in members(annotation)
            ):
                room = 1
            else:
                room = len(words)
        elif room:
            room -= 1
            options[-1][1].append(word)
        elif positional:
            free.append(word)
        else:
            raise ConfigError(
                f"{word!r} is not an option: expected --section.key value"
            )
    return [*options, ([positional], free)] if free else options


def _set(entries: Entries, path: Sequence[str], value: Any) -> None:
    *sections, last = path
    for key in sections:
        if not isinstance(entries.get(key), dict):
            entries[key] = Entries()
        entries = entries[key]
    entries[last] = value


def _readings(texts: Sequence[str]) -> list[Any]:
    """What the texts of an option may mean: YAML or text, of one value or of a list."""
    plain = []
    for text in texts:
        try:
            value = yaml.load(text, _Loader)
        except (ValueError, yaml.YAMLError):
            value = text
        plain.append(text if isinstance(value, str) else value)
    if len(texts) == 1:
        return [plain[0], texts[0], plain, [*texts]]
    return [plain, [*texts]] if texts else [True]


def _value(annotation: Any, path: Sequence[str], texts: Sequence[str]) -> Any:
    """The first reading of an option's texts that its key can have."""
    if not texts and bool not in members(annotation):
        raise ConfigError(f"--{'.'.join(path)} has no value")
    readings = _readings(texts)
    adapter = TypeAdapter(annotation)
    for value in readings if readings[0] is not None else ():
        try:
            adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError:
            continue
        return value
    return readings[0]


# --- errors ---------------------------------------------------------------------------------------


def program_of(values: Mapping[str, Any]) -> str | None:
    """The program that has all keys of a configuration; ``accelerate launch`` of one for it, None
    if there is none.
    """
    if "stages" in values:
        return "run"
    if values.keys() & LAUNCHER_KEYS:
        return "accelerate launch"
    for name, program in installed_programs().items():
        if program.config is not None:
            try:
                section_type = resolve_name(program.config).choose(values)
            except ConfigError:  # the values choose no alternative
                continue
            if fits(section_type, values):
                return name
    return None


def fits(section_type: type[Section], values: Mapping[str, Any]) -> bool:
    """Whether a section has all keys of ``values``."""
    for name, value in values.items():
        if name not in section_type.model_fields:
            return False
        section = section_of(section_type.model_fields[name].annotation, value)
        if (
            section is not None
            and isinstance(value, Mapping)
            and not fits(section, value)
        ):
            return False
    return True


def _sentences(
    section_type: type[Section], values: Mapping[str, Any], error: ValidationError
) -> list[str]:
    """What is wrong, one sentence a key."""
    found: dict[str, str] = {}
    for item in error.errors(include_url=False):
        path = _path(item["loc"], values)
        if item["type"] == "missing" and path[-1:] != [item["loc"][-1]]:
            path.append(item["loc"][-1])
        key = dotted(tuple(path))
        if item["type"] == "extra_forbidden":
            text = _no_key(section_type, path, values)
        else:
            text = sentence(item, key)
        if key in found and item["type"] != "value_error":  # another type of a union
            text = f"{found[key]} or {text.partition(': expected ')[2]}"
        found[key] = text
    return list(found.values())[:3]


def _path(location: Sequence[int | str], values: Any) -> list[int | str]:
    """The location of an error without the tags of alternatives and unions."""
    path: list[int | str] = []
    for part in location:
        if isinstance(part, int):
            path.append(part)
            values = values[part] if part < len(values) else None
        elif isinstance(values, Mapping) and part in values:
            path.append(part)
            values = values[part]
    return path


def keys_of(section_type: type[Section]) -> Iterator[str]:
    """Yield the dotted names of all keys of a section and of the sections in it."""
    for name, field in section_type.model_fields.items():
        yield name
        for section in sections_of(field.annotation):
            yield from (f"{name}.{key}" for key in keys_of(section))


def _no_key(
    section_type: type[Section], path: Sequence[int | str], values: Mapping[str, Any]
) -> str:
    """That there is no such key, and which alternative has it, or the nearest one."""
    key = dotted(tuple(path))
    *parents, last = map(str, path)
    inner: Any = values
    for name in parents:
        inner = inner.get(name) if isinstance(inner, Mapping) else None
    owner = (
        section_of(annotation_at(section_type, parents, values), inner) or section_type
    )
    for section, rest in ((owner, last), (section_type, key)):
        base = next(one for one in section.__mro__ if "choose" in vars(one))
        others = _subclasses(base) if base is not Section else ()
        owners = [first_paragraph(other) for other in others if rest in keys_of(other)]
        if owners:
            return f"there is no key {key} here: it is for {' or '.join(owners)}"
    known = list(keys_of(section_type))
    siblings = [".".join([*parents, name]) for name in owner.model_fields]
    same = [name for name in known if name.rpartition(".")[2] == last]
    nearest = [SYNONYMS[last]] if SYNONYMS.get(last) in known else []
    nearest += difflib.get_close_matches(key, same, 1, 0.0)
    nearest += difflib.get_close_matches(key, [*siblings, *known], 1)
    hint = (
        f"did you mean {nearest[0]}?"
        if nearest
        else f"expected one of {', '.join(siblings)}"
    )
    return f"there is no key {key}: {hint}"


def _subclasses(base: type[Section]) -> Iterator[type[Section]]:
    for inner in base.__subclasses__():
        yield inner
        yield from _subclasses(inner)


# --- command line ---------------------------------------------------------------------------------


def parse(section_type: type[Config], arguments: Sequence[str], program: str) -> Config:
    """Load the configuration of a command line: ``--config FILE``, then ``--section.key value``.

    ``--help``, ``--help SECTION`` and ``--print_config`` print and leave.
    """
    words = ["--help" if word == "-h" else word for word in arguments]
    prints = "--print_config" in words
    words = [word for word in words if word != "--print_config"]
    where = program
    try:
        file, words = file_of(words)
        where = program if file is None else f"{program} --config {file}"
        if "--help" in words:
            place = words.index("--help")
            values = merged_values(section_type, file, words[:place])
            section = "".join(words[place + 1 : place + 2]).removeprefix("--")
            print("\n".join(help_lines(section_type.choose(values), section)))
            sys.exit(0)
        config = load(section_type, file, words)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if prints:
        print(
            yaml.safe_dump(
                config.model_dump(mode="json"), sort_keys=False, allow_unicode=True
            )
        )
        sys.exit(0)
    return config


def file_of(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of ``--config``, None where there is none, and the other words."""
    files: list[str] = []
    others: list[str] = []
    remaining = iter(words)
    for word in remaining:
        option, equals, value = word.partition("=")
        if option == "--config":
            files.append(value if equals else next(remaining, "--"))
        else:
            others.append(word)
    if len(files) > 1 or any(file.startswith("--") for file in files):
        raise ConfigError(
            f"--config is {', '.join(files)}: expected one file, or a recipe's name"
        )
    return (files[0] if files else None), others


def help_lines(section_type: type[Section], section: str = "") -> Iterator[str]:
    """Keys, types, defaults, ranges and descriptions; of all, or of one section."""
    if not section:
        yield from textwrap.wrap(first_paragraph(section_type), WIDTH)
        yield "\n--config  FILE, or the name of a recipe (rl-caption configs list)"
    for key, option in dict(_options(section_type)).items():
        if f"{key}.".startswith(f"{section}." if section else ""):
            default = (
                f" = {json.dumps(option['default'])}" if "default" in option else ""
            )
            head = f"--{key}  {_type_name(option)}{default}"
            yield from textwrap.wrap(head, WIDTH, subsequent_indent=" " * 6)
            yield textwrap.indent(
                textwrap.fill(option.get("description", ""), WIDTH - 6), " " * 6
            )


def _options(
    section_type: type[Section], prefix: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield key and JSON schema of each option, also of those in sections and tables."""
    properties = section_type.model_json_schema()["properties"]
    for name, field in section_type.model_fields.items():
        key = f"{prefix}{name}"
        inner = [(section, f"{key}.") for section in sections_of(field.annotation)]
        for member in members(field.annotation):
            place = TABLES.get(get_origin(member), "")
            items = sections_of(get_args(member)[-1]) if place else []
            inner += [(section, f"{key}{place}") for section in items]
        if not inner:
            yield key, properties[name]
        for section, inner_prefix in inner:
            yield from _options(section, inner_prefix)


def _type_name(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words: ``integer >= 1 or null``."""
    if "anyOf" in schema:
        return " or ".join(_type_name(branch) for branch in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    signs = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "maximum": "<=",
        "exclusiveMaximum": "<",
    }
    limits = [
        f" {sign} {schema[name]:g}" for name, sign in signs.items() if name in schema
    ]
    items = f" of {_type_name(schema['items'])}" if "items" in schema else ""
    return f"{schema.get('type', schema.get('const', 'any'))}{items}{','.join(limits)}"
