"""Captions of an image that read one copy of it, captions that leave a decode,
positions that are not scored; BLIP's fused attention.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    BartConfig,
    BlipForConditionalGeneration,
    RobertaConfig,
    TrOCRConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
)

from rl_caption.captioners.adaptation import add_lora, checkpoint_layers
from rl_caption.captioners.decoding import Prefixes
from rl_caption.captioners.hf_families import FAMILIES as HF_FAMILIES
from rl_caption.captioners.hf_families import Conventions, fuse_blip_attention
from rl_caption.captioners.policy import Policy
from tests.captioners_for_tests import near
from tests.hf_models_for_tests import (
    ENCODER_DECODERS,
    assert_close_gradients,
    save_model,
    tiny_hf_captioner,
)
from tests.zoo.encoder_decoders import SIDE, TEXT, VISION

B = 3
K = 4
L = 6
VOCABULARY = 40
BART = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "init_std": 0.3,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
ROBERTA = {
    **TEXT,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 40,
}
OTHERS = {
    "bart": BartConfig(**BART),
    "trocr": TrOCRConfig(**BART),
    "roberta": RobertaConfig(**ROBERTA),
}
"""Decoders beside those of the families' tests."""
CROSS_ATTENTION = ["blip", "vit_gpt2", "vit_bert", *OTHERS]


def tiny_policy(kind: str, folder: Path) -> Policy:
    if kind not in OTHERS:
        return tiny_hf_captioner(kind, folder, "a photo of").policy
    torch.manual_seed(0)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.ViTConfig(**VISION), copy.deepcopy(OTHERS[kind])
    )
    conventions = Conventions(
        start=(5, 7),
        eos=2,
        pad=0,
        vocab_size=VOCABULARY,
    )
    return Policy(
        VisionEncoderDecoderModel(config), HF_FAMILIES[config.model_type], conventions
    ).eval()


@pytest.fixture(scope="module", params=CROSS_ATTENTION)
def shared(request, tmp_path_factory) -> Policy:
    return tiny_policy(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[*ENCODER_DECODERS, "bart"])
def every(request, tmp_path_factory) -> Policy:
    return tiny_policy(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    return torch.randn(
        B,
        3,
        SIDE,
        SIDE,
        generator=torch.Generator().manual_seed(1),
    )


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(
        5,
        35,
        (B, K, L),
        generator=torch.Generator().manual_seed(2),
    )


@pytest.fixture(scope="module")
def mask() -> Tensor:
    """Captions of 1 to L tokens, of any length within an image; two are not asked for."""
    lengths = torch.tensor([[1, 6, 3, 2], [0, 5, 1, 4], [2, 1, 0, 1]])
    return torch.arange(L) < lengths.unsqueeze(-1)


def copied(policy: Policy, pixels: Tensor, ids: Tensor) -> Tensor:
    """Logits [B, K, L, V] by Transformers' decoder alone, with a copy of the image's
    states for every caption.
    """
    states = policy.family.encode(policy.model, pixels, None).repeat_interleave(K, 0)
    whole = torch.cat([policy.start.expand(B * K, -1), ids.flatten(0, 1)[:, :-1]], 1)
    logits = policy.text_model(
        input_ids=whole, encoder_hidden_states=states, use_cache=False
    ).logits
    return logits[:, -L:].unflatten(0, (B, K))


def gradients(policy: Any, values: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    weights = torch.linspace(-1, 1, values.numel()).view_as(values)
    (values * weights).sum().backward()
    parameters = policy.named_parameters()
    return {name: p.grad.clone() for name, p in parameters if p.grad is not None}


@pytest.mark.parametrize("how", ["plain", "checkpointed adapters"])
def test_scores_and_gradients_are_those_of_a_copy_for_every_caption(
    shared, pixels, ids, mask, how
):
    policy = copy.deepcopy(shared)
    if how != "plain":
        pytest.importorskip("peft")
        lora = {"r": 2, "alpha": 4.0, "dropout": 0.0}
        add_lora(policy.model, lora, policy.family.lora_targets)
        checkpoint_layers(policy.model)
    chosen = ids[mask].unsqueeze(-1)
    ours = policy(pixel_values=pixels, token_ids=ids, mask=mask)
    found, expected = (
        logits.log_softmax(-1).gather(-1, chosen)
        for logits in (ours, copied(policy, pixels, ids)[mask])
    )
    assert near(found, expected)
    assert_close_gradients(gradients(policy, found), gradients(policy, expected))


@torch.no_grad()
def test_the_output_layer_computes_the_positions_that_are_asked_for(
    every, pixels, ids, mask
):
    layer = every.text_model.get_output_embeddings()
    seen = []
    whole = every(pixel_values=pixels, token_ids=ids)
    assert whole.shape[:3] == ids.shape
    handle = layer.register_forward_hook(
        lambda module, arguments, output: seen.append(output.shape[:-1].numel())
    )
    some = every(pixel_values=pixels, token_ids=ids, mask=mask)
    one = every(
        pixel_values=pixels,
        token_ids=ids[..., :1],
        mask=mask[..., :1],
    )
    handle.remove()
    assert near(some, whole[mask])
    assert near(one, whole[:, :, 0][mask[..., 0]])
    assert seen.count(mask.sum()) == 1
    assert max(seen) == mask.sum(), "no call computes more"


# Beginnings part; go on; change places within their image, as beams do; leave; one image and one
# caption are left.
PARENTS = [
    [0, 0, 0, 1, 1, 2],
    None,
    [1, 1, 0, 4, 3, 5, 5],
    [0, 2, 3, 4, 4, 6],
    [2, 3, 3],
    [1],
]


@torch.no_grad()
def test_prefixes_that_part_leave_or_change_places_change_nothing(every, pixels, ids):
    first, state = every(pixel_values=pixels, max_tokens=L)
    known = [(image, []) for image in range(B)]
    for position, parents in enumerate(PARENTS):
        before = range(len(known)) if parents is None else parents
        tokens = ids.flatten(0, 1)[: len(before), position]
        known = [
            (known[parent][0], [*known[parent][1], int(token)])
            for parent, token in zip(before, tokens, strict=True)
        ]
        images = torch.tensor([image for image, _ in known])
        parent = None if parents is None else torch.tensor(parents)
        logits = every(prefixes=Prefixes(tokens, parent, images), state=state)
        for row, (image, prefix) in enumerate(known):
            alone = pixels[image : image + 1]
            token_ids = torch.tensor([[[*prefix, 5]]])
            whole = every(pixel_values=alone, token_ids=token_ids)[0, 0]
            assert near(logits[row], whole[-1]), (position, row)
            assert near(first[image], whole[0])
        assert rows_in(state.cache.self_attention_cache) == {len(known)}
    if state.images is not None:
        assert rows_in(state.cache.cross_attention_cache) == {1}


def rows_in(cache: Any) -> set[int]:
    return {len(layer.keys) for layer in cache.layers}


def bytes_kept(call: Any) -> int:
    """Bytes of what a call keeps for its backward pass."""
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = call()  # holds what is kept, so that no address is used twice
    assert result.requires_grad
    return sum(found.values())


def test_an_image_is_kept_once_in_the_cache_and_for_the_backward_pass(
    shared, pixels, ids, mask
):
    with torch.no_grad():
        _, state = shared(pixel_values=pixels, max_tokens=L)
        images = torch.arange(B).repeat_interleave(K)
        prefixes = Prefixes(
            torch.full((B * K,), 5),
            images,
            images,
        )
        shared(prefixes=prefixes, state=state)
    assert rows_in(state.cache.cross_attention_cache) == {B}
    assert rows_in(state.cache.self_attention_cache) == {B * K}
    layers = state.cache.cross_attention_cache.layers
    once = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    everywhere = torch.ones_like(mask)
    inputs = {"pixel_values": pixels, "token_ids": ids, "mask": everywhere}
    ours = bytes_kept(lambda: shared(**inputs).log_softmax(-1))
    copies = bytes_kept(lambda: copied(shared, pixels, ids)[everywhere].log_softmax(-1))
    assert copies - ours >= (K - 1) * once


@torch.no_grad()
@pytest.mark.parametrize("family", ["blip", "vit_gpt2", "vit_bert"])
def test_the_model_alone_computes_what_it_did(family, tmp_path, pixels, ids):
    policy = tiny_hf_captioner(family, tmp_path).policy
    fresh = type(policy.model).from_pretrained(tmp_path).eval()
    text = policy.text_model
    alone = fresh.get_submodule(policy.family.text_model)
    states = policy.family.encode(fresh, pixels, None)
    inputs = {"input_ids": ids[:, 0], "encoder_hidden_states": states}
    assert near(text(**inputs).logits, alone(**inputs).logits, 1e-5)
    beams = {"pixel_values": pixels, "num_beams": 3, "max_new_tokens": L}
    assert torch.equal(*(model.generate(**beams) for model in (policy.model, fresh)))


def test_fused_attention_of_blip_keeps_no_probabilities_and_drops_out_in_training(
    tmp_path, pixels, ids
):
    folder = save_model("blip", tmp_path)
    plain, fused = (
        BlipForConditionalGeneration.from_pretrained(folder).eval() for _ in range(2)
    )
    fuse_blip_attention(fused)
    padding = torch.ones_like(ids[:, 0])
    padding[1, 3:] = 0
    inputs = {
        "pixel_values": pixels,
        "input_ids": ids[:, 0],
        "attention_mask": padding,
    }
    states = (SIDE // 8) ** 2 + 1
    found = []
    for model in (plain, fused):
        shapes: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, shapes=shapes: shapes.append(x.shape[-2:]) or x, lambda x: x
        ):
            logits = model(**inputs).logits
        kept = shapes.count((states, states))
        found.append((logits.detach(), gradients(model, logits), kept))
    (expected, gradient, squares), (logits, gradient_fused, squares_fused) = found
    assert near(logits, expected)
    assert_close_gradients(gradient_fused, gradient)
    assert squares > squares_fused == 0
    for module in fused.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for layer in fused.vision_model.encoder.layers:
        layer.self_attn.dropout.p = 0.5
    assert torch.equal(fused(**inputs).logits, logits)
    assert not near(fused.train()(**inputs).logits, logits, 1e-2)
