"""Mistakes that a configuration of a reward model alone shows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_caption.cli.configuration import parse
from rl_caption.config.reward_models import (
    CLIP_TASKS,
    EncoderConfig,
    LossConfig,
    NegativesConfig,
    PartConfig,
    RewardModelConfig,
    RewardModelTrainConfig,
    TeacherConfig,
)
from rl_caption.config.schema import DataConfig
from rl_caption.errors import ConfigError
from rl_caption.reward_models import program
from rl_caption.reward_models.checks import check_config
from rl_caption.reward_models.encoders import random_clip, save_clip
from tests.reward_models_for_tests import CLIP, RESNET, STUDENT

CONFIGS = Path(__file__).parents[3] / "configs" / "reward_models"
WHOLE = RewardModelTrainConfig(batch_size=8)
PARTS = RewardModelTrainConfig(batch_size=8, micro_batch_size=4)
TEACHER = TeacherConfig(name="ViT-B-32", pretrained="openai")


def contrastive(kwargs: dict[str, Any] = CLIP, train: RewardModelTrainConfig = WHOLE) -> RewardModelConfig:
    return RewardModelConfig(model=EncoderConfig(kwargs=kwargs), train=replace(train))


def distilled(task: Any, **kwargs: Any) -> RewardModelConfig:
    return RewardModelConfig(task, model=EncoderConfig(kwargs=kwargs), teacher=replace(TEACHER))


def tuned(**changes: Any) -> RewardModelConfig:
    return RewardModelConfig("positive_augmented", model=EncoderConfig(init="x"), **changes)


def random_parts(image: str, text_blocks: int | None) -> RewardModelConfig:
    parts = PartConfig(image, {}, False, None), PartConfig("transformers:x", {}, False, text_blocks)
    return RewardModelConfig(model=EncoderConfig(image=parts[0], text=parts[1]), train=replace(WHOLE))


def refused(config: RewardModelConfig) -> str:
    with pytest.raises(ConfigError) as error:
        check_config(config)
    return str(error.value)


def test_batch_norm_wants_one_micro_batch_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_config(contrastive(RESNET))
    check_config(contrastive(RESNET, RewardModelTrainConfig(batch_size=8, micro_batch_size=8)))
    check_config(contrastive(CLIP, PARTS))
    message = refused(contrastive(RESNET, PARTS))
    assert "layers of batch norm (such as visual.bn1)" in message
    assert "train.micro_batch_size is 4 with train.batch_size 8: leave it null" in message
    assert "processes" not in message
    save_clip(*random_clip(None, RESNET), tmp_path)
    from_folder = RewardModelConfig(model=EncoderConfig(init=str(tmp_path)), train=PARTS)
    assert "batch norm" in refused(from_folder)
    check_config(replace(from_folder, task="positive_augmented"))  # its batch norm is frozen
    everything = replace(from_folder, task="positive_augmented", train=replace(PARTS, trainable="all"))
    assert "batch norm" in refused(everything)
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_config(contrastive(CLIP))
    message = refused(contrastive(RESNET))
    assert "2 processes train together: start one" in message
    assert "micro_batch_size" not in message


LONG_CAPTIONS = RewardModelTrainConfig(batch_size=8, short_captions="references")
SENTENCES = RewardModelTrainConfig(sentences=[1, 2])
OF_DATA = NegativesConfig(count=1, source="data")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardModelConfig("distill_text"), "teacher.name is not set: distill_text distils a teacher"),
        (contrastive(CLIP | {"widht": 3}), "open_clip cannot build this model"),
        (contrastive(CLIP | {"text_cfg": CLIP["text_cfg"] | {"vocab_size": 999}}), "text_cfg.vocab_size is 999"),
        (distilled("distill_text", **STUDENT, vocab_size=9), "vocab_size is 9: .*49408"),
        (RewardModelConfig(model=EncoderConfig(init="x", kwargs=CLIP)), "model.kwargs and model.init"),
        (
            replace(distilled("distill_image"), data=DataConfig(features_kwargs={"views": ["x"]})),
            "data.features_kwargs.views",
        ),
        (tuned(data=DataConfig(features_root="x")), "loss.positive_images needs pixels"),  # of a dual to come
        (RewardModelConfig("grammar"), "set either model.init .* or model.text.encoder"),
        (RewardModelConfig("grammar", model=EncoderConfig(init="x", kwargs={"width": 3})), "a grammar head takes"),
        (contrastive(train=RewardModelTrainConfig(lr=-1)), "train.lr is -1"),
        (replace(contrastive(), task="positive_augmented"), "train.trainable is 'projections' with random weights"),
        (tuned(train=RewardModelTrainConfig(lora_alpha=8.0)), "train.lora_alpha is 8.0, but train.trainable"),
        (RewardModelConfig(loss=LossConfig(short=1.0, pca_rank=8), train=WHOLE), "pca_rank is 8: expected less"),
        (RewardModelConfig(loss=LossConfig(hard=1.0), train=WHOLE), "loss.hard is 1.0, .* set negatives.count"),
        (
            RewardModelConfig("distill_dual", model=EncoderConfig(text_init="x"), loss=LossConfig(hard=1.0)),
            "loss.hard is 1.0, .* train.freeze_text",
        ),
        (RewardModelConfig(loss=LossConfig(short=1.0, pca_rank=4), train=LONG_CAPTIONS), "data.long_captions"),
        (RewardModelConfig(negatives=OF_DATA, train=SENTENCES), "train.sentences .* negatives.source 'data'"),
        (random_parts("timm:x", 1), "model.text.train_blocks is 1 with random weights"),
        (random_parts("tests.encoders_for_tests:TinyImageEncoder", None), "random weights are for models of"),
    ],
)
def test_mistakes_are_found_before_the_data(config, message, monkeypatch):
    def too_late(_: RewardModelConfig) -> None:
        raise AssertionError("the data is checked first")

    monkeypatch.setattr(program, "setup", too_late)
    with pytest.raises(ConfigError, match=message):
        program.train_reward_model(config)


@pytest.mark.parametrize(
    ("task", "key", "value", "message"),
    [
        ("distill_text", "loss.max_scale", 50.0, "loss.max_scale is 50.0"),
        ("distill_text", "data.augment", ["crop"], "data.augment is"),
        ("distill_image", "model.text_init", "x", "model.text_init is 'x'"),
        ("distill_dual", "model.context_length", 248, "model.context_length is 248"),
        ("distill_text", "data.features_root", "x", "data.features_root is 'x'"),
    ],
)
def test_a_key_that_the_task_does_not_read_is_refused(task: Any, key: str, value: Any, message: str) -> None:
    config = replace(contrastive(), task=task) if task in CLIP_TASKS else distilled(task)
    check_config(config)
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    assert message in refused(config)


def test_a_damaged_folder_to_start_from_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    config = RewardModelConfig(model=EncoderConfig(init=str(tmp_path)))
    assert refused(config).startswith(f"model.init: {tmp_path / 'config.json'} ")
    (tmp_path / "config.json").rename(tmp_path / "open_clip_config.json")
    check_config(config)  # loading it tells


def test_shipped_configurations_pass() -> None:
    for path in CONFIGS.glob("*.yaml"):
        check_config(parse(RewardModelConfig, ["--config", str(path)], "test"))
