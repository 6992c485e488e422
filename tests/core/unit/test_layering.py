"""What may import what: the rewards stand alone, and importing a package costs nothing heavy."""

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from rewards.registry import REWARDS

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
    if name != "rewards.compat.torchmetrics":  # which brings Transformers where it is installed
        importlib.import_module(name)
print(len(names))
"""
LOADED_AFTER = """
import sys
import {packages}
print(sorted({heavy!r} & set(sys.modules)))
"""


def run_python(
    code: str, folder: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


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
    assert offenders(REPOSITORY / "rewards", {"rl_caption", "trl"}) == [], (
        "not even inside a function"
    )
    blocked = {"rl_caption", "trl", "transformers"}
    done = run_python(
        IMPORT_EVERYTHING_WITHOUT.format(package="rewards", blocked=blocked)
    )
    assert done.returncode == 0, done.stderr
    modules = list((REPOSITORY / "rewards").rglob("*.py"))
    assert int(done.stdout) == len(modules) - 1, (
        "rewards itself is not counted; a folder without __init__.py is missed"
    )


def test_only_the_command_line_knows_the_parser_library_and_progress_bars_are_those_of_notebooks_too() -> (
    None
):
    found = offenders(REPOSITORY / "rl_caption", {"jsonargparse", "tqdm"}) + offenders(
        REPOSITORY / "rewards", {"tqdm"}
    )
    assert [
        line
        for line in found
        if not line.startswith("cli/") and not line.endswith(": tqdm.auto")
    ] == []


HEAVY = {
    "torch",
    "transformers",
    "open_clip",
    "accelerate",
    "trl",
    "deepspeed",
    "pycocoevalcap",
    "PIL",
    "jsonargparse",
}


@pytest.mark.parametrize(
    ("packages", "light"),
    [
        ("rewards.text.cider, rl_caption.cli.preflight", set()),
        ("rl_caption.runtime.launch, rl_caption.cli.main", {"psutil", "PIL"}),
    ],
)
def test_import_is_light(packages: str, light: set[str]) -> None:
    done = run_python(
        LOADED_AFTER.format(
            packages=packages, heavy=(HEAVY | {"psutil", "jinja2"}) - light
        )
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


FOR_SOME_MODELS = {
    "transformers.modeling_utils",
    "torchvision",
    "torch._dynamo",
    "scipy",
    "sklearn",
    "pandas",
    "peft",
}
"""What Transformers' models and other packages bring; a run that is refused does not wait for them.
"""
RUN = """
import sys
from rl_caption.cli.main import main
main({words!r})
print(sorted({heavy!r} & set(sys.modules)))
"""


def test_training_programs_bring_no_models_until_one_is_made() -> None:
    packages = "rl_caption.programs.train, rl_caption.reward_models.program, rl_caption.programs.ablation.runner"
    heavy = FOR_SOME_MODELS | {
        "open_clip",
        "trl",
        "deepspeed",
        "pycocoevalcap",
        "jsonargparse",
    }
    done = run_python(LOADED_AFTER.format(packages=packages, heavy=heavy))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


SCORE = [
    "score",
    "--captions",
    "captions.json",
    "--references",
    "references.json",
    "--reward",
]


@pytest.mark.parametrize(
    "words", [["--help"], [*SCORE, "cider"], [*SCORE, "bleu"], [*SCORE, "rouge_l"]]
)
def test_help_and_scores_of_texts_need_nothing_heavy(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "captions.json").write_text('[{"image_id": "a", "caption": "a dog"}]')
    (tmp_path / "references.json").write_text('{"a": ["the dog", "a cat"]}')
    code = RUN.format(
        words=words, heavy=(HEAVY | FOR_SOME_MODELS) - {"PIL", "jsonargparse"}
    )
    path = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n"
    done = run_python(path + textwrap.dedent(code), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_these_checks_see_an_offence(tmp_path: Path) -> None:
    package = tmp_path / "offender"
    package.mkdir()
    (package / "__init__.py").write_text("import json\n")
    (package / "late.py").write_text(
        "def score():\n    from trl.rewards import think_format_reward\n"
    )
    assert offenders(package, {"trl"}) == ["late.py:2: trl.rewards"]
    assert (
        run_python(
            LOADED_AFTER.format(packages="offender", heavy={"json"}), tmp_path
        ).stdout.strip()
        == "['json']"
    )
    script = IMPORT_EVERYTHING_WITHOUT.format(package="offender", blocked={"trl"})
    assert run_python(script, tmp_path).stdout.strip() == "1", (
        "an import inside a function is not run"
    )
    (package / "early.py").write_text("import trl\n")
    assert "trl is blocked here" in run_python(script, tmp_path).stderr


LAYERS = [
    {"cli"},
    {"lab"},
    {"programs"},
    {"integrations"},
    {"reward_models"},
    {"training"},
    {"config"},
    {"scst", "monitoring"},
    {"captioners", "evaluation"},
    {"data"},
    {"runtime"},
]
"""The parts of ``rl_caption`` from top to bottom (docs/design.md): a part imports from those below
it only.
"""


REWARD_LAYERS = [
    {"mixed", "compat"},
    {"build"},
    {"language"},
    {"text"},
    {"clip"},
    {"registry", "frozen_model"},
    {"model_files", "videos"},
    {"images"},
    {"options", "devices"},
    {"files", "trust", "http"},
    {"base"},
]
"""The same of ``rewards``."""


def rank(module: str) -> int | None:
    package, _, name = module.partition(".")
    layers = {"rl_caption": LAYERS, "rewards": REWARD_LAYERS}.get(package, [])
    return next(
        (
            index
            for index, layer in enumerate(layers)
            if name.partition(".")[0] in layer
        ),
        None,
    )


def for_type_checkers(tree: ast.AST) -> set[ast.AST]:
    guards = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
    return {
        inner
        for guard in guards
        for statement in guard.body
        for inner in ast.walk(statement)
    }


def imports_of(files: dict[str, Path]) -> dict[str, dict[str, int]]:
    """Module -> the modules of ``files`` that it imports, functions included, and the line; not for
    types alone.
    """
    graph: dict[str, dict[str, int]] = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        skipped, graph[name] = for_type_checkers(tree), {}
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [
                    module if module in files else node.module for module in modules
                ]
            if node not in skipped:
                graph[name] |= {
                    module: node.lineno
                    for module in names
                    if module in files and module != name
                }
    return graph


def modules_of(*packages: str) -> dict[str, Path]:
    paths = [
        path
        for package in packages
        for path in sorted((REPOSITORY / package).rglob("*.py"))
    ]
    return {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in paths
    }


def circles(graph: dict[str, dict[str, int]]) -> list[set[str]]:
    """The largest sets of modules that import each other, directly or through others."""
    reached = {name: set(imported) for name, imported in graph.items()}
    while True:
        grown = {
            name: names.union(*(reached[other] for other in names))
            for name, names in reached.items()
        }
        if grown == reached:
            break
        reached = grown
    sets = [
        frozenset({name} | {other for other in reached[name] if name in reached[other]})
        for name in graph
    ]
    return [set(names) for names in dict.fromkeys(sets) if len(names) > 1]


@pytest.mark.parametrize("package", ["rl_caption", "rewards"])
def test_packages_import_downwards_only(package: str) -> None:
    upwards = []
    for name, imported in imports_of(modules_of(package)).items():
        upper = rank(name)
        for module, line in imported.items():
            lower, same = rank(module), module.split(".")[1:2] == name.split(".")[1:2]
            if upper is not None and lower is not None and not same and lower <= upper:
                upwards.append(f"{name}:{line} imports {module}")
    assert upwards == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(imports_of(modules_of("rl_caption", "rewards"))) == []


def test_a_circle_through_a_function_is_seen(tmp_path: Path) -> None:
    sources = {
        "a": "import b",
        "b": "def late():\n    from c import value",
        "c": "from a import value",
        "d": "import a",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    assert circles(imports_of({name: tmp_path / f"{name}.py" for name in sources})) == [
        {"a", "b", "c"}
    ]


def test_every_file_of_rewards_has_its_layer() -> None:
    assert [
        name for name in modules_of("rewards") if "." in name and rank(name) is None
    ] == []


def test_rewards_are_built_by_their_builder_alone() -> None:
    """No program calls ``registry.build`` or the class of a reward, but for CIDEr-D with the
    frequencies of one set.
    """
    classes = {target.partition(":")[2] for target in REWARDS.values()}
    builds = []
    for name, path in modules_of("rl_caption").items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "rewards.registry":
                builds += [
                    f"{name}:{alias.name}"
                    for alias in node.names
                    if alias.name == "build"
                ]
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in classes
            ):
                builds.append(f"{name}:{node.func.id}")
    assert not builds


def test_the_core_does_not_name_the_lab() -> None:
    """Not even in a string, but for the table of programs."""
    files = [
        path
        for folder in ("rl_caption", "rewards")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
    ]
    naming = [
        path.relative_to(REPOSITORY).as_posix()
        for path in files
        if "rl_caption.lab" in path.read_text("utf-8")
    ]
    core = [name for name in naming if not name.startswith("rl_caption/lab/")]
    assert core == ["rl_caption/cli/programs.py"]
