"""The rewards of a grid, those that are trained on and those that judge: checked before, and built, for all cells."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewards.base import Reward
from rewards.registry import parameters
from rl_caption.ablation.config import AblateConfig
from rl_caption.ablation.plan import Base, Parse, PlannedCell
from rl_caption.build import ConfigError, build_reward, references_of
from rl_caption.config import RewardConfig
from rl_caption.hacking.judges import build_judges
from rl_caption.reward_models.config import RewardModelConfig
from rl_caption.run_folder import is_complete

TOY_REFERENCES = [["a dog"], ["a cat"]]


def runs_to_come(files: Sequence[str], parse: Parse) -> list[Path]:
    """Folders of the runs of reward models that are not there yet, those that come before others included.

    Args:
        files: configurations of reward models.
        parse: ``rl_caption.cli.parse``.
    """
    waiting, seen, found = list(files), set[str](), []
    while waiting:
        file = waiting.pop()
        if file in seen:  # a circle is refused by the program that trains them
            continue
        seen.add(file)
        config: RewardModelConfig = parse(RewardModelConfig, ["--config", file], "train_reward_model.py")
        folder = Path(config.run.dir)
        if not is_complete(folder):
            found.append(folder.resolve())
            waiting += config.warm_start
    return found


def check_names(cells: Sequence[PlannedCell], config: AblateConfig) -> None:
    """Refuse names and arguments of rewards that do not exist; no reward is built.

    Raises:
        ConfigError: which cell or judge, and what would be right.
    """
    asked = {f"judges.{name}": (judge.target or name, judge.kwargs) for name, judge in config.judges.items()}
    for planned in cells:
        for name, term in planned.config.reward.terms.items():
            asked[f"cell {planned.cell.system!r}: reward.terms.{name}"] = (term.target or name, term.kwargs)
    for key, (name, arguments) in asked.items():
        try:
            known = parameters(name)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
        unknown = sorted(set(arguments) - set(known))
        if unknown and "kwargs" not in known:
            raise ConfigError(f"{key}.kwargs has {unknown}: {name} takes {known}")
    for name in config.judges:
        if not name.isprintable() or "|" in name or not name.strip():
            raise ConfigError(f"judges has the name {name!r}: expected a heading for a table, without |")


def check_rewards(cells: Sequence[PlannedCell], to_come: Sequence[Path] = ()) -> dict[str, dict[str, str]]:
    """Build every term of every cell once, with toy document frequencies where they are counted in training.

    Args:
        cells: of the grid.
        to_come: ``runs_to_come``; a term that needs what one of them will export is left out.

    Returns:
        Name of the cell -> term -> signature.

    Raises:
        ConfigError: which cell, which term, and why it cannot be built.
    """
    seen: dict[str, str] = {}
    found: dict[str, dict[str, str]] = {}
    for planned in cells:
        reward = planned.config.reward
        for name, term in reward.terms.items():
            place = f"cell {planned.cell.system!r}: "
            if _is_to_come(f"{place}reward.terms.{name}.kwargs", term.kwargs, to_come):
                continue
            key = json.dumps([name, term.target, term.kwargs, reward.df, reward.eos], sort_keys=True)
            if key not in seen:
                alone: RewardConfig = replace(reward, terms={name: replace(term, weight=1.0)})
                try:
                    seen[key] = build_reward(alone, TOY_REFERENCES).signature
                except ConfigError as error:
                    raise ConfigError(f"{place}{error}") from error
            found.setdefault(planned.name, {})[name] = seen[key]
    return found


def make_judges(
    config: AblateConfig, bases: Mapping[str, Base], to_come: Sequence[Path] = ()
) -> dict[str, dict[str, Reward]]:
    """Build the judges of each base, as ``evaluate.py`` does; bases with the same references share theirs.

    Args:
        config: of the grid.
        bases: name -> base, whose rows are judged.
        to_come: as in ``check_rewards``.

    Returns:
        Name of the base -> name of the judge -> reward.

    Raises:
        ConfigError: which judge, and why it cannot be built.
    """
    ready = {
        name: judge
        for name, judge in config.judges.items()
        if not _is_to_come(f"judges.{name}.kwargs", judge.kwargs, to_come)
    }
    made: list[tuple[list[list[str]], dict[str, Reward]]] = []
    found = {}
    for name, base in bases.items():
        references = references_of(base.rows)
        judges = next((known for texts, known in made if texts == references), None)
        if judges is None:
            judges = build_judges(ready, None, references, key="judges")
            made.append((references, judges))
        found[name] = judges
    return found


def _is_to_come(key: str, arguments: Mapping[str, Any], to_come: Sequence[Path]) -> bool:
    """Whether an argument is a path below what a run to come exports.

    Raises:
        ConfigError: it is in the folder of such a run, but not below its export.
    """
    waits = False
    for name, value in arguments.items():
        path = Path(value).resolve() if isinstance(value, str) else None
        for run in to_come:
            if path is None or not path.is_relative_to(run):
                continue
            export = run / "export" / "best"
            if not path.is_relative_to(export):
                raise ConfigError(f"{key}.{name} is {value!r}: the run {run}, yet to be trained, exports {export}")
            waits = True
    return waits
