"""Which folders and names are a pretrained captioner, and what is said of those that are not."""

import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
)

from rewards.clip.backbone import load_frozen_encoder
from rewards.text.perplexity import Perplexity
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.config import (
    Decoding,
    ModelConfig,
)
from rl_caption.cli.configuration import parse
from rl_caption.cli.main import run_program
from rl_caption.config.build import ConfigError, build_captioner, check_positions
from rl_caption.config.schema import ScstConfig, XeConfig
from rl_caption.lab.config import ShareConfig
from rl_caption.lab.share import share
from tests.captioners_for_tests import (
    REFERENCES,
    captions_of,
    logits_of,
    tiny_captioner,
    tiny_rows,
)
from tests.clip_for_tests import tiny_student
from tests.hf_models_for_tests import put_on_hub, save_model
from tests.zoo.language_models import PROMPT, tiny_gpt2

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.fixture(scope="module")
def blip(tmp_path_factory):
    return save_model("blip", tmp_path_factory.mktemp("models") / "blip")


def build(**model):
    return build_captioner(
        ModelConfig.choose(model)(**model),
        REFERENCES,
        cache_mb=0,
    )


def refusal(**model):
    with pytest.raises((CaptionerError, ConfigError)) as raised:
        build(**model)
    return str(raised.value)


def test_what_is_no_captioner_or_of_an_unknown_kind_is_refused_before_weights_are_read(
    tmp_path,
):
    assert "model.init: 'runs/lost/export/best' is not a saved captioner" in refusal(
        init="runs/lost/export/best"
    )
    message = refusal(name="huggingface", init=str(tmp_path))
    assert f"'{tmp_path}' is not a saved captioner: it has no config.json" in message
    assert "model.init: 'None' is not a saved" in refusal(name="huggingface")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    message = refusal(init=str(tmp_path))
    assert "is a 'clip': expected a model that writes texts of images" in message


@pytest.mark.parametrize(
    ("family", "architectures"),
    [
        ("blip", ["BlipForQuestionAnswering"]),
        ("git", ["GitModel"]),
        ("vit_gpt2", ["SpeechEncoderDecoderModel"]),
    ],
)
def test_a_checkpoint_for_another_task_is_no_captioner(family, architectures, tmp_path):
    folder = save_model(family, tmp_path / "model")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    assert build(init=str(folder))
    file.write_text(json.dumps(config | {"architectures": None}))
    assert build(init=str(folder)), "of a configuration that does not tell"
    file.write_text(json.dumps(config | {"architectures": architectures}))
    assert str(architectures) in refusal(init=str(folder))
    with pytest.raises(CaptionerError, match=str(folder)):
        share(ShareConfig(path=str(folder), out=str(tmp_path / "shared")))
    assert not (tmp_path / "shared").exists()


def test_a_language_model_with_another_head_is_refused(tmp_path):
    folder = tiny_gpt2(tmp_path / "gpt2")
    config = GPT2Config.from_pretrained(folder, pad_token_id=0)
    classifier = shutil.copytree(folder, tmp_path / "classifier")
    GPT2ForSequenceClassification(config).save_pretrained(classifier)
    assert Perplexity(str(folder))
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification"):
        Perplexity(str(classifier))


def test_the_folder_of_a_run_is_answered_by_its_export(tmp_path):
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, tmp_path / "run/export/best")
    tiny_student(tmp_path / "lclip/export/last")
    tiny_gpt2(tmp_path / "lm/export/best")
    for load, folder, export in (
        (lambda name: build(init=name), "run", "run/export/best"),
        (lambda name: build(init=name), "run/export", "run/export/best"),
        (load_frozen_encoder, "lclip", "lclip/export/last"),
        (Perplexity, "lm", "lm/export/best"),
    ):
        answer = re.escape(f"did you mean {tmp_path / export}?")
        with pytest.raises(ValueError, match=answer):
            load(str(tmp_path / folder))


def add_a_layer(folder):
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))


def add_words(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["several", "more", "words"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("processor_config.json", "processor"),
        ("model.safetensors", r"model\.safetensors"),
        # Without one of these, Transformers makes up a tokenizer, of special tokens alone or of
        # default settings.
        ("tokenizer.json", r"tokenizer\.json"),
        ("tokenizer_config.json", r"tokenizer_config\.json"),
        (add_a_layer, r"text_decoder\.bert\.encoder\.layer\.2\."),
        (add_words, r"44.*44"),
    ],
)
def test_a_part_that_is_missing_or_of_another_model_is_named(
    blip, tmp_path, damage, message
):
    folder = Path(shutil.copytree(blip, tmp_path / "broken"))
    if callable(damage):
        damage(folder)
    else:
        (folder / damage).unlink()
    with pytest.raises(CaptionerError, match=message) as raised:
        build(init=str(folder))
    assert str(folder) in str(raised.value)


def test_options_of_the_other_kind_of_captioner_are_refused(blip, tmp_path):
    scratch = tiny_captioner()
    scratch.save_pretrained(scratch.policy, tmp_path / "scratch")
    folder = str(tmp_path / "scratch")
    assert "takes no prompt" in refusal(init=folder, prompt=PROMPT)
    with pytest.raises(ValueError, match="dtype is 'bfloat16'"):
        build(init=str(blip), dtype="bfloat16")


def test_programs_take_a_name_on_the_hub(blip, tmp_path, monkeypatch, capsys):
    name = "someone/tiny-blip"
    put_on_hub(name, blip, tmp_path / "hub", monkeypatch)
    spaced = f" {PROMPT.replace(' ', '  ')} "
    captioner = build(name="huggingface", init=name, prompt=spaced)
    assert captioner.prompt == PROMPT
    lost = refusal(init="someone/lost")
    assert "'someone/lost' is neither on the hub nor in its cache" in lost
    rows = tiny_rows(1)
    rows[0]["image"].save(tmp_path / "photo.png")
    options = ["--model", name, "--prompt", PROMPT, "--max_new_tokens", "5"]
    run_program("caption", [*options, str(tmp_path / "photo.png")])
    printed = capsys.readouterr().out.strip().split("\t")[1]
    captioner.policy.eval()
    inputs = captioner.preprocess(rows)
    ids = captions_of(captioner, inputs, Decoding(max_new_tokens=5))
    assert captioner.decode(ids[0]) == [printed]


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("hf_*.yaml")), ids=lambda path: path.stem
)
def test_shipped_configurations_train_and_sample_what_their_names_stand_for(
    path, tmp_path, monkeypatch
):
    """A tiny model of the family takes the place of the one on the hub."""
    kind = XeConfig if path.stem.endswith("_xe") else ScstConfig
    config = parse(
        kind,
        ["--config", str(path)],
        "test",
    )
    family = re.sub(r"^hf_|(_lora)?_(xe|scst).*$", "", path.stem)
    family = family.replace("qwen_vl", "qwen2_5_vl")
    assert config.model.init is not None
    if config.model.init.startswith("runs/"):
        monkeypatch.chdir(tmp_path)
        save_model(family, tmp_path / config.model.init)
    else:
        model = save_model(family, tmp_path / "tiny")
        put_on_hub(config.model.init, model, tmp_path / "hub", monkeypatch)
    captioner = build_captioner(config.model, REFERENCES, cache_mb=0)
    parameters = captioner.policy.named_parameters()
    names = [name for name, value in parameters if value.requires_grad]
    assert names
    assert all("lora_" in name for name in names) == (config.model.lora is not None)
    length = (
        config.train.max_target_tokens
        if isinstance(config, XeConfig)
        else config.rollout.max_new_tokens
    )
    check_positions(captioner, "length", length)
    inputs = captioner.preprocess(tiny_rows(2))
    decoding = Decoding(max_new_tokens=length)
    captions = captions_of(captioner, inputs, decoding)
    logits_of(captioner, inputs, captions).sum().backward()


def test_where_the_hub_cannot_be_reached_the_cache_is_read_and_a_mistyped_name_asked_for_once(
    blip, tmp_path, monkeypatch
):
    waited = []  # seconds, before trying again
    put_on_hub("someone/tiny-blip", blip, tmp_path / "hub", monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        huggingface_hub.utils._http.time,
        "sleep",
        waited.append,
    )
    assert build(name="huggingface", init="someone/tiny-blip")
    for name in ("someone/lost", "someone/lo..st"):
        assert repr(name) in refusal(name="huggingface", init=name)
        with pytest.raises(ValueError, match=f"hf-hub:{name}"):
            load_frozen_encoder(f"hf-hub:{name}")
    assert not waited


@pytest.mark.parametrize("family", ["blip", "git"])
def test_an_eos_that_the_tokenizer_does_not_have_is_refused(tmp_path, family):
    folder = save_model(family, tmp_path / family)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        content["eos_token_id"] = 7
        if "text_config" in content:
            content["text_config"]["sep_token_id"] = 7
        (folder / name).write_text(json.dumps(content))
    assert "EOS" in refusal(init=str(folder))
