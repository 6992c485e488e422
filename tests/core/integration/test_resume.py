"""A run that is killed at any moment and started again with the same command ends as the run that
never was.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.reward_models_for_tests import reward_model_config
from tests.training_for_tests import (
    Kill,
    assert_same_run,
    changed,
    checked_run,
    files,
    lines,
    run,
    run_arguments,
    scst_config,
    untimed,
    weights,
    write_pipeline,
    xe_config,
)

pytestmark = pytest.mark.slow

# Six steps; validation and checkpoint at 2, 4, 6; export/best is written at 2 (new) and at 4
# (replaced). So the renames are: 1 export, 2 checkpoint, 3 old export away, 4 export, 5 checkpoint,
# 6 checkpoint, 7 pruned checkpoint.
KILLS = {
    "before the first step": Kill("rl_caption.training.run:Run.begin_step", 1),
    "in a step between checkpoints": Kill("rl_caption.training.run:Run.begin_step", 4),
    "after the update, before the log": Kill(
        "rl_caption.training.run:Run.end_step", 5, "after"
    ),
    "in the middle of a log line": Kill(
        "rl_caption.training.run_folder:append_line", 5, "half"
    ),
    "before anything of the checkpoint": Kill("accelerate:Accelerator.save_state", 2),
    "in the middle of the weights": Kill(
        "accelerate.utils.other:safe_save_file", 2, "half"
    ),
    "in the middle of the optimizer": Kill("torch:save", 3, "half"),
    "in the middle of the random states": Kill("torch:save", 4, "half"),
    "after save_state": Kill("accelerate:Accelerator.save_state", 2, "after"),
    "in the middle of the first save": Kill(
        "accelerate:Accelerator.save_state", 1, "after"
    ),
    "in the middle of the counters": Kill(
        "rl_caption.training.checkpoint:write_json", 5, "half"
    ),
    "before the manifest": Kill("rl_caption.training.checkpoint:seal", 4),
    "in the middle of the manifest": Kill(
        "rl_caption.training.checkpoint:write_json", 6, "half"
    ),
    "between manifest and rename": Kill(
        "rl_caption.training.checkpoint:seal", 4, "after"
    ),
    "between rename and prune": Kill(
        "rl_caption.training.checkpoint:os.rename", 6, "after"
    ),
    "between hiding and removing an old checkpoint": Kill(
        "rl_caption.training.checkpoint:os.rename", 7, "after"
    ),
    "in the middle of removing an old checkpoint": Kill(
        "rl_caption.training.checkpoint:shutil.rmtree", 2, "half"
    ),
    "before the first export": Kill("rl_caption.training.checkpoint:os.rename", 1),
    "in the middle of the export's weights": Kill(
        "transformers.modeling_utils:safe_save_file", 2, "half"
    ),
    "while export/best is away": Kill(
        "rl_caption.training.checkpoint:os.rename", 3, "after"
    ),
    "after the new export/best": Kill(
        "rl_caption.training.checkpoint:os.rename", 4, "after"
    ),
    "in the middle of removing the old export": Kill(
        "rl_caption.training.checkpoint:shutil.rmtree", 1, "half"
    ),
    "before env.json has its name": Kill("rewards.files:os.replace", 2),
    "before the captions of a validation have their name": Kill(
        "rewards.files:os.replace", 3
    ),
    "before the result": Kill("rl_caption.training.loop:write_json", 1),
}
CHECKPOINT_FILES = {
    "manifest.json",
    "model.safetensors",
    "optimizer.bin",
    "random_states_0.pkl",
    "trainer_state.json",
}


@pytest.fixture(scope="module")
def whole_xe(tmp_path_factory) -> Path:
    """A cross-entropy run that was never stopped, by the command as typed."""
    folder = tmp_path_factory.mktemp("whole") / "xe"
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(xe_config(folder)))
    command = [sys.executable, "-m", "rl_caption", "xe", "--config", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def whole_scst(whole_xe) -> Path:
    folder = whole_xe.with_name("scst")
    checked_run(scst_config(folder, whole_xe / "export/best"), folder, "scst")
    return folder


def copy_of(whole: Path, folder: Path) -> tuple[dict[str, Any], Path]:
    """A finished run in a folder of its own, and its configuration."""
    shutil.copytree(whole, folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["run"]["dir"] = str(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return config, folder


def test_an_uninterrupted_run_leaves_exactly_these_files(whole_xe):
    assert {path.name for path in (whole_xe / "checkpoints").iterdir()} == {
        "step-00000004",
        "step-00000006",
    }
    for checkpoint in (whole_xe / "checkpoints").iterdir():
        assert files(checkpoint) == CHECKPOINT_FILES
    assert {path.name for path in whole_xe.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "env.json",
        "eval",
        "export",
        "metrics.jsonl",
        "result.json",
    }
    assert {path.name for path in (whole_xe / "export").iterdir()} == {"best", "last"}
    steps = [line["step"] for line in lines(whole_xe) if "loss/total" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(whole_xe) if "val/cider" in line] == [
        2,
        4,
        6,
    ]


@pytest.mark.parametrize("moment", sorted(KILLS))
def test_cross_entropy_killed_and_started_again(whole_xe, tmp_path, moment):
    folder = tmp_path / "run"
    checked_run(xe_config(folder), folder, kill=KILLS[moment])
    checked_run(xe_config(folder), folder)
    assert_same_run(folder, whole_xe)


@pytest.mark.parametrize(
    "kill",
    [
        Kill("rewards.files:os.replace", 1),
        Kill("rl_caption.training.run:Run.log", 1, "after"),
        Kill("rl_caption.training.run:Run.begin_step", 4),
        Kill("rl_caption.scst.rollout:checked_scores", 3),
        Kill("accelerate:Accelerator.save_state", 1, "after"),
    ],
    ids=[
        "before the document frequencies have their name",
        "after validating the starting point",
        "in a step",
        "while scoring",
        "while saving",
    ],
)
def test_self_critical_training_killed_and_started_again(
    whole_xe, whole_scst, tmp_path, kill
):
    folder = tmp_path / "run"
    config = scst_config(folder, whole_xe / "export/best")
    checked_run(config, folder, "scst", kill=kill)
    checked_run(config, folder, "scst")
    assert_same_run(folder, whole_scst)


def test_killed_between_the_updates_of_a_rollout_and_started_again(whole_xe, tmp_path):
    """Updates 1 to 8 in steps 1 to 4, a checkpoint after step 2: step 3 is sampled again and taken
    from its start.
    """
    reuse = {"train.objective": "ppo_clip", "train.updates_per_rollout": 2}
    whole, folder = tmp_path / "whole", tmp_path / "run"
    checked_run(scst_config(whole, whole_xe / "export/best", **reuse), whole, "scst")
    assert [line["step"] for line in lines(whole) if "policy/ratio" in line] == [
        1,
        2,
        3,
        4,
    ]
    config = scst_config(folder, whole_xe / "export/best", **reuse)
    checked_run(
        config, folder, "scst", kill=Kill("rl_caption.training.run:Run.update", 6)
    )
    checked_run(config, folder, "scst")
    assert_same_run(folder, whole)


def test_schedules_go_on_where_they_were(whole_xe, tmp_path):
    options = {
        "reward.terms": {
            "cider": {"schedule": [[0, 1.0], [4, 0.0]]},
            "rouge_l": {"schedule": [[0, 0.0], [4, 1.0]]},
        },
        "reward.normalize": "per_group",
        "rollout.temperature_schedule": [[0, 1.0], [2, 1.0], [2, 0.5]],
    }
    whole, folder = tmp_path / "whole", tmp_path / "run"
    checked_run(scst_config(whole, whole_xe / "export/best", **options), whole, "scst")
    steps = [line for line in lines(whole) if "loss/total" in line]
    assert [line["schedule/weight/cider"] for line in steps] == [1.0, 0.75, 0.5, 0.25]
    assert [line["schedule/weight/rouge_l"] for line in steps] == [0.0, 0.25, 0.5, 0.75]
    assert [line["schedule/temperature"] for line in steps] == [1.0, 1.0, 0.5, 0.5]
    signature = json.loads((whole / "env.json").read_text())["signature"]
    assert (
        "+schedule[cider,0:1,4:0]+schedule[rouge_l,0:0,4:1]+schedule[rollout.temperature,"
        in signature
    )
    config = scst_config(folder, whole_xe / "export/best", **options)
    checked_run(
        config, folder, "scst", kill=Kill("rl_caption.training.run:Run.begin_step", 4)
    )
    checked_run(config, folder, "scst")
    assert_same_run(folder, whole)


def test_killed_again_and_again_at_any_moment(whole_xe, tmp_path):
    folder, generator = tmp_path / "run", random.Random()
    for _ in range(6):
        run(xe_config(folder), folder, kill_after=generator.uniform(0.2, 0.7))
    checked_run(xe_config(folder), folder)
    assert_same_run(folder, whole_xe)


@pytest.mark.parametrize(
    ("step", "number"), [(3, signal.SIGTERM), (4, signal.SIGINT), (6, signal.SIGHUP)]
)
def test_a_signal_saves_and_the_run_resumes_to_the_same_weights(
    whole_xe, tmp_path, step, number
):
    folder = tmp_path / "run"
    stop = Kill("rl_caption.training.run:Run.begin_step", step, number=number)
    stopped = run(xe_config(folder), folder, kill=stop)
    assert stopped.code == (130 if number == signal.SIGINT else 0)
    assert f"terminated: checkpoint of step {step} saved" in stopped.output
    assert files(folder / f"checkpoints/step-{step:08d}") == CHECKPOINT_FILES
    assert not (folder / "result.json").exists()
    checked_run(xe_config(folder), folder)
    if step == 3:  # pruning keeps the two newest, as in the run that was never stopped
        assert_same_run(folder, whole_xe)
    assert untimed(folder) == untimed(whole_xe)


def test_a_chain_that_signals_stop_in_each_of_its_stages_goes_on(
    whole_xe, whole_scst, tmp_path
):
    """Cross-entropy, a reward model, self-critical training, by one command."""
    teacher = reward_model_config(
        tmp_path / "teacher", "contrastive", **{"train.max_steps": 2}
    )
    pipeline = write_pipeline(
        tmp_path,
        xe=("xe", xe_config(tmp_path / "xe")),
        teacher=("reward_model", teacher),
        scst=("scst", scst_config(tmp_path / "scst", tmp_path / "xe/export/best")),
    )
    # Steps of each call of the command: 3 of 6; the other 3, and 1 of 2 of the teacher; the other
    # one, and 2 of 4.
    for steps, newest in (
        (3, "xe/checkpoints/step-00000003"),
        (4, "teacher/checkpoints/step-00000001"),
        (3, "scst"),
    ):
        stop = Kill(
            "rl_caption.training.run:Run.begin_step", steps, number=signal.SIGTERM
        )
        stopped = run_arguments(["run", str(pipeline)], tmp_path / "log", kill=stop)
        assert stopped.code == 0, stopped.output
        assert stopped.output.count("terminated: checkpoint of step") == 1
        assert (tmp_path / newest).is_dir()
        assert (tmp_path / "scst").exists() == (newest == "scst")
    ended = run_arguments(["run", str(pipeline)], tmp_path / "log")
    assert ended.code == 0, ended.output
    assert ended.output.count("finished, ") == 2
    assert_same_run(tmp_path / "xe", whole_xe)
    assert untimed(tmp_path / "scst") == untimed(whole_scst)


def test_a_finished_run_started_again_changes_nothing(whole_xe, tmp_path):
    config, folder = copy_of(whole_xe, tmp_path / "run")
    checked_run(config, folder)
    assert_same_run(folder, whole_xe)


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(whole_xe, tmp_path):
    config, folder = copy_of(whole_xe, tmp_path / "run")
    newest = folder / "checkpoints/step-00000006"
    os.truncate(newest / "optimizer.bin", 1000)
    ended = checked_run(config, folder)
    assert f"{newest} is damaged" in ended.output
    assert "going on from" in ended.output
    assert "step-00000004" in ended.output
    assert_same_run(folder, whole_xe)


def test_true_accepts_a_changed_configuration_that_auto_refuses(whole_xe, tmp_path):
    config, folder = copy_of(whole_xe, tmp_path / "run")
    refused = run(
        changed(config, {"train.lr": 0.1, "model.kwargs.dropout": 0.5}), folder
    )
    assert refused.code == 1
    for part in (
        "train.lr: 0.003 -> 0.1",
        "model.kwargs.dropout: 0.2 -> 0.5",
        "run.resume to true",
    ):
        assert part in refused.output
    unfit = run(
        changed(config, {"model.kwargs.d_model": 8, "run.resume": True}), folder
    )
    assert "cannot be loaded into this model" in unfit.output
    more = run(
        changed(config, {"data.kwargs.num_train": 40, "run.resume": True}), folder
    )
    assert "vocabular" in more.output
    checked_run(config, folder)
    assert_same_run(folder, whole_xe)
    changes = {
        "train.max_steps": 8,
        "train.weight_decay": 0.5,
        "train.betas": [0.5, 0.9],
        "run.resume": True,
    }
    ended = checked_run(
        changed(
            config, changes | {"eval.max_images": 4, "train.max_target_tokens": 10}
        ),
        folder,
    )
    assert re.search("val/cider on 4 images .*, 10 tokens.* chooses", ended.output)
    assert json.loads((folder / "result.json").read_text())["best_step"] == 8
    assert [line["step"] for line in lines(folder) if "loss/total" in line] == list(
        range(1, 9)
    )
    (group,) = torch.load(folder / "checkpoints/step-00000008/optimizer.bin")[
        "param_groups"
    ]
    assert (group["weight_decay"], list(group["betas"])) == (0.5, [0.5, 0.9])
    assert (
        yaml.safe_load((folder / "config.yaml").read_text())["train"]["max_steps"] == 8
    )


def test_a_path_goes_on_from_that_checkpoint_and_drops_what_came_after_it(
    whole_xe, tmp_path
):
    config, folder = copy_of(whole_xe, tmp_path / "run")
    config = changed(
        config,
        {"run.resume": str(folder / "checkpoints/step-00000004"), "run.save_every": 5},
    )
    checked_run(config, folder)
    assert untimed(folder) == untimed(whole_xe)
    one, other = (
        weights(place / "checkpoints/step-00000006") for place in (folder, whole_xe)
    )
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_path_into_another_folder_exports_a_best_model_there(whole_xe, tmp_path):
    folder, path = tmp_path / "onward", str(whole_xe / "checkpoints/step-00000006")
    changes = {"run.resume": path, "train.max_steps": 8, "train.lr": 1e-12}
    ended = checked_run(xe_config(folder, **changes), folder)
    assert "chooses the best model anew" in ended.output
    assert json.loads((folder / "result.json").read_text())["best_step"] == 8
    best, last = (
        weights(folder / "export/best"),
        weights(folder / "checkpoints/step-00000008"),
    )
    assert all(torch.equal(best[name], last[name]) for name in best)


def test_a_changed_run_exports_a_best_model_in_place_of_that_of_a_step_it_does_not_know(
    tmp_path,
):
    folder, steady = (
        tmp_path / "run",
        {"train.lr": 0.01, "train.schedule": "constant", "train.warmup_steps": 0},
    )
    config = xe_config(folder, **steady, **{"eval.every": 1, "run.save_every": 3})
    checked_run(
        config, folder, kill=Kill("rl_caption.training.run:Run.begin_step", 5)
    )  # step 4 was exported
    ended = checked_run(
        changed(config, {"train.lr": 1e-12, "run.resume": True}), folder
    )
    assert "chooses the best model anew" in ended.output
    assert json.loads((folder / "result.json").read_text())["best_step"] == 4
    best, last = (
        weights(folder / "export/best"),
        weights(folder / "checkpoints/step-00000006"),
    )
    assert all(torch.allclose(best[name], last[name], atol=1e-9) for name in best)


def test_a_changed_reward_refuses_to_resume(whole_scst, tmp_path):
    config, folder = copy_of(whole_scst, tmp_path / "run")
    # A path skips the comparison of configurations, so this is the reward's own signature.
    path = str(folder / "checkpoints/step-00000004")
    ended = run(
        changed(config, {"reward.eos": False, "run.resume": path}), folder, "scst"
    )
    assert ended.code == 1
    assert "'STANDARD_wInit+Cider-D[n4,s6.0]+df[" in ended.output
    assert "run.resume" in ended.output
    checked_run(
        changed(config, {"reward.eos": False, "run.resume": True}), folder, "scst"
    )
