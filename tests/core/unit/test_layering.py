"""What may import what: the rewards stand alone, and importing a package costs nothing heavy."""

import ast
import subprocess
import sys
import textwrap
from graphlib import TopologicalSorter
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
    if name != "rewards.compat.torchmetrics":  # which brings Transformers where it is installed
        importlib.import_module(name)
print(len(names))
"""
LOADED_AFTER = """
import sys
import {packages}
print(sorted({heavy!r} & set(sys.modules)))
"""


def run_python(code, folder=REPOSITORY):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_every_reward_module_imports_without_the_trainer():
    graph = imports_of(modules_of("rewards", "rl_caption"))
    own = {name for name in graph if name.startswith("rewards")}
    for name in own:
        assert graph[name] <= own, f"{name} imports {graph[name] - own}"
    blocked = {"rl_caption", "trl", "transformers"}
    code = IMPORT_EVERYTHING_WITHOUT.format(package="rewards", blocked=blocked)
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    # rewards itself is not counted; a folder without __init__.py is missed
    assert int(done.stdout) == len(own) - 1


LIBRARIES = {"open_clip", "trl", "deepspeed", "pycocoevalcap"}
HEAVY = LIBRARIES | {"torch", "transformers", "accelerate", "jinja2"}
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
TRAINING = "rl_caption.programs.train, rl_caption.reward_models.program"


@pytest.mark.parametrize(
    ("packages", "heavy"),
    [
        ("rewards.text.cider, rl_caption.cli.preflight", HEAVY | {"psutil", "PIL"}),
        ("rl_caption.runtime.launch, rl_caption.cli.main", HEAVY),
        (
            f"{TRAINING}, rl_caption.programs.ablation.runner",
            LIBRARIES | FOR_SOME_MODELS,
        ),
    ],
)
def test_imports_are_light(packages, heavy):
    done = run_python(LOADED_AFTER.format(packages=packages, heavy=heavy))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


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
"""The parts of ``rl_caption`` from top to bottom (docs/design.md): a part imports from
those below it only.
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
    {"files", "trust"},
    {"base"},
]
"""The same of ``rewards``."""


def rank(module):
    """The module's layer from the top; None outside these packages."""
    package, _, name = module.partition(".")
    layers = {"rl_caption": LAYERS, "rewards": REWARD_LAYERS}.get(package, [])
    part = name.partition(".")[0]
    return next((i for i, layer in enumerate(layers) if part in layer), None)


def imports_of(files):
    """Module -> the modules of ``files`` that it imports, functions included; not for types alone."""
    graph = {name: set() for name in files}
    for name, path in files.items():
        nodes = [ast.parse(path.read_text(encoding="utf-8"))]
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            nodes += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                modules = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= (modules & files.keys()) or (
                    {node.module} & files.keys()
                )
    return graph


def modules_of(*packages):
    modules = {}
    for package in packages:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            modules[".".join(parts).removesuffix(".__init__")] = path
    return modules


@pytest.mark.parametrize("package", ["rl_caption", "rewards"])
def test_packages_import_downwards_only_and_files_in_no_circle(package):
    graph = imports_of(modules_of(package))
    for name, imported in graph.items():
        upper = rank(name)
        for module in imported:
            lower, same = rank(module), module.split(".")[1:2] == name.split(".")[1:2]
            if upper is not None and lower is not None and not same:
                assert lower > upper, f"{name} imports {module}"
    own = {name: imported - {name} for name, imported in graph.items()}
    TopologicalSorter(own).prepare()  # raises CycleError


def test_the_core_does_not_name_the_lab():
    """Not even in a string, but for the table of programs."""
    naming = {
        name
        for name, path in modules_of("rl_caption", "rewards").items()
        if "rl_caption.lab" in path.read_text("utf-8")
    }
    core = {name for name in naming if not name.startswith("rl_caption.lab")}
    assert core == {"rl_caption.cli.programs"}
