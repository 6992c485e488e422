"""Which folders and names are a pretrained captioner, and what is said of those that are not."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer
from transformers import Blip2Config, GitConfig, InstructBlipConfig

from rewards.clip.backbone import load_backbone
from rl_caption.captioners.base import CaptionerError, Decoding
from rl_caption.captioners.config import LoraConfig, ModelConfig
from rl_caption.captioners.huggingface import HuggingFaceCaptioner
from rl_caption.captioners.loading import load_captioner
from rl_caption.cli.caption import main
from rl_caption.cli.main import parse
from rl_caption.config.build import ConfigError, build_captioner, check_positions
from rl_caption.config.schema import DataConfig, DecodeConfig, EvaluateConfig, ScstConfig, XeConfig
from rl_caption.data.base import DataError
from rl_caption.programs.evaluate import score_captions
from tests.captioners_for_tests import REFERENCES, tiny_captioner, tiny_rows
from tests.hf_models_for_tests import PROMPT, save_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("blip", tmp_path_factory.mktemp("models") / "blip")


@pytest.fixture
def broken(blip: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(blip, tmp_path / "broken"))


def put_on_hub(name: str, model: Path, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache stands for the hub: it is what a name resolves to once the files are there."""
    cache = hub / f"models--{name.replace('/', '--')}"
    shutil.copytree(model, cache / "snapshots" / "0123abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def build(**model: Any) -> Any:
    return build_captioner(ModelConfig(**model), REFERENCES, cache_mb=0)


def refusal(**model: Any) -> str:
    with pytest.raises((CaptionerError, ConfigError)) as raised:
        build(**model)
    return str(raised.value)


def test_a_folder_or_name_that_is_nothing_is_named(tmp_path):
    assert "model.init: 'runs/lost/export/best' is not a saved captioner" in refusal(init="runs/lost/export/best")
    (tmp_path / "empty").mkdir()
    message = refusal(name="huggingface", init=str(tmp_path / "empty"))
    assert f"'{tmp_path / 'empty'}' is not a saved captioner: it has no config.json" in message
    assert "model.init is not set: name a model on the hub" in refusal(name="huggingface")


def test_another_kind_of_model_is_refused_with_those_that_are_known(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    message = refusal(init=str(tmp_path))
    assert "is a 'clip': expected one of blip, git, vision-encoder-decoder, blip-2, instructblip" in message
    (tmp_path / "config.json").write_text("[]")
    assert f"{tmp_path / 'config.json'} holds list" in refusal(init=str(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Blip2Config(text_config={"model_type": "t5"}), "has the encoder-decoder language model 't5': expected"),
        (InstructBlipConfig(text_config={"model_type": "t5"}), "has the encoder-decoder language model 't5': expected"),
        (GitConfig(num_image_with_embedding=6), "reads videos of 6 frames"),
    ],
    ids=["blip2", "instructblip", "git"],
)
def test_variants_that_no_adapter_knows_are_refused_before_weights_are_read(config, message, tmp_path):
    config.save_pretrained(tmp_path)
    assert message in refusal(init=str(tmp_path))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("processor_config.json", "image processor"),
        ("model.safetensors", r"model\.safetensors"),
        ("tokenizer.json", r"tokenizer\.json"),
        ("tokenizer_config.json", r"tokenizer_config\.json is missing"),
    ],
)
def test_a_part_that_is_missing_is_named(broken, file, message):
    """Without tokenizer files, Transformers makes up a tokenizer, of special tokens alone or of default settings."""
    for path in broken.glob(file):
        path.unlink()
    with pytest.raises(CaptionerError, match=message) as raised:
        build(init=str(broken))
    assert str(broken) in str(raised.value)


def test_weights_that_do_not_fit_are_named(broken):
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    (broken / "config.json").write_text(json.dumps(config))
    assert "weights are missing, such as text_decoder.bert.encoder.layer.2." in refusal(init=str(broken))


def test_a_tokenizer_of_another_model_is_refused(broken):
    tokenizer = Tokenizer.from_file(str(broken / "tokenizer.json"))
    tokenizer.add_tokens(["several", "more", "words"])
    tokenizer.save(str(broken / "tokenizer.json"))
    message = refusal(init=str(broken))
    assert "tokens up to 44" in message
    assert "44 tokens: they do not belong together" in message


def test_options_of_the_other_kind_of_captioner_are_refused(blip, tmp_path):
    scratch = tiny_captioner()
    scratch.save_pretrained(scratch.policy, tmp_path / "scratch")
    folder = str(tmp_path / "scratch")
    assert "takes no prompt" in refusal(init=folder, prompt=PROMPT)
    assert "model.lora is for a model of Transformers" in refusal(init=folder, lora=LoraConfig())
    assert "model.freeze is for a model of Transformers" in refusal(freeze=["encoder.*"])
    for init, options in itertools.product((folder, str(blip)), ({"kwargs": {"d_model": 8}}, {"tokenizer": "t.json"})):
        (key,) = options
        message = refusal(init=init, **options)
        assert f"model.{key}" in message
        assert f"model.init {init!r}" in message
    assert "model.dtype is 'bfloat16': weights that are trained are float32" in refusal(
        init=str(blip), dtype="bfloat16"
    )
    pattern = refusal(init=str(blip), freeze=["vision_tower.*"])
    assert "model.freeze has 'vision_tower.*', which matches no parameter; near ones are ['vision_model" in pattern


def test_white_space_of_a_prompt_is_single_spaces(blip):
    captioner = load_captioner(blip, prompt=f" {PROMPT.replace(' ', '  ')} ")
    assert isinstance(captioner, HuggingFaceCaptioner)
    assert captioner.prompt == PROMPT


def test_every_program_takes_a_name_on_the_hub(blip, tmp_path, monkeypatch, capsys):
    put_on_hub("someone/tiny-blip", blip, tmp_path / "hub", monkeypatch)
    assert build(name="huggingface", init="someone/tiny-blip", prompt=PROMPT).prompt == PROMPT
    assert "'someone/lost' is neither a folder with a config.json nor a model on the hub" in refusal(
        init="someone/lost"
    )

    (row,) = tiny_rows(1)
    row["image"].save(tmp_path / "photo.png")
    words = ["--model", "someone/tiny-blip", "--prompt", PROMPT, "--max_new_tokens", "5"]
    assert main([*words, str(tmp_path / "photo.png")]) == 0
    printed = capsys.readouterr().out.strip().split("\t")[1]

    record = {"image": "photo.png", "references": row["references"], "split": "test"}
    (tmp_path / "photos.jsonl").write_text(json.dumps(record))
    config = EvaluateConfig(
        model="someone/tiny-blip",
        prompt=PROMPT,
        data=DataConfig(format="jsonl", path=str(tmp_path / "photos.jsonl")),
        decode=DecodeConfig(max_new_tokens=5),
        metrics=["bleu"],
        tokenizer="python",
        out=str(tmp_path / "out"),
    )
    judged = score_captions(config)
    assert judged is not None
    assert list(judged[1].values()) == [printed]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("hf_*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_train_and_sample_what_their_names_stand_for(path, tmp_path, monkeypatch):
    """A tiny model of the family takes the place of the one on the hub."""
    kind = XeConfig if path.stem.endswith("_xe") else ScstConfig
    config = parse(kind, ["--config", str(path)], "test")
    family = path.stem.removeprefix("hf_").removesuffix("_xe").partition("_scst")[0].removesuffix("_lora")
    assert config.model.init is not None
    put_on_hub(config.model.init, save_model(family, tmp_path / "tiny"), tmp_path / "hub", monkeypatch)
    captioner = build_captioner(config.model, REFERENCES, cache_mb=0)
    assert isinstance(captioner, HuggingFaceCaptioner)
    names = {name for name, value in captioner.policy.named_parameters() if value.requires_grad}
    assert names
    assert all("lora_" in name for name in names) == (config.model.lora is not None)
    length = config.train.max_target_tokens if isinstance(config, XeConfig) else config.rollout.max_new_tokens
    check_positions(captioner, "length", length)
    inputs = captioner.preprocess(tiny_rows(2))
    captions = captioner.generate(captioner.policy, inputs, Decoding(max_new_tokens=length))
    captioner.token_logits(captioner.policy, inputs, captions).sum().backward()
    coco = parse(XeConfig, ["--config", str(CONFIGS / "coco_transformer_bu_xe.yaml")], "test").data
    assert replace(config.data, num_workers=0) == replace(coco, num_workers=0, features_root=None, features_kwargs={})
    assert config.train.batch_size % (config.train.micro_batch_size or 1) == 0


def test_prompts_of_rows_are_checked_before_training(blip):
    rows: Any = [tiny_rows(1)[0] | {"image_id": "long", "prompt": "two blue squares on a green field"}]
    check_positions(build(init=str(blip)), "rollout.max_new_tokens", 25, rows)
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens is 26: .* 25 tokens .* image 'long'"):
        check_positions(build(init=str(blip)), "rollout.max_new_tokens", 26, rows)
    with pytest.raises(DataError, match="image 'long' has the prompt"):
        check_positions(tiny_captioner(), "rollout.max_new_tokens", 4, rows)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """The hub refuses connections; the seconds that were waited for before trying again."""
    waited: list[float] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize("name", ["someone/lost", "someone/lo..st"])
def test_a_mistyped_name_is_asked_for_once_where_the_hub_cannot_be_reached(name, waits):
    assert repr(name) in refusal(name="huggingface", init=name)
    with pytest.raises(ValueError, match=f"hf-hub:{name}"):
        load_backbone(f"hf-hub:{name}")
    assert not waits


def test_a_model_of_the_cache_loads_where_the_hub_cannot_be_reached(blip, tmp_path, monkeypatch, waits):
    put_on_hub("someone/tiny-blip", blip, tmp_path / "hub", monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert build(name="huggingface", init="someone/tiny-blip").name == "someone/tiny-blip"
    assert not waits
