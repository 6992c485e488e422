"""L-CLIP's distillation: towers and models saved, loaded, joined, refused; the
teacher's patches and embeddings.
"""

import pytest
import torch
from accelerate import Accelerator

from rewards.clip.backbone import load_frozen_encoder
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


def saved(folder, kind, teacher="", **shape):
    """Save a tower; return its folder."""
    tower = build_tower(kind, None, STUDENT | shape, STUDENT["embed_dim"])
    save_tower(tower, kind, folder, teacher)
    return str(folder)


def test_two_towers_are_one_model_that_is_a_reward(tmp_path):
    image = saved(tmp_path / "image", "image")
    text = saved(tmp_path / "text", "text", text_blocks=2)
    model = build_dual(None, {"image": image, "text": text}, {}, 16)
    assert (model.config.image_blocks, model.config.text_blocks) == (1, 2)
    whole = str(tmp_path / "whole")
    model.save_pretrained(whole)
    backbone = load_frozen_encoder(whole)
    picture = noise_image(1)
    pixels = backbone.preprocessing(picture)[None]
    raw = backbone.encode_images([picture], normalize=False)
    tower = build_tower("image", image, {}, 16).eval()
    assert torch.allclose(raw, tower(pixels), atol=1e-6)
    again = build_dual(whole, {}, {}, 16)
    assert again.training
    assert (again.config, str(again)) == (model.config, str(model))


def test_an_l_clip_over_a_frozen_image_encoder_is_a_reward(tmp_path):
    """It trains nothing of the encoder, and is saved with its weights."""
    name = "tests.encoders_for_tests:TinyImageEncoder"
    encoder = {
        "image_encoder": name,
        "image_encoder_kwargs": {"seed": 3},
    }
    image = saved(tmp_path / "image", "image", **encoder)
    text = saved(tmp_path / "text", "text")
    trust([name])
    tower = build_tower("image", image, {}, 16).train()
    assert not any(weight.requires_grad for weight in tower.encoder.parameters())
    assert not tower.encoder.training
    pixels = tower.preprocessing(noise_image(1))[None]
    places = tower.encoder(pixels).flatten(1, 2).shape[1]
    assert tower.pos_embed.shape[1] == 1 + places
    whole = tmp_path / "whole"
    model = build_dual(None, {"image": image, "text": text}, {}, 16)
    model.save_pretrained(whole)
    backbone = load_frozen_encoder(str(whole))
    assert backbone.preprocessing == tower.preprocessing
    found = backbone.encode_images([noise_image(1)], normalize=False)
    assert torch.allclose(found, tower(pixels).detach(), atol=1e-6)


def test_towers_that_do_not_fit_are_refused(tmp_path):
    image = saved(tmp_path / "image", "image", "abc")
    towers = {
        "image": image,
        "text": saved(tmp_path / "text", "text", "abc"),
    }
    other = {
        **towers,
        "image": saved(tmp_path / "other", "image", mlp_ratio=2),
    }
    build_dual(None, towers, {}, 16, "abc")
    with pytest.raises(ConfigError, match=r"model\.image_init is"):
        build_dual(None, towers, {}, 16, "xyz")
    with pytest.raises(ConfigError, match=r"model\.text_init has mlp_ratio 4"):
        build_dual(None, other, {}, 16)
    with pytest.raises(ConfigError, match="'l_clip_image': expected 'l_clip_text'"):
        build_tower("text", image, {}, 16)


def test_the_patch_embedding_is_the_teachers_and_frozen():
    teacher, _ = random_clip(None, CLIP)
    student = build_tower("image", None, STUDENT, 16)
    copied = copy_patch_embedding(student, teacher)
    assert copied == ["patch_embed.weight", "cls_token", "pos_embed"]
    visual = teacher.visual
    assert torch.equal(student.patch_embed.weight, visual.conv1.weight)
    assert torch.equal(student.cls_token.flatten(), visual.class_embedding)
    assert torch.equal(student.pos_embed[0], visual.positional_embedding)
    frozen = {n for n, value in student.named_parameters() if not value.requires_grad}
    # the bias, which the teacher lacks, is trained
    assert frozen == {*copied}
    larger = build_tower("image", None, STUDENT | {"image_size": 64}, 16)
    # positions do not fit
    assert copy_patch_embedding(larger, teacher) == copied[:2]
    assert larger.pos_embed.requires_grad


@pytest.mark.parametrize(
    ("teacher", "changes"),
    [
        (random_clip(None, CLIP)[0], {"patch_size": 8}),
        (random_clip(None, RESNET)[0], {}),
        (LCLIP(LCLIPConfig(**STUDENT)), {}),
    ],
)
def test_a_teacher_without_such_patches_is_refused(teacher, changes):
    student = build_tower("image", None, STUDENT | changes, 16)
    with pytest.raises(ConfigError, match=r"train\.freeze_patch_embed"):
        copy_patch_embedding(student, teacher)


# the teacher

ROWS = [
    {
        "image_id": str(index),
        "image": noise_image(index),
        "references": [f"a dog {index}", "two cats"],
    }
    for index in range(4)
]
MUCH = 2**20


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return load_frozen_encoder(str(tiny_student(tmp_path_factory.mktemp("student"))))


@pytest.fixture
def counts(backbone, monkeypatch):
    """How many images and captions went through the teacher."""
    counted = {"image": 0, "text": 0}

    def watched(tower, encode):
        def counting(items, normalize=True):
            counted[tower] += len(items)
            return encode(items, normalize)

        return counting

    for tower in counted:
        name = f"encode_{tower}s"
        monkeypatch.setattr(backbone, name, watched(tower, getattr(backbone, name)))
    return counted


def teacher_of(backbone, towers=("image", "text"), **options):
    return Teacher(backbone, towers, Accelerator(cpu=True), **options)


def epoch(teacher):
    """Both embeddings of every image with each of its captions, two images a step."""
    found = []
    for k in (0, 1):
        for rows in (ROWS[:2], ROWS[2:]):
            step = teacher(PairBatch(rows, {}, [row["references"][k] for row in rows]))
            found.append(torch.cat([step["image"], step["text"]], 1))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("on_disk", "memory"), [(False, MUCH), (True, MUCH), (True, 0), (False, 0)]
)
def test_a_second_epoch_costs_no_forward_pass(
    backbone, counts, tmp_path, on_disk, memory
):
    right = epoch(teacher_of(backbone))
    options = {"cache_dir": str(tmp_path)} if on_disk else {}

    def run():
        """Two epochs, and what they cost; one caption tells the width."""
        counts.update(image=0, text=-1)
        teacher = teacher_of(backbone, **options)
        teacher.prepare(ROWS, "random", memory)
        first = epoch(teacher)
        assert torch.equal(first, epoch(teacher))
        torch.testing.assert_close(first, right)
        return counts

    if on_disk or memory:
        assert run() == {"image": 4, "text": 5}, "the distinct captions"
    else:
        assert run() == {"image": 16, "text": 16}, "all in both epochs"
    if on_disk:
        assert run() == {"image": 0, "text": -1}, "nor does a second run"


def test_the_teachers_raw_embeddings_are_kept_apart_from_those_of_scores(
    backbone, tmp_path
):
    def raw():
        teacher = teacher_of(backbone, ("image",), cache_dir=str(tmp_path))
        return teacher.embed("image", ROWS)

    first = raw()
    lengths = first.norm(dim=1, keepdim=True)
    assert (lengths - 1).abs().min() > 1e-2
    score = CachedEncoder(backbone, tmp_path)
    unit = torch.from_numpy(score.embed_images([row["image"] for row in ROWS]))
    torch.testing.assert_close(unit, first / lengths)
    assert torch.equal(raw(), first)


def test_of_augmented_images_the_teacher_embeds_the_view_that_the_student_sees(
    backbone,
):
    teacher = teacher_of(backbone, ("image",), augmented=True)
    teacher.prepare(ROWS, "random", MUCH)
    views = [backbone.preprocessing(row["image"]).flip(-1) for row in ROWS]
    pixels = torch.stack(views)
    seen = teacher(PairBatch(ROWS, {"image": pixels}, []))["image"]
    assert torch.equal(seen, backbone.encode_pixels(pixels, normalize=False))
    assert not torch.allclose(seen, teacher.embed("image", ROWS), atol=1e-3)


@pytest.mark.parametrize(
    ("captions", "missing", "images", "texts"),
    [("first", 0, 4, 4), ("random", 1, 0, 5)],
)
def test_images_are_kept_in_the_memory_that_the_captions_of_the_run_leave(
    backbone, counts, captions, missing, images, texts
):
    teacher = teacher_of(backbone)
    counts.update(image=0, text=0)
    memory = 4 * teacher.width * (texts + 4) - missing
    teacher.prepare(ROWS, captions, memory)
    assert counts == {"image": images, "text": texts}


def test_a_table_made_in_parts_is_the_same(backbone, monkeypatch):
    right = epoch(teacher_of(backbone))
    monkeypatch.setattr(teachers, "PART", 2)
    teacher = teacher_of(backbone)
    teacher.prepare(ROWS, "random", MUCH)
    torch.testing.assert_close(epoch(teacher), right)
