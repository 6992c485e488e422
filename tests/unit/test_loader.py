"""Batches: references to target tokens, the choice of references, and random state that is left alone."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from rl_caption.data.loader import Collate, augment, encode_targets, micro_batches, row_loader
from tests.captioners_for_tests import tiny_captioner, tiny_rows


def test_targets_end_with_eos_and_padding_is_not_learnt() -> None:
    captioner = tiny_captioner()
    targets, mask = encode_targets(captioner, [["a red circle", "red"], ["a dog"]], 10)
    assert targets.shape == mask.shape == (2, 2, 4)
    assert mask.sum(-1).tolist() == [[4, 2], [3, 0]]
    lengths = mask.sum(-1)
    assert targets[0, 0, 3] == targets[0, 1, 1] == targets[1, 0, 2] == captioner.eos_token_id
    assert captioner.decode(targets[0]) == ["a red circle", "red"]
    for image, caption in ((0, 1), (1, 0)):
        assert (targets[image, caption, int(lengths[image, caption]) :] == captioner.pad_token_id).all()


def test_unknown_words_and_what_is_cut_off_are_not_learnt() -> None:
    captioner = tiny_captioner()
    targets, mask = encode_targets(captioner, [["a zebra runs", "a red circle on a grey field"]], 4)
    assert mask[0, 0].tolist() == [True, False, True, True]
    assert targets[0, 0, 1] == captioner.policy.config.unk_token_id
    assert captioner.eos_token_id not in targets[0, 1]


def test_another_choice_of_references_at_every_step_and_the_same_again() -> None:
    captioner, rows = tiny_captioner(), tiny_rows(1)
    collate = Collate(captioner, 12, captions_per_image=2, seed=0)

    def chosen(step: int) -> tuple[str, ...]:
        batch = collate([(rows[0], step)])
        assert batch.targets is not None
        assert batch.targets.shape[:2] == (1, 2)
        return tuple(captioner.decode(batch.targets[0]))

    choices = [chosen(step) for step in range(12)]
    assert len(set(choices)) > 3
    assert choices == [chosen(step) for step in range(12)]
    assert set(sum(choices, ())) == set(rows[0]["references"])
    batch = Collate(captioner, 12)([(rows[0], 0)])
    assert batch.targets is not None
    assert batch.targets.shape[1] == 3, "all references"


def test_no_targets_unless_asked_for() -> None:
    batch = Collate(tiny_captioner())([(row, 0) for row in tiny_rows(2)])
    assert batch.targets is None
    assert batch.target_mask is None
    assert batch.inputs["pixel_values"].shape == (2, 3, 16, 16)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_follows_the_order_and_leaves_the_random_state_alone(workers: int) -> None:
    rows = tiny_rows(6)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    order = micro_batches(6, 4, 2, 0, 1, seed=0, first_step=1)
    loader = row_loader(rows, Collate(tiny_captioner_quietly(before)), order, workers)
    batches = list(islice(iter(loader), 4))
    assert torch.equal(torch.get_rng_state(), before)
    expected = list(islice(micro_batches(6, 4, 2, 0, 1, seed=0, first_step=1), 4))
    assert [batch.image_ids for batch in batches] == [[rows[i]["image_id"] for i, _ in part] for part in expected]


def tiny_captioner_quietly(state: torch.Tensor):
    captioner = tiny_captioner()
    torch.set_rng_state(state)
    return captioner


def test_flips_mirror_some_images_of_a_step_others_of_the_next_and_never_the_cached_pixels() -> None:
    captioner, rows = tiny_captioner(), tiny_rows(48)
    plain = Collate(captioner)([(row, 0) for row in rows]).inputs["pixel_values"]
    collate = Collate(captioner, augmentations=("horizontal", "vertical"), seed=1)

    def mirrored(step: int) -> list[tuple[bool, bool]]:
        pixels = collate([(row, step) for row in rows]).inputs["pixel_values"]
        found = []
        for image, original in zip(pixels, plain, strict=True):
            axes = {(): original, (-1,): original.flip(-1), (-2,): original.flip(-2), (-1, -2): original.flip(-1, -2)}
            (which,) = [axis for axis, expected in axes.items() if torch.equal(image, expected)]
            found.append((-1 in which, -2 in which))
        return found

    first = mirrored(0)
    assert len(set(first)) == 4
    assert first == mirrored(0)
    assert first != mirrored(1)


def test_an_unknown_flip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data.augment has \['diagonal'\]"):
        Collate(tiny_captioner(), augmentations=["diagonal"])


def test_transposed_and_cropped_views_keep_shape_and_range() -> None:
    pixels = torch.arange(3 * 16 * 16, dtype=torch.float32).reshape(3, 16, 16)
    turned = [augment(pixels, ["transpose"], 0, step, "a") for step in range(8)]
    assert {torch.equal(view, pixels) for view in turned} == {True, False}
    assert all(torch.equal(view, pixels) or torch.equal(view, pixels.transpose(1, 2)) for view in turned)
    crops = [augment(pixels, ["crop"], 0, step, "a") for step in range(8)]
    assert len({float(view.mean()) for view in crops}) > 4
    assert all(view.shape == pixels.shape and view.min() >= 0 and view.max() <= pixels.max() for view in crops)
