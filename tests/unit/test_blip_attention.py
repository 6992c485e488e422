"""BLIP's fused attention computes what Transformers' own does, and keeps less for the backward pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BlipForConditionalGeneration
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from rl_caption.captioners.hf_attention import fuse_blip_attention
from tests.hf_models_for_tests import SIDE, save_model

N, T = 3, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("blip", tmp_path_factory.mktemp("blip"))


@pytest.fixture
def pair(folder: Path) -> list[BlipForConditionalGeneration]:
    """The model as it is, and with fused attention."""
    models = [BlipForConditionalGeneration.from_pretrained(folder).eval() for _ in range(2)]
    fuse_blip_attention(models[1])
    return models


@pytest.fixture
def pixels() -> Tensor:
    return torch.randn(N, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(5, 40, (N, T), generator=torch.Generator().manual_seed(2))


def test_logits_and_gradients_are_the_same_with_padded_texts_too(
    pair: list[BlipForConditionalGeneration], pixels: Tensor, ids: Tensor
) -> None:
    padding = torch.ones_like(ids)
    padding[1, 3:] = 0
    found = []
    for model in pair:
        logits = model(pixel_values=pixels, input_ids=ids, attention_mask=padding).logits
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        found.append((logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (logits, gradients), (logits_fused, gradients_fused) = found
    assert torch.allclose(logits, logits_fused, atol=1e-4)
    assert gradients.keys() == gradients_fused.keys()
    largest = max(value.abs().max() for value in gradients.values())
    for name, value in gradients.items():
        assert (value - gradients_fused[name]).abs().max() <= 1e-4 * max(value.abs().max(), 1e-2 * largest), name


@torch.no_grad()
def test_every_cache_holds_what_it_did(pair: list[BlipForConditionalGeneration], pixels: Tensor, ids: Tensor) -> None:
    states = pair[0].vision_model(pixels).last_hidden_state
    for cache_of in (lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), DynamicCache):
        caches, logits = [], []
        for model in pair:
            cache = cache_of()
            parts = [
                model.text_decoder(
                    input_ids=ids[:, start:end], encoder_hidden_states=states, past_key_values=cache, use_cache=True
                )
                for start, end in ((0, 3), (3, 4), (4, 6))
            ]
            caches.append(parts[-1].past_key_values)
            logits.append(torch.cat([part.logits for part in parts], 1))
        assert torch.allclose(*logits, atol=1e-4)
        for one, other in zip(*caches, strict=True):
            for tensor, fused in zip(one, other, strict=True):
                assert (tensor is None and fused is None) or torch.allclose(tensor, fused, atol=1e-4)


def test_dropout_acts_in_training_and_not_otherwise(
    pair: list[BlipForConditionalGeneration], pixels: Tensor, ids: Tensor
) -> None:
    model = pair[1]
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for layer in model.text_decoder.bert.encoder.layer:
        layer.crossattention.self.dropout.p = 0.5
    expected = pair[0](pixel_values=pixels, input_ids=ids).logits
    assert torch.allclose(model(pixel_values=pixels, input_ids=ids).logits, expected, atol=1e-4)
    model.train()
    assert not torch.allclose(model(pixel_values=pixels, input_ids=ids).logits, expected, atol=1e-2)


def test_no_probabilities_are_kept(pair: list[BlipForConditionalGeneration], pixels: Tensor, ids: Tensor) -> None:
    states = (SIDE // 8) ** 2 + 1
    squares = []
    for model in pair:
        shapes: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, shapes=shapes: shapes.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
        ):
            model(pixel_values=pixels, input_ids=ids)
        squares.append(sum(shape[-2:] in ((states, states), (T, states), (T, T)) for shape in shapes))
    assert squares[0] > 0
    assert squares[1] <= 2, "the mask of self-attention alone"


@torch.no_grad()
def test_where_a_cpu_is_to_do_without_the_fused_kernel_attention_is_as_it_was(
    pair: list[BlipForConditionalGeneration], pixels: Tensor, ids: Tensor
) -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        one, other = (model(pixel_values=pixels, input_ids=ids).logits for model in pair)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert torch.equal(one, other)
