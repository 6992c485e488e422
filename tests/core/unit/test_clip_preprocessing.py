"""Pixels and token ids: equal to open_clip's; batches of captions of similar length."""

import json

import open_clip
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.clip.preprocessing import (
    Preprocessing,
    WordTokens,
    clip_tokenizer,
    embed_by_length,
    open_clip_tokenizer,
    pixels,
)
from tests.clip_for_tests import TINY, noise_image

CLIP = open_clip.SimpleTokenizer(context_length=77)
TOKENS = WordTokens(CLIP)
WRITTEN = [
    "A photo depicts two men's dogs, sitting.",
    "don't  STOP!!",
    "it's 3:45pm -- 100% <end_of_text>",
    "",
    "a\tb\nc",
    "caf\u00e9 \u201cquoted\u201d \u00c3\u00a9t\u00e9",
    "salt &amp; pepper",
    "a&b",
    "x" * 300,
    "'s 's'll",
    "\x1b[31mred",
]


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK"])
def test_pixels_equal_those_of_open_clip(mode):
    transform = open_clip.image_transform(224, is_train=False)
    for size in ((50, 37), (37, 50), (224, 224), (10, 300), (640, 427)):
        image = noise_image(3, size, mode)
        found = pixels(image, Preprocessing())
        assert torch.allclose(found, transform(image), atol=1e-6), size


def test_tokens_of_a_caption_are_those_of_its_words():
    for text in WRITTEN:
        for length in (77, 7):
            expected = CLIP([text], context_length=length)
            assert torch.equal(TOKENS([text], length), expected), text


ASCII = st.text(alphabet=st.characters(codec="ascii"), max_size=40)


@settings(max_examples=150)
@given(ASCII | st.text(max_size=20))
def test_tokens_of_any_text(text):
    assert torch.equal(TOKENS([text], 77), CLIP([text], context_length=77))


def test_a_tokenizer_with_other_settings_stays_as_it_is(tmp_path):
    assert open_clip_tokenizer("ViT-L-14") is clip_tokenizer()
    text = {
        **TINY["text_cfg"],
        "tokenizer_kwargs": {"clean": "whitespace"},
    }
    content = {"model_cfg": TINY | {"text_cfg": text}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    found = open_clip_tokenizer(f"local-dir:{tmp_path}")
    assert type(found) is open_clip.SimpleTokenizer


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 40))
def test_captions_of_similar_length_are_a_batch_and_come_back_in_order(given, most):
    shapes = []

    def encode(ids):
        shapes.append(tuple(ids.shape))
        return ids[:, :1].float() * 2

    count = len(given)
    ids = torch.arange(count).unsqueeze(1).repeat(1, 9)
    found = embed_by_length(encode, ids, torch.tensor(given), most)
    assert found.squeeze(1).tolist() == [2.0 * row for row in range(count)]
    assert sum(rows for rows, _ in shapes) == count
    assert all(rows == 1 or rows * longest <= most for rows, longest in shapes)
    lengths = [longest for _, longest in shapes]
    assert lengths == sorted(lengths)
