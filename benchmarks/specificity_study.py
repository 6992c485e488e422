"""Dual encoders on long descriptions: specificity rates, agreement with the truth by length, retrieval and hubness.

python benchmarks/specificity_study.py --data configs/scenes_long_xe.yaml --split test \
    --models contrastive=runs/scenes/long_contrastive SPECS=runs/scenes/long_specificity --out runs/results/specificity

A model is an exported folder, a run's folder (its best export), or RUN@last (the weights after the run's last step).
Prints the tables and writes them to OUT/specificity.md and, unrounded, OUT/specificity.json. docs/judging.md says what
they mean. Data that is not of the generated world needs ``long_reference`` in its rows, and has no truth to agree with.
"""

import argparse
import shutil
from pathlib import Path

import torch
from reward_models import data_section, loaded
from safetensors.torch import load_file, save_file

from rl_caption.build import ConfigError, build_data, quiet_libraries, usable_split
from rl_caption.checkpoint import newest_checkpoint
from rl_caption.cli import find_own_modules, log_lines
from rl_caption.data.files import write_json, write_text
from rl_caption.errors import user_errors
from rl_caption.evaluation import check_writable
from rl_caption.judging.growing import EDGES
from rl_caption.judging.report import reference_metrics
from rl_caption.judging.specificity_study import CaptionLength, SpecificityStudy


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
    """Judge everything that was asked for, print and write it."""
    folder = check_writable(arguments.out)
    models = loaded(exported(arguments.models, folder), arguments.device)
    try:
        metrics = reference_metrics(arguments.metrics)
    except ValueError as error:
        raise ConfigError(f"--metrics: {error}") from error
    data = build_data(data_section(arguments.data))
    rows = list(data.split(usable_split(data, arguments.split))[: arguments.max_images])
    study = SpecificityStudy(rows, arguments.seed, arguments.shuffle_rate, arguments.edges, arguments.processes)
    for name, metric in {"words": CaptionLength(), **metrics}.items():
        study.judge_metric(name, metric)
    for label, backbone in models.items():
        study.judge_model(label, backbone)
    text = study.markdown()
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    write_text(folder / "specificity.md", text)
    write_json(folder / "specificity.json", {"arguments": settings, **study.content()})
    print(text)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="YAML with a section 'data'")
    parser.add_argument("--split", default="test")
    parser.add_argument("--models", nargs="+", required=True, metavar="LABEL=FOLDER", help="dual encoders")
    parser.add_argument("--metrics", nargs="*", default=["cider", "rouge_l"], help="that need references only")
    parser.add_argument("--max-images", type=int, help="the first so many images of the split")
    parser.add_argument("--shuffle-rate", type=float, default=0.0, help="share of shuffled negative units, 0 to 1")
    parser.add_argument("--edges", nargs="+", type=int, default=list(EDGES), help="fewest words of each bin")
    parser.add_argument("--processes", type=int, default=1, help="that cut descriptions into units")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of negatives")
    parser.add_argument("--out", required=True, type=Path)
    arguments = parser.parse_args()
    if arguments.max_images is not None and arguments.max_images < 3:
        parser.error(f"--max-images {arguments.max_images}: expected at least 3")
    if not 0 <= arguments.shuffle_rate <= 1 or arguments.processes < 1:
        parser.error("--shuffle-rate must be within 0 and 1, --processes at least 1")
    find_own_modules()
    quiet_libraries()
    with log_lines(), user_errors():
        run(arguments)


if __name__ == "__main__":
    main()
