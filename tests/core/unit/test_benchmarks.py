"""The benchmarks run and compare what they say they compare. No time is asserted."""

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks import cider, gpu, hf_step, memory, scst_step
from benchmarks.harness import Timing
from benchmarks.scst_step import PHASES, Shapes
from rewards.files import load_json

TIMING = Timing(repeats=1, tiny=True)


@pytest.fixture(scope="module", autouse=True)
def own_state():
    yield
    AcceleratorState._reset_state()  # other tests may have another precision


def shares(rows):
    return [row.ratio for row in rows if row.unit == "of the time"]


@pytest.mark.parametrize("program", [scst_step, hf_step])
def test_the_parts_of_a_step_share_its_time(program):
    found = shares(list(program.measure(TIMING)))
    assert len(found) == len(PHASES)
    assert sum(found) == pytest.approx(1.0)


def test_cider_and_the_toolkit_have_the_same_scores():
    (row,) = cider.measure(TIMING, images=4, samples=2)
    assert (row.baseline, row.unit) == ("pycocoevalcap's scorer", "x as fast")
    assert "8 captions, 5 references each, scores equal to the bit" in row.detail


def test_bytes_that_are_allocated_at_the_same_time():
    def known_step(bench, batch):
        """At most 4000 + 8000 bytes at a time; 16,000 in all."""
        first = torch.zeros(1000)
        second = first.double()
        del first
        third = second[:500].float()
        del second, third
        torch.zeros(500)

    bench = memory.prepared(Shapes(**scst_step.TINY), "no", "cpu")
    batch = bench.part(2)
    peak = memory.count_peak(known_step, bench, batch)
    assert peak.step == 12_000
    numbers = sum(parameter.numel() for parameter in bench.policy.parameters())
    # Adam counts its steps for each tensor
    counters = 4 * len(list(bench.policy.parameters()))
    inputs = sum(value.nbytes for value in batch.inputs.values())
    assert peak.held == 12 * numbers + counters + inputs
    assert peak.total == peak.held + 12_000


@pytest.mark.slow
@pytest.mark.parametrize("command", list(gpu.COMMANDS))
def test_every_part_for_a_gpu_runs_in_a_rehearsal(command, tmp_path):
    words = [command, "--out", str(tmp_path), "--device", "cpu", "--tiny"]
    code = gpu.main(words)
    page = (tmp_path / f"{command}.md").read_text()
    assert code == 0, page
    parts = load_json(tmp_path / f"{command}.json")["parts"]
    assert list(parts) == list(gpu.COMMANDS[command])
    for name, part in gpu.COMMANDS[command].items():
        assert bool(parts[name]["rows"]) == part.module.startswith("benchmarks"), name
        assert "skipped" not in parts[name]["log"], name
