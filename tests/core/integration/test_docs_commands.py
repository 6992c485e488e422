"""Every command of a block is run here, or the block's title says what it needs; and every tutorial, from
top to bottom.

Commands run as typed, in a folder that looks like the repository's root and holds small files of
the names that the pages use for the reader's own. Configurations and sizes on the command line are
shrunk (``SMALL``). What a launcher starts, and the jobs of a grid, run in this process;
``tests/core/distributed/`` has real launchers.
"""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from glob import glob
from http.server import ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from rl_caption.config import shipped
from rl_caption.programs.ablation import grid
from tests.captions_for_tests import CAPTIONS, REFERENCES
from tests.docs_for_tests import (
    PYTHON,
    ROOT,
    WRITTEN,
    Command,
    commands,
    folder_of,
    leaves,
    program_of,
    read_by,
    runnable,
    shown_files,
)

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
SMALL_PROGRAMS = {
    "retrieval.py": '--data.kwargs {"num_train":0,"num_val":0,"num_test":8,"num_unseen":0}',
    "rl-caption stress": "--num_samples 4 --bootstrap 20 --data.kwargs "
    '{"num_train":40,"num_val":8,"num_test":8,"num_unseen":0}',
    "judge.py --set scenes": '--set_kwargs {"num_images":8}',
}
"""Options that a program gets where the command does not have them."""
RESAMPLING = ("evaluate", "judge", "retrieval")
"""Programs that resample a thousand times unless they are told otherwise, those started by other
programs too.
"""


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
    """A folder like the repository's root, with small configurations and files of the reader's own."""
    root = tmp_path_factory.mktemp("root")
    for name in (
        "scripts",
        "benchmarks",
        "docs",
        "rl_caption",
        "rewards",
        "Makefile",
        "pyproject.toml",
    ):
        (root / name).symlink_to(ROOT / name)
    for file in (ROOT / "configs").rglob("*.yaml"):
        copy = root / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(
            yaml.safe_dump(shrunk(yaml.safe_load(file.read_text())), sort_keys=False)
        )
    shutil.copy(ROOT / "configs/accelerate/cpu2.yaml", root / "cpu2.yaml")
    write_captions(root)
    write_own_configuration(root)
    return root


def write_captions(root: Path) -> None:
    """Photos, a data set of them, captions and references."""
    (root / "photos").mkdir()
    rows = []
    for number, (name, captions) in enumerate(REFERENCES.items()):
        for split in ("train", "val", "test"):
            file = f"photos/{split}{name}.png"
            Image.new("RGB", (64, 64), (60 * number, len(split) * 30, 90)).save(
                root / file
            )
            rows.append({"image": file, "references": captions, "split": split})
    (root / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    predictions = [
        {"image_id": int(name), "caption": text} for name, text in CAPTIONS.items()
    ]
    for name in ("captions", "CAPTIONS", "P", "A", "B"):
        (root / f"{name}.json").write_text(json.dumps(predictions))
    for name in ("references", "REFERENCES", "R"):
        (root / f"{name}.json").write_text(json.dumps(REFERENCES))
    annotations = [
        {"image_id": int(n), "id": i, "caption": c}
        for n, cs in REFERENCES.items()
        for i, c in enumerate(cs)
    ]
    (root / "annotations").mkdir()
    images = [{"id": int(name), "file_name": f"{name}.jpg"} for name in CAPTIONS]
    coco = {"images": images, "annotations": annotations}
    (root / "annotations/captions_val2014.json").write_text(json.dumps(coco))


def write_own_configuration(root: Path) -> None:
    """A copy of a recipe with the reader's data and run folder."""
    config = yaml.safe_load((root / "configs/own_scst.yaml").read_text())
    config["data"]["path"], config["run"]["dir"] = "mine.jsonl", "runs/mine/2"
    (root / "mine.yaml").write_text(yaml.safe_dump(config))


def run_python(words: list[str], root: Path) -> None:
    """Run a Python program in this process; it has to end without an error."""
    if words[1] == "-c":
        exec(compile(words[2], "-c", "exec"), {"__name__": "__main__"})
        return
    program, arguments = program_of(words)
    name = (
        "".join(arguments[:1])
        if program == ROOT / "rl_caption/__main__.py"
        else program.stem
    )
    if name in RESAMPLING and not any(
        word.startswith("--bootstrap") for word in arguments
    ):
        arguments = [*arguments, "--bootstrap", str(SMALL["bootstrap"])]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [str(program), *arguments])
        patched.setattr(sys, "path", list(sys.path))
        patched.setattr(shipped, "FOLDER", root / "configs")
        patched.setattr(grid, "trained", train_here)
        patched.setattr(subprocess, "run", partial(run_here, subprocess.run))
        patched.setattr(
            shutil,
            "which",
            lambda name, which=shutil.which, **how: (
                None if name == "java" else which(name, **how)
            ),
        )
        patched.setattr(ThreadingHTTPServer, "serve_forever", lambda _: None)
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise AssertionError(f"{words} ended with {ended.code}") from ended


def run_here(run: Callable[..., Any], command: list[str], **how: Any) -> Any:
    """In place of ``subprocess.run``: a program of the package runs in this process; starting one
    takes seconds.
    """
    if command[-1] == "import torchvision":  # it loads: there is nothing to mend
        return subprocess.CompletedProcess(command, 0, "", "")
    if command[1:3] != ["-m", "rl_caption"]:
        return run(command, **how)
    return run_python(["python", *command[1:]], Path.cwd())


def train_here(program: str, runs: list[Any], _: int) -> Iterator[tuple[Any, int]]:
    """In place of the processes of a grid."""
    for run in runs:
        file = run.parent / "config.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(yaml.safe_dump(run.config.model_dump(mode="json")))
        run_python(
            ["python", "-m", "rl_caption", program, "--config", str(file)], Path.cwd()
        )
        yield run, 0


PROGRAMS = {
    "task": "reward_model",
    "cells": "ablate",
    "rollout": "scst",
    "scorers": "concreteness",
}
"""Section of a configuration -> the program that alone has it; none of them: cross-entropy."""


@pytest.fixture(scope="module")
def make(root) -> Callable[[str, Path], None]:
    """Makes what a command of a page reads and other commands would have left."""
    files = sorted((root / "configs").rglob("*.yaml"))
    owners = {
        folder: file
        for file in files
        if (folder := folder_of(yaml.safe_load(file.read_text())))
    }

    def made(path: str, page: Path) -> None:
        if any(root.glob(path.lstrip("/"))):
            return
        if path in ("runs/a", "runs/b"):
            made("runs/demo/xe", page)
            (root / path).symlink_to(root / "runs/demo/xe")
        if path.startswith("evaluation/"):
            words = [
                "--predictions",
                "captions.json",
                "--references",
                "references.json",
                "--out",
                path,
            ]
            run_python(["python", "-m", "rl_caption", "evaluate", *words], root)
        for folder, file in owners.items():
            if f"{path}/".startswith(f"{folder}/"):
                config = yaml.safe_load(file.read_text())
                program = next(
                    (name for key, name in PROGRAMS.items() if key in config), "xe"
                )
                for needed in leaves(config):
                    if needed.startswith("runs/") and not f"{needed}/".startswith(
                        f"{folder}/"
                    ):
                        made(needed, page)
                run_python(
                    [
                        "python",
                        "-m",
                        "rl_caption",
                        program,
                        "--config",
                        str(file.relative_to(root)),
                    ],
                    root,
                )
        for other in commands(page):
            if any(
                option in WRITTEN and path.startswith(f"{out}/")
                for option, out in pairwise(other.words)
            ):
                for needed in sorted(read_by(other)):
                    made(needed, page)
                run_python(small_words(other), root)

    return made


def small_words(command: Command) -> list[str]:
    """The words of a command with small sizes."""
    text = "\0".join(command.words)
    for pattern, small in SMALL_WORDS.items():
        text = re.sub(pattern, small, text)
    words = text.split("\0")
    for program, options in SMALL_PROGRAMS.items():
        if program in command.text and options.split()[0] not in words:
            words += options.split()
    return [
        path
        for word in words
        for path in (sorted(glob(word)) if "/*" in word else [word])
    ]


@pytest.mark.parametrize(
    "command", [pytest.param(command, id=command.id) for command in runnable()]
)
def test_command_runs(command, root, make, monkeypatch, capsys):
    monkeypatch.chdir(root)
    for name, text in shown_files(command.page).items():
        (root / name).write_text(yaml.safe_dump(shrunk(yaml.safe_load(text))))
    words = small_words(command)
    read = read_by(command)
    if "run" in words[1:-1]:  # it makes its runs, and refuses those that it did not
        read = set()
        for file in root.glob("runs/*/*/result.json"):
            if not file.with_name("stage.json").exists():
                shutil.rmtree(file.parent)
    elif "mine.yaml" in words:
        read |= set(leaves(yaml.safe_load((root / "mine.yaml").read_text())))
    for path in sorted(read):
        make(path, command.page)
    if words[:2] == ["rl-caption", "web"]:
        pytest.importorskip(
            "gradio", reason="the extra web is not in all: it holds Pillow below 13"
        )
    if words[0] == "make":
        words.insert(1, "--dry-run")
    if words[0] in PYTHON:
        words, redirected = (
            (words[: words.index(">")], words[-1]) if ">" in words else (words, "")
        )
        capsys.readouterr()
        run_python(words, root)
        if redirected and not (root / redirected).exists():
            (root / redirected).parent.mkdir(parents=True, exist_ok=True)
            (root / redirected).write_text(capsys.readouterr().out)
    else:
        programs = os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        subprocess.run(
            words,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PATH": programs},
            check=True,
        )
    for option, path in pairwise(words):
        assert option not in WRITTEN or Path(path).exists(), path


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
    if name == "own_photos":
        for model in ("scst", "vlm"):
            assert (
                len(
                    json.loads(
                        (tmp_path / f"evaluation/{model}/predictions.json").read_text()
                    )
                )
                == 20
            )
    if name == "reward_of_your_own":
        rows = re.findall(
            r"^\| *([\w-]+)", (tmp_path / "ablation/table.md").read_text(), re.MULTILINE
        )
        assert {"CIDEr-D", "mixture", "colours"} <= set(rows)
