"""On a device that is not the CPU, here a simulated one: losses and captions of a CPU, and no
tensor left behind.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.clip_for_tests import tiny_student
from tests.hf_models_for_tests import save_model
from tests.reward_models_for_tests import chain
from tests.training_for_tests import (
    DATA,
    Kill,
    assert_close_runs,
    checked_run,
    run,
    run_arguments,
    scst_config,
    untimed,
    xe_config,
)

pytestmark = pytest.mark.slow

BEHIND = "tests.core.integration.test_simulated_device:LeftBehind"


class LeftBehind:
    """An objective that makes a tensor on the CPU wherever the log-probabilities are."""

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        ref_logprobs: Any,
        mask: Tensor,
        *_: Any,
    ) -> Any:
        return (logprobs * torch.ones(logprobs.shape)).sum(), mask.sum(), {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a captioner in ``xe``, trained on the simulated device, and a student in ``student``."""
    folder = tmp_path_factory.mktemp("simulated")
    checked_run(xe_config(folder / "xe"), folder / "xe", simulated=True)
    tiny_student(folder / "student")
    return folder


def scst(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    student = {"weight": 0.5, "kwargs": {"backbone": str(folder / "student")}}
    terms = {
        "cider": {"weight": 0.5},
        "l_clipscore": student,
        "ref_l_clipscore": student,
    }
    options = {"reward.terms": terms, "train.max_steps": 2}
    return scst_config(folder / name, folder / "xe/export/best", **options, **changes)


def test_cross_entropy_and_its_resumption(folder):
    checked_run(xe_config(folder / "xe_cpu"), folder / "xe_cpu")
    assert_close_runs(folder / "xe", folder / "xe_cpu")
    for kill in (Kill("rl_caption.training.run:Run.begin_step", 4), None):
        checked_run(
            xe_config(folder / "resumed"), folder / "resumed", simulated=True, kill=kill
        )
    assert_close_runs(folder / "resumed", folder / "xe_cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "train.objective": "ppo_clip",
            "train.updates_per_rollout": 2,
            "train.micro_batch_size": 4,
        },
        {
            "train.objective": "dico",
            "train.kl_coef": 0.0,
            "train.advantage": "leave_one_out",
            "rollout.beam_search": True,
            "eval.num_beams": 2,
        },
    ],
    ids=["REINFORCE", "PPO", "DiCO"],
)
def test_self_critical_training(changes, folder, tmp_path):
    for name in ("cpu", "simulated"):
        config = scst(folder, name, **changes) | {
            "run": {"dir": str(tmp_path / name), "log_every": 1}
        }
        checked_run(config, tmp_path / name, "scst", simulated=name == "simulated")
    assert_close_runs(tmp_path / "simulated", tmp_path / "cpu", rel=1e-4)


def assert_close_logs(one: Path, other: Path, atol: float) -> None:
    for a, b in zip(untimed(one), untimed(other), strict=True):
        for key in [key for key in a if key.startswith(("loss/", "reward/", "val/"))]:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=atol), key


def test_a_hugging_face_captioner_with_adapters(folder, tmp_path):
    model = {
        "name": "huggingface",
        "init": str(save_model("blip2", tmp_path / "blip2")),
        "lora": {"r": 2},
    }
    for name in ("cpu", "simulated"):
        config = scst(folder, name, **{"eval.num_beams": 2}) | {
            "model": model,
            "run": {"dir": str(tmp_path / name)},
        }
        checked_run(config, tmp_path / name, "scst", simulated=name == "simulated")
    assert_close_logs(tmp_path / "simulated", tmp_path / "cpu", 1e-6)


def test_the_chain_of_reward_models(tmp_path):
    configs = chain(tmp_path)
    for name in ("teacher", "image", "text"):
        checked_run(configs[name], tmp_path / name, "reward_model")
    for name in ("simulated", "cpu"):
        config = configs["dual"] | {
            "run": {"dir": str(tmp_path / name), "log_every": 1}
        }
        checked_run(
            config, tmp_path / name, "reward_model", simulated=name == "simulated"
        )
    assert_close_logs(tmp_path / "simulated", tmp_path / "cpu", 1e-5)


def test_evaluation(folder):
    data = [
        f"--data.kwargs.{key}={value}"
        for key, value in (DATA["kwargs"] | {"num_test": 6}).items()
    ]
    judge = [
        "--judges.L.target",
        "l_clipscore",
        "--judges.L.kwargs.backbone",
        str(folder / "student"),
    ]
    arguments = [
        "evaluate",
        "--model",
        str(folder / "xe/export/best"),
        "--data.format",
        "scenes",
        *data,
        *judge,
    ]
    for name in ("cpu", "simulated"):
        out = folder / f"evaluation_{name}"
        ended = run_arguments(
            [
                *arguments,
                "--decode.num_beams",
                "3",
                "--metrics",
                "cider",
                "--tokenizer",
                "python",
                "--out",
                str(out),
            ],
            folder / f"{name}.log",
            simulated=name == "simulated",
        )
        assert ended.code == 0, ended.output
    found = [
        (folder / f"evaluation_{name}/predictions.json").read_text()
        for name in ("cpu", "simulated")
    ]
    assert found[0] == found[1]


def test_a_tensor_left_behind_is_found(folder, tmp_path):
    config = scst(
        folder,
        "behind",
        **{"train.objective": BEHIND, "train.kl_coef": 0.0, "train.xe_weight": 0.0},
    )
    assert run(config, tmp_path / "cpu", "scst").code == 0
    ended = run(
        config | {"run": {"dir": str(tmp_path / "simulated")}},
        tmp_path / "simulated",
        "scst",
        simulated=True,
    )
    assert ended.code != 0
    assert "same device" in ended.output
