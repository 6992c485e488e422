"""Towers and models of the distillation: saved, loaded, joined, refused; what is copied from a teacher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rewards.clip.backbone import load_backbone
from rewards.clip.student import LCLIP, LCLIPConfig
from rl_caption.config.build import ConfigError
from rl_caption.reward_models.encoders import ClipTowers, pretrained_clip, random_clip, save_clip
from rl_caption.reward_models.students import (
    build_dual,
    build_tower,
    copy_patch_embedding,
    save_tower,
    tower_teacher,
)
from tests.clip_for_tests import noise_image
from tests.reward_models_for_tests import CLIP, STUDENT


def saved(folder: Path, kind: Any, **shape: Any) -> str:
    save_tower(build_tower(kind, None, STUDENT | shape, STUDENT["embed_dim"]), kind, folder)
    return str(folder)


def test_a_tower_comes_back_as_it_was(tmp_path: Path) -> None:
    for kind in ("image", "text"):
        path = saved(tmp_path / kind, kind)
        back = build_tower(kind, path, {}, 16)  # type: ignore[arg-type]
        stored = load_file(Path(path) / "model.safetensors")
        assert all(torch.equal(value, stored[name]) for name, value in back.state_dict().items())
        assert json.loads((Path(path) / "config.json").read_text())["model_type"] == f"l_clip_{kind}"


def test_one_tower_is_no_reward(tmp_path: Path) -> None:
    path = saved(tmp_path / "image", "image")
    with pytest.raises(ValueError, match=r"model_type 'l_clip_image': expected 'l_clip'"):
        load_backbone(path)


def test_two_towers_are_one_model_that_is_a_reward(tmp_path: Path) -> None:
    image, text = saved(tmp_path / "image", "image"), saved(tmp_path / "text", "text", text_blocks=2)
    model = build_dual(None, {"image": image, "text": text}, {}, 16)
    assert (model.config.image_blocks, model.config.text_blocks) == (1, 2)
    model.save_pretrained(tmp_path / "whole")
    backbone = load_backbone(str(tmp_path / "whole"))
    picture = noise_image(1)
    pixels = backbone.preprocessing(picture)[None]
    raw = backbone.encode_images([picture], normalize=False)
    assert torch.allclose(raw, build_tower("image", image, {}, 16).eval()(pixels), atol=1e-6)
    assert abs(float(raw.norm()) - 1) > 1e-2
    assert torch.allclose(backbone.encode_images([picture]), torch.nn.functional.normalize(raw), atol=1e-6)
    assert torch.equal(backbone.encode_pixels(pixels, normalize=False), raw)
    text_raw = backbone.encode_texts(["a dog"], normalize=False)
    assert torch.allclose(backbone.encode_texts(["a dog"]), torch.nn.functional.normalize(text_raw), atol=1e-6)


def test_towers_of_another_teacher_are_refused(tmp_path: Path) -> None:
    folders: Any = {kind: str(tmp_path / kind) for kind in ("image", "text")}
    for kind, folder in folders.items():
        save_tower(build_tower(kind, None, STUDENT, 16), kind, Path(folder), "abc")
    assert tower_teacher(folders["image"]) == "abc"
    build_dual(None, folders, {}, 16, "abc")
    with pytest.raises(ConfigError, match=r"model\.image_init is .* of fingerprint abc; this run's teacher has xyz"):
        build_dual(None, folders, {}, 16, "xyz")
    older = {"image": folders["image"], "text": saved(tmp_path / "older", "text")}
    assert tower_teacher(older["text"]) is None
    build_dual(None, older, {}, 16, "abc")  # type: ignore[arg-type]


def test_a_model_may_start_from_one_tower_or_none(tmp_path: Path) -> None:
    text = saved(tmp_path / "text", "text")
    model = build_dual(None, {"image": None, "text": text}, {"image_blocks": 2, "image_size": 32, "patch_size": 8}, 16)
    assert (model.config.image_blocks, model.config.patch_size, model.config.text_width) == (2, 8, 16)
    assert build_dual(None, {"image": None, "text": None}, STUDENT, 16).config == LCLIPConfig(**STUDENT)
    whole = tmp_path / "whole"
    model.save_pretrained(whole)
    again = build_dual(str(whole), {"image": None, "text": None}, {}, 16)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert again.training


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: build_tower("image", None, STUDENT, 32), "embed_dim is 16, the teacher's embeddings have 32"),
        (lambda f: build_tower("image", saved(f, "image"), {}, 32), "embed_dim is 16, the teacher's embeddings have"),
        (lambda f: build_tower("image", None, {"width": 3}, 16), r"model.kwargs has \['width'\]"),
        (lambda f: build_tower("image", None, STUDENT | {"image_heads": 5}, 16), "no multiple of image_heads 5"),
        (lambda f: build_tower("image", str(f), {}, 16), "has no config.json: expected what distill_image exports"),
        (lambda f: build_tower("text", saved(f, "image"), {}, 16), "a 'l_clip_image': expected 'l_clip_text'"),
        (lambda f: build_tower("image", saved(f, "image"), STUDENT, 16), "set together with model.init"),
        (
            lambda f: build_dual(
                None, {"image": saved(f, "image", mlp_ratio=2), "text": saved(f / "t", "text")}, {}, 16
            ),
            "model.text_init has mlp_ratio 4, model.image_init has 2",
        ),
        (lambda f: build_dual(saved(f, "image"), {}, {}, 16), "model_type 'l_clip_image': expected 'l_clip'"),
        (lambda f: build_dual(str(f / "none"), {}, {}, 16), "model.init: .* is not a saved L-CLIP"),
        (lambda f: build_dual("x", {"image": "y"}, {}, 16), "leave model.image_init and model.text_init out"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_weights_of_another_shape_are_named(tmp_path: Path) -> None:
    path = Path(saved(tmp_path / "image", "image"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"image_width": 16}))
    with pytest.raises(ConfigError, match=r"model\.init: weights in .* do not fit the configuration"):
        build_tower("image", str(path), {}, 16)
    (path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"model\.init"):
        build_tower("image", str(path), {}, 16)


def test_the_patch_embedding_is_the_teachers_and_frozen() -> None:
    teacher, _ = random_clip(None, CLIP)
    student: Any = build_tower("image", None, STUDENT, 16)
    assert copy_patch_embedding(student, teacher) == ["patch_embed.weight", "cls_token", "pos_embed"]
    assert torch.equal(student.patch_embed.weight, teacher.visual.conv1.weight)
    assert torch.equal(student.cls_token.flatten(), teacher.visual.class_embedding)
    assert torch.equal(student.pos_embed[0], teacher.visual.positional_embedding)
    frozen = {name for name, value in student.named_parameters() if not value.requires_grad}
    assert frozen == {"patch_embed.weight", "cls_token", "pos_embed"}, "the bias, which the teacher lacks, is trained"


def test_positions_of_another_image_size_stay_random_and_are_trained() -> None:
    teacher, _ = random_clip(None, CLIP)
    student: Any = build_tower("image", None, STUDENT | {"image_size": 64}, 16)
    assert copy_patch_embedding(student, teacher) == ["patch_embed.weight", "cls_token"]
    assert student.pos_embed.requires_grad


@pytest.mark.parametrize(
    ("teacher", "student", "message"),
    [
        (CLIP, {"patch_size": 8}, "width 32 and 16 pixels, the student's 32 and 8"),
        (CLIP, {"image_width": 16}, "width 32 and 16 pixels, the student's 16 and 16"),
        (
            CLIP | {"vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8}},
            {},
            "no ViT whose patch embedding could be copied",
        ),
    ],
)
def test_a_teacher_without_such_patches_is_refused(teacher: Any, student: Any, message: str) -> None:
    clip, _ = random_clip(None, teacher)
    with pytest.raises(ConfigError, match=f"{message}.*train.freeze_patch_embed to false"):
        copy_patch_embedding(build_tower("image", None, STUDENT | student, 16), clip)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no ViT whose patch embedding could be copied"):
        copy_patch_embedding(build_tower("image", None, STUDENT, 16), LCLIP(LCLIPConfig(**STUDENT)))  # type: ignore[arg-type]


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_a_contrastive_model_comes_back_as_a_reward(tmp_path: Path, quick_gelu: bool) -> None:
    torch.manual_seed(0)
    clip, shape = random_clip(None, CLIP | {"quick_gelu": quick_gelu})
    save_clip(clip, shape, tmp_path / "clip")
    backbone = load_backbone(str(tmp_path / "clip"))
    clip.eval()
    picture, ids = noise_image(2), torch.tensor([[49406, 320, 1929, 49407]])
    inputs = {"image": backbone.preprocessing(picture)[None], "text": ids}
    with torch.no_grad():
        mine = ClipTowers(clip)(inputs)
    assert torch.allclose(backbone.encode_images([picture], normalize=False), mine["image"], atol=1e-5)
    assert torch.allclose(backbone.encode_texts(["a dog"], normalize=False), mine["text"], atol=1e-5)
    back, shape_again, preprocessing = pretrained_clip(None, str(tmp_path / "clip"))
    assert shape_again == shape
    assert preprocessing == backbone.preprocessing
    assert all(torch.equal(value, clip.state_dict()[name]) for name, value in back.state_dict().items())
    assert all(value.requires_grad for value in back.parameters())


def as_archive(clip: Any, path: Path) -> str:
    """Save the weights as OpenAI released theirs: a TorchScript archive, whose activation its loader knows."""
    holder = nn.Module()
    for name, value in clip.state_dict().items():
        *owners, last = name.split(".")
        inner = holder
        for owner in owners:
            if not hasattr(inner, owner):
                inner.add_module(owner, nn.Module())
            inner = inner.get_submodule(owner)
        inner.register_buffer(last, value)
    for name in ("input_resolution", "context_length", "vocab_size"):
        holder.register_buffer(name, torch.tensor(0))
    torch.jit.script(holder).save(str(path))
    return str(path)


def known_to_open_clip(folder: Path, name: str, shape: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(shape))
    open_clip.add_model_config(folder / f"{name}.json")
    return name


@pytest.mark.parametrize("source", ["archive", "plain file", "plain file of a quickgelu architecture"])
def test_a_fine_tuned_model_keeps_its_activation(tmp_path: Path, source: str) -> None:
    torch.manual_seed(0)
    # An archive tells its shapes by its weights, with heads of 64.
    vision, text = {"width": 64, "head_width": 64}, {"width": 64, "heads": 1}
    shape: Any = CLIP | {"vision_cfg": CLIP["vision_cfg"] | vision, "text_cfg": CLIP["text_cfg"] | text}
    quick = source.endswith("quickgelu architecture")
    name = known_to_open_clip(tmp_path / "names", f"test-{source.replace(' ', '-')}", shape | {"quick_gelu": quick})
    clip, _ = random_clip(None, shape | {"quick_gelu": True})
    file = tmp_path / "weights.pt"
    if source == "archive":
        as_archive(clip, file)
    else:
        torch.save(clip.state_dict(), file)
    model, shape_found, preprocessing = pretrained_clip(name, str(file))
    save_clip(model, shape_found, tmp_path / "export")
    picture, before = noise_image(2), load_backbone(name, str(file))
    after = load_backbone(str(tmp_path / "export"))
    assert after.preprocessing == preprocessing
    assert torch.allclose(after.encode_images([picture]), before.encode_images([picture]), atol=1e-6)
    assert torch.allclose(after.encode_texts(["a dog"]), before.encode_texts(["a dog"]), atol=1e-6)
    assert shape_found["quick_gelu"] is (source != "plain file")


def test_an_archive_of_another_architecture_is_refused(tmp_path: Path) -> None:
    vision, text = {"width": 64, "head_width": 64}, {"width": 64, "heads": 1}
    shape: Any = CLIP | {"vision_cfg": CLIP["vision_cfg"] | vision, "text_cfg": CLIP["text_cfg"] | text}
    name = known_to_open_clip(
        tmp_path / "names", "test-two-layers", shape | {"text_cfg": shape["text_cfg"] | {"layers": 2}}
    )
    path = as_archive(random_clip(None, shape)[0], tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=r"model\.init .* with model\.name 'test-two-layers' do not fit"):
        pretrained_clip(name, path)


def test_an_architecture_may_be_changed_in_part() -> None:
    _, shape = random_clip("ViT-B-32", {"vision_cfg": {"layers": 1}, "text_cfg": {"layers": 1}})
    assert (shape["vision_cfg"]["layers"], shape["vision_cfg"]["width"], shape["embed_dim"]) == (1, 768, 512)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: random_clip("ViT-B-33", {}), "model.name is 'ViT-B-33'"),
        (lambda f: random_clip(None, {"embed_dim": 16}), r"model.kwargs has \['embed_dim'\]: expected open_clip's"),
        (lambda f: random_clip(None, CLIP | {"widht": 3}), "open_clip cannot build this model"),
        (lambda f: random_clip("ViT-B-16-SigLIP", {}), "vision_cfg.timm_model_name"),
        (lambda f: random_clip("coca_ViT-B-32", {}), "multimodal_cfg cannot be trained here"),
        (lambda f: pretrained_clip(None, str(f)), "expected a folder with open_clip_config.json"),
        (lambda f: pretrained_clip("ViT-B-32", str(f / "no.pt")), "model.init: backbone"),
    ],
)
def test_a_model_that_cannot_be_built_is_named(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)
