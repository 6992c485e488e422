"""Captions of an image that read one copy of it, captions that leave a decode, positions that are
not scored; BLIP's fused attention.
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
from tests.hf_models_for_tests import (
    ENCODER_DECODERS,
    assert_close_gradients,
    save_model,
    tiny_hf_captioner,
)
from tests.zoo.encoder_decoders import SIDE, TEXT, VISION

B, K, L, VOCABULARY = 3, 4, 6, 40
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
    conventions = Conventions(start=(5, 7), eos=2, pad=0, vocab_size=VOCABULARY)
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
    return torch.randn(B, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(5, 35, (B, K, L), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def mask() -> Tensor:
    """Captions of 1 to L tokens, of any length within an image; two are not asked for."""
    lengths = torch.tensor([[1, 6, 3, 2], [0, 5, 1, 4], [2, 1, 0, 1]])
    return torch.arange(L) < lengths.unsqueeze(-1)


def copied(policy: Policy, pixels: Tensor, ids: Tensor) -> Tensor:
    """Logits [B, K, L, V] by Transformers' decoder alone, with a copy of the image's states for
    every caption.
    """
    states = policy.family.encode(policy.model, pixels, None).repeat_interleave(K, 0)
    whole = torch.cat([policy.start.expand(B * K, -1), ids.flatten(0, 1)[:, :-1]], 1)
    decoder = policy.model.get_submodule(policy.family.text_model)
    logits = decoder(
        input_ids=whole, encoder_hidden_states=states, use_cache=False
    ).logits
    return logits[:, -L:].unflatten(0, (B, K))


def gradients(policy: Policy, logprobs: Tensor) -> dict[str, Tensor]:
    policy.zero_grad()
    (
        logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    ).sum().backward()
    return {
        name: value.grad.clone()
        for name, value in policy.named_parameters()
        if value.grad is not None
    }


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
    found = (
        policy(pixel_values=pixels, token_ids=ids, mask=mask)
        .log_softmax(-1)
        .gather(-1, chosen)
    )
    expected = copied(policy, pixels, ids)[mask].log_softmax(-1).gather(-1, chosen)
    assert torch.allclose(found, expected, atol=1e-4)
    assert_close_gradients(gradients(policy, found), gradients(policy, expected))


@torch.no_grad()
def test_the_output_layer_computes_the_positions_that_are_asked_for(
    every, pixels, ids, mask
):
    layer, seen = (
        every.model.get_submodule(every.family.text_model).get_output_embeddings(),
        [],
    )
    whole = every(pixel_values=pixels, token_ids=ids)
    assert whole.shape[:3] == ids.shape
    handle = layer.register_forward_hook(
        lambda module, arguments, output: seen.append(output.shape[:-1].numel())
    )
    some = every(pixel_values=pixels, token_ids=ids, mask=mask)
    one = every(pixel_values=pixels, token_ids=ids[..., :1], mask=mask[..., :1])
    handle.remove()
    assert torch.allclose(some, whole[mask], atol=1e-4)
    assert torch.allclose(one, whole[:, :, 0][mask[..., 0]], atol=1e-4)
    assert seen.count(mask.sum()) == 1
    assert max(seen) == mask.sum(), "no call computes more"


@torch.no_grad()
def test_prefixes_that_part_leave_or_change_places_change_nothing(every, pixels, ids):
    first, state = every(pixel_values=pixels, max_tokens=L)
    known = [[image, []] for image in range(B)]
    # Beginnings part; go on; change places within their image, as beams do; leave; one image and
    # one caption are left.
    for position, origins in enumerate(
        [
            [0, 0, 0, 1, 1, 2],
            None,
            [1, 1, 0, 4, 3, 5, 5],
            [0, 2, 3, 4, 4, 6],
            [2, 3, 3],
            [1],
        ]
    ):
        before = list(range(len(known))) if origins is None else origins
        tokens = ids.flatten(0, 1)[: len(before), position]
        known = [
            [known[origin][0], [*known[origin][1], int(token)]]
            for origin, token in zip(before, tokens, strict=True)
        ]
        images = torch.tensor([image for image, _ in known])
        origin = None if origins is None else torch.tensor(origins)
        logits = every(prefixes=Prefixes(tokens, origin, images), state=state)
        for row, (image, prefix) in enumerate(known):
            whole = every(
                pixel_values=pixels[image : image + 1],
                token_ids=torch.tensor([[[*prefix, 5]]]),
            )
            assert torch.allclose(logits[row], whole[0, 0, -1], atol=1e-4), (
                position,
                row,
            )
            assert torch.allclose(first[image], whole[0, 0, 0], atol=1e-4)
        assert {
            layer.keys.shape[0] for layer in state.cache.self_attention_cache.layers
        } == {len(known)}
    if state.images is not None:
        assert {
            layer.keys.shape[0] for layer in state.cache.cross_attention_cache.layers
        } == {1}


def test_an_image_is_kept_once_in_the_cache_and_for_the_backward_pass(
    shared, pixels, ids, mask
):
    def cached(cache: Any) -> int:
        return sum(
            tensor.nbytes
            for layer in cache.layers
            for tensor in (layer.keys, layer.values)
        )

    def kept(call: Any) -> int:
        found: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = (
                tensor.untyped_storage().nbytes()
            )
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = call()  # holds what is kept, so that no address is used twice
        assert result.requires_grad
        return sum(found.values())

    layers, states, width = 2, (SIDE // VISION["patch_size"]) ** 2 + 1, 32
    once = 2 * layers * B * states * width * 4
    of_tokens = []
    for captions in (1, K):
        with torch.no_grad():
            _, state = shared(pixel_values=pixels, max_tokens=L)
            images = torch.arange(B).repeat_interleave(captions)
            shared(
                prefixes=Prefixes(torch.full((B * captions,), 5), images, images),
                state=state,
            )
        assert cached(state.cache.cross_attention_cache) == once
        of_tokens.append(cached(state.cache.self_attention_cache))
    assert of_tokens[1] == K * of_tokens[0]
    everywhere = torch.ones_like(mask)
    ours = kept(
        lambda: shared(pixel_values=pixels, token_ids=ids, mask=everywhere).log_softmax(
            -1
        )
    )
    theirs = kept(lambda: copied(shared, pixels, ids)[everywhere].log_softmax(-1))
    assert theirs - ours >= (K - 1) * once


@torch.no_grad()
@pytest.mark.parametrize("family", ["blip", "vit_gpt2", "vit_bert"])
def test_the_model_alone_computes_what_it_did(family, tmp_path, pixels, ids):
    policy = tiny_hf_captioner(family, tmp_path).policy
    fresh = type(policy.model).from_pretrained(tmp_path).eval()
    text, alone = (
        policy.model.get_submodule(policy.family.text_model),
        fresh.get_submodule(policy.family.text_model),
    )
    states = policy.family.encode(fresh, pixels, None)
    whole = ids[:, 0]
    found = text(input_ids=whole, encoder_hidden_states=states).logits
    assert torch.allclose(
        found, alone(input_ids=whole, encoder_hidden_states=states).logits, atol=1e-5
    )
    for options in (
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
    ):
        drawn = []
        for model in (policy.model, fresh):
            torch.manual_seed(0)
            drawn.append(
                model.generate(pixel_values=pixels, max_new_tokens=L, **options)
            )
        assert torch.equal(*drawn)
    with pytest.raises((RuntimeError, ValueError)):  # five captions of three images
        text(input_ids=ids.flatten(0, 1)[:5], encoder_hidden_states=states)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[BlipForConditionalGeneration]:
    """The model as it is, and with fused attention."""
    folder = save_model("blip", tmp_path_factory.mktemp("model"))
    models = [
        BlipForConditionalGeneration.from_pretrained(folder).eval() for _ in range(2)
    ]
    fuse_blip_attention(models[1])
    return models


def test_logits_and_gradients_are_the_same_with_padded_texts_and_no_probabilities_are_kept(
    pair, pixels, ids
):
    ids = ids[:, 0]
    padding = torch.ones_like(ids)
    padding[1, 3:] = 0
    states = (SIDE // 8) ** 2 + 1
    found, squares = [], []
    for model in pair:
        model.zero_grad()
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.append(x) or x, lambda x: x
        ):
            logits = model(
                pixel_values=pixels, input_ids=ids, attention_mask=padding
            ).logits
        squares.append(sum(tensor.shape[-2:] == (states, states) for tensor in kept))
        (
            logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)
        ).sum().backward()
        found.append(
            (
                logits.detach(),
                {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            )
        )
    (logits, expected), (logits_fused, found_fused) = found
    assert torch.allclose(logits, logits_fused, atol=1e-4)
    assert_close_gradients(found_fused, expected)
    assert squares[0] > squares[1] == 0


def test_dropout_acts_in_training_and_not_otherwise(pair, pixels, ids):
    ids = ids[:, 0]
    model = copy.deepcopy(pair[1])
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for layer in model.text_decoder.bert.encoder.layer:
        layer.crossattention.self.dropout.p = 0.5
    expected = pair[0](pixel_values=pixels, input_ids=ids).logits
    assert torch.allclose(
        model(pixel_values=pixels, input_ids=ids).logits, expected, atol=1e-4
    )
    model.train()
    assert not torch.allclose(
        model(pixel_values=pixels, input_ids=ids).logits, expected, atol=1e-2
    )
