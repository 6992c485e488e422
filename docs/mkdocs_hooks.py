"""What the site needs beyond plain pages: a tutorial's page is made from its source,
and offers it as a notebook.
"""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to the source of a tutorial, which GitHub shows, lead to its page; a
    tutorial's page has a download.
    """
    markdown = re.sub(r"(\]\((?:tutorials/)?\w+)\.py(?=[#)])", r"\1.md", markdown)
    folder, _, name = page.file.src_uri.rpartition("/")
    if folder != "tutorials":
        return markdown
    title, _, rest = markdown.partition("\n")
    return (
        f"{title}\n\n[Download as a notebook]({name.removesuffix('.md')}.ipynb)\n{rest}"
    )
