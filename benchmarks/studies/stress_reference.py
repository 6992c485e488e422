"""The table of known rewards that ``stress`` shows beside the tested one, from the results of ``stress_study``.

    python -m benchmarks.studies.stress_reference --study OUT

reads ``OUT/predictions/NAME-SEED.json`` and ``OUT/truth/NAME-SEED.json`` (``stress_study predict`` and ``train``) and
writes ``rl_caption/lab/stress/reference.json``: means over seeds of what ``rl_caption.lab.stress.page.summary`` has.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.studies.stress_study import rewards_of
from rl_caption.data.files import write_text
from rl_caption.lab.stress import page

COMMAND = "python -m benchmarks.studies.stress_study, then stress_reference"
SIZES = (1, 2, 4, 8, 16, 32, 64)
STEPS = 72
"""Of a training; gold after it is the mean of the last three validations."""


def known_reward(
    predictions: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A line of the table, of the predictions and the trainings of one reward; of either there may be none."""
    line: dict[str, Any] = {"seeds": len(predictions), "runs": len(runs)}
    if predictions:
        curve = [
            fmean(values) for values in zip(*(one["best_of_n"] for one in predictions), strict=True)
        ]
        shares = [
            [share for share in one["probes"].values() if share is not None] for one in predictions
        ]
        line |= {"probes": fmean(map(fmean, shares)), "change": curve[-1] - curve[0]}
        line |= {"peak": SIZES[curve.index(max(curve))], "fall": max(curve) - curve[-1]}
    if runs:
        ends = [run["step"].index(STEPS) + 1 for run in runs]
        changes = [
            fmean(run["gold"][end - 3 : end]) - run["gold"][0]
            for run, end in zip(runs, ends, strict=True)
        ]
        alarms = [step for run in runs for step in run["alarms"][:1] if step <= STEPS]
        line |= {"push_change": fmean(changes), "push_alarm": min(alarms, default=None)}
    return line


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path, required=True, help="the folder of stress_study")
    chosen = parser.parse_args()
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for source in ("predictions", "truth"):
        for file in sorted((chosen.study / source).glob("*.json")):
            name = file.stem.rpartition("-")[0]
            if name in rewards_of(chosen.study):
                results.setdefault(name, {}).setdefault(source, []).append(
                    json.loads(file.read_text())
                )
    rewards = {
        name: known_reward(of.get("predictions", []), of.get("truth", []))
        for name, of in results.items()
    }
    ordered = dict(sorted(rewards.items(), key=lambda item: item[1].get("push_change", 0.0)))
    note = (
        f"Known rewards in the generated world, means over seeds; push: {STEPS} steps of training."
    )
    content = {"command": COMMAND, "note": note, "rewards": ordered}
    text = json.dumps(content, indent=1, default=float)
    write_text(Path(page.__file__).with_name(page.REFERENCE), text + "\n")


if __name__ == "__main__":
    main()
