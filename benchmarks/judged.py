"""What the programs that judge dual encoders share: their options, what these name, and where the tables go."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.studies.encoder_report import reference_metrics
from rewards.base import Reward
from rewards.clip.backbone import Backbone, load_backbone
from rl_caption.build import ConfigError, build_data, quiet_libraries, usable_split
from rl_caption.cli import find_own_modules, log_lines, parse
from rl_caption.config import DataConfig, EvaluateConfig
from rl_caption.data.base import Row
from rl_caption.data.files import write_json, write_text
from rl_caption.errors import user_errors


@dataclass(frozen=True)
class Judged:
    """Models and metrics that are judged, and the rows that they are judged on."""

    models: dict[str, Backbone]
    metrics: dict[str, Reward]
    rows: list[Row]


def options(description: str | None, metrics: Sequence[str]) -> argparse.ArgumentParser:
    """A parser of what both programs take; ``metrics`` are judged unless the user names others."""
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
    """Run a program as those of the package: log lines, and what users can mend in one line."""
    find_own_modules()
    quiet_libraries()
    with log_lines(), user_errors():
        run(arguments)


def judged(arguments: argparse.Namespace, models: list[str]) -> Judged:
    """Load ``LABEL=FOLDER`` models, make the metrics and read the rows.

    Raises:
        ConfigError: an option that names what is not there; it says which.
    """
    encoders = loaded(models, arguments.device)
    try:
        metrics = reference_metrics(arguments.metrics)
    except ValueError as error:
        raise ConfigError(f"--metrics: {error}") from error
    data = build_data(data_section(arguments.data))
    rows = list(data.split(usable_split(data, arguments.split))[: arguments.max_images])
    return Judged(encoders, metrics, rows)


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
