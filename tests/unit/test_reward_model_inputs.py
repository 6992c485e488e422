"""What embedding models read: captions chosen, ids cut and padded, pixels cached, random views."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from open_clip import SimpleTokenizer
from PIL import Image

from rewards.clip.preprocessing import Preprocessing
from rl_caption.data.loader import augment
from rl_caption.reward_models.batch import PairCollate, PixelCache, TokenCache, choose_caption
from tests.clip_for_tests import Drawn, noise_image

ROW: Any = {"image_id": "a", "image": Drawn(9), "references": ["one dog", "two black cats", "a very long caption here"]}


def tokens(trims: bool = True, context_length: int = 24) -> TokenCache:
    return TokenCache(SimpleTokenizer(context_length=context_length), context_length, trims)


def test_ids_are_those_of_the_tokenizer_cut_or_padded() -> None:
    captions = ["a dog", "two black cats on a mat"]
    expected = SimpleTokenizer(context_length=24)(captions)
    assert torch.equal(tokens(trims=False)(captions), expected)
    longest = int((expected != 0).sum(dim=1).max())
    assert torch.equal(tokens()(captions), expected[:, :longest])
    short = SimpleTokenizer(context_length=5)(captions)
    assert torch.equal(tokens(context_length=5)(captions), short)
    assert tokens(context_length=5).too_long(captions) == 1


def test_the_caption_is_a_function_of_seed_step_and_image() -> None:
    chosen = [choose_caption(ROW, "random", 0, step) for step in range(60)]
    assert set(chosen) == set(ROW["references"])
    assert chosen == [choose_caption(ROW, "random", 0, step) for step in range(60)]
    assert chosen != [choose_caption(ROW, "random", 1, step) for step in range(60)]
    assert {choose_caption(ROW, "first", 0, step) for step in range(9)} == {"one dog"}


def test_pixels_are_those_of_the_preprocessing_and_drawn_once() -> None:
    image, preprocessing = noise_image(1), Preprocessing(32)
    row: Any = {"image_id": "b", "image": image, "references": ["x"]}
    cache = PixelCache(preprocessing, cache_bytes=3 * 32 * 32)
    assert torch.equal(cache(row), preprocessing(image))
    assert torch.equal(cache(row), preprocessing(image))
    drawn: Any = {"image_id": "c", "image": Drawn(3), "references": ["x"]}
    cache(drawn), cache(drawn)
    assert drawn["image"].drawn == 2, "there is memory for one image only"
    cache = PixelCache(preprocessing, cache_bytes=10**6)
    cache(drawn), cache(drawn)
    assert drawn["image"].drawn == 3


def test_a_batch_has_what_its_towers_read() -> None:
    pixels = PixelCache(Preprocessing(32))
    both = PairCollate(pixels, tokens(), "first")([(ROW, 0), (ROW, 1)])
    assert both.inputs["image"].shape == (2, 3, 32, 32)
    assert both.inputs["text"].shape == (2, 4)
    assert both.captions == ["one dog", "one dog"]
    assert set(PairCollate(pixels, None)([(ROW, 0)]).inputs) == {"image"}
    assert set(PairCollate(None, tokens())([(ROW, 0)]).inputs) == {"text"}
    assert set(both.to(torch.device("cpu")).inputs) == {"image", "text"}


def test_another_view_at_every_step_leaves_the_cached_pixels_alone() -> None:
    row: Any = {"image_id": "b", "image": noise_image(1, (32, 32)), "references": ["x"]}
    pixels = PixelCache(Preprocessing(32), 10**6)
    collate = PairCollate(pixels, None, augmentations=("horizontal",))
    plain = Preprocessing(32)(row["image"])
    views = [collate([(row, step)]).inputs["image"][0] for step in range(12)]
    assert any(torch.equal(view, plain.flip(-1)) for view in views)
    assert any(torch.equal(view, plain) for view in views)


def ramp() -> torch.Tensor:
    """Every pixel tells its row and column."""
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    return torch.stack([rows, columns, rows * 16 + columns])


def test_shift_moves_whole_pixels_by_up_to_an_eighth_and_repeats_the_edge() -> None:
    found = set()
    for step in range(40):
        rows, columns, _ = augment(ramp(), ["shift"], 0, step, "a")
        down, right = int(rows[8, 8]) - 8, int(columns[8, 8]) - 8
        assert torch.equal(rows[:, 0], (torch.arange(16.0) + down).clamp(0, 15))
        assert torch.equal(columns[0], (torch.arange(16.0) + right).clamp(0, 15))
        found.add((down, right))
    assert {down for down, _ in found} == {right for _, right in found} == {-2, -1, 0, 1, 2}


def test_rotate_turns_by_up_to_ten_degrees_either_way() -> None:
    """Against Pillow's rotation; the corners differ by what fills them, so the middle is compared."""
    angles = []
    for step in range(20):
        view = augment(ramp() / 255, ["rotate"], 0, step, "a")
        # In the middle, values change along a row by the sine and along a column by the cosine of the angle.
        slope = (view[0, 8, 11] - view[0, 8, 4]).item() * 255 / 7
        angle = float(np.degrees(np.arcsin(slope)))
        angles.append(angle)
        picture = Image.fromarray(ramp()[2].numpy() / 255)
        expected = np.asarray(picture.rotate(angle, Image.Resampling.BILINEAR))
        assert np.allclose(view[2, 4:12, 4:12].numpy(), expected[4:12, 4:12], atol=1e-3)
    assert max(map(abs, angles)) <= 10.01
    assert min(angles) < -3
    assert max(angles) > 3


@pytest.mark.parametrize("name", ["shift", "rotate"])
def test_new_views_leave_the_old_ones_as_they_were(name: str) -> None:
    both = [augment(ramp(), ["horizontal", "crop", name], 0, step, "a") for step in range(4)]
    alone = [augment(augment(ramp(), ["horizontal", "crop"], 0, step, "a"), [name], 0, step, "a") for step in range(4)]
    assert all(torch.equal(one, other) for one, other in zip(both, alone, strict=True))
    grey = torch.full((3, 16, 16), 0.5)
    assert torch.allclose(augment(grey, [name], 0, 1, "a"), grey, atol=1e-6), "no colour changes"
