"""Cross-entropy, then self-critical training from it, over several seeds, scored on a test split: one table.

    python -m benchmarks.studies.main_job --xe configs/ucm_xe.yaml --scst configs/ucm_scst_cider.yaml --out runs/ucm

Further arguments, such as ``--data.path=DIR``, are overrides for both trainings. Finished runs are kept, an interrupted
one is resumed. Everything is done by commands that a user would type.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from rl_caption.evaluation.results import markdown

PERCENT = (
    "CIDEr",
    "BLEU-4",
    "METEOR",
    "ROUGE-L",
    "oracle/f1",
    "oracle/precision",
    "captions/bad_endings",
)
PLAIN = ("length/mean", "vocabulary/size")


def run_module(*arguments: str) -> None:
    """Run ``python -m arguments``; its failure ends this program."""
    print("+ python -m", " ".join(arguments), flush=True)
    subprocess.run([sys.executable, "-m", *arguments], check=True)


def run_seed(
    arguments: argparse.Namespace, changes: Sequence[str], seed: int
) -> dict[str, dict[str, float]]:
    """Train by cross-entropy, then self-critically, and evaluate both: ``XE`` and ``SCST`` -> metric -> value."""
    xe, scst = (arguments.out / f"seed{seed}" / name for name in ("xe", "scst"))
    warm = ["--warm_start=null", f"--model.init={xe}/export/best"]
    length = yaml.safe_load(Path(arguments.scst).read_text())["rollout"]["max_new_tokens"]
    scores = {}
    for run, file, extra in ((xe, arguments.xe, []), (scst, arguments.scst, warm)):
        if not (run / "result.json").is_file():
            words = ["--config", file, *extra, f"--run.dir={run}", f"--train.seed={seed}", *changes]
            run_module("rl_caption", run.name, *words)
        found = run / "test" / "scores.json"
        if not found.is_file():
            data = run / "test.data.yaml"
            data.write_text(
                yaml.safe_dump({"data": yaml.safe_load((run / "config.yaml").read_text())["data"]})
            )
            words = [
                f"--model={run}/export/best",
                f"--out={found.parent}",
                f"--decode.max_new_tokens={length}",
            ]
            run_module("rl_caption", "evaluate", "--config", str(data), *words)
        scores[run.name.upper()] = json.loads(found.read_text())["metrics"]
    return scores


def table(results: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
    """Markdown: a row for each seed and stage, then the means; shares and toolkit metrics times 100, as in papers."""
    rows = [
        (str(seed), stage, own) for seed, stages in results.items() for stage, own in stages.items()
    ]
    keys = [key for key in (*PERCENT, *PLAIN) if key in rows[0][2]]
    for stage in ("XE", "SCST"):
        means = {
            key: statistics.fmean(own[key] for _, name, own in rows if name == stage)
            for key in keys
        }
        rows.append(("mean", stage, means))
    head = ["seed", "stage", *(f"{key} (x100)" if key in PERCENT else key for key in keys)]
    factors = {key: 100 if key in PERCENT else 1 for key in keys}
    lines = [
        [seed, stage, *(f"{own[key] * factor:.1f}" for key, factor in factors.items())]
        for seed, stage, own in rows
    ]
    return markdown(head, lines)


def main() -> None:
    """Run all seeds and print the table; it is also written to ``OUT/table.md``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--xe", required=True, help="configuration of the cross-entropy training")
    parser.add_argument("--scst", required=True, help="configuration of the self-critical training")
    parser.add_argument("--out", required=True, type=Path, help="folder of all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments, changes = parser.parse_known_args()
    results = {seed: run_seed(arguments, changes, seed) for seed in arguments.seeds}
    text = table(results)
    (arguments.out / "table.md").write_text(text + "\n")
    better = sum(stages["SCST"]["CIDEr"] > stages["XE"]["CIDEr"] for stages in results.values())
    print(f"{text}\nSCST above its starting point on CIDEr in {better} of {len(results)} seeds")


if __name__ == "__main__":
    main()
