"""The pages: their links lead somewhere, and their commands are understood by the programs that they name."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from rl_caption.cli import doctor
from rl_caption.cli import main as programs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md"), *DOCS.glob("api/*.md")])
TUTORIALS = sorted(DOCS.glob("tutorials/*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NAMES_OF_FILES = {
    "CONFIG": "configs/demo.yaml",
    "C.yaml": "configs/demo.yaml",
    "configs/mine_xe.yaml": "configs/ucm_xe.yaml",
    "configs/mine_scst.yaml": "configs/ucm_scst_cider.yaml",
    "mine.yaml": "configs/demo.yaml",
    "cpu2.yaml": "configs/accelerate/cpu2.yaml",
    "OUT/cells/LABEL/seedN/scst.yaml": "configs/demo.yaml",
    "configs/reward_models/scenes_long_ablations/NAME.yaml": "configs/reward_models/scenes_long_contrastive.yaml",
}
"""What a page calls a configuration of the reader's -> one that is in the repository."""


# --- links ------------------------------------------------------------------------------------------------------------


def text_of(page: Path) -> str:
    """Without blocks of code; of a tutorial, the comments, in which its text stands."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return "\n".join(re.findall(r"^# ?(.*)$", text, re.MULTILINE)) if page.suffix == ".py" else text


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
            missing += [] if target.exists() and (not anchor or anchor in anchors(target)) else [link]
            if ROOT / "docs" in page.parents and ROOT / "docs" not in target.parents:
                missing.append(link)  # the site has pages of docs/ only
    assert missing == []


def test_every_page_is_in_the_navigation() -> None:
    def files(entries: Any) -> Iterator[str]:
        if isinstance(entries, str):
            yield entries
        for entry in entries.values() if isinstance(entries, dict) else entries if isinstance(entries, list) else ():
            yield from files(entry)

    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    found = Counter(files(yaml.safe_load(text)["nav"]))
    pages = [path for path in (*PAGES, *TUTORIALS) if path.is_relative_to(DOCS)]
    assert found == Counter(str(path.relative_to(DOCS).with_suffix(".md")) for path in pages)


# --- commands ---------------------------------------------------------------------------------------------------------


class Parsed(BaseException):
    """Raised where a program has read its command line, so that it does nothing with it."""


def commands(page: Path) -> Iterator[str]:
    """The lines of a page's blocks without a language, and commands with options inside its text."""
    text = page.read_text(encoding="utf-8")
    for language, block in FENCE.findall(text):
        if language in ("", "sh", "bash", "console"):
            yield from re.sub(r"\\\n\s*", " ", block).splitlines()
    yield from re.findall(r"`([^`\n]+ --[^`]+)`", FENCE.sub("", text))


def words_of(command: str) -> list[str]:
    """Without what stands for more (``...``), brackets of what may be left out, variables in front, and pipes."""
    words = [word for word in shlex.split(command.partition(" | ")[0], comments=True) if word not in ("...", "…")]
    words = [word.strip("[]") if re.match(r"\[--|\[[A-Z]+\]$|[^[]+\]$", word) else word for word in words]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return [NAMES_OF_FILES.get(word, word) for word in words]


PYTHON = ("python", "rl-caption", "accelerate")
COMMANDS = [
    pytest.param(page, words, id=f"{page.name}: {' '.join(words)}"[:120])
    for page in PAGES
    for words in map(words_of, commands(page))
    if words[:1] and words[0] in PYTHON and words[1:2] != ["-c"]
]


@pytest.fixture
def understand(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], None]:
    """Has a program read its command line and do nothing else."""
    read, read_known, launcher = programs.parse, argparse.ArgumentParser.parse_known_args, launch_command_parser()

    def parse_and_end(*arguments: Any) -> None:
        read(*arguments)
        raise Parsed

    def parse_args(parser: argparse.ArgumentParser, arguments: Any = None, namespace: Any = None) -> None:
        _, unknown = read_known(parser, arguments, namespace)
        if unknown:
            parser.error(f"unrecognized arguments: {unknown}")
        raise Parsed

    def parse_known_args(parser: argparse.ArgumentParser, arguments: Any = None, namespace: Any = None) -> Any:
        """Of the programs that pass words on: ``doctor`` to the parser of its configuration."""
        given = read_known(parser, arguments, namespace)
        if "config" in given[0]:
            return given
        raise Parsed

    def doctor_of(*_: Any) -> None:
        raise Parsed

    def run(words: list[str]) -> None:
        if words[:2] == ["accelerate", "launch"] or words[:3] == ["python", "-m", "rl_caption.launch"]:
            given, unknown = read_known(launcher, words[2 if words[0] == "accelerate" else 3 :])
            assert unknown == []
            assert given.config_file is None or (ROOT / given.config_file).is_file(), given.config_file
            words = ["python", *["-m"] * bool(given.module), given.training_script, *given.training_script_args]
        if words[0] == "rl-caption":
            words = ["python", "-m", "rl_caption", *words[1:]]
        arguments, program = words[2:], ROOT / words[1]
        if words[1] == "-m":
            arguments, spec = words[3:], find_spec(words[2])
            assert spec is not None, words[2]
            folders = spec.submodule_search_locations
            program = Path(folders[0]) / "__main__.py" if folders else Path(str(spec.origin))
        assert program.is_file(), program
        if not arguments:
            return  # nothing to read, and a program without options would run
        with monkeypatch.context() as patched:
            patched.chdir(ROOT)
            patched.setattr(sys, "argv", [str(program), *arguments])
            patched.setattr(programs, "parse", parse_and_end)
            patched.setattr(argparse.ArgumentParser, "parse_args", parse_args)
            patched.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
            patched.setattr(doctor, "doctor", doctor_of)
            with pytest.raises((Parsed, SystemExit)) as ended:
                runpy.run_path(str(program), run_name="__main__")
        assert ended.type is Parsed or ended.value.code == 0, ended.value

    return run


@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_commands_are_understood(
    page: Path, words: list[str], understand: Callable[[list[str]], None], tmp_path: Path
) -> None:
    for _, block in FENCE.findall(page.read_text(encoding="utf-8")):
        name = re.match(r"# (\S+\.yaml)\n", block)
        if name is not None and name[1] in words:  # a file that the page shows
            (tmp_path / name[1]).write_text(block)
            words = [str(tmp_path / name[1]) if word == name[1] else word for word in words]
    understand(words)


@pytest.mark.parametrize(
    "command",
    [
        "python scripts/scst.py --config configs/demo.yaml --train.lrr 1",
        "python scripts/scst.py --config configs/nowhere.yaml",
        "python scripts/nowhere.py --config configs/demo.yaml",
        "python -m rl_caption evaluate --bootstrap many",
        "python -m rl_caption caption photos/",
        "python -m rl_caption doctor --config configs/demo.yaml --train.lrr 1",
        "python -m benchmarks --only steps",
        "accelerate launch --config_file configs/accelerate/cpu9.yaml scripts/scst.py --config configs/demo.yaml",
        "accelerate launch --num_proces 2 scripts/scst.py --config configs/demo.yaml --wrong",
    ],
)
def test_commands_with_mistakes_are_not(command: str, understand: Callable[[list[str]], None]) -> None:
    with pytest.raises(AssertionError):
        understand(words_of(command))
