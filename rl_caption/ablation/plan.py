"""Everything about a grid that can be checked before its first run starts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
import yaml

from rl_caption.ablation.config import AblateConfig
from rl_caption.ablation.grid import Cell, as_argument, bases_of, make_cells, mistakes
from rl_caption.build import ConfigError, build_data, usable_split
from rl_caption.captioners.loading import is_captioner, weights_hash
from rl_caption.command_line import Chain
from rl_caption.config import ScstConfig, XeConfig
from rl_caption.data.base import DataModule, Row
from rl_caption.data.files import write_json
from rl_caption.data.plain_files import read_json
from rl_caption.evaluation.toolkit import SCORERS
from rl_caption.launch import requested_processes
from rl_caption.reward_models.config import RewardModelConfig
from rl_caption.run_folder import changed_keys, is_complete

logger = logging.getLogger(__name__)
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
    def init(self) -> str:
        """The starting policy: a folder, or a name on the hub."""
        return self.config.model.init or ""


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
    overrides: dict[str, list[str]]
    """Configurations of runs before the cells -> what they take of the grid's ``data``."""
    processes: dict[str, int]
    """Name of a base -> processes of each of its runs."""


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
    overrides: dict[str, list[str]] = {}
    bases = {name: _base(name, file, config, parse, overrides) for name, file in bases_of(config).items()}
    processes = {name: processes_of_a_run(config, base.config) for name, base in bases.items()}
    planned = [
        _planned(cell, bases[cell.base].config, config, processes[cell.base], parse) for cell in make_cells(config)
    ]
    _check_what_is_there(planned)
    files = [*config.reward_models, *(file for base in bases.values() for file in base.config.reward_models)]
    models = {file: parse(RewardModelConfig, ["--config", file], "train_reward_model.py").run.dir for file in files}
    missing = {file: folder for file, folder in models.items() if not is_complete(Path(folder))}
    return Plan(bases, planned, missing, overrides, processes)


def processes_of_a_run(config: AblateConfig, base: ScstConfig) -> int:
    """Processes of each run of a base: 1 without ``launch``, else see there.

    Raises:
        ConfigError: ``launch`` is not a configuration of ``accelerate launch``.
    """
    if config.launch is None:
        return 1
    try:
        in_file = requested_processes(["--config_file", config.launch, "scst.py"], Path.cwd())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"launch {config.launch!r} is no configuration of accelerate launch: {error}") from error
    return base.train.num_processes or in_file or max(torch.cuda.device_count() // config.jobs, 1)


def threads_of_a_process(cores: int, processes: int) -> int:
    """CPU threads of one of ``processes`` that share the cores, at least 1."""
    return max(cores // processes, 1)


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
        write_json(note, {"model.init": base.init, "sha256": now, "rewards": dict(rewards)})
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


def data_arguments(values: Mapping[str, Any], key: str = "data") -> list[str]:
    """What the grid's ``data`` adds to the command line of ``scst.py --config BASE``."""
    return [
        word
        for name, value in values.items()
        for word in (
            data_arguments(value, f"{key}.{name}")
            if isinstance(value, Mapping)
            else [f"--{key}.{name}={as_argument(value)}"]
        )
    ]


def _base(name: str, file: str, grid: AblateConfig, parse: Parse, overrides: dict[str, list[str]]) -> Base:
    words, split = data_arguments(grid.data), grid.split
    config: ScstConfig = parse(ScstConfig, ["--config", file, *words], "scst.py")
    chain = Chain(parse(ScstConfig, ["--config", file], "scst.py"), words)
    for first in [*grid.reward_models, *config.reward_models]:
        model: RewardModelConfig = parse(RewardModelConfig, ["--config", first], "train_reward_model.py")
        overrides.setdefault(first, chain.overrides_of(first, model))
    if config.model.init is None:
        raise ConfigError(f"{file}: model.init is not set: it is the policy that all cells start from")
    warm_start = None
    if config.warm_start is not None:
        stage: XeConfig = parse(XeConfig, ["--config", config.warm_start], "train_xe.py")
        overrides[config.warm_start] = chain.overrides_of(config.warm_start, stage)
        if not is_complete(Path(stage.run.dir)):
            warm_start = (stage, config.warm_start)
            made, init = Path(stage.run.dir) / "export" / "best", Path(config.model.init)
            if init.resolve() != made.resolve() and not is_captioner(init):
                raise ConfigError(
                    f"{file}: model.init is {config.model.init!r}, but warm_start makes {str(made)!r}: name that one"
                )
    if warm_start is None and not is_captioner(config.model.init):
        raise ConfigError(
            f"{file}: model.init {config.model.init!r} is not a saved captioner (it has no config.json), nor a name on "
            "the hub (OWNER/MODEL), and no warm_start is left that would make it: train one with train_xe.py"
        )
    if str(chain):
        logger.info("%s", chain)
    data: DataModule = build_data(config.data)
    rows = data.split(usable_split(data, split))
    if not rows:
        raise ConfigError(f"{file}: split {split!r} has no images")
    return Base(name, config, warm_start, rows)


def _planned(cell: Cell, base: ScstConfig, config: AblateConfig, processes: int, parse: Parse) -> PlannedCell:
    folder = cell.folder(Path(config.out))
    threads = base.train.threads or threads_of_a_process(os.cpu_count() or 1, config.jobs * processes)
    # What comes before the cells is made once, and not by each of them.
    arguments = ["--config", bases_of(config)[cell.base], "--warm_start=null", "--reward_models=[]"]
    arguments += data_arguments(config.data)
    arguments.append(f"--run.dir={folder / 'run'}")
    # Before the cell's own overrides, which may ask for another number.
    arguments += [f"--train.threads={threads}", *cell.arguments()]
    try:
        resolved: ScstConfig = parse(ScstConfig, arguments, f"cell {cell.system!r}: scst.py")
    except ConfigError as error:
        raise ConfigError(f"cell {cell.system!r}: {error}") from error
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
