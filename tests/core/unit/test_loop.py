"""The loop alone, around a task with one parameter: clipping, schedule, validation,
patience, refusing NaN.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import nn

from rewards.files import load_json
from rl_caption.captioners.config import Decoding
from rl_caption.config.schema import (
    CaptionEvalConfig,
    RunConfig,
    XeConfig,
    XeTrainConfig,
)
from rl_caption.runtime.engines import Averages
from rl_caption.runtime.types import CaptionBatch, TrainState, Validation
from rl_caption.training.checkpoint import (
    CheckpointError,
    load_moments,
    read_state,
)
from rl_caption.training.loop import train
from rl_caption.training.run import NonFiniteError, Run
from rl_caption.training.validation import decode_candidates
from tests.captioners_for_tests import tiny_captioner, tiny_rows
from tests.training_for_tests import lines


class Slope:
    """A task whose gradient is ``slope`` for every element of the weights."""

    name = "slope"

    def __init__(self, weights, slope, loss):
        self.weights, self.slope, self.loss = weights, slope, loss
        self.samples: list[dict[str, Any]] = [{"image_id": "a"}, {"image_id": "b"}]
        self.seen: list[tuple[int, list[str]]] = []

    def training_step(self, batches, step):
        self.weights.grad = torch.full_like(self.weights, self.slope)
        self.seen.append(
            (step, [row["image_id"] for batch in batches for row in batch.rows])
        )
        log = Averages()
        log.add("loss/total", self.loss)
        yield log


ROWS = [{"image_id": "1", "references": ["a dog"]}]


OF_RUN = {"save_every", "log_every", "log_samples"}


class Training:
    """Plain SGD on four weights; validation returns ``scores`` in turn; ``factors`` are
    those of the learning rate.
    """

    def __init__(
        self,
        folder,
        scores=(),
        slope=1.0,
        loss=1.0,
        state=None,
        factors=None,
        validate_first=False,
        eval_every=100,
        patience=None,
        **options,
    ):
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(model.weight)
        rows = [
            {"image_id": f"i{i}", "image": "", "references": []} for i in range(100)
        ]
        given = {"lr": 1.0, "max_steps": 4, "schedule": "constant"}
        given |= {"log_every": 1, "save_every": 100} | options
        of_run = {key: given.pop(key) for key in OF_RUN & given.keys()}
        config = XeConfig(
            eval=CaptionEvalConfig(every=eval_every, patience=patience),
            run=RunConfig(dir=str(folder), **of_run),
            train=XeTrainConfig(batch_size=2, micro_batch_size=1, **given),
        )
        self.run = run = Run(config, accelerator, rows, rows)
        sgd = torch.optim.SGD(model.parameters())
        run.model, run.optimizer = accelerator.prepare(model, sgd)
        run.state = state or TrainState(metric="val/cider")
        micros = [CaptionBatch([row], {}) for row in rows]
        batches = [micros[first : first + 2] for first in range(0, 100, 2)]
        run.loader = lambda collate: nullcontext(iter(batches))  # type: ignore[method-assign, assignment]
        if factors is not None:
            run.learning_rate = lambda step: run.train.lr * factors[step]  # type: ignore[method-assign]
        self.task, self.exported = Slope(model.weight, slope, loss), []
        self.scores, self.metric = iter(scores), run.state.metric
        self.validate_first = validate_first

    def validate(self, step, logged):
        return Validation({self.metric: next(self.scores, 0.0)})

    def export(self, path):
        (path / "score").write_text(str(len(self.exported)))
        self.exported.append(path)

    def fit(self):
        return train(
            self.run,
            self.task,
            list,
            self.validate,
            self.export,
            self.metric,
            "",
            self.validate_first,
        )

    def assert_weights(self, value):
        expected = torch.full((1, 4), value)
        torch.testing.assert_close(self.task.weights.detach(), expected)


def run_of(folder, checkpoint=None, rows=ROWS, val_rows=None, **train):
    """A run whose model is still to be restored."""
    options = XeTrainConfig(**{"batch_size": 1} | train)
    config = XeConfig(run=RunConfig(dir=str(folder)), train=options)
    run = Run(config, Accelerator(cpu=True), rows, val_rows or rows, checkpoint)
    run.name = "xe"
    return run


def restored(run, **about):
    """The counters with which a run of a tiny model begins."""
    run.restore(nn.Linear(2, 2), **about)
    return run.state


def checkpoint_of(run, **counters):
    run.state = replace(run.state, **counters)
    run.save()
    return run.checkpoints / f"step-{run.state.global_step:08d}"


FORGOTTEN = {"best_metric": None, "best_step": None, "evaluations_without_gain": 0}


@pytest.mark.parametrize(
    ("changes", "steps", "kept"),
    [
        ({}, 9, True),
        ({"metric": "val/reward"}, 9, False),
        ({"measured": "20 tokens"}, 9, False),
        # the choice of a finished run stays
        ({"metric": "val/reward"}, 3, True),
    ],
)
def test_what_a_metric_chose_and_how_long_it_was_patient_are_forgotten_with_it(
    tmp_path, changes, steps, kept
):
    run = run_of(tmp_path, max_steps=steps)
    restored(run)
    by = {"metric": "val/cider", "measured": "12 tokens"}
    run.choose_best_by(**by)
    best = {"best_metric": 0.5, "best_step": 1, "evaluations_without_gain": 2}
    saved = checkpoint_of(run, global_step=3, **best)
    run = run_of(tmp_path, saved, max_steps=steps)
    state = restored(run)
    run.choose_best_by(**by | changes)
    found = {key: getattr(state, key) for key in best}
    assert found == (best if kept else FORGOTTEN)


@pytest.mark.parametrize(
    ("option", "row", "same"),
    [
        ({"every": 7, "patience": 7, "batch_size": 7}, {}, True),
        ({"num_beams": 7}, {}, False),
        ({"split": "test"}, {}, False),
        ({}, {"image_id": "2"}, False),
        ({}, {"references": ["a cat"]}, False),
    ],
)
def test_a_metric_is_another_where_what_changes_its_value_is(option, row, same):
    def validation_of(row, **options):
        config = XeConfig(eval=CaptionEvalConfig(**options))
        return Run(config, Accelerator(cpu=True), [], [row]).validation

    found = validation_of(ROWS[0] | row, **option)
    assert (found == validation_of(ROWS[0])) == same


def test_another_reward_or_vocabulary_is_refused_and_only_auto_keeps_the_end_of_a_run(
    tmp_path,
):
    run = run_of(tmp_path)
    restored(run, signature="cider", vocabulary={"a": 0, "dog": 1})
    path = checkpoint_of(run, stopped="an alarm", global_step=1)

    def resumed(resume, signature, vocabulary):
        run = run_of(tmp_path, path)
        run.options.resume = resume
        return restored(run, signature=signature, vocabulary=vocabulary)

    assert resumed("auto", "cider", {"dog": 1, "a": 0}).stopped == "an alarm"
    for resume, signature, vocabulary in (
        ("auto", "cider", {"a": 1, "dog": 0}),
        (str(path), "rouge", {"a": 0, "dog": 1}),
        (True, "rouge", {"a": 0, "cat": 1}),
    ):
        with pytest.raises(CheckpointError):
            resumed(resume, signature, vocabulary)
    state = resumed(True, "rouge", {"a": 0, "dog": 1})
    assert (state.stopped, state.signature) == (None, "rouge")


def test_the_optimizer_is_that_of_the_configuration(tmp_path):
    run = run_of(tmp_path, lr=0.5, betas=(0.8, 0.7), weight_decay=0.25)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].requires_grad_(False)
    run.restore(model, decays=lambda name, _: name == "0.weight")
    groups = run.optimizer.param_groups
    assert {(own["lr"], *own["betas"]) for own in groups} == {(0.5, 0.8, 0.7)}
    decay = {own["weight_decay"]: own["param_names"] for own in groups}
    assert decay == {0.25: ["0.weight"], 0.0: ["0.bias"]}


@pytest.mark.parametrize(
    ("split", "change", "name"),
    [
        ("rows", {"references": ["a cat"]}, "train texts"),
        ("val_rows", {"image_id": "2"}, "val ids"),
    ],
)
def test_a_checkpoint_of_other_data_is_refused(tmp_path, capsys, split, change, name):
    run = run_of(tmp_path)
    restored(run)
    saved = checkpoint_of(run, global_step=1)
    assert restored(run_of(tmp_path, saved)).data
    rows = {"rows": ROWS, "val_rows": ROWS} | {split: [ROWS[0] | change]}
    other = run_of(tmp_path, saved, **rows)
    with pytest.raises(CheckpointError, match=name):
        restored(other)
    other.options.resume = True
    assert restored(other).data
    assert "WARNING" in capsys.readouterr().err


def test_ranks_draw_other_dropout_masks_from_equal_weights(tmp_path, monkeypatch):
    run, masks = run_of(tmp_path), []
    for rank in (0, 1, 0):
        monkeypatch.setitem(PartialState._shared_state, "process_index", rank)
        restored(run)
        masks.append(nn.functional.dropout(torch.ones(64), training=True))
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])


def test_validation_decodes_without_dropout_and_leaves_the_policy_as_it_was():
    captioner, rows = tiny_captioner(dropout=0.5), tiny_rows(4)
    captioner.policy.train()
    decoding = Decoding(max_new_tokens=8, batch_size=3)
    arguments = (captioner, captioner.policy, rows, decoding, Accelerator(cpu=True))
    one, other = (decode_candidates(*arguments) for _ in range(2))
    assert captioner.policy.training
    captioner.policy.eval()
    assert one == other == decode_candidates(*arguments)


def logged(folder, key):
    """Step -> value."""
    return {line["step"]: line[key] for line in lines(folder) if key in line}


@pytest.mark.parametrize(
    ("options", "update"),
    [
        ({"grad_clip_norm": None}, 3.0),
        ({"grad_clip_norm": 1.0}, 0.5),
        ({"grad_clip_norm": None, "grad_clip_value": 0.1}, 0.1),
        ({"grad_clip_norm": 0.1, "grad_clip_value": 2.0}, 0.05),
    ],
)
def test_clipping_and_the_norm_before_it(tmp_path, options, update):
    """Four gradients of 3 have the norm 6."""
    training = Training(tmp_path, slope=3.0, max_steps=1, **options)
    training.fit()
    training.assert_weights(-update)
    assert logged(tmp_path, "grad/norm") == {1: pytest.approx(6.0)}


@pytest.mark.parametrize(
    "options",
    [
        {"loss": math.nan},
        {"slope": math.inf, "grad_clip_value": 0.1},
        {"slope": -math.inf},
        {"slope": math.nan, "grad_clip_norm": None},
    ],
)
def test_a_step_that_is_not_finite_is_refused_and_changes_nothing(tmp_path, options):
    training = Training(tmp_path, **options)
    with pytest.raises(NonFiniteError, match="step 1") as error:
        training.fit()
    assert "none yet" in str(error.value)
    training.assert_weights(0.0)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("interval", ["eval_every", "save_every"])
def test_weights_that_are_not_finite_are_neither_judged_nor_written(tmp_path, interval):
    factors = [1.0, 1.0, math.inf, 1.0]
    training = Training(tmp_path, factors=factors, **{"save_every": 2, interval: 1})
    with pytest.raises(NonFiniteError, match=r"step 3.*good checkpoint.*step-00000002"):
        training.fit()
    assert not (tmp_path / "checkpoints/step-00000003").exists()
    assert 3 not in logged(tmp_path, "val/cider")


def test_the_schedule_is_followed_and_logged(tmp_path):
    factors = [0.5, 1.0, 0.25, 0.0]
    training = Training(tmp_path, factors=factors, lr=2.0, grad_clip_norm=None)
    training.fit()
    assert logged(tmp_path, "train/lr") == {1: 1.0, 2: 2.0, 3: 0.5, 4: 0.0}
    training.assert_weights(-3.5)
    pairs = [(step, [f"i{2 * step}", f"i{2 * step + 1}"]) for step in range(4)]
    assert training.task.seen == pairs


def test_a_step_may_have_several_updates(tmp_path):
    """The learning rate is the step's; what is logged is the mean over its updates; no
    gradient is left over.
    """
    training = Training(tmp_path, max_steps=2, grad_clip_norm=None, factors=[1.0, 10.0])

    def step(batches, number):
        for slope in (1.0, 3.0):
            assert training.task.weights.grad is None
            training.task.slope = training.task.loss = slope
            yield from Slope.training_step(training.task, batches, number)

    training.task.training_step = step  # type: ignore[method-assign]
    state = training.fit()
    assert state.global_step == 2
    training.assert_weights(-4.0 - 40.0)
    assert logged(tmp_path, "loss/total") == {1: 2.0, 2: 2.0}
    assert logged(tmp_path, "grad/norm") == pytest.approx({1: 4.0, 2: 4.0})


def test_the_best_validation_is_exported_and_ties_keep_the_first(tmp_path):
    scores = [0.1, 0.5, 0.5, 0.3, 0.4]
    training = Training(tmp_path, scores, eval_every=1, validate_first=True)
    state = training.fit()
    assert (state.best_metric, state.best_step) == (0.5, 1)
    assert len(training.exported) == 3  # the last model, too
    assert (tmp_path / "export/best/score").read_text() == "1"
    assert logged(tmp_path, "val/cider") == dict(enumerate(scores))
    assert load_json(tmp_path / "result.json")["best_metric"] == 0.5


def test_of_a_loss_the_lowest_is_the_best_and_patience_waits_for_a_lower_one(tmp_path):
    scores, state = [0.9, 0.4, 0.4, 0.5, 0.1], TrainState(metric="val/loss")
    options = {"max_steps": 9, "eval_every": 1, "patience": 2}
    training = Training(tmp_path, scores, state=state, **options)
    state = training.fit()
    assert (state.best_metric, state.best_step, state.global_step) == (0.4, 2, 4)
    assert len(training.exported) == 3


def test_the_last_step_is_logged_validated_and_saved_whatever_the_intervals(tmp_path):
    training = Training(tmp_path, [0.1], max_steps=3, log_every=10, log_samples=1)
    training.fit()
    assert set(logged(tmp_path, "loss/total")) == {1, 3}
    assert set(logged(tmp_path, "val/cider")) == {3}
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000003"
    samples = lines(tmp_path, "samples.jsonl")
    assert samples == [{"step": 1, "image_id": "a"}, {"step": 3, "image_id": "a"}]


def test_a_complete_run_that_goes_on_is_not_complete_until_its_new_end(tmp_path):
    training = Training(tmp_path, max_steps=2)
    state = training.fit()
    assert (tmp_path / "result.json").is_file()
    longer = Training(tmp_path, max_steps=4, state=state, loss=math.nan)
    with pytest.raises(NonFiniteError):
        longer.fit()
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        ("constant", {10: 1.0, 99: 1.0}),
        ("linear", {10: 1.0, 55: 0.5, 100: 0.0, 200: 0.0}),
        ("cosine", {10: 1.0, 40: 0.75, 55: 0.5, 100: 0.0}),
        ("step", {29: 1.0, 30: 0.8, 50: 0.64}),
        ("noam", {39: 0.5}),
    ],
)
def test_warm_up_is_linear_and_decay_begins_at_the_peak(tmp_path, kind, factors):
    """Warm-up of 10 of 100 steps; ``step`` decays by 0.8 every 20."""
    options = {"schedule": kind, "max_steps": 100, "decay": 0.8, "decay_every": 20}
    assert run_of(tmp_path, lr=0.5, **options).learning_rate(0) == 0.5
    run = run_of(tmp_path, lr=1.0, warmup_steps=10, **options)
    expected = {0: 0.1, 4: 0.5, 9: 1.0} | factors
    found = {step: run.learning_rate(step) for step in expected}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("images", "steps", "half", "validated"),
    [(100, 500, 25, 50), (3, 15, 1, 2), (1, 10, 1, 1)],
)
def test_epochs_are_passes_over_all_images(tmp_path, images, steps, half, validated):
    """In batches of 2, which may span two epochs: of 3 images, 10 epochs are 15 steps."""
    sizes = {"rows": ROWS * images, "batch_size": min(2, images)}
    run = run_of(tmp_path, epochs=10, decay_epochs=0.5, **sizes)
    assert run.max_steps == steps
    assert run.eval_every == run.save_every == validated
    assert run.decay_every == half
    assert run_of(tmp_path, epochs=0.5, **sizes).max_steps == half


def fp16_training(folder, slopes, **options):
    """``Training`` with a loss scale of 8 at first; the gradient of step n, unscaled,
    is ``slopes[n]``.
    """
    training = Training(folder, grad_clip_norm=None, **options)
    task, accelerator = training.task, training.run.accelerator
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accelerator.scaler = scaler  # type: ignore[assignment]
    accelerator.native_amp = True
    AcceleratorState._shared_state["_mixed_precision"] = "fp16"
    training.run.optimizer = accelerator.prepare_optimizer(
        torch.optim.SGD([task.weights])
    )
    accelerator._optimizers = [training.run.optimizer]

    def step(batches, number):
        task.slope = slopes[number] * scaler.scale(torch.ones(())).item()
        return Slope.training_step(task, batches, number)

    task.training_step = step  # type: ignore[method-assign]
    return training


@pytest.fixture
def plain_again():
    yield
    AcceleratorState._reset_state()


def test_fp16_skips_a_step_that_overflows_and_goes_on(tmp_path, plain_again):
    """The step counts, in the schedule too; weights and the next logged norm are those
    of the unscaled gradient.
    """
    slopes, factors = [1.0, math.inf, math.nan, 2.0], [1.0, 10.0, 100.0, 1000.0]
    training = fp16_training(tmp_path, slopes, factors=factors)
    state = training.fit()
    assert (state.global_step, state.skipped) == (4, 2)
    training.assert_weights(-1.0 - 2000.0)
    assert logged(tmp_path, "train/skipped") == {1: 0, 2: 1, 3: 2, 4: 2}
    assert logged(tmp_path, "train/loss_scale") == {1: 8.0, 2: 4.0, 3: 2.0, 4: 2.0}
    assert logged(tmp_path, "grad/norm") == pytest.approx({1: 2.0, 4: 4.0})
    assert logged(tmp_path, "loss/total") == dict.fromkeys(range(1, 5), 1.0)
    saved = tmp_path / "checkpoints/step-00000004"
    assert read_state(saved).skipped == 2
    run, scaler = training.run, training.run.accelerator.scaler
    scaler.update(64.0)
    load_moments(run.accelerator, saved, run.model, run.optimizer, {})
    assert scaler.get_scale() == 2.0


def test_fp16_gives_up_where_no_loss_scale_helps(tmp_path, plain_again):
    """From 8 to below 2^-8 in 12 steps."""
    slopes = [math.inf] * 6 + [1.0] + [math.inf] * 9
    training = fp16_training(tmp_path, slopes, max_steps=16)
    with pytest.raises(NonFiniteError, match="overflows fp16"):
        training.fit()
    assert training.run.state.skipped == 12
    training.assert_weights(-1.0)
