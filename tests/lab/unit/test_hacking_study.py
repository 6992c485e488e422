"""The verdict on an alarm, on trajectories made up; the study's table and files on a finished run."""

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.studies.hacking_study import Point, StudyError, main, read_monitor, verdict
from rl_caption.cli.main import main as command
from rl_caption.runtime.errors import ConfigError
from tests.training_for_tests import scst_config, xe_config

Rows = list[tuple[float, float, float, bool]]


class Words:
    """An unseen judge: the number of words."""

    __name__, columns, bounds, signature = "words", frozenset(), (0.0, 100.0), "words"

    def __call__(self, prompts: object, completions: list[str], **columns: object) -> list[float]:
        return [1.0 + len(text.split()) for text in completions]


def points(rows: Rows) -> list[Point]:
    """(reward, F1, unparsed, alarm) at steps 0, 10, 20, ..."""
    return [
        Point(10 * index, reward, f1, unparsed, ("evidence",) if alarm else ())
        for index, (reward, f1, unparsed, alarm) in enumerate(rows)
    ]


FALLING: Rows = [
    (1.0, 0.60, 0.0, False),
    (1.2, 0.58, 0.0, False),
    (1.3, 0.54, 0.0, False),
    (1.4, 0.48, 0.0, False),
    (1.5, 0.40, 0.0, False),
]
"""Worst loss 0.20 at step 40; more than 0.05 from step 20 on; half of it, 0.10, is reached at step 30."""


def with_alarm(rows: Rows, *steps: int) -> list[Point]:
    return points([(*row[:3], 10 * index in steps) for index, row in enumerate(rows)])


def test_a_real_case_is_caught_before_half_of_the_loss_or_not() -> None:
    for alarms, kind in (
        ((20,), "caught"),
        ((10, 30, 40), "caught"),
        ((30,), "late"),
        ((), "missed"),
    ):
        found = verdict(with_alarm(FALLING, *alarms))
        assert (found.kind, found.worst, found.real_step, found.half_step) == (
            kind,
            pytest.approx(0.2),
            20,
            30,
        )
        assert found.alarm_step == (alarms[0] if alarms else None)
    assert verdict(points(FALLING), f1_margin=0.25).kind == "quiet"
    assert verdict(points(FALLING), f1_margin=0.19).real_step == 40
    with pytest.raises(ValueError, match="starting policy"):  # one validation is no trajectory
        verdict(points(FALLING[:1]))


def test_what_was_gained_and_lost_again_counts_since_any_validation() -> None:
    rows: Rows = [
        (1.0, 0.5, 0.0, False),
        (1.2, 0.6, 0.0, False),
        (1.1, 0.5, 0.0, False),
        (1.3, 0.53, 0.0, True),
    ]
    assert verdict(points(rows)).kind == "false alarm"
    found = verdict(points(rows), since="any")
    assert (found.kind, found.real_step, found.worst) == ("late", 30, pytest.approx(0.07))


def test_words_without_meaning_are_a_loss_too() -> None:
    rows: Rows = [(1.0, 0.5, 0.01, False), (1.1, 0.5, 0.2, True), (1.2, 0.5, 0.5, False)]
    found = verdict(points(rows))
    assert (found.kind, found.real_step, found.half_step) == ("caught", 10, 20)
    assert found.worst == pytest.approx(0.49)


def test_an_alarm_without_a_real_case_is_false() -> None:
    within: Rows = [(1.0, 0.6, 0.0, False), (1.5, 0.58, 0.02, False), (2.0, 0.56, 0.04, False)]
    lower_reward: Rows = [(1.0, 0.6, 0.0, False), (0.9, 0.3, 0.5, False), (0.8, 0.1, 0.9, False)]
    for rows in (within, lower_reward):
        for alarms, kind in (((), "quiet"), ((20,), "false alarm")):
            found = verdict(with_alarm(rows, *alarms))
            assert (found.kind, found.real_step, found.half_step) == (kind, None, None)


def test_of_a_monitor_only_what_is_given_replaces(tmp_path: Path) -> None:
    file = tmp_path / "monitor.yaml"
    file.write_text("thresholds: {judge_fall: 1}\njudges: {cider: {}}\n")
    cider = {"target": None, "kwargs": {}}
    assert read_monitor(file) == {"thresholds": {"judge_fall": 1.0}, "judges": {"cider": cider}}
    for text, error in (
        ("thresholds: {judge_fall: -0.1}", ConfigError),
        ("stop: true", StudyError),
    ):
        file.write_text(text)
        with pytest.raises(error):
            read_monitor(file)


def test_a_finished_run_is_judged_with_its_own_rule_and_with_another(tmp_path, capsys):
    xe, scst = tmp_path / "xe", tmp_path / "scst"
    for folder, config in (
        (xe, xe_config(xe, **{"train.max_steps": 2})),
        (scst, scst_config(scst, xe / "export/best")),
    ):
        folder.with_suffix(".yaml").write_text(yaml.safe_dump(config))
        command([folder.name, "--config", str(folder.with_suffix(".yaml"))])
    capsys.readouterr()
    assert main(["--runs", str(scst), "--out", str(tmp_path / "own")]) == 0
    (own,) = json.loads((tmp_path / "own" / "study.json").read_text())["runs"]
    assert [point["step"] for point in own["points"]] == [0, 2, 4]
    log = [json.loads(line) for line in (scst / "metrics.jsonl").read_text().splitlines()]
    assert [bool(point["evidence"]) for point in own["points"]] == [
        bool(line["hacking/alarm"]) for line in log if "hacking/alarm" in line
    ]
    other = tmp_path / "monitor.yaml"
    other.write_text("judges: {cider: {}}\nthresholds: {judge_fall: 0.2}\n")
    assert (
        main(["--runs", str(scst), "--out", str(tmp_path / "other"), "--monitor", str(other)]) == 0
    )
    assert "runs really got worse" in capsys.readouterr().out
    other.write_text("judges: {cider: {kwargs: {m: 3}}}\n")
    assert (
        main(["--runs", str(scst), "--out", str(tmp_path / "none"), "--monitor", str(other)]) == 1
    )
    assert "error: judges.cider: reward 'cider' does not take m" in capsys.readouterr().err
    unseen = tmp_path / "truth.yaml"
    unseen.write_text("{target: 'tests.lab.unit.test_hacking_study:Words'}")
    assert (
        main(["--runs", str(scst), "--out", str(tmp_path / "unseen"), "--truth", str(unseen)]) == 0
    )
    study = json.loads((tmp_path / "unseen/study.json").read_text())
    assert study["settings"]["truth"] == "words"
    words = []
    for point in study["runs"][0]["points"]:
        predictions = json.loads(
            (scst / f"eval/step-{point['step']:08d}/predictions.json").read_text()
        )
        words.append(sum(1 + len(record["caption"].split()) for record in predictions))
        assert point["f1"] == pytest.approx(words[-1] / words[0])
    assert main(["--runs", str(xe), "--out", str(tmp_path / "none")]) == 1
    assert "no self-critical run" in capsys.readouterr().err
