"""The report on an environment: everything that is missing is named with what that costs."""

import importlib
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from rl_caption.cli import preflight as doctor
from rl_caption.runtime.errors import EXTRAS, OPTIONAL, ConfigError, user_errors
from tests.training_for_tests import changed, scst_config, write_pipeline, xe_config

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def torchvision_is_not_probed(monkeypatch):
    """The probe starts a process for seconds."""
    monkeypatch.setattr(doctor, "import_error", str)


def test_a_package_that_is_missing_is_named_with_its_cost(monkeypatch, capsys):
    installed, missing = doctor.installed_version, {"peft"}

    def without(name):
        return None if name in missing else installed(name)

    monkeypatch.setattr(doctor, "installed_version", without)
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert "pip install 'rl-caption[peft]'" in printed
    assert "It can run here: rl-caption run demo" in printed
    missing.add("accelerate")
    with pytest.raises(ConfigError, match="accelerate: missing"):
        doctor.main([])


def test_the_optional_packages_are_those_of_the_project_file():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

    def names(requirements):
        return {re.match(r"[\w-]+", text)[0] for text in requirements} - {"rl-caption"}

    extras = project["optional-dependencies"]
    assert {(extra, name) for name, (extra, _) in OPTIONAL.items()} == {
        (extra, name)
        for extra in extras.keys() - {"all", "dev", "docs"}
        for name in names(extras[extra])
    }


@pytest.mark.parametrize("module", [next(iter(EXTRAS)), "accelerate"])
def test_a_program_names_the_extra_of_a_module_that_is_missing(
    module, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, f"{module}.part", None)
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(SystemExit if module in EXTRAS else ImportError), user_errors():
        importlib.import_module(f"{module}.part")
    assert (
        f"{module} not installed: pip install 'rl-caption[{EXTRAS.get(module)}]'"
        in capsys.readouterr().err
    ) == (module in EXTRAS)


def test_a_torchvision_that_does_not_load_is_told(monkeypatch):
    error = "RuntimeError: operator torchvision::nms does not exist"
    monkeypatch.setattr(doctor, "import_error", lambda: error)
    with pytest.raises(ConfigError, match=f"{error}.*rl-caption doctor --mend"):
        doctor.main([])


def test_a_pipeline_whose_later_stages_start_from_earlier_ones(tmp_path, capsys):
    xe, scst = tmp_path / "runs/xe", tmp_path / "runs/scst"
    terms = {"l_clipscore": {"kwargs": {"backbone": "none/yet/export/best"}}}
    later = scst_config(scst, xe / "export/best", **{"reward.terms": terms})
    stages = {"xe": ("xe", xe_config(xe)), "scst": ("scst", later)}
    file = write_pipeline(tmp_path, **stages)
    with pytest.raises(ConfigError, match="none/yet/export/best' is not there"):
        doctor.main(["run", str(file), "--xe.train.threads", "1"])
    said = capsys.readouterr().out.partition("\nConfiguration of ")[2]
    assert f"scst: model.init {xe / 'export/best'}, which xe makes" in said
    assert "  xe: data " in said
    words = ["run", str(file), "--scst.reward.terms", "{cider: {}}"]
    assert doctor.main(words) == 0
    assert f"It can run here: rl-caption run {file}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({}, "model.init", "start' is not there"),
        (
            {"model.init": "no/model", "model.name": "huggingface"},
            "model.init",
            "no/model",
        ),
        (
            {"data": {"format": "karpathy", "path": "none/there"}},
            "data",
            "data.path 'none/there' does not exist",
        ),
    ],
)
def test_what_a_configuration_lacks_is_said(tmp_path, changes, name, message):
    config = scst_config(tmp_path / "run", tmp_path / "start")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(changed(config, changes)))
    with pytest.raises(ConfigError, match=f"scst: {name}: .*{message}"):
        doctor.main(["scst", "--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    ("program", "word", "module"),
    [
        ("scst", "--reward.terms={bertscore: {}}", "bert_score"),
        ("scst", "--reward.terms={mine: {target: clipscore}}", "open_clip"),
        ("scst", "--reward.terms={vlm_judge: {kwargs: {endpoint: x}}}", "openai"),
        ("scst", "--model={init: a/SmolVLM, lora: {r: 4}}", "peft and num2words"),
        ("xe", "--run.trackers=[tensorboard]", "tensorboard"),
        ("xe", "--data={path: a, features_root: a.hdf5}", "h5py"),
        ("xe", "--data={format: hub, path: a/b}", "datasets"),
        ("reward_model", "--model.name=ViT-B-32", "open_clip"),
        ("reward_model", "--model={image: {encoder: x}, text: {encoder: y}}", None),
    ],
)
def test_what_a_configuration_imports_is_looked_for(program, word, module, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    stage = doctor.Stage(program, program, ["--data.format=scenes", word])
    said = [f.value for f in doctor.preflight([stage], rows=False) if f.fatal]
    expected = [] if module is None else [f"{module} not installed"]
    found = [text.partition(":")[0] for text in said if "not installed" in text]
    assert found == expected


@pytest.mark.parametrize(
    "wrapped",
    [
        ModuleNotFoundError("Could not import module 'PreTrainedModel'"),
        ConfigError("reward.terms.clipscore: it cannot be loaded"),
    ],
)
def test_a_torchvision_that_does_not_load_ends_a_program_in_one_message(
    wrapped, capsys
):
    failure = RuntimeError("operator torchvision::nms does not exist")
    with pytest.raises(SystemExit, match="1"), user_errors():
        raise wrapped from failure
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ModuleNotFoundError, match="PreTrainedModel"), user_errors():
        raise ModuleNotFoundError("Could not import module 'PreTrainedModel'")
