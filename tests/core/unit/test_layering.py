"""What may import what: the rewards stand alone, and importing a package costs nothing heavy."""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

IMPORT_EVERYTHING_WITHOUT = """
import importlib, pkgutil, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked here", name=name)

sys.meta_path.insert(0, Blocked())
import {package}

def stop(name):
    raise

names = [found.name for found in pkgutil.walk_packages({package}.__path__, "{package}.", onerror=stop)]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
LOADED_AFTER = """
import sys
import {packages}
print(sorted({heavy!r} & set(sys.modules)))
"""


def run_python(code: str, folder: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and full name of every import, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module


def offenders(folder: Path, packages: set[str]) -> list[str]:
    """List ``file:line: module`` of every import of one of ``packages`` below ``folder``."""
    return [
        f"{path.relative_to(folder)}:{line}: {module}"
        for path in sorted(folder.rglob("*.py"))
        for line, module in imported_modules(path.read_text(encoding="utf-8"))
        if module.partition(".")[0] in packages
    ]


def test_every_reward_module_imports_without_the_trainer() -> None:
    assert offenders(REPOSITORY / "rewards", {"rl_caption", "trl"}) == [], "not even inside a function"
    blocked = {"rl_caption", "trl", "transformers"}
    done = run_python(IMPORT_EVERYTHING_WITHOUT.format(package="rewards", blocked=blocked))
    assert done.returncode == 0, done.stderr
    modules = list((REPOSITORY / "rewards").rglob("*.py"))
    assert int(done.stdout) == len(modules) - 1, "rewards itself is not counted; a folder without __init__.py is missed"


def test_only_the_command_line_knows_the_parser_library_and_progress_bars_are_those_of_notebooks_too() -> None:
    found = offenders(REPOSITORY / "rl_caption", {"jsonargparse", "tqdm"}) + offenders(REPOSITORY / "rewards", {"tqdm"})
    assert [line for line in found if not line.startswith("cli/") and not line.endswith(": tqdm.auto")] == []


HEAVY = {"torch", "transformers", "open_clip", "accelerate", "trl", "deepspeed", "pycocoevalcap", "PIL", "jsonargparse"}


@pytest.mark.parametrize(
    ("packages", "light"),
    [
        ("rewards.text.cider, rl_caption.torchvision_remedy, rl_caption.cli.doctor", set()),
        ("rl_caption.launch, rl_caption.cli.main", {"psutil", "PIL"}),
    ],
)
def test_import_is_light(packages: str, light: set[str]) -> None:
    done = run_python(LOADED_AFTER.format(packages=packages, heavy=(HEAVY | {"psutil", "jinja2"}) - light))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


FOR_SOME_MODELS = {"transformers.modeling_utils", "torchvision", "torch._dynamo", "scipy", "sklearn", "pandas", "peft"}
"""What Transformers' models and other packages bring; a run that is refused does not wait for them."""
RUN = """
import sys
from rl_caption.cli.main import main
main({words!r})
print(sorted({heavy!r} & set(sys.modules)))
"""


def test_training_programs_bring_no_models_until_one_is_made() -> None:
    packages = "rl_caption.programs.train, rl_caption.reward_models.program, rl_caption.ablation.runner"
    heavy = FOR_SOME_MODELS | {"open_clip", "trl", "deepspeed", "pycocoevalcap", "jsonargparse"}
    done = run_python(LOADED_AFTER.format(packages=packages, heavy=heavy))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


SCORE = ["score", "--captions", "captions.json", "--references", "references.json", "--reward"]


@pytest.mark.parametrize("words", [["--help"], [*SCORE, "cider"], [*SCORE, "bleu"], [*SCORE, "rouge_l"]])
def test_help_and_scores_of_texts_need_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "captions.json").write_text('[{"image_id": "a", "caption": "a dog"}]')
    (tmp_path / "references.json").write_text('{"a": ["the dog", "a cat"]}')
    code = RUN.format(words=words, heavy=(HEAVY | FOR_SOME_MODELS) - {"PIL", "jsonargparse"})
    path = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
    done = run_python(path + textwrap.dedent(code), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_these_checks_see_an_offence(tmp_path: Path) -> None:
    package = tmp_path / "offender"
    package.mkdir()
    (package / "__init__.py").write_text("import json\n")
    (package / "late.py").write_text("def score():\n    from trl.rewards import think_format_reward\n")
    assert offenders(package, {"trl"}) == ["late.py:2: trl.rewards"]
    assert run_python(LOADED_AFTER.format(packages="offender", heavy={"json"}), tmp_path).stdout.strip() == "['json']"
    script = IMPORT_EVERYTHING_WITHOUT.format(package="offender", blocked={"trl"})
    assert run_python(script, tmp_path).stdout.strip() == "1", "an import inside a function is not run"
    (package / "early.py").write_text("import trl\n")
    assert "trl is blocked here" in run_python(script, tmp_path).stderr


LAYERS = [
    {"cli"},
    {"lab"},
    {"ablation"},
    {"programs"},
    {"report", "trl"},
    {"reward_models"},
    {"training"},
    {"config"},
    {"scst", "monitoring"},
    {"captioners", "evaluation"},
    {"data"},
    {"engines", "types"},
    {"launch", "options"},
    {"errors", "threads"},
]
"""The parts of ``rl_caption`` from top to bottom (docs/design.md): a part imports from those below it only."""


def rank(module: str) -> int | None:
    part = module.split(".")[1] if module.startswith("rl_caption.") else ""
    return next((index for index, layer in enumerate(LAYERS) if part in layer), None)


def for_type_checkers(tree: ast.AST) -> set[ast.AST]:
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    return {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}


def test_packages_import_downwards_only() -> None:
    upwards = []
    for path in sorted((REPOSITORY / "rl_caption").rglob("*.py")):
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        skipped, own = for_type_checkers(tree), rank(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node not in skipped and own is not None:
                other = rank(node.module)
                same = node.module.split(".")[1:2] == name.split(".")[1:2]
                if other is not None and not same and other <= own:
                    upwards.append(f"{name}:{node.lineno} imports {node.module}")
    assert upwards == []


def test_the_core_does_not_name_the_lab() -> None:
    """Not even in a string, but for the table of programs."""
    files = [path for folder in ("rl_caption", "rewards") for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    naming = [path.relative_to(REPOSITORY).as_posix() for path in files if "rl_caption.lab" in path.read_text("utf-8")]
    core = [name for name in naming if not name.startswith("rl_caption/lab/")]
    assert core == ["rl_caption/cli/programs.py"]
