"""The benchmarks run and compare what they say they compare. No time is asserted."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks import __main__ as every
from benchmarks import (
    cider,
    gpu,
    hf_step,
    l_clip,
    memory,
    scst_step,
    startup,
)
from benchmarks.harness import Measurement, Timing
from benchmarks.l_clip import Shapes as ClipShapes
from benchmarks.l_clip import measure as measure_l_clip
from benchmarks.scst_step import PHASES, Bench, Shapes
from rl_caption.runtime.types import CaptionBatch
from tests.clip_for_tests import ARCHITECTURE, tiny_checkpoint

REPOSITORY = Path(__file__).resolve().parents[3]
TIMING = Timing(repeats=1, tiny=True)


@pytest.fixture(scope="module", autouse=True)
def own_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state()  # other tests may have another precision


def shares(rows: list[Measurement]) -> list[float]:
    return [row.ratio for row in rows if row.unit == "of the time"]


def test_one_table_and_one_file_of_all_that_was_asked_for(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(
        startup, "COMMANDS", {startup.NOTHING: ["-c", "pass"], "help": ["-c", "help"]}
    )
    monkeypatch.setattr(startup, "RUNS", {})
    every.main(
        ["--only", "startup", "--repeats", "1", "--json", str(tmp_path / "rows.json")]
    )
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["baseline"] for row in rows] == ["python -c pass"]
    assert all(
        row.keys() == {"name", "baseline", "ratio", "unit", "detail"}
        and row["ratio"] > 0
        for row in rows
    )
    printed = capsys.readouterr().out
    assert printed.startswith("torch ")
    assert all(f"| {row['name']} | {row['baseline']} |" in printed for row in rows)


def test_every_benchmark_imports_only_what_the_package_needs() -> None:
    """A machine with a GPU may lack what only a baseline or a part needs."""
    names = ["engine_memory", *every.BENCHMARKS.values()]
    code = "import sys; sys.modules.update(dict.fromkeys(('pycocoevalcap', 'open_clip', 'trl', 'deepspeed')))\n"
    code += "\n".join(f"import benchmarks.{name}" for name in names)
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)


def test_self_critical_step_and_both_baselines_run() -> None:
    rows = list(scst_step.measure(TIMING))
    assert [row.baseline for row in rows[:2]] == [
        "generate twice, 3 images",
        "prefix with gradient, 2 images",
    ]
    assert len(shares(rows)) == len(PHASES)
    assert sum(shares(rows)) == pytest.approx(1.0)


def test_cider_and_the_toolkit_have_the_same_scores() -> None:
    (row,) = cider.measure(TIMING, images=4, samples=2)
    assert (row.baseline, row.unit) == ("pycocoevalcap's scorer", "x as fast")
    assert "8 captions, 5 references each, scores equal to the bit" in row.detail


def test_the_step_of_a_pretrained_model_and_both_baselines_run() -> None:
    rows = list(hf_step.measure(TIMING))
    baselines = ["generate twice, images copied", "generate twice, states copied"]
    assert [row.baseline for row in rows if row.unit == "x as fast"] == baselines
    assert [row.name.split(",")[0] for row in rows[2:6]] == list(PHASES)
    assert sum(shares(rows)) == pytest.approx(1.0)
    peaks = {row.baseline: row.ratio for row in rows if row.unit == "x less"}
    assert list(peaks) == baselines
    assert min(peaks.values()) > 0


MEMORY = Shapes(**scst_step.TINY)


def test_bytes_that_are_allocated_at_the_same_time() -> None:
    def known_step(bench: Bench, batch: CaptionBatch) -> None:
        """At most 4000 + 8000 bytes at a time; 16,000 in all."""
        first = torch.zeros(1000)
        second = first.double()
        del first
        third = second[:500].float()
        del second, third
        torch.zeros(500)

    bench, kept = memory.prepared(MEMORY, "no", "cpu"), []
    batch = bench.part(2)
    peak = memory.count_peak(known_step, bench, batch)
    assert peak.step == 12_000
    numbers = sum(parameter.numel() for parameter in bench.policy.parameters())
    each_tensor = 4 * len(
        list(bench.policy.parameters())
    )  # Adam counts its steps for each
    assert peak.held == 12 * numbers + each_tensor + sum(
        value.nbytes for value in batch.inputs.values()
    )
    assert peak.total == peak.held + 12_000
    with pytest.raises(RuntimeError, match="40 bytes"):
        memory.count_peak(lambda *_: kept.append(torch.zeros(10)), bench, bench.part(1))


def test_the_step_of_the_package_needs_least_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As in large steps, log-probabilities are taken in blocks that are small compared with the
    # logits.
    sizes = {"words": 400, "images": 10, "samples": 3, "tokens": 4}
    monkeypatch.setattr(scst_step, "TINY", scst_step.TINY | sizes)
    monkeypatch.setattr("rl_caption.scst.objectives.CHUNK", 4 * 400)
    rows = list(memory.measure(TIMING))
    assert [row.baseline for row in rows] == ["generate twice", "prefix with gradient"]
    assert all(row.ratio > 1 for row in rows)


STUDENT = replace(l_clip.TINY.student, image_size=32, patch_size=16)


@pytest.fixture
def shapes(tmp_path: Path) -> ClipShapes:
    tiny_checkpoint(tmp_path)  # makes the architecture known
    return replace(l_clip.TINY, teacher=ARCHITECTURE, student=STUDENT)


def test_every_part_is_compared(shapes: ClipShapes) -> None:
    rows = list(measure_l_clip(TIMING, shapes))
    assert all(row.ratio > 0 for row in rows)
    assert len({(row.name, row.baseline) for row in rows}) == len(rows) == 2 + 3 + 1 + 2
    assert len(shares(rows)) == 2
    assert all(share < 1 for share in shares(rows))


def test_parts_for_a_gpu_go_on_where_they_ended_and_never_mix_with_a_rehearsal(
    tmp_path, monkeypatch
):
    codes, started = iter([0, 3, 0]), []

    def run_part(part: gpu.Part, *_: Any) -> dict[str, Any]:
        started.append(part.module.split()[0])
        return {"code": next(codes), "seconds": 1, "rows": [], "log": "its log"}

    monkeypatch.setattr(gpu, "run_part", run_part)
    words = ["first", "--out", str(tmp_path), "--only", "tests", "towers"]
    rehearsal = [*words, "--device", "cpu", "--tiny"]
    assert [gpu.main(rehearsal), gpu.main(rehearsal), gpu.main(rehearsal)] == [1, 0, 0]
    assert started == ["pytest", "benchmarks.l_clip", "benchmarks.l_clip"]
    assert "## towers: passed" in (tmp_path / "first.md").read_text()
    with pytest.raises(SystemExit, match=r"first\.json"):
        gpu.main(words)


@pytest.mark.slow
@pytest.mark.parametrize("command", list(gpu.COMMANDS))
def test_every_part_for_a_gpu_runs_in_a_rehearsal(command: str, tmp_path: Path) -> None:
    words = [command, "--out", str(tmp_path), "--device", "cpu", "--tiny"]
    code = gpu.main(words)
    page = (tmp_path / f"{command}.md").read_text()
    assert code == 0, page
    parts = json.loads((tmp_path / f"{command}.json").read_text())["parts"]
    assert list(parts) == list(gpu.COMMANDS[command])
    for name, part in gpu.COMMANDS[command].items():
        assert bool(parts[name]["rows"]) == part.module.startswith("benchmarks"), name
        assert "skipped" not in parts[name]["log"], name


def test_a_part_that_takes_too_long_is_cut_off_and_its_rows_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    (tmp_path / "slow_part.py").write_text(
        "import sys, time, pathlib\n"
        "pathlib.Path(sys.argv[sys.argv.index('--json') + 1]).write_text('[1]')\n"
        "print('begun', flush=True)\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = gpu.run_part(gpu.Part("slow_part", 2), "cpu", tiny=False)
    assert (result["code"], result["rows"], result["log"]) == (None, [1], "begun\n")
