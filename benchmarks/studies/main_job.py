"""Cross-entropy, then self-critical training from it, over several seeds, scored on a test split: one table.

    python -m benchmarks.studies.main_job --xe configs/ucm_xe.yaml --scst configs/ucm_scst_cider.yaml --out runs/ucm

Further arguments, such as ``--data.path=DIR``, are overrides for both stages. Finished runs are kept, an interrupted
one is resumed. All is done by the commands that a user would type.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import yaml

PERCENT = ("CIDEr", "BLEU-4", "METEOR", "ROUGE-L", "oracle/f1", "oracle/precision", "captions/bad_endings")
PLAIN = ("length/mean", "vocabulary/size")


def program(name: str, *arguments: str) -> None:
    """Run ``python -m rl_caption name arguments``; its failure ends this program."""
    command = [sys.executable, "-m", "rl_caption", name, *arguments]
    print("+", " ".join(command[1:]), flush=True)
    subprocess.run(command, check=True)


def run_seed(arguments: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """Train both stages with one seed and judge both captioners: stage -> metric -> value."""
    out = arguments.out / f"seed{seed}"
    changes = [f"--train.seed={seed}", *arguments.set]
    xe, scst = out / "xe", out / "scst"
    if not (xe / "result.json").is_file():
        program("xe", "--config", arguments.xe, f"--run.dir={xe}", *changes)
    if not (scst / "result.json").is_file():
        warm = ["--warm_start=null", f"--model.init={xe}/export/best", f"--run.dir={scst}"]
        program("scst", "--config", arguments.scst, *warm, *changes)
    rollout = yaml.safe_load(Path(arguments.scst).read_text())["rollout"]
    scores = {}
    for stage, run in (("XE", xe), ("SCST", scst)):
        folder = run / "test"
        if not (folder / "scores.json").is_file():
            config = yaml.safe_load((run / "config.yaml").read_text())
            data = folder.with_suffix(".data.yaml")
            data.write_text(yaml.safe_dump({"data": config["data"]}))
            limit = f"--decode.max_new_tokens={rollout['max_new_tokens']}"
            program("evaluate", "--config", str(data), f"--model={run}/export/best", f"--out={folder}", limit)
        scores[stage] = json.loads((folder / "scores.json").read_text())["metrics"]
    return scores


def table(results: dict[int, dict[str, dict[str, float]]]) -> str:
    """Markdown: a row a seed and stage, then the means; shares and toolkit metrics times 100, as papers print them."""
    known = next(iter(results.values()))["XE"]
    keys = [key for key in (*PERCENT, *PLAIN) if key in known]
    head = [f"{key} (x100)" if key in PERCENT else key for key in keys]
    lines = ["| seed | stage | " + " | ".join(head) + " |", "|---" * (len(keys) + 2) + "|"]

    def row(seed: str, stage: str, values: dict[str, float]) -> str:
        cells = [f"{values[key] * (100 if key in PERCENT else 1):.1f}" for key in keys]
        return f"| {seed} | {stage} | " + " | ".join(cells) + " |"

    for seed, stages in results.items():
        lines += [row(str(seed), stage, values) for stage, values in stages.items()]
    for stage in ("XE", "SCST"):
        means = {key: statistics.fmean(result[stage][key] for result in results.values()) for key in keys}
        lines.append(row("mean", stage, means))
    return "\n".join(lines)


def main() -> None:
    """Run all seeds and print the table; it is also written to ``OUT/table.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xe", required=True, help="configuration of the cross-entropy stage")
    parser.add_argument("--scst", required=True, help="configuration of the self-critical stage")
    parser.add_argument("--out", required=True, type=Path, help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments, arguments.set = parser.parse_known_args()
    results = {seed: run_seed(arguments, seed) for seed in arguments.seeds}
    text = table(results)
    (arguments.out / "table.md").write_text(text + "\n")
    better = sum(stages["SCST"]["CIDEr"] > stages["XE"]["CIDEr"] for stages in results.values())
    print(f"{text}\nSCST above its starting point on CIDEr in {better} of {len(results)} seeds")


if __name__ == "__main__":
    main()
