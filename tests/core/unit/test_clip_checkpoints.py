"""Text towers with more positions, and checkpoints in the layout of Long-CLIP."""

import open_clip
import pytest
import torch
from open_clip.model import convert_weights_to_lp

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.checkpoints import stretch_positions, stretch_text_tower
from tests.clip_for_tests import ARCHITECTURE, TINY, tiny_checkpoint

LONG = "a cat . " * 60
"""180 tokens."""
TEXTS = ["a cat", LONG, LONG + "dog"]


@pytest.fixture(autouse=True)
def checkpoint(tmp_path):
    """Makes the architecture known, too."""
    return tiny_checkpoint(tmp_path)


def tiny_clip(context_length=77, quick_gelu=True):
    torch.manual_seed(5)
    text = TINY["text_cfg"] | {"context_length": context_length}
    return open_clip.CLIP(**TINY | {"text_cfg": text}, quick_gelu=quick_gelu).eval()


def ids_of(texts):
    return open_clip.SimpleTokenizer(context_length=248)(texts)


def test_77_positions_become_the_248_of_long_clip():
    """Against the published rule, written out row by row."""
    old = torch.randn(77, 3, dtype=torch.float64)
    expected = torch.full((248, 3), torch.nan, dtype=torch.float64)
    expected[:20] = old[:20]
    for i in range(56):
        for j in range(4):
            expected[20 + 4 * i + j] = ((4 - j) * old[20 + i] + j * old[21 + i]) / 4
    for j in range(4):
        expected[244 + j] = old[76] + j * (old[76] - old[75]) / 4
    assert torch.allclose(stretch_positions(old), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="context_length = 100: 77 positions"):
        stretch_text_tower(tiny_clip(), 100)


@torch.no_grad()
@pytest.mark.parametrize("custom", [False, True])
def test_a_stretched_tower_reads_long_captions_and_short_ones_as_before(custom):
    torch.manual_seed(6)
    model = open_clip.CustomTextCLIP(**TINY).eval() if custom else tiny_clip()
    before = model.encode_text(ids_of(TEXTS[:1])[:, :77])
    stretch_text_tower(model, 248)
    after = model.encode_text(ids_of(TEXTS))
    assert model.context_length == 248
    assert torch.allclose(after[:1], before, atol=1e-6)
    # what stands after 77 tokens is read
    assert not torch.allclose(*after[1:], atol=1e-6)


def released(model):
    """The state that Long-CLIP's code would save: two tables, the unread rows of each
    full of other numbers.
    """
    state = dict(model.state_dict())
    table = state["positional_embedding"]
    first = table.clone()
    first[20:] = -9.0
    second = table.clone()
    second[:20] = 9.0
    tables = {
        "positional_embedding": first,
        "positional_embedding_res": second,
    }
    return state | tables


@torch.no_grad()
@pytest.mark.parametrize("half", [False, True])
def test_released_long_checkpoints_load(tmp_path, half):
    expected = tiny_clip(248)
    state = released(expected)
    if half:
        state = {name: value.half() for name, value in state.items()}
        expected.half()
    else:
        convert_weights_to_lp(expected, torch.float16)
    path = tmp_path / "long.pt"
    torch.save(state, path)
    backbone = load_frozen_encoder(ARCHITECTURE, str(path), truncate=False)
    assert backbone.context_length == 248
    own = expected.float().encode_text(ids_of(TEXTS), normalize=True)
    assert torch.allclose(backbone.encode_texts(TEXTS), own, atol=1e-5)


def test_a_file_decides_how_many_positions_there_are(tmp_path):
    model = tiny_clip(120, quick_gelu=False)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    backbone = load_frozen_encoder(ARCHITECTURE, str(tmp_path / "plain.pt"))
    assert backbone.context_length == 120
    assert torch.equal(backbone.model.positional_embedding, model.positional_embedding)


def test_weights_in_a_file_of_a_training_program_are_found(tmp_path, checkpoint):
    state = torch.load(checkpoint)
    own = {f"module.{name}": value for name, value in state.items()}
    path = tmp_path / "run.pt"
    plain = load_frozen_encoder(ARCHITECTURE, checkpoint)
    for key in ("model", "state_dict", "model_state_dict"):
        torch.save({key: own, "epoch": 3}, path)
        found = load_frozen_encoder(ARCHITECTURE, str(path))
        assert found.fingerprint == plain.fingerprint
