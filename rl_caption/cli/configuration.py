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
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import ValidationError

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


class Entries(dict[str, Any]):
    """Values of a command line, each of which changes one entry, also of a table."""


def load(
    section_type: type[Config], file: str | Path | None = None, words: Sequence[str] = ()
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
        message = "" if file is None or fits(chosen, values) else _of_another(values, file)
        sentences = message or "; ".join(_sentences(chosen, values, error))
        raise ConfigError(sentences) from error


def merged_values(
    section_type: type[Section], file: str | Path | None = None, words: Sequence[str] = ()
) -> dict[str, Any]:
    """The plain values of a file, its base files and a command line, before they are checked."""
    values = {} if file is None else read_file(find_config(file), section_type)
    entries = _entries(words)
    guess = merge(section_type, values, entries)
    for word, texts in split_words(words):
        annotation = annotation_at(section_type, word, guess)
        if not texts and (annotation is Any or not _admits(annotation, bool)):
            raise ConfigError(f"--{'.'.join(word)} has no value")
        value = _value(annotation, texts)
        section = section_of(annotation, None)
        if section is not None and isinstance(value, str):  # the section alone, in a file
            value = read_file(find_config(value), section)
        _set(entries, word, value)
    merged: dict[str, Any] = merge(section_type, values, entries)
    return merged


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


def read_file(path: Path, section_type: type[Section] = Section) -> dict[str, Any]:
    """The values of a file over those of its ``base`` files, which are relative to it, or recipes."""
    own = read_mapping(path)
    bases = own.pop("base", [])
    values: dict[str, Any] = {}
    for name in [bases] if isinstance(bases, str) else bases:
        beside = path.parent / name
        base = read_file(beside if beside.is_file() else find_config(name), section_type)
        values = merge(section_type, values, base)
    merged: dict[str, Any] = merge(section_type, values, own)
    return merged


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read a YAML file whose top level maps keys to plain values. Raises ``ConfigError``."""
    try:
        values = parse_yaml(Path(path).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds {short_repr(values)}: expected keys, such as train: {{lr: 1.0e-5}}"
        )
    return values


def parse_yaml(text: str) -> Any:
    """Read YAML of plain values. Raises ``ValueError`` with the line of a key that is set twice."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {error}") from error


def _check_node(node: yaml.Node, key: str = "") -> None:
    line = f"line {node.start_mark.line + 1}"
    if node.tag.rpartition(":")[2] not in ("str", "int", "float", "bool", "null", "map", "seq"):
        raise ValueError(f"{line}: the tag {node.tag}: expected plain values")
    if isinstance(node, yaml.MappingNode):
        names = set()
        for name, value in node.value:
            line = f"line {name.start_mark.line + 1}"
            if not isinstance(name, yaml.ScalarNode) or not name.tag.endswith((":str", ":merge")):
                raise ValueError(f"{line}: a key in {key or 'the file'} is not text: quote it")
            inner = f"{key}.{name.value}".lstrip(".")
            if name.value in names:
                raise ValueError(f"{line}: {inner} is set twice: leave one out")
            names.add(name.value)
            _check_node(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_node(item, f"{key}[]")


# --- merging --------------------------------------------------------------------------------------


def section_of(annotation: Any, values: Any) -> type[Section] | None:
    """The section class of an annotation (``X``, ``X | None``, alternatives); None for others."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation.choose(values) if isinstance(values, Mapping) else annotation
    if get_origin(annotation) is Annotated:
        return section_of(get_args(annotation)[0], values)
    if get_origin(annotation) in (Union, UnionType):
        found = [section_of(member, None) for member in get_args(annotation)]
        classes = [section for section in found if section is not None]
        if len(classes) > 1 and isinstance(values, Mapping):
            return classes[0].choose(values)
        return classes[0] if classes else None
    return None


def merge(annotation: Any, below: Any, above: Any) -> Any:
    """``above`` over ``below``, values of a key with this annotation.

    Sections merge. A table of free keys, and a section whose alternative changes, are replaced;
    ``kwargs`` go where the class that they are for changes. A null deletes what is below where the
    key cannot be null. ``Entries`` change single entries, also of tables.
    """
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    entries = isinstance(above, Entries)
    result = {**below}
    if section_of(annotation, below) is not section_of(annotation, below | above) or (
        _item(annotation) not in (None, Any) and not entries
    ):
        result = {}
    for key in [key for key in result if _belongs_to_changed(key, below, above)]:
        del result[key]
    for key, value in above.items():
        inner = _inner(annotation, key, below | above)
        if value is None and key in result and not _admits(inner, NoneType):
            del result[key]
        else:
            result[key] = merge(inner, result.get(key), value)
    return result


def _belongs_to_changed(key: str, below: Mapping[str, Any], above: Mapping[str, Any]) -> bool:
    """Whether ``key`` holds options of a class that ``above`` changes."""
    names = ("target", "format", "encoder") if key == "kwargs" else (key.removesuffix("_kwargs"),)
    changed = [name for name in names if name in above and above[name] != below.get(name)]
    return key.endswith("kwargs") and bool(changed)


def _item(annotation: Any) -> Any:
    """``X`` of ``dict[str, X]``, Any of a ``dict``; None for what is no table."""
    for option in _members(annotation):
        if option is dict:
            return Any
        if get_origin(option) is dict:
            return get_args(option)[1]
    return None


def _inner(annotation: Any, key: str, values: Any) -> Any:
    """The annotation of ``key`` in a section or a table; None of a key that there is not."""
    section = section_of(annotation, values)
    if section is None:
        return Any if annotation is Any else _item(annotation)
    field = section.model_fields.get(key)
    return None if field is None else field.annotation


def annotation_at(annotation: Any, path: Sequence[str], values: Any) -> Any:
    """The annotation of a dotted key; None of a key that there is not."""
    for key in path:
        annotation = _inner(annotation, key, values)
        values = values.get(key) if isinstance(values, dict) else None
    return annotation


def _admits(annotation: Any, value_type: type) -> bool:
    """Whether a key may have a value of this type, as far as its annotation says."""
    for member in _members(annotation):
        if get_origin(member) is Annotated:
            member = get_args(member)[0]
        if member in (None, Any, value_type) or (value_type is int and member is float):
            return True
        if get_origin(member) is Literal and value_type in map(type, get_args(member)):
            return True
    return False


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union; any other annotation alone."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


# --- words ----------------------------------------------------------------------------------------


def split_words(words: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the dotted key and the texts of each ``--a.b.c text`` or ``--a.b.c=text``."""
    option: list[str] = []
    texts: list[str] = []
    for word in [*words, "--"]:
        if not word.startswith("--"):
            if not option:
                raise ConfigError(f"{word!r} is not an option: expected --section.key value")
            texts.append(word)
            continue
        if option:
            yield option, texts
        name, equals, text = word[2:].partition("=")
        option, texts = name.split("."), [text] if equals else []


def with_positional(section_type: type[Section], words: Sequence[str]) -> list[str]:
    """The words with those that belong to no option behind ``--NAME`` of a positional key."""
    if not section_type.positional:
        return list(words)
    options: list[str] = []
    free: list[str] = []
    takes = 0
    for word in words:
        if word.startswith("--"):
            field = section_type.model_fields.get(word[2:])
            annotation = None if field is None else field.annotation
            is_list = any(get_origin(member) is list for member in _members(annotation))
            takes = 0 if "=" in word or annotation is bool else len(words) if is_list else 1
            options.append(word)
        elif takes:
            takes -= 1
            options.append(word)
        else:
            free.append(word)
    return [*options, f"--{section_type.positional}", *free] if free else options


def _entries(words: Sequence[str]) -> Entries:
    """The words as nested values, whatever their annotations are."""
    entries = Entries()
    for path, texts in split_words(words):
        _set(entries, path, _plain(texts[0]) if texts else True)
    return entries


def _set(entries: Entries, path: Sequence[str], value: Any) -> None:
    *sections, last = path
    for key in sections:
        if not isinstance(entries.get(key), Entries):
            entries[key] = Entries()
        entries = entries[key]
    entries[last] = value


def _plain(text: str) -> Any:
    """A word read as YAML; the word itself where it is text or no YAML."""
    try:
        value = parse_yaml(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value


def _value(annotation: Any, texts: Sequence[str]) -> Any:
    """The value of a word's texts, as far as the annotation decides: a switch, a list, text."""
    if not texts:
        return True
    lists = [member for member in _members(annotation) if get_origin(member) is list]
    value = _plain(texts[0])
    if len(texts) == 1 and (not lists or value is None or isinstance(value, list)):
        return _text_or(annotation, value, texts[0])
    if lists and (len(texts) > 1 or not _admits(annotation, str)):
        return [_text_or(get_args(lists[0])[0], _plain(text), text) for text in texts]
    return texts[0] if len(texts) == 1 else list(texts)


def _text_or(annotation: Any, value: Any, text: str) -> Any:
    """The value of a word, or its text where the key can be text and not such a value."""
    is_scalar = isinstance(value, int | float) and not _admits(annotation, type(value))
    return text if is_scalar and _admits(annotation, str) else value


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
        if program.config is None:
            continue
        try:
            section_type = resolve_name(program.config).choose(values)
        except ConfigError:  # the values choose no alternative
            continue
        if fits(section_type, values):
            return name
    return None


def _of_another(values: Mapping[str, Any], file: str | Path) -> str:
    """Whose configuration the values of a file are; empty where no program has their keys."""
    program = program_of(values)
    if program is None:
        return ""
    if program == "run":
        return f"this is a pipeline: rl-caption run {file}"
    run = f"rl-caption {program} --config {file}"
    use = "pass it as --config_file" if " " in program else run
    return f"this is a configuration of {program}: {use}"


def _sentences(
    section_type: type[Section], values: Mapping[str, Any], error: ValidationError
) -> list[str]:
    """What is wrong, one sentence a key."""
    found: dict[str, str] = {}
    for item in error.errors(include_url=False):
        path = _path(section_type, item["loc"], values)
        key = dotted(path)
        if item["type"] == "extra_forbidden":
            text = _no_key(section_type, path, values)
        else:
            text = sentence(item, key)
        if key in found and item["type"] != "value_error":  # another type of a union
            text = f"{found[key]} or {text.partition(': expected ')[2]}"
        found[key] = text
    sentences = list(found.values())
    more = len(sentences) - 3
    return [*sentences[:3], f"and {more} more"] if more > 0 else sentences


def _path(annotation: Any, location: tuple[int | str, ...], values: Any) -> tuple[int | str, ...]:
    """The location of an error without the tags of alternatives and unions."""
    path: list[int | str] = []
    for key in location:
        section = section_of(annotation, values)
        if section is not None and key == section.__name__:
            continue
        if isinstance(key, int):
            items = [get_args(member)[0] for member in _members(annotation) if get_args(member)]
            annotation = items[0] if items else Any
        elif section is None and _item(annotation) is None and annotation is not Any:
            break
        else:
            annotation = _inner(annotation, key, values)
        path.append(key)
        is_table = isinstance(values, Mapping) and isinstance(key, str)
        values = values.get(key) if is_table else None
    return tuple(path)


def keys_of(section_type: type[Section], values: Any = None) -> Iterator[str]:
    """Yield the dotted names of all keys of a section and of the sections in it."""
    for name, field in section_type.model_fields.items():
        yield name
        inner = values.get(name) if isinstance(values, Mapping) else None
        section = section_of(field.annotation, inner)
        if section is not None:
            yield from (f"{name}.{key}" for key in keys_of(section, inner))


def fits(section_type: type[Section], values: Mapping[str, Any]) -> bool:
    """Whether a section has all keys of ``values``."""
    for name, value in values.items():
        field = section_type.model_fields.get(name)
        if field is None:
            return False
        section = section_of(field.annotation, value)
        if section is not None and isinstance(value, Mapping) and not fits(section, value):
            return False
    return True


def _no_key(
    section_type: type[Section], path: tuple[int | str, ...], values: Mapping[str, Any]
) -> str:
    """That there is no such key, and which alternative has it, or the nearest one."""
    key = dotted(path)
    *parents, last = map(str, path)
    inner: Any = values
    for name in parents:
        inner = inner.get(name) if isinstance(inner, Mapping) else None
    owner = section_of(annotation_at(section_type, parents, values), inner) or section_type
    for section, rest in ((owner, last), (section_type, key)):
        others = [other for other in _alternatives(section) if rest in keys_of(other)]
        if others:
            owners = " or ".join(_summary(other) for other in others)
            return f"there is no key {key} here: it is for {owners}"
    known = list(keys_of(section_type, values))
    same = [name for name in known if name.rpartition(".")[2] == last]
    siblings = [".".join([*parents, name]) for name in owner.model_fields]
    nearest = [SYNONYMS[last]] if SYNONYMS.get(last) in known else []
    nearest += difflib.get_close_matches(key, same, 1, 0.0)
    nearest += difflib.get_close_matches(key, siblings, 1, 0.6)
    nearest += difflib.get_close_matches(key, known, 1, 0.7)
    hint = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(siblings)}"
    return f"there is no key {key}: {hint}"


def _alternatives(section: type[Section]) -> list[type[Section]]:
    """The alternatives to a section, as far as they are imported."""
    for base in section.__mro__:
        if base is not Section and "choose" in vars(base):
            others = [other for other in _subclasses(base) if other is not section]
            return [other for other in others if not other.__subclasses__()]
    return []


def _subclasses(base: type[Section]) -> Iterator[type[Section]]:
    for inner in base.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _summary(section: type[Section]) -> str:
    """What a section is, by its docstring."""
    text = re.split(r"[.:;] ", str(section.__doc__), maxsplit=1)[0].replace("``", "").rstrip(".")
    return text[:1].lower() + text[1:]


# --- command line ---------------------------------------------------------------------------------


def parse(section_type: type[Config], arguments: Sequence[str], program: str) -> Config:
    """Load the configuration of a command line: ``--config FILE``, then ``--section.key value``.

    ``--help``, ``--help SECTION`` and ``--print_config`` print and leave.
    """
    words = with_positional(
        section_type, ["--help" if word == "-h" else word for word in arguments]
    )
    prints = "--print_config" in words
    if prints:
        words.remove("--print_config")
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
        print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
        sys.exit(0)
    return config


def file_of(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of ``--config``, None where there is none, and the other words."""
    file, rest = None, []
    words = list(words)
    while words:
        word = words.pop(0)
        if word.partition("=")[0] != "--config":
            rest.append(word)
            continue
        if file is not None:
            raise ConfigError("--config is given twice: a file names others as its base")
        if word == "--config" and (not words or words[0].startswith("--")):
            raise ConfigError("--config has no value: expected a file or the name of a recipe")
        file = words.pop(0) if word == "--config" else word.partition("=")[2]
    return file, rest


WIDTH = 100
"""Columns of ``--help``."""
INDENT = " " * 6


def help_lines(section_type: type[Section], section: str = "") -> Iterator[str]:
    """Keys, types, defaults, ranges and descriptions; of all, or of one section."""
    schema = section_type.model_json_schema()
    if not section:
        yield from textwrap.wrap(first_paragraph(section_type), WIDTH)
        yield ""
        yield "--config  FILE, or the name of a recipe (rl-caption configs list)"
    options = list(_options(schema, schema.get("$defs", {})))
    for key, option, description in options:
        if f"{key}.".startswith(f"{section}." if section else ""):
            default = option.get("default", "")
            shown_default = f" = {json.dumps(default)}" if "default" in option else ""
            head = f"--{key}  {_type_name(option)}{shown_default}"
            yield from textwrap.wrap(head, WIDTH, subsequent_indent=INDENT)
            yield from textwrap.wrap(
                description, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT
            )


def _options(
    schema: Mapping[str, Any], sections: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yield key, JSON schema and description of each option, also of those in sections."""
    for name, option in schema["properties"].items():
        key = f"{prefix}{name}"
        branches = [option, *option.get("anyOf", ()), *option.get("oneOf", ())]
        inner = [(branch["$ref"], f"{key}.") for branch in branches if "$ref" in branch]
        for branch in branches:
            table = branch.get("additionalProperties")
            if isinstance(table, dict) and "$ref" in table:
                inner.append((table["$ref"], f"{key}.NAME."))
            if "$ref" in branch.get("items", {}):
                inner.append((branch["items"]["$ref"], f"{key}[0]."))
        if not inner:
            yield key, option, option.get("description", "")
        for reference, inner_prefix in inner:
            yield from _options(sections[reference.rpartition("/")[2]], sections, inner_prefix)


def _type_name(schema: Mapping[str, Any]) -> str:
    """A JSON schema in words: ``integer >= 1 or null``."""
    if "anyOf" in schema:
        return " or ".join(_type_name(branch) for branch in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f" {sign} {schema[name]:g}" for name, sign in signs.items() if name in schema]
    items = f" of {_type_name(schema['items'])}" if "items" in schema else ""
    return f"{schema.get('type', 'any')}{items}{','.join(limits)}"
