"""The commands of the pages: where they stand, what they read, and what of that a reader has to
bring.
"""

import re
import shlex
from collections.abc import Collection, Iterator
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
"""Language, title and text of a block."""
PYTHON = ("python", "rl-caption", "accelerate")
NAMES_OF_FILES = {
    "CONFIG": "configs/demo_scst.yaml",
    "C.yaml": "configs/demo_scst.yaml",
    "OUT/cells/LABEL/seedN/config.yaml": "configs/demo_scst.yaml",
}
"""What a page calls any configuration -> one that is in the repository."""
OF_THE_READER = (
    "photos",
    *(
        "mine.jsonl",
        "captions.json",
        "references.json",
        "annotations/captions_val2014.json",
    ),
    *("CAPTIONS.json", "REFERENCES.json", "P.json", "R.json", "A.json", "B.json"),
    *("mine.yaml", "cpu2.yaml"),
    *("runs/mine", "runs/a", "runs/b", "evaluation/xe", "evaluation/scst"),
)
"""What the pages call small files of the reader's own, of which tests have some."""


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    page: Path
    text: str
    block: int | None
    """Number of its block on the page; None inside a sentence."""

    @property
    def id(self) -> str:
        """For the name of a test."""
        return f"{self.page.name}: {' '.join(self.words)}"[:120]

    @property
    def words(self) -> list[str]:
        """The program and its options; the names of any configuration replaced."""
        return [NAMES_OF_FILES.get(word, word) for word in words_of(self.text)]


def blocks(page: Path) -> list[tuple[str, str]]:
    """Title and text of each block of commands."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [
        (title, text)
        for language, title, text in found
        if language in ("", "sh", "bash", "console")
    ]


def shown_files(page: Path) -> dict[str, str]:
    """Files whose name stands in the first line of their block."""
    texts = [text for _, _, text in FENCE.findall(page.read_text(encoding="utf-8"))]
    return {
        name[1]: text for text in texts if (name := re.match(r"# (\S+\.yaml)\n", text))
    }


@cache
def commands(page: Path) -> tuple[Command, ...]:
    """Those of blocks, and those with options inside sentences that begin with a program."""

    def found() -> Iterator[Command]:
        for number, (_, text) in enumerate(blocks(page)):
            text = re.sub(
                r"^for .*?done$",
                lambda loop: loop[0].replace("\n", " "),
                text,
                flags=re.DOTALL | re.MULTILINE,
            )
            for line in re.sub(r"\\\n\s*|(?<=\|)\n\s*", " ", text).splitlines():
                if words_of(line):
                    yield Command(page, line, number)
        for text in re.findall(
            r"`([^`\n]+ --[^`]+)`", FENCE.sub("", page.read_text(encoding="utf-8"))
        ):
            if text.startswith(tuple(f"{program} " for program in PYTHON)):
                yield Command(page, " ".join(text.split()), None)

    return tuple(found())


def words_of(command: str) -> list[str]:
    """Without what stands for more (``...``), brackets of what may be left out, variables in front,
    and pipes.
    """
    words = [
        word
        for word in shlex.split(command.partition(" | ")[0], comments=True)
        if word not in ("...", "…")
    ]
    words = [
        word.strip("[]") if re.match(r"\[--|\[[A-Z]+\]$|[^[]+\]$", word) else word
        for word in words
    ]
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    return words


def program_of(words: list[str]) -> tuple[Path, list[str]]:
    """The file of a Python program and its arguments, without what launches it."""
    if words[:2] == ["accelerate", "launch"] or words[:3] == [
        "python",
        "-m",
        "rl_caption.runtime.launch",
    ]:
        arguments = words[2 if words[0] == "accelerate" else 3 :]
        given, unknown = launch_command_parser().parse_known_args(arguments)
        assert unknown == []
        assert given.config_file is None or exists(given.config_file), given.config_file
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


# --- what a command needs -----------------------------------------------------------------------

WRITTEN = ("--out", "--run.dir", "--run_dir", "--repo_id", "--json")
FOLDERS = ("data", "models", "runs", "checkpoints")
PATH = re.compile(r"[\w.*-]*(/[\w.*+=-]+)+|[\w*]+\.(json|jsonl|yaml|txt|tsv)|[A-Z]+")
HUB = re.compile(
    r"(\w+:)?(HuggingFaceTB|Qwen|Salesforce|google|meta-llama|microsoft|moranyanuka|nlpconnect|stabilityai)/[\w.-]+"
    r"|openai|laion2b_\w+"
)
INSTALLERS = {
    "pip": "packages",
    "apt-get": "packages",
    "wget": "downloads",
    "unzip": "downloads",
    "/usr/lib/apt/apt-helper": "packages",
}


def needs(command: Command) -> set[str]:
    """What a reader has to bring, or to wait for, in the words that the title of the block has to
    contain.
    """
    return _needs_on(command.page)[command]


@cache
def _needs_on(page: Path) -> dict[Command, set[str]]:
    found: dict[Command, set[str]] = {}
    writers: dict[str, Command] = {}
    for command in commands(page):
        # What a block writes is there for its other commands; for those of other blocks, if it
        # needed nothing.
        near = {
            path: found[by]
            for path, by in writers.items()
            if by.block == command.block or not found[by]
        }
        found[command] = needed_by(command, near)
        writers |= {path: command for path in outputs(command) if not path[0].isupper()}
    return found


@cache
def runnable() -> tuple[Command, ...]:
    """The commands that need nothing, once for each program and its arguments, whatever launches
    it.
    """
    found: dict[object, Command] = {}
    for command in (
        command for page in PAGES for command in commands(page) if not needs(command)
    ):
        words = command.words
        runs = (
            program_of(words)
            if words[0] in PYTHON and words[1] != "-c"
            else (None, words)
        )
        found.setdefault((runs[0], *runs[1]), command)
    return tuple(found.values())


def needed_by(command: Command, written: dict[str, set[str]]) -> set[str]:
    """The same, where earlier commands have ``written`` these paths and needed what stands there
    for that.
    """
    words = command.words
    found = {need for program, need in INSTALLERS.items() if program in words}
    found |= {"minutes"} if takes_minutes(words) else set()
    found |= {"GPU"} if uses_gpus(words) else set()
    for path in read_by(command, written):
        made = [
            needed
            for folder, needed in written.items()
            if path.startswith(folder.rstrip("/"))
        ]
        if made:
            found |= made[-1]
        elif HUB.fullmatch(path):
            found.add("hub")
        elif not (exists(path) or owner_of(path)):
            found.add(
                "/".join(
                    path.split("/")[
                        : 1 + path.startswith(FOLDERS) + 2 * path.startswith("/")
                    ]
                )
            )
    return found


def exists(path: str) -> bool:
    """In the repository, perhaps as a recipe's name or as the start of several."""
    return (
        (ROOT / path).exists()
        or path.startswith(OF_THE_READER)
        or any(name.startswith((path, f"configs/{path}")) for name in configurations())
    )


def takes_minutes(words: list[str]) -> bool:
    """Benchmarks repeat what they time; they are tested at small sizes."""
    module = words[2] if words[:2] == ["python", "-m"] else ""
    return words[:2] == ["make", "bench"] or module.startswith("benchmarks")


def uses_gpus(words: list[str]) -> bool:
    """By the options of the launcher."""
    file = next(
        (ROOT / word for word in words if word.startswith("configs/accelerate/")), None
    )
    if file is not None:
        return not file.name.startswith("cpu")
    return "--multi_gpu" in words or "--num_processes" in words


def outputs(command: Command) -> list[str]:
    """Files and folders that a command says it writes, or the configuration that it names."""
    words = command.words
    named = [configurations().get(word, {}) for word in (*words, *stages_of(words))]
    configured = [folder for config in named if (folder := folder_of(config))]
    words = [
        part
        for word in words
        for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    redirected = re.findall(r" > (\S+)", command.text)
    written = [
        word
        for option, word in pairwise(words)
        if option in WRITTEN or option.endswith(".run.dir")
    ]
    return configured + redirected + written


def folder_of(config: dict[str, Any]) -> str | None:
    """Where a run or an ablation is written."""
    folder: str | None = config.get("run", {}).get("dir") or config.get("out")
    return folder


def read_by(command: Command, written: Collection[str] = ()) -> set[str]:
    """Paths and names of models that a command and the configurations that it names read.

    How what is ``written`` by earlier commands was made is not asked.
    """
    words, shown = command.words, shown_files(command.page)
    variables = [
        word.partition("=")[2]
        for word in shlex.split(command.text, comments=True)
        if re.match(r"[A-Z_]+=", word)
    ]
    found = set()
    for before, word in pairwise(words):
        values = (
            [word]
            if "://" not in word and before not in ("-m", "--eval.best_by")
            else []
        )
        if (
            before == "--config"
            and (recipe := f"configs/{word}.yaml") in configurations()
        ):
            values = [recipe]
        elif re.match(r"[\[{].*:", word):
            values = list(leaves(yaml.safe_load(word)))
        elif re.match(r"[^/{]*=", word):  # LABEL=FOLDER@STEP, --option=value
            values = [re.sub(r"@\w+$", "", word.partition("=")[2])]
        found |= {value.rstrip("/") for value in (*values, *variables)}
    found |= stages_of(words)
    found = {
        value
        for value in found - {path.rstrip("/") for path in outputs(command)}
        if PATH.fullmatch(value) or HUB.fullmatch(value)
    }
    changes = {
        option[2:].removeprefix("all."): value
        for option, value in pairwise(words)
        if option.startswith("--")
    }
    return (found - set(shown)).union(
        *(inner(path, shown, changes, tuple(written)) for path in found)
    )


@cache
def configurations() -> dict[str, Any]:
    """Path below the root -> contents, of all in the repository; of a pipeline, its stages' paths.

    A stage that changes its recipe, or has none, is a configuration ``PIPELINE/STAGE.yaml``.
    """
    found = {}
    for file in sorted((ROOT / "configs").rglob("*.yaml")):
        content = yaml.safe_load(file.read_text())
        for stage, entry in content.get("stages", {}).items():
            recipe, *changes = [entry] if isinstance(entry, str) else entry.values()
            path = f"configs/{recipe}.yaml"
            if changes:
                recipes = (
                    {} if recipe is None else yaml.safe_load((ROOT / path).read_text())
                )
                path = f"configs/{file.stem}/{stage}.yaml"
                found[path] = merged(recipes, dict(list(entry.items())[1:]))
            content["stages"][stage] = path
        found[str(file.relative_to(ROOT))] = content
    return found


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """``above`` over ``below``; rewards and judges replace those below."""
    result = {**below, **above}
    for key in below.keys() & above.keys() - {"terms", "judges", "cells", "kwargs"}:
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            result[key] = merged(below[key], above[key])
    return result


def stages_of(words: list[str]) -> set[str]:
    """The recipes of ``rl-caption run NAME``, those of ``--only`` and before."""
    if "run" not in words[:-1]:
        return set()
    name = words[words.index("run") + 1]
    listed = configurations().get(f"configs/{name}.yaml", {}).get("stages", {})
    only = dict(pairwise(words)).get("--only")
    return {
        recipe
        for stage, recipe in listed.items()
        if only is None or stage in only.split(",")
    }


def inner(
    path: str,
    shown: dict[str, str],
    changes: dict[str, str],
    seen: tuple[str, ...] = (),
) -> set[str]:
    """What the configuration at a path names, or the one that makes the run there, and those that
    it names.

    ``changes`` are options of the command line, which replace what stands in the file.
    """
    if path.startswith(seen):
        return set()
    file = owner_of(path) or path
    configs = [config for name, config in configurations().items() if name == file]
    found = {
        value
        for config in ([yaml.safe_load(shown[path])] if path in shown else configs)
        for value in leaves(config, changes)
        if HUB.fullmatch(value) or value.startswith((*FOLDERS, "configs/"))
    }
    return found.union(*(inner(value, {}, {}, (*seen, path)) for value in found))


@cache
def owner_of(path: str) -> str | None:
    """The configuration whose run or ablation writes the path."""
    for file, config in configurations().items():
        folder = folder_of(config)
        if folder and (path + "/").startswith(folder + "/"):
            return file
    return None


def leaves(
    value: Any, changes: dict[str, str] | None = None, key: str = ""
) -> Iterator[str]:
    """Strings of a configuration, but for folders that it writes, where data come from, and keys
    that are replaced.
    """
    if isinstance(value, dict):
        for name, entry in value.items():
            if name not in ("dir", "out", "cache_dir", "source"):
                yield from leaves(entry, changes, f"{key}.{name}".lstrip("."))
    elif key in (changes or {}):
        return
    elif isinstance(value, list):
        for entry in value:
            yield from leaves(entry)
    elif isinstance(value, str):
        yield re.sub(r"^transformers:(?=(models|runs)/)", "", value)
