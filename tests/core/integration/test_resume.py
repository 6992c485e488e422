"""A run that is killed at any moment and started again with the same command ends as
the run that never was.
"""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import yaml

from tests.reward_models_for_tests import reward_model_config
from tests.training_for_tests import (
    LONGEST,
    Kill,
    assert_same_run,
    changed,
    checked_arguments,
    checked_run,
    files,
    read_json,
    run,
    run_arguments,
    scst_config,
    steps,
    untimed,
    values,
    weights,
    write_pipeline,
    xe_config,
)

pytestmark = pytest.mark.slow

CHECKPOINT = "rl_caption.training.checkpoint"
RUN = "rl_caption.training.run:Run"
STEP = f"{RUN}.begin_step"
SAVE = "accelerate:Accelerator.save_state"
RENAME, REMOVE = f"{CHECKPOINT}:os.rename", f"{CHECKPOINT}:shutil.rmtree"
# Six steps; validation and checkpoint at 2, 4, 6; export/best is written at 2 (new) and at 4
# (replaced). So the renames are: 1 export, 2 checkpoint, 3 old export away, 4 export, 5 checkpoint,
# 6 checkpoint, 7 pruned checkpoint.
KILLS = {
    "before the first step": Kill(STEP, 1),
    "in a step between checkpoints": Kill(STEP, 4),
    "after the update, before the log": Kill(f"{RUN}.end_step", 5, "after"),
    "in the middle of a log line": Kill(
        "rl_caption.training.run:append_line", 5, "half"
    ),
    "in the middle of the weights": Kill(
        "accelerate.utils.other:safe_save_file", 2, "half"
    ),
    "in the middle of the optimizer": Kill("torch:save", 3, "half"),
    "after save_state": Kill(SAVE, 2, "after"),
    "in the middle of the first save": Kill(SAVE, 1, "after"),
    "in the middle of the counters": Kill(f"{CHECKPOINT}:write_json", 5, "half"),
    "before the manifest": Kill(f"{CHECKPOINT}:seal", 4),
    "in the middle of the manifest": Kill(f"{CHECKPOINT}:write_json", 6, "half"),
    "between manifest and rename": Kill(f"{CHECKPOINT}:seal", 4, "after"),
    "between rename and prune": Kill(RENAME, 6, "after"),
    "between hiding and removing an old checkpoint": Kill(RENAME, 7, "after"),
    "in the middle of removing an old checkpoint": Kill(REMOVE, 2, "half"),
    "before the first export": Kill(RENAME, 1),
    "in the middle of the export's weights": Kill(
        "transformers.modeling_utils:safe_save_file", 2, "half"
    ),
    "while export/best is away": Kill(RENAME, 3, "after"),
    "after the new export/best": Kill(RENAME, 4, "after"),
    "in the middle of removing the old export": Kill(REMOVE, 1, "half"),
    "before env.json has its name": Kill("rewards.files:os.replace", 2),
    "before the captions of a validation have their name": Kill(
        "rewards.files:os.replace", 3
    ),
    "before the result": Kill("rl_caption.training.loop:write_json", 1),
}
KILLS_OF_SCST = {
    "before the document frequencies have their name": Kill(
        "rewards.files:os.replace", 1
    ),
    "after validating the starting point": Kill(f"{RUN}.log", 1, "after"),
    "in a step": Kill(STEP, 4),
    "while scoring": Kill("rl_caption.scst.rollout:checked_scores", 3),
    "while saving": Kill(SAVE, 1, "after"),
}
CHECKPOINT_FILES = {
    "manifest.json",
    "model.safetensors",
    "optimizer.bin",
    "random_states_0.pkl",
    "trainer_state.json",
}


@pytest.fixture(scope="module")
def whole_xe(tmp_path_factory):
    """A cross-entropy run that was never stopped, by the command as typed."""
    folder = tmp_path_factory.mktemp("whole") / "xe"
    file = folder.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(xe_config(folder)))
    command = [sys.executable, "-m", "rl_caption", "xe", "--config", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=LONGEST
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def whole_scst(whole_xe):
    folder = whole_xe.with_name("scst")
    checked_run(scst_config(folder, whole_xe / "export/best"), folder, "scst")
    return folder


def copy_of(whole, folder):
    """A finished run in a folder of its own, and its configuration."""
    shutil.copytree(whole, folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["run"]["dir"] = str(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return config, folder


def test_an_uninterrupted_run_leaves_exactly_these_files(whole_xe):
    folders = {"checkpoints", "eval", "export"}
    logs = {".lock", "config.yaml", "env.json", "metrics.jsonl", "result.json"}
    assert set(os.listdir(whole_xe)) == folders | logs
    newest = {"step-00000004", "step-00000006"}
    assert set(os.listdir(whole_xe / "checkpoints")) == newest
    for name in newest:
        assert files(whole_xe / "checkpoints" / name) == CHECKPOINT_FILES
    assert set(os.listdir(whole_xe / "export")) == {"best", "last"}
    assert steps(whole_xe) == [1, 2, 3, 4, 5, 6]
    assert steps(whole_xe, "val/cider") == [2, 4, 6]


def kill_and_start_again(config, folder, program, kill):
    checked_run(config, folder, program, kill=kill)
    checked_run(config, folder, program)


@pytest.mark.parametrize("moment", sorted(KILLS))
def test_cross_entropy_killed_and_started_again(whole_xe, tmp_path, moment):
    folder = tmp_path / "run"
    kill_and_start_again(xe_config(folder), folder, "xe", KILLS[moment])
    assert_same_run(folder, whole_xe)


@pytest.mark.parametrize("moment", sorted(KILLS_OF_SCST))
def test_self_critical_training_killed_and_started_again(
    whole_xe, whole_scst, tmp_path, moment
):
    folder = tmp_path / "run"
    config = scst_config(folder, whole_xe / "export/best")
    kill_and_start_again(config, folder, "scst", KILLS_OF_SCST[moment])
    assert_same_run(folder, whole_scst)


def test_updates_of_a_rollout_and_schedules_go_on_where_they_were(whole_xe, tmp_path):
    """Updates 1 to 8 in steps 1 to 4, a checkpoint after step 2: step 3 is sampled
    again and taken from its start.
    """
    options = {
        "train.objective": "ppo_clip",
        "train.updates_per_rollout": 2,
        "reward.terms": {
            "cider": {"schedule": [[0, 1.0], [4, 0.0]]},
            "rouge_l": {"schedule": [[0, 0.0], [4, 1.0]]},
        },
        "reward.normalize": "per_group",
        "rollout.temperature_schedule": [[0, 1.0], [2, 1.0], [2, 0.5]],
    }
    whole, folder, start = (
        tmp_path / "whole",
        tmp_path / "run",
        whole_xe / "export/best",
    )
    checked_run(scst_config(whole, start, **options), whole, "scst")
    assert steps(whole, "policy/ratio") == [1, 2, 3, 4]
    assert values(whole, "schedule/weight/cider") == [1.0, 0.75, 0.5, 0.25]
    assert values(whole, "schedule/temperature") == [1.0, 1.0, 0.5, 0.5]
    config = scst_config(folder, start, **options)
    kill_and_start_again(config, folder, "scst", Kill(f"{RUN}.update", 6))
    assert_same_run(folder, whole)


@pytest.mark.parametrize(
    ("step", "number"), [(3, signal.SIGTERM), (4, signal.SIGINT), (6, signal.SIGHUP)]
)
def test_a_signal_saves_and_the_run_resumes_to_the_same_weights(
    whole_xe, tmp_path, step, number
):
    folder = tmp_path / "run"
    stop = Kill(STEP, step, number=number)
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
    xe, scst, short = tmp_path / "xe", tmp_path / "scst", {"train.max_steps": 2}
    teacher = reward_model_config(tmp_path / "teacher", "contrastive", **short)
    pipeline = write_pipeline(
        tmp_path,
        xe=("xe", xe_config(xe)),
        teacher=("reward_model", teacher),
        scst=("scst", scst_config(scst, xe / "export/best")),
    )
    command = ["run", str(pipeline)], tmp_path / "log"
    # Steps of each call of the command: 3 of 6; the other 3, and 1 of 2 of the teacher; the other
    # one, and 2 of 4.
    for count, newest in (
        (3, "xe/checkpoints/step-00000003"),
        (4, "teacher/checkpoints/step-00000001"),
        (3, "scst"),
    ):
        stop = Kill(STEP, count, number=signal.SIGTERM)
        stopped = run_arguments(*command, kill=stop)
        assert stopped.code == 0, stopped.output
        assert stopped.output.count("terminated: checkpoint of step") == 1
        assert (tmp_path / newest).is_dir()
        assert scst.exists() == (newest == "scst")
    assert checked_arguments(*command).count("finished, ") == 2
    assert_same_run(xe, whole_xe)
    assert untimed(scst) == untimed(whole_scst)


def test_a_finished_or_damaged_run_started_again_ends_as_it_was(whole_xe, tmp_path):
    config, folder = copy_of(whole_xe, tmp_path / "run")
    checked_run(config, folder)
    assert_same_run(folder, whole_xe)
    newest = folder / "checkpoints/step-00000006"
    os.truncate(newest / "optimizer.bin", 1000)
    ended = checked_run(config, folder)
    assert f"{newest} is damaged" in ended.output
    assert_same_run(folder, whole_xe)


def test_true_accepts_a_changed_configuration_that_auto_refuses(whole_xe, tmp_path):
    config, folder = copy_of(whole_xe, tmp_path / "run")
    refused = run(changed(config, {"train.lr": 0.1}), folder)
    assert refused.code == 1
    assert "train.lr: 0.003 -> 0.1" in refused.output
    changes = {
        "train.max_steps": 8,
        "train.weight_decay": 0.5,
        "train.betas": [0.5, 0.9],
        "train.max_target_tokens": 10,
        "eval.max_images": 4,
        "run.resume": True,
    }
    ended = checked_run(changed(config, changes), folder)
    assert re.search("val/cider on 4 images .*, 10 tokens.* chooses", ended.output)
    assert read_json(folder)["best_step"] == 8
    assert steps(folder) == list(range(1, 9))
    saved = torch.load(folder / "checkpoints/step-00000008/optimizer.bin")
    (group,) = saved["param_groups"]
    assert (group["weight_decay"], list(group["betas"])) == (0.5, [0.5, 0.9])
    written = yaml.safe_load((folder / "config.yaml").read_text())
    assert written["train"]["max_steps"] == 8


def differences(folder, model, other):
    """Largest difference of each weight of two folders, both below ``folder`` or absolute."""
    one, two = weights(folder / model), weights(folder / other)
    return [float((one[name] - two[name]).abs().max()) for name in two]


def test_a_path_goes_on_from_that_checkpoint_and_drops_what_came_after_it(
    whole_xe, tmp_path
):
    config, folder = copy_of(whole_xe, tmp_path / "run")
    path = str(folder / "checkpoints/step-00000004")
    checked_run(changed(config, {"run.resume": path, "run.save_every": 5}), folder)
    assert untimed(folder) == untimed(whole_xe)
    last = "checkpoints/step-00000006"
    assert not any(differences(folder, last, whole_xe / last))


def test_a_path_into_another_folder_exports_a_best_model_there(whole_xe, tmp_path):
    folder, path = tmp_path / "onward", str(whole_xe / "checkpoints/step-00000006")
    changes = {"run.resume": path, "train.max_steps": 8, "train.lr": 1e-12}
    ended = checked_run(xe_config(folder, **changes), folder)
    assert "chooses the best model anew" in ended.output
    assert read_json(folder)["best_step"] == 8
    assert not any(differences(folder, "export/best", "checkpoints/step-00000008"))


def test_a_changed_run_exports_a_best_model_in_place_of_that_of_a_step_it_does_not_know(
    tmp_path,
):
    folder = tmp_path / "run"
    steady = {"train.lr": 0.01, "train.schedule": "constant", "train.warmup_steps": 0}
    config = xe_config(folder, **steady, **{"eval.every": 1, "run.save_every": 3})
    checked_run(config, folder, kill=Kill(STEP, 5))  # step 4 was exported
    changes = {"train.lr": 1e-12, "run.resume": True}
    ended = checked_run(changed(config, changes), folder)
    assert "chooses the best model anew" in ended.output
    assert read_json(folder)["best_step"] == 4
    assert max(differences(folder, "export/best", "checkpoints/step-00000006")) < 1e-9
