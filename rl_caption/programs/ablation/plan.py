"""From the configuration of a grid to its runs. Everything that can be checked is checked before the first run."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers.utils import flatten_dict

from rewards.base import Reward
from rewards.registry import parameters
from rl_caption.captioners.loading import is_captioner, weights_hash
from rl_caption.config.build import (
    ConfigError,
    build_data,
    build_reward,
    references_of,
    usable_split,
)
from rl_caption.config.overrides import FOR_ALL, Chain, Parse
from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.config.schema import RewardTerm, ScstConfig, XeConfig
from rl_caption.config.shipped import find_config
from rl_caption.data.base import Row
from rl_caption.data.files import write_json
from rl_caption.data.plain_files import read_json, read_yaml
from rl_caption.evaluation.metrics import words_tokenizer
from rl_caption.monitoring.judges import build_judges
from rl_caption.programs.ablation.config import AblateConfig
from rl_caption.runtime.errors import config_errors
from rl_caption.runtime.threads import cpu_threads
from rl_caption.training.run_folder import changed_keys, is_complete

logger = logging.getLogger(__name__)

Start = TypedDict("Start", {"model.init": str, "sha256": str, "rewards": dict[str, str]})
"""``start.json`` of a cell: hash of the starting policy's weights, signatures of the reward's terms."""


@dataclass(frozen=True)
class Cell:
    """One run of the grid: a reward and overrides on a base configuration, with one seed."""

    folder: Path
    """``OUT/cells/[BASE/]LABEL/seedN``."""
    base: str
    """Name of its base configuration; "" where the grid has one."""
    label: str
    seed: int
    alpha: float | None
    """None for a cell that is not of the alpha grid."""
    terms: dict[str, RewardTerm]
    overrides: dict[str, Any]
    config: ScstConfig = field(default_factory=ScstConfig)
    """Resolved by ``make_plan``."""

    @property
    def system(self) -> str:
        """The name of its row in tables, which all seeds share: ``LABEL`` or ``BASE/LABEL``."""
        return f"{self.base}/{self.label}" if self.base else self.label

    @property
    def name(self) -> str:
        return f"{self.system} seed {self.seed}"

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
class EarlierRun:
    """A run that has to be trained before the cells: ``rl-caption PROGRAM --config FILE OVERRIDES``."""

    program: str
    file: str
    folder: Path
    overrides: list[str]


@dataclass(frozen=True)
class Base:
    """What the cells of one base configuration share."""

    name: str
    """"" where there is only one."""
    config: ScstConfig
    start: str
    """``model.init``, the starting policy: a folder, or a name on the hub."""
    warm_start: EarlierRun | None
    """The cross-entropy run that makes it, if any."""
    rows: Sequence[Row]
    """The images of the split whose captions are scored."""
    processes: int = 1
    """How many processes each training has."""


@dataclass(frozen=True)
class Plan:
    """A grid that is ready to run: bases by name, cells, and the reward models that have to be trained first."""

    bases: dict[str, Base]
    cells: list[Cell]
    reward_models: list[EarlierRun]


def as_argument(value: Any) -> str:
    """A value of a configuration, written as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def base_files(config: AblateConfig) -> dict[str, str]:
    """Name of each base -> its configuration file; a single ``base`` has the name ""."""
    return {"": config.base} if config.base is not None else dict(config.bases)


def make_cells(config: AblateConfig) -> list[Cell]:
    """All runs of a grid, seed by seed, so that a grid that is cut short has whole tables.

    ``alpha.terms`` are weighted by alpha and ``alpha.against`` by 1 - alpha; terms of weight 0 are left out. The
    L-CLIPScore paper's equation puts alpha on CIDEr, but its rows alpha = 0 (CIDEr alone) and alpha = 1 (L-CLIPS
    alone) put it on L-CLIPS, as here.
    """
    cells: list[tuple[Any, ...]] = []
    if (alpha := config.alpha) is not None:
        for label, value in zip(alpha.labels, alpha.values, strict=True):
            factors = ((alpha.terms, value), (alpha.against, round(1 - value, 12)))
            mixture = {
                name: replace(term, weight=term.weight * factor)
                for terms, factor in factors
                for name, term in terms.items()
                if term.weight * factor != 0
            }
            cells.append((label, value, mixture, {}))
    cells += [(label, None, cell.terms, cell.overrides) for label, cell in config.cells.items()]
    return [
        Cell(Path(config.out) / "cells" / base / label / f"seed{seed}", base, label, seed, *rest)
        for seed in config.seeds
        for base in base_files(config)
        for label, *rest in cells
    ]


def make_plan(config: AblateConfig, parse: Parse) -> Plan:
    """Read and check all configurations, the data, and what is already there of the grid.

    Raises:
        ConfigError: a value is wrong (the message names the cell, and what would be right), or a run that is already
            there has another configuration.
        DataError: a base's data cannot be read, or has no such split.
        UsageError: a configuration has keys that do not exist, or values that cannot be understood.
    """
    models: dict[str, EarlierRun] = {}
    bases = {
        name: _make_base(name, file, config, parse, models)
        for name, file in base_files(config).items()
    }
    cells = [_resolve(cell, bases[cell.base], config, parse) for cell in make_cells(config)]
    changed = [
        f"\n  {cell.name}: {'; '.join(keys)}"
        for cell in cells
        if (file := cell.run / "config.yaml").is_file()
        and (keys := changed_keys(file, cell.config))
    ]
    if changed:
        raise ConfigError(
            f"{len(changed)} of {len(cells)} cells exist with another configuration:{''.join(changed)}\n"
            "Choose another out, or remove the folders of these cells"
        )
    return Plan(bases, cells, [model for model in models.values() if not is_complete(model.folder)])


def _make_base(
    name: str, file: str, grid: AblateConfig, parse: Parse, models: dict[str, EarlierRun]
) -> Base:
    """Read a base configuration, add the reward models that it needs to ``models``, and find its starting policy."""
    chain = _chain(file, grid, parse)
    config: ScstConfig = parse(ScstConfig, chain.arguments, "rl-caption scst")

    def earlier(program: str, config_class: type[Any], path: str) -> EarlierRun:
        """The run of one configuration of the chain."""
        run = chain.parse(config_class, path, f"rl-caption {program}")
        folder = Path(run.run.dir)
        if not is_complete(folder):
            chain.check_alone(path, run)
        words = [
            f"{FOR_ALL}{word[2:]}" for word in chain.words_for(path, run)
        ]  # it has earlier runs, too
        return EarlierRun(program, path, folder, words)

    for path in [*grid.reward_models, *config.reward_models]:
        models.setdefault(path, earlier("reward_model", RewardModelConfig, path))
    start, warm_start = config.model.init, None
    if start is None:
        raise ConfigError(
            f"{file}: model.init is not set: it is the policy that all cells start from"
        )
    if config.warm_start is not None:
        warm_start = earlier("xe", XeConfig, config.warm_start)
    if not is_captioner(start):
        if warm_start is None or is_complete(warm_start.folder):
            raise ConfigError(
                f"{file}: model.init {start!r} is not a saved captioner (it has no config.json), nor a name on the hub "
                "(OWNER/MODEL), and no warm_start is left that would make it: train one with rl-caption xe"
            )
        export = warm_start.folder / "export" / "best"
        if Path(start).resolve() != export.resolve():
            raise ConfigError(
                f"{file}: model.init is {start!r}, but warm_start writes {str(export)!r}: set it to that"
            )
    if line := chain.log_line():
        logger.info("%s", line)
    source = build_data(config.data)
    rows = source.split(usable_split(source, grid.split))
    if not rows:
        raise ConfigError(f"{file}: split {grid.split!r} has no images")
    return Base(name, config, start, warm_start, rows, _num_processes(grid, config))


def _num_processes(grid: AblateConfig, base: ScstConfig) -> int:
    """Processes of each training of a base: 1 without ``launch``."""
    if grid.launch is None:
        return 1
    settings = read_yaml(find_config(grid.launch), ConfigError)
    in_file = settings.get("num_processes")
    if in_file is None and "distributed_type" not in settings:
        raise ConfigError(f"launch {grid.launch!r} is not a configuration of accelerate launch")
    return base.train.num_processes or in_file or max(torch.cuda.device_count() // grid.jobs, 1)


def _chain(file: str, grid: AblateConfig, parse: Parse) -> Chain:
    """A base, with the grid's ``all`` and ``data`` as command line arguments, one for each value that is no mapping."""
    flat = flatten_dict({"all": grid.all, "data": grid.data})
    words = [f"--{key}={as_argument(value)}" for key, value in flat.items() if value != {}]
    return Chain(parse, ScstConfig, ["--config", file, *words], "rl-caption scst")


def _resolve(cell: Cell, base: Base, grid: AblateConfig, parse: Parse) -> Cell:
    threads = base.config.train.threads or cpu_threads(grid.jobs * base.processes)
    # The grid, not each cell, trains what comes before; the cell's own overrides come last.
    arguments = _chain(base_files(grid)[cell.base], grid, parse).arguments
    arguments += [
        "--warm_start=null",
        "--reward_models=[]",
        f"--run.dir={cell.run}",
        f"--train.threads={threads}",
    ]
    with config_errors(f"cell {cell.system!r}"):
        config = parse(
            ScstConfig, [*arguments, *cell.arguments()], f"cell {cell.system!r}: rl-caption scst"
        )
    return replace(cell, config=config)


def check_start(cell: Cell, base: Base, rewards: Mapping[str, str]) -> None:
    """Write what a cell starts from into ``start.json``, or compare with what it was started from.

    ``rewards`` is term -> signature, which names the weights of a reward model.

    Raises:
        ConfigError: the starting policy or a reward has changed since.
    """
    note, now = cell.folder / "start.json", weights_hash(base.start)
    if (
        not note.is_file() or not (cell.run / "config.yaml").is_file()
    ):  # of a cell that has not begun, all may change
        write_json(note, {"model.init": base.start, "sha256": now, "rewards": dict(rewards)})
        return
    before = read_json(note, ConfigError, Start)
    told = before["rewards"].items()
    changed = [
        f"{term} was {was}, now {rewards[term]}" for term, was in told if rewards[term] != was
    ]
    remedy = f"Choose another out, or remove {cell.folder}"
    if changed:
        raise ConfigError(
            f"{cell.name} was started on another reward: {'; '.join(changed)}. {remedy}"
        )
    if before["sha256"] != now:
        raise ConfigError(
            f"{cell.name} was started from {before['model.init']} with weights {before['sha256'][:8]}, and "
            f"{base.start} now has {now[:8]}: all cells of a grid start from one checkpoint. {remedy}"
        )


def untrained_models(files: Sequence[str], parse: Parse) -> list[Path]:
    """Run folders of the reward models (by their configurations) that are not trained yet, and of their warm starts."""
    waiting, folders = list(files), list[Path]()
    while waiting:
        config = parse(RewardModelConfig, ["--config", waiting.pop()], "rl-caption reward_model")
        folder = Path(config.run.dir).resolve()
        if folder not in folders and not is_complete(
            folder
        ):  # a circle is refused by the program that trains them
            folders.append(folder)
            waiting += config.warm_start
    return folders


def build_rewards(
    config: AblateConfig, plan: Plan, untrained: Sequence[Path] = ()
) -> tuple[dict[str, dict[str, Reward]], dict[str, dict[str, str]]]:
    """Build the judges of every base and the terms of every cell; leave out those that need an untrained model.

    Returns:
        Name of the base -> name of the judge -> reward, as ``evaluate`` builds it; and name of the cell -> term ->
        signature, with toy document frequencies where those are counted in training.

    Raises:
        ConfigError: which judge, or which cell and term, and why it cannot be built.
    """
    signatures: dict[str, dict[str, str]] = {cell.name: {} for cell in plan.cells}
    built: dict[str, Any] = {}
    for cell in plan.cells:
        reward, words = cell.config.reward, cell.config.data.tokenizer
        cell_key = f"cell {cell.system!r}"
        for name, term in reward.terms.items():
            if _is_untrained(
                f"{cell_key}: reward.terms.{name}", term.target or name, term.kwargs, untrained
            ):
                continue
            single = replace(reward, terms={name: replace(term, weight=1.0, schedule=None)})
            key = json.dumps([asdict(single), words], sort_keys=True)
            with config_errors(cell_key):
                built[key] = (
                    built.get(key)
                    or build_reward(single, [["a dog"], ["a cat"]], tokenizer=words).signature
                )
            signatures[cell.name][name] = built[key]
    ready = {
        name: judge
        for name, judge in config.judges.items()
        if not _is_untrained(f"judges.{name}", judge.target or name, judge.kwargs, untrained)
    }
    judges: dict[str, dict[str, Reward]] = {}
    for name, base in plan.bases.items():
        references = references_of(base.rows)
        tokenizer = words_tokenizer(config.tokenizer, base.config.data.tokenizer)
        key = json.dumps(
            [tokenizer, references]
        )  # bases with the same references share their judges
        judges[name] = built[key] = built.get(key) or build_judges(
            ready, None, references, "judges", tokenizer
        )
    return judges, signatures


def _is_untrained(
    key: str, reward: str, arguments: Mapping[str, Any], untrained: Sequence[Path]
) -> bool:
    """Whether an argument is a path below what an untrained model will export; if so, the names are checked."""
    values = flatten_dict(
        dict(arguments)
    ).values()  # also those of the rewards inside length_router
    paths = [Path(value).resolve() for value in values if isinstance(value, str)]
    if not any(path.is_relative_to(run / "export" / "best") for path in paths for run in untrained):
        return False
    with config_errors(key):
        accepted = parameters(reward)
    if "kwargs" not in accepted and not set(arguments) <= set(accepted):
        raise ConfigError(
            f"{key}.kwargs has {sorted(set(arguments) - set(accepted))}: {reward} takes {accepted}"
        )
    return True
