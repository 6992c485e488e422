"""Text towers with more positions, and checkpoints in the layout of Long-CLIP."""

from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip.model import convert_weights_to_lp

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.checkpoints import stretch_positions, stretch_text_tower
from tests.clip_for_tests import ARCHITECTURE, TINY, noise_image, tiny_checkpoint

LONG = "a cat . " * 60
"""180 tokens."""


def tiny_clip(context_length: int = 77, quick_gelu: bool = True) -> Any:
    torch.manual_seed(5)
    shape: Any = TINY | {
        "text_cfg": TINY["text_cfg"] | {"context_length": context_length}
    }
    return open_clip.CLIP(**shape, quick_gelu=quick_gelu).eval()


def test_77_positions_become_the_248_of_long_clip():
    """Against the published rule, written out row by row."""
    old = torch.randn(
        77, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    new = stretch_positions(old)
    assert new.shape == (248, 3)
    expected = torch.full_like(new, torch.nan)
    expected[:20] = old[:20]
    for i in range(56):
        for j in range(4):
            expected[20 + 4 * i + j] = ((4 - j) * old[20 + i] + j * old[21 + i]) / 4
    for j in range(4):
        expected[244 + j] = old[76] + j * (old[76] - old[75]) / 4
    assert torch.allclose(new, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(new[20], old[20])
    assert torch.equal(new[244], old[76])


def test_impossible_stretches_are_refused():
    for model, length, message in (
        (tiny_clip(16), 32, "context_length = 32: 16 positions"),
        (
            tiny_clip(),
            100,
            "context_length = 100: 77 positions.* 20 plus a multiple of 57",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            stretch_text_tower(model, length)


@pytest.mark.parametrize("custom", [False, True])
def test_a_stretched_tower_reads_long_captions_and_short_ones_as_before(
    custom,
):
    model = tiny_clip()
    if custom:
        torch.manual_seed(6)
        model = open_clip.CustomTextCLIP(**TINY).eval()  # type: ignore[arg-type]
    tokenize = open_clip.SimpleTokenizer(context_length=248)
    with torch.no_grad():
        before = model.encode_text(tokenize(["a cat on a mat"])[:, :77])
        stretch_text_tower(model, 248)
        after = model.encode_text(tokenize(["a cat on a mat", LONG, LONG + "dog"]))
    assert model.context_length == 248
    assert torch.allclose(after[:1], before, atol=1e-6)
    assert not torch.allclose(after[1], after[2], atol=1e-6), (
        "what stands after 77 tokens is read"
    )


def released(model: Any) -> dict[str, torch.Tensor]:
    """The state that Long-CLIP's code would save: two tables, the unread rows of each full of other
    numbers.
    """
    state = {name: value.clone() for name, value in model.state_dict().items()}
    table = state["positional_embedding"]
    state["positional_embedding_res"] = torch.cat(
        [torch.full_like(table[:20], 9.0), table[20:]]
    )
    state["positional_embedding"] = torch.cat(
        [table[:20], torch.full_like(table[20:], -9.0)]
    )
    return state


@pytest.mark.parametrize("half", [False, True])
def test_released_long_checkpoints_load(tmp_path, half):
    tiny_checkpoint(tmp_path)  # makes the architecture known
    expected = tiny_clip(248)
    state = released(expected)
    torch.save(
        {name: value.half() if half else value for name, value in state.items()},
        tmp_path / "long.pt",
    )
    backbone = load_frozen_encoder(
        ARCHITECTURE, str(tmp_path / "long.pt"), truncate=False
    )
    assert backbone.context_length == 248
    if half:
        expected.half()
    else:
        convert_weights_to_lp(expected, torch.float16)
    texts = ["a cat", LONG, LONG + "dog"]
    with torch.no_grad():
        found = expected.float().encode_text(
            open_clip.SimpleTokenizer(context_length=248)(texts)
        )
    assert torch.allclose(
        backbone.encode_texts(texts),
        torch.nn.functional.normalize(found, dim=-1),
        atol=1e-5,
    )
    assert backbone.encode_images([noise_image(1)]).shape == (1, 16)


def test_released_weights_that_do_not_fit_are_refused(tmp_path):
    tiny_checkpoint(tmp_path)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"ln_final.weight": None}, r"ln_final\.weight"),
        (
            {"positional_embedding_res": Path("x")},
            r"long\.pt",
        ),  # which would have to be unpickled
        (
            {"positional_embedding_res": torch.zeros(100, 16)},
            r"long\.pt.*position tables",
        ),
    ]
    for change, message in changes:
        state = {
            name: value
            for name, value in (released(tiny_clip(248)) | change).items()
            if value is not None
        }
        torch.save(state, tmp_path / "long.pt")
        with pytest.raises(ValueError, match=message):
            load_frozen_encoder(ARCHITECTURE, str(tmp_path / "long.pt"))


def test_a_file_decides_how_many_positions_there_are(tmp_path):
    tiny_checkpoint(tmp_path)
    model = tiny_clip(120, quick_gelu=False)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    backbone = load_frozen_encoder(ARCHITECTURE, str(tmp_path / "plain.pt"))
    assert backbone.context_length == 120
    assert torch.equal(backbone.model.positional_embedding, model.positional_embedding)  # type: ignore[arg-type]


def test_weights_in_a_file_of_a_training_program_are_found_or_its_keys_named(
    tmp_path,
):
    plain = load_frozen_encoder(ARCHITECTURE, tiny_checkpoint(tmp_path))
    state = torch.load(tiny_checkpoint(tmp_path))
    for key in ("model", "state_dict", "model_state_dict"):
        torch.save(
            {
                key: {f"module.{name}": value for name, value in state.items()},
                "epoch": 3,
            },
            tmp_path / "run.pt",
        )
        assert (
            load_frozen_encoder(ARCHITECTURE, str(tmp_path / "run.pt")).fingerprint
            == plain.fingerprint
        )
    torch.save({"network": state, "epoch": 3}, tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"run\.pt.*cannot be loaded"):
        load_frozen_encoder(ARCHITECTURE, str(tmp_path / "run.pt"))
