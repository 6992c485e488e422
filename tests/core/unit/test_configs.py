"""Every configuration that is shipped is understood by its program, and none of them hides a
misspelt key.
"""

from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml

from rewards.registry import load
from rl_caption.cli import configs, configuration
from rl_caption.cli.configuration import parse
from rl_caption.cli.programs import PROGRAMS as CLI_PROGRAMS
from rl_caption.cli.stages import (
    ENCODER,
    Stage,
    make_stages,
    read_pipeline,
    starts_from,
)
from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.config.schema import ScstConfig, XeConfig
from rl_caption.config.shipped import find_config, shipped_configs
from rl_caption.programs.ablation.config import AblateConfig
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
def program_of(path: Path) -> type[Any]:
    """The configuration class of a recipe."""
    program = configuration.program_of(configuration.read_file(path))
    config: type[Any] = resolve_name(str(CLI_PROGRAMS[str(program)].config))
    return config


@cache
def parsed(path: Path | str) -> Any:
    path = CONFIGS.parent / path
    return parse(program_of(path), ["--config", str(path)], "test")


@cache
def stages_of(pipeline: str) -> list[Stage]:
    return make_stages(pipeline)[0]


def starts(stage: Stage) -> set[str]:
    """The exports that a stage reads."""
    values = (str(value).removeprefix(ENCODER) for value in stage.values.values())
    return {
        value for value in values if value.startswith("runs/") and "/export/" in value
    }


@pytest.mark.parametrize(
    "path", TRAINING, ids=lambda path: str(path.relative_to(CONFIGS))
)
def test_a_recipe_parses_and_is_a_stage_of_a_pipeline_where_it_starts_from_another(
    path: Path,
) -> None:
    config, written = parsed(path), yaml.safe_load(path.read_text())
    for section, values in written.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if not isinstance(value, dict | list):
                found = getattr(config, section)
                found = found[key] if isinstance(found, dict) else getattr(found, key)
                assert found == value, f"{section}.{key}"
    if isinstance(config, XeConfig | ScstConfig | RewardModelConfig | AblateConfig):
        staged = [stage.config for file in PIPELINES for stage in stages_of(file.stem)]
        program = "ablate" if isinstance(config, AblateConfig) else "scst"
        assert config in staged or not starts(Stage("", program, [], config))


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_what_a_stage_starts_from_is_made_before_and_the_reward_chooses_the_best(
    path: Path,
) -> None:
    made: set[str] = set()
    for stage in stages_of(path.stem):
        assert starts(stage) <= made
        if hasattr(stage.config, "run"):
            made |= {
                f"{stage.config.run.dir}/export/{which}" for which in ("best", "last")
            }
        if stage.program != "scst":
            continue
        monitor, terms = stage.config.monitor, stage.config.reward.terms
        for name, term in (terms | (monitor.judges or {})).items():
            assert load(term.target or name)
        assert monitor.best_by is not None
        assert (monitor.best_by == "val/cider") == ("cider" in terms), (
            "a reward without CIDEr-D may lower it"
        )


@pytest.mark.parametrize("path", PIPELINES, ids=lambda path: path.stem)
def test_every_pipeline_can_be_made_and_be_sent_elsewhere(
    path: Path, tmp_path: Path
) -> None:
    names = list(read_pipeline(path.stem))
    stages, _ = make_stages(path.stem, ["--run.root", str(tmp_path)])
    assert [stage.folder for stage in stages] == [tmp_path / name for name in names]
    for number, stage in enumerate(stages):
        for source in starts_from(stage, stages[:number]):
            assert source.program != "ablate"
        for key, value in stage.values.items():
            assert not ("/export/" in str(value) and str(value).startswith("runs/")), (
                key
            )


def test_recipes_and_what_they_name_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {
        str(path.relative_to(CONFIGS).with_suffix("")): path
        for path in CONFIGS.rglob("*.yaml")
    }
    assert {name: file.read_text() for name, file in shipped_configs().items()} == {
        name: path.read_text() for name, path in names.items()
    }
    for path in TRAINING:
        written = yaml.safe_load(path.read_text())
        if "recipe" in written:
            assert find_config(written["recipe"]).samefile(
                CONFIGS.parent / written["recipe"]
            )
    Path("demo_scst").mkdir()
    for name in ("demo_scst", "demo_scst.yaml", "./configs/demo_scst.yaml"):
        assert parse(ScstConfig, ["--config", name], "test") == parsed(
            "configs/demo_scst.yaml"
        )
    Path("demo_scst.yaml").write_text("run: {dir: mine}")
    assert (
        parse(ScstConfig, ["--config", "demo_scst.yaml"], "test").run.dir == "mine"
    ), "a file that is there wins"


def test_recipes_are_listed_with_their_commands_and_shown(capsys: Any) -> None:
    assert configs.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    commands = [line for line in lines[:-2] if line[0] != " "]
    assert {line.split()[-1] for line in commands} == shipped_configs().keys()
    assert {"rl-caption run own", "rl-caption scst --config demo_scst"} <= {*commands}
    assert all(path.read_text().startswith("# ") for path in shipped_configs().values())
    assert configs.main(["show", "demo"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "demo.yaml").read_text()


def test_coco_is_evaluated_as_in_the_literature() -> None:
    """self-critical.pytorch compares beams by the sum of their log-probabilities, 5 of them and 20
    words.
    """
    found = parsed("configs/coco_evaluate.yaml").decode
    beams = (found.num_beams, found.length_penalty, found.max_new_tokens)
    assert beams == (5, 0.0, 20)


@pytest.mark.parametrize(
    ("pipeline", "grid"),
    [("scenes", "objectives"), ("coco", "alpha"), ("coco", "rewards_vinvl")],
)
def test_every_cell_of_a_grid_is_a_configuration_whose_reward_models_are_made(
    pipeline: str, grid: str
) -> None:
    config = stage_config(pipeline, grid)
    configs = [stage.config for stage in stages_of(pipeline)]
    models = {
        f"{other.run.dir}/export/best" for other in configs if hasattr(other, "run")
    }
    base = str(CONFIGS.parent / str(config.recipe))
    runs = make_runs(
        config.replace(out="nowhere"), ScstConfig, ["--config", base], parse
    )
    for planned in (run.config for run in runs):
        kwargs = [term.kwargs for term in planned.reward.terms.values()] + [
            j.kwargs for j in config.judges.values()
        ]
        assert {given["backbone"] for given in kwargs if "backbone" in given} <= models


@pytest.mark.parametrize("pipeline", ["scenes", "coco"])
def test_the_alpha_grid_is_that_of_the_paper(pipeline: str) -> None:
    weights = {
        label: {name: term.weight for name, term in cell.terms.items()}
        for label, cell in stage_config(pipeline, "alpha").cells.items()
        if label.startswith("alpha")
    }
    assert weights == {
        "alpha_0": {"cider": 1.0},
        "alpha_03": {"l_clipscore": 0.3, "cider": 0.7},
        "alpha_05": {"l_clipscore": 0.5, "cider": 0.5},
        "alpha_07": {"l_clipscore": 0.7, "cider": 0.3},
        "alpha_1": {"l_clipscore": 1.0},
    }
