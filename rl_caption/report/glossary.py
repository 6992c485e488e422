"""What logged keys mean: the tables of docs/metrics.md, of which the package has a copy.

In the repository ``metrics.md`` is a link to it, so that there is one text; an installed package has the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

METRICS_PAGE = Path(__file__).resolve().with_name("metrics.md")
_ROW = re.compile(r"^\| `([^`]+)` \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Definition:
    """A key's meaning, unit and range, as plain text."""

    meaning: str
    unit: str
    range: str


def parse_definitions(page: str) -> dict[str, Definition]:
    """Keys of a Markdown page with tables of four columns: key, meaning, unit, range. Pure."""
    return {key: Definition(*map(_plain, parts)) for key, *parts in _ROW.findall(page)}


@cache
def definitions(page: Path = METRICS_PAGE) -> Mapping[str, Definition]:
    """Those of ``page``; empty where it is not there, which ``definitions_note`` says."""
    return parse_definitions(page.read_text(encoding="utf-8")) if page.is_file() else {}


def definitions_note(page: Path = METRICS_PAGE) -> str:
    """Where definitions are if not in the page; "" if they are."""
    if definitions(page):
        return ""
    return "This installation lacks the definitions of logged keys; they are in docs/metrics.md of the source."


def define(key: str, known: Mapping[str, Definition]) -> Definition | None:
    """The definition of a key; ``reward/cider`` has that of ``reward/<term>``."""
    if key in known:
        return known[key]
    for pattern, found in known.items():
        stem, bracket, _ = pattern.partition("<")
        if bracket and key.startswith(stem):
            return found
    return None


def _plain(markdown: str) -> str:
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", markdown)
    return text.replace("`", "").replace("\\|", "|").strip()
