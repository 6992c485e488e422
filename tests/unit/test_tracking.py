"""The log of a run: whole lines, nothing twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from rl_caption.training.run_folder import RunLog, append_line, clock, drop_after


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
    append_line(path, {"step": 3})
    assert steps(path) == [0, 1, 2, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_log_that_is_not_there_stays_away(tmp_path: Path) -> None:
    drop_after(tmp_path / "metrics.jsonl", 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("start", "kept"), [(0, []), (2, [0, 1, 2])])
def test_a_run_that_starts_anew_has_a_new_log(tmp_path: Path, start: int, kept: list[int]) -> None:
    for step in range(5):
        append_line(tmp_path / "metrics.jsonl", {"step": step})
        append_line(tmp_path / "samples.jsonl", {"step": step})
    RunLog(Accelerator(cpu=True), tmp_path, "xe", start, 10).close()
    assert steps(tmp_path / "metrics.jsonl") == steps(tmp_path / "samples.jsonl") == kept


def test_a_line_of_metrics_is_written_and_summarised(tmp_path: Path, capsys: Any) -> None:
    log = RunLog(Accelerator(cpu=True), tmp_path, "scst", 0, 10)
    log.metrics(1, {"reward/total": 0.25, "hacking/duplicates": 0.5})
    log.samples(1, [{"image_id": "a", "samples": ["x"]}, {"image_id": "b", "samples": ["y"]}])
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 1,
        "reward/total": 0.25,
        "hacking/duplicates": 0.5,
    }
    assert [json.loads(line)["image_id"] for line in (tmp_path / "samples.jsonl").open()] == ["a", "b"]
    shown = capsys.readouterr().err
    assert "[scst] step 1/10  reward/total 0.25" in shown
    assert "hacking" not in shown


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 3600, 90061)] == ["0:00:00", "0:01:00", "1:00:00", "25:01:01"]
    assert clock(float("nan")) == clock(float("inf")) == "?"
