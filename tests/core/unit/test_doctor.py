"""The report on an environment: everything that is missing is named with what that costs."""

import importlib
import importlib.metadata
import re
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import yaml

from rl_caption.captioners.loading import load_captioner
from rl_caption.cli import doctor
from rl_caption.runtime.errors import EXTRAS, OPTIONAL, user_errors
from tests.captioners_for_tests import tiny_captioner
from tests.training_for_tests import changed, files, scst_config
from tests.vlm_families_for_tests import photo_rows, save_vlm

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def torchvision_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe starts a process for seconds."""
    monkeypatch.setattr(doctor, "torchvision_error", str)


def line_after(report: str, name: str) -> str:
    """The indented cost under the line that starts with ``name``."""
    lines = report.splitlines()
    (index,) = [index for index, line in enumerate(lines) if line.strip().startswith(name)]
    return lines[index + 1].strip()


def test_complete_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    report = capsys.readouterr().out
    for name in ("Python", "torch", "torchvision", "transformers", "accelerate", "jsonargparse", "pycocoevalcap"):
        assert f"\n  {name} " in "\n" + report
    assert f" {importlib.metadata.version('torch')}" in report
    assert f"{importlib.metadata.version('torchvision')}: loads" in report
    assert "accelerate launch --multi_gpu --num_processes 2 " in report


@pytest.mark.parametrize(("package", "code"), [("accelerate", 1), ("peft", 0)])
def test_a_package_that_is_missing_is_named_with_its_cost(package, code, monkeypatch, capsys):
    installed = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name == package else installed(name))
    assert doctor.main([]) == code
    report = capsys.readouterr().out
    cost = "nothing trains" if code else "pip install 'rl-caption[peft]'"
    assert cost in line_after(report, f"{package} ")
    assert ("The main job cannot run here: accelerate." in report) == bool(code)
    assert ("pip install" if code else "rl-caption scst --config demo") in report.splitlines()[-1]


def test_the_packages_are_those_of_the_project_file() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.match(r"[\w-]+", text)[0] for text in requirements} - {"rl-caption"}

    assert set(doctor.NEEDED) == names(project["dependencies"])
    extras = project["optional-dependencies"]
    assert {(extra, name) for name, extra, _ in OPTIONAL.values()} == {
        (extra, name) for extra in extras.keys() - {"all", "dev", "docs"} for name in names(extras[extra])
    }


@pytest.mark.parametrize("module", [next(iter(EXTRAS)), "accelerate"])
def test_a_program_names_the_extra_of_a_module_that_is_missing(module, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, f"{module}.part", None)
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(SystemExit if module in EXTRAS else ImportError), user_errors():
        importlib.import_module(f"{module}.part")
    assert (f"{module} not installed: pip install 'rl-caption[{EXTRAS.get(module)}]'" in capsys.readouterr().err) == (
        module in EXTRAS
    )


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    "error", ["", "RuntimeError: operator torchvision::nms does not exist", "ImportError: a library"]
)
def test_torchvision(error, installed, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "torchvision_error", lambda: error)
    versions = {package: doctor.installed_version(package) for package in (*doctor.NEEDED, *doctor.OPTIONAL)}
    versions["torchvision"] = "0.26" if installed else None
    monkeypatch.setattr(doctor, "installed_version", versions.get)
    (finding,) = doctor.torchvision_findings()
    assert error in finding.value or not installed
    assert finding.fatal == bool(finding.cost) == (installed and bool(error))
    assert ("scripts/torchvision_remedy.py" in finding.remedy) == (installed and "operator torchvision::" in error)
    assert bool(doctor.doctor()) == finding.fatal
    assert not finding.fatal or finding.remedy in capsys.readouterr().out.splitlines()[-1]


def test_what_is_missing_besides_packages_is_named_with_its_cost(tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage("/")._replace(free=int(1e9))
    monkeypatch.setattr("rl_caption.cli.doctor.shutil.disk_usage", lambda folder: usage)
    monkeypatch.setattr(doctor, "TAGGER_DATA", "nowhere_eng")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.main([]) == 0, "none of it is fatal"
    report = capsys.readouterr().out
    for name, cost in (
        ("Java ", "METEOR, SPICE and the PTB tokenizer are left out of evaluate"),
        ("C++ compiler", "DeepSpeed cannot build its own operators"),
        ("NLTK tagger", "nowhere_eng"),
        ("free disk space  1.0 GB", "a checkpoint"),
    ):
        assert line_after(report, name).startswith("-> ")
        assert cost in line_after(report, name)


def test_missing_jar_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = tmp_path / "pycocoevalcap"
    for file in ("__init__.py", "meteor/meteor-1.5.jar", "spice/spice-1.0.jar"):
        (toolkit / file).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / file).write_text("")
    monkeypatch.delitem(sys.modules, "pycocoevalcap", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {finding.name: finding for finding in doctor.java_findings()}
    assert found["METEOR"] == doctor.Finding("METEOR", "meteor-1.5.jar")
    assert found["PTB tokenizer"].value == "missing: stanford-corenlp-3.4.1.jar"
    assert found["SPICE"].value == "missing: stanford-corenlp-3.6.0.jar, stanford-corenlp-3.6.0-models.jar"
    assert all(found[name].cost and not found[name].fatal for name in ("PTB tokenizer", "SPICE"))


def test_an_unknown_argument_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--fast"])
    assert ended.value.code == 2
    assert "--fast" in capsys.readouterr().err


TERMS = {"cider": {"weight": 1.0}, "repetition": {"weight": 1e-3}}


def report_on(folder: Path, capsys: pytest.CaptureFixture[str], **changes: object) -> tuple[int, str]:
    """Exit code and section on a tiny run whose captioner is ``folder/start``."""
    config = scst_config(folder / "run", folder / "start", **{"reward.terms": TERMS, "train.threads": None})
    (folder / "run.yaml").write_text(yaml.safe_dump(changed(config, changes)))
    code = doctor.main(["--config", str(folder / "run.yaml"), "--rollout.num_samples", "3"])
    return code, capsys.readouterr().out.partition("\nConfiguration\n")[2]


def test_configuration_shows_the_scales_of_its_reward_and_writes_nothing(tmp_path, capsys):
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, tmp_path / "start")
    before = files(tmp_path) | {"run.yaml"}
    code, report = report_on(tmp_path, capsys)
    assert code == 0, report
    assert files(tmp_path) == before
    rows = {line.split()[0]: line.split() for line in report.splitlines() if line.strip()}
    assert rows["data"] == ["data", "32", "training", "images"]
    for name, row_range in (("cider", "0 to 10"), ("repetition", "-1 to 0")):
        assert " ".join(rows[name][1:4]) == row_range
        assert "-" not in rows[name], "both references and samples were scored"
    assert "in cider, but only by" in report
    assert "in repetition" in report
    assert "The main job can run here." in report


def test_configuration_of_a_vision_language_model_tells_what_a_step_holds(tmp_path, capsys, monkeypatch):
    save_vlm("qwen2_5_vl", tmp_path / "start")
    code, report = report_on(tmp_path, capsys, **{"train.micro_batch_size": 2})
    assert code == 0, report
    assert "memory of a step" in report
    captioner = load_captioner(tmp_path / "start")
    rows = photo_rows()[:1]
    length = captioner.preprocess(rows)["input_ids"].shape[1] + 8
    assert (
        captioner.key_value_bytes(rows, 3, 8) == 3 * length * 2 * 2 * (2 * 8) * 4
    )  # keys, values; layers; heads; float32
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10**5))
    code, report = report_on(tmp_path, capsys)
    assert code == 1
    assert "memory of a step" in report.rpartition("not yet with this configuration")[2]


def test_configuration_whose_captioner_its_warm_start_makes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = report_on(tmp_path, capsys, warm_start="xe.yaml")
    assert code == 0
    assert f"{tmp_path / 'start'} does not exist yet; the run makes it by xe.yaml" in report
    assert line_after(report, "captioner ") == "-> no scales on its samples"
    (row,) = [line.split() for line in report.splitlines() if line.strip().startswith("cider ")]
    assert row[-4:] == ["-"] * 4
    assert "-" not in row[:-4], "references are scored all the same"


NO_STUDENT = {"l_clipscore": {"kwargs": {"backbone": "none/yet"}}}


def test_configuration_whose_student_its_reward_models_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"warm_start": "x", "reward.terms": NO_STUDENT, "reward_models": ["lclip.yaml"]}
    code, report = report_on(tmp_path, capsys, **changes)
    assert code == 0, report
    assert "'none/yet' does not exist" in report
    assert "the run first trains the models of lclip.yaml" in report
    assert line_after(report, "reward ") == "-> no scales of its terms"
    code, _ = report_on(tmp_path, capsys, **changes | {"reward.terms": {"l_clipscoer": {}}})
    assert code == 1, "no model that is trained first makes a reward of that name"


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({}, "captioner", "start does not exist"),
        ({"model.init": "."}, "captioner", ""),  # a folder that holds no captioner
        ({"warm_start": "x", "reward.terms": NO_STUDENT}, "reward", "'none/yet'"),
        ({"data": {"format": "karpathy", "path": "none/there"}}, "data", "none/there"),
    ],
)
def test_what_a_configuration_lacks_is_said(tmp_path, capsys, changes, name, message):
    code, report = report_on(tmp_path, capsys, **changes)
    assert code == 1
    (line,) = [line for line in report.splitlines() if line.startswith(f"  {name} ")]
    assert message in line
    assert line_after(report, f"{name} ").startswith("-> the run does not start")
    assert f"The main job can run here, but not yet with this configuration: {name}." in report


def test_a_torchvision_that_does_not_load_ends_a_program_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    failure = RuntimeError("operator torchvision::nms does not exist")
    with pytest.raises(SystemExit, match="1"), user_errors():
        raise ModuleNotFoundError("Could not import module 'PreTrainedModel'") from failure
    assert "rl-caption doctor" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError, match="PreTrainedModel"), user_errors():
        raise ModuleNotFoundError("Could not import module 'PreTrainedModel'")
