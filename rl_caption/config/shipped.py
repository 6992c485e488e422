"""The recipes that the package brings, ``configs/`` of the repository: found by name from any folder."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rl_caption.options import unknown_keys

FOLDER = Path(__file__).with_name("recipes")
"""In the repository a link to ``configs/``; in an installation its files."""
CONFIGURATIONS = {
    "xe": "rl_caption.config.schema:XeConfig",
    "scst": "rl_caption.config.schema:ScstConfig",
    "evaluate": "rl_caption.config.schema:EvaluateConfig",
    "reward_model": "rl_caption.config.reward_models:RewardModelConfig",
    "ablate": "rl_caption.ablation.config:AblateConfig",
    "web": "rl_caption.config.schema:WebConfig",
    "grpo_vlm": "rl_caption.trl.config:GrpoVlmConfig",
    "judge": "rl_caption.lab.meta_evaluation.config:JudgeSetConfig",
    "retrieval": "rl_caption.lab.config:CompareRetrievalConfig",
    "curate": "rl_caption.lab.config:CurateConfig",
    "recaption": "rl_caption.lab.config:RecaptionConfig",
    "positives": "rl_caption.lab.config:PositivesConfig",
    "concreteness": "rl_caption.lab.config:ConcretenessConfig",
}
"""Program that takes ``--config`` -> ``module:Name`` of its configuration class."""
LAUNCHER_KEYS = {"compute_environment", "distributed_type"}
"""Keys of a file for ``accelerate launch --config_file``."""


def program_of(values: Mapping[str, Any]) -> str | None:
    """The program that has all keys of a configuration; ``accelerate launch`` of one for it, None if there is none."""
    if values.keys() & LAUNCHER_KEYS:
        return "accelerate launch"
    fits = (name for name, kind in CONFIGURATIONS.items() if not any(unknown_keys(values, resolve_name(kind))))
    return next(fits, None)


def shipped_configs() -> dict[str, Path]:
    """Name of each recipe, such as ``demo`` or ``reward_models/scenes_lclip``, and its file."""
    return {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in sorted(FOLDER.rglob("*.yaml"))}


def find_config(name: str | Path) -> Path:
    """The file at this path or, where there is none, the recipe that the package brings under this name.

    ``demo``, ``demo.yaml`` and ``configs/demo.yaml`` name one recipe, so that what recipes say of each other
    (``warm_start: configs/demo_xe.yaml``) holds in any working directory.

    Raises:
        FileNotFoundError: neither is there; the message lists the nearest names.
    """
    path = Path(name)
    if path.exists() and not path.is_dir():
        return path
    known = shipped_configs()
    wanted = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    if wanted not in known:
        last = {recipe.rpartition("/")[2]: recipe for recipe in known}
        nearest = ", ".join(last[found] for found in difflib.get_close_matches(wanted.rpartition("/")[2], last))
        hint = f"the nearest are {nearest}" if nearest else "rl-caption configs list names those"
        raise FileNotFoundError(f"{str(name)!r} is neither a file nor a recipe of the package: {hint}")
    return known[wanted]
