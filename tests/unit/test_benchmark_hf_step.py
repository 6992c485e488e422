"""The benchmark of pretrained captioners runs and compares what it says it compares. No time is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks import hf_step
from benchmarks.harness import Timing
from benchmarks.scst_step import PHASES, Bench
from rl_caption.captioners.base import Decoding
from rl_caption.scst.rollout import sample_captions
from rl_caption.types import CaptionBatch
from tests.hf_models_for_tests import SIDE, save_model

CLASSES: dict[str, Any] = {
    "blip": transformers.BlipForConditionalGeneration,
    "vit_gpt2": transformers.VisionEncoderDecoderModel,
}
SHAPES = hf_step.Shapes(images=2, samples=3, tokens=8, length=4.0)


@pytest.mark.parametrize("name", CLASSES)
def test_the_step_and_both_loops_run(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    bench = hf_step.build_bench(lambda: CLASSES[name].from_pretrained(tmp_path), SIDE, SHAPES, "cpu", "no")
    rows = hf_step.measure_model(bench, "Tiny", Timing(repeats=1), "no", hf_step.COPIED)
    loops = ["generate twice, images copied", "generate twice, states copied"]
    assert [row.baseline for row in rows if row.unit == "x as fast"] == loops
    assert sum(row.ratio for row in rows if row.unit == "of the time") == pytest.approx(1.0)
    assert [row.name.split(",")[0] for row in rows[2:6]] == list(PHASES)
    memory = {row.baseline: row.ratio for row in rows if row.unit == "x less"}
    assert list(memory) == loops
    assert min(memory.values()) > 0


def test_what_fits_is_computed_from_small_steps(tmp_path: Path) -> None:
    save_model("blip", tmp_path)
    rows = hf_step.what_fits("Tiny", lambda: CLASSES["blip"].from_pretrained(tmp_path), SIDE, SHAPES, "cpu", "no")
    assert rows[0].name == "Tiny, float32: bytes"
    assert [row.name.split(",")[0] for row in rows[1:]] == [
        f"images x 3 captions in {card} GB" for card in (24, 80, 141)
    ]


def test_captions_end_and_both_loops_take_the_same_samples_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model("vit_gpt2", tmp_path)
    bench = hf_step.build_bench(lambda: CLASSES["vit_gpt2"].from_pretrained(tmp_path), SIDE, SHAPES, "cpu", "no")
    decoding = Decoding(num_samples=40, max_new_tokens=SHAPES.tokens)
    lengths = sample_captions(bench.captioner, bench.policy, bench.batch, decoding, 0, 0).mask.sum(-1)
    assert lengths.float().std() > 0.5
    drawn = torch.tensor([[328, 5, 6, 7, 329], [328, 8, 329, 329, 329], [328, 9, 10, 329, 329]]).repeat(2, 1)
    found: list[dict[str, torch.Tensor]] = []

    def keep(bench: Bench) -> None:
        found.append({n: p.grad.clone() for n, p in bench.policy.named_parameters() if p.grad is not None})
        bench.optimizer.zero_grad()

    monkeypatch.setattr(
        bench.policy.model, "generate", lambda num_return_sequences=1, **_: drawn[:: 4 - num_return_sequences]
    )
    monkeypatch.setattr(type(bench), "update", keep)
    monkeypatch.setattr(hf_step, "toolkit_rewards", lambda *_: torch.arange(6.0))
    for copied in hf_step.COPIED:
        hf_step.generate_step(bench, CaptionBatch(bench.batch.rows, bench.batch.inputs), copied)
    largest = max(gradient.abs().max() for gradient in found[0].values())
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], rtol=1e-3, atol=float(1e-5 * largest)), name
