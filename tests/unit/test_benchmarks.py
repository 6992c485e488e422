"""The benchmarks run and compare what they say they compare. No time is asserted."""

from __future__ import annotations

import json
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import __main__ as every
from benchmarks import scst_step, startup
from benchmarks.harness import Measurement, Timing, command
from tests.captioners_for_tests import SHAPE


def test_one_table_and_one_file_of_all_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "COMMANDS", {startup.NOTHING: ["-c", "pass"], "help": ["-c", "help"]})
    every.main(["--only", "startup", "--repeats", "1", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["baseline"] for row in rows] == ["python -c pass"]
    assert all(row.keys() == {"name", "baseline", "ratio", "unit", "detail"} and row["ratio"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert printed.startswith("torch ")
    assert all(f"| {row['name']} | {row['baseline']} |" in printed for row in rows)


def test_self_critical_step_and_both_baselines_run() -> None:
    shapes = scst_step.Shapes(
        captioner={**SHAPE, "num_heads": 2}, words=40, regions=3, region_dim=6, images=3, prefix_images=2, samples=2,
        tokens=4,
    )  # fmt: skip
    rows = list(scst_step.measure(Timing(repeats=1), shapes, temperature=0.5))
    assert [row.baseline for row in rows[:2]] == ["generate twice, 3 images", "prefix with gradient, 2 images"]
    shares = [row.ratio for row in rows if row.unit == "of the time"]
    assert len(shares) == len(scst_step.PHASES)
    assert sum(shares) == pytest.approx(1.0)


def test_every_benchmark_has_a_command_of_its_own() -> None:
    for name in every.BENCHMARKS.values():
        assert f"python -m benchmarks.{name}" in (import_module(f"benchmarks.{name}").__doc__ or "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--repeats", "0"], "--repeats is 0: expected at least 1"),
        (["--json", "missing/rows.json"], "there is no folder 'missing'"),
        (["--only", "c"], "invalid choice: 'c'"),
    ],
)
def test_options_are_checked_before_anything_runs(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(timing: Timing, only: list[str]) -> list[Measurement]:
        raise AssertionError("runs")

    for main in (every.main, partial(command, None, measure, only=("a", "b"))):
        with pytest.raises(SystemExit):
            main(options)
        assert said in capsys.readouterr().err


def test_options_come_from_defaults(tmp_path: Path) -> None:
    def measure(timing: Timing, **options: object) -> list[Measurement]:
        seen.append((timing, options))
        return []

    seen: list[tuple[Timing, dict[str, object]]] = []
    defaults = {"images": 5, "length": 1.5, "fits": False, "only": ("a", "b"), "references": None}
    command(None, measure, [], operand="data", **defaults)
    line = ["here", "--images", "2", "--length", "3", "--fits", "--only", "b", "--references", "file", "--repeats", "1"]
    command(None, measure, line, operand="data", **defaults)
    assert seen[0] == (Timing(), {**defaults, "data": None})
    changed = {"images": 2, "length": 3.0, "fits": True, "only": ["b"], "references": "file", "data": "here"}
    assert seen[1] == (Timing(repeats=1), changed)
