"""Everything about a grid that can be checked before its first run starts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from rl_caption.ablation.config import AblateConfig
from rl_caption.ablation.grid import Cell, bases_of, make_cells, mistakes
from rl_caption.build import ConfigError, build_data, usable_split
from rl_caption.config import ScstConfig, XeConfig
from rl_caption.config_checks import out_of_range
from rl_caption.data.base import DataModule, Row
from rl_caption.data.files import write_json
from rl_caption.data.plain_files import read_json
from rl_caption.evaluation.toolkit import SCORERS
from rl_caption.reward_models.config import RewardModelConfig
from rl_caption.run_folder import changed_keys, is_complete

Parse = Callable[[type[Any], Sequence[str], str], Any]
"""``rl_caption.cli.parse``: class of the configuration, arguments, name of the program in messages."""


@dataclass(frozen=True)
class Base:
    """What the cells of one base configuration share.

    Attributes:
        name: "" where there is only one.
        config: of the SCST run; ``model.init`` is the starting policy.
        warm_start: the cross-entropy run that makes it, and its file, where it has to be run first.
        rows: of the split on which captions are judged.
    """

    name: str
    config: ScstConfig
    warm_start: tuple[XeConfig, str] | None
    rows: Sequence[Row]

    @property
    def init(self) -> Path:
        """Folder of the starting policy."""
        return Path(self.config.model.init or "")


@dataclass(frozen=True)
class PlannedCell:
    """A cell, its resolved configuration, and where it lives."""

    cell: Cell
    config: ScstConfig
    folder: Path

    @property
    def run(self) -> Path:
        """Folder of the SCST run."""
        return Path(self.config.run.dir)

    @property
    def name(self) -> str:
        """For messages: label and seed."""
        return f"{self.cell.system} seed {self.cell.seed}"

    @property
    def done(self) -> bool:
        """Whether its training reached its end."""
        return is_complete(self.run)


@dataclass(frozen=True)
class Plan:
    """A grid that is ready to run."""

    bases: dict[str, Base]
    cells: list[PlannedCell]
    reward_models: dict[str, str]
    """Configurations of the reward models that have to be trained first -> their run folders."""


def make_plan(config: AblateConfig, parse: Parse) -> Plan:
    """Read and check all configurations, and look at what is there of the grid; rewards are checked by
    ``rl_caption.ablation.rewards``.

    Raises:
        ConfigError: what is wrong, in which cell, and what would be right; also where a run that is already there was
            made with another configuration.
        DataError: a base's data cannot be read, or has no such split.
        UsageError: a configuration has keys that do not exist, or values that cannot be understood.
    """
    wrong = mistakes(config) + [
        f"metrics has {name!r}: known are {', '.join(SCORERS)}" for name in config.metrics if name not in SCORERS
    ]
    if wrong:
        raise ConfigError("; ".join(wrong))
    bases = {name: _base(name, file, config.split, parse) for name, file in bases_of(config).items()}
    planned = [_planned(cell, bases[cell.base].config, config, parse) for cell in make_cells(config)]
    _check_what_is_there(planned)
    files = [*config.reward_models, *(file for base in bases.values() for file in base.config.reward_models)]
    models = {file: parse(RewardModelConfig, ["--config", file], "train_reward_model.py").run.dir for file in files}
    missing = {file: folder for file, folder in models.items() if not is_complete(Path(folder))}
    return Plan(bases, planned, missing)


def threads_of_a_job(cores: int, jobs: int) -> int:
    """CPU threads of one of ``jobs`` trainings that share the cores, at least 1."""
    return max(cores // jobs, 1)


def weights_hash(model: Path) -> str:
    """SHA-256 of a saved captioner's weights."""
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


_Start = TypedDict("_Start", {"model.init": str, "sha256": str, "rewards": NotRequired[dict[str, str]]})
"""``start.json``."""


def fix_start(cell: PlannedCell, base: Base, rewards: Mapping[str, str]) -> None:
    """Note what a cell starts from, or compare it with what it was started from.

    Args:
        cell: to be run, gone on with, or kept.
        base: of the cell.
        rewards: term -> signature (``check_rewards``), which names the weights of a reward model.

    Raises:
        ConfigError: the starting policy or a reward has changed since.
    """
    note, now = cell.folder / "start.json", weights_hash(base.init)
    if not note.is_file():
        write_json(note, {"model.init": str(base.init), "sha256": now, "rewards": dict(rewards)})
        return
    before = read_json(note, ConfigError, _Start)
    noted = before.get("rewards", {})  # grids of earlier versions have none
    changed = [f"{term} was {was}, now {rewards[term]}" for term, was in noted.items() if rewards[term] != was]
    if changed:
        raise ConfigError(
            f"{cell.name} was started on another reward: {'; '.join(changed)}. Choose another out, or remove "
            f"{cell.folder}"
        )
    if before["sha256"] != now:
        raise ConfigError(
            f"{cell.name} was started from {before['model.init']} with weights {before['sha256'][:8]}, and "
            f"{base.init} now has {now[:8]}: all cells of a grid start from one checkpoint. Choose another out, or "
            f"remove {cell.folder}"
        )


def _base(name: str, file: str, split: str, parse: Parse) -> Base:
    config: ScstConfig = parse(ScstConfig, ["--config", file], "scst.py")
    if config.model.init is None:
        raise ConfigError(f"{file}: model.init is not set: it is the policy that all cells start from")
    warm_start = None
    if config.warm_start is not None:
        stage: XeConfig = parse(XeConfig, ["--config", config.warm_start], "train_xe.py")
        if not is_complete(Path(stage.run.dir)):
            warm_start = (stage, config.warm_start)
            made, init = Path(stage.run.dir) / "export" / "best", Path(config.model.init)
            if init.resolve() != made.resolve() and not (init / "model.safetensors").is_file():
                raise ConfigError(
                    f"{file}: model.init is {config.model.init!r}, but warm_start makes {str(made)!r}: name that one"
                )
    if warm_start is None and not (Path(config.model.init) / "model.safetensors").is_file():
        raise ConfigError(
            f"{file}: model.init {config.model.init!r} is not a saved captioner, and no warm_start is left that would "
            "make it: train one with train_xe.py"
        )
    data: DataModule = build_data(config.data)
    rows = data.split(usable_split(data, split))
    if not rows:
        raise ConfigError(f"{file}: split {split!r} has no images")
    return Base(name, config, warm_start, rows)


def _planned(cell: Cell, base: ScstConfig, config: AblateConfig, parse: Parse) -> PlannedCell:
    folder = cell.folder(Path(config.out))
    threads = base.train.threads or threads_of_a_job(os.cpu_count() or 1, config.jobs)
    # What comes before the cells is made once, and not by each of them.
    arguments = ["--config", bases_of(config)[cell.base], "--warm_start=null", "--reward_models=[]"]
    arguments.append(f"--run.dir={folder / 'run'}")
    # Before the cell's own overrides, which may ask for another number.
    arguments += [f"--train.threads={threads}", *cell.arguments()]
    resolved: ScstConfig = parse(ScstConfig, arguments, f"cell {cell.system!r}: scst.py")
    wrong = out_of_range(resolved)
    if wrong:
        raise ConfigError(f"cell {cell.system!r}: {'; '.join(wrong)}")
    return PlannedCell(cell, resolved, folder)


def _check_what_is_there(cells: Sequence[PlannedCell]) -> None:
    changed = []
    for planned in cells:
        saved = planned.run / "config.yaml"
        if saved.is_file():
            differences = changed_keys(saved, planned.config)
            if differences:
                changed.append(f"{planned.name}: {'; '.join(differences)}")
    if changed:
        raise ConfigError(
            f"{len(changed)} of {len(cells)} cells are there with another configuration:\n  "
            + "\n  ".join(changed)
            + "\nChoose another out, or remove the folders of these cells"
        )


def plain(config: ScstConfig) -> dict[str, Any]:
    """The configuration as the YAML file that ``scst.py --config`` takes."""
    return json.loads(json.dumps(asdict(config)))
