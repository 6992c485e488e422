"""The benchmarks run and compare what they say they compare. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import __main__ as every
from benchmarks import cider, coco_scale, evaluation, growth, loading, memory, processes, scst_step
from benchmarks.harness import Timing
from tests.captioners_for_tests import SHAPE


def test_one_table_and_one_file_of_all_that_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every.main(["--only", "cider", "loading", "--repeats", "1", "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["baseline"] for row in rows] == ["pycocoevalcap's scorer"] + ["Pillow"] * 2
    assert all(row.keys() == {"name", "baseline", "ratio", "unit", "detail"} and row["ratio"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert printed.startswith("torch ")
    assert all(f"| {row['name']} | {row['baseline']} |" in printed for row in rows)


def test_self_critical_step_and_both_baselines_run() -> None:
    shapes = scst_step.Shapes(
        captioner={**SHAPE, "num_heads": 2}, words=40, regions=3, region_dim=6, images=3, prefix_images=2, samples=2,
        tokens=4,
    )  # fmt: skip
    rows = scst_step.measure(shapes, Timing(repeats=1), "no")
    assert [row.baseline for row in rows[:2]] == ["generate twice, 3 images", "prefix with gradient, 2 images"]
    shares = [row.ratio for row in rows if row.unit == "of the time"]
    assert len(shares) == len(scst_step.PHASES)
    assert sum(shares) == pytest.approx(1.0)
    assert [row.unit for row in rows[2 + len(shares) :]] == ["of the limit"]


def test_document_frequencies_of_a_small_corpus_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(task: str, variant: str, folder: Path, timing: Timing, images: int) -> dict[str, float]:
        if task == "cache":
            return coco_scale.cache_figures(folder, images)
        return coco_scale.child(task, variant, folder, timing.cpu_time)

    monkeypatch.setattr(coco_scale, "run", here)
    rows = coco_scale.measure(160, None, Timing(repeats=1), tmp_path)
    assert {"dict of tuples", "pickle", "pycocoevalcap's scorer"} < {row.baseline for row in rows}
    assert "160 images" in rows[0].detail
    with pytest.raises(SystemExit):
        coco_scale.main(["--images", "3"])


@pytest.mark.parametrize(("options", "said"), [(["--repeats", "0"], "--repeats is 0"), (["--cpu-time"], "--threads 1")])
def test_options_are_checked(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    programs = (every, cider, evaluation, growth, loading, memory, processes, scst_step)
    for main in (program.main for program in programs):
        with pytest.raises(SystemExit):
            main(options)
        assert said in capsys.readouterr().err
