"""Decoder language models as text encoders: what a token sees with some blocks bidirectional,
pooling, gradients.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from rewards.clip.dual import DualConfig, PretrainedDual
from rewards.clip.pretrained import TextEncoder, load_part, open_blocks
from rewards.trust import trust
from tests.zoo.language_models import byte_tokenizer

BLOCKS, CAPTIONS = (
    3,
    ["a man rides a horse", "a", "two dogs run on the green grass near a tree", ""],
)
SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
WIDE = {
    **SHAPE,
    "intermediate_size": 32,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def save_gpt2(folder: Path) -> str:
    """Its tokenizer has one special token, which it neither adds nor pads with."""
    return save(
        folder,
        GPT2LMHeadModel,
        GPT2Config,
        byte_tokenizer("<end>", "<end>", None, False),
        **SHAPE,
    )


def save_gpt2_that_starts(folder: Path) -> str:
    """The one special token starts a caption, and pads."""
    return save(
        folder,
        GPT2LMHeadModel,
        GPT2Config,
        byte_tokenizer("<end>", "<end>", None, True),
        **SHAPE,
    )


def save_llama(folder: Path) -> str:
    return save(
        folder,
        LlamaForCausalLM,
        LlamaConfig,
        byte_tokenizer("<s>", "</s>", None, True),
        **WIDE,
    )


def save_gemma(folder: Path) -> str:
    """Layers of a sliding window and of full attention."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    shape = {**WIDE, "head_dim": 8, "sliding_window": 48, "layer_types": kinds}
    return save(
        folder,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        byte_tokenizer("<bos>", "<eos>", "<pad>", True),
        **shape,
    )


def save(folder: Path, model: Any, config: Any, tokenizer: Any, **shape: Any) -> str:
    torch.manual_seed(0)
    model(config(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"transformers:{folder}"


Save = Callable[[Path], str]


@pytest.fixture(scope="module", params=[save_gpt2, save_llama, save_gemma])
def family(request, tmp_path_factory):
    """Name of a saved model."""
    return request.param(tmp_path_factory.mktemp("family"))


def loaded(name: str, blocks: int, attention: str = "sdpa") -> Any:
    encoder = load_part(TextEncoder, name, {"bidirectional_blocks": blocks})
    encoder.model.set_attn_implementation(attention)
    return encoder


def states_after_blocks(encoder: Any, ids: Tensor) -> list[Tensor]:
    """Of the embeddings, and after each block; the last is normalised."""
    mask = torch.arange(ids.shape[1]) < encoder.lengths(ids)[:, None]
    return list(
        encoder.model(
            input_ids=ids, attention_mask=mask.long(), output_hidden_states=True
        ).hidden_states
    )


def check_padding(encoder: Any) -> None:
    ids = encoder.tokenize(CAPTIONS, 64)
    states, lengths = encoder(ids), encoder.lengths(ids)
    assert lengths.tolist() == [encoder.count_tokens(caption) for caption in CAPTIONS]
    assert lengths[-1] == 1, "an empty caption has a special token"
    for row, caption in enumerate(CAPTIONS):
        alone = encoder(encoder.tokenize([caption], 64))[0]
        torch.testing.assert_close(
            states[row, : lengths[row]], alone, rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_changes_no_state(family, attention, tmp_path):
    for blocks in (0, 1, BLOCKS):
        check_padding(loaded(family, blocks, attention))
    check_padding(loaded(save_gpt2_that_starts(tmp_path), 1, attention))
    encoder = loaded(family, 0, attention)
    ids = encoder.tokenize(CAPTIONS[:1], 64)
    own = (
        AutoModel.from_pretrained(family.partition(":")[2])
        .eval()(input_ids=ids)
        .last_hidden_state
    )
    torch.testing.assert_close(encoder(ids), own)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("blocks", [1, BLOCKS])
def test_the_last_blocks_alone_see_later_tokens(family, blocks, attention):
    encoder, causal = loaded(family, blocks, attention), loaded(family, 0, attention)
    for captions in (CAPTIONS[:1], CAPTIONS[:3]):  # without and with padding
        ids = encoder.tokenize(captions, 64)
        length = int(encoder.lengths(ids)[0])
        changed = ids.clone()
        changed[0, length - 2] += 1  # GPT-2 ends with a special token
        before, after = (
            states_after_blocks(encoder, ids),
            states_after_blocks(encoder, changed),
        )
        for depth, (found, other, own) in enumerate(
            zip(before, after, states_after_blocks(causal, ids), strict=True)
        ):
            sees_later = depth > BLOCKS - blocks
            earlier = (
                (found[0, : length - 2] - other[0, : length - 2]).abs().amax(dim=-1)
            )
            assert (
                bool((earlier > 1e-5).all())
                if sees_later
                else bool((earlier == 0).all())
            )
            if not sees_later:
                torch.testing.assert_close(found, own)


@torch.no_grad()
def test_bidirectional_attention_is_that_of_a_model_without_a_mask(
    tmp_path,
):
    """Gemma has such an attention of its own: ``use_bidirectional_attention``."""
    name = save_gemma(tmp_path)
    encoder = loaded(name, BLOCKS)
    ids = encoder.tokenize(CAPTIONS[:3], 64)
    mask = torch.arange(ids.shape[1]) < encoder.lengths(ids)[:, None]
    # Its window is halved then, and 96 are more than any caption here has.
    config = Gemma3TextConfig.from_pretrained(
        tmp_path, use_bidirectional_attention=True, sliding_window=192
    )
    theirs = AutoModel.from_pretrained(tmp_path, config=config).eval()
    expected = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(encoder(ids)[mask], expected[mask])
    assert (encoder.context_length, loaded(name, 0).context_length) == (48, 64)


def test_a_saved_dual_embeds_the_same_without_its_source(tmp_path):
    for save_model, pool in ((save_llama, "first"), (save_gemma, "mean")):
        name, folder = save_model(tmp_path / "source"), tmp_path / pool
        shape: dict[str, Any] = {"embed_dim": 8, "hidden": 8, "pool": pool}
        image = "tests.encoders_for_tests:TinyImageEncoder"
        dual = PretrainedDual(
            DualConfig(image, name, text_kwargs={"bidirectional_blocks": 2}, **shape)
        ).eval()
        dual.save_pretrained(folder)
        shutil.rmtree(tmp_path / "source")
        trust([image])
        again = PretrainedDual.from_pretrained(folder)
        with torch.no_grad():
            ids = dual.text_encoder.tokenize(CAPTIONS, 64)
            assert torch.equal(again.text_encoder.tokenize(CAPTIONS, 64), ids)
            expected = dual.encode_text(ids)
            torch.testing.assert_close(again.encode_text(ids), expected, rtol=0, atol=0)
            for row, caption in enumerate(CAPTIONS):
                alone = again.encode_text(again.text_encoder.tokenize([caption], 64))[0]
                torch.testing.assert_close(alone, expected[row], rtol=1e-4, atol=1e-5)


def test_the_chosen_blocks_alone_get_gradients(family):
    encoder = loaded(family, 2)
    opened = open_blocks(encoder, 2)
    encoder(encoder.tokenize(CAPTIONS, 64))[:, 0].square().sum().backward()
    with_gradient = {
        name
        for name, each in encoder.named_parameters()
        if each.grad is not None and each.grad.any()
    }
    assert with_gradient == set(opened)
    assert {match[1] for name in opened if (match := re.search(r"\.(\d)\.", name))} == {
        "1",
        "2",
    }


def save_bert(folder: Path) -> str:
    tokenizer = byte_tokenizer("<s>", "</s>", "<pad>", True)
    return save(folder, BertModel, BertConfig, tokenizer, **SHAPE, intermediate_size=32)


def save_neo(folder: Path) -> str:
    """GPT-Neo masks what is later in its attention, whatever mask it is given."""
    tokenizer = byte_tokenizer("<end>", "<end>", None, False)
    shape = {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global"], 2]],
    }
    return save(
        folder,
        GPTNeoModel,
        GPTNeoConfig,
        tokenizer,
        **shape,
        max_position_embeddings=64,
    )


def test_blocks_that_cannot_switch_are_refused(tmp_path):
    cases: list[tuple[Save, Any, str]] = [
        (save_neo, 1, "GPTNeoModel"),
        (save_llama, BLOCKS + 1, r"has 3 blocks: bidirectional_blocks.*4"),
    ]
    for save_model, blocks, message in cases:
        name = save_model(tmp_path / save_model.__name__)
        with pytest.raises(ValueError, match=message):
            load_part(TextEncoder, name, {"bidirectional_blocks": blocks})
