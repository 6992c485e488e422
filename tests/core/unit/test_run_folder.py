"""The run folder: where a run resumes, what counts as another configuration, and whole log lines,
none twice.
"""

import json
import re
from dataclasses import asdict

import pytest

from rewards.files import load_json
from rl_caption.config.schema import ScstConfig
from rl_caption.data.files import write_json
from rl_caption.runtime.types import TrainState
from rl_caption.training.checkpoint import CheckpointError, seal
from rl_caption.training.run_folder import (
    append_line,
    changed_keys,
    computed,
    drop_after,
    find_checkpoint,
    write_run_files,
)
from tests.training_for_tests import changed


def config_of(folder, resume="auto", **changes):
    """Values of a configuration, with changes of dotted keys."""
    config = ScstConfig().model_dump(mode="json")
    config["run"] |= {"dir": str(folder), "resume": resume}
    return changed(config, changes)


def checkpoint(folder, step):
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    state = TrainState(global_step=step, configuration=computed(config_of(folder)))
    write_json(path / "trainer_state.json", asdict(state))
    seal(path)
    return path


def test_an_empty_folder_starts_then_the_newest_checkpoint_is_found_and_leftovers_are_cleared(
    tmp_path,
):
    for resume in ("auto", True, "true", False, "false"):
        assert find_checkpoint(config_of(tmp_path, resume)) is None
    config = config_of(tmp_path)
    write_run_files(tmp_path, config, {})
    checkpoint(tmp_path, 9)
    newest = checkpoint(tmp_path, 10)
    (tmp_path / "checkpoints/.partial-step-00000011").mkdir()
    (tmp_path / "export/.partial-best").mkdir(parents=True)
    assert find_checkpoint(config) == newest
    assert not list(tmp_path.rglob(".partial-*"))


@pytest.mark.parametrize("resume", ["auto", True, False])
def test_where_all_checkpoints_are_damaged_a_run_starts_over_only_if_told_to(
    tmp_path, resume, caplog
):
    write_run_files(tmp_path, config_of(tmp_path), {})
    (checkpoint(tmp_path, 3) / "trainer_state.json").write_text("{}")
    (checkpoint(tmp_path, 6) / "manifest.json").unlink()
    if resume is False:
        assert find_checkpoint(config_of(tmp_path, resume)) is None
        return
    with pytest.raises(CheckpointError, match=r"run\.resume"):
        find_checkpoint(config_of(tmp_path, resume))
    for part in (
        "step-00000003 is damaged (trainer_state.json has 2 bytes",
        "step-00000006 is damaged (it has no manifest",
    ):
        assert part in caplog.text


def test_auto_refuses_another_configuration_true_accepts_it_and_false_refuses_any_run(
    tmp_path,
):
    newest = checkpoint(tmp_path, 3)
    assert find_checkpoint(config_of(tmp_path)) == newest
    changes = {"train.lr": 1.0, "reward.terms.rouge_l": {"weight": 2.0}}
    message = r"reward\.terms\.rouge_l\.weight: None -> 2\.0.*train\.lr: "
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(config_of(tmp_path, **changes))
    assert find_checkpoint(config_of(tmp_path, True, **changes)) == newest
    for resume in (False, "false"):
        with pytest.raises(CheckpointError, match=r"step-00000003.*run\.resume"):
            find_checkpoint(config_of(tmp_path, resume))


def test_a_path_is_taken_if_it_is_a_checkpoint(tmp_path):
    older = checkpoint(tmp_path, 3)
    checkpoint(tmp_path, 5)
    assert find_checkpoint(config_of(tmp_path, str(older))) == older
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        find_checkpoint(config_of(tmp_path, str(tmp_path)))


def test_what_does_not_change_the_computation_is_no_change(tmp_path):
    write_run_files(tmp_path, config_of(tmp_path), {})
    free = {"run.log_every": 3, "data.num_workers": 4, "data.cache_mb": 0}
    free |= {"train.micro_batch_size": 2, "train.threads": 2, "eval.batch_size": 1}
    free["train.num_processes"] = 2
    for changes, named in ((free, []), ({"eval.every": 7}, ["eval.every: None -> 7"])):
        config = config_of(tmp_path, **changes)
        assert changed_keys(tmp_path / "config.yaml", config) == named


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_after_a_step_and_what_a_kill_cut_off_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (0, 1, 2, 2, 3):
        append_line(path, {"step": step, "text": "ein Möwe"})
    with path.open("a") as handle:
        handle.write('{"step": 1, "te')
    drop_after(path, 2)
    assert steps(path) == [0, 1, 2, 2]
    drop_after(tmp_path / "samples.jsonl", 3)  # which is not there, and stays away
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_variables_that_choose_kernels_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("HF_TOKEN", "secret")
    write_run_files(tmp_path, {}, {})
    recorded = load_json(tmp_path / "env.json")["environment"]
    assert recorded["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "HF_TOKEN" not in recorded
