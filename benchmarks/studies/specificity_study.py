"""Dual encoders on long descriptions: specificity rates, agreement with the truth by length, retrieval and hubness.

python -m benchmarks.studies.specificity_study --data configs/scenes_long_xe.yaml --split test \
    --models contrastive=runs/scenes/long_contrastive SPECS=runs/scenes/long_specificity --out runs/results/specificity

A model is an exported folder, a run's folder (its best export), or RUN@last (the weights after the run's last step).
Prints the tables and writes them to OUT/specificity.md and, unrounded, OUT/specificity.json. docs/judging.md says what
they mean. Data that is not of the generated world needs ``long_reference`` in its rows, and has no truth to agree with.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.studies.reward_models import load_all, options, run_program, write_tables
from benchmarks.studies.specificity_report import EDGES, CaptionLength, SpecificityStudy
from rl_caption.config.build import ConfigError
from rl_caption.evaluation import check_writable
from rl_caption.training.checkpoint import newest_checkpoint


def exported(labelled: list[str], out: Path) -> list[str]:
    """``LABEL=RUN`` to ``LABEL=RUN/export/best``; ``LABEL=RUN@last`` to the last weights, written below ``out``."""
    found = []
    for label, _, name in (argument.partition("=") for argument in labelled):
        run, best = Path(name.removesuffix("@last")), Path(name.removesuffix("@last")) / "export" / "best"
        if name.endswith("@last"):
            newest = newest_checkpoint(run / "checkpoints")
            if newest is None or not (best / "open_clip_config.json").is_file():
                raise ConfigError(f"--models {label}={name}: {run} is no finished run of an open_clip model")
            weights = load_file(newest / "model.safetensors")
            folder = out / "models" / label
            folder.mkdir(parents=True, exist_ok=True)
            save_file(
                {key.removeprefix("clip."): value for key, value in weights.items()},
                folder / "open_clip_model.safetensors",
            )
            shutil.copy(best / "open_clip_config.json", folder)
        else:
            folder = best if best.is_dir() else run
        found.append(f"{label}={folder}")
    return found


def run(arguments: argparse.Namespace) -> None:
    """Compute, print and write all tables."""
    folder = check_writable(arguments.out)
    models, metrics, rows = load_all(arguments, exported(arguments.models, folder))
    study = SpecificityStudy(rows, arguments.seed, arguments.shuffle_rate, arguments.edges, arguments.processes)
    for name, metric in {"words": CaptionLength(), **metrics}.items():
        study.judge_metric(name, metric)
    for label, backbone in models.items():
        study.judge_model(label, backbone)
    write_tables(arguments, "specificity", study.markdown(), study.content())


def main() -> None:
    """Read the command line."""
    parser = options(__doc__, ["cider", "rouge_l"])
    parser.add_argument("--shuffle-rate", type=float, default=0.0, help="share of shuffled negative units, 0 to 1")
    parser.add_argument("--edges", nargs="+", type=int, default=list(EDGES), help="fewest words of each bin")
    parser.add_argument("--processes", type=int, default=1, help="that cut descriptions into units")
    arguments = parser.parse_args()
    if not arguments.models:
        parser.error("--models: expected at least one LABEL=FOLDER")
    if arguments.max_images is not None and arguments.max_images < 3:
        parser.error(f"--max-images {arguments.max_images}: expected at least 3")
    if not 0 <= arguments.shuffle_rate <= 1 or arguments.processes < 1:
        parser.error("--shuffle-rate must be within 0 and 1, --processes at least 1")
    run_program(run, arguments)


if __name__ == "__main__":
    main()
