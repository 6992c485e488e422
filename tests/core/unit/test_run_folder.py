"""The run folder: where a run resumes, what counts as another configuration, and whole log lines,
none twice.
"""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rl_caption.config.schema import RewardTerm, ScstConfig
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


def config_of(folder: Path, resume: Any = "auto") -> ScstConfig:
    config = ScstConfig()
    config.run.dir, config.run.resume = str(folder), resume
    return config


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    state = TrainState(
        global_step=step, configuration=computed(ScstConfig().model_dump(mode="json"))
    )
    (path / "trainer_state.json").write_text(json.dumps(asdict(state)))
    seal(path)
    return path


def test_an_empty_folder_starts_then_the_newest_checkpoint_is_found_and_leftovers_are_cleared(
    tmp_path: Path,
) -> None:
    for resume in ("auto", True, "true", False, "false"):
        assert (
            find_checkpoint(config_of(tmp_path, resume).model_dump(mode="json")) is None
        )
    config = config_of(tmp_path)
    write_run_files(Path(config.run.dir), config.model_dump(mode="json"), {})
    checkpoint(tmp_path, 9)
    newest = checkpoint(tmp_path, 10)
    (tmp_path / "checkpoints/.partial-step-00000011").mkdir()
    (tmp_path / "export/.partial-best").mkdir(parents=True)
    assert find_checkpoint(config.model_dump(mode="json")) == newest
    assert not list(tmp_path.rglob(".partial-*"))


@pytest.mark.parametrize("resume", ["auto", True, False])
def test_where_all_checkpoints_are_damaged_a_run_starts_over_only_if_told_to(
    tmp_path: Path, resume: Any, caplog: pytest.LogCaptureFixture
) -> None:
    write_run_files(tmp_path, config_of(tmp_path).model_dump(mode="json"), {})
    (checkpoint(tmp_path, 3) / "trainer_state.json").write_text("{}")
    (checkpoint(tmp_path, 6) / "manifest.json").unlink()
    if resume is False:
        assert (
            find_checkpoint(config_of(tmp_path, resume).model_dump(mode="json")) is None
        )
        return
    with pytest.raises(CheckpointError, match=r"run\.resume"):
        find_checkpoint(config_of(tmp_path, resume).model_dump(mode="json"))
    for part in (
        "step-00000003 is damaged (trainer_state.json has 2 bytes",
        "step-00000006 is damaged (it has no manifest",
    ):
        assert part in caplog.text


def test_auto_refuses_another_configuration_true_accepts_it_and_false_refuses_any_run(
    tmp_path: Path,
) -> None:
    newest, config = checkpoint(tmp_path, 3), config_of(tmp_path)
    assert find_checkpoint(config.model_dump(mode="json")) == newest
    config.train.lr = 1.0
    config.reward.terms["rouge_l"] = RewardTerm(weight=2.0)
    with pytest.raises(
        CheckpointError,
        match=r"reward\.terms\.rouge_l\.weight: None -> 2\.0.*train\.lr: ",
    ):
        find_checkpoint(config.model_dump(mode="json"))
    config.run.resume = True
    assert find_checkpoint(config.model_dump(mode="json")) == newest
    for resume in (False, "false"):
        with pytest.raises(CheckpointError, match=r"step-00000003.*run\.resume"):
            find_checkpoint(config_of(tmp_path, resume).model_dump(mode="json"))


def test_a_path_is_taken_if_it_is_a_checkpoint(tmp_path: Path) -> None:
    older = checkpoint(tmp_path, 3)
    checkpoint(tmp_path, 5)
    assert (
        find_checkpoint(config_of(tmp_path, str(older)).model_dump(mode="json"))
        == older
    )
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        find_checkpoint(config_of(tmp_path, str(tmp_path)).model_dump(mode="json"))


def test_what_does_not_change_the_computation_is_no_change(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    write_run_files(Path(config.run.dir), config.model_dump(mode="json"), {})
    config.run.log_every = 3
    config.data.num_workers, config.data.cache_mb = 4, 0
    config.train.micro_batch_size, config.train.threads, config.train.num_processes = (
        2,
        2,
        2,
    )
    config.eval.batch_size = 1
    assert changed_keys(tmp_path / "config.yaml", config.model_dump(mode="json")) == []
    config.eval.every = 7
    assert changed_keys(tmp_path / "config.yaml", config.model_dump(mode="json")) == [
        "eval.every: None -> 7"
    ]


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_after_a_step_and_what_a_kill_cut_off_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (0, 1, 2, 2, 3):
        append_line(path, {"step": step, "text": "ein Möwe"})
    with path.open("a") as handle:
        handle.write('{"step": 1, "te')
    drop_after(path, 2)
    assert steps(path) == [0, 1, 2, 2]
    drop_after(tmp_path / "samples.jsonl", 3)  # which is not there, and stays away
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_variables_that_choose_kernels_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("HF_TOKEN", "secret")
    write_run_files(tmp_path, {}, {})
    recorded = json.loads((tmp_path / "env.json").read_text())["environment"]
    assert recorded["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "HF_TOKEN" not in recorded
