"""``python -m tests.engines NAME ...``: run scripts of this folder, each in an
environment of its own.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.mixed import MixedReward
from rewards.registry import build
from rewards.text.document_frequency import DocumentFrequencies
from tests.engines import report
from tests.zoo.vision_language import tiny_qwen2_vl

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
REQUIREMENTS = re.compile(r"(?m)^# /// script\n((?:#(?: .*)?\n)+?)# ///$")
TOLERANCE = 1e-6
"""Largest difference of scores: embeddings are float32, and batches differ in size."""
REFERENCES = [
    ["a brown dog runs on the grass", "a dog is running"],
    ["two cats sleep on a bed", "cats in a bed"],
    ["a red bus drives down the street", "a bus on a road"],
    ["a man rides a horse on the beach", "a person on a horse"],
]
CAPTIONS = [
    "a dog runs on grass",
    "a cat on the bed",
    "a bus",
    "a man and a horse on sand",
]


def main() -> None:
    """Run the scripts that are named; exits with 1 if numbers differ."""
    names = sorted(
        path.stem for path in HERE.glob("*.py") if REQUIREMENTS.search(path.read_text())
    )
    parser = argparse.ArgumentParser(
        prog="python -m tests.engines", description=__doc__
    )
    parser.add_argument(
        "names", nargs="+", choices=names, metavar="NAME", help=", ".join(names)
    )
    for name in parser.parse_args().names:
        run(name, REPOSITORY / "build/engines" / name)


def run(name: str, folder: Path) -> None:
    """Run the script ``name`` in ``folder`` and print a row of the table in
    docs/serve.md for each comparison.
    """
    requirements = requirements_of(HERE / f"{name}.py")
    folder.mkdir(parents=True, exist_ok=True)
    python = install(folder / "environment", requirements)
    engine = requirements.get("tool", {}).get("engine", {})
    reward = write_reward(folder)
    if engine.get("vlm"):
        tiny_qwen2_vl(
            folder / "qwen2_vl", patch_size=14
        )  # ms-swift resizes to multiples of 28
    (folder / report.RESULTS).write_text("")
    environment = os.environ | {
        "ENGINE_FOLDER": str(folder),
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_OFFLINE": "1",
    }
    with contextlib.ExitStack() as stack:
        if engine.get("serve"):
            environment["RL_CAPTION_URL"] = stack.enter_context(served(folder))
        command = [str(python), "-m", f"tests.engines.{name}"]
        subprocess.run(command, cwd=folder, env=environment, check=True)
    versions = installed_versions(python, requirements)
    results = [
        json.loads(line) for line in (folder / report.RESULTS).read_text().splitlines()
    ]
    if not results:
        sys.exit(f"{name} reported nothing")
    rows = [compared_row(result, reward) for result in results]
    for what, count, difference, tolerance in rows:
        print(
            f"| {versions} | {what}, {count} numbers | {difference:.1e} | {datetime.date.today()} |"
        )
        if not difference <= tolerance:
            sys.exit(
                f"{name}: {what}: the largest difference is {difference}, above {tolerance}"
            )


def requirements_of(script: Path) -> dict[str, Any]:
    """The table in the first comment of a script (inline script metadata)."""
    block = REQUIREMENTS.search(script.read_text())
    assert block is not None
    return tomllib.loads(re.sub(r"(?m)^# ?", "", block[1]))


def install(folder: Path, requirements: dict[str, Any]) -> Path:
    """Python of an environment with these requirements, made anew when they change."""
    python, stamp = folder / "bin/python", folder / "requirements.json"
    wanted = json.dumps(requirements)
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "-qq", "--no-compile"]
        engine = requirements.get("tool", {}).get("engine", {})
        alone, without = engine.get("alone", []), engine.get("without", [])
        subprocess.run([*pip, *requirements["dependencies"]], check=True)
        subprocess.run([*pip, "--no-deps", *alone, "-e", str(REPOSITORY)], check=True)
        if without:
            words = [str(python), "-m", "pip", "uninstall", "-q", "-y", *without]
            subprocess.run(words, check=True)
        subprocess.run(
            [str(python), str(REPOSITORY / "rl_caption/cli/torchvision_remedy.py")],
            check=True,
        )
        stamp.write_text(wanted)
    return python


def installed_versions(python: Path, requirements: dict[str, Any]) -> str:
    """Installed versions of the packages that the script pins, Transformers and Torch."""
    alone = requirements.get("tool", {}).get("engine", {}).get("alone", [])
    pinned = [word for word in [*alone, *requirements["dependencies"]] if "==" in word]
    named = [word.partition("==")[0].partition("[")[0] for word in pinned]
    code = (
        "import sys; from importlib.metadata import distributions; "
        "have = {d.name.lower().replace('_', '-'): d.version for d in distributions()}; "
        "print(', '.join(f'{n} {have[n]}' for n in dict.fromkeys(sys.argv[1:]) if n in have))"
    )
    words = [
        word.lower().replace("_", "-") for word in [*named, "transformers", "torch"]
    ]
    return subprocess.check_output([str(python), "-c", code, *words], text=True).strip()


def compared_row(
    result: dict[str, Any], reward: MixedReward
) -> tuple[str, int, float, float]:
    """Name of the test, number of scores, their largest difference from the scores in
    process, and the tolerance.
    """
    if "difference" in result:
        return (
            result["what"],
            result["count"],
            result["difference"],
            result["tolerance"],
        )
    expected = reward(None, result["captions"], **result["columns"])
    difference = float(np.max(np.abs(np.subtract(expected, result["scores"]))))
    return result["what"], len(expected), difference, TOLERANCE


def write_reward(folder: Path) -> MixedReward:
    """Write photos, cases and the configuration of the served reward (of text and
    images) to ``folder``; return the same reward in this process.
    """
    photos = folder / "photos"
    photos.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    rows = []
    for number, (caption, references) in enumerate(
        zip(CAPTIONS, REFERENCES, strict=True)
    ):
        path = photos / f"{number}.png"
        Image.fromarray(draw.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
        rows.append({"caption": caption, "image": str(path), "references": references})
    (folder / "cases.json").write_text(json.dumps(rows))
    torch.manual_seed(2)  # cosines of all rows are positive
    shape = LCLIPConfig(image_width=64, image_heads=4, text_width=64, text_heads=4)
    LCLIP(shape).save_pretrained(folder / "lclip")
    df = DocumentFrequencies.from_texts(REFERENCES, eos=True)
    df.save(folder / "df.npz")
    student = {"backbone": str(folder / "lclip"), "device": "cpu"}
    terms = {
        "cider": {"weight": 0.5},
        "ref_l_clipscore": {"weight": 0.5, "kwargs": student},
        "repetition": {"weight": -0.1},
    }
    reward = {"df": str(folder / "df.npz"), "terms": terms}
    (folder / "mix.yaml").write_text(json.dumps({"reward": reward}))
    return MixedReward(
        {
            "cider": (build("cider", df=df), 0.5),
            "ref_l_clipscore": (build("ref_l_clipscore", **student), 0.5),
            "repetition": (build("repetition"), -0.1),
        }
    )


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of ``rl-caption serve`` of ``mix.yaml``, a process of this environment."""
    words = [
        "serve",
        "--config",
        str(folder / "mix.yaml"),
        "--images.photos",
        str(folder / "photos"),
    ]
    command = [sys.executable, "-m", "rl_caption", *words, "--port", "0"]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split()[0]
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
