"""The files that docs/design.md names."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/design.md"


def test_every_file_on_the_way_of_a_step_is_there() -> None:
    table = re.findall(
        r"^\| \d+ \| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert 0 < len(table) <= 20
    assert [name for name in table if not (PAGE.parents[1] / name).is_file()] == []
