"""Dual encoders as metrics: retrieval on a split and, on generated scenes, agreement of metrics with the truth.

    python -m benchmarks.studies.reward_models --data configs/scenes_scst_cider.yaml --out runs/reward_models \\
        --models teacher=FOLDER student=FOLDER --captioner runs/scenes/xe/export/best

Prints the tables and writes them to OUT/reward_models.md and, unrounded, OUT/reward_models.json. docs/judging.md
defines what is compared with what.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.studies.encoder_report import Report, judge_metrics, judge_model, reference_metrics, texts_of
from rewards.base import Reward
from rewards.clip.backbone import Backbone, load_backbone
from rl_caption.captioners.transformer import TransformerCaptioner
from rl_caption.cli.main import find_own_modules, log_lines, parse
from rl_caption.config.build import ConfigError, build_data, quiet_libraries, usable_split
from rl_caption.config.schema import DataConfig, EvaluateConfig
from rl_caption.data.base import Row
from rl_caption.data.files import write_json, write_text
from rl_caption.errors import user_errors
from rl_caption.evaluation import check_writable
from rl_caption.meta_evaluation.scenes import SceneCaptions, rate_captions, sample_at_temperatures


def options(description: str | None, metrics: Sequence[str]) -> argparse.ArgumentParser:
    """A parser of the options that this study and ``specificity_study`` share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="YAML with a section 'data'")
    parser.add_argument("--split", default="test")
    parser.add_argument("--models", nargs="*", default=[], metavar="LABEL=FOLDER", help="students or open_clip folders")
    parser.add_argument("--metrics", nargs="*", default=list(metrics), help="that need references only")
    parser.add_argument("--max-images", type=int, help="the first so many images of the split")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn: samples, negatives")
    parser.add_argument("--out", required=True, type=Path, help="folder of the tables")
    return parser


def run_program(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> None:
    """Run a program as the package does: log lines, and one line for errors that a user can correct."""
    find_own_modules()
    quiet_libraries()
    with log_lines(), user_errors():
        run(arguments)


def load_all(
    arguments: argparse.Namespace, models: list[str]
) -> tuple[dict[str, Backbone], dict[str, Reward], list[Row]]:
    """Load ``LABEL=FOLDER`` models, make the metrics and read the rows.

    Raises:
        ConfigError: an option that names something missing; it says which.
    """
    encoders = loaded(models, arguments.device)
    try:
        metrics = reference_metrics(arguments.metrics)
    except ValueError as error:
        raise ConfigError(f"--metrics: {error}") from error
    data = build_data(data_section(arguments.data))
    return encoders, metrics, list(data.split(usable_split(data, arguments.split))[: arguments.max_images])


def data_section(path: Path) -> DataConfig:
    """Read the ``data`` section of a configuration, whatever program that is for."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--data {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--data {path} is not YAML: {error}") from error
    if not isinstance(content, dict) or "data" not in content:
        raise ConfigError(f"--data {path} has no section 'data'")
    with tempfile.TemporaryDirectory() as folder:
        section = Path(folder) / path.name
        section.write_text(yaml.safe_dump({"data": content["data"]}))
        return parse(EvaluateConfig, ["--config", str(section)], "evaluate").data


def loaded(labelled: list[str], device: str) -> dict[str, Backbone]:
    """Load ``LABEL=FOLDER`` models, before anything else takes time."""
    models = {}
    for label, _, folder in (argument.partition("=") for argument in labelled):
        if not label or not Path(folder).is_dir() or label in models:
            raise ConfigError(f"--models {label}={folder}: expected LABEL=FOLDER, different labels, folders of models")
        try:
            models[label] = load_backbone(folder, device=device)
        except ValueError as error:
            raise ConfigError(f"--models {label}: {error}") from error
    return models


def write_tables(arguments: argparse.Namespace, name: str, text: str, content: dict[str, Any]) -> None:
    """Print the tables, and write them to ``--out``: NAME.md and, unrounded, NAME.json with the arguments."""
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    write_text(arguments.out / f"{name}.md", text)
    write_json(arguments.out / f"{name}.json", {"arguments": settings, **content})
    print(text)


def judged_scenes(arguments: argparse.Namespace, rows: list[Row]) -> SceneCaptions:
    """Sample captions, where there is a captioner, and judge them with the references and hard negatives."""
    samples = {}
    if arguments.captioner:
        captioner = TransformerCaptioner.from_pretrained(arguments.captioner)
        captioner.policy.to(arguments.device)
        samples = sample_at_temperatures(
            captioner, rows, arguments.temperatures, arguments.num_samples, arguments.max_new_tokens,
            device=arguments.device, seed=arguments.seed,
        )  # fmt: skip
    return rate_captions(rows, samples, arguments.judged_references, arguments.seed)


def run(arguments: argparse.Namespace) -> None:
    """Compute, print and write all tables."""
    check_writable(arguments.out)
    models, metrics, rows = load_all(arguments, arguments.models)
    report = Report(arguments.split, len(rows), len(texts_of(rows)[0]))
    captions = None
    if rows and all(row.get("scene") is not None for row in rows):
        captions = judged_scenes(arguments, rows)
        judge_metrics(report, metrics, captions)
    elif arguments.captioner:
        raise ConfigError("--captioner: captions are judged on generated scenes only; this data has no known truth")
    elif not models:
        raise ConfigError("nothing to judge: give --models, or data of generated scenes")
    for label, backbone in models.items():
        judge_model(report, label, backbone, rows, captions)
    write_tables(arguments, "reward_models", report.markdown(captions), report.content())


def main() -> None:
    """Read the command line."""
    parser = options(__doc__, ["cider", "bleu", "rouge_l"])
    parser.add_argument("--captioner", help="folder of a saved captioner whose samples are judged (scenes)")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.5, 1.0, 1.5])
    parser.add_argument("--num-samples", type=int, default=1, help="samples of an image at each temperature")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--judged-references", type=int, default=1, help="references of an image that are judged")
    arguments = parser.parse_args()
    counts = (arguments.num_samples, arguments.max_new_tokens, arguments.judged_references, arguments.max_images or 1)
    if min(counts) < 1 or arguments.max_images == 0:
        parser.error("numbers of images, samples, tokens and references must be at least 1")
    if min(arguments.temperatures) <= 0 or len(set(arguments.temperatures)) < len(arguments.temperatures):
        parser.error(f"--temperatures {arguments.temperatures}: expected different numbers above 0")
    run_program(run, arguments)


if __name__ == "__main__":
    main()
