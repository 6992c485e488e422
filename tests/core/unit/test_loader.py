"""The order of training images, their random views, and references to target tokens."""

from itertools import islice

import pytest
import torch

from rl_caption.data.base import DataError, Row
from rl_caption.data.loader import (
    Collate,
    augment,
    encode_targets,
    micro_batch_size,
    micro_batches,
    row_loader,
    step_indices,
)
from rl_caption.runtime.errors import ConfigError
from rl_caption.scst.rollout import sampling_noise
from tests.captioners_for_tests import tiny_captioner, tiny_rows


def test_every_image_is_seen_once_an_epoch_in_another_order_also_where_batches_span_epochs():
    seen = [index for step in range(10) for index in step_indices(7, 3, step, seed=1)]
    for epoch in range(4):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert sorted(step_indices(3, 6, 0, seed=0)) == [0, 0, 1, 1, 2, 2]
    first = step_indices(50, 50, 0, 0)
    assert first == step_indices(50, 50, 0, 0)
    assert first not in (step_indices(50, 50, 1, 0), step_indices(50, 50, 0, 1))


@pytest.mark.parametrize(("processes", "micro"), [(1, 8), (2, 2), (4, 1)])
def test_processes_and_micro_batches_share_the_same_global_batch(processes, micro):
    per_step = 8 // processes // micro
    for step in range(3):
        parts = []
        for rank in range(processes):
            order = micro_batches(20, 8, micro, rank, processes, seed=5, first_step=0)
            mine = list(islice(order, step * per_step, (step + 1) * per_step))
            assert all(len(part) == micro for part in mine)
            assert {of for part in mine for _, of in part} == {step}
            parts += [index for part in mine for index, _ in part]
        assert parts == step_indices(20, 8, step, seed=5)


def test_a_later_first_step_skips_the_batches_of_the_steps_before_it():
    whole = micro_batches(20, 8, 2, 0, 2, seed=5, first_step=0)
    later = micro_batches(20, 8, 2, 0, 2, seed=5, first_step=2)
    # two micro-batches a step
    assert list(islice(whole, 4, 10)) == list(islice(later, 6))


def test_sizes_that_do_not_divide_are_refused():
    assert micro_batch_size(12, None, 2) == 6
    assert micro_batch_size(12, 3, 2) == 3
    with pytest.raises(ValueError, match=r"batch_size 9.*2 processes"):
        micro_batch_size(9, None, 2)
    with pytest.raises(ValueError, match=r"12.*2 processes.*micro_batch_size 4"):
        micro_batch_size(12, 4, 2)


def test_targets_end_with_eos_and_padding_unknown_words_and_what_is_cut_off_are_not_learnt():
    captioner, rows = tiny_captioner(), tiny_rows(2)
    references = [["a red circle", "red"], ["a dog"]]
    targets, mask = encode_targets(captioner, references, 10, rows)
    assert targets.shape == mask.shape == (2, 2, 4)
    assert mask.sum(-1).tolist() == [[4, 2], [3, 0]]
    ends = [targets[0, 0, 3], targets[0, 1, 1], targets[1, 0, 2]]
    assert ends == [captioner.eos_token_id] * 3
    assert captioner.decode(targets[0]) == ["a red circle", "red"]
    assert (targets[0, 1, 2:] == captioner.pad_token_id).all()
    references = [["a zebra runs", "a red circle on a grey field"]]
    targets, mask = encode_targets(captioner, references, 4, rows[:1])
    assert mask[0, 0].tolist() == [True, False, True, True]
    assert targets[0, 0, 1] == captioner.policy.config.unk_token_id
    assert captioner.eos_token_id not in targets[0, 1]


def test_another_choice_of_references_at_every_step_and_the_same_again():
    captioner, rows = tiny_captioner(), tiny_rows(1)
    collate = Collate(captioner, 12, captions_per_image=2, seed=0)

    def chosen(step):
        batch = collate([(rows[0], step)])
        assert batch.targets is not None
        assert batch.targets.shape[:2] == (1, 2)
        return tuple(captioner.decode(batch.targets[0]))

    choices = [chosen(step) for step in range(12)]
    assert len(set(choices)) > 3
    assert choices == [chosen(step) for step in range(12)]
    assert set(sum(choices, ())) == set(rows[0]["references"])
    batch = Collate(captioner, 12)([(rows[0], 0)])
    assert captioner.decode(batch.targets[0]) == rows[0]["references"]
    batch = Collate(captioner)([(rows[0], 0)])
    assert batch.targets is batch.target_mask is None


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_follows_the_order_and_leaves_the_random_state_alone(workers):
    rows, collate = tiny_rows(6), Collate(tiny_captioner())
    before = torch.get_rng_state()
    order = micro_batches(6, 4, 2, 0, 1, seed=0, first_step=1)
    with row_loader(rows, collate, order, workers) as loaded:
        batches = list(islice(loaded, 4))
    assert torch.equal(torch.get_rng_state(), before)
    expected = list(islice(micro_batches(6, 4, 2, 0, 1, seed=0, first_step=1), 4))
    assert [batch.image_ids for batch in batches] == [
        [rows[i]["image_id"] for i, _ in part] for part in expected
    ]


def no_batch(items):
    kinds = {"data": DataError, "file": OSError, "key": KeyError}
    raise kinds[items[0][0]["image_id"]]("image 'x'")


@pytest.mark.parametrize(
    ("name", "kind"), [("data", DataError), ("file", ConfigError), ("key", ConfigError)]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_worker_is_raised_as_it_is(name, kind, workers):
    order, rows = iter([[(0, 0)]]), [Row(image_id=name, references=[])]
    with (
        row_loader(rows, no_batch, order, workers) as batches,
        pytest.raises(kind) as raised,
    ):
        next(batches)
    assert "Traceback" not in str(raised.value)
    assert "x" in str(raised.value)


def test_flips_mirror_some_images_of_a_step_others_of_the_next_and_never_the_cached_pixels():
    captioner, rows = tiny_captioner(), tiny_rows(48)
    plain = Collate(captioner)([(row, 0) for row in rows]).inputs["pixel_values"]
    collate = Collate(captioner, augmentations=("horizontal", "vertical"), seed=1)

    def mirrored(step):
        pixels = collate([(row, step) for row in rows]).inputs["pixel_values"]
        found = []
        for image, original in zip(pixels, plain, strict=True):
            axes = ((), (-1,), (-2,), (-1, -2))
            which = [axis for axis in axes if torch.equal(image, original.flip(axis))]
            found.extend(which)
        return found

    first = mirrored(0)
    assert len(first) == 48
    assert len(set(first)) == 4
    assert first == mirrored(0)
    assert first != mirrored(1)
    with pytest.raises(ValueError, match="rand_augment is for"):
        Collate(captioner, augmentations=["rand_augment"])


def test_transposed_and_cropped_views_keep_shape_and_range():
    pixels = torch.arange(3 * 16 * 16, dtype=torch.float32).reshape(3, 16, 16)
    turned = [augment(pixels, ["transpose"], 0, step, "a") for step in range(8)]
    assert {torch.equal(view, pixels) for view in turned} == {True, False}
    for view in turned:
        assert torch.equal(view, pixels) or torch.equal(view, pixels.transpose(1, 2))
    crops = torch.stack([augment(pixels, ["crop"], 0, step, "a") for step in range(8)])
    assert len(set(crops.flatten(1).mean(1).tolist())) > 4
    assert crops.shape[1:] == pixels.shape
    assert 0 <= crops.min() <= crops.max() <= pixels.max()
    ramp = augment(torch.arange(32.0).expand(1, 32, 32), ["crop"], 0, 1, "a")[0, 0]
    assert (ramp.diff()[1:-1] > 0).all(), "scaled back by interpolation"


def test_what_is_sampled_of_an_image_does_not_depend_on_its_random_view():
    pixels, ids = torch.arange(12.0).view(3, 2, 2), list(map(str, range(600)))
    noise = sampling_noise(0, 3, ids, 5, 8)
    for name in ("horizontal", "vertical", "transpose"):
        views = torch.stack([augment(pixels, [name], 0, 3, each) for each in ids])
        changed = (views != pixels).flatten(1).any(1)
        # A mean of 300 numbers has an error of 0.017.
        difference = noise[changed].mean(0) - noise[~changed].mean(0)
        assert difference.abs().max() < 0.12
