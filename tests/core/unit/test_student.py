"""The L-CLIP student: sizes, layers against a slow version in numpy, padding, the released keys,
saving.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rewards.clip.student import (
    LCLIP,
    ImageStudent,
    LCLIPConfig,
    TextStudent,
)

TINY = LCLIPConfig(
    embed_dim=5, mlp_ratio=2, image_size=6, patch_size=2, image_width=8, image_heads=4, image_blocks=3, image_repeats=2,
    vocab_size=20, context_length=9, text_width=6, text_heads=2, text_blocks=2, text_repeats=3, embedding_rank=3,
)  # fmt: skip
EOT = 19
# 18 is SOT, 19 EOT, 0 padding; the longest caption has 6 tokens.
IDS = torch.tensor(
    [
        [18, 4, 7, 19, 0, 0, 0, 0, 0],
        [18, 3, 0, 2, 11, 19, 0, 0, 0],
        [18, 19, 0, 0, 0, 0, 0, 0, 0],
    ]
)
PIXELS = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def tiny(**changes):
    """A small model in float64 whose every weight is random, norms and biases included."""
    model = LCLIP(replace(TINY, **changes)).double().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                0.6
                * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return model


# Slow versions in NumPy. They share no code with the package: only the weights, under the released
# keys.


def slow_linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def slow_norm(x, weights, name):
    normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def slow_attention(
    x,
    weights,
    name,
    repeat,
    heads,
    keys,
):
    q, k, v = (
        slow_linear(x, weights, f"{name}.qkv")
        .reshape(len(x), 3, heads, -1)
        .transpose(1, 2, 0, 3)
    )
    before, after = (
        weights[f"{name}.mix_{which}.{repeat}.weight"][:, :, 0, 0]
        for which in ("before", "after")
    )
    scores = np.einsum("gh,hid,hjd->gij", before, q, k) / math.sqrt(q.shape[-1])
    powers = np.exp(scores[..., :keys])
    shares = np.einsum("gh,hij->gij", after, powers / powers.sum(-1, keepdims=True))
    out = np.einsum("hij,hjd->ihd", shares, v[:, :keys]).reshape(x.shape)
    return slow_linear(out, weights, f"{name}.proj")


def slow_blocks(
    x,
    weights,
    order,
    heads,
    keys,
):
    for block, repeat in order:
        name = f"blocks.{block}"
        normed = slow_norm(x, weights, f"{name}.norm1.{repeat}")
        x = x + slow_attention(normed, weights, f"{name}.attn", repeat, heads, keys)
        normed = slow_norm(x, weights, f"{name}.norm2.{repeat}")
        hidden = slow_linear(normed, weights, f"{name}.mlp.fc1")
        hidden = np.array(
            [
                [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in row]
                for row in hidden
            ]
        )
        x = x + slow_linear(hidden, weights, f"{name}.mlp.fc2")
    return x


def slow_image(weights, pixels, order):
    kernel = weights["patch_embed.weight"].reshape(TINY.image_width, -1)
    patches = (
        pixels.reshape(3, 3, 2, 3, 2).transpose(1, 3, 0, 2, 4).reshape(9, -1)
    )  # rows and columns of 2 x 2 pixels
    patches = patches @ kernel.T + weights["patch_embed.bias"]
    x = np.concatenate([weights["cls_token"][0], patches]) + weights["pos_embed"][0]
    x = slow_blocks(x, weights, order, TINY.image_heads, len(x))
    return slow_linear(slow_norm(x, weights, "norm"), weights, "head")[0]


def slow_text(weights, ids, masked):
    if "token_embed.weight" in weights:
        words = weights["token_embed.weight"][ids]
    else:
        words = slow_linear(
            weights["token_embed.0.weight"][ids], weights, "token_embed.1"
        )
    end = ids.index(EOT)
    order = [
        (block, repeat)
        for block in range(TINY.text_blocks)
        for repeat in range(TINY.text_repeats)
    ]
    keys = end + 1 if masked else len(ids)
    x = slow_blocks(words + weights["pos_embed"], weights, order, TINY.text_heads, keys)
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
    for part, expected in ((model.image, 24_074_240), (model.text, 27_478_656)):
        assert sum(each.numel() for each in part.parameters()) == expected
    assert len([*model.parameters()]) == len(
        [*model.image.parameters(), *model.text.parameters()]
    )


def test_image_tower_equals_the_slow_version_with_blocks_repeated_in_a_row():
    model = tiny()
    weights = arrays(model.image)
    in_a_row = [(block, repeat) for block in range(3) for repeat in range(2)]
    found = model.encode_image(PIXELS.double()).detach().numpy()
    for row, pixels in enumerate(PIXELS.double().numpy()):
        expected = slow_image(weights, pixels, in_a_row)
        np.testing.assert_allclose(found[row], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("pad_attention", "rank"), [("full", 3), ("masked", 3), ("masked", None)]
)
def test_text_tower_equals_the_slow_version(pad_attention, rank):
    model = tiny(pad_attention=pad_attention, embedding_rank=rank)
    weights = arrays(model.text)
    found = model.encode_text(IDS).detach().numpy()
    for row, ids in enumerate(IDS.tolist()):
        expected = slow_text(weights, ids, pad_attention == "masked")
        np.testing.assert_allclose(found[row], expected, rtol=1e-9, atol=1e-9)


def test_masked_text_does_not_depend_on_padding():
    model = tiny()
    reference = model.encode_text(IDS)
    after_end = torch.arange(9) > IDS.argmax(-1, keepdim=True)
    torch.testing.assert_close(model.encode_text(IDS[:, :6]), reference)
    torch.testing.assert_close(model.encode_text(IDS[:1, :4]), reference[:1])
    for padding in (5, EOT):  # tokenizers may pad with EOT
        padded = model.encode_text(IDS.masked_fill(after_end, padding))
        torch.testing.assert_close(padded, reference)


def embedded(model):
    return model.encode_image(PIXELS), model.encode_text(IDS)


def test_masked_text_learns_without_nan():
    model = LCLIP(TINY).float()
    image, text = embedded(model)
    (image.square().sum() + text.square().sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_initial_values():
    torch.manual_seed(0)
    shape = {"image_width": 96, "text_width": 96, "image_size": 20}
    model = LCLIP(replace(TINY, **shape, vocab_size=500, embedding_rank=32))
    for name, parameter in model.named_parameters():
        values, spread = parameter.detach(), parameter.detach().std().item()
        if ".norm" in name:
            assert (values == name.endswith("weight")).all(), name
        elif name == "text.token_embed.0.weight":
            assert spread == pytest.approx(1, rel=0.05)
        elif name.startswith("image.patch_embed"):  # torch's own uniform
            assert spread == pytest.approx(1 / math.sqrt(3 * 12), rel=0.3)
        elif name.endswith("bias"):
            assert (values == 0).all(), name
        elif values.numel() > 400:
            assert spread == pytest.approx(0.02, rel=0.1), name
        else:  # positions, class token, mixers: not the identity
            assert 0 < values.abs().max().item() < 0.1, name


def test_saved_model_is_the_same_model(tmp_path):
    config = replace(TINY, pad_attention="full", embedding_rank=None)
    model = LCLIP(config).eval()
    model.save_pretrained(tmp_path / "new" / "folder")
    loaded = LCLIP.from_pretrained(tmp_path / "new" / "folder")
    assert (loaded.config, loaded.training) == (config, False)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert all(map(torch.equal, embedded(loaded), embedded(model)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "clip"}, "'clip': expected 'l_clip'"),
        ({"width": 3}, "'width'"),
        ({"embed_dim": 6}, r"image.head.weight \[5, 8\], not \[6, 8\]"),
        ({"image_heads": 7}, "image_heads"),
        ({"text_blocks": True}, "text_blocks"),
        ({"pad_attention": "causal"}, "pad_attention"),
    ],
)
def test_folders_that_hold_something_else_are_refused(tmp_path, change, message):
    LCLIP(TINY).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=message):
        LCLIP.from_pretrained(tmp_path)


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\[1, 3, 8, 8\]: expected \[B, 3, 6, 6\]"):
        ImageStudent(TINY)(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"\[3, 6\]: expected \[B, 9 to 9\]"):
        TextStudent(replace(TINY, pad_attention="full"))(IDS[:, :6])
    for shape in ((2, 10), (9,), (2, 0)):
        with pytest.raises(ValueError, match=r"expected \[B, 1 to 9\]"):
            TextStudent(TINY)(torch.zeros(shape, dtype=torch.long))
