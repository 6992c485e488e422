"""From the configuration of a grid of rewards to its runs. Everything that can be checked is
checked before the first run.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from rl_caption.programs.ablation.config import AblateConfig, CellConfig
from rl_caption.programs.ablation.grid import Parse, Run, as_words, make_runs
from rl_caption.runtime.errors import config_errors
from rl_caption.runtime.threads import cpu_threads


@dataclass(frozen=True)
class Plan:
    """A grid that is ready to run."""

    base: ScstConfig
    start: str
    """``model.init``, the starting policy: a folder, or a name on the hub."""
    rows: Sequence[Row]
    """The images of the split whose captions are scored."""
    cells: Mapping[str, CellConfig]
    """Label -> reward and overrides."""
    alphas: Mapping[str, float]
    """Label of a cell of the alpha grid -> its alpha."""
    runs: list[Run]


def make_cells(config: AblateConfig) -> tuple[dict[str, CellConfig], dict[str, float]]:
    """The cells of a grid, and alpha of those of the alpha grid, by their labels.

    ``alpha.terms`` are weighted by alpha and ``alpha.against`` by 1 - alpha; terms of weight 0 are
    left out. The L-CLIPScore paper's equation puts alpha on CIDEr, but its rows alpha = 0 (CIDEr
    alone) and alpha = 1 (L-CLIPS alone) put it on L-CLIPS, as here.
    """
    cells: dict[str, CellConfig] = {}
    alphas: dict[str, float] = {}
    alpha = config.alpha
    if alpha is not None:
        alphas = dict(zip(alpha.labels, alpha.values, strict=True))
        for label, value in alphas.items():
            mixture: dict[str, RewardTerm] = {}
            for terms, factor in ((alpha.terms, value), (alpha.against, round(1 - value, 12))):
                for name, term in terms.items():
                    if term.weight * factor != 0:
                        mixture[name] = term.replace(weight=term.weight * factor)
            cells[label] = CellConfig(terms=mixture)
    return cells | config.cells, alphas


def cell_values(cell: CellConfig) -> dict[str, Any]:
    """The values of a cell by dotted key."""
    terms = {name: term.model_dump(mode="json") for name, term in cell.terms.items()}
    return {"reward.terms": terms, **cell.overrides}


def make_plan(grid: AblateConfig, parse: Parse) -> Plan:
    """Read and check all configurations, the data, and what is already there of the grid.

    Raises:
        ConfigError: a value is wrong (the message names the cell), or a run that is already there
            has another configuration.
        DataError: the data cannot be read, or has no such split.
        UsageError: a configuration has keys that do not exist, or values that cannot be understood.
    """
    words = ["--config", grid.recipe, *as_words(flatten_dict(grid.all))]
    base: ScstConfig = parse(ScstConfig, words, "rl-caption scst")
    start = base.model.init
    if start is None or not is_captioner(start):
        raise ConfigError(
            f"{grid.recipe}: model.init is {start!r}: expected the policy that all cells start from, "
            f"a saved captioner or a name on the hub"
        )
    source = build_data(base.data)
    rows = source.split(usable_split(source, grid.split))
    words.append(f"--train.threads={base.train.threads or cpu_threads(grid.jobs)}")
    cells, alphas = make_cells(grid)
    values = {label: cell_values(cell) for label, cell in cells.items()}
    runs = make_runs("scst", ScstConfig, words, values, grid.seeds, grid.out, parse)
    return Plan(base, start, rows, cells, alphas, runs)


def check_start(run: Run, start: str, rewards: Mapping[str, str]) -> None:
    """Write what a run starts from into ``start.json``, or compare with what it was started from.

    ``rewards`` is term -> signature, which names the weights of a reward model.

    Raises:
        ConfigError: the starting policy or a reward has changed since.
    """
    note = run.parent / "start.json"
    now = {"model.init": start, "sha256": weights_hash(start), "rewards": dict(rewards)}
    if not note.is_file() or not (run.folder / "config.yaml").is_file():
        write_json(note, now)  # of a run that has not begun, all may change
        return
    before = read_json(note, ConfigError)
    if (before["sha256"], before["rewards"]) != (now["sha256"], now["rewards"]):
        raise ConfigError(
            f"{run.name} was started on {before} and would go on with {now}: all cells of a grid "
            f"start from one checkpoint, and each keeps its reward. Choose another out, or remove "
            f"{run.parent}"
        )


def build_rewards(
    config: AblateConfig, plan: Plan
) -> tuple[dict[str, Reward], dict[str, dict[str, str]]]:
    """Build the judges and the terms of every cell.

    Returns:
        Name of the judge -> reward, as ``evaluate`` builds it; and label of the cell -> term ->
        signature, with toy document frequencies where those are counted in training.

    Raises:
        ConfigError: which judge, or which cell and term, and why it cannot be built.
    """
    signatures: dict[str, dict[str, str]] = {}
    built: dict[str, str] = {}
    for run in plan.runs:
        if run.label in signatures:  # of another seed
            continue
        signatures[run.label] = {}
        reward, words = run.config.reward, run.config.data.tokenizer
        for name, term in reward.terms.items():
            single = reward.replace(terms={name: term.replace(weight=1.0, schedule=None)})
            key = json.dumps([single.model_dump(mode="json"), words], sort_keys=True)
            if key not in built:
                with config_errors(f"cell {run.label!r}"):
                    made = build_reward(single, [["a dog"], ["a cat"]], tokenizer=words)
                built[key] = made.signature
            signatures[run.label][name] = built[key]
    tokenizer = words_tokenizer(config.tokenizer, plan.base.data.tokenizer)
    references = references_of(plan.rows)
    return build_judges(config.judges, None, references, "judges", tokenizer), signatures
