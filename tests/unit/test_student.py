"""The L-CLIP student: sizes, layers against a slow version in numpy, padding, the released keys, saving."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rewards.clip.student import (
    LCLIP,
    ImageStudent,
    LCLIPConfig,
    TextStudent,
    from_released,
    released_key,
)

TINY = LCLIPConfig(
    embed_dim=5, mlp_ratio=2, image_size=6, patch_size=2, image_width=8, image_heads=4, image_blocks=3, image_repeats=2,
    vocab_size=20, context_length=9, text_width=6, text_heads=2, text_blocks=2, text_repeats=3, embedding_rank=3,
)  # fmt: skip
EOT = 19
# 18 is SOT, 19 EOT, 0 padding; the longest caption has 6 tokens.
IDS = torch.tensor([[18, 4, 7, 19, 0, 0, 0, 0, 0], [18, 3, 0, 2, 11, 19, 0, 0, 0], [18, 19, 0, 0, 0, 0, 0, 0, 0]])
PIXELS = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def tiny(**changes: Any) -> LCLIP:
    """A small model in float64 whose every weight is random, norms and biases included."""
    model = LCLIP(replace(TINY, **changes)).double().eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(scope="module")
def full_size() -> LCLIP:
    with torch.device("meta"):
        return LCLIP(LCLIPConfig())


# Slow versions, one number at a time. They share no code with the package: only the weights, under the released keys.


def slow_linear(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    matrix, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    rows = [[sum(a * b for a, b in zip(row, out, strict=True)) for out in matrix] for row in x]
    return np.array(rows) + (0 if bias is None else bias)


def slow_norm(x: np.ndarray, weights: dict[str, np.ndarray], name: str) -> np.ndarray:
    rows = []
    for row in x:
        mean = sum(row) / len(row)
        variance = sum((value - mean) ** 2 for value in row) / len(row)
        rows.append([(value - mean) / math.sqrt(variance + 1e-5) for value in row])
    return np.array(rows) * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def slow_attention(
    x: np.ndarray, weights: dict[str, np.ndarray], name: str, repeat: int, heads: int, keys: int
) -> np.ndarray:
    tokens, width = x.shape
    dim = width // heads
    qkv = slow_linear(x, weights, f"{name}.qkv").reshape(tokens, 3, heads, dim)
    scores = np.zeros((heads, tokens, tokens))
    for h in range(heads):
        for i in range(tokens):
            for j in range(tokens):
                scores[h, i, j] = sum(qkv[i, 0, h, d] * qkv[j, 1, h, d] for d in range(dim)) / math.sqrt(dim)
    before = weights[f"{name}.conv_l.instances.{repeat}.weight"][:, :, 0, 0]
    after = weights[f"{name}.conv_w.instances.{repeat}.weight"][:, :, 0, 0]
    scores = np.einsum("gh,hij->gij", before, scores)
    shares = np.zeros_like(scores)
    for h in range(heads):
        for i in range(tokens):
            powers = [math.exp(scores[h, i, j]) for j in range(keys)]
            shares[h, i, :keys] = [power / sum(powers) for power in powers]
    shares = np.einsum("gh,hij->gij", after, shares)
    out = np.einsum("hij,jhd->ihd", shares, qkv[:, 2]).reshape(tokens, width)
    return slow_linear(out, weights, f"{name}.proj")


def slow_blocks(
    x: np.ndarray, weights: dict[str, np.ndarray], order: list[tuple[int, int]], heads: int, keys: int
) -> np.ndarray:
    for block, repeat in order:
        name = f"blocks.{block}.block"
        normed = slow_norm(x, weights, f"{name}.norm1.instances.{repeat}")
        x = x + slow_attention(normed, weights, f"{name}.attn", repeat, heads, keys)
        normed = slow_norm(x, weights, f"{name}.norm2.instances.{repeat}")
        hidden = slow_linear(normed, weights, f"{name}.mlp.fc1")
        hidden = np.array([[0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in row] for row in hidden])
        x = x + slow_linear(hidden, weights, f"{name}.mlp.fc2")
    return x


def slow_image(weights: dict[str, np.ndarray], pixels: np.ndarray, order: list[tuple[int, int]]) -> np.ndarray:
    kernel, patch = weights["patch_embed.proj.weight"], TINY.patch_size
    tokens = [weights["cls_token"][0, 0]]
    for top in range(0, TINY.image_size, patch):
        for left in range(0, TINY.image_size, patch):
            window = pixels[:, top : top + patch, left : left + patch]
            tokens.append(np.array([(window * k).sum() for k in kernel]) + weights["patch_embed.proj.bias"])
    x = np.array(tokens) + weights["pos_embed"][0]
    x = slow_blocks(x, weights, order, TINY.image_heads, len(x))
    return slow_linear(slow_norm(x, weights, "norm"), weights, "head")[0]


def slow_text(weights: dict[str, np.ndarray], ids: list[int], masked: bool) -> np.ndarray:
    if "patch_embed.weight" in weights:
        words = weights["patch_embed.weight"][ids]
    else:
        words = slow_linear(weights["patch_embed.0.weight"][ids], weights, "patch_embed.1")
    end = ids.index(EOT)
    order = [(block, repeat) for block in range(TINY.text_blocks) for repeat in range(TINY.text_repeats)]
    x = slow_blocks(words + weights["pos_embed"], weights, order, TINY.text_heads, end + 1 if masked else len(ids))
    return slow_linear(slow_norm(x, weights, "norm"), weights, "head")[end]


def to_released(state: dict[str, Tensor], stage: Any = 2) -> dict[str, Tensor]:
    return {released_key(name, stage): tensor for name, tensor in state.items()}


def released_arrays(model: LCLIP, tower: str) -> dict[str, np.ndarray]:
    state = {name: value for name, value in model.state_dict().items() if name.startswith(f"{tower}.")}
    return {key.removeprefix("student."): value.numpy() for key, value in to_released(state, stage=1).items()}


def test_parameters_are_as_many_as_in_the_paper(full_size: LCLIP) -> None:
    image, text = full_size.image, full_size.text
    assert (count(image), count(text), count(full_size)) == (24_074_240, 27_478_656, 51_552_896)
    assert (count(image.blocks), count(text.blocks)) == (21_279_744, 14_178_432)
    assert full_size.encode_image(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 512)
    assert full_size.encode_text(torch.empty(3, 77, dtype=torch.long, device="meta")).shape == (3, 512)


def test_image_tower_equals_the_slow_version_with_blocks_repeated_in_a_row() -> None:
    model = tiny()
    weights = released_arrays(model, "image")
    got = model.encode_image(PIXELS.double()).detach().numpy()
    in_a_row = [(block, repeat) for block in range(3) for repeat in range(2)]
    for row, pixels in enumerate(PIXELS.double().numpy()):
        np.testing.assert_allclose(got[row], slow_image(weights, pixels, in_a_row), rtol=1e-9, atol=1e-9)
    in_rounds = [(block, repeat) for repeat in range(2) for block in range(3)]
    assert not np.allclose(got[0], slow_image(weights, PIXELS[0].double().numpy(), in_rounds), rtol=1e-3)


@pytest.mark.parametrize("pad_attention", ["full", "masked"])
@pytest.mark.parametrize("rank", [3, None])
def test_text_tower_equals_the_slow_version(pad_attention: Any, rank: int | None) -> None:
    model = tiny(pad_attention=pad_attention, embedding_rank=rank)
    weights = released_arrays(model, "text")
    got = model.encode_text(IDS).detach().numpy()
    for row, ids in enumerate(IDS.tolist()):
        expected = slow_text(weights, ids, pad_attention == "masked")
        np.testing.assert_allclose(got[row], expected, rtol=1e-9, atol=1e-9)


def test_masked_text_does_not_depend_on_padding() -> None:
    model = tiny(pad_attention="masked")
    reference = model.encode_text(IDS)
    short = IDS[:, :6]
    assert short.shape == (3, 6)
    torch.testing.assert_close(model.encode_text(short), reference)
    torch.testing.assert_close(model.encode_text(IDS[:1, :4]), reference[:1])
    other = torch.where(torch.arange(9) > IDS.argmax(-1, keepdim=True), 5, IDS)
    torch.testing.assert_close(model.encode_text(other), reference)
    repeated = torch.where(torch.arange(9) > IDS.argmax(-1, keepdim=True), EOT, IDS)
    torch.testing.assert_close(model.encode_text(repeated), reference)  # tokenizers that pad with EOT


def test_full_text_depends_on_padding_and_its_length() -> None:
    model = tiny(pad_attention="full")
    other = torch.where(torch.arange(9) > IDS.argmax(-1, keepdim=True), 5, IDS)
    assert (model.encode_text(other) - model.encode_text(IDS)).abs().amax(-1).min() > 1e-3
    with pytest.raises(ValueError, match=r"\[3, 6\]: expected \[B, 9\] with pad_attention 'full'"):
        model.encode_text(IDS[:, :6])


def test_masked_text_learns_without_nan() -> None:
    model = LCLIP(TINY).float()
    image, text = model(PIXELS, IDS)
    (image.square().sum() + text.square().sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_initial_values() -> None:
    torch.manual_seed(0)
    model = LCLIP(replace(TINY, image_width=96, text_width=96, vocab_size=500, embedding_rank=32, image_size=20))
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if ".norm" in name:
            assert (values == (1 if name.endswith("weight") else 0)).all(), name
        elif name == "text.token_embed.0.weight":
            assert values.std().item() == pytest.approx(1, rel=0.05), name
        elif name.startswith("image.patch_embed"):
            assert values.abs().max().item() <= 1 / math.sqrt(3 * 2 * 2), name  # torch's own uniform
            assert values.std().item() == pytest.approx(1 / math.sqrt(3 * 12), rel=0.3), name
        elif name.endswith("bias"):
            assert (values == 0).all(), name
        elif values.numel() > 400:
            assert values.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(values.mean().item()) < 0.004, name
        else:
            assert 0 < values.abs().max().item() < 0.1, name  # positions, class token, mixers: not the identity


def expected_released_keys(rank: bool) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a released stage-2 student, written out from the description of its layout."""
    image, text = "student.image_encoder", "student.text_encoder"
    shapes: dict[str, tuple[int, ...]] = {
        f"{image}.patch_embed.proj.weight": (768, 3, 32, 32),
        f"{image}.patch_embed.proj.bias": (768,),
        f"{image}.cls_token": (1, 1, 768),
        f"{image}.pos_embed": (1, 50, 768),
        f"{text}.pos_embed": (77, 768),
    }
    if rank:
        shapes |= {f"{text}.patch_embed.0.weight": (49408, 256), f"{text}.patch_embed.1.weight": (768, 256)}
        shapes |= {f"{text}.patch_embed.1.bias": (768,)}
    else:
        shapes[f"{text}.patch_embed.weight"] = (49408, 768)
    for base, blocks, heads in ((image, 3, 24), (text, 2, 12)):
        for block in (f"{base}.blocks.{number}.block" for number in range(blocks)):
            for r in range(2):
                for norm in ("norm1", "norm2"):
                    shapes |= {f"{block}.{norm}.instances.{r}.{kind}": (768,) for kind in ("weight", "bias")}
                for mixer in ("conv_l", "conv_w"):
                    shapes[f"{block}.attn.{mixer}.instances.{r}.weight"] = (heads, heads, 1, 1)
            for name, (rows, columns) in {
                "attn.qkv": (2304, 768), "attn.proj": (768, 768), "mlp.fc1": (3072, 768), "mlp.fc2": (768, 3072)
            }.items():  # fmt: skip
                shapes[f"{block}.{name}.weight"] = (rows, columns)
                if name != "attn.qkv" or base == image:
                    shapes[f"{block}.{name}.bias"] = (rows,)
        shapes |= {f"{base}.norm.weight": (768,), f"{base}.norm.bias": (768,)}
        shapes |= {f"{base}.head.weight": (512, 768), f"{base}.head.bias": (512,)}
    return shapes


@pytest.mark.parametrize("rank", [256, None])
def test_released_keys_are_the_published_ones(rank: int | None) -> None:
    config = LCLIPConfig(embedding_rank=rank)
    with torch.device("meta"):
        state = LCLIP(config).state_dict()
    released = to_released(state, stage=2)
    assert {key: tuple(tensor.shape) for key, tensor in released.items()} == expected_released_keys(rank is not None)


def test_released_checkpoints_of_either_stage_make_the_model() -> None:
    source = tiny()
    state = source.state_dict()
    both = from_released(to_released(state, stage=2) | {"teacher.visual.proj": torch.zeros(2, 2)}, TINY)
    towers: dict[str, Tensor] = {}
    for tower in ("image", "text"):
        part = {name: tensor for name, tensor in state.items() if name.startswith(f"{tower}.")}
        released = to_released(part, stage=1)
        assert all(key.startswith("student.") and "encoder" not in key for key in released)
        towers |= from_released(released | {"teacher.proj": torch.zeros(1)}, TINY)
    for found in (both, towers):
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], state[name]) for name in state)


def test_released_keys_that_do_not_fit_are_named() -> None:
    released = to_released(tiny().state_dict(), stage=2)
    broken = dict(released)
    del broken["student.image_encoder.blocks.1.block.attn.conv_l.instances.1.weight"]
    broken["student.text_encoder.ln_pre.weight"] = torch.zeros(6)
    broken["student.text_encoder.head.bias"] = torch.zeros(4)
    with pytest.raises(ValueError) as caught:
        from_released(broken, TINY)
    message = str(caught.value)
    assert "1 missing: student.image_encoder.blocks.1.block.attn.conv_l.instances.1.weight" in message
    assert "1 unexpected: student.text_encoder.ln_pre.weight" in message
    assert "1 wrong shape: student.text_encoder.head.bias has [4], not [5]" in message
    with pytest.raises(ValueError, match="pass what it has under 'state_dict'"):
        from_released({"state_dict": torch.zeros(1)}, TINY)
    with pytest.raises(ValueError, match=r"no key starts with 'student\.'"):
        from_released({"teacher.proj": torch.zeros(1)}, TINY)
    with pytest.raises(ValueError, match="have to be >= 2"):
        from_released(released, replace(TINY, text_repeats=1))


def test_saved_model_is_the_same_model(tmp_path: Path) -> None:
    config = replace(TINY, pad_attention="full", embedding_rank=None)
    model = LCLIP(config).eval()
    model.save_pretrained(tmp_path / "new" / "folder")
    assert sorted(file.name for file in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]
    loaded = LCLIP.from_pretrained(tmp_path / "new" / "folder")
    assert loaded.config == config
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    torch.testing.assert_close(loaded.encode_image(PIXELS), model.encode_image(PIXELS), rtol=0, atol=0)
    torch.testing.assert_close(loaded.encode_text(IDS), model.encode_text(IDS), rtol=0, atol=0)


def test_folders_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        LCLIP.from_pretrained(tmp_path)
    LCLIP(TINY).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"model_type": "clip"}, "model_type 'clip': expected 'l_clip'"),
        ({"width": 3}, r"unknown \['width'\]"),
        ({"embed_dim": 6}, r"wrong shape: image.head.weight has \[5, 8\], not \[6, 8\]"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(ValueError, match=message):
            LCLIP.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    weights = load_file(tmp_path / "model.safetensors")
    del weights["text.norm.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 missing: text\.norm\.bias"):
        LCLIP.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_heads": 7}, "image_width 768 is no multiple of image_heads 7"),
        ({"patch_size": 30}, "image_size 224 is no multiple of patch_size 30"),
        ({"embedding_rank": 0}, "embedding_rank is 0: expected a positive integer"),
        ({"text_blocks": True}, "text_blocks is True: expected a positive integer"),
        ({"text_width": None}, "text_width is None: expected a positive integer"),
        ({"text_qkv_bias": 1}, "text_qkv_bias is 1: expected true or false"),
        ({"pad_attention": "causal"}, "pad_attention is 'causal': expected one of"),
    ],
)
def test_configurations_that_cannot_be_built_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LCLIPConfig(**change)


def test_inputs_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pixels have shape \[1, 3, 8, 8\]: expected \[B, 3, 6, 6\]"):
        ImageStudent(TINY)(torch.zeros(1, 3, 8, 8))
    for shape in ((2, 10), (9,), (2, 0)):
        with pytest.raises(ValueError, match=r"expected \[B, 1 to 9\] with pad_attention 'masked'"):
            TextStudent(TINY)(torch.zeros(shape, dtype=torch.long))
