"""All that has to be seen on a GPU, in order of worth: tests, then the benchmarks that a GPU changes.

    python -m benchmarks.gpu --out FOLDER [--only tests step ...] [--seconds 540]
    python -m benchmarks.gpu --out FOLDER --device cpu --tiny      # a rehearsal without a GPU: every part, small

Each part is a process of its own. Its log, its rows and a page of all parts (``gpu.md``) are written when it ends.
Called again with the same folder, it goes on with the part that was cut off; ``--seconds`` limits all parts together.
The baselines need pycocoevalcap (its ``cider`` folder is enough), ``reward`` and ``towers`` open_clip.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import HEAD, Measurement
from rl_caption.data.parts import check_settings
from rl_caption.errors import ConfigError

PARTS: dict[str, tuple[list[str], list[str]]] = {
    "tests": (
        ["pytest", "-q", "-rs", "-m", "gpu", "tests/integration/test_gpu.py", "tests/invariants/test_replay.py"],
        [],
    ),
    "step": (["benchmarks.scst_step"], ["--images", "4", "--prefix-images", "2"]),
    "step_bf16": (["benchmarks.scst_step", "--precision", "bf16"], ["--images", "4", "--prefix-images", "2"]),
    "step_bf16_20_tokens": (
        ["benchmarks.scst_step", "--precision", "bf16", "--length", "20"],
        ["--images", "4", "--prefix-images", "2"],
    ),
    "pretrained": (["benchmarks.hf_step"], ["--models", "vit_gpt2", "--images", "1"]),
    "reward": (["benchmarks.l_clip"], ["--only", "step", "--images", "2", "--samples", "2"]),
    "towers": (["benchmarks.studies.l_clip_size"], ["--pairs", "2"]),
    "memory": (["benchmarks.memory"], ["--precision", "no", "--images", "12", "--prefix-images", "2"]),
}
"""Part -> module and its options, and what makes it tiny. All but the tests take --device, --repeats and --json."""


def run_part(part: str, device: str, tiny: bool, out: Path, limit: float) -> dict[str, Any]:
    """Run a part for at most ``limit`` seconds; its exit status (None: cut off), seconds, and the end of its log."""
    (module, small), log, started = PARTS[part], out / f"{part}.log", time.monotonic()
    line = [sys.executable, "-m", *module]
    if part != "tests":
        line += ["--device", device, "--json", str(out / f"{part}.json")]
        line += [*small, "--repeats", "1"] if tiny else []
    with log.open("w") as file:
        try:
            code = subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            code = None
    return {"code": code, "seconds": round(time.monotonic() - started), "tail": log.read_text()[-2000:]}


def page(results: dict[str, dict[str, Any]], out: Path, device: str) -> str:
    """Markdown: each part's status and table, as far as there is one."""
    blocks = [f"# {device}"]
    for part, result in results.items():
        status = {0: "passed", None: "cut off"}.get(result["code"], f"failed with status {result['code']}")
        blocks.append(f"## {part}: {status}, {result['seconds']} s")
        if (out / f"{part}.json").exists():
            rows = json.loads((out / f"{part}.json").read_text())
            blocks.append("\n".join([HEAD, *(str(Measurement(**row)) for row in rows)]))
        if part == "tests" or result["code"] != 0:
            blocks.append(f"```\n{result['tail']}\n```")
    return "\n\n".join(blocks) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not done yet; 1 if a part failed or was cut off."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of logs, rows and gpu.md")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="small sizes, one round")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="all by default")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all parts together")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    try:  # a rehearsal is no result of a GPU
        check_settings(chosen.out, {"device": chosen.device, "tiny": chosen.tiny})
    except ConfigError as error:
        parser.error(str(error))
    state, started = chosen.out / "results.json", time.monotonic()
    results: dict[str, dict[str, Any]] = json.loads(state.read_text()) if state.exists() else {}
    for part in chosen.only:
        left = chosen.seconds - (time.monotonic() - started)
        if results.get(part, {}).get("code", None) == 0 or left <= 0:
            continue
        print(f"{part} ...", flush=True)
        results[part] = run_part(part, chosen.device, chosen.tiny, chosen.out, left)
        state.write_text(json.dumps(results, indent=2))
        (chosen.out / "gpu.md").write_text(page(results, chosen.out, chosen.device))
        print(f"{part}: status {results[part]['code']} after {results[part]['seconds']} s", flush=True)
    print(f"see {chosen.out / 'gpu.md'}")
    return int(any(results.get(part, {"code": None})["code"] != 0 for part in chosen.only))


if __name__ == "__main__":
    sys.exit(main())
