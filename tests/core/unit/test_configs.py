"""Every configuration that is shipped is understood by its program, and none of them
hides a misspelt key.
"""

from functools import cache
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

from rl_caption.cli import configs, configuration
from rl_caption.cli.configuration import parse
from rl_caption.cli.programs import PROGRAMS as CLI_PROGRAMS
from rl_caption.cli.stages import (
    ENCODER,
    make_stages,
)
from rl_caption.config.schema import ScstConfig
from rl_caption.config.shipped import find_config, shipped_configs
from rl_caption.programs.ablation.grid import make_runs
from tests.training_for_tests import stage_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
LAUNCHERS = CONFIGS / "accelerate"
PIPELINES = sorted(
    path for path in CONFIGS.glob("*.yaml") if "\nstages:" in path.read_text()
)
TRAINING = sorted(
    path
    for path in CONFIGS.rglob("*.yaml")
    if LAUNCHERS not in path.parents and path not in PIPELINES
)


@cache
def program_of(path):
    """The configuration class of a recipe."""
    command = configuration.command_of(configuration.read_file(path))
    config = resolve_name(str(CLI_PROGRAMS[str(command).split()[1]].config))
    return config


@cache
def parsed(path):
    path = CONFIGS.parent / path
    return parse(program_of(path), ["--config", str(path)], "test")


@cache
def stages_of(pipeline):
    return make_stages(pipeline)[0]


def starts(stage):
    """The exports that a stage reads."""
    values = (str(value).removeprefix(ENCODER) for value in stage.values.values())
    return {
        value for value in values if value.startswith("runs/") and "/export/" in value
    }


@pytest.mark.parametrize(
    "path", TRAINING, ids=lambda path: str(path.relative_to(CONFIGS))
)
def test_a_recipe_parses_and_hides_no_misspelt_key(path):
    config, written = parsed(path), yaml.safe_load(path.read_text())
    for section, values in written.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if not isinstance(value, dict | list):
                found = getattr(config, section)
                found = found[key] if isinstance(found, dict) else getattr(found, key)
                assert found == value, f"{section}.{key}"


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_what_a_stage_starts_from_is_made_before(path):
    made = set()
    for stage in stages_of(path.stem):
        assert starts(stage) <= made
        if hasattr(stage.config, "run"):
            export = f"{stage.config.run.dir}/export"
            made |= {f"{export}/best", f"{export}/last"}


def test_recipes_and_what_they_name_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = {path.stem: path for path in CONFIGS.rglob("*.yaml")}
    shipped = shipped_configs()
    assert {Path(name).name for name in shipped} == paths.keys()
    for path in TRAINING:
        recipe = yaml.safe_load(path.read_text()).get("recipe")
        if recipe is not None:
            assert find_config(recipe).samefile(CONFIGS.parent / recipe)
    Path("demo_scst").mkdir()
    expected = parsed("configs/demo_scst.yaml")
    for name in ("demo_scst", "demo_scst.yaml", "./configs/demo_scst.yaml"):
        assert parse(ScstConfig, ["--config", name], "test") == expected
    Path("demo_scst.yaml").write_text("run: {dir: mine}")
    own = parse(ScstConfig, ["--config", "demo_scst.yaml"], "test")
    assert own.run.dir == "mine", "a file that is there wins"


def test_recipes_are_listed_with_their_commands_and_shown(capsys):
    assert configs.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines[:-2] if line[0] != " "]
    assert {line.split()[-1] for line in commands} == shipped_configs().keys()
    assert {"rl-caption run own", "rl-caption scst --config demo_scst"} <= {*commands}
    assert all(path.read_text().startswith("# ") for path in shipped_configs().values())
    assert configs.main(["show", "demo"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "demo.yaml").read_text()
    with pytest.raises(FileNotFoundError, match="'show' is neither"):
        configs.main(["show"])


def test_coco_is_evaluated_as_in_the_literature():
    """self-critical.pytorch compares beams by the sum of their log-probabilities, 5 of
    them and 20 words.
    """
    found = parsed("configs/coco_evaluate.yaml").decode
    beams = (found.num_beams, found.length_penalty, found.max_new_tokens)
    assert beams == (5, 0.0, 20)


@pytest.mark.parametrize(
    ("pipeline", "grid"),
    [("scenes", "objectives"), ("coco", "alpha"), ("coco", "rewards_vinvl")],
)
def test_every_cell_of_a_grid_is_a_configuration_whose_reward_models_are_made(
    pipeline, grid
):
    config = stage_config(pipeline, grid)
    configs = [stage.config for stage in stages_of(pipeline)]
    models = {
        f"{other.run.dir}/export/best" for other in configs if hasattr(other, "run")
    }
    base = str(CONFIGS.parent / str(config.recipe))
    runs = make_runs(config.replace(out="nowhere"), ["--config", base], parse)
    for planned in (run.config for run in runs):
        kwargs = [term.kwargs for term in planned.reward.terms.values()] + [
            j.kwargs for j in config.judges.values()
        ]
        assert {given["backbone"] for given in kwargs if "backbone" in given} <= models
