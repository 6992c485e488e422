"""HTML from Python: whatever is not ``Markup`` is text, and escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


VOID = frozenset({"br", "img", "input", "meta"})


def element(tag: str, *content: str, **attributes: str) -> Markup:
    """An element: ``class_`` is the attribute ``class``, ``data_x`` is ``data-x``; text and attributes are escaped."""
    named = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(value, quote=True)}"' for name, value in attributes.items()
    )
    return Markup(f"<{tag}{named}>") if tag in VOID else Markup(f"<{tag}{named}>{join(*content)}</{tag}>")


def join(*content: str) -> Markup:
    """Content one after the other, text escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part, quote=False) for part in content))


def json_block(name: str, content: Any) -> Markup:
    """A ``<script>`` that holds data. Nothing in it can end it: ``<``, ``>`` and ``&`` are written as escapes."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{escape(name, quote=True)}">{text}</script>')


def table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> Markup:
    """A table that scrolls sideways by itself; the first cell of a row is its heading."""
    top = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    whole = element("table", element("thead", top), element("tbody", *body))
    # Beside the table, not its <caption>: on a narrow screen that would be as wide as the table, and cut off.
    heading = [element("p", caption, class_="note")] if caption else []
    return join(
        *heading, element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption or "table")
    )


def pairs(values: Mapping[str, str]) -> Markup:
    """Names with their values."""
    return element(
        "dl", *(part for name, value in values.items() for part in (element("dt", name), element("dd", value)))
    )
