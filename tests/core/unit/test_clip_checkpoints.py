"""Text towers with more positions, and checkpoints in the layout of Long-CLIP."""

from pathlib import Path

import open_clip
import pytest
import torch
from open_clip.model import convert_weights_to_lp

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.checkpoints import stretch_positions, stretch_text_tower
from tests.clip_for_tests import ARCHITECTURE, TINY, tiny_checkpoint

LONG = "a cat . " * 60
"""180 tokens."""


def tiny_clip(context_length=77, quick_gelu=True):
    torch.manual_seed(5)
    text = TINY["text_cfg"] | {"context_length": context_length}
    return open_clip.CLIP(**TINY | {"text_cfg": text}, quick_gelu=quick_gelu).eval()


def test_77_positions_become_the_248_of_long_clip():
    """Against the published rule, written out row by row."""
    old = torch.randn(77, 3, dtype=torch.float64)
    new = stretch_positions(old)
    expected = torch.full((248, 3), torch.nan, dtype=torch.float64)
    expected[:20] = old[:20]
    for i in range(56):
        for j in range(4):
            expected[20 + 4 * i + j] = ((4 - j) * old[20 + i] + j * old[21 + i]) / 4
    for j in range(4):
        expected[244 + j] = old[76] + j * (old[76] - old[75]) / 4
    assert torch.allclose(new, expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="context_length = 100: 77 positions"):
        stretch_text_tower(tiny_clip(), 100)


@pytest.mark.parametrize("custom", [False, True])
def test_a_stretched_tower_reads_long_captions_and_short_ones_as_before(custom):
    torch.manual_seed(6)
    model = open_clip.CustomTextCLIP(**TINY).eval() if custom else tiny_clip()
    tokenize = open_clip.SimpleTokenizer(context_length=248)
    with torch.no_grad():
        before = model.encode_text(tokenize(["a cat on a mat"])[:, :77])
        stretch_text_tower(model, 248)
        after = model.encode_text(tokenize(["a cat on a mat", LONG, LONG + "dog"]))
    assert model.context_length == 248
    assert torch.allclose(after[:1], before, atol=1e-6)
    # what stands after 77 tokens is read
    assert not torch.allclose(after[1], after[2], atol=1e-6)


def released(model):
    """The state that Long-CLIP's code would save: two tables, the unread rows of each full of other
    numbers.
    """
    state = dict(model.state_dict())
    table = state["positional_embedding"]
    state["positional_embedding_res"] = table.clone()
    state["positional_embedding_res"][:20] = 9.0
    state["positional_embedding"] = table.clone()
    state["positional_embedding"][20:] = -9.0
    return state


@pytest.mark.parametrize("half", [False, True])
def test_released_long_checkpoints_load(tmp_path, half):
    tiny_checkpoint(tmp_path)  # makes the architecture known
    expected, path = tiny_clip(248), tmp_path / "long.pt"
    state = released(expected)
    if half:
        state = {name: value.half() for name, value in state.items()}
        expected.half()
    else:
        convert_weights_to_lp(expected, torch.float16)
    torch.save(state, path)
    backbone = load_frozen_encoder(ARCHITECTURE, str(path), truncate=False)
    assert backbone.context_length == 248
    texts = ["a cat", LONG, LONG + "dog"]
    ids = open_clip.SimpleTokenizer(context_length=248)(texts)
    with torch.no_grad():
        own = expected.float().encode_text(ids, normalize=True)
    assert torch.allclose(backbone.encode_texts(texts), own, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ln_final.weight", None, r"ln_final\.weight"),
        # which would have to be unpickled
        ("positional_embedding_res", Path("x"), r"long\.pt"),
        ("positional_embedding_res", torch.zeros(100, 16), r"long\.pt.*tables"),
    ],
)
def test_released_weights_that_do_not_fit_are_refused(tmp_path, name, value, message):
    tiny_checkpoint(tmp_path)
    state = released(tiny_clip(248)) | {name: value}
    state = {key: value for key, value in state.items() if value is not None}
    torch.save(state, tmp_path / "long.pt")
    with pytest.raises(ValueError, match=message):
        load_frozen_encoder(ARCHITECTURE, str(tmp_path / "long.pt"))


def test_a_file_decides_how_many_positions_there_are(tmp_path):
    tiny_checkpoint(tmp_path)
    model = tiny_clip(120, quick_gelu=False)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    backbone = load_frozen_encoder(ARCHITECTURE, str(tmp_path / "plain.pt"))
    assert backbone.context_length == 120
    assert torch.equal(backbone.model.positional_embedding, model.positional_embedding)


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "network"])
def test_weights_in_a_file_of_a_training_program_are_found_or_its_keys_named(
    tmp_path, key
):
    checkpoint, path = tiny_checkpoint(tmp_path), str(tmp_path / "run.pt")
    state = torch.load(checkpoint)
    own = {f"module.{name}": value for name, value in state.items()}
    torch.save({key: own, "epoch": 3}, path)
    if key == "network":
        with pytest.raises(ValueError, match=r"run\.pt.*cannot be loaded"):
            load_frozen_encoder(ARCHITECTURE, path)
    else:
        plain = load_frozen_encoder(ARCHITECTURE, checkpoint)
        found = load_frozen_encoder(ARCHITECTURE, path)
        assert found.fingerprint == plain.fingerprint
