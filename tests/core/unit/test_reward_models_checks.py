"""Mistakes that a configuration of a reward model alone shows."""

from pathlib import Path

import pytest
import yaml

from rl_caption.cli.configuration import parse
from rl_caption.config.reward_models import TASKS, RewardModelConfig
from rl_caption.runtime.errors import ConfigError
from tests.reward_models_for_tests import CLIP, RESNET, config_of

CONFIGS = Path(__file__).parents[3] / "configs" / "reward_models"
WHOLE = {"batch_size": 8}
PARTS = {"batch_size": 8, "micro_batch_size": 4}


def contrastive(kwargs=CLIP, train=WHOLE, **sections):
    return config_of("contrastive", model={"kwargs": kwargs}, train=train, **sections)


SMOOTH = {"label_smoothing": 0.1}
RANDOM = {
    "encoder": "timm:x",
    "pretrained": False,
    "train_blocks": None,
}


def refused(config, processes=1):
    with pytest.raises(ConfigError) as error:
        config.build_model(processes)
    return str(error.value)


def test_batch_norm_wants_one_micro_batch_of_one_process():
    contrastive(RESNET).build_model(1)
    contrastive(
        RESNET,
        {
            "batch_size": 8,
            "micro_batch_size": 8,
        },
    ).build_model(1)
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


def parts(image, text):
    return {
        "model": {
            "image": image,
            "text": {"encoder": "transformers:x"} | text,
        },
        "train": WHOLE,
    }


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"task": "distill", "teacher": {}}, ("teacher.name is not set",)),
        ({"task": "positive_augmented"}, ("train.trainable", "model.init")),
        (
            {
                "negatives": {"count": 1},
                "train": SMOOTH,
            },
            ("label_smoothing",),
        ),
        (
            {
                "negatives": {"count": 1},
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
def test_mistakes_are_found_before_the_data(values, keys, tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(values))
    arguments = ["--config", str(file)]
    with pytest.raises(ConfigError) as error:
        parse(RewardModelConfig, arguments, "test").check()
    for key in keys:
        assert key in str(error.value)


def test_shipped_configurations_pass():
    for path in CONFIGS.glob("*.yaml"):
        config = parse(RewardModelConfig, ["--config", str(path)], "test")
        config.check()
        assert config.task in TASKS
