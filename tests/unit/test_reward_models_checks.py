"""Mistakes that a configuration of a reward model alone shows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl_caption.cli.main import parse
from rl_caption.config.reward_models import (
    CLIP_TASKS,
    EncoderConfig,
    LossConfig,
    NegativesConfig,
    PartConfig,
    RewardModelConfig,
    RewardModelEvalConfig,
    RewardModelTrainConfig,
    TeacherConfig,
)
from rl_caption.config.schema import DataConfig
from rl_caption.errors import ConfigError
from rl_caption.reward_models import program
from rl_caption.reward_models.checks import check_batch_norm, check_config
from rl_caption.reward_models.encoders import ClipTowers, random_clip, save_clip
from tests.reward_models_for_tests import CLIP, RESNET, STUDENT

CONFIGS = Path(__file__).parents[2] / "configs" / "reward_models"
WHOLE = RewardModelTrainConfig(batch_size=8)
PARTS = RewardModelTrainConfig(batch_size=8, micro_batch_size=4)
TEACHER = TeacherConfig(name="ViT-B-32", pretrained="openai")


def contrastive(kwargs: dict[str, Any] = CLIP, train: RewardModelTrainConfig = WHOLE) -> RewardModelConfig:
    return RewardModelConfig(model=EncoderConfig(kwargs=kwargs), train=replace(train))


def distilled(task: Any, **kwargs: Any) -> RewardModelConfig:
    return RewardModelConfig(task, model=EncoderConfig(kwargs=kwargs), teacher=replace(TEACHER))


def tuned(**train: Any) -> RewardModelConfig:
    return RewardModelConfig("positive_augmented", model=EncoderConfig(init="x"), train=RewardModelTrainConfig(**train))


def random_parts(image: str, text_blocks: int | None) -> RewardModelConfig:
    parts = PartConfig(image, {}, False, None), PartConfig("transformers:x", {}, False, text_blocks)
    return RewardModelConfig(model=EncoderConfig(image=parts[0], text=parts[1]), train=replace(WHOLE))


def refused(config: RewardModelConfig) -> str:
    with pytest.raises(ConfigError) as error:
        check_config(config)
    return str(error.value)


def test_batch_norm_wants_one_micro_batch(tmp_path: Path) -> None:
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


def test_batch_norm_wants_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_config(contrastive(CLIP))
    message = refused(contrastive(RESNET))
    assert "2 processes train together: start one" in message
    assert "micro_batch_size" not in message


def test_the_network_itself_is_checked_too() -> None:
    network = ClipTowers(random_clip(None, RESNET)[0])
    check_batch_norm(network, WHOLE, 1)
    for train, processes in ((PARTS, 1), (WHOLE, 2)):
        with pytest.raises(ConfigError, match="batch norm"):
            check_batch_norm(network, train, processes)


LONG_CAPTIONS = RewardModelTrainConfig(batch_size=8, short_captions="references")
SENTENCES = RewardModelTrainConfig(sentences=[1, 2])
OF_DATA = NegativesConfig(count=1, source="data")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RewardModelConfig("distill_text"), "teacher.name is not set: distill_text distils a teacher"),
        (contrastive({"embed_dim": 16}), "expected open_clip's model JSON"),
        (contrastive(CLIP | {"widht": 3}), "open_clip cannot build this model"),
        (contrastive(CLIP | {"text_cfg": CLIP["text_cfg"] | {"vocab_size": 999}}), "text_cfg.vocab_size is 999"),
        (distilled("distill_text", width=1), "'width'"),
        (distilled("distill_text", **STUDENT, vocab_size=9), "vocab_size is 9: CLIP's tokenizer, .*, has 49408"),
        (distilled("distill_dual", text_heads=5), "no multiple of text_heads 5"),
        (RewardModelConfig(model=EncoderConfig(init="x", kwargs=CLIP)), "model.kwargs is set together with model.init"),
        (
            replace(distilled("distill_image"), model=EncoderConfig(init="x", kwargs=STUDENT)),
            "model.kwargs is set together with model.init",
        ),
        (
            replace(distilled("distill_image"), data=DataConfig(features_kwargs={"views": ["x"]})),
            "data.features_kwargs.views are views that the teacher would not see",
        ),
        (  # a dual that warm_start will have made
            RewardModelConfig("positive_augmented", model=EncoderConfig(init="x"), data=DataConfig(features_root="x")),
            "loss.positive_images needs pixels",
        ),
        (RewardModelConfig("grammar"), "set either model.init .* or model.text.encoder"),
        (RewardModelConfig("grammar", model=EncoderConfig(init="x", kwargs={"width": 3})), "a grammar head takes"),
        (RewardModelConfig("grammar", model=EncoderConfig(init="x", kwargs={"kernel": 4})), "kernel is 4"),
        (contrastive(train=RewardModelTrainConfig(lr=-1)), "train.lr is -1"),
        (replace(contrastive(), task="positive_augmented"), "train.trainable is 'projections' with random weights"),
        (tuned(lora_rank=0), "train.lora_rank is 0: expected at least 1"),
        (tuned(lora_alpha=8.0), "train.lora_alpha is 8.0, but train.trainable is 'projections'"),
        (RewardModelConfig(model=EncoderConfig(kwargs=CLIP, context_length=248)), "stretches model.init, .* not set"),
        (RewardModelConfig("specificity", train=RewardModelTrainConfig(shuffle_rate=1.5)), "shuffle_rate is 1.5"),
        (RewardModelConfig(loss=LossConfig(short=1.0, pca_rank=8), train=WHOLE), "pca_rank is 8 with .* expected less"),
        (RewardModelConfig(loss=LossConfig(short=1.0, pca_rank=4), train=LONG_CAPTIONS), "with data.long_captions"),
        (
            RewardModelConfig(eval=RewardModelEvalConfig(best_by="val/hard_negatives")),
            "there are none: set negatives.count",
        ),
        (
            RewardModelConfig(negatives=OF_DATA, train=SENTENCES),
            "negatives.source is 'data'.* leave train.sentences out",
        ),
        (RewardModelConfig(negatives=replace(OF_DATA, positives=0.5)), "leave negatives.positives out"),
        (replace(contrastive(), model=EncoderConfig(kwargs=CLIP, text=PartConfig(train_blocks=2))), "is trained whole"),
        (
            replace(random_parts("timm:x", None), task="positive_augmented", train=replace(PARTS, trainable="all")),
            "train_blocks of model.image and model.text says what is trained",
        ),
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
        ("distill_text", "loss.max_scale", 50.0, "loss.max_scale is 50.0, but distill_text does not read it"),
        ("distill_text", "data.augment", ["crop"], "positive_augmented and specificity and distill_image"),
        ("distill_image", "model.text_init", "x", "model.text_init is 'x', but distill_image"),
        ("specificity", "loss.short", 1.0, "loss.short is 1.0, but specificity does not read it"),
        ("distill_dual", "model.context_length", 248, "read by contrastive and positive_augmented and specificity"),
        ("distill_text", "data.features_root", "x", "data.features_root is 'x', but distill_text"),
        ("distill_dual", "model.image", PartConfig("timm:x"), "read by contrastive and positive_augmented"),
    ],
)
def test_a_key_that_the_task_does_not_read_is_refused(task: Any, key: str, value: Any, message: str) -> None:
    config = replace(contrastive(), task=task) if task in CLIP_TASKS else distilled(task)
    check_config(config)
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    assert message in refused(config)


@pytest.mark.parametrize("content", ['{"model_type": ', "[]"])
def test_a_damaged_folder_to_start_from_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    message = refused(RewardModelConfig(model=EncoderConfig(init=str(tmp_path))))
    assert message.startswith(f"model.init: {tmp_path / 'config.json'} ")
    (tmp_path / "config.json").rename(tmp_path / "open_clip_config.json")
    check_config(RewardModelConfig(model=EncoderConfig(init=str(tmp_path))))  # loading it tells


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_pass(path: Path) -> None:
    check_config(parse(RewardModelConfig, ["--config", str(path)], "test"))
