"""Which weights of a pretrained captioner are trained, and what becomes of adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml
from accelerate import Accelerator
from safetensors.torch import save_model as save_weights

from rl_caption.ablation.results import last_policy
from rl_caption.captioners.adaptation import freeze
from rl_caption.captioners.base import CaptionerError, Decoding
from rl_caption.captioners.huggingface import ADAPTERS_FOLDER, HuggingFaceCaptioner
from rl_caption.programs.train import _frozen_copy
from rl_caption.scst.objectives import token_logprobs
from rl_caption.training.checkpoint import seal
from tests.captioners_for_tests import tiny_rows
from tests.hf_models_for_tests import FAMILIES, PROMPT, save_model, tiny_hf_captioner

IDS = torch.tensor([[[5, 6, 7, 8], [9, 6, 5, 5]]]).repeat(2, 1, 1)
BIG = ("blip2", "instructblip")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_model(family, tmp_path_factory.mktemp("models") / family) for family in FAMILIES}


def loaded(folder: Path, dtype: str = "float32") -> HuggingFaceCaptioner:
    captioner = HuggingFaceCaptioner.from_pretrained(folder, prompt=PROMPT, dtype=dtype)
    captioner.policy.eval()
    return captioner


def lora(**changes: Any) -> dict[str, Any]:
    return {"r": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": None, "export_adapters": False, **changes}


def trained(captioner: HuggingFaceCaptioner) -> set[str]:
    return {name for name, value in captioner.policy.model.named_parameters() if value.requires_grad}


def shaken(captioner: HuggingFaceCaptioner) -> HuggingFaceCaptioner:
    """Adapters as training leaves them: their second factor is no longer 0."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, value in captioner.policy.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn_like(value) * 0.3)
    return captioner


@torch.no_grad()
def logits(captioner: HuggingFaceCaptioner) -> torch.Tensor:
    return captioner.token_logits(captioner.policy, captioner.preprocess(tiny_rows(2)), IDS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vision_tower_of_big_families_is_frozen_and_nothing_of_the_others(
    family: str, folders: dict[str, Path]
) -> None:
    captioner = loaded(folders[family])
    whole = trained(captioner)
    captioner.adapt(frozen=None, lora=None, checkpointed=False)
    tower = {name for name in whole if name.startswith("vision_model.")} if family in BIG else set()
    assert bool(tower) == (family in BIG)
    assert trained(captioner) == whole - tower
    other = loaded(folders[family])
    other.adapt(frozen=[], lora=None, checkpointed=False)
    assert trained(other) == whole, "an empty list freezes nothing"


def test_patterns_freeze_what_they_match_and_name_what_they_do_not() -> None:
    model = torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2), "decoder": torch.nn.Linear(2, 2)})
    model["head"] = torch.nn.Linear(2, 2, bias=False)
    model["head"].weight = model["decoder"].weight  # tied, as GPT-2's output layer is
    with pytest.raises(CaptionerError, match=r"'encodr\.\*', which matches no parameter; near ones are .*encoder"):
        freeze(model, ["decoder.*", "encodr.*"])
    assert all(value.requires_grad for value in model.parameters()), "nothing is frozen by half"
    assert freeze(model, ["encoder.b*", "head.*"]) == ["encoder.bias", "head.weight"]
    assert {name for name, value in model.named_parameters() if value.requires_grad} == {
        "encoder.weight",
        "decoder.bias",
    }


def test_a_policy_with_nothing_to_train_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(CaptionerError, match=r"model\.freeze \['\*'\] leaves nothing to train"):
        loaded(folders["git"]).adapt(frozen=["*"], lora=None, checkpointed=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["qurey"]}, "model.lora.target_modules: .*near ones are .*query"),
        ({"r": 0}, "r 0, .*expected r of at least 1"),
        ({"dropout": 1.0}, "dropout 1.0: expected .*from 0 to below 1"),
    ],
)
def test_adapters_that_cannot_be_are_refused(changes: dict[str, Any], message: str, folders: dict[str, Path]) -> None:
    pytest.importorskip("peft")
    with pytest.raises(CaptionerError, match=message):
        loaded(folders["blip"]).adapt(frozen=None, lora=lora(**changes), checkpointed=False)


def test_adapters_are_trained_in_a_frozen_tower_too(folders: dict[str, Path]) -> None:
    pytest.importorskip("peft")
    captioner = loaded(folders["blip2"])
    captioner.adapt(frozen=None, lora=lora(target_modules=["qkv", "q_proj"]), checkpointed=False)
    parts = {name.split(".")[0] for name in trained(captioner)}
    assert parts == {"vision_model", "language_model"}
    assert all("lora_" in name for name in trained(captioner))


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_activations_change_no_gradient_of_adapters_and_no_export(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    gradients: list[dict[str, torch.Tensor]] = []
    for checkpointed in (False, True):
        captioner = loaded(folders[family])
        captioner.adapt(frozen=None, lora=lora(), checkpointed=checkpointed)
        shaken(captioner)
        inputs = captioner.preprocess(tiny_rows(2))
        token_logprobs(captioner.token_logits(captioner.policy, inputs, IDS), IDS).sum().backward()
        named = captioner.policy.named_parameters()
        gradients.append({name: value.grad for name, value in named if value.grad is not None})
    assert gradients[0].keys() == gradients[1].keys(), "engines and checkpoints know parameters by their names"
    assert gradients[0]
    largest = max(float(gradient.abs().max()) for gradient in gradients[0].values())
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradients[1][name], gradient, rtol=1e-3, atol=1e-5 * largest), name
    captioner.save_pretrained(captioner.policy, tmp_path)
    assert torch.allclose(logits(loaded(tmp_path)), logits(captioner), atol=1e-4)


@pytest.mark.parametrize("family", ["vit_gpt2", "blip2"])
def test_adapters_alone_are_read_by_peft_beside_the_model_that_they_were_trained_beside(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    captioner = loaded(folders[family])
    captioner.adapt(frozen=None, lora=lora(export_adapters=True), checkpointed=True)
    start = logits(captioner)
    expected = logits(shaken(captioner))
    captioner.save_pretrained(captioner.policy, tmp_path)
    assert {file.name for file in (tmp_path / ADAPTERS_FOLDER).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = peft.PeftConfig.from_pretrained(tmp_path / ADAPTERS_FOLDER)
    base = loaded(Path(config.base_model_name_or_path))
    base.policy.model = peft.PeftModel.from_pretrained(base.policy.model, tmp_path / ADAPTERS_FOLDER).base_model.model
    assert torch.allclose(logits(base), expected, atol=1e-4)
    assert not torch.allclose(start, expected, atol=1e-2)
    assert isinstance(transformers.AutoConfig.from_pretrained(tmp_path), type(base.policy.config)), "and a plain model"


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_beside_bfloat16_weights_are_float32_and_the_export_keeps_what_they_learned(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    captioner = loaded(folders[family], "bfloat16")
    captioner.adapt(frozen=None, lora=lora(), checkpointed=False)
    shaken(captioner)
    kinds = {(value.dtype, value.requires_grad) for value in captioner.policy.parameters()}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
    captioner.save_pretrained(captioner.policy, tmp_path)
    exported = loaded(tmp_path)
    whole = copy.deepcopy(captioner)
    whole.policy.float()
    assert torch.allclose(logits(exported), logits(whole), atol=1e-4), "the sum is not rounded to bfloat16"
    ours = captioner.generate(captioner.policy, captioner.preprocess(tiny_rows(2)), Decoding(max_new_tokens=4))
    assert ours.shape[:2] == (2, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_shard_layers_that_are_there_and_find_weights_by_the_names_of_parameters(
    family: str, folders: dict[str, Path]
) -> None:
    """FSDP refuses a class that is not in the model, as some models' own lists have; layers hold most weights."""
    captioner = loaded(folders[family])
    before = set(captioner.policy.state_dict())
    captioner.adapt(frozen=[], lora=None, checkpointed=True)
    kinds = [type(module).__name__ for module in captioner.policy.modules()]
    assert set(captioner.policy._no_split_modules) <= set(kinds)
    layers = 6 if family in BIG else 4  # two each of the vision tower, the text model, and the Q-Former
    assert sum(kinds.count(name) for name in captioner.policy._no_split_modules) == layers
    named = {name for name, _ in captioner.policy.named_parameters(remove_duplicate=False)}
    assert set(captioner.policy.state_dict()) == before
    assert named <= before


def test_the_reference_policy_shares_what_is_not_trained(folders: dict[str, Path]) -> None:
    pytest.importorskip("peft")
    captioner = loaded(folders["blip2"])
    captioner.adapt(frozen=None, lora=lora(), checkpointed=True)
    before = logits(captioner)
    stage: Any = SimpleNamespace(accelerator=Accelerator(cpu=True))
    copied: Any = _frozen_copy(captioner, stage)
    assert not any(value.requires_grad for value in copied.parameters())
    for (name, value), (_, other) in zip(captioner.policy.named_parameters(), copied.named_parameters(), strict=True):
        assert (value is other) == (not value.requires_grad), name
    shaken(captioner)
    with torch.no_grad():
        after = captioner.token_logits(copied, captioner.preprocess(tiny_rows(2)), IDS)
    assert torch.equal(after, before), "it stays where training started"


def test_an_ablation_judges_the_last_policy_of_a_run_that_trained_adapters(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    captioner = loaded(folders["blip"])
    captioner.adapt(frozen=None, lora=lora(), checkpointed=True)
    captioner.save_pretrained(captioner.policy, tmp_path / "run" / "export" / "best")
    last = logits(shaken(captioner))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    checkpoint.mkdir(parents=True)
    save_weights(captioner.policy, str(checkpoint / "model.safetensors"))
    seal(checkpoint)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump({"model": {"lora": lora(export_adapters=True)}}))
    judged = loaded(last_policy(tmp_path / "run", tmp_path / "last"))
    assert torch.allclose(logits(judged), last, atol=1e-4)
    assert not (tmp_path / "last" / ADAPTERS_FOLDER).exists(), "they belong beside another model than export/best"


def test_a_captioner_without_adapters_exports_none(tmp_path: Path) -> None:
    captioner = tiny_hf_captioner("git", tmp_path / "start")
    captioner.save_pretrained(captioner.policy, tmp_path / "export")
    assert not (tmp_path / "export" / ADAPTERS_FOLDER).exists()
