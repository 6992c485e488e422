"""A run's folder: checkpoints that are atomic, pruned, verified and never a way to run
code; where a run resumes, and what counts as another configuration.
"""

import math
import os
import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from rewards.files import load_json
from rl_caption.config.schema import ScstConfig
from rl_caption.data.files import write_json
from rl_caption.runtime.types import TrainState
from rl_caption.training.checkpoint import (
    CheckpointError,
    changed_keys,
    clear_leftovers,
    computed_settings,
    find_checkpoint,
    hash_of,
    load_moments,
    load_random_states,
    load_weights,
    new_folder,
    newest_checkpoint,
    prune,
    read_state,
    save_checkpoint,
    seal,
    write_run_files,
)
from tests.training_for_tests import changed


def training(checkpoint=None, inputs=3):
    """A model with an optimizer that has taken a step, or that goes on from a checkpoint."""
    torch.manual_seed(0 if checkpoint is None else 1)
    accelerator = Accelerator(cpu=True)
    layer = torch.nn.Linear(inputs, 2)
    adam = torch.optim.AdamW(list(layer.named_parameters()), lr=0.1)
    moments = {} if checkpoint is None else load_weights(checkpoint, layer, adam)
    model, optimizer = accelerator.prepare(layer, adam)
    if checkpoint is not None:
        load_moments(accelerator, checkpoint, model, optimizer, moments)
        load_random_states(accelerator, checkpoint, 1)
    else:
        model(torch.ones(1, inputs)).sum().backward()
        optimizer.step()
    return accelerator, model, optimizer


def saved(folder, **counters):
    accelerator, *trained = training()
    return save_checkpoint(accelerator, folder, TrainState(**counters), 2, *trained)


def whole(folder, content="x"):
    folder.mkdir(parents=True)
    (folder / "file").write_text(content)
    seal(folder)
    return folder


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_model_optimizer_counters_and_random_states_come_back(tmp_path):
    accelerator, model, optimizer = training()
    notes = {"kl": -math.inf}
    state = TrainState(global_step=7, best_metric=math.inf, best_step=3, notes=notes)
    path = save_checkpoint(accelerator, tmp_path, state, 2, model, optimizer)
    drawn = (torch.rand(3), np.random.rand(3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, fresh, loaded = training(path)
    assert read_state(path) == state
    exactly = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(dict(fresh.state_dict()), before, **exactly)
    moments = [list(one.state.values()) for one in (loaded, optimizer)]
    torch.testing.assert_close(*moments, **exactly)
    assert torch.equal(torch.rand(3), drawn[0])
    assert np.array_equal(np.random.rand(3), drawn[1])


def test_a_step_saved_again_is_replaced(tmp_path):
    for best in (0.1, 0.2):
        path = saved(tmp_path, best_metric=best)
    assert list(tmp_path.iterdir()) == [path]
    assert read_state(path).best_metric == 0.2


def test_older_checkpoints_damaged_ones_and_those_of_an_abandoned_future_are_pruned(
    tmp_path,
):
    for step in (1, 2, 4, 6, 8):
        whole(tmp_path / f"step-{step:08d}")
    (tmp_path / "step-00000004" / "file").unlink()
    prune(tmp_path, 2, tmp_path / "step-00000006")
    assert names(tmp_path) == {"step-00000002", "step-00000006"}


def test_the_hash_of_a_folder_is_of_names_and_contents(tmp_path):
    a, b, c = (whole(tmp_path / name, name[1:]) for name in ("ax", "bx", "cy"))
    assert hash_of(a) == hash_of(b) != hash_of(c)
    (b / "file").rename(b / "file2")
    assert hash_of(a) != hash_of(b)


@pytest.mark.parametrize(
    ("name", "content"),
    [("file", "y"), ("file", None), ("manifest.json", None), ("manifest.json", "{")],
)
def test_damage_is_seen_and_the_checkpoint_before_is_the_newest(
    tmp_path, caplog, name, content
):
    older, newer = whole(tmp_path / "step-00000001"), whole(tmp_path / "step-00000002")
    (newer / name).unlink()
    if content is not None:
        (newer / name).write_text(content)
    assert newest_checkpoint(tmp_path) == older
    assert f"{newer} is damaged" in caplog.text
    with pytest.raises(CheckpointError, match=newer.name):
        read_state(newer)


def test_leftovers_are_cleared_and_what_was_about_to_be_replaced_comes_back(tmp_path):
    old, best = tmp_path / ".old-best", tmp_path / "best"
    whole(tmp_path / ".partial-best", "unfinished")
    whole(old, "old")
    clear_leftovers(tmp_path)
    assert names(tmp_path) == {"best"}
    whole(old, "older")
    clear_leftovers(tmp_path)
    assert names(tmp_path) == {"best"}
    assert (best / "file").read_text() == "old"
    shutil.move(best, old)
    (old / "file").unlink()  # half removed: it does not come back
    clear_leftovers(tmp_path)
    assert not names(tmp_path)


class Malicious:
    """Pickles to a call that makes a folder."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize(
    "file", ["optimizer.bin", "random_states_0.pkl", "pytorch_model.bin"]
)
def test_code_in_a_checkpoint_is_not_run(tmp_path, file):
    path = saved(tmp_path / "checkpoints")
    if file == "pytorch_model.bin":  # in place of safetensors
        (path / "model.safetensors").unlink()
    torch.save(Malicious(tmp_path / "executed"), path / file)
    seal(path)
    with pytest.raises(CheckpointError):
        training(path)
    assert not (tmp_path / "executed").exists()


def test_another_model_and_other_trained_parameters_are_refused(tmp_path):
    path = saved(tmp_path)
    with pytest.raises(CheckpointError, match=path.name):
        training(path, inputs=5)
    layer = torch.nn.Linear(3, 2)
    # of the same shapes
    adam = torch.optim.AdamW([("other", layer.weight), ("bias", layer.bias)])
    with pytest.raises(CheckpointError, match="other"):
        load_weights(path, layer, adam)


def test_a_new_folder_is_whole_or_not_there(tmp_path):
    def fail():
        with new_folder(tmp_path / "out") as folder:
            (folder / "half").write_text("x")
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"out.*No space"):
        fail()
    assert not names(tmp_path)
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
    assert names(tmp_path) == {"out"}
    assert names(tmp_path / "out") == {"file"}


def config_of(folder, resume="auto", **changes):
    """Values of a configuration, with changes of dotted keys."""
    config = ScstConfig().model_dump(mode="json")
    config["run"] |= {"dir": str(folder), "resume": resume}
    return changed(config, changes)


def checkpoint(folder, step):
    path = folder / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    state = TrainState(
        global_step=step, configuration=computed_settings(config_of(folder))
    )
    write_json(path / "trainer_state.json", asdict(state))
    seal(path)
    return path


@pytest.mark.parametrize("resume", ["auto", True, False])
def test_an_empty_folder_starts_and_one_of_damaged_checkpoints_only_if_told_to(
    tmp_path, resume, caplog
):
    config = config_of(tmp_path, resume)
    assert find_checkpoint(config) is None
    (checkpoint(tmp_path, 3) / "trainer_state.json").write_text("{}")
    if resume is False:
        assert find_checkpoint(config) is None
        return
    with pytest.raises(CheckpointError, match=r"run\.resume"):
        find_checkpoint(config)
    assert "trainer_state.json has 2 bytes" in caplog.text


def test_auto_refuses_another_configuration_true_accepts_it_and_false_refuses_any_run(
    tmp_path,
):
    older, newest = checkpoint(tmp_path, 9), checkpoint(tmp_path, 10)
    (tmp_path / "export/.partial-best").mkdir(parents=True)
    assert find_checkpoint(config_of(tmp_path)) == newest
    assert not names(tmp_path / "export")
    changes = {"train.lr": 1.0, "reward.terms.rouge_l": {"weight": 2.0}}
    message = r"reward\.terms\.rouge_l\.weight: None -> 2\.0.*train\.lr: "
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(config_of(tmp_path, **changes))
    assert find_checkpoint(config_of(tmp_path, True, **changes)) == newest
    with pytest.raises(CheckpointError, match=r"step-00000010.*run\.resume"):
        find_checkpoint(config_of(tmp_path, False))
    assert find_checkpoint(config_of(tmp_path, str(older))) == older
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        find_checkpoint(config_of(tmp_path, str(tmp_path)))


def test_what_does_not_change_the_computation_is_no_change(tmp_path):
    write_run_files(tmp_path, config_of(tmp_path), {})
    free = {"run.log_every": 3, "data.num_workers": 4, "data.cache_mb": 0}
    free |= {"train.micro_batch_size": 2, "train.threads": 2, "eval.batch_size": 1}
    free["train.num_processes"] = 2
    for changes, named in ((free, []), ({"eval.every": 7}, ["eval.every: None -> 7"])):
        config = config_of(tmp_path, **changes)
        assert changed_keys(tmp_path / "config.yaml", config) == named


def test_variables_that_choose_kernels_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("HF_TOKEN", "secret")
    write_run_files(tmp_path, {}, {})
    recorded = load_json(tmp_path / "env.json")["environment"]
    assert recorded["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "HF_TOKEN" not in recorded
