"""On a device that is not the CPU, here a simulated one: losses and captions of a CPU,
and no tensor left behind.
"""

import pytest
import torch

from tests.clip_for_tests import tiny_student
from tests.hf_models_for_tests import save_model
from tests.reward_models_for_tests import chain
from tests.training_for_tests import (
    DATA,
    Kill,
    assert_close_runs,
    checked_arguments,
    checked_run,
    run,
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
        logprobs,
        old_logprobs,
        ref_logprobs,
        mask,
        *_,
    ):
        return (logprobs * torch.ones(logprobs.shape)).sum(), mask.sum(), {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a captioner in ``xe``, trained on the simulated device, and a student in ``student``."""
    folder = tmp_path_factory.mktemp("simulated")
    checked_run(xe_config(folder / "xe"), folder / "xe", simulated=True)
    tiny_student(folder / "student")
    return folder


def scst(folder, name, **changes):
    student = {"weight": 0.5, "kwargs": {"backbone": str(folder / "student")}}
    terms = {
        "cider": {"weight": 0.5},
        "l_clipscore": student,
        "ref_l_clipscore": student,
    }
    options = {"reward.terms": terms, "train.max_steps": 2}
    return scst_config(folder / name, folder / "xe/export/best", **options, **changes)


def both(config, folder, program):
    """Run a configuration on the CPU and on the simulated device; return the folders."""
    folders = folder / "cpu", folder / "simulated"
    for own in folders:
        run = config | {"run": {"dir": str(own), "log_every": 1}}
        checked_run(run, own, program, simulated=own.name == "simulated")
    return folders


def test_cross_entropy_and_its_resumption(folder):
    checked_run(xe_config(folder / "xe_cpu"), folder / "xe_cpu")
    assert_close_runs(folder / "xe", folder / "xe_cpu")
    resumed = folder / "resumed"
    for kill in (Kill("rl_caption.training.run:Run.begin_step", 4), None):
        checked_run(xe_config(resumed), resumed, simulated=True, kill=kill)
    assert_close_runs(resumed, folder / "xe_cpu")


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
    cpu, simulated = both(scst(folder, "scst", **changes), tmp_path, "scst")
    assert_close_runs(simulated, cpu, rel=1e-4)


def assert_close_logs(one, other, atol):
    for a, b in zip(untimed(one), untimed(other), strict=True):
        for key in [key for key in a if key.startswith(("loss/", "reward/", "val/"))]:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=atol), key


def test_a_hugging_face_captioner_with_adapters(folder, tmp_path):
    init = str(save_model("blip2", tmp_path / "blip2"))
    model = {"name": "huggingface", "init": init, "lora": {"r": 2}}
    config = scst(folder, "scst", **{"eval.num_beams": 2}) | {"model": model}
    assert_close_logs(*both(config, tmp_path, "scst"), 1e-6)


def test_the_chain_of_reward_models(tmp_path):
    configs = chain(tmp_path)
    for name in ("teacher", "image", "text"):
        checked_run(configs[name], tmp_path / name, "reward_model")
    assert_close_logs(*both(configs["dual"], tmp_path, "reward_model"), 1e-5)


def test_evaluation(folder):
    data = DATA["kwargs"] | {"num_test": 6}
    options = {f"data.kwargs.{key}": value for key, value in data.items()} | {
        "model": folder / "xe/export/best",
        "data.format": "scenes",
        "judges.L.target": "l_clipscore",
        "judges.L.kwargs.backbone": folder / "student",
        "decode.num_beams": 3,
        "metrics": "cider",
        "tokenizer": "python",
    }
    captions = []
    for name in ("cpu", "simulated"):
        out = folder / f"evaluation_{name}"
        words = [f"--{key}={value}" for key, value in (options | {"out": out}).items()]
        log, simulated = folder / f"{name}.log", name == "simulated"
        checked_arguments(["evaluate", *words], log, simulated=simulated)
        captions.append((out / "predictions.json").read_text())
    assert captions[0] == captions[1]


def test_a_tensor_left_behind_is_found(folder, tmp_path):
    alone = {"train.kl_coef": 0.0, "train.xe_weight": 0.0}
    config = scst(folder, "behind", **alone, **{"train.objective": BEHIND})
    assert run(config, tmp_path / "cpu", "scst").code == 0
    config["run"]["dir"] = str(tmp_path / "simulated")
    ended = run(config, tmp_path / "simulated", "scst", simulated=True)
    assert ended.code != 0
    assert "same device" in ended.output
