"""The L-CLIP student: sizes, layers against a slow version in numpy, padding, the
released keys, saving.
"""

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from rewards.clip.student import LCLIP, LCLIPConfig

TINY = LCLIPConfig(
    embed_dim=5,
    mlp_ratio=2,
    image_size=6,
    patch_size=2,
    image_width=8,
    image_heads=4,
    image_blocks=3,
    image_repeats=2,
    vocab_size=20,
    context_length=9,
    text_width=6,
    text_heads=2,
    text_blocks=2,
    text_repeats=3,
    embedding_rank=3,
)
EOT = 19
# 18 is SOT, 19 EOT, 0 padding; the longest caption has 6 tokens.
IDS = torch.tensor(
    [
        [18, 4, 7, 19, 0, 0, 0, 0, 0],
        [18, 3, 0, 2, 11, 19, 0, 0, 0],
        [18, 19, 0, 0, 0, 0, 0, 0, 0],
    ]
)
PIXELS = torch.randn(
    2,
    3,
    6,
    6,
    generator=torch.Generator().manual_seed(1),
)


@torch.no_grad()
def tiny(**changes):
    """A small model in float64 whose every weight is random, norms and biases included."""
    model = LCLIP(replace(TINY, **changes)).double().eval()
    generator = torch.Generator().manual_seed(7)
    for own in model.parameters():
        own.copy_(0.6 * torch.randn(own.shape, generator=generator, dtype=own.dtype))
    return model.requires_grad_(False)


# Slow versions in NumPy. They share no code with the package: only the weights, under the released
# keys.


def slow_linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def slow_norm(x, weights, name):
    normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def slow_attention(x, weights, name, repeat, heads, keys):
    projected = slow_linear(x, weights, f"{name}.qkv")
    q, k, v = projected.reshape(len(x), 3, heads, -1).transpose(1, 2, 0, 3)
    before = weights[f"{name}.mix_before.{repeat}.weight"][:, :, 0, 0]
    after = weights[f"{name}.mix_after.{repeat}.weight"][:, :, 0, 0]
    scores = np.einsum("gh,hid,hjd->gij", before, q, k) / math.sqrt(q.shape[-1])
    powers = np.exp(scores[..., :keys])
    shares = np.einsum("gh,hij->gij", after, powers / powers.sum(-1, keepdims=True))
    out = np.einsum("hij,hjd->ihd", shares, v[:, :keys]).reshape(x.shape)
    return slow_linear(out, weights, f"{name}.proj")


def slow_gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def slow_blocks(x, weights, blocks, repeats, heads, keys):
    for block, repeat in product(range(blocks), range(repeats)):
        name = f"blocks.{block}"
        normed = slow_norm(x, weights, f"{name}.norm1.{repeat}")
        x = x + slow_attention(
            normed,
            weights,
            f"{name}.attn",
            repeat,
            heads,
            keys,
        )
        normed = slow_norm(x, weights, f"{name}.norm2.{repeat}")
        hidden = slow_gelu(slow_linear(normed, weights, f"{name}.mlp.fc1"))
        x = x + slow_linear(hidden, weights, f"{name}.mlp.fc2")
    return x


def slow_image(weights, pixels):
    kernel = weights["patch_embed.weight"].reshape(TINY.image_width, -1)
    cells = pixels.reshape(
        3,
        3,
        2,
        3,
        2,
    )  # rows and columns of 2 x 2 pixels
    patches = cells.transpose(
        1,
        3,
        0,
        2,
        4,
    ).reshape(9, -1)
    patches = patches @ kernel.T + weights["patch_embed.bias"]
    x = np.concatenate([weights["cls_token"][0], patches]) + weights["pos_embed"][0]
    x = slow_blocks(
        x,
        weights,
        3,
        2,
        TINY.image_heads,
        len(x),
    )
    return slow_linear(slow_norm(x, weights, "norm"), weights, "head")[0]


def slow_text(weights, ids, masked):
    if "token_embed.weight" in weights:
        words = weights["token_embed.weight"][ids]
    else:
        vectors = weights["token_embed.0.weight"][ids]
        words = slow_linear(vectors, weights, "token_embed.1")
    end = ids.index(EOT)
    keys = end + 1 if masked else len(ids)
    x = slow_blocks(
        words + weights["pos_embed"],
        weights,
        2,
        3,
        TINY.text_heads,
        keys,
    )
    return slow_linear(slow_norm(x, weights, "norm"), weights, "head")[end]


def arrays(tower):
    """The weights of a tower, by name."""
    return {name: value.numpy() for name, value in tower.state_dict().items()}


def test_parameters_are_as_many_as_in_the_paper():
    with torch.device("meta"):
        model = LCLIP()
        images = model.encode_image(torch.empty(2, 3, 224, 224))
        texts = model.encode_text(torch.empty(3, 77, dtype=torch.long))
    assert (images.shape, texts.shape) == ((2, 512), (3, 512))
    parts = (model.image, 24_074_240), (model.text, 27_478_656), (model, 51_552_896)
    for part, expected in parts:
        assert sum(each.numel() for each in part.parameters()) == expected


def test_image_tower_equals_the_slow_version_with_blocks_repeated_in_a_row():
    model = tiny()
    weights = arrays(model.image)
    pixels = PIXELS.double()
    expected = [slow_image(weights, one) for one in pixels.numpy()]
    found = model.encode_image(pixels)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("pad_attention", "rank"), [("full", 3), ("masked", 3), ("masked", None)]
)
def test_text_tower_equals_the_slow_version(pad_attention, rank):
    model = tiny(pad_attention=pad_attention, embedding_rank=rank)
    weights = arrays(model.text)
    masked = pad_attention == "masked"
    expected = [slow_text(weights, ids, masked) for ids in IDS.tolist()]
    found = model.encode_text(IDS)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


def test_masked_text_does_not_depend_on_padding():
    model = tiny()
    reference = model.encode_text(IDS)
    after_end = torch.arange(9) > IDS.argmax(-1, keepdim=True)
    torch.testing.assert_close(model.encode_text(IDS[:, :6]), reference)
    torch.testing.assert_close(model.encode_text(IDS[:1, :4]), reference[:1])
    for padding in (5, EOT):  # tokenizers may pad with EOT
        padded = model.encode_text(IDS.masked_fill(after_end, padding))
        torch.testing.assert_close(padded, reference)


def test_initial_values():
    torch.manual_seed(0)
    shape = {
        "image_width": 96,
        "text_width": 96,
        "image_size": 20,
    }
    model = LCLIP(replace(TINY, **shape, vocab_size=500, embedding_rank=32))
    for name, parameter in model.named_parameters():
        spread = parameter.std().item()
        if ".norm" in name:
            assert (parameter == name.endswith("weight")).all(), name
        elif name == "text.token_embed.0.weight":
            assert spread == pytest.approx(1, rel=0.05)
        elif name.startswith("image.patch_embed"):  # torch's own uniform
            assert spread == pytest.approx(1 / math.sqrt(3 * 12), rel=0.3)
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            assert 0 < parameter.abs().max() < 0.1, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "clip"}, "'clip': expected 'l_clip'"),
        ({"embed_dim": 6}, r"image.head.weight \[5, 8\], not \[6, 8\]"),
    ],
)
def test_folders_that_hold_something_else_are_refused(tmp_path, change, message):
    LCLIP(TINY).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=message):
        LCLIP.from_pretrained(tmp_path)


def test_ids_that_lack_padding_are_refused_where_it_is_attended():
    with pytest.raises(ValueError, match=r"\[3, 6\]: expected \[B, 9\]"):
        LCLIP(replace(TINY, pad_attention="full")).encode_text(IDS[:, :6])
