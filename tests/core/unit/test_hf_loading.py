"""Which folders and names are a pretrained captioner, and what is said of those that are not."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import (
    BlipConfig,
    BlipForQuestionAnswering,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from rewards.clip.backbone import load_frozen_encoder
from rewards.text.perplexity import Perplexity
from rl_caption.captioners.base import CaptionerError
from rl_caption.captioners.config import (
    Decoding,
    ModelConfig,
    SavedModelConfig,
)
from rl_caption.captioners.huggingface import HuggingFaceCaptioner
from rl_caption.cli.caption import caption_files
from rl_caption.cli.configuration import parse
from rl_caption.cli.main import run_program
from rl_caption.config.build import ConfigError, build_captioner, check_positions
from rl_caption.config.commands import CaptionConfig, EvaluateModelConfig
from rl_caption.config.schema import DataConfig, ScstConfig, XeConfig
from rl_caption.integrations.trl.model import load_vlm
from rl_caption.lab.config import ShareConfig
from rl_caption.lab.share import share
from rl_caption.programs.evaluate import score_captions
from tests.captioners_for_tests import REFERENCES, tiny_captioner, tiny_rows
from tests.clip_for_tests import tiny_student
from tests.hf_models_for_tests import put_on_hub, save_model
from tests.zoo.language_models import PROMPT, tiny_gpt2
from tests.zoo.vision_language import tiny_qwen2_vl

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.fixture(scope="module")
def blip(tmp_path_factory) -> Path:
    return save_model("blip", tmp_path_factory.mktemp("models") / "blip")


def build(**model: Any) -> Any:
    return build_captioner(ModelConfig.choose(model)(**model), REFERENCES, cache_mb=0)


def refusal(**model: Any) -> str:
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
        ("blip", ["BlipForImageTextRetrieval", "BlipModel"]),
        ("git", ["GitModel"]),
        ("blip2", ["Blip2ForImageTextRetrieval"]),
        ("vit_gpt2", ["SpeechEncoderDecoderModel"]),
    ],
)
def test_a_checkpoint_for_another_task_is_no_captioner(
    family, architectures, tmp_path, capsys
):
    folder = save_model(family, tmp_path / "model")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    assert build(init=str(folder))
    file.write_text(
        json.dumps(
            {key: value for key, value in config.items() if key != "architectures"}
        )
    )
    assert build(init=str(folder)), "of a configuration that does not tell"
    file.write_text(json.dumps(config | {"architectures": architectures}))
    assert str(architectures) in refusal(init=str(folder))
    with pytest.raises(CaptionerError, match=str(folder)):
        share(ShareConfig(path=str(folder), out=str(tmp_path / "shared")))
    assert not (tmp_path / "shared").exists()


def test_weights_of_a_blip_that_answers_questions_are_refused(tmp_path):
    folder = save_model("blip", tmp_path / "captioner")
    answering = BlipForQuestionAnswering(BlipConfig.from_pretrained(folder))
    answering.save_pretrained(shutil.copytree(folder, tmp_path / "vqa"))
    assert "BlipForQuestionAnswering" in refusal(init=str(tmp_path / "vqa"))


def test_models_with_weights_of_another_head_are_refused(tmp_path):
    folder = tiny_gpt2(tmp_path / "gpt2")
    config = GPT2Config.from_pretrained(folder, pad_token_id=0)
    GPT2ForSequenceClassification(config).save_pretrained(
        shutil.copytree(folder, tmp_path / "classifier")
    )
    assert Perplexity(str(folder))
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification"):
        Perplexity(str(tmp_path / "classifier"))
    vlm = tiny_qwen2_vl(tmp_path / "vlm")
    weights = load_file(vlm / "model.safetensors")
    dropped = next(name for name in weights if name.endswith("mlp.gate_proj.weight"))
    save_file({name: value for name, value in weights.items() if name != dropped}, vlm / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(CaptionerError, match=r"gate_proj\.weight"):
        load_vlm(SavedModelConfig(init=str(vlm)))


def test_the_folder_of_a_run_is_answered_by_its_export(tmp_path):
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, tmp_path / "run/export/best")
    tiny_student(tmp_path / "lclip/export/last")
    tiny_gpt2(tmp_path / "lm/export/best")
    expected = str(tmp_path / "run/export/best")
    (row,) = tiny_rows(1)
    row["image"].save(tmp_path / "photo.png")
    line = {"image": "photo.png", "references": row["references"], "split": "test"}
    (tmp_path / "photos.jsonl").write_text(json.dumps(line))
    data = DataConfig(format="jsonl", path=str(tmp_path / "photos.jsonl"))
    for folder in ("run", "run/export"):
        assert f"did you mean {expected}?" in refusal(init=str(tmp_path / folder))
        for call in (
            lambda name: caption_files(
                CaptionConfig(model=name, photos=[str(tmp_path / "photo.png")])
            ),
            lambda name: score_captions(
                EvaluateModelConfig(model=name, data=data, out=str(tmp_path / "out"))
            ),
        ):
            with pytest.raises(CaptionerError, match=rf"{re.escape(expected)}\?"):
                call(str(tmp_path / folder))
    for load, folder, export in (
        (load_frozen_encoder, "lclip", "export/last"),
        (Perplexity, "lm", "export/best"),
        (lambda name: load_vlm(SavedModelConfig(init=name)), "lm", "export/best"),
    ):
        with pytest.raises(
            ValueError, match=rf"{re.escape(str(tmp_path / folder / export))}\?"
        ):
            load(str(tmp_path / folder))


def add_a_layer(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))


def add_words(folder: Path) -> None:
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
    for words, key in (
        (["--model.freeze=[encoder.*]"], "model.freeze"),
        ([f"--model.init={folder}", "--model.min_count=2"], "model.min_count"),
    ):
        with pytest.raises(ConfigError, match=f"there is no key {key}"):
            parse(XeConfig, words, "xe")
    with pytest.raises(ValueError, match="dtype is 'bfloat16'"):
        build(init=str(blip), dtype="bfloat16")


def test_every_program_takes_a_name_on_the_hub(blip, tmp_path, monkeypatch, capsys):
    put_on_hub("someone/tiny-blip", blip, tmp_path / "hub", monkeypatch)
    spaced = f" {PROMPT.replace(' ', '  ')} "
    assert (
        build(name="huggingface", init="someone/tiny-blip", prompt=spaced).prompt
        == PROMPT
    )
    assert "'someone/lost' is neither on the hub nor in its cache" in refusal(
        init="someone/lost"
    )
    (row,) = tiny_rows(1)
    row["image"].save(tmp_path / "photo.png")
    words = [
        "--model",
        "someone/tiny-blip",
        "--prompt",
        PROMPT,
        "--max_new_tokens",
        "5",
    ]
    run_program("caption", [*words, str(tmp_path / "photo.png")])
    printed = capsys.readouterr().out.strip().split("\t")[1]

    record = {"image": "photo.png", "references": row["references"], "split": "test"}
    (tmp_path / "photos.jsonl").write_text(json.dumps(record))
    config = EvaluateModelConfig(
        model="someone/tiny-blip",
        prompt=PROMPT,
        data=DataConfig(format="jsonl", path=str(tmp_path / "photos.jsonl")),
        decode=Decoding(max_new_tokens=5),
        metrics=["bleu"],
        tokenizer="python",
        out=str(tmp_path / "out"),
    )
    judged = score_captions(config)
    assert judged is not None
    assert list(judged[1].values()) == [printed]


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("hf_*.yaml")), ids=lambda path: path.stem
)
def test_shipped_configurations_train_and_sample_what_their_names_stand_for(
    path, tmp_path, monkeypatch
):
    """A tiny model of the family takes the place of the one on the hub."""
    kind = XeConfig if path.stem.endswith("_xe") else ScstConfig
    config = parse(kind, ["--config", str(path)], "test")
    family = re.sub(r"^hf_|(_lora)?_(xe|scst).*$", "", path.stem)
    family = family.replace("qwen_vl", "qwen2_5_vl")
    assert config.model.init is not None
    if not config.model.init.startswith("runs/"):
        put_on_hub(
            config.model.init,
            save_model(family, tmp_path / "tiny"),
            tmp_path / "hub",
            monkeypatch,
        )
    else:
        monkeypatch.chdir(tmp_path)
        save_model(family, tmp_path / config.model.init)
    captioner = build_captioner(config.model, REFERENCES, cache_mb=0)
    assert isinstance(captioner, HuggingFaceCaptioner)
    names = {
        name
        for name, value in captioner.policy.named_parameters()
        if value.requires_grad
    }
    assert names
    assert all("lora_" in name for name in names) == (config.model.lora is not None)
    length = (
        config.train.max_target_tokens
        if isinstance(config, XeConfig)
        else config.rollout.max_new_tokens
    )
    check_positions(captioner, "length", length)
    inputs = captioner.preprocess(tiny_rows(2))
    captions = captioner.generate(
        captioner.policy, inputs, Decoding(max_new_tokens=length)
    )
    captioner.token_logits(captioner.policy, inputs, captions).sum().backward()
    assert config.train.batch_size % (config.train.micro_batch_size or 1) == 0
    if config.data.format in ("sharegpt4v", "jsonl"):
        return
    coco = parse(
        XeConfig, ["--config", str(CONFIGS / "coco_transformer_bu_xe.yaml")], "test"
    ).data
    assert config.data.replace(num_workers=0, source=None) == coco.replace(
        num_workers=0, source=None, features_root=None, features_kwargs={}
    )


def test_where_the_hub_cannot_be_reached_the_cache_is_read_and_a_mistyped_name_asked_for_once(
    blip, tmp_path, monkeypatch
):
    waited: list[float] = []  # seconds, before trying again
    put_on_hub("someone/tiny-blip", blip, tmp_path / "hub", monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", waited.append)
    assert (
        build(name="huggingface", init="someone/tiny-blip").name == "someone/tiny-blip"
    )
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
