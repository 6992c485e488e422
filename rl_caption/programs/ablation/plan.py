"""From the configuration of a grid to its runs. Everything that can be checked is checked before
the first run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers.utils import flatten_dict

from rewards.base import Reward
from rl_caption.captioners.loading import is_captioner, weights_hash
from rl_caption.config.build import (
    ConfigError,
    build_data,
    build_reward,
    references_of,
    usable_split,
)
from rl_caption.config.schema import RewardTerm, ScstConfig
from rl_caption.data.base import Row
from rl_caption.data.files import write_json
from rl_caption.data.plain_files import read_json
from rl_caption.evaluation.metrics import words_tokenizer
from rl_caption.monitoring.judges import build_judges
from rl_caption.programs.ablation.config import AblateConfig
from rl_caption.runtime.errors import config_errors
from rl_caption.runtime.threads import cpu_threads
from rl_caption.training.run_folder import changed_keys

Parse = Callable[..., Any]
"""``rl_caption.cli.configuration.parse``: (kind, arguments, program) -> a configuration."""


@dataclass(frozen=True)
class Cell:
    """One run of the grid: a reward and overrides on the base configuration, with one seed."""

    folder: Path
    """``OUT/cells/LABEL/seedN``."""
    label: str
    """The name of its row in tables, which all seeds share."""
    seed: int
    alpha: float | None
    """None for a cell that is not of the alpha grid."""
    terms: dict[str, RewardTerm]
    overrides: dict[str, Any]
    config: ScstConfig = field(default_factory=ScstConfig)
    """Resolved by ``make_plan``."""

    @property
    def name(self) -> str:
        return f"{self.label} seed {self.seed}"

    @property
    def run(self) -> Path:
        """Folder of the SCST run."""
        return self.folder / "run"

    def arguments(self) -> list[str]:
        """What the cell adds to the command line of ``scst --config BASE``."""
        terms = {name: asdict(term) for name, term in self.terms.items()}
        changes = {"train.seed": self.seed, "reward.terms": terms} | self.overrides
        return [f"--{key}={as_argument(value)}" for key, value in changes.items()]


@dataclass(frozen=True)
class Plan:
    """A grid that is ready to run."""

    base: ScstConfig
    start: str
    """``model.init``, the starting policy: a folder, or a name on the hub."""
    rows: Sequence[Row]
    """The images of the split whose captions are scored."""
    cells: list[Cell]


def as_argument(value: Any) -> str:
    """A value of a configuration, written as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def make_cells(config: AblateConfig) -> list[Cell]:
    """All runs of a grid, seed by seed, so that a grid that is cut short has whole tables.

    ``alpha.terms`` are weighted by alpha and ``alpha.against`` by 1 - alpha; terms of weight 0 are
    left out. The L-CLIPScore paper's equation puts alpha on CIDEr, but its rows alpha = 0 (CIDEr
    alone) and alpha = 1 (L-CLIPS alone) put it on L-CLIPS, as here.
    """
    cells: list[tuple[Any, ...]] = []
    if (alpha := config.alpha) is not None:
        for label, value in zip(alpha.labels, alpha.values, strict=True):
            mixture = {}
            for terms, factor in ((alpha.terms, value), (alpha.against, round(1 - value, 12))):
                for name, term in terms.items():
                    if term.weight * factor != 0:
                        mixture[name] = replace(term, weight=term.weight * factor)
            cells.append((label, value, mixture, {}))
    cells += [(label, None, cell.terms, cell.overrides) for label, cell in config.cells.items()]
    return [
        Cell(Path(config.out) / "cells" / label / f"seed{seed}", label, seed, *rest)
        for seed in config.seeds
        for label, *rest in cells
    ]


def make_plan(grid: AblateConfig, parse: Parse) -> Plan:
    """Read and check all configurations, the data, and what is already there of the grid.

    Raises:
        ConfigError: a value is wrong (the message names the cell), or a run that is already there
            has another configuration.
        DataError: the data cannot be read, or has no such split.
        UsageError: a configuration has keys that do not exist, or values that cannot be understood.
    """
    words = ["--config", str(grid.base)]
    for key, value in flatten_dict(grid.all).items():
        words.append(f"--{key}={as_argument(value)}")
    base: ScstConfig = parse(ScstConfig, words, "rl-caption scst")
    start = base.model.init
    if start is None or not is_captioner(start):
        raise ConfigError(
            f"{grid.base}: model.init is {start!r}: expected the policy that all cells start from, "
            f"a saved captioner or a name on the hub"
        )
    source = build_data(base.data)
    rows = source.split(usable_split(source, grid.split))
    threads = base.train.threads or cpu_threads(grid.jobs)
    arguments = [*words, f"--train.threads={threads}"]
    cells = [_resolve(cell, arguments, parse) for cell in make_cells(grid)]
    return Plan(base, start, rows, cells)


def _resolve(cell: Cell, arguments: Sequence[str], parse: Parse) -> Cell:
    """The cell with its configuration, which a run that is already there has to have."""
    words = [f"--run.dir={cell.run}", *cell.arguments()]
    key = f"cell {cell.label!r}"
    with config_errors(key):
        config = parse(ScstConfig, [*arguments, *words], f"{key}: rl-caption scst")
    file = cell.run / "config.yaml"
    if file.is_file() and (keys := changed_keys(file, config)):
        raise ConfigError(
            f"{cell.name} exists with another configuration: {'; '.join(keys)}. Choose another "
            f"out, or remove "
            f"{cell.folder}"
        )
    return replace(cell, config=config)


def check_start(cell: Cell, start: str, rewards: Mapping[str, str]) -> None:
    """Write what a cell starts from into ``start.json``, or compare with what it was started from.

    ``rewards`` is term -> signature, which names the weights of a reward model.

    Raises:
        ConfigError: the starting policy or a reward has changed since.
    """
    note = cell.folder / "start.json"
    now = {"model.init": start, "sha256": weights_hash(start), "rewards": dict(rewards)}
    if not note.is_file() or not (cell.run / "config.yaml").is_file():
        write_json(note, now)  # of a cell that has not begun, all may change
        return
    before = read_json(note, ConfigError)
    if (before["sha256"], before["rewards"]) != (now["sha256"], now["rewards"]):
        raise ConfigError(
            f"{cell.name} was started on {before} and would go on with {now}: all cells of a grid "
            f"start from one "
            f"checkpoint, and each keeps its reward. Choose another out, or remove {cell.folder}"
        )


def build_rewards(
    config: AblateConfig, plan: Plan
) -> tuple[dict[str, Reward], dict[str, dict[str, str]]]:
    """Build the judges and the terms of every cell.

    Returns:
        Name of the judge -> reward, as ``evaluate`` builds it; and name of the cell -> term ->
        signature, with toy document frequencies where those are counted in training.

    Raises:
        ConfigError: which judge, or which cell and term, and why it cannot be built.
    """
    signatures: dict[str, dict[str, str]] = {cell.name: {} for cell in plan.cells}
    built: dict[str, str] = {}
    for cell in plan.cells:
        reward, words = cell.config.reward, cell.config.data.tokenizer
        for name, term in reward.terms.items():
            single = replace(reward, terms={name: replace(term, weight=1.0, schedule=None)})
            key = json.dumps([asdict(single), words], sort_keys=True)
            if key not in built:
                with config_errors(f"cell {cell.label!r}"):
                    made = build_reward(single, [["a dog"], ["a cat"]], tokenizer=words)
                built[key] = made.signature
            signatures[cell.name][name] = built[key]
    tokenizer = words_tokenizer(config.tokenizer, plan.base.data.tokenizer)
    references = references_of(plan.rows)
    return build_judges(config.judges, None, references, "judges", tokenizer), signatures
