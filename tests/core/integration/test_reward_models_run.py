"""Reward models by the real command: one command trains the whole chain; killed and
started again; wrong input.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rewards.clip.dual import PretrainedDual
from rewards.clip.l_clipscore import LClipScore
from rewards.clip.pac import PacScore
from rewards.clip.pretrained import TextEncoder, load_part
from rewards.trust import trust
from rl_caption.data.base import load_image
from rl_caption.data.scenes import ScenesData
from tests.reward_models_for_tests import (
    DATA,
    chain,
    pretrained_chain,
    reward_model_config,
)
from tests.training_for_tests import (
    Kill,
    assert_same_run,
    changed,
    checked_arguments,
    checked_run,
    files,
    lines,
    run,
    values,
    write_pipeline,
)

pytestmark = pytest.mark.slow

CHAIN = ("teacher", "image", "text", "dual")


def trained_run(config, folder, **changes):
    """Run a configuration, changed at dotted keys, to its end in ``folder``."""
    return checked_run(
        changed(config, {"run.dir": str(folder)} | changes), folder, "reward_model"
    )


def refused(config, folder, program="reward_model", **changes):
    """What a run says that must be refused before it trains."""
    ended = run(changed(config, {"run.dir": str(folder)} | changes), folder, program)
    assert ended.code in (1, 2), ended.output
    assert "Traceback" not in ended.output
    assert not (folder / "metrics.jsonl").exists()
    return ended.output


def alone(folder, stage):
    """Data of a tower that learns from images alone, in random views, or from captions alone."""
    folder.mkdir(exist_ok=True)
    rows = ScenesData(**DATA["kwargs"])["train"]
    kwargs = {"val_fraction": 0.3}
    if stage == "image":
        for index, row in enumerate(rows):
            load_image(row["image"]).save(folder / f"{index}.png")
        data = {
            "format": "images",
            "path": str(folder),
            "augment": ["rand_augment"],
        }
    else:
        file = folder / "train.tsv"
        captions = [caption for row in rows for caption in row["references"]]
        file.write_text("\n".join(f"{caption}\thttp://a" for caption in captions))
        data = {"format": "captions", "path": str(file)}
        kwargs["column"] = 0
    return data | {"kwargs": kwargs}


def best(folder):
    return json.loads((folder / "result.json").read_text())["best_metric"]


@pytest.fixture(autouse=True)
def trusted_encoder(trust_of_one_test):
    """This process loads what the programs exported, too."""
    trust(["tests.encoders_for_tests:TinyImageEncoder"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Teacher, both towers and the whole student, by one command."""
    folder = tmp_path_factory.mktemp("chain")
    configs = chain(folder)
    stages = {name: ("reward_model", configs[name]) for name in CHAIN}
    pipeline = write_pipeline(folder, **stages)
    checked_arguments(["run", str(pipeline)], folder / "chain.log")
    return folder


def test_one_command_trains_the_chain(trained):
    for name in CHAIN:
        assert len(values(trained / name, "loss/total")) == 6
    tower = {"manifest.json", "config.json", "model.safetensors"}
    clip = {"manifest.json", "open_clip_config.json", "open_clip_model.safetensors"}
    for name, expected in (("dual", tower), ("image", tower), ("teacher", clip)):
        assert files(trained / name / "export/best") == expected
    log = (trained / "chain.log").read_text()
    assert "signature: distill_image[best," in log
    assert log.count("teacher: embedding 32 images once") == 2


def test_each_stage_keeps_what_it_freezes_and_exports_the_best_of_its_validations(
    trained,
):
    teacher = load_file(trained / "teacher/export/best/open_clip_model.safetensors")
    image = load_file(trained / "image/export/best/model.safetensors")
    text = load_file(trained / "text/export/best/model.safetensors")
    dual = load_file(trained / "dual/checkpoints/step-00000006/model.safetensors")
    assert torch.equal(image["patch_embed.weight"], teacher["visual.conv1.weight"])
    for name, value in text.items():
        assert torch.equal(dual[f"model.text.{name}"], value)
    assert not torch.equal(dual["model.image.head.weight"], image["head.weight"])
    # A run that starts from trained towers validates them first.
    for name, key, count in (
        ("teacher", "val/retrieval_r1", 3),
        ("image", "val/teacher_cosine_image", 3),
        ("text", "val/teacher_cosine_text", 3),
        ("dual", "val/retrieval_r1", 4),
    ):
        found = values(trained / name, key)
        assert len(found) == count
        assert best(trained / name) == max(found)


@pytest.mark.parametrize(
    ("stage", "kill"),
    [
        ("teacher", Kill("rl_caption.training.run:Run.begin_step", 4)),
        ("image", Kill("accelerate:Accelerator.save_state", 2, "after")),
        ("dual", Kill("rl_caption.training.checkpoint:os.rename", 4, "after")),
        ("pac", Kill("rl_caption.training.run:Run.begin_step", 4)),
    ],
)
def test_killed_and_started_again(trained, tmp_path, stage, kill):
    folder = tmp_path / stage
    config = changed(chain(trained)[stage], {"run.dir": str(folder)})
    if stage == "pac":  # no part of the chain that ends in the student
        checked_run(chain(trained)[stage], trained / stage, "reward_model")
    checked_run(
        config,
        folder,
        "reward_model",
        kill=kill,
    )
    checked_run(config, folder, "reward_model")
    assert_same_run(folder, trained / stage)


def test_tuned_on_positives_it_is_a_model_for_pac_s(trained, tmp_path):
    folder = tmp_path / "tuned"
    changes = {"train.trainable": "lora", "train.max_steps": 2}
    trained_run(chain(trained)["pac"], folder, **changes)
    assert values(folder, "positive/images")
    start = values(folder, "val/retrieval_r1")[0]
    assert start == pytest.approx(best(trained / "teacher"))
    losses = values(folder, "val/loss")
    # of the start and the end; lower is better
    assert (len(losses), best(folder)) == (2, min(losses))
    before, after = (
        load_file(run / "export/best/open_clip_model.safetensors")
        for run in (trained / "teacher", folder)
    )
    assert before.keys() == after.keys(), "updates are merged"
    row = ScenesData(**DATA["kwargs"])["val"][0]
    reward = PacScore(str(folder / "export/best"), prefix="")
    assert 0 <= reward(None, ["a red circle"], image=[row["image"]])[0] <= 2


def test_with_augmentation_the_teacher_sees_the_same_view(trained, tmp_path):
    config = changed(chain(trained)["image"], {"data.augment": ["horizontal", "crop"]})
    assert "images once" not in trained_run(config, tmp_path / "image").output
    smaller = {
        "model.kwargs.image_size": 16,
        "model.kwargs.patch_size": 16,
    }
    assert "data.augment" in refused(config, tmp_path / "smaller", **smaller)


@pytest.mark.parametrize("stage", ["image", "text"])
def test_a_tower_learns_from_images_or_captions_alone(trained, tmp_path, stage):
    config = chain(trained)[stage] | {"data": alone(tmp_path / "data", stage)}
    folder = tmp_path / "whole"
    trained_run(config, folder)
    key = f"val/teacher_cosine_{stage}"
    found = values(folder, key)
    assert len(found) == 3
    assert best(folder) == max(found)
    logs = {name for line in lines(folder) for name in line if name.startswith("val/")}
    assert logs == {key, "val/seconds"}, "there are no pairs"


def photos_of(folder, of_row):
    """A configuration of photos in JSON lines, six of them for validation, each with
    ``of_row``; and the rows.
    """
    alone(folder, "image")
    rows = []
    for number, file in enumerate(sorted(folder.glob("*.png"))):
        split = "val" if number < 6 else "train"
        rows.append({"image": file.name, "split": split} | of_row)
    return {
        "format": "jsonl",
        "path": str(folder / "photos.jsonl"),
    }, rows


def write_rows(data, rows):
    Path(data["path"]).write_text("\n".join(map(json.dumps, rows)))


def test_rows_that_lack_what_the_loss_reads_are_named_before_the_first_step(tmp_path):
    of_row = {"references": ["a dog"], "negatives": [["a cat"]]}
    data, rows = photos_of(tmp_path / "data", of_row)
    config = reward_model_config(tmp_path, "contrastive")
    last = rows[-1]
    negatives = {
        "data": data,
        "negatives": {
            "count": 1,
            "source": "data",
        },
    }
    write_rows(data, [*rows[:-1], {k: last[k] for k in last if k != "negatives"}])
    said = refused(config, tmp_path / "run", **negatives)
    assert f"image '{last['image']}' has no negatives for 'a dog'" in said
    for row in rows:
        del row["negatives"]
        row["long_reference"] = "A dog. It runs."
    rows[-1]["references"] = []
    write_rows(data, rows)
    short = {
        "data": data | {"long_captions": True},
        "loss": {"short": 1.0, "pca_rank": 2},
        "train.short_captions": "references",
    }
    said = refused(config, tmp_path / "run", **short)
    assert f"1 of {len(rows) - 6} training images have no references besides" in said


def test_another_teacher_refuses_to_resume(trained, tmp_path):
    folder = tmp_path / "image"
    other = tmp_path / "other"
    shutil.copytree(trained / "image", folder)
    teacher = reward_model_config(other, "contrastive")
    trained_run(
        teacher,
        other,
        **{
            "train.max_steps": 1,
            "train.seed": 5,
        },
    )
    resumed = {
        "run.dir": str(folder),
        "teacher.name": str(other / "export/best"),
        "run.resume": str(folder / "checkpoints/step-00000004"),
    }
    ended = run(changed(chain(trained)["image"], resumed), folder, "reward_model")
    assert ended.code == 1
    assert "'distill_image[best," in ended.output


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """The generated world as files in Karpathy's format, and the grids of a tiny encoder of them."""
    folder = tmp_path_factory.mktemp("photos")
    images = folder / "data/images"
    images.mkdir(parents=True)
    data = ScenesData(**DATA["kwargs"])
    records = []
    for split in ("train", "val"):
        for row in data[split]:
            name = f"{row['image_id']}.png"
            row["image"].render().save(images / name)
            record = {
                "imgid": row["image_id"],
                "filename": name,
                "split": split,
                "sentences": [{"raw": caption} for caption in row["references"]],
            }
            records.append(record)
    (folder / "data/dataset.json").write_text(json.dumps({"images": records}))
    return folder


@pytest.fixture(scope="module")
def dual(photos):
    """A trained dual encoder of pretrained parts, in ``photos``."""
    trained_run(pretrained_chain(photos)["dual"], photos / "dual")
    return photos / "dual/export/best"


def test_a_dual_of_pretrained_parts_trains_its_heads_alone_and_is_distilled(
    photos, dual
):
    configs = pretrained_chain(photos)
    trained_run(configs["hybrid"], photos / "hybrid")
    start = PretrainedDual.from_pretrained(dual)
    encoder = load_part(TextEncoder, str(configs["dual"]["model"]["text"]["encoder"]))
    for name, value in encoder.state_dict().items():
        assert torch.equal(start.text_encoder.state_dict()[name], value)
    assert start.logit_scale <= math.log(12) + 1e-6
    first = values(photos / "hybrid", "val/teacher_cosine_image")[0]
    assert best(photos / "hybrid") >= first
    score = LClipScore(backbone=str(dual))
    row = ScenesData(**DATA["kwargs"])["val"][0]
    assert 0 <= score([""], row["references"][:1], image=[row["image"]])[0] <= 2.5
