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
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

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
LIMITS = (
    ("minimum", ">="),
    ("exclusiveMinimum", ">"),
    ("maximum", "<="),
    ("exclusiveMaximum", "<"),
)
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
            message = f"it is for another program: {usage(program)} {file}"
        else:
            message = "; ".join(_sentences(chosen, error))
        raise ConfigError(message) from error


def merged_values(
    section_type: type[Section],
    file: str | Path | None = None,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """The plain values of a file, its base files and a command line, before they are checked."""
    values = {} if file is None else read_file(find_config(file), section_type)
    options = split_words(section_type, words)
    guess = merge(section_type, values, _entries(Any, options, {}))
    return merge(section_type, values, _entries(section_type, options, guess))


# --- files ----------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Scalars as in YAML 1.2: ``1e-5`` is a number; ``no``, dates and ``1:30`` are text."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}


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


def read_yaml(text: str) -> Any:
    """The plain values of a text, whose keys are text and stand once. Raises ``ValueError``."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _check_keys(node, "")
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _check_keys(node: Any, path: str) -> None:
    """Check the keys of a mapping and of those in it."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, path)
    if not isinstance(node, yaml.MappingNode):
        return
    names = set()
    for key, value in node.value:
        line = f"line {key.start_mark.line + 1}"
        if not key.tag.endswith((":str", ":merge")):
            raise ValueError(f"{line}: a key is not text: quote it")
        if key.value in names:
            raise ValueError(f"{line}: {path}{key.value} is set twice: leave one out")
        names.add(key.value)
        _check_keys(value, f"{path}{key.value}.")


def read_file(path: Path, section_type: type[Section] = Section) -> dict[str, Any]:
    """The values of a file over those of its ``base`` files, which are relative to it, or recipes."""
    own = read_mapping(path)
    bases = own.pop("base", [])
    values: dict[str, Any] = {}
    for name in [bases] if isinstance(bases, str) else bases:
        beside = path.parent / name
        file = beside if beside.is_file() else find_config(name)
        values = merge(section_type, values, read_file(file, section_type))
    return merge(section_type, values, own)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML file whose top level maps keys to plain values. Raises ``ConfigError``."""
    try:
        values = read_yaml(Path(path).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds {short_repr(values)}: expected keys and values"
        )
    return values


# --- annotations ----------------------------------------------------------------------------------


def section_of(annotation: Any, values: Any = None) -> type[Section] | None:
    """The section class of a key with these values; None for tables and plain values."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation.choose(values if isinstance(values, dict) else {})
    if get_origin(annotation) in (dict, list):
        return None
    found = [section_of(one, values) for one in get_args(annotation)]
    return next(filter(None, found), None)


def annotation_at(annotation: Any, path: Sequence[str], values: Any) -> Any:
    """The annotation of a dotted key, also of a table's entry; Any where nothing is known of it."""
    for key in path:
        section = section_of(annotation, values)
        if section is not None:
            field = section.model_fields.get(key)
            annotation = field.annotation if field else Any
        else:
            types = (annotation, *get_args(annotation))
            tables = [get_args(one) for one in types if get_origin(one) in (dict, list)]
            annotation = tables[0][-1] if tables else Any
        values = values.get(key) if isinstance(values, dict) else None
    return annotation


def keys_of(
    section_type: type[Section], prefix: str = ""
) -> Iterator[tuple[str, tuple[type[Section], str]]]:
    """Yield the dotted name of each key, also of those in sections, tables and alternatives, and
    the section that it is in, with its name there.
    """
    for name, field in section_type.model_fields.items():
        key, annotation = f"{prefix}{name}", field.annotation
        section = section_of(annotation)
        if section is None:
            annotation, key = annotation_at(annotation, [""], {}), f"{key}.NAME"
            section = section_of(annotation)
        if section is None:
            yield f"{prefix}{name}", (section_type, name)
        else:
            for one in (section, *alternatives(section)):
                yield from keys_of(one, f"{key}.")


def alternatives(section_type: type[Section]) -> Iterator[type[Section]]:
    """Yield the classes among which the values of a section choose."""
    owner = next(one for one in section_type.__mro__ if "choose" in vars(one))
    classes = [] if owner is Section else [owner]
    for one in classes:
        classes += one.__subclasses__()
    yield from classes


# --- merging --------------------------------------------------------------------------------------


def merge(annotation: Any, below: Any, above: Any) -> Any:
    """``above`` over ``below``, values of a key with this annotation.

    Sections merge. A table of sections, and a section whose alternative changes, are replaced;
    ``kwargs`` go where the class that they are for changes. A null deletes what is below where the
    key cannot be null. ``Entries`` change single entries, also of tables.
    """
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    both = below | above
    section = section_of(annotation, both)
    is_table = section is None and annotation_at(annotation, [""], {}) is not Any
    replaces = is_table and not isinstance(above, Entries)
    replaces |= section_of(annotation, below) is not section
    result = {}
    for key, value in below.items():
        if not replaces and not _is_for_another(key, below, above):
            result[key] = value
    for key, value in above.items():
        inner = annotation_at(annotation, [key], both)
        needs_value = inner is not Any and NoneType not in get_args(inner)
        if value is None and key in result and needs_value:
            del result[key]
        else:
            result[key] = merge(inner, result.get(key), value)
    return result


def _is_for_another(
    key: str, below: Mapping[str, Any], above: Mapping[str, Any]
) -> bool:
    """Whether a key has the options of a class, which ``above`` changes."""
    if not key.endswith("kwargs"):
        return False
    names = ("target", "format", "encoder") if key == "kwargs" else (key[:-7],)
    return any(above.get(name, below.get(name)) != below.get(name) for name in names)


# --- words ----------------------------------------------------------------------------------------


def split_words(
    section_type: type[Section], words: Sequence[str]
) -> list[tuple[list[str], list[str]]]:
    """The dotted key and the texts of each ``--a.b.c text`` or ``--a.b.c=text``.

    Words of no option are those of the positional key, where there is one; then an option takes
    one word, that of a list all, a switch none.
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
            types = annotation, *get_args(annotation)
            takes_one = positional and all(get_origin(one) is not list for one in types)
            room = 1 - (annotation is bool) if takes_one else len(words)
            room = 0 if equals else room
        elif room:
            room -= 1
            options[-1][1].append(word)
        else:
            free.append(word)
    if free and not positional:
        raise ConfigError(f"{free[0]!r} is not an option: expected --section.key value")
    return [*options, ([positional], free)] if free else options


def _entries(
    annotation: Any, options: Sequence[tuple[list[str], list[str]]], values: Any
) -> Entries:
    """The values of options, by nested keys."""
    result = Entries()
    for path, texts in options:
        entries: dict[str, Any] = result
        for key in path[:-1]:
            if not isinstance(entries.get(key), dict):
                entries[key] = Entries()
            entries = entries[key]
        entries[path[-1]] = _value(annotation_at(annotation, path, values), texts)
    return result


def _value(annotation: Any, texts: Sequence[str]) -> Any:
    """What the texts of an option mean: YAML or text, of one value or of a list; the first that its
    key can have.
    """
    plain = []
    for text in texts:
        try:
            value = read_yaml(text)
        except ValueError:
            value = text
        plain.append(text if isinstance(value, str) else value)
    readings: list[Any] = [plain, [*texts]] if texts else [True]
    if len(texts) == 1:
        readings = [*plain, *texts, *readings]
    adapter = TypeAdapter(annotation)
    for reading in readings if readings[0] is not None else ():
        try:
            adapter.validate_json(json.dumps(reading), strict=True)
        except ValidationError:
            continue
        return reading
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


def usage(program: str) -> str:
    """The command that takes a file."""
    return USAGES.get(program, f"rl-caption {program} --config")


def fits(section_type: type[Section], values: Mapping[str, Any]) -> bool:
    """Whether a section has all keys of ``values``."""
    for name, value in values.items():
        if name not in section_type.model_fields:
            return False
        section = section_of(section_type.model_fields[name].annotation, value)
        if section and isinstance(value, dict) and not fits(section, value):
            return False
    return True


def _sentences(section_type: type[Section], error: ValidationError) -> list[str]:
    """What is wrong, one sentence a key."""
    found: dict[str, str] = {}
    for item in error.errors(include_url=False):
        key = dotted(item["loc"])
        if item["type"] == "extra_forbidden":
            text = _no_key(section_type, key)
        else:
            text = sentence(item, key)
        if key in found and item["type"] != "value_error":  # another type of a union
            text = f"{found[key]} or {text.partition(': expected ')[2]}"
        found[key] = text
    return list(found.values())[:3]


def _no_key(section_type: type[Section], key: str) -> str:
    """That there is no such key, and which alternative has it, or the nearest one."""
    last = key.rpartition(".")[2]
    owners = []
    for one in (section_type, *alternatives(section_type)):
        found = dict(keys_of(one)).get(key)
        owners += [first_paragraph(found[0])] if found else []
    if owners:
        return f"there is no key {key} here: it is for {' or '.join(owners)}"

    def likeness(name: str) -> list[float]:
        pairs = ((last, name.rpartition(".")[2]), (key, name))
        return [difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs]

    known = [*section_type.model_fields, *dict(keys_of(section_type))]
    nearest = SYNONYMS.get(last)
    if nearest not in known:
        nearest = max(known, key=likeness)
    return f"there is no key {key}: did you mean {nearest}?"


# --- command line ---------------------------------------------------------------------------------


def parse(section_type: type[Config], arguments: Sequence[str], program: str) -> Config:
    """Load the configuration of a command line: ``--config FILE``, then ``--section.key value``.

    ``--help``, ``--help SECTION`` and ``--print_config`` print and leave.
    """
    words = ["--help" if word == "-h" else word for word in arguments]
    prints = "--print_config" in words
    words = [word for word in words if word != "--print_config"]
    file, section = _take(words, "--config"), _take(words, "--help")
    try:
        if section is not None:
            values = merged_values(section_type, file, words)
            print("\n".join(help_lines(section_type.choose(values), section)))
            sys.exit(0)
        config = load(section_type, file, words)
    except ConfigError as error:
        where = program if file is None else f"{program} --config {file}"
        raise ConfigError(f"{where}: {error}") from error
    if prints:
        values = config.model_dump(mode="json")
        print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        sys.exit(0)
    return config


def _take(words: list[str], option: str) -> str | None:
    """Remove an option and its value from ``words``; the value, None where there is no option."""
    for place, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name == option:
            following = words[place + 1 : place + 2]
            del words[place : place + (1 if equals else 2)]
            return text if equals else "".join(following)
    return None


def help_lines(section_type: type[Section], section: str = "") -> Iterator[str]:
    """Keys, types, defaults, ranges and descriptions; of all, or of one section."""
    if not section:
        yield from textwrap.wrap(first_paragraph(section_type), WIDTH)
        yield "\n--config  FILE, or the name of a recipe (rl-caption configs list)"
    whole = section_type.model_json_schema()
    schemas = {**whole.get("$defs", {}), section_type.__name__: whole}
    for key, (owner, name) in dict(keys_of(section_type)).items():
        if f"{key}.".startswith(f"{section}." if section else ""):
            if owner.__name__ not in schemas:  # an alternative
                schemas[owner.__name__] = owner.model_json_schema()
            option = schemas[owner.__name__]["properties"][name]
            default = (
                f" = {json.dumps(option['default'])}" if "default" in option else ""
            )
            head = f"--{key}  {_type_name(option)}{default}"
            yield from textwrap.wrap(head, WIDTH, subsequent_indent=" " * 6)
            yield textwrap.indent(
                textwrap.fill(option.get("description", ""), WIDTH - 6), " " * 6
            )


def _type_name(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words: ``integer >= 1 or null``."""
    if "anyOf" in schema:
        return " or ".join(_type_name(branch) for branch in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    limits = [f" {sign} {schema[name]:g}" for name, sign in LIMITS if name in schema]
    items = f" of {_type_name(schema['items'])}" if "items" in schema else ""
    return f"{schema.get('type', schema.get('const', 'any'))}{items}{','.join(limits)}"
