"""Every configuration that is shipped is understood by its program, and none of them hides a misspelt key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_caption.ablation.config import AblateConfig
from rl_caption.ablation.grid import bases_of, make_cells, mistakes
from rl_caption.cli import parse
from rl_caption.config import EvaluateConfig, ScstConfig, XeConfig
from rl_caption.config_checks import ABOVE_ZERO, LOWEST, out_of_range
from rl_caption.programs import selecting_metric
from rl_caption.reward_models.config import RewardModelConfig
from rl_caption.trl_captioning.checks import ABOVE_ZERO as VLM_ABOVE_ZERO
from rl_caption.trl_captioning.checks import LOWEST as VLM_LOWEST
from rl_caption.trl_captioning.checks import mistakes as vlm_mistakes
from rl_caption.trl_captioning.config import GrpoVlmConfig

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LAUNCHERS = CONFIGS / "accelerate"
TRAINING = sorted(path for path in CONFIGS.rglob("*.yaml") if LAUNCHERS not in path.parents)


def program_of(path: Path) -> type[Any]:
    """The configuration class of a file, told by keys that only one program has."""
    keys = set(yaml.safe_load(path.read_text()))
    if keys & {"base", "bases", "cells", "alpha"}:
        return AblateConfig
    if "task" in keys:
        return RewardModelConfig
    if "trainer" in keys:
        return GrpoVlmConfig
    if keys & {"rollout", "reward", "warm_start"}:
        return ScstConfig
    if keys & {"predictions", "decode", "metrics", "out"}:
        return EvaluateConfig
    assert keys & {"train"}, f"{path}: no program reads {sorted(keys)}"
    return XeConfig


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(CONFIGS)) for path in paths]


def test_there_are_configurations() -> None:
    assert {"demo.yaml", "demo_xe.yaml", "ucm_xe.yaml", "ucm_scst_cider.yaml"} <= set(names(TRAINING))


@pytest.mark.parametrize("path", TRAINING, ids=names(TRAINING))
def test_it_parses_and_its_numbers_are_in_range(path: Path) -> None:
    config = parse(program_of(path), ["--config", str(path)], "test")
    if isinstance(config, AblateConfig):
        assert mistakes(config) == []
    elif isinstance(config, GrpoVlmConfig):
        assert vlm_mistakes(config) == []
    elif not isinstance(config, EvaluateConfig):
        assert out_of_range(config) == []
    written = yaml.safe_load(path.read_text())
    for section, values in written.items():
        for key, value in values.items() if isinstance(values, dict) else ():
            if not isinstance(value, dict | list):
                assert getattr(getattr(config, section), key) == value, f"{section}.{key}"


@pytest.mark.parametrize("path", TRAINING, ids=names(TRAINING))
def test_a_self_critical_run_starts_from_what_its_warm_start_makes(path: Path) -> None:
    config = parse(program_of(path), ["--config", str(path)], "test")
    if not isinstance(config, ScstConfig) or config.warm_start is None:
        return
    stage = parse(XeConfig, ["--config", str(CONFIGS.parent / config.warm_start)], "test")
    assert config.model.init == f"{stage.run.dir}/export/best"
    assert config.data == stage.data


@pytest.mark.parametrize("path", TRAINING, ids=names(TRAINING))
def test_a_self_critical_run_names_the_metric_that_chooses_its_export(path: Path) -> None:
    config = parse(program_of(path), ["--config", str(path)], "test")
    if isinstance(config, ScstConfig):
        assert config.monitor.best_by is not None
        metric = selecting_metric(config.monitor, config.reward.terms, config.monitor.judges or {})
        assert (metric == "val/cider") == ("cider" in config.reward.terms), "a reward without CIDEr-D may lower it"


def made_by(files: list[str]) -> set[str]:
    """What the reward models of ``files``, and those that they start from, export."""
    made: set[str] = set()
    for file in files:
        stage = parse(RewardModelConfig, ["--config", str(CONFIGS.parent / file)], "test")
        made |= {f"{stage.run.dir}/export/best"} | made_by(stage.warm_start)
    return made


@pytest.mark.parametrize("path", TRAINING, ids=names(TRAINING))
def test_models_that_a_run_reads_are_made_before_it(path: Path) -> None:
    config = parse(program_of(path), ["--config", str(path)], "test")
    if isinstance(config, ScstConfig):
        read = [term.kwargs.get("backbone") for term in config.reward.terms.values()]
        made = made_by(config.reward_models)
    elif isinstance(config, RewardModelConfig):
        read = [config.teacher.name, config.model.init, config.model.image_init, config.model.text_init]
        made = made_by(config.warm_start)
    else:
        return
    assert {folder for folder in read if folder and folder.startswith("runs/")} <= made


def test_models_that_the_documentation_names_are_made_by_a_configuration() -> None:
    shipped = [parse(program_of(path), ["--config", str(path)], "test") for path in TRAINING]
    made = {f"{config.run.dir}/export/best" for config in shipped if hasattr(config, "run")}
    pages = {page.name: page.read_text() for page in (CONFIGS.parent / "docs").glob("*.md")}
    found = {(name, folder) for name, text in pages.items() for folder in re.findall(r"runs/[\w/]+/export[\w/]*", text)}
    assert ("judging.md", "runs/scenes/lclip/export/best") in found
    assert [(name, folder) for name, folder in sorted(found) if folder not in made] == []


@pytest.mark.parametrize("path", TRAINING, ids=names(TRAINING))
def test_a_key_that_does_not_exist_is_refused(path: Path, tmp_path: Path, capsys: Any) -> None:
    config = yaml.safe_load(path.read_text())
    config.setdefault("data", {})["fromat"] = "scenes"
    (tmp_path / "misspelt.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit) as ended:
        parse(program_of(path), ["--config", str(tmp_path / "misspelt.yaml")], "test")
    assert ended.value.code == 2
    assert "data.fromat" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("ablate_*.yaml")), ids=lambda path: path.name)
def test_every_cell_of_a_grid_is_a_configuration_whose_reward_models_are_made(path: Path) -> None:
    config = parse(AblateConfig, ["--config", str(path)], "test")
    models = made_by(config.reward_models)
    for cell in make_cells(config):
        base = str(CONFIGS.parent / bases_of(config)[cell.base])
        planned = parse(ScstConfig, ["--config", base, *cell.arguments()], "test")
        assert out_of_range(planned) == []
        kwargs = [term.kwargs for term in planned.reward.terms.values()] + [j.kwargs for j in config.judges.values()]
        assert {given["backbone"] for given in kwargs if "backbone" in given} <= models


def test_the_alpha_grid_is_that_of_the_paper() -> None:
    config = parse(AblateConfig, ["--config", str(CONFIGS / "ablate_alpha.yaml")], "test")
    cells = make_cells(config)
    weights = {cell.alpha: {name: term.weight for name, term in cell.terms.items()} for cell in cells}
    assert {alpha: terms for alpha, terms in weights.items() if alpha is not None} == {
        0.0: {"cider": 1.0},
        0.3: {"l_clipscore": 0.3, "cider": 0.7},
        0.5: {"l_clipscore": 0.5, "cider": 0.5},
        0.7: {"l_clipscore": 0.7, "cider": 0.3},
        1.0: {"l_clipscore": 1.0},
    }


@pytest.mark.parametrize("path", sorted(LAUNCHERS.glob("*.yaml")), ids=lambda path: path.name)
def test_launcher_configurations_load(path: Path) -> None:
    from accelerate.commands.config import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_machines == 1
    assert config.mixed_precision == (path.stem if path.stem in ("bf16", "fp16") else "no")


def test_range_checks_name_keys_that_exist() -> None:
    for key in (*LOWEST, *ABOVE_ZERO):
        section, name = key.split(".")
        owners = [getattr(kind(), section, None) for kind in (XeConfig, ScstConfig, RewardModelConfig)]
        assert any(hasattr(owner, name) for owner in owners), f"{key} is a key of no program"
    for key in (*VLM_LOWEST, *VLM_ABOVE_ZERO):
        section, name = key.split(".")
        assert hasattr(getattr(GrpoVlmConfig(), section), name), f"{key} is a key of no program"


def test_defaults_are_in_range() -> None:
    assert vlm_mistakes(GrpoVlmConfig()) == []
    assert out_of_range(XeConfig()) == []
    assert out_of_range(ScstConfig()) == []
    assert out_of_range(RewardModelConfig()) == []


@pytest.mark.parametrize("key", sorted({*LOWEST, *ABOVE_ZERO} - {"data.num_workers"}))
def test_values_below_the_range_are_named(key: str) -> None:
    section, name = key.split(".")
    config: Any = next(
        c for c in (XeConfig(), ScstConfig(), RewardModelConfig()) if hasattr(getattr(c, section, None), name)
    )
    setattr(getattr(config, section), name, -1)
    assert any(line.startswith(f"{key} is -1: expected") for line in out_of_range(config))
