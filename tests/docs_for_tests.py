"""Commands and files in the documentation pages."""

import re
import shlex
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from accelerate.commands.launch import launch_command_parser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *DOCS.glob("*.md"),
        *DOCS.glob("api/*.md"),
    ]
)
FENCE = re.compile(
    r'^```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```', re.DOTALL | re.MULTILINE
)
"""Pattern of a fenced block, with groups for language, title and text."""
PYTHON = ("python", "rl-caption", "accelerate")
NAMES_OF_FILES = {
    "CONFIG": "configs/demo_scst.yaml",
    "C.yaml": "configs/demo_scst.yaml",
    "OUT/cells/LABEL/seedN/config.yaml": "configs/demo_scst.yaml",
}
"""A page's placeholder of a configuration -> a configuration in the repository."""


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    page: Path
    text: str
    runs: bool = False
    """Whether it is in a block without a title, so that a reader needs no own files."""

    @property
    def id(self):
        """Name of the command in names of tests."""
        return f"{self.page.name}: {' '.join(self.words)}"[:120]

    @property
    def words(self):
        """The program and its options, with placeholders of configurations replaced."""
        return [NAMES_OF_FILES.get(word, word) for word in words_of(self.text)]


def shown_files(page):
    """Name -> text of the YAML files that a page shows, named in their block's first
    line.
    """
    texts = [text for _, _, text in FENCE.findall(page.read_text(encoding="utf-8"))]
    return {
        name[1]: text for text in texts if (name := re.match(r"# (\S+\.yaml)\n", text))
    }


@cache
def commands(page):
    """Commands in a page's blocks, and commands with options inside its sentences."""

    def found():
        for language, title, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if language not in ("", "sh", "bash", "console"):
                continue
            text = re.sub(
                r"^for .*?done$",
                lambda loop: loop[0].replace("\n", " "),
                text,
                flags=re.DOTALL | re.MULTILINE,
            )
            for line in re.sub(r"\\\n\s*|(?<=\|)\n\s*", " ", text).splitlines():
                if words_of(line):
                    yield Command(page, line, not title)
        for text in re.findall(
            r"`([^`\n]+ --[^`]+)`", FENCE.sub("", page.read_text(encoding="utf-8"))
        ):
            if text.startswith(tuple(f"{program} " for program in PYTHON)):
                yield Command(page, " ".join(text.split()))

    return tuple(found())


def words_of(command):
    """Words of a command, without ``...``, brackets of optional words, variables in
    front, pipes and redirections.
    """
    words = [
        word
        for word in shlex.split(re.split(" [|>] ", command)[0], comments=True)
        if word not in ("...", "…")
    ]
    words = [
        word.strip("[]") if re.match(r"\[--|\[[A-Z]+\]$|[^[]+\]$", word) else word
        for word in words
    ]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return words


def program_of(words):
    """The file of a Python program, and its arguments, without the launcher."""
    if words[:2] == ["accelerate", "launch"] or words[:3] == [
        "python",
        "-m",
        "rl_caption.runtime.launch",
    ]:
        arguments = words[2 if words[0] == "accelerate" else 3 :]
        given, unknown = launch_command_parser().parse_known_args(arguments)
        assert unknown == []
        file = given.config_file
        assert file in (None, "cpu2.yaml") or (ROOT / file).exists(), file
        words = [
            "python",
            *["-m"] * bool(given.module),
            given.training_script,
            *given.training_script_args,
        ]
    if words[0] == "rl-caption":
        words = ["python", "-m", "rl_caption", *words[1:]]
    arguments, program = words[2:], ROOT / words[1]
    if words[1] == "-m":
        arguments, spec = words[3:], find_spec(words[2])
        assert spec is not None, words[2]
        folders = spec.submodule_search_locations
        program = (
            Path(folders[0]) / "__main__.py" if folders else Path(str(spec.origin))
        )
    assert program.is_file(), program
    return program, arguments
