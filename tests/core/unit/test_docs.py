"""The pages: their links lead somewhere, and their commands are understood by the
programs that they name.

Some are run by ``tests/core/integration/test_docs_commands.py``.
"""

import re
from contextlib import suppress

import pytest

from rl_caption.cli.programs import PROGRAMS
from rl_caption.cli.stages import Stage, make_stages
from rl_caption.runtime.errors import ConfigError
from tests.docs_for_tests import (
    DOCS,
    FENCE,
    PAGES,
    PYTHON,
    ROOT,
    commands,
    program_of,
    shown_files,
    words_of,
)

STAND_INS = {"mine.yaml": "configs/demo_scst.yaml"}
"""Configuration of the reader's own -> what it is a copy of."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    text = re.sub(r"`[^`]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    for link in re.findall(r"\]\(([^)\s#]+)", text):
        if not link.startswith(("http:", "https:")):
            target = (page.parent / link).resolve()
            assert target.exists(), link
            # The site has pages of docs/ only.
            assert DOCS not in page.parents or DOCS in target.parents, link


COMMANDS = [
    pytest.param(command, id=command.id)
    for page in PAGES
    for command in commands(page)
    if command.words[0] in PYTHON and command.words[1:2] != ["-c"]
]


def understand(words):
    """Read a command line as its program does, and do nothing else."""
    program, arguments = program_of(words)
    if program.parent.name == "scripts":
        arguments = [program.stem, *arguments]
    elif program.parent.name != "rl_caption":
        return  # a benchmark
    if arguments[:1] == ["doctor"]:
        del arguments[0]
    if arguments and not arguments[0].startswith("-"):
        name, *rest = arguments
        if name == "run" and rest:
            make_stages(rest[0], rest[1:])
        elif PROGRAMS[name].config and rest:
            with suppress(SystemExit):  # --help
                assert Stage(name, name, rest).config


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    files = shown_files(command.page)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    understand(
        [
            str(tmp_path / word) if word in files else STAND_INS.get(word, word)
            for word in command.words
        ]
    )


@pytest.mark.parametrize(
    "command",
    [
        "python scripts/scst.py --config configs/demo_scst.yaml --train.lrr 1",
        "python scripts/nowhere.py --config configs/demo_scst.yaml",
        "accelerate launch --num_proces 2 scripts/scst.py --config demo_scst",
    ],
)
def test_commands_with_mistakes_are_not(command):
    with pytest.raises((AssertionError, ConfigError)):
        understand(words_of(command))
