"""A captioner of Transformers under the engines that shard it: the steps and the export of one plain process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rl_caption.captioners.loading import load_captioner
from tests.engines_for_tests import ENGINES
from tests.hf_models_for_tests import save_model
from tests.training_for_tests import files, lines, run, run_together, scst_config, untimed, weights

pytestmark = pytest.mark.distributed

FULL: dict[str, Any] = {"model.freeze": ["encoder.embeddings.*"]}
LORA: dict[str, Any] = {"model.lora": {"r": 2}}


class Letters:
    """A reward that captions of random models get more or less of: the share of letters."""

    __name__, columns, bounds, signature = "letters", frozenset[str](), (0.0, 1.0), "letters"

    def __call__(self, prompts: object, completions: list[str], **columns: object) -> list[float]:
        return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in completions]


class Later:
    """A judge that likes the newest model best, so that it is the one that is exported."""

    __name__, columns, bounds, signature = "later", frozenset[str](), (0.0, 1.0), "later"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts: object, completions: list[str], **columns: object) -> list[float]:
        self.calls += 1
        return [1 - 1 / self.calls] * len(completions)


OPTIONS = {
    "reward.terms": {"letters": {"target": f"{__name__}:Letters"}},
    "monitor": {"judges": {"later": {"target": f"{__name__}:Later"}}, "best_by": "later"},
    "model.name": "huggingface",
    "model.prompt": "a photo of",
    "train.max_steps": 2,
    "train.micro_batch_size": 2,
    "train.grad_clip_norm": 0.1,
    "run.log_samples": 4,  # rank 0 holds the first four images of the batch of eight
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ViT + GPT-2, whose output layer is tied to the embedding."""
    return save_model("vit_gpt2", tmp_path_factory.mktemp("model") / "vit_gpt2")


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory):
    """A function of what is trained: the folder of two steps of one plain process."""
    made: dict[str, Path] = {}

    def plain_run(name: str, trained: dict[str, Any]) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("plain") / name
            ended = run(scst_config(made[name], model, **OPTIONS, **trained), made[name], "scst")
            assert ended.code == 0, ended.output
        return made[name]

    return plain_run


@pytest.mark.parametrize(("trained", "engine"), [("full", "zero3"), ("full", "fsdp2"), ("lora", "zero2")])
def test_two_processes_train_and_export_as_one(model: Path, plain, tmp_path: Path, trained: str, engine: str) -> None:
    options = {"full": FULL, "lora": LORA}[trained]
    alone, folder = plain(trained, options), tmp_path / "run"
    for ended in run_together(
        2, scst_config(folder, model, **OPTIONS, **options), folder, "scst", None, ENGINES[engine]
    ):
        assert ended.code == 0, ended.output
    log = (tmp_path / "run.0.log").read_text()
    counts = [re.findall(r"scst: ([\d,]+) trained", text) for text in (log, alone.with_suffix(".log").read_text())]
    assert counts[0] == counts[1] != []
    assert f"engine {engine}, 2 x 2 images a step and process" in log
    assert "Warning:" not in log  # of Python's, such as torch's of what it does with the wrapped module
    for a, b in zip(untimed(alone), untimed(folder), strict=True):
        assert a == pytest.approx(b, rel=2e-5, abs=1e-6)
    samples = [
        [(line["step"], line["image_id"], line["samples"], line["greedy"]) for line in lines(made, "samples.jsonl")]
        for made in (alone, folder)
    ]
    assert len(samples[0]) == 8
    assert samples[0] == samples[1]
    assert files(folder / "export/best") == files(alone / "export/best")
    start, expected, found = weights(model), weights(alone / "export/best"), weights(folder / "export/best")
    assert start.keys() == expected.keys() == found.keys()
    changed = {name for name, tensor in expected.items() if not torch.equal(tensor, start[name])}
    assert changed
    assert changed == {name for name, tensor in found.items() if not torch.equal(tensor, start[name])}
    for name, tensor in expected.items():
        # The bias of the keys has no gradient but rounding errors, which Adam scales up to full steps.
        if name.endswith("c_attn.bias"):
            (query, _, value), parts = tensor.chunk(3), found[name].chunk(3)
            assert torch.allclose(parts[0], query, atol=1e-4), name
            assert torch.allclose(parts[2], value, atol=1e-4), name
        elif not name.endswith("key.bias"):
            assert torch.allclose(found[name], tensor, atol=1e-4), name
    export = str(folder / "export/best")
    _, report = AutoModelForImageTextToText.from_pretrained(export, output_loading_info=True)
    assert not any(report.values()), report
    assert len(AutoTokenizer.from_pretrained(export)) == len(AutoTokenizer.from_pretrained(model))
    assert load_captioner(export).decode(torch.tensor([[5, 6]]))
