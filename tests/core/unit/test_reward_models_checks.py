"""Mistakes that a configuration of a reward model alone shows."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_caption.cli.configuration import parse
from rl_caption.config.reward_models import TASKS, RewardModelConfig
from rl_caption.reward_models import program
from rl_caption.reward_models.encoders import random_clip, save_clip
from rl_caption.runtime.errors import ConfigError
from tests.reward_models_for_tests import CLIP, RESNET, STUDENT, config_of

CONFIGS = Path(__file__).parents[3] / "configs" / "reward_models"
WHOLE = {"batch_size": 8}
PARTS = {"batch_size": 8, "micro_batch_size": 4}


def contrastive(
    kwargs: dict[str, Any] = CLIP, train: dict[str, Any] = WHOLE, **sections: Any
) -> Any:
    return config_of("contrastive", model={"kwargs": kwargs}, train=train, **sections)


def test_batch_norm_wants_one_micro_batch_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(config: Any) -> str:
        with pytest.raises(ConfigError) as error:
            config.check()
        return str(error.value)

    contrastive(RESNET).check()
    contrastive(RESNET, {"batch_size": 8, "micro_batch_size": 8}).check()
    contrastive(CLIP, PARTS).check()
    message = refused(contrastive(RESNET, PARTS))
    assert "visual.bn1" in message
    assert "train.micro_batch_size is 4" in message
    assert "processes" not in message
    save_clip(*random_clip(None, RESNET), tmp_path)
    init = {"init": str(tmp_path)}
    assert "batch norm" in refused(config_of("contrastive", model=init, train=PARTS))
    config_of("positive_augmented", model=init, train=PARTS).check()  # its batch norm is frozen
    everything = config_of("positive_augmented", model=init, train=PARTS | {"trainable": "all"})
    assert "batch norm" in refused(everything)
    monkeypatch.setenv("WORLD_SIZE", "2")
    contrastive(CLIP).check()
    message = refused(contrastive(RESNET))
    assert "2 processes" in message
    assert "micro_batch_size" not in message


LONG = {
    "loss": {"short": 1.0, "pca_rank": 4},
    "train": {"batch_size": 8, "short_captions": "references"},
}
HARD = {"loss": {"hard": 1.0}, "negatives": {"count": 1}}
RANDOM = {"encoder": "timm:x", "pretrained": False, "train_blocks": None}
TUNED = {"task": "positive_augmented", "model": {"init": "x"}}
TEACHER = {"teacher": {"name": "ViT-B-32", "pretrained": "openai"}}
ENCODER = "tests.encoders_for_tests:TinyImageEncoder"


def parts(image: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"image": image, "text": {"encoder": "transformers:x"} | text}, "train": WHOLE}


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"task": "distill_text"}, ("teacher.name", "distill_text")),
        ({"model": {"kwargs": CLIP | {"widht": 3}}}, ("model.kwargs",)),
        (
            {"model": {"kwargs": CLIP | {"text_cfg": CLIP["text_cfg"] | {"vocab_size": 999}}}},
            ("vocab_size", "999"),
        ),
        (
            {"task": "distill_text", "model": {"kwargs": STUDENT | {"vocab_size": 9}}, **TEACHER},
            ("vocab_size", "9"),
        ),
        ({"model": {"init": "x", "kwargs": CLIP}}, ("model.kwargs", "model.init")),
        (
            {"task": "distill_image", "data": {"features_kwargs": {"views": ["x"]}}, **TEACHER},
            ("data.features_kwargs.views",),
        ),
        (TUNED | {"data": {"features_root": "x"}}, ("loss.positive_images",)),  # of a dual to come
        ({"train": {"lr": -1}}, ("train.lr", "-1")),
        ({"task": "positive_augmented"}, ("train.trainable", "model.init")),
        (TUNED | {"train": {"lora_alpha": 8.0}}, ("train.lora_alpha", "train.trainable")),
        (
            {"loss": {"short": 1.0, "pca_rank": 8}, "train": WHOLE},
            ("loss.pca_rank", "train.batch_size"),
        ),
        ({"loss": {"hard": 1.0}}, ("loss.hard", "negatives.count")),
        (
            {"task": "distill_text", "loss": {"hard": 1.0}, **TEACHER},
            ("loss.hard", "negatives.count"),
        ),
        (
            {"task": "distill_dual", "model": {"text_init": "x"}, **HARD, **TEACHER},
            ("loss.hard", "train.freeze_text"),
        ),
        (LONG, ("train.short_captions", "data.long_captions")),
        (
            {"negatives": {"count": 1, "source": "data"}, "train": {"sentences": [1, 2]}},
            ("train.sentences", "negatives.source"),
        ),
        (
            {"negatives": {"count": 1, "source": "data", "positives": 0.5}},
            ("negatives.positives", "negatives.source"),
        ),
        ({"train": {"sentences": [2, 1]}}, ("train.sentences", "[2, 1]")),
        ({"eval": {"best_by": "val/hard_negatives"}}, ("eval.best_by", "negatives.count")),
        (parts(RANDOM, {"pretrained": False, "train_blocks": 1}), ("model.text.train_blocks",)),
        (parts(RANDOM | {"encoder": ENCODER}, {}), ("model.image.encoder", ENCODER)),
        (parts({}, {}), ("model.image.encoder", "model.text.encoder")),
        ({"data": {"tokenizer": "char"}}, ("data.tokenizer", "char")),
        (
            {"task": "distill_text", "data": {"format": "images", "path": "d"}, **TEACHER},
            ("data.format", "images"),
        ),
        (
            {"task": "distill_text", "data": {"augment": ["crop"]}, **TEACHER},
            ("data.augment", "distill_text"),
        ),
        (
            {"task": "distill_text", "data": {"features_root": "x"}, **TEACHER},
            ("data.features_root", "distill_text"),
        ),
    ],
)
def test_mistakes_are_found_before_the_data(values, keys, monkeypatch, tmp_path):
    def too_late(*_: Any, **options: Any) -> None:
        raise AssertionError("the data is checked first")

    monkeypatch.setattr(program, "setup", too_late)
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError) as error:
        program.train_reward_model(
            parse(RewardModelConfig, ["--config", str(tmp_path / "a.yaml")], "test")
        )
    for key in keys:
        assert key in str(error.value)


@pytest.mark.parametrize(
    ("task", "key"),
    [
        ("distill_text", "loss.max_scale"),
        ("distill_image", "model.text_init"),
        ("distill_dual", "model.context_length"),
        ("contrastive", "loss.alpha"),
        ("specificity", "train.label_smoothing"),
    ],
)
def test_a_key_of_another_task_is_refused_by_the_parser(task: str, key: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parse(RewardModelConfig, ["--task", task, f"--{key}", "1"], "test")
    assert key in capsys.readouterr().err


def test_the_task_is_chosen_by_the_file_or_the_command_line_and_help_has_its_keys_alone(
    tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "a.yaml").write_text("{task: specificity, loss: {alpha: 2}}")
    words = ["--config", str(tmp_path / "a.yaml"), "--loss.beta", "3"]
    config: Any = parse(RewardModelConfig, words, "test")
    assert (config.task, config.loss.alpha, config.loss.beta) == ("specificity", 2, 3)
    for more, has, lacks in (
        (words, "--loss.alpha", "--loss.hard"),
        ([], "--loss.hard", "--loss.alpha"),
    ):
        with pytest.raises(SystemExit):
            parse(RewardModelConfig, [*more, "--help"], "test")
        text = capsys.readouterr().out
        assert has in text
        assert lacks not in text
        assert "text_regression" in text, "every task is named"
    with pytest.raises(ConfigError, match=r"task.*'specifity'.*specificity"):
        parse(RewardModelConfig, ["--task", "specifity"], "test")


def test_a_damaged_folder_to_start_from_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    config = config_of(model={"init": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"model\.init: .*config\.json"):
        config.check()
    (tmp_path / "config.json").rename(tmp_path / "open_clip_config.json")
    config.check()  # loading it tells


def test_shipped_configurations_pass() -> None:
    configurations = [
        parse(RewardModelConfig, ["--config", str(path)], "test") for path in CONFIGS.glob("*.yaml")
    ]
    for config in configurations:
        config.check()
    assert {config.task for config in configurations} == {*TASKS}
