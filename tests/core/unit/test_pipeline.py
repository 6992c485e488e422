"""Pipelines: whom an override reaches, what is finished, and what is missing before anything runs."""

import json
import sys

import pytest
import yaml

from rewards.files import load_json
from rl_caption.cli.main import main, run_program
from rl_caption.cli.pipeline import plan, run_pipeline
from rl_caption.cli.stages import Stage, make_stages
from rl_caption.data.files import write_json
from rl_caption.runtime.errors import ConfigError
from rl_caption.training.checkpoint import RESULT, write_run_files
from tests.training_for_tests import scst_config, write_pipeline, xe_config


def stages_of(file, *words):
    """Stage -> its configuration."""
    stages, _ = make_stages(str(file), words)
    return {stage.name: stage.config for stage in stages}


@pytest.fixture
def two(tmp_path):
    """Cross-entropy, then self-critical training."""
    xe, scst = tmp_path / "läufe/xe", tmp_path / "läufe/scst"
    return write_pipeline(
        tmp_path,
        xe=("xe", xe_config(xe)),
        scst=("scst", scst_config(scst, xe / "export/best")),
    )


def test_data_and_root_reach_every_stage_and_any_other_key_one(two, tmp_path):
    words = [
        "--data.kwargs.num_train=40",
        "--scst.train.lr=0.5",
        "--xe.data.cache_mb=7",
    ]
    stages = stages_of(two, *words, "--run.root", str(tmp_path / "new"))
    assert [one.data.kwargs["num_train"] for one in stages.values()] == [40, 40]
    assert (stages["xe"].train.lr, stages["scst"].train.lr) == (0.003, 0.5)
    assert (stages["xe"].data.cache_mb, stages["scst"].data.cache_mb) == (7, 1024)
    assert stages["xe"].run.dir == str(tmp_path / "new/xe")
    assert stages["scst"].model.init == str(tmp_path / "new/xe/export/best"), (
        "the path follows"
    )
    there = [str(tmp_path / "there"), "--scst.run.dir", str(tmp_path / "läufe/xe")]
    moved = stages_of(two, "--xe.run.dir", *there)
    assert moved["scst"].model.init == str(tmp_path / "there/export/best")
    named = stages_of(
        two, "--run.root", str(tmp_path), "--scst.model.init", "owner/model"
    )
    assert named["scst"].model.init == "owner/model", "what the user says comes last"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--train.lr", "1"], "--xe.train.lr or --scst.train.lr"),
        (["--again", "ex"], "expected xe, scst"),
        (["--xe.train.lrr", "1"], "train.lrr"),
    ],
)
def test_what_is_not_for_a_stage_is_named(words, part, two, capsys):
    with pytest.raises((SystemExit, ConfigError)) as ended:
        run_program("run", [str(two), *words])
    assert part in str(ended.value) + capsys.readouterr().err


def test_changes_stand_in_the_file_and_a_grid_is_a_stage(two, tmp_path):
    (tmp_path / "grid.yaml").write_text(
        f"recipe: {tmp_path}/scst.yaml\ncells: {{a: {{terms: {{cider: {{}}}}}}}}\n"
        f"all: {{model: {{init: {tmp_path}/läufe/xe/export/best}}}}\nout: {tmp_path}/grid"
    )
    written = yaml.safe_load(two.read_text())
    written["stages"]["scst"]["train.lr"] = 0.25
    written["stages"]["grid"] = {"ablate": f"{tmp_path}/grid.yaml"}
    two.write_text(yaml.safe_dump(written, sort_keys=False))
    words = ["--data.kwargs.num_val", "9", "--run.root", str(tmp_path / "new")]
    stages = stages_of(two, *words)
    assert stages["scst"].train.lr == 0.25
    assert stages["grid"].out == str(tmp_path / "new/grid")
    assert stages["grid"].all["data"]["kwargs"]["num_val"] == 9
    assert stages["grid"].all["model"]["init"] == str(tmp_path / "new/xe/export/best")
    assert list(stages_of(two, "--only", "grid")) == ["xe", "grid"], (
        "what a grid's base starts from"
    )


def test_no_pipeline_is_said(capsys):
    with pytest.raises(SystemExit):
        run_program("run", ["own_xe"])
    assert "own_xe is no pipeline" in capsys.readouterr().err
    assert main(["run", "--help"]) == 0
    assert "own_mix" in capsys.readouterr().out


# --- what is finished ---------------------------------------------------------------------------


@pytest.fixture
def finished(two, monkeypatch):
    """The pipeline after a run, whose trainings only write what tells that they are done."""

    def train(stage):
        write_run_files(stage.folder, stage.config.model_dump(mode="json"), {})
        export = stage.folder / "export/best"
        export.mkdir(parents=True, exist_ok=True)
        (export / "config.json").write_text("{}")
        write_json(export / "manifest.json", {"config.json": stage.config.train.lr})
        (stage.folder / RESULT).write_text("{}")

    monkeypatch.setattr(Stage, "start", train)
    assert run_pipeline(str(two), []) is not None
    return two


def actions(file, *words):
    stages, wishes = make_stages(str(file), words)
    planned = plan(stages, wishes["again"])
    return {one.stage.name: one.action for one in planned}


def test_what_is_finished_is_skipped_and_trained_anew_where_that_is_asked(finished):
    assert actions(finished) == {"xe": "skip", "scst": "skip"}
    free = ["--data.num_workers", "2", "--xe.train.micro_batch_size", "2"]
    assert actions(finished, *free) == {"xe": "skip", "scst": "skip"}, (
        "changes no number"
    )
    assert actions(finished, "--again", "scst") == {"xe": "skip", "scst": "again"}
    assert actions(finished, "--again", "xe") == {"xe": "again", "scst": "again"}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--scst.train.lr", "0.5"], "scst: .*train.lr: 0.003 -> 0.5.*--again scst"),
        (["--data.kwargs.num_train", "24"], "xe: .*data.kwargs.num_train.*--again xe"),
    ],
)
def test_another_configuration_is_refused_with_what_differs(words, part, finished):
    with pytest.raises(ConfigError, match=f"(?s){part}"):
        run_pipeline(str(finished), words)


def test_other_data_and_other_exports_are_refused(finished, tmp_path):
    export = tmp_path / "läufe/xe/export/best/manifest.json"
    before = export.read_text()
    export.write_text("{}")
    with pytest.raises(ConfigError, match=r"scst: .*model\.init: weights"):
        run_pipeline(str(finished), [])
    export.write_text(before)
    note = tmp_path / "läufe/scst/stage.json"
    inputs = load_json(note)
    inputs["train texts"] = "32 rows 0"
    write_json(note, inputs)
    with pytest.raises(ConfigError, match=r"scst: .*train texts: 32 rows 0 -> 32 rows"):
        run_pipeline(str(finished), [])
    note.unlink()
    with pytest.raises(ConfigError, match=r"scst: .*train texts: None"):
        run_pipeline(str(finished), [])
    (tmp_path / "läufe/xe" / RESULT).unlink()
    with pytest.raises(ConfigError, match=r"scst: .*another export of xe"):
        run_pipeline(str(finished), [])
    assert run_pipeline(str(finished), ["--again", "scst"]) is not None


def test_dry_prints_what_would_run_and_runs_nothing(finished, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main(["run", str(finished), "--dry", "--again", "scst"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["skip", "again"]
    assert printed[1].split(maxsplit=1)[1].startswith("rl-caption scst --config ")
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}


# --- what is missing ----------------------------------------------------------------------------


def test_all_that_is_missing_is_said_before_the_first_stage(two, tmp_path, monkeypatch):
    monkeypatch.setattr(Stage, "start", lambda _: pytest.fail("nothing may run"))
    monkeypatch.setitem(sys.modules, "open_clip", None)
    terms = {
        "clipscore": {"kwargs": {"pretrained": "gone.pt"}},
        "l_clipscore": {"kwargs": {"backbone": "runs/lclip/dual/export/best"}},
    }
    words = ["--scst.reward.terms", json.dumps(terms)]
    words.append("--scst.model.init=else/where/export/best")
    with pytest.raises(ConfigError, match=r"open_clip.*rl-caption\[clip\]"):
        run_pipeline(str(two), words)
    monkeypatch.undo()
    monkeypatch.setattr(Stage, "start", lambda _: pytest.fail("nothing may run"))
    with pytest.raises(ConfigError) as refused:
        run_pipeline(str(two), words)
    for part in (
        "scst: model.init",
        "'gone.pt' is not there",
        "it comes from rl-caption run coco",
    ):
        assert part in str(refused.value)


def test_a_program_alone_says_which_pipeline_makes_what_it_starts_from(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"runs/own/xe/export/best.*rl-caption run own"
    ):
        run_program("scst", ["--config", "own_scst", "--data.path", "mine.jsonl"])
    with pytest.raises(ConfigError, match=r"model\.init.*rl-caption run own"):
        run_program("scst", ["--data.format", "scenes"])


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "ablate is one process"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "reward_model takes"),
    ],
)
def test_what_cannot_run_under_a_launcher_is_said(environment, part, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    words = ["--only", "alpha", "--data.kwargs.num_train", "8"]
    with pytest.raises(ConfigError, match=part):
        run_pipeline("scenes", words)
