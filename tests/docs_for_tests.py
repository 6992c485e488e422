"""The commands of the pages: their words, programs, and what they read and write."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.launch import launch_command_parser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FRONT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = sorted([*FRONT, *DOCS.glob("*.md"), *DOCS.glob("api/*.md")])
FENCE = re.compile(
    r'^```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```', re.DOTALL | re.MULTILINE
)
"""Language, title and text of a block."""
PYTHON = ("python", "rl-caption", "accelerate")
NAMES_OF_FILES = {
    "CONFIG": "configs/demo_scst.yaml",
    "C.yaml": "configs/demo_scst.yaml",
    "OUT/cells/LABEL/seedN/config.yaml": "configs/demo_scst.yaml",
}
"""What a page calls any configuration -> one that is in the repository."""
WRITTEN = ("--out", "--run.dir", "--run_dir", "--repo_id", "--json")
"""Options that name what a program writes."""


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    page: Path
    text: str
    runs: bool
    """Whether it stands in a block whose title names nothing that a reader has to bring."""

    @property
    def id(self) -> str:
        """For the name of a test."""
        return f"{self.page.name}: {' '.join(self.words)}"[:120]

    @property
    def words(self) -> list[str]:
        """The program and its options; the names of any configuration replaced."""
        return [NAMES_OF_FILES.get(word, word) for word in words_of(self.text)]


def shown_files(page: Path) -> dict[str, str]:
    """Files whose name stands in the first line of their block."""
    texts = [text for _, _, text in FENCE.findall(page.read_text(encoding="utf-8"))]
    named = [(re.match(r"# (\S+\.yaml)\n", text), text) for text in texts]
    return {name[1]: text for name, text in named if name}


@cache
def commands(page: Path) -> tuple[Command, ...]:
    """The commands of blocks, and of sentences where they have options."""
    content, found = page.read_text(encoding="utf-8"), []
    for language, title, text in FENCE.findall(content):
        if language not in ("", "sh", "bash", "console"):
            continue
        for loop in re.findall(r"^for .*?done$", text, re.DOTALL | re.MULTILINE):
            text = text.replace(loop, loop.replace("\n", " "))
        for line in re.sub(r"\\\n\s*|(?<=\|)\n\s*", " ", text).splitlines():
            if words_of(line):
                found.append(Command(page, line, not title))
    for text in re.findall(r"`([^`\n]+ --[^`]+)`", FENCE.sub("", content)):
        if text.startswith(tuple(f"{program} " for program in PYTHON)):
            found.append(Command(page, " ".join(text.split()), False))
    return tuple(found)


def words_of(command: str) -> list[str]:
    """Without what stands for more (``...``), brackets of what may be left out, variables in front,
    and pipes.
    """
    words = shlex.split(command.partition(" | ")[0], comments=True)
    words = [word for word in words if word not in ("...", "…")]
    optional = re.compile(r"\[--|\[[A-Z]+\]$|[^[]+\]$")
    words = [word.strip("[]") if optional.match(word) else word for word in words]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return words


def program_of(words: list[str]) -> tuple[Path, list[str]]:
    """The file of a Python program and its arguments, without what launches it."""
    launchers = (
        ["accelerate", "launch"],
        ["python", "-m", "rl_caption.runtime.launch"],
    )
    for launcher in launchers:
        if words[: len(launcher)] == launcher:
            arguments = words[len(launcher) :]
            given, unknown = launch_command_parser().parse_known_args(arguments)
            assert unknown == []
            file = given.config_file or "configs"
            assert file == "cpu2.yaml" or (ROOT / file).exists(), file
            script = [given.training_script, *given.training_script_args]
            words = ["python", *["-m"] * bool(given.module), *script]
    if words[0] == "rl-caption":
        words = ["python", "-m", "rl_caption", *words[1:]]
    arguments, program = words[2:], ROOT / words[1]
    if words[1] == "-m":
        arguments, spec = words[3:], find_spec(words[2])
        assert spec is not None, words[2]
        main = (spec.submodule_search_locations or [""])[0]
        program = Path(main, "__main__.py") if main else Path(str(spec.origin))
    assert program.is_file(), program
    return program, arguments


@cache
def runnable() -> tuple[Command, ...]:
    """The commands that need nothing, once for each program and its arguments, whatever launches
    it.
    """
    found: dict[object, Command] = {}
    for command in (command for page in PAGES for command in commands(page)):
        words = command.words
        if command.runs and words[0] in PYTHON and words[1] != "-c":
            program, words = program_of(words)
            words = [str(program), *words]
        if command.runs and "benchmarks" not in words[0]:
            found.setdefault(tuple(words), command)
    return tuple(found.values())


def folder_of(config: dict[str, Any]) -> str | None:
    """Where a run or an ablation is written."""
    folder: str | None = config.get("run", {}).get("dir") or config.get("out")
    return folder


def read_by(command: Command) -> set[str]:
    """Paths that a command, or the configuration that it names, reads."""
    found: set[str] = set()
    for option, word in pairwise(command.words):
        if option in WRITTEN or option.endswith(".run.dir"):
            continue
        found.add(word.rpartition("=")[2].partition("@")[0])
        if option == "--config":
            files = (ROOT / word, ROOT / f"configs/{word}.yaml")
            texts = [file.read_text() for file in files if file.is_file()]
            texts.append(shown_files(command.page).get(word, "{}"))
            found |= set(leaves(yaml.safe_load(texts[0])))
        elif word.startswith(("{", "[")):
            found |= set(leaves(yaml.safe_load(word)))
    return {path.rstrip("/") for path in found if re.search(r"\w/\w", path)}


def leaves(value: Any) -> Iterator[str]:
    """Strings of a configuration, but for folders that it writes and where data come from."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if name not in ("dir", "out", "cache_dir", "source"):
                yield from leaves(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from leaves(entry)
    elif isinstance(value, str):
        yield re.sub(r"^transformers:(?=(models|runs)/)", "", value)
