"""The recipes that the package brings, ``configs/`` of the repository: found by name
from any folder.
"""

from pathlib import Path

from rewards.base import nearest

FOLDER = Path(__file__).with_name("recipes")
"""In the repository a link to ``configs/``; in an installation its files."""


def shipped_configs() -> dict[str, Path]:
    """Name of each recipe, such as ``demo`` or ``reward_models/scenes_lclip``, and its file."""
    return {
        file.relative_to(FOLDER).with_suffix("").as_posix(): file
        for file in sorted(FOLDER.rglob("*.yaml"))
    }


def find_config(name: str | Path) -> Path:
    """The file at this path or, where there is none, the recipe that the package brings
    under this name.

    ``demo_xe``, ``demo_xe.yaml`` and ``configs/demo_xe.yaml`` name one recipe, so that
    what recipes say of each other (``base: configs/scenes_scst_cider.yaml``) holds in
    any working directory.

    Raises:
        FileNotFoundError: neither is there; the message has the nearest name.
    """
    path = Path(name)
    if path.exists() and not path.is_dir():
        return path
    recipes = shipped_configs()
    recipe = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    if recipe not in recipes:
        same = [one for one in recipes if one.endswith(f"/{recipe}")]
        raise FileNotFoundError(
            f"{str(name)!r} is neither a file nor a recipe of the package: the nearest is "
            f"{nearest(recipe, same or recipes)}"
        )
    return recipes[recipe]
