"""PAC-S's training: its loss, the positives of rows, what is trained, and what is exported of low-rank updates."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from open_clip import SimpleTokenizer
from torch import Tensor

from rewards.clip.backbone import load_backbone
from rewards.clip.preprocessing import Preprocessing
from rl_caption.config.build import ConfigError
from rl_caption.data.base import DataError
from rl_caption.data.scenes import ScenesData
from rl_caption.reward_models.batch import PairCollate, PixelCache, TokenCache, choose_caption
from rl_caption.reward_models.config import LossConfig, RewardModelConfig
from rl_caption.reward_models.encoders import random_clip, save_clip
from rl_caption.reward_models.losses import info_nce, positive_augmented_info_nce, summed_info_nce
from rl_caption.reward_models.objectives import PositiveAugmented
from rl_caption.reward_models.positives import check_positives
from rl_caption.reward_models.program import objective
from rl_caption.reward_models.trainable import merged_state, train_only
from tests.clip_for_tests import noise_image
from tests.reward_models_for_tests import CLIP

TOKENS = TokenCache(SimpleTokenizer(context_length=24), 24, trims=True)


def rows(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) * 3


def directions(*degrees: float) -> Tensor:
    """Embeddings whose cosines are told by their angles; of lengths that must not matter."""
    angles = torch.tensor(degrees).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], dim=1) * torch.tensor([[1.0], [2.0], [0.5]])


def test_the_loss_by_hand() -> None:
    """Three pairs at right angles or opposite, so that every cosine is 1, 0 or -1; scale ln 2, so that e^s is 2."""
    scale = math.log(2)
    images = texts = directions(0, 90, 180)
    # Rows 0 and 2 see cosines 1, 0, -1: 2 / (2 + 1 + 1/2) = 4/7. Row 1 sees 1, 0, 0: 2/4. Both directions alike.
    pairs = 2 * (2 * math.log(7 / 4) + math.log(2)) / 3
    # V' of the three is where image 0 is: each text has the same cosine to all (columns: ln 3), each V' row has
    # 1, 0, -1 with the own text at another place each time: 4/7, 2/7, 1/7.
    same = directions(0, 0, 0)
    generated = math.log(3) + (math.log(7 / 4) + math.log(7 / 2) + math.log(7)) / 3
    # T' are opposite to their images: rows 0 and 2 give 1/2 of 7/2, row 1 (cosine -1 of -1, 0, 0) 1/2 of 5/2.
    opposite = -texts
    against = 2 * (2 * math.log(7) + math.log(5)) / 3
    loss, terms = positive_augmented_info_nce(images, texts, scale, (0.05, same), (0.1, opposite))
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(
        {"pairs": pairs, "images": generated, "captions": against}, rel=1e-5
    )
    assert loss.item() == pytest.approx(pairs + 0.05 * generated + 0.1 * against, rel=1e-5)


def slow_sum(images: Tensor, texts: Tensor, scale: float) -> float:
    """Both cross-entropies of InfoNCE, each a mean over the batch, by loops."""
    total = 0.0
    for own in range(len(images)):
        for anchor, others in ((images[own], texts), (texts[own], images)):
            logits = [scale * float(anchor @ other / (anchor.norm() * other.norm())) for other in others]
            total -= logits[own] - math.log(sum(map(math.exp, logits)))
    return total / len(images)


def test_the_loss_by_loops_generated_images_meet_texts_and_generated_texts_images() -> None:
    v, t, generated_v, generated_t = (rows(6, 5, seed) for seed in range(4))
    expected = slow_sum(v, t, 7.0) + 0.3 * slow_sum(generated_v, t, 7.0) + 0.7 * slow_sum(v, generated_t, 7.0)
    loss, _ = positive_augmented_info_nce(v, t, 7.0, (0.3, generated_v), (0.7, generated_t))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_with_both_terms_off_it_is_twice_the_contrastive_loss_and_reads_nothing_else() -> None:
    given = {"image": rows(6, 5, 0), "text": rows(6, 5, 1), "scale": torch.tensor(9.0)}
    off = RewardModelConfig("positive_augmented", loss=LossConfig(positive_images=0.0, positive_captions=0.0))
    loss, logged = objective(off)(given, {})
    contrastive, _ = objective(RewardModelConfig())(given, {})
    assert loss.item() == pytest.approx(2 * contrastive.item(), rel=1e-6)
    assert summed_info_nce(given["image"], given["text"], 9.0).item() == pytest.approx(
        2 * info_nce(given["image"], given["text"], 9.0).item()
    )
    assert logged.keys() == {"contrastive/scale", "contrastive/accuracy", "positive/pairs"}
    assert objective(RewardModelConfig("positive_augmented")) == PositiveAugmented(0.05, 0.1)


def photo(name: str, **more: Any) -> Any:
    return {"image_id": name, "image": noise_image(1, (32, 32)), "references": ["a dog", "two cats", "red"], **more}


MADE = {
    "positive_captions": ["a hound", "an animal on grass"],
    "positive_images": [noise_image(seed, (32, 32)) for seed in (2, 3, 4)],
}


@pytest.mark.parametrize("captions", ["random", "first"])
def test_a_generated_image_is_that_of_the_caption_which_the_step_learns(captions: Any) -> None:
    row, preprocessing = photo("a", **MADE), Preprocessing(32)
    collate = PairCollate(PixelCache(preprocessing, 10**6), TOKENS, captions, seed=3, positives=("image", "text"))
    plain = PairCollate(PixelCache(preprocessing), TOKENS, captions, seed=3)
    seen, told = set(), set()
    for step in range(24):
        batch = collate([(row, step)])
        place = row["references"].index(choose_caption(row, captions, 3, step))
        assert torch.equal(batch.inputs["image_generated"][0], preprocessing(MADE["positive_images"][place]))
        matching = [text for text in MADE["positive_captions"] if TOKENS([text]).equal(batch.inputs["text_generated"])]
        told |= set(matching)
        seen.add(place)
        alone = plain([(row, step)]).inputs
        assert alone.keys() == {"image", "text"}, "without the task nothing is added"
        assert all(torch.equal(batch.inputs[name], value) for name, value in alone.items()), "nor drawn otherwise"
    assert seen == ({0} if captions == "first" else {0, 1, 2})
    assert told == set(MADE["positive_captions"])
    images_only = PairCollate(PixelCache(preprocessing), TOKENS, captions, positives=("image",))([(row, 0)])
    assert images_only.inputs.keys() == {"image", "text", "image_generated"}


def test_generated_scenes_are_cached_apart() -> None:
    row = ScenesData(num_train=1, image_size=32, positives=True).split("train")[0]
    cached = PairCollate(PixelCache(Preprocessing(32), 10**6), TOKENS, positives=("image",))
    afresh = PairCollate(PixelCache(Preprocessing(32)), TOKENS, positives=("image",))
    views = []
    for step in range(12):
        views.append(cached([(row, step)]).inputs)
        for name, value in afresh([(row, step)]).inputs.items():
            assert torch.equal(views[-1][name], value)
    assert any(not torch.equal(view["image"], view["image_generated"]) for view in views)


def test_positives_that_are_missing_are_named() -> None:
    check_positives([photo("a", **MADE)], ("image", "text"), "random")
    check_positives([photo("a")], (), "random")
    one = photo("b", positive_images=MADE["positive_images"][:1])
    check_positives([one], ("image",), "first")
    with pytest.raises(DataError, match=r"^train 'b' has 1 positive_images for 3 reference\(s\) \(1 in all\)"):
        check_positives([photo("a", **MADE), one], ("image",), "random")
    with pytest.raises(DataError, match=r"^train 'b' has no positive_captions \(1 in all\): .* A weight of 0"):
        check_positives([photo("a", **MADE), one], ("text",), "random")
    with pytest.raises(DataError, match=r"train 'a' has 0 positive_images for 3 reference"):
        check_positives([photo("a")], ("image",), "first")
    lost = photo("a", **MADE) | {"references": ["two cats", "red"]}  # an empty reference that data.on_bad left out
    with pytest.raises(DataError, match=r"train 'a' has 3 positive_images for 2 reference"):
        check_positives([lost], ("image",), "first")


def test_files_of_generated_images_are_looked_at_before_training(tmp_path: Path) -> None:
    noise_image(1, (32, 32)).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    for name in ("bad.png", "none.png"):
        files = [str(tmp_path / "good.png"), str(tmp_path / name)]
        given = photo("c", positive_images=[*files, noise_image(2)])
        with pytest.raises(DataError, match=rf"^1 of 2 positive_images cannot be used: train 'c', '.*{name}'"):
            check_positives([given], ("image",), "random", cache=tmp_path / "cache.json")


def tiny() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(5)
    return random_clip(None, CLIP)


def test_low_rank_updates_start_at_nothing_and_are_exported_merged(tmp_path: Path) -> None:
    plain, shape = tiny()
    plain.eval()
    tuned = copy.deepcopy(plain)
    train_only(tuned, "lora", rank=2, alpha=1.0)
    images, ids = rows(3, 3 * 32 * 32, 0).view(3, 3, 32, 32), SimpleTokenizer(context_length=24)(["a", "b c", "d"])
    assert torch.equal(tuned.encode_image(images), plain.encode_image(images))
    trained = {name: value for name, value in tuned.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for index, (name, value) in enumerate(trained.items()):
            if name.endswith("lora_b"):
                value.copy_(rows(*value.shape, index) / 30)
    state = merged_state(tuned)
    key = "transformer.resblocks.0.mlp.c_fc"
    a, b = (trained[f"{key}.parametrizations.weight.0.lora_{part}"] for part in "ab")
    expected = plain.get_parameter(f"{key}.weight") + 0.5 * b @ a
    assert torch.allclose(state[f"{key}.weight"], expected, atol=1e-7)
    assert state.keys() == plain.state_dict().keys()
    changed = {name for name, value in plain.state_dict().items() if not torch.equal(state[name], value)}
    blocks = ("attn.in_proj_weight", "attn.out_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    towers = ("transformer.resblocks.0", "visual.transformer.resblocks.0")
    assert changed == {f"{tower}.{name}" for tower in towers for name in blocks} | {"visual.conv1.weight"}
    save_clip(tuned, shape, tmp_path)
    again: Any = load_backbone(str(tmp_path)).model
    for graph in (True, False):  # without one, attention takes another way
        with torch.set_grad_enabled(graph):
            assert torch.allclose(again.encode_image(images), tuned.encode_image(images), atol=1e-5)
            assert torch.allclose(again.encode_text(ids), tuned.encode_text(ids), atol=1e-5)
    assert not torch.allclose(again.encode_image(images), plain.encode_image(images), atol=1e-2)


def test_the_kernel_of_the_patches_is_updated_as_the_released_files_have_it() -> None:
    """A [4k, 3k] and B [k D, 4k], as in docs/pac.md."""
    clip, _ = tiny()
    train_only(clip, "lora", rank=4)
    update = clip.visual.conv1.parametrizations.weight[0]
    assert update.lora_a.shape == (4 * 16, 3 * 16)
    assert update.lora_b.shape == (16 * 32, 4 * 16)
    assert update.scale == 0.25


def test_models_without_these_layers_are_refused() -> None:
    resnet, _ = random_clip(
        None, CLIP | {"vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8}}
    )
    with pytest.raises(ConfigError, match="the image tower is no ViT"):
        train_only(resnet, "lora")
    clip, _ = tiny()
    clip.visual.proj = None
    with pytest.raises(ConfigError, match="the image tower has none: take all or lora"):
        train_only(clip, "projections")
