"""Which weights of a pretrained captioner are trained, and what becomes of adapters."""

from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator

from rl_caption.captioners.adaptation import freeze, unties
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.huggingface import ADAPTERS_FOLDER, HuggingFaceCaptioner
from rl_caption.captioners.loading import load_captioner
from rl_caption.programs.train import _frozen_copy
from tests.captioners_for_tests import logits_of, near, tiny_rows, token_ids
from tests.hf_models_for_tests import FAMILIES, save_model
from tests.zoo.families import save_vlm
from tests.zoo.language_models import PROMPT

IDS = token_ids("5 6 7 8", "9 6 5 5", images=2)
BIG = ("blip2", "instructblip")
VISION_LANGUAGE = ("qwen2_5_vl", "smolvlm")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    families = (*FAMILIES, *VISION_LANGUAGE)
    return {
        family: save_model(family, tmp_path_factory.mktemp("models") / family)
        for family in families
    }


def loaded(folder, dtype="float32"):
    captioner = load_captioner(folder, prompt=PROMPT, dtype=dtype)
    assert isinstance(captioner, HuggingFaceCaptioner)
    captioner.policy.eval()
    return captioner


def lora(**changes):
    return {
        "r": 2,
        "alpha": 4.0,
        "dropout": 0.0,
        "target_modules": None,
        "export_adapters": False,
        **changes,
    }


def trained(captioner):
    return {
        name
        for name, value in captioner.policy.model.named_parameters()
        if value.requires_grad
    }


def shaken(captioner):
    """Adapters as training leaves them: their second factor is no longer 0."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, value in captioner.policy.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn_like(value) * 0.3)
    return captioner


@torch.no_grad()
def logits(captioner):
    return logits_of(
        captioner,
        captioner.preprocess(tiny_rows(2)),
        IDS,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vision_tower_of_big_families_is_frozen_unless_asked_otherwise_and_no_name_changes(
    family, folders
):
    captioner = loaded(folders[family])
    whole = trained(captioner)
    names = set(captioner.policy.state_dict())
    captioner.adapt(
        frozen=[],
        lora=None,
        checkpointed=True,
    )
    assert trained(captioner) == whole, "an empty list freezes nothing"
    assert set(captioner.policy.state_dict()) == names
    captioner.adapt(frozen=None, lora=None, checkpointed=False)
    frozen = whole - trained(captioner)
    tower = {name for name in whole if name.startswith("vision_model.")}
    assert frozen == (tower if family in BIG else set())


def test_patterns_freeze_what_they_match_and_name_what_they_do_not():
    model = torch.nn.ModuleDict(
        {"encoder": torch.nn.Linear(2, 2), "decoder": torch.nn.Linear(2, 2)}
    )
    model["head"] = torch.nn.Linear(
        2,
        2,
        bias=False,
    )
    model["head"].weight = model["decoder"].weight  # tied, as GPT-2's output layer is
    with pytest.raises(CaptionerError, match=r"'encodr\.\*'.*encoder\.weight"):
        freeze(model, ["decoder.*", "encodr.*"])
    assert all(value.requires_grad for value in model.parameters()), (
        "nothing is frozen by half"
    )
    freeze(model, ["encoder.b*", "head.*"])
    left = {name for name, value in model.named_parameters() if value.requires_grad}
    assert left == {"encoder.weight", "decoder.bias"}


def test_what_leaves_nothing_to_train_or_names_no_module_is_refused(folders):
    pytest.importorskip("peft")
    captioner = loaded(folders["blip"])
    with pytest.raises(CaptionerError, match=r"model\.lora\.target_modules.*qurey"):
        captioner.adapt(
            frozen=None, lora=lora(target_modules=["qurey"]), checkpointed=False
        )
    with pytest.raises(CaptionerError, match=r"model\.freeze.*\['\*'\]"):
        captioner.adapt(
            frozen=["*"],
            lora=None,
            checkpointed=False,
        )


def test_adapters_are_trained_in_a_frozen_tower_too(folders):
    pytest.importorskip("peft")
    captioner = loaded(folders["blip2"])
    captioner.adapt(
        frozen=None, lora=lora(target_modules=["qkv", "q_proj"]), checkpointed=False
    )
    parts = {name.split(".")[0] for name in trained(captioner)}
    assert parts == {"vision_model", "language_model"}
    assert all("lora_" in name for name in trained(captioner))


@pytest.mark.parametrize("family", ["vit_gpt2", "blip2", *VISION_LANGUAGE])
def test_adapters_alone_are_read_by_peft_beside_the_model_that_they_were_trained_beside(
    family, folders, tmp_path
):
    peft = pytest.importorskip("peft")
    captioner = loaded(folders[family])
    captioner.adapt(
        frozen=None,
        lora=lora(export_adapters=True),
        checkpointed=True,
    )
    start = logits(captioner)
    expected = logits(shaken(captioner))
    captioner.save_pretrained(captioner.policy, tmp_path)
    folder = tmp_path / ADAPTERS_FOLDER
    config = peft.PeftConfig.from_pretrained(folder)
    base = loaded(Path(config.base_model_name_or_path))
    adapted = peft.PeftModel.from_pretrained(base.policy.model, folder)
    base.policy.model = adapted.base_model.model
    assert near(logits(base), expected)
    assert not near(start, expected, 1e-2)


TEXT = (
    "text_decoder",
    "git.encoder",
    "decoder",
    "language_model",
    "model.language_model",
    "model.text_model",
)
ADAPTED = [
    *((family, "bfloat16") for family in (*FAMILIES, *VISION_LANGUAGE)),
    ("blip2", "float32"),
]


@pytest.mark.parametrize(("family", "dtype"), ADAPTED)
def test_only_adapters_are_trained_in_float32_and_the_export_is_one_plain_model(
    family, dtype, folders, tmp_path
):
    pytest.importorskip("peft")
    captioner = loaded(folders[family], dtype)
    captioner.adapt(
        frozen=None,
        lora=lora(),
        checkpointed=False,
    )
    assert all("lora_" in name and name.startswith(TEXT) for name in trained(captioner))
    parameters = captioner.policy.parameters()
    kinds = {(value.dtype, value.requires_grad) for value in parameters}
    assert kinds == {(getattr(torch, dtype), False), (torch.float32, True)}
    start = logits(captioner)
    assert not near(start, logits(shaken(captioner)), 1e-2)
    captioner.save_pretrained(captioner.policy, tmp_path)
    assert not (tmp_path / ADAPTERS_FOLDER).exists()
    exported = loaded(tmp_path)
    names = list(exported.policy.state_dict())
    assert not any("lora" in name or "base_layer" in name for name in names)
    captioner.policy.float()  # the sum is not rounded to bfloat16
    assert near(logits(exported), logits(captioner))
    plain = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert plain.dtype == torch.float32, "nor by others"


TABLES = {
    "blip": "word_embeddings text_decoder.cls.predictions.decoder",
    "vit_gpt2": "wte decoder.lm_head",
    "vit_bert": "word_embeddings decoder.cls.predictions.decoder",
    "blip2": "embed_tokens language_model.lm_head",
    "florence2": "shared embed_tokens lm_head",
    "internvl": "embed_tokens lm_head",
    "paligemma": "embed_tokens lm_head",
    "gemma3": "embed_tokens lm_head",
    "git": "word_embeddings",
    "instructblip": "language_model.lm_head",
    "qwen2_vl": "embed_tokens",
    "smolvlm": "embed_tokens",
    "llava": "embed_tokens",
}
"""Families and their tables of words, which in the first eight families are tied to one another."""


@pytest.mark.parametrize(
    ("family", "table"),
    [(family, table) for family in TABLES for table in TABLES[family].split()],
)
def test_a_table_with_adapters_is_exported_as_trained_and_so_are_those_that_were_tied_to_it(
    family, table, folders, tmp_path
):
    pytest.importorskip("peft")
    if family not in folders:
        folders[family] = save_vlm(family, tmp_path / "start")
    captioner = loaded(folders[family])
    captioner.adapt(
        frozen=None,
        lora=lora(target_modules=[table]),
        checkpointed=False,
    )
    start = logits(captioner)
    expected = logits(shaken(captioner))
    assert not near(start, expected, 0.1)
    parted = unties(captioner.policy.model)
    captioner.save_pretrained(captioner.policy, tmp_path / "export")
    exported = loaded(tmp_path / "export")
    assert near(logits(exported), expected)
    if parted:
        assert not exported.policy.config.tie_word_embeddings, (
            "or another reader would tie them"
        )


def test_the_reference_policy_shares_what_is_not_trained(folders):
    pytest.importorskip("peft")
    captioner = loaded(folders["blip2"])
    captioner.adapt(
        frozen=None,
        lora=lora(),
        checkpointed=True,
    )
    before = logits(captioner)
    copied = _frozen_copy(captioner.policy, Accelerator(cpu=True))
    assert not any(value.requires_grad for value in copied.parameters())
    for (name, value), (_, other) in zip(
        captioner.policy.named_parameters(), copied.named_parameters(), strict=True
    ):
        assert (value is other) == (not value.requires_grad), name
    shaken(captioner)
    with torch.no_grad():
        after = captioner.token_logits(
            copied,
            captioner.preprocess(tiny_rows(2)),
            IDS,
        )
    assert torch.equal(after, before), "it stays where training started"
