"""Tests and benchmarks on a GPU: two commands of at most 330 s each, the most important
first.

    python -m benchmarks.gpu first --out FOLDER      # tests, steps, reward, towers, a profile
    python -m benchmarks.gpu second --out FOLDER     # pretrained captioners, ZeRO, memory
    python -m benchmarks.gpu first --out FOLDER --device cpu --tiny       # a rehearsal without a GPU: every part, small

Each part is a process of its own with a limit of its own. Rows and logs of all parts
are written to ``COMMAND.json``, a page of them to ``COMMAND.md``, whenever a part ends.
Called again with the same folder, a command goes on with the parts that did not pass;
``--only`` names some.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.harness import HEAD, Measurement


@dataclass(frozen=True)
class Part:
    """A process: a module with its options, and the seconds that it may take."""

    module: str
    seconds: int


TESTS = "pytest -q -rs -p no:cacheprovider -m gpu tests/core/integration/test_gpu.py -k"
COMMANDS: dict[str, dict[str, Part]] = {
    "first": {
        "tests": Part(f"{TESTS} not(ZeRO)", 90),
        "step_bf16": Part("benchmarks.scst_step --precision bf16", 60),
        "step_float32": Part("benchmarks.scst_step", 60),
        "reward": Part("benchmarks.l_clip --only step", 45),
        "towers": Part("benchmarks.l_clip --only towers", 30),
        "profile": Part("benchmarks.profile_step", 30),
    },
    "second": {
        "pretrained": Part(
            "benchmarks.hf_step --images 50 --precision bf16 --copied states", 120
        ),
        "zero": Part(f"{TESTS} ZeRO", 60),
        "memory": Part("benchmarks.memory --precision bf16", 90),
    },
}
"""Command -> its parts. Each part but the tests takes --device, --tiny and --json."""


def run_part(part: Part, device: str, tiny: bool) -> dict[str, Any]:
    """Run a part: its exit status (None: cut off), seconds, rows, and the end of its
    log.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        rows = Path(folder) / "rows.json"
        line = [sys.executable, "-m", *part.module.split()]
        if not part.module.startswith("pytest"):
            line += ["--device", device, "--json", str(rows)]
            line += ["--tiny"] * tiny
        environment = os.environ | (
            {"RL_CAPTION_REHEARSE_GPU": "1"} if device == "cpu" else {}
        )
        limit = None if tiny else part.seconds
        with log.open("w") as file:
            try:
                ended = subprocess.run(
                    line, stdout=file, stderr=file, timeout=limit, env=environment
                )
                code: int | None = ended.returncode
            except subprocess.TimeoutExpired:
                code = None
        return {
            "code": code,
            "seconds": round(time.monotonic() - started),
            "rows": json.loads(rows.read_text()) if rows.exists() else [],
            "log": log.read_text(errors="replace")[-20_000:],
        }


def format_page(results: dict[str, dict[str, Any]], device: str) -> str:
    """Markdown: the status and table of each part, and the log of parts that did not
    pass.
    """
    blocks = [
        f"# {device}, torch {version('torch')}, transformers {version('transformers')}"
    ]
    for name, result in results.items():
        status = {0: "passed", None: "cut off"}.get(
            result["code"], f"failed with status {result['code']}"
        )
        blocks.append(f"## {name}: {status}, {result['seconds']} s")
        if result["rows"]:
            blocks.append(
                "\n".join([HEAD, *(str(Measurement(**row)) for row in result["rows"])])
            )
        if not result["rows"] or result["code"] != 0:
            blocks.append(f"```\n{result['log'][-3000:]}\n```")
    return "\n\n".join(blocks) + "\n"


def run_command(
    command: str, out: Path, device: str, tiny: bool, only: Sequence[str]
) -> int:
    """Run the parts that have not passed; 1 if a part failed or was cut off."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{command}.json"
    settings = {"device": device, "tiny": tiny}
    state: dict[str, Any] = (
        json.loads(file.read_text())
        if file.exists()
        else {"settings": settings, "parts": {}}
    )
    if state["settings"] != settings:  # a rehearsal is no result of a GPU
        raise SystemExit(
            f"error: {file} has results of {state['settings']}, this is {settings}: name another "
            f"--out"
        )
    results: dict[str, dict[str, Any]] = state["parts"]
    for name in only:
        if results.get(name, {}).get("code", None) == 0:
            continue
        part = COMMANDS[command][name]
        print(f"{name}, at most {part.seconds} s ...", flush=True)
        results[name] = run_part(part, device, tiny)
        file.write_text(json.dumps(state, indent=1))
        (out / f"{command}.md").write_text(format_page(results, device))
        print(
            f"{name}: status {results[name]['code']} after {results[name]['seconds']} s",
            flush=True,
        )
    print(format_page(results, device))
    return int(any(results[name]["code"] != 0 for name in only))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command's parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of COMMAND.json and COMMAND.md"
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, one round, no limits"
    )
    parser.add_argument(
        "--only", nargs="+", help="parts of the command; all by default"
    )
    chosen = parser.parse_args(arguments)
    only = chosen.only or list(COMMANDS[chosen.command])
    return run_command(chosen.command, chosen.out, chosen.device, chosen.tiny, only)


if __name__ == "__main__":
    sys.exit(main())
