"""Reading a configuration file: YAML that holds plain values, and says every key once."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 2**20
DEEPEST = 32
"""Levels of lists and mappings; deeper ones exhaust the stack of whoever reads them."""
MOST_VALUES = 10**5
"""After aliases are written out: a few lines of aliases of aliases stand for billions of values."""
MOST_DIGITS = 18
"""Of a whole number: what 64 bits hold."""


class ConfigFileError(ValueError):
    """A file is not a configuration; the message names the key or line, and what would be right."""


class _Loader(yaml.SafeLoader):
    """``1e-5`` is a number, as in JSON, and a date is text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read_mapping(path: str) -> dict[str, Any]:
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
        found = load(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"it is not UTF-8: {error}") from error
    if not isinstance(found, dict):
        what = "is empty" if found is None else f"holds {type(found).__name__} {found!r:.80}"
        raise ConfigFileError(f"it {what}: expected a mapping such as train: {{lr: 1.0e-5}}")
    return found


def load(text: str) -> Any:
    """Read YAML made of plain values: mappings with text as keys, lists, text, numbers, true, false, null.

    Raises:
        ConfigFileError: it is not YAML, has other values, a key twice, too many levels, or aliases that stand for too
            many values.
    """
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):  # not recursive, unlike all that follows
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise ConfigFileError(f"{_line(event)}: more than {DEEPEST} levels of lists and mappings")
            tag = getattr(event, "tag", None)
            if tag is not None:
                raise ConfigFileError(f"{_line(event)}: the tag {tag}: expected plain values without tags")
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_values(node, "", {})
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigFileError(f"it is not YAML: {error}") from error


def _count_values(node: Any, key: str, known: dict[Any, int]) -> int:
    """How many values a YAML node called ``key`` stands for; each node is checked once."""
    if node in known:
        if not known[node]:
            raise ConfigFileError(f"{_line(node)}: {key} contains itself")
        return known[node]
    known[node] = 0  # until it is counted
    count = 1
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode) or not name.tag.endswith((":str", ":merge")):
                raise ConfigFileError(f"{_line(name)}: a key{f' in {key}' if key else ''} is not text: quote it")
            dotted = f"{key}.{name.value}" if key else name.value
            if name.value in names:
                raise ConfigFileError(f"{_line(name)}: {dotted} is there twice: leave one out")
            names.add(name.value)
            count += _count_values(value, dotted, known)
    elif isinstance(node, yaml.SequenceNode):
        count += sum(_count_values(value, f"{key}[{place}]", known) for place, value in enumerate(node.value))
    elif node.tag.endswith(":int") and len(node.value) > MOST_DIGITS:
        raise ConfigFileError(f"{_line(node)}: {key} is a number of {len(node.value)} digits: expected a smaller one")
    elif node.tag.endswith(":float") and not math.isfinite(_Loader("").construct_yaml_float(node)):
        raise ConfigFileError(f"{_line(node)}: {key} is {node.value:.40}: expected a finite number")
    if count > MOST_VALUES:
        raise ConfigFileError(f"{_line(node)}: {key} stands for more than {MOST_VALUES} values, by its aliases")
    known[node] = count
    return count


def _line(place: Any) -> str:
    """Of a node or an event."""
    return f"line {place.start_mark.line + 1}"
