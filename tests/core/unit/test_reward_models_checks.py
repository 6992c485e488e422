"""Mistakes that a configuration of a reward model alone shows."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_caption.cli.configuration import parse
from rl_caption.config.reward_models import TASKS, RewardModelConfig
from rl_caption.reward_models import program
from rl_caption.runtime.errors import ConfigError
from tests.reward_models_for_tests import CLIP, RESNET, config_of

CONFIGS = Path(__file__).parents[3] / "configs" / "reward_models"
WHOLE = {"batch_size": 8}
PARTS = {"batch_size": 8, "micro_batch_size": 4}


def contrastive(
    kwargs: dict[str, Any] = CLIP, train: dict[str, Any] = WHOLE, **sections: Any
) -> Any:
    return config_of("contrastive", model={"kwargs": kwargs}, train=train, **sections)


RANDOM = {"encoder": "timm:x", "pretrained": False, "train_blocks": None}


def refused(config: Any, processes: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        config.build_model(processes)
    return str(error.value)


def test_batch_norm_wants_one_micro_batch_of_one_process():
    contrastive(RESNET).build_model(1)
    contrastive(RESNET, {"batch_size": 8, "micro_batch_size": 8}).build_model(1)
    contrastive(CLIP, PARTS).build_model(2)
    assert "visual.bn1" in refused(contrastive(RESNET, PARTS))
    assert "visual.bn1" in refused(contrastive(RESNET), processes=2)


def test_a_model_that_cannot_be_made_is_named(tmp_path):
    assert "model.kwargs" in refused(contrastive(CLIP | {"widht": 3}))
    (tmp_path / "config.json").write_text('{"model_type": ')
    damaged = config_of(model={"init": str(tmp_path)})
    assert "config.json" in refused(damaged)
    (tmp_path / "config.json").rename(tmp_path / "open_clip_config.json")
    assert "open_clip_config.json" in refused(damaged)


def parts(image: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"image": image, "text": {"encoder": "transformers:x"} | text},
        "train": WHOLE,
    }


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"task": "distill"}, ("teacher.name", "distill")),
        ({"data": {"features_root": "x"}}, ("data.features_root",)),
        ({"train": {"lr": -1}}, ("train.lr", "-1")),
        ({"task": "positive_augmented"}, ("train.trainable", "model.init")),
        (
            {"negatives": {"count": 1}, "train": {"label_smoothing": 0.1}},
            ("label_smoothing",),
        ),
        (
            {"loss": {"false_negatives": "mask"}, "train": {"label_smoothing": 0.1}},
            ("label_smoothing",),
        ),
        (
            {
                "negatives": {"count": 1, "source": "data"},
                "train": {"sentences": [1, 2]},
            },
            ("train.sentences", "negatives.source"),
        ),
        (
            parts(RANDOM, {"pretrained": False, "train_blocks": 1}),
            ("model.text.train_blocks",),
        ),
    ],
)
def test_mistakes_are_found_before_the_data(values, keys, monkeypatch, tmp_path):
    def too_late(*_: Any, **options: Any) -> None:
        raise AssertionError("the data is checked first")

    monkeypatch.setattr(program, "open_run", too_late)
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
        ("distill", "loss.max_scale"),
        ("distill", "model.context_length"),
        ("contrastive", "loss.alpha"),
        ("specificity", "train.label_smoothing"),
    ],
)
def test_a_key_of_another_task_is_refused_by_the_parser(task, key):
    with pytest.raises(ConfigError, match=key):
        parse(RewardModelConfig, ["--task", task, f"--{key}", "1"], "test")


def test_the_task_is_chosen_by_the_file_or_the_command_line_and_help_has_its_keys_alone(
    tmp_path, capsys
):
    (tmp_path / "a.yaml").write_text("{task: specificity, loss: {alpha: 2}}")
    words = ["--config", str(tmp_path / "a.yaml"), "--loss.beta", "3"]
    config: Any = parse(RewardModelConfig, words, "test")
    assert (config.task, config.loss.alpha, config.loss.beta) == ("specificity", 2, 3)
    for more, has, lacks in (
        (words, "--loss.alpha", "--loss.short"),
        ([], "--loss.short", "--loss.alpha"),
    ):
        with pytest.raises(SystemExit):
            parse(RewardModelConfig, [*more, "--help"], "test")
        text = capsys.readouterr().out
        assert has in text
        assert lacks not in text
        assert "text_regression" in text, "every task is named"
    with pytest.raises(ConfigError, match=r"task.*'specifity'.*specificity"):
        parse(RewardModelConfig, ["--task", "specifity"], "test")


def test_shipped_configurations_pass():
    configurations = [
        parse(RewardModelConfig, ["--config", str(path)], "test")
        for path in CONFIGS.glob("*.yaml")
    ]
    for config in configurations:
        config.check()
    assert {config.task for config in configurations} <= {*TASKS}
