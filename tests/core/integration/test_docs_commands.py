"""Every command of README and every pipeline that a page runs, and every tutorial from
top to bottom.

Commands run as typed, in a folder that looks like the repository's root and holds
photos of the reader's own. Configurations and sizes on the command line are shrunk
(``SMALL``). What a launcher starts, and the jobs of a grid, run in this process. Other
commands are understood by their programs: ``tests/core/unit/test_docs.py``.
"""

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from rl_caption.config import shipped
from rl_caption.programs.ablation import grid
from tests.captions_for_tests import REFERENCES
from tests.docs_for_tests import PAGES, ROOT, commands, program_of

pytestmark = pytest.mark.slow

SMALL = {
    **dict.fromkeys(("num_val", "num_test", "num_unseen"), 6),
    **{
        "num_train": 12,
        "max_steps": 1,
        "batch_size": 4,
        "warmup_steps": 0,
        "every": 1,
        "pca_rank": 3,
    },
    **dict.fromkeys(
        (
            "encoder_layers",
            "decoder_layers",
            "image_blocks",
            "image_repeats",
            "text_repeats",
        ),
        1,
    ),
    **dict.fromkeys(
        (
            "d_model",
            "ffn_dim",
            "n_embd",
            "width",
            "image_width",
            "text_width",
            "embed_dim",
        ),
        32,
    ),
    **{
        "min_count": 1,
        "threads": 1,
        "mixed_precision": "no",
        "bootstrap": 10,
        "seeds": [0],
    },
}
"""What is changed wherever a configuration has the key, so that a training takes about a second."""
CELLS = ("RefL-CLIPS", "NSC", "SPECS")
"""Rows of grids that are kept."""
SMALL_WORDS = {
    r"((?:(?<!--)num_train|num_val|num_test|num_unseen)\b\W+)[1-9]\d*": r"\g<1>8",
    r"(--num_train\W)4000": r"\g<1>8",
    r"(--(?:train.max_steps|train.batch_size|train.warmup_steps|eval.every)\W)\d+": r"\g<1>2",
    r"(--model.kwargs.embed_dim\W)\d+": r"\g<1>32",  # that of small teachers
    r",meteor": "",  # its Java program takes half a minute to load
}
"""The same in the words of a command."""


def shrunk(config: Any, key: str = "") -> Any:
    """A configuration with small sizes, and of a grid one row and one more."""
    if isinstance(config, dict):
        kept = [name for name in config if key != "cells" or name in CELLS]
        return {name: shrunk(config[name], name) for name in kept}
    if key == "values":
        return config[:1]
    small = None if config is None else SMALL.get(key, config)
    return (
        min(config, small)
        if isinstance(config, int) and isinstance(small, int)
        else small
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder like the repository's root, with small configurations, photos and a data
    set of them.
    """
    root = tmp_path_factory.mktemp("root")
    for name in ("scripts", "docs", "rl_caption", "rewards", "pyproject.toml"):
        (root / name).symlink_to(ROOT / name)
    for file in (ROOT / "configs").rglob("*.yaml"):
        copy = root / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        config = shrunk(yaml.safe_load(file.read_text()))
        copy.write_text(yaml.safe_dump(config, sort_keys=False))
    (root / "photos").mkdir()
    rows = []
    for number, (name, captions) in enumerate(REFERENCES.items()):
        for split in ("train", "val", "test"):
            file = f"photos/{split}{name}.png"
            shade = (60 * number, len(split) * 30, 90)
            Image.new("RGB", (64, 64), shade).save(root / file)
            rows.append({"image": file, "references": captions, "split": split})
    (root / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root


def run_python(words: list[str], root: Path) -> None:
    """Run a Python program in this process; it has to end without an error."""
    if words[1] == "-c":
        exec(compile(words[2], "-c", "exec"), {"__name__": "__main__"})
        return
    program, arguments = program_of(words)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [str(program), *arguments])
        patched.setattr(sys, "path", list(sys.path))
        patched.setattr(shipped, "FOLDER", root / "configs")
        patched.setattr(grid, "ended_runs", train_here)
        patched.setattr(subprocess, "run", partial(run_here, subprocess.run))
        patched.setattr(
            shutil,
            "which",
            lambda name, which=shutil.which, **how: (
                None if name == "java" else which(name, **how)
            ),
        )
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise AssertionError(f"{words} ended with {ended.code}") from ended


def run_here(run: Callable[..., Any], command: list[str], **how: Any) -> Any:
    """In place of ``subprocess.run``: a program of the package runs in this process;
    starting one takes seconds.
    """
    if command[-1] == "import torchvision":  # it loads: there is nothing to mend
        return subprocess.CompletedProcess(command, 0, "", "")
    if command[1:3] != ["-m", "rl_caption"]:
        return run(command, **how)
    return run_python(["python", *command[1:]], Path.cwd())


def train_here(runs: list[Any], _: int) -> Iterator[tuple[Any, int]]:
    """In place of the processes of a grid."""
    for run in runs:
        file = run.parent / "config.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(yaml.safe_dump(run.config.model_dump(mode="json")))
        run_python(
            ["python", "-m", "rl_caption", "scst", "--config", str(file)], Path.cwd()
        )
        yield run, 0


RUN = re.compile(r"rl-caption (run (own|own_mix|scenes) .*--(only|data)|recaption )")
RUNNING = {
    page.name: [
        command
        for command in commands(page)
        if command.runs and (page.name == "README.md" or RUN.match(command.text))
    ]
    for page in PAGES
}


@pytest.mark.parametrize("page", [page for page, found in RUNNING.items() if found])
def test_the_commands_of_a_page_run_one_after_the_other(page, root, monkeypatch):
    monkeypatch.chdir(root)
    for command in RUNNING[page]:
        text = "\0".join(command.words)
        for pattern, small in SMALL_WORDS.items():
            text = re.sub(pattern, small, text)
        run_python(text.split("\0"), root)
    if page == "README.md":
        assert Path("runs/own/scst/export/best").is_dir()


TINY = {
    "IMAGES": 8,
    "XE_STEPS": 10,
    "SCST_STEPS": 6,
    "BATCH_SIZE": 4,
    "WIDTH": 16,
    "RESAMPLES": 10,
}
"""Sizes of the tutorials."""
LEAVES = {
    "own_photos": "evaluation/both/comparison.json",
    "reward_of_your_own": "ablation/table.md",
    "judging_a_metric": "people/agreement.json",
}
"""Tutorial -> a file that it leaves."""


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (ROOT / "docs/tutorials").glob("*.py"))
)
def test_tutorial(name, tmp_path, monkeypatch):
    source = (ROOT / f"docs/tutorials/{name}.py").read_text(encoding="utf-8")
    sizes = re.compile(rf"^({'|'.join(TINY)}) = \d+", re.MULTILINE)
    (tmp_path / "tutorial.py").write_text(
        sizes.sub(lambda size: f"{size[1]} = {TINY[size[1]]}", source)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    run_python(["python", str(tmp_path / "tutorial.py")], tmp_path)
    assert (tmp_path / LEAVES[name]).stat().st_size > 0
