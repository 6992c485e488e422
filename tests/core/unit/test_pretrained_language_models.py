"""Decoder language models as text encoders: what a token sees with some blocks
bidirectional, pooling, gradients.
"""

import pytest
import torch
from transformers import (
    AutoModel,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from rewards.clip.pretrained import TextEncoder, load_part
from tests.zoo.language_models import byte_tokenizer

BLOCKS = 3
CAPTIONS = [
    "a man rides a horse",
    "a",
    "two dogs run on the green grass near a tree",
    "",
]
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


def save(folder, kind):
    """Save a model of three blocks with its tokenizer; return its name as an encoder."""
    special = ("<s>", "</s>", None, True)
    if kind.startswith("gpt2"):
        # One special token, which pads or is neither added nor padded with.
        special = ("<end>", "<end>", None, kind == "gpt2 that starts")
        model, config, shape = GPT2LMHeadModel, GPT2Config, SHAPE
    elif kind == "llama":
        model, config, shape = LlamaForCausalLM, LlamaConfig, WIDE
    elif kind == "gemma":  # layers of a sliding window and of full attention
        special = ("<bos>", "<eos>", "<pad>", True)
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        shape = {
            **WIDE,
            "head_dim": 8,
            "sliding_window": 48,
            "layer_types": layers,
        }
        model, config = Gemma3ForCausalLM, Gemma3TextConfig
    else:  # GPT-Neo masks what is later in its attention, whatever mask it is given
        model, config = GPTNeoModel, GPTNeoConfig
        shape = {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
        }
        shape["attention_types"] = [[["global"], 2]]
    tokenizer = byte_tokenizer(*special)
    torch.manual_seed(0)
    model(config(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"transformers:{folder}"


@pytest.fixture(scope="module", params=["gpt2", "gpt2 that starts", "llama", "gemma"])
def family(request, tmp_path_factory):
    """Name of a saved model."""
    return save(tmp_path_factory.mktemp("family"), request.param)


def loaded(name, blocks, attention="sdpa"):
    encoder = load_part(TextEncoder, name, {"bidirectional_blocks": blocks})
    encoder.model.set_attn_implementation(attention)
    return encoder


def attended(encoder, ids):
    return torch.arange(ids.shape[1]) < encoder.lengths(ids)[:, None]


def states_after_blocks(encoder, ids):
    """Of the embeddings, and after each block; the last is normalised."""
    mask = attended(encoder, ids).long()
    output = encoder.model(
        input_ids=ids, attention_mask=mask, output_hidden_states=True
    )
    return output.hidden_states


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_changes_no_state(family, attention):
    for blocks in (0, 1, BLOCKS):
        encoder = loaded(family, blocks, attention)
        ids = encoder.tokenize(CAPTIONS, 64)
        states = encoder(ids)
        lengths = encoder.lengths(ids).tolist()
        assert lengths == [encoder.count_tokens(caption) for caption in CAPTIONS]
        assert lengths[-1] == 1, "an empty caption has a special token"
        for row, caption in enumerate(CAPTIONS):
            alone = encoder(encoder.tokenize([caption], 64))[0]
            found = states[row, : lengths[row]]
            torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
    encoder = loaded(family, 0, attention)
    ids = encoder.tokenize(CAPTIONS[:1], 64)
    own = AutoModel.from_pretrained(family.partition(":")[2]).eval()
    torch.testing.assert_close(encoder(ids), own(input_ids=ids).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("blocks", [1, BLOCKS])
@pytest.mark.parametrize("count", [1, 3], ids=["alone", "padded"])
def test_the_last_blocks_alone_see_later_tokens(family, blocks, attention, count):
    encoder = loaded(family, blocks, attention)
    ids = encoder.tokenize(CAPTIONS[:count], 64)
    last = int(encoder.lengths(ids)[0]) - 2  # GPT-2 ends with a special token
    changed = ids.clone()
    changed[0, last] += 1
    before = states_after_blocks(encoder, ids)
    after = states_after_blocks(encoder, changed)
    own = states_after_blocks(loaded(family, 0, attention), ids)
    for depth in range(BLOCKS + 1):
        moved = (before[depth] - after[depth])[0, :last].abs().amax(dim=-1)
        if depth > BLOCKS - blocks:
            assert (moved > 1e-5).all()
        else:
            assert (moved == 0).all()
            torch.testing.assert_close(before[depth], own[depth])


@torch.no_grad()
def test_bidirectional_attention_is_that_of_a_model_without_a_mask(tmp_path):
    """Gemma has such an attention of its own: ``use_bidirectional_attention``."""
    name = save(tmp_path, "gemma")
    encoder = loaded(name, BLOCKS)
    ids = encoder.tokenize(CAPTIONS[:3], 64)
    mask = attended(encoder, ids)
    # Its window is halved then, and 96 are more than any caption here has.
    config = Gemma3TextConfig.from_pretrained(
        tmp_path, use_bidirectional_attention=True, sliding_window=192
    )
    theirs = AutoModel.from_pretrained(tmp_path, config=config).eval()
    expected = theirs(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(encoder(ids)[mask], expected[mask])
    assert (encoder.context_length, loaded(name, 0).context_length) == (48, 64)


@pytest.mark.parametrize(
    ("kind", "blocks", "message"),
    [("neo", 1, "GPTNeoModel"), ("llama", BLOCKS + 1, "3 blocks, not 4")],
)
def test_blocks_that_cannot_switch_are_refused(tmp_path, kind, blocks, message):
    with pytest.raises(ValueError, match=message):
        load_part(TextEncoder, save(tmp_path, kind), {"bidirectional_blocks": blocks})
