"""One self-contained HTML page: style, script, charts, images and data inside, nothing loaded from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from rl_caption.data.files import write_text
from rl_caption.report.markup import Markup, element, join, json_block


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        name: heading, and entry of the navigation.
        body: what it shows; a section without any is left out.
    """

    name: str
    body: Markup

    @property
    def anchor(self) -> str:
        """Its id."""
        return self.name.lower().replace(" ", "-")


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: heading.
        subtitle: one line below it.
        tiles: name -> value, what is to be seen first.
        sections: in order.
        gallery: data of the gallery, and what is to be said of it; None shows none.
    """

    title: str
    subtitle: str
    tiles: Sequence[tuple[str, str, str]]
    """Name, value, and what has to be known of it ("" for nothing)."""
    sections: Sequence[Section]
    gallery: tuple[dict[str, Any], str] | None = None
    after: Sequence[Section] = field(default_factory=tuple)
    """Sections behind the gallery."""


def render(page: Page) -> str:
    """The page as HTML."""
    script, style = _part("page.js"), _part("page.css")
    sections = [section for section in page.sections if section.body]
    blocks = Markup("")
    if page.gallery is not None and page.gallery[0]["items"]:
        data, note = page.gallery
        sections.append(Section("Captions", Markup(Template(_part("gallery.html")).substitute(note=join(note)))))
        blocks = json_block("gallery-data", data)
    sections += [section for section in page.after if section.body]
    tiles = [
        element("div", element("dt", name), element("dd", value, *([element("small", note)] if note else [])))
        for name, value, note in page.tiles
    ]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_part("page.html")).substitute(
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        title=join(page.title),
        subtitle=join(page.subtitle),
        style=style,
        navigation=join(*(element("a", section.name, href=f"#{section.anchor}") for section in sections)),
        tiles=element("dl", *tiles, class_="tiles") if tiles else "",
        sections=join(*(_section(section) for section in sections)),
        data=blocks,
        script=script,
    )


def write_page(page: Page, path: Path) -> Path:
    """Write the page, whole or not at all.

    Raises:
        OSError: the folder cannot be written to.
    """
    write_text(path, render(page))
    return path


def _section(section: Section) -> Markup:
    return element("section", element("h2", section.name), section.body, id=section.anchor)


def _part(name: str) -> str:
    return resources.files("rl_caption.report").joinpath(name).read_text(encoding="utf-8")
