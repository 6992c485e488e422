"""The examples of docs/design.md are the code that the tests of this folder run."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[2] / "docs/design.md"


def test_examples_are_the_tested_code() -> None:
    tested = [
        path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("test_*.py"))
    ]
    examples = re.findall(
        r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert len(examples) == 6, (
        "a reward, an advantage, an objective, a data format, a reward model, a captioner"
    )
    definitions = [
        part.strip() for example in examples for part in example.split("\n\n\n")
    ]
    untested = [
        part.splitlines()[0]
        for part in definitions
        if not any(part in text for text in tested)
    ]
    assert untested == []


def test_every_file_on_the_way_of_a_step_is_there() -> None:
    table = re.findall(
        r"^\| \d+ \| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert 0 < len(table) <= 20
    assert [name for name in table if not (PAGE.parents[1] / name).is_file()] == []
