"""Saved models: nothing in one runs code, and one that is not whole is refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.dual import DualConfig, PretrainedDual
from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.text.icc import Icc
from rewards.trust import trust
from rl_caption.captioners.loading import load_captioner
from rl_caption.reward_models.distill import build_dual
from rl_caption.runtime.errors import EXPECTED
from rl_caption.training.checkpoint import seal
from tests.captioners_for_tests import tiny_captioner
from tests.clip_for_tests import ARCHITECTURE, tiny_checkpoint
from tests.encoders_for_tests import save_text_encoder
from tests.hf_models_for_tests import save_model
from tests.zoo.language_models import tiny_regressor

REFUSED = (ValueError, *EXPECTED)
IMAGE = "tests.encoders_for_tests:TinyImageEncoder"
PAYLOAD = "open('ran', 'w').close()\n"
WEIGHTS = "model.safetensors"
TINY = LCLIPConfig(
    embed_dim=8,
    image_size=16,
    patch_size=8,
    image_width=8,
    image_heads=2,
    image_blocks=1,
    vocab_size=16,
    context_length=8,
    text_width=8,
    text_heads=2,
    text_blocks=1,
    embedding_rank=4,
)


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path, monkeypatch) -> Any:
    """A working directory with a module that leaves a file where it is imported."""
    (tmp_path / "payload.py").write_text(PAYLOAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "builtins.input", lambda *_: pytest.fail("asked at the terminal")
    )
    yield
    assert not Path("ran").exists(), "received code ran"


def with_values(folder: Path, **values: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    "name", ["payload:Encoder", "os:system", "timm:hf-hub:payload/model"]
)
def test_a_class_in_a_received_configuration_needs_the_user_s_word(name, tmp_path):
    text, folder = save_text_encoder(tmp_path / "bert"), tmp_path / "dual"
    PretrainedDual(DualConfig(IMAGE, text, embed_dim=8, hidden=8)).save_pretrained(
        folder
    )
    with pytest.raises(ValueError, match=IMAGE):
        load_frozen_encoder(str(folder))
    trust([IMAGE])
    assert load_frozen_encoder(str(folder)).context_length
    shutil.rmtree(folder / "image_encoder", ignore_errors=True)
    with pytest.raises(ValueError, match=name):
        load_frozen_encoder(str(with_values(folder, image=name)))
    save_captioner(tmp_path / "captioner")
    with pytest.raises(REFUSED, match="captioner"):
        load_captioner(with_values(tmp_path / "captioner", model_type=name))


def test_code_beside_a_model_of_transformers_is_not_run(tmp_path):
    folder = tmp_path / "icc"
    tiny_regressor(folder)
    shutil.copy("payload.py", folder)
    names = ("AutoConfig", "AutoModelForSequenceClassification")
    auto_map = dict.fromkeys(names, "payload.Part")
    assert Icc(str(with_values(folder, auto_map=auto_map)))(None, ["a dog"])
    with pytest.raises(REFUSED):
        Icc(str(with_values(folder, model_type="payload")))


def test_the_tokenizer_of_an_open_clip_model_runs_no_code(tmp_path):
    options = {"trust_remote_code": True}
    text = {"hf_tokenizer_name": "x", "tokenizer_kwargs": options}
    config = {"embed_dim": 16, "vision_cfg": {}, "text_cfg": text}
    content = {"model_cfg": config, "preprocess_cfg": {}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_frozen_encoder(str(tmp_path))


def test_a_pickled_checkpoint_is_read_as_tensors_alone(tmp_path):
    torch.save({"state_dict": {"a": Path("x")}}, "clip.pt")
    with pytest.raises(ValueError, match=r"clip\.pt"):
        load_frozen_encoder(ARCHITECTURE, "clip.pt")
    assert load_frozen_encoder(ARCHITECTURE, tiny_checkpoint(tmp_path)).context_length


def save_captioner(folder: Path) -> None:
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, folder)


def save_blip(folder: Path) -> None:
    save_model("blip", folder)


def save_student(folder: Path) -> None:
    LCLIP(TINY).save_pretrained(folder)


def load_student(folder: Path) -> Any:
    return build_dual(str(folder), {}, {}, TINY.embed_dim)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (save_captioner, load_captioner),
        (save_blip, load_captioner),
        (save_student, load_student),
    ],
)
def test_a_model_that_is_not_whole_is_refused(save, load, tmp_path):
    whole = tmp_path / "whole"
    folder = tmp_path / "damaged"
    save(whole)
    load(whole)
    weights = load_file(whole / WEIGHTS)
    name = max(weights)
    for changed in (
        {key: value for key, value in weights.items() if key != name},
        weights | {name: torch.ones(3, 5)},
    ):
        shutil.copytree(whole, folder)
        save_file(changed, folder / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(EXPECTED, match="damaged"):
            load(folder)
        shutil.rmtree(folder)
    for file in (WEIGHTS, "config.json"):
        shutil.copytree(whole, folder)
        seal(folder)
        content = bytearray((folder / file).read_bytes())
        content[-5] ^= 1
        (folder / file).write_bytes(content)
        with pytest.raises(EXPECTED, match=file):
            load(folder)
        shutil.rmtree(folder)
