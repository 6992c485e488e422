"""L-CLIP's distillation: towers and models saved, loaded, joined, refused; the teacher's patches
and embeddings.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from rewards.clip.backbone import FrozenEncoder, load_frozen_encoder
from rewards.clip.encoder import CachedEncoder
from rewards.clip.student import LCLIP, LCLIPConfig
from rewards.trust import trust
from rl_caption.reward_models import teacher as teachers
from rl_caption.reward_models.batch import PairBatch
from rl_caption.reward_models.distill import (
    build_dual,
    build_tower,
    copy_patch_embedding,
    save_tower,
)
from rl_caption.reward_models.encoders import random_clip
from rl_caption.reward_models.teacher import Teacher
from rl_caption.runtime.errors import ConfigError
from tests.clip_for_tests import noise_image, tiny_student
from tests.reward_models_for_tests import CLIP, RESNET, STUDENT


def saved(folder: Path, kind: Any, **shape: Any) -> str:
    save_tower(
        build_tower(kind, None, STUDENT | shape, STUDENT["embed_dim"]), kind, folder
    )
    return str(folder)


def test_a_tower_comes_back_as_it_was(tmp_path):
    for kind in ("image", "text"):
        path = saved(tmp_path / kind, kind)
        back = build_tower(kind, path, {}, 16)  # type: ignore[arg-type]
        stored = load_file(Path(path) / "model.safetensors")
        assert all(
            torch.equal(value, stored[name])
            for name, value in back.state_dict().items()
        )
        assert (
            json.loads((Path(path) / "config.json").read_text())["model_type"]
            == f"l_clip_{kind}"
        )
    with pytest.raises(
        ValueError, match=r"model_type 'l_clip_text': expected 'l_clip'"
    ):
        load_frozen_encoder(path)


def test_two_towers_are_one_model_that_is_a_reward(tmp_path):
    image, text = (
        saved(tmp_path / "image", "image"),
        saved(tmp_path / "text", "text", text_blocks=2),
    )
    model = build_dual(None, {"image": image, "text": text}, {}, 16)
    assert (model.config.image_blocks, model.config.text_blocks) == (1, 2)
    model.save_pretrained(tmp_path / "whole")
    backbone, picture = load_frozen_encoder(str(tmp_path / "whole")), noise_image(1)
    pixels = backbone.preprocessing(picture)[None]
    raw = backbone.encode_images([picture], normalize=False)
    assert torch.allclose(
        raw, build_tower("image", image, {}, 16).eval()(pixels), atol=1e-6
    )
    assert abs(float(raw.norm()) - 1) > 1e-2
    assert torch.equal(backbone.encode_pixels(pixels, normalize=False), raw)
    again = build_dual(str(tmp_path / "whole"), {"image": None, "text": None}, {}, 16)
    assert all(
        torch.equal(value, again.state_dict()[name])
        for name, value in model.state_dict().items()
    )
    assert again.training


def test_an_l_clip_over_a_frozen_image_encoder_is_a_reward(tmp_path):
    """It trains nothing of the encoder, and is saved with its weights."""
    encoder = {
        "image_encoder": "tests.encoders_for_tests:TinyImageEncoder",
        "image_encoder_kwargs": {"seed": 3},
    }
    image, text = (
        saved(tmp_path / "image", "image", **encoder),
        saved(tmp_path / "text", "text"),
    )
    trust([encoder["image_encoder"]])
    tower: Any = build_tower("image", image, {}, 16).train()
    assert not any(parameter.requires_grad for parameter in tower.encoder.parameters())
    assert not tower.encoder.training
    picture = noise_image(1)
    pixels = tower.preprocessing(picture)[None]
    grid = tower.encoder(pixels).flatten(1, 2)
    assert tower.pos_embed.shape == (1, 1 + grid.shape[1], STUDENT["image_width"])
    build_dual(None, {"image": image, "text": text}, {}, 16).save_pretrained(
        tmp_path / "whole"
    )
    backbone = load_frozen_encoder(str(tmp_path / "whole"))
    assert backbone.preprocessing == tower.preprocessing
    assert torch.allclose(
        backbone.encode_images([picture], normalize=False),
        tower(pixels).detach(),
        atol=1e-6,
    )
    assert (
        LCLIP.from_pretrained(tmp_path / "whole").config.image_encoder
        == encoder["image_encoder"]
    )


def test_towers_of_another_teacher_are_refused(tmp_path):
    folders: Any = {kind: str(tmp_path / kind) for kind in ("image", "text")}
    for kind, folder in folders.items():
        save_tower(build_tower(kind, None, STUDENT, 16), kind, Path(folder), "abc")
    build_dual(None, folders, {}, 16, "abc")
    with pytest.raises(ConfigError, match=r"model\.image_init is"):
        build_dual(None, folders, {}, 16, "xyz")


def test_a_model_may_start_from_one_tower_or_none(tmp_path):
    text = saved(tmp_path / "text", "text")
    model = build_dual(
        None,
        {"image": None, "text": text},
        {"image_blocks": 2, "image_size": 32, "patch_size": 8},
        16,
    )
    assert (
        model.config.image_blocks,
        model.config.patch_size,
        model.config.text_width,
    ) == (
        2,
        8,
        16,
    )
    assert build_dual(
        None, {"image": None, "text": None}, STUDENT, 16
    ).config == LCLIPConfig(**STUDENT)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: build_tower("image", None, STUDENT, 32), r"embed_dim is 16.*32"),
        (
            lambda f: build_tower("image", None, STUDENT | {"image_heads": 5}, 16),
            "image_heads 5",
        ),
        (
            lambda f: build_tower("text", saved(f, "image"), {}, 16),
            "model_type 'l_clip_image': expected 'l_clip_text'",
        ),
        (
            lambda f: build_dual(
                None,
                {
                    "image": saved(f, "image", mlp_ratio=2),
                    "text": saved(f / "t", "text"),
                },
                {},
                16,
            ),
            "model.text_init has mlp_ratio 4",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, make, message):
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_the_patch_embedding_is_the_teachers_and_frozen():
    teacher, _ = random_clip(None, CLIP)
    student: Any = build_tower("image", None, STUDENT, 16)
    assert copy_patch_embedding(student, teacher) == [
        "patch_embed.weight",
        "cls_token",
        "pos_embed",
    ]
    assert torch.equal(student.patch_embed.weight, teacher.visual.conv1.weight)
    assert torch.equal(student.cls_token.flatten(), teacher.visual.class_embedding)
    assert torch.equal(student.pos_embed[0], teacher.visual.positional_embedding)
    frozen = {
        name for name, value in student.named_parameters() if not value.requires_grad
    }
    assert frozen == {"patch_embed.weight", "cls_token", "pos_embed"}, (
        "the bias, which the teacher lacks, is trained"
    )
    larger: Any = build_tower("image", None, STUDENT | {"image_size": 64}, 16)
    assert copy_patch_embedding(larger, teacher) == [
        "patch_embed.weight",
        "cls_token",
    ], "positions do not fit"
    assert larger.pos_embed.requires_grad


def test_a_teacher_without_such_patches_is_refused():
    for teacher, changes, message in (
        (random_clip(None, CLIP)[0], {"patch_size": 8}, "not a ViT.* 32 and 8 pixels"),
        (random_clip(None, RESNET)[0], {}, "not a ViT"),
        (LCLIP(LCLIPConfig(**STUDENT)), {}, "not a ViT"),
    ):
        with pytest.raises(
            ConfigError, match=f"{message}.*train.freeze_patch_embed to false"
        ):
            copy_patch_embedding(
                build_tower("image", None, STUDENT | changes, 16), teacher
            )  # type: ignore[arg-type]


# the teacher

ROWS: list[Any] = [
    {
        "image_id": str(index),
        "image": noise_image(index),
        "references": [f"a dog {index}", "two cats"],
    }
    for index in range(4)
]
ALL = {"image": 4, "text": 5}
MUCH = 2**20


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return load_frozen_encoder(str(tiny_student(tmp_path_factory.mktemp("student"))))


@pytest.fixture
def counts(backbone, monkeypatch):
    """How many images and captions went through the teacher."""
    counted = {"image": 0, "text": 0}
    for tower in ("image", "text"):
        encode = getattr(backbone, f"encode_{tower}s")

        def counting(
            items: Any, normalize: bool = True, tower: str = tower, encode: Any = encode
        ) -> torch.Tensor:
            counted[tower] += len(items)
            return encode(items, normalize)

        monkeypatch.setattr(backbone, f"encode_{tower}s", counting)
    return counted


def epoch(teacher: Teacher) -> list[torch.Tensor]:
    """Both embeddings of every image with each of its captions, two images a step."""
    batches = [
        PairBatch(
            ROWS[i : i + 2], {}, [row["references"][k] for row in ROWS[i : i + 2]]
        )
        for k in (0, 1)
        for i in (0, 2)
    ]
    return [
        torch.cat([found["image"], found["text"]], 1) for found in map(teacher, batches)
    ]


def expected(backbone: FrozenEncoder) -> list[torch.Tensor]:
    return epoch(Teacher(backbone, ("image", "text"), Accelerator(cpu=True)))


def made(backbone: FrozenEncoder, cache_dir: Path | None, memory: int) -> Teacher:
    teacher = Teacher(
        backbone,
        ("image", "text"),
        Accelerator(cpu=True),
        cache_dir=str(cache_dir) if cache_dir else None,
    )
    teacher.prepare(ROWS, "random", memory)
    return teacher


@pytest.mark.parametrize(
    ("on_disk", "memory"), [(False, MUCH), (True, MUCH), (True, 0), (False, 0)]
)
def test_a_second_epoch_costs_no_forward_pass(
    backbone, counts, tmp_path, on_disk, memory, capsys
):
    right = expected(backbone)
    counts.update(image=0, text=0)
    teacher = made(backbone, tmp_path if on_disk else None, memory)
    first, second = epoch(teacher), epoch(teacher)
    assert ("at every step" in capsys.readouterr().err) == (memory == 0)
    if on_disk or memory:
        assert counts == ALL | {"text": 5 + 1}, (
            "the distinct captions, and one that tells the width"
        )
    else:
        assert counts == {"image": 16, "text": 16 + 1}, (
            "two of everything in both epochs"
        )
    for whole, again, true in zip(first, second, right, strict=True):
        assert torch.equal(whole, again)
        torch.testing.assert_close(whole, true)
    if on_disk:
        counts.update(image=0, text=0)
        assert all(map(torch.equal, epoch(made(backbone, tmp_path, memory)), first)), (
            "nor does a second run"
        )
        assert counts == {"image": 0, "text": 0}


def test_a_score_that_shares_the_teachers_folder_has_embeddings_of_length_1_and_the_teacher_its_raw_ones(
    backbone, tmp_path
):
    images = [row["image"] for row in ROWS]
    raw = Teacher(
        backbone, ("image",), Accelerator(cpu=True), cache_dir=str(tmp_path)
    ).embed("image", ROWS)
    assert (raw.norm(dim=1) - 1).abs().min() > 1e-2
    unit = CachedEncoder(backbone, tmp_path).embed_images(images)
    torch.testing.assert_close(
        torch.from_numpy(unit), torch.nn.functional.normalize(raw, dim=1)
    )
    again = Teacher(
        backbone, ("image",), Accelerator(cpu=True), cache_dir=str(tmp_path)
    ).embed("image", ROWS)
    assert torch.equal(again, raw)


def test_of_augmented_images_the_teacher_embeds_the_view_that_the_student_sees(
    backbone,
):
    teacher = Teacher(backbone, ("image",), Accelerator(cpu=True), augmented=True)
    teacher.prepare(ROWS, "random", MUCH)
    pixels = torch.stack(
        [backbone.preprocessing(row["image"]).flip(-1) for row in ROWS]
    )
    seen = teacher(PairBatch(ROWS, {"image": pixels}, []))["image"]
    assert torch.equal(seen, backbone.encode_pixels(pixels, normalize=False))
    assert not torch.allclose(seen, teacher.embed("image", ROWS), atol=1e-3)


def test_of_first_captions_the_teacher_embeds_no_others(backbone, counts):
    teacher = Teacher(backbone, ("image", "text"), Accelerator(cpu=True))
    counts.update(image=0, text=0)
    teacher.prepare(ROWS, "first", MUCH)
    assert counts == {"image": 4, "text": 4}


@pytest.mark.parametrize(("missing", "images"), [(0, 4), (1, 0)])
def test_images_are_kept_in_the_memory_that_captions_leave(
    backbone, counts, missing, images
):
    teacher = Teacher(backbone, ("image", "text"), Accelerator(cpu=True))
    counts.update(image=0, text=0)
    teacher.prepare(ROWS, "random", 4 * teacher.width * (5 + 4) - missing)
    assert counts == {"image": images, "text": 5}


def test_a_table_made_in_parts_is_the_same(backbone, monkeypatch):
    right, sizes, encode = expected(backbone), [], backbone.encode_texts

    def watched(texts: Any, normalize: bool = True) -> torch.Tensor:
        sizes.append(len(texts))
        return encode(texts, normalize)

    monkeypatch.setattr(backbone, "encode_texts", watched)
    monkeypatch.setattr(teachers, "PART", 2)
    teacher = made(backbone, None, MUCH)
    assert max(sizes) == 2
    torch.testing.assert_close(epoch(teacher), right)
