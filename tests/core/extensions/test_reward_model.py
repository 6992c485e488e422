"""A reward model from outside: one file with its keys, loss and what builds it, named by ``task``."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from rewards.clip.backbone import load_frozen_encoder
from rl_caption.cli.configuration import parse
from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.reward_models.clip_models import (
    ClipConfig,
    ClipLossConfig,
    train_embeddings,
)
from rl_caption.reward_models.losses import (
    Embeddings,
    Objective,
    contrastive_metrics,
    cosine_matrix,
)
from rl_caption.runtime.errors import ConfigError
from rl_caption.runtime.types import TrainState
from rl_caption.training.run import Run
from tests.reward_models_for_tests import CLIP, reward_model_config
from tests.training_for_tests import Kill, checked_run, lines

NAME = "tests.core.extensions.test_reward_model:SigmoidConfig"


class SigmoidLossConfig(ClipLossConfig):
    """The sigmoid loss."""

    bias: Annotated[float, Field(ge=-100, le=100)] = -10.0
    """Added to all logits: most pairs of a batch do not match."""


class SigmoidConfig(ClipConfig):
    """``reward_model --task my_package.reward_models:SigmoidConfig``: SigLIP's loss."""

    loss: SigmoidLossConfig = Field(default_factory=SigmoidLossConfig)

    def objective(self) -> Objective:
        return partial(sigmoid, bias=self.loss.bias)

    def fit(self, run: Run) -> TrainState:
        model = self.build_model(run.accelerator.num_processes)
        return train_embeddings(run, self, model)


def sigmoid(
    student: Embeddings, target: Embeddings, bias: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each of the B x B pairs is classified as matching or not (Zhai et al. 2023); mean
    over images, nats.
    """
    logits = student["scale"] * cosine_matrix(student["image"], student["text"]) + bias
    signs = 2 * torch.eye(len(logits), device=logits.device) - 1
    return -F.logsigmoid(signs * logits).sum() / len(logits), contrastive_metrics(
        student
    )


def config_in(folder: Path, **changes: Any) -> dict[str, Any]:
    return reward_model_config(
        folder, NAME, **{"model.kwargs": CLIP, "loss.bias": -5.0, **changes}
    )


@pytest.mark.slow
def test_a_run_trains_with_it_and_is_resumed_as_if_it_had_not_been_killed(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def losses(folder):
        logged = lines(folder, "metrics.jsonl")
        return [line["loss/total"] for line in logged if "loss/total" in line]

    ended = checked_run(config_in(whole), whole, "reward_model")
    assert f"[{NAME}]" in ended.output
    kill = Kill("rl_caption.reward_models.task:EmbeddingTask.training_step", 4)
    checked_run(config_in(killed), killed, "reward_model", kill=kill)
    checked_run(config_in(killed), killed, "reward_model")
    assert len(losses(whole)) == 6
    assert losses(killed) == losses(whole)
    encoders = (load_frozen_encoder(f"{run}/export/best") for run in (whole, killed))
    one, other = (encoder.fingerprint for encoder in encoders)
    assert one == other


def test_the_loss_is_that_of_a_loop_over_the_pairs():
    generator = torch.Generator().manual_seed(1)
    images, texts = (
        F.normalize(torch.randn(3, 4, generator=generator), dim=-1) for _ in range(2)
    )
    student = {"image": images, "text": texts, "scale": torch.tensor(2.0)}
    expected = 0.0
    for i, image in enumerate(images):
        for j, text in enumerate(texts):
            logit = 2 * (image @ text) - 1
            expected -= F.logsigmoid(logit if i == j else -logit).item() / 3
    assert sigmoid(student, {}, bias=-1.0)[0].item() == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.parametrize(
    ("task", "words", "key"),
    [
        (NAME, ["--loss.bias", "900"], "loss.bias"),
        (NAME, ["--loss.short", "1"], "loss.short"),
        ("tests.core.extensions.test_reward_model:sigmoid", [], "task"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(task, words, key, capsys):
    with pytest.raises((ConfigError, SystemExit)) as refused:
        parse(RewardModelConfig, ["--task", task, *words], "test")
    assert key in str(refused.value) + capsys.readouterr().err
