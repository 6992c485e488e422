"""Checkpoints: atomic, pruned, verified, and never a way to run code."""

import math
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from rl_caption.data.files import write_json
from rl_caption.runtime.types import TrainState
from rl_caption.training.checkpoint import (
    CheckpointError,
    clear_leftovers,
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
)


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


def saved(folder, **values):
    return save_checkpoint(
        training()[0], folder, TrainState(global_step=4, **values), keep=2
    )


def whole(folder, content="x"):
    folder.mkdir(parents=True)
    (folder / "file").write_text(content)
    seal(folder)
    return folder


def test_model_optimizer_counters_and_random_states_come_back(tmp_path):
    accelerator, model, optimizer = training()
    state = TrainState(
        global_step=7, best_metric=math.inf, best_step=3, notes={"kl": -math.inf}
    )
    path = save_checkpoint(accelerator, tmp_path, state, 2)
    drawn = (torch.rand(3), np.random.rand(3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    _, fresh, loaded = training(path)
    assert read_state(path) == state
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items()
    )
    for one, other in zip(optimizer.state.values(), loaded.state.values(), strict=True):
        assert all(
            torch.equal(one[key], other[key])
            for key in ("step", "exp_avg", "exp_avg_sq")
        )
    assert torch.equal(torch.rand(3), drawn[0])
    assert np.array_equal(np.random.rand(3), drawn[1])


def test_a_step_saved_again_is_replaced_and_counters_that_are_not_those_of_a_run_are_refused(
    tmp_path,
):
    for best in (0.1, 0.2):
        path = saved(tmp_path, best_metric=best)
    assert list(tmp_path.iterdir()) == [path]
    assert read_state(path).best_metric == 0.2
    write_json(path / "trainer_state.json", {"no_such_counter": 1})
    seal(path)
    with pytest.raises(CheckpointError, match="no_such_counter"):
        read_state(path)


def test_checkpoints_of_an_abandoned_future_and_damaged_ones_are_pruned(tmp_path):
    for step in (2, 4, 6, 8):
        whole(tmp_path / f"step-{step:08d}")
    (tmp_path / "step-00000004" / "file").unlink()
    prune(tmp_path, 2, tmp_path / "step-00000006")
    assert {p.name for p in tmp_path.iterdir()} == {"step-00000002", "step-00000006"}


@pytest.mark.parametrize(("keep", "left"), [(0, [8]), (2, [6, 8])])
def test_the_newest_checkpoints_are_kept_and_one_in_any_case(tmp_path, keep, left):
    for step in (2, 4, 6, 8):
        whole(tmp_path / f"step-{step:08d}")
    prune(tmp_path, keep, tmp_path / "step-00000008")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-{step:08d}" for step in left
    ]


def test_the_hash_of_a_folder_is_of_names_and_contents(tmp_path):
    whole(tmp_path / "a"), whole(tmp_path / "b"), whole(tmp_path / "c", "y")
    assert hash_of(tmp_path / "a") == hash_of(tmp_path / "b") != hash_of(tmp_path / "c")
    (tmp_path / "b/file").rename(tmp_path / "b/file2")
    assert hash_of(tmp_path / "a") != hash_of(tmp_path / "b")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("file", "y"),
        ("file", None),
        ("manifest.json", None),
        ("manifest.json", "{"),
    ],
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
    whole(tmp_path / ".partial-best", "unfinished")
    whole(tmp_path / ".old-best", "old")
    clear_leftovers(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"best"}
    assert (tmp_path / "best" / "file").read_text() == "old"
    whole(tmp_path / ".old-best", "older")
    clear_leftovers(tmp_path)
    assert (tmp_path / "best" / "file").read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"best"}
    shutil.move(tmp_path / "best", tmp_path / ".old-best")
    (tmp_path / ".old-best" / "file").unlink()  # half removed: it does not come back
    clear_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


class Malicious:
    """Pickles to a call that makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize(
    ("file", "way"),
    [
        ("optimizer.bin", "torch.save"),
        ("random_states_0.pkl", "torch.save"),
        ("random_states_0.pkl", "pickle"),
        ("pytorch_model.bin", "torch.save"),
    ],
)
def test_code_in_a_checkpoint_is_not_run(tmp_path, file, way):
    path = saved(tmp_path / "checkpoints")
    if file == "pytorch_model.bin":  # in place of safetensors
        (path / "model.safetensors").unlink()
    if way == "torch.save":
        torch.save(Malicious(tmp_path / "executed"), path / file)
    else:
        (path / file).write_bytes(
            pickle.dumps(Malicious(tmp_path / "executed"), protocol=2)
        )
    seal(path)
    with pytest.raises(CheckpointError):
        training(path)
    assert not (tmp_path / "executed").exists()


def test_random_states_that_are_missing_or_of_another_kind_are_an_error(tmp_path):
    path = saved(tmp_path)
    states = path / "random_states_0.pkl"
    torch.save({"torch_manual_seed": torch.zeros(3, dtype=torch.uint8)}, states)
    seal(path)
    with pytest.raises(CheckpointError, match=r"random_states_0\.pkl"):
        training(path)
    states.unlink()
    seal(path)
    with pytest.raises(CheckpointError, match=r"random_states_0\.pkl.*Errno 2"):
        training(path)


def test_a_checkpoint_of_another_model_or_of_other_trained_parameters_is_refused(
    tmp_path,
):
    path = saved(tmp_path)
    with pytest.raises(CheckpointError, match=path.name):
        training(path, inputs=5)
    layer = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW([("weight", layer.weight)])
    with pytest.raises(CheckpointError, match="bias"):
        load_weights(path, layer, adam)


def test_a_new_folder_is_whole_or_not_there(tmp_path):
    def fail():
        with new_folder(tmp_path / "out") as folder:
            (folder / "half").write_text("x")
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"out.*MB"):
        fail()
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    with new_folder(tmp_path / "out") as folder:
        (folder / "file").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]
