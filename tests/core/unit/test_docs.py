"""The pages: their links lead somewhere, and their commands are understood by the programs that
they name.

Those that need nothing are run by ``tests/core/integration/test_docs_commands.py`` instead.
"""

import argparse
import re
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml

from rl_caption.cli import pipeline, preflight, stages
from tests.docs_for_tests import (
    DOCS,
    FENCE,
    PAGES,
    PYTHON,
    ROOT,
    Command,
    commands,
    program_of,
    runnable,
    shown_files,
    words_of,
)

STAND_INS = {
    "mine.yaml": "configs/demo_scst.yaml",
}
"""Configuration of the reader's own -> what it is a copy of."""
TUTORIALS = sorted(DOCS.glob("tutorials/*.py"))


# --- links --------------------------------------------------------------------------------------


def text_of(page: Path) -> str:
    """Without blocks of code; of a tutorial, the comments, in which its text stands."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return (
        "\n".join(re.findall(r"^# ?(.*)$", text, re.MULTILINE))
        if page.suffix == ".py"
        else text
    )


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    for title in re.findall(r"^#+ +(.+?) *$", text_of(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


@pytest.mark.parametrize("page", [*PAGES, *TUTORIALS], ids=lambda page: page.name)
def test_links_and_anchors_exist(page: Path) -> None:
    text = re.sub(r"`[^`]*`", "", text_of(page))
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not name.startswith(("http:", "https:")):
            missing += (
                []
                if target.exists() and (not anchor or anchor in anchors(target))
                else [link]
            )
            if ROOT / "docs" in page.parents and ROOT / "docs" not in target.parents:
                missing.append(link)  # the site has pages of docs/ only
    assert missing == []


@pytest.mark.parametrize(
    "page", sorted(DOCS.glob("api/*.md")), ids=lambda page: page.name
)
def test_what_the_reference_names_is_there(page: Path) -> None:
    for name in re.findall(
        r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE
    ):
        assert resolve_name(name) is not None


def test_every_page_is_in_the_navigation() -> None:
    def files(entries: Any) -> Iterator[str]:
        if isinstance(entries, str):
            yield entries
        for entry in (
            entries.values()
            if isinstance(entries, dict)
            else entries
            if isinstance(entries, list)
            else ()
        ):
            yield from files(entry)

    text = re.sub(
        r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    )
    found = Counter(files(yaml.safe_load(text)["nav"]))
    pages = [path for path in (*PAGES, *TUTORIALS) if path.is_relative_to(DOCS)]
    assert found == Counter(
        str(path.relative_to(DOCS).with_suffix(".md")) for path in pages
    )


# --- commands -----------------------------------------------------------------------------------


class Parsed(BaseException):
    """Raised where a program has read its command line, so that it does nothing with it."""


COMMANDS = [
    pytest.param(command, id=command.id)
    for page in PAGES
    for command in commands(page)
    if command.words[0] in PYTHON
    and command.words[1:2] != ["-c"]
    and command not in runnable()
]


@pytest.fixture
def understand(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], bool]:
    """Has a program read its command line and do nothing else; says whether it could."""
    read, read_known = stages.parse, argparse.ArgumentParser.parse_known_args

    def parse_and_end(*arguments: Any) -> Any:
        try:
            read(*arguments)
        except SystemExit as ended:  # --help
            if ended.code != 0:
                raise
        raise Parsed

    def parse_args(
        parser: argparse.ArgumentParser, arguments: Any = None, namespace: Any = None
    ) -> None:
        """Of ``python -m benchmarks``."""
        _, unknown = read_known(parser, arguments, namespace)
        if unknown:
            parser.error(f"unrecognized arguments: {unknown}")
        raise Parsed

    def doctor_of(*_: Any) -> None:
        raise Parsed

    def run(words: list[str]) -> bool:
        program, arguments = program_of(words)
        if not arguments:
            return True  # no options are read, and the program would run
        with monkeypatch.context() as patched:
            patched.chdir(ROOT)
            patched.setattr(sys, "argv", [str(program), *arguments])
            if "run" in arguments[:1]:
                patched.setattr(pipeline, "plan", doctor_of)
            else:
                patched.setattr(stages, "parse", parse_and_end)
            patched.setattr(argparse.ArgumentParser, "parse_args", parse_args)
            patched.setattr(preflight, "doctor", doctor_of)
            with pytest.raises((Parsed, SystemExit)) as ended:
                runpy.run_path(str(program), run_name="__main__")
        return ended.type is Parsed or ended.value.code == 0

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(
    command: Command, understand: Callable[[list[str]], bool], tmp_path: Path
) -> None:
    files = shown_files(command.page)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert understand(
        [
            str(tmp_path / word) if word in files else STAND_INS.get(word, word)
            for word in command.words
        ]
    )


def test_commands_with_mistakes_are_not(
    understand: Callable[[list[str]], bool],
) -> None:
    for command in (
        "python scripts/scst.py --config configs/demo_scst.yaml --train.lrr 1",
        "python scripts/scst.py --config configs/nowhere.yaml",
        "python scripts/nowhere.py --config configs/demo_scst.yaml",
        "python -m rl_caption caption photos/",
        "python -m benchmarks --only steps",
        "accelerate launch --config_file configs/accelerate/cpu9.yaml scripts/scst.py --config "
        "configs/demo_scst.yaml",
        "accelerate launch --num_proces 2 scripts/scst.py --config configs/demo_scst.yaml --wrong",
    ):
        with pytest.raises(AssertionError):
            assert understand(words_of(command))
