"""A captioner of Transformers under the engines that shard it: the steps and the export
of one plain process.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForImageTextToText, AutoTokenizer

from rl_caption.captioners.loading import load_captioner
from tests.hf_models_for_tests import save_model
from tests.training_for_tests import (
    ENGINES,
    checked_run,
    files,
    lines,
    run_together,
    scst_config,
    untimed,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("vit_gpt2", {"model.freeze": ["encoder.embeddings.*"]}),
    "gpt2_adapters": ("vit_gpt2", {"model.lora": {"r": 2}}),
    "blip": ("blip", {"model.freeze": []}),
    "blip_decoder": ("blip", {"model.freeze": ["vision_model.*"]}),
    "git_decoder": (
        "git",
        {"model.freeze": ["*image_encoder.*", "*visual_projection.*"]},
    ),
    "qwen": ("qwen2_5_vl", {"model.freeze": []}),
    "qwen_decoder": ("qwen2_5_vl", {}),
    "smolvlm_adapters": ("smolvlm", {"model.lora": {"r": 2}}),
}
"""Family of the model, and what of it is trained."""
ENCODED_ONCE = {
    "gpt2_adapters",
    "blip_decoder",
    "qwen_decoder",
    "smolvlm_adapters",
}
"""Nothing that the states of an image depend on is trained, so that a step makes them once."""


class Letters:
    """A reward that captions of random models get more or less of: the share of letters.

    It is called between sampling and the update, and in validation, and prints how
    often an image encoder was by then.
    """

    __name__, columns, bounds, signature = (
        "letters",
        frozenset[str](),
        (0.0, 1.0),
        "letters",
    )

    def __init__(self) -> None:
        self.encoded = 0
        register_module_forward_pre_hook(self._count)

    def __call__(
        self, prompts: object, completions: list[str], **columns: object
    ) -> list[float]:
        print(f"encoder: {self.encoded} calls", flush=True)
        return [sum(map(str.isalpha, text)) / max(len(text), 1) for text in completions]

    def _count(self, module: nn.Module, inputs: object) -> None:
        self.encoded += type(module).__name__ in ENCODERS


class Later:
    """A judge that likes the newest model best, so that it is the one that is exported."""

    __name__, columns, bounds, signature = (
        "later",
        frozenset[str](),
        (0.0, 1.0),
        "later",
    )

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, prompts: object, completions: list[str], **columns: object
    ) -> list[float]:
        self.calls += 1
        return [1 - 1 / self.calls] * len(completions)


ENCODERS = ("ViTModel", "BlipVisionModel", "GitVisionModel", "Qwen2_5_VisionTransformerPretrainedModel",
            "SmolVLMVisionTransformer")  # fmt: skip
OPTIONS = {
    "reward.terms": {"letters": {"target": f"{__name__}:Letters"}},
    "monitor": {
        "judges": {"later": {"target": f"{__name__}:Later"}},
        "best_by": "later",
    },
    "model.name": "huggingface",
    "model.prompt": "a photo of",
    "data.cache_mb": 0,  # visual tokens that are kept take no pass of an encoder
    "train.max_steps": 2,
    "train.micro_batch_size": 2,
    "train.grad_clip_norm": 0.1,
    "run.log_samples": 4,  # rank 0 holds the first four images of the batch of eight
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A function of what is trained: folders of the model, and of two steps of one
    plain process from it.
    """
    made: dict[str, tuple[Path, Path]] = {}
    models: dict[str, Path] = {}

    def plain_run(name: str) -> tuple[Path, Path]:
        family, options = TRAINED[name]
        if family not in models:
            models[family] = save_model(
                family, tmp_path_factory.mktemp("model") / family
            )
        if name not in made:
            model, folder = models[family], tmp_path_factory.mktemp("plain") / name
            checked_run(
                scst_config(folder, model, **OPTIONS, **options), folder, "scst"
            )
            made[name] = model, folder
        return made[name]

    return plain_run


@pytest.mark.parametrize(
    ("trained", "engine"),
    [
        ("gpt2", "zero3"),
        ("gpt2_adapters", "zero2"),
        ("blip", "zero2"),
        ("git_decoder", "zero3"),
        ("qwen", "zero3"),
        ("qwen_decoder", "zero2"),
        ("smolvlm_adapters", "zero3"),
    ],
)
def test_two_processes_train_and_export_as_one(plain, tmp_path, trained, engine):
    model, alone = plain(trained)
    folder, log_alone = tmp_path / "run", alone.with_suffix(".log").read_text()
    config = scst_config(folder, model, **OPTIONS, **TRAINED[trained][1])
    for ended in run_together(2, config, folder, "scst", None, ENGINES[engine]):
        assert ended.code == 0, ended.output
    log = (tmp_path / "run.0.log").read_text()
    counts = [
        re.findall(r"\[scst\] ([\d,]+) trained", text) for text in (log, log_alone)
    ]
    assert counts[0] == counts[1] != []
    assert f"engine {engine}, " in log
    assert (
        "Warning:" not in log
    )  # of Python's, such as torch's of what it does with the wrapped module
    # From one step's rewards to the next, for each micro-batch: sampling, and what a loss reads:
    # policy, reference, XE. The two images of a vision-language model's batch are encoded one by
    # one where their tokens could be kept.
    calls = 1 if trained in ENCODED_ONCE else 4
    apart = trained in ("qwen_decoder", "smolvlm_adapters")
    here = 2 if apart and engine != "zero3" else 1
    assert [encoder_calls(log), encoder_calls(log_alone)] == [
        2 * calls * here,
        4 * calls * (1 + apart),
    ]
    assert_same_steps(alone, folder)
    assert files(folder / "export/best") == files(alone / "export/best")
    assert_same_weights(model, alone, folder)
    export = str(folder / "export/best")
    _, report = AutoModelForImageTextToText.from_pretrained(
        export, output_loading_info=True
    )
    assert not any(report.values()), report
    assert len(AutoTokenizer.from_pretrained(export)) == len(
        AutoTokenizer.from_pretrained(model)
    )
    assert load_captioner(export).decode(torch.tensor([[5, 6]]))


@pytest.mark.parametrize("trained", ["blip", "qwen"])
def test_states_with_gradient_are_shared_under_ddp(plain, tmp_path, trained):
    """With one micro-batch, captions are drawn from the states that they are scored with."""
    (model, alone), folder = plain(trained), tmp_path / "run"
    options = OPTIONS | TRAINED[trained][1] | {"train.micro_batch_size": 4}
    for ended in run_together(2, scst_config(folder, model, **options), folder, "scst"):
        assert ended.code == 0, ended.output
    assert (
        encoder_calls((tmp_path / "run.0.log").read_text()) == 3
    )  # these, of the reference policy, of cross-entropy
    assert_same_steps(alone, folder)
    assert_same_weights(model, alone, folder)


def test_states_in_bf16_are_read_by_the_reference_policy(plain, tmp_path):
    """The reference policy, which ZeRO-3 does not shard, computes in the same precision."""
    (model, alone), folder = plain("blip_decoder"), tmp_path / "run"
    options = OPTIONS | TRAINED["blip_decoder"][1] | {"train.mixed_precision": "bf16"}
    for ended in run_together(
        2, scst_config(folder, model, **options), folder, "scst", None, ENGINES["zero3"]
    ):
        assert ended.code == 0, ended.output
    assert encoder_calls((tmp_path / "run.0.log").read_text()) == 2
    (expected, *_), (found, *_) = (
        [line for line in untimed(made) if "policy/kl" in line]
        for made in (alone, folder)
    )
    assert found["policy/kl"] == pytest.approx(
        0, abs=1e-3
    )  # of the starting policy to itself
    assert found["loss/xe"] == pytest.approx(expected["loss/xe"], rel=0.01)
    assert found["loss/xe"] != expected["loss/xe"]


def encoder_calls(log: str) -> int:
    """From the rewards of the first step to those of the second; validation before and
    after has other counts.
    """
    _, first, second, _ = dict.fromkeys(re.findall(r"encoder: (\d+) calls", log))
    return int(second) - int(first)


def assert_same_steps(alone: Path, together: Path) -> None:
    """Log, captions and rewards of two runs."""
    for a, b in zip(untimed(alone), untimed(together), strict=True):
        assert a == pytest.approx(b, rel=2e-5, abs=1e-6)
    samples = [
        [
            tuple(map(line.get, ("step", "image_id", "samples", "rewards", "greedy")))
            for line in lines(made, "samples.jsonl")
        ]
        for made in (alone, together)
    ]
    assert len(samples[0]) == 8
    assert samples[0] == samples[1]


def assert_same_weights(model: Path, alone: Path, together: Path) -> None:
    """Of the exports of two runs from the model: the same are changed, and they are equal to 1e-4."""
    start, expected, found = (
        weights(folder)
        for folder in (model, alone / "export/best", together / "export/best")
    )
    assert start.keys() == expected.keys() == found.keys()
    changed = {
        name
        for name, tensor in expected.items()
        if not torch.equal(tensor, start[name])
    }
    assert changed
    assert changed == {
        name for name, tensor in found.items() if not torch.equal(tensor, start[name])
    }
    for name, tensor in expected.items():
        # The bias of the keys has no gradient but rounding errors, which Adam scales up to full
        # steps.
        if name.endswith(("c_attn.bias", "qkv.bias")):
            (query, _, value), parts = tensor.chunk(3), found[name].chunk(3)
            assert torch.allclose(parts[0], query, atol=1e-4), name
            assert torch.allclose(parts[2], value, atol=1e-4), name
        elif not name.endswith("key.bias"):
            assert torch.allclose(found[name], tensor, atol=1e-4), name
