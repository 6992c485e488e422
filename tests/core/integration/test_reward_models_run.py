"""Reward models by the real command: one command trains the whole chain; killed and started again;
wrong input.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

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
from tests.captioners_for_tests import tiny_captioner
from tests.reward_models_for_tests import (
    DATA,
    chain,
    pretrained_chain,
    reward_model_config,
)
from tests.training_for_tests import (
    Ended,
    Kill,
    assert_same_run,
    changed,
    checked_run,
    files,
    lines,
    run,
    run_arguments,
    write_pipeline,
)

pytestmark = pytest.mark.slow

CHAIN = ("teacher", "image", "text", "dual")


def trained_run(config: dict[str, Any], folder: Path, **changes: Any) -> Ended:
    """Run a configuration, changed at dotted keys, to its end in ``folder``."""
    return checked_run(
        changed(config, {"run.dir": str(folder)} | changes), folder, "reward_model"
    )


def refused(
    config: dict[str, Any], folder: Path, program: str = "reward_model", **changes: Any
) -> str:
    """What a run says that must be refused before it trains."""
    ended = run(changed(config, {"run.dir": str(folder)} | changes), folder, program)
    assert ended.code in (1, 2), ended.output
    assert "Traceback" not in ended.output
    assert not (folder / "metrics.jsonl").exists()
    return ended.output


def alone(folder: Path, stage: str) -> dict[str, Any]:
    """Changes of a tower's configuration: it learns from images alone, in random views, or from
    captions alone.
    """
    folder.mkdir(exist_ok=True)
    rows = ScenesData(**DATA["kwargs"]).split("train")
    if stage == "image":
        for index, row in enumerate(rows):
            load_image(row["image"]).save(folder / f"{index}.png")
        data = {"format": "images", "path": str(folder), "augment": ["rand_augment"]}
    else:
        lines = [
            f"{caption}\thttp://somewhere"
            for row in rows
            for caption in row["references"]
        ]
        (folder / "train.tsv").write_text("\n".join(lines))
        data = {"format": "captions", "path": str(folder / "train.tsv")}
    return {
        "data": data
        | {"kwargs": {"val_fraction": 0.3} | ({"column": 0} if stage == "text" else {})}
    }


def best(folder: Path) -> float:
    return json.loads((folder / "result.json").read_text())["best_metric"]


def run_chain(folder: Path, **changes_of: dict[str, Any]) -> Ended:
    """Run the pipeline of the chain, of which some stages are changed."""
    configs = chain(folder)
    stages = {
        name: ("reward_model", changed(configs[name], changes_of.get(name, {})))
        for name in CHAIN
    }
    return run_arguments(
        ["run", str(write_pipeline(folder, **stages))], folder / "chain.log"
    )


@pytest.fixture(autouse=True)
def trusted_encoder(trust_of_one_test) -> None:
    """This process loads what the programs exported, too."""
    trust(["tests.encoders_for_tests:TinyImageEncoder"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Teacher, both towers and the whole student, by one command."""
    folder = tmp_path_factory.mktemp("chain")
    ended = run_chain(folder)
    assert ended.code == 0, ended.output
    return folder


def test_one_command_trains_the_chain(trained):
    for name in CHAIN:
        assert (trained / name / "result.json").is_file()
        assert [
            line["step"] for line in lines(trained / name) if "loss/total" in line
        ] == [
            1,
            2,
            3,
            4,
            5,
            6,
        ]
    model = {"manifest.json", "config.json", "model.safetensors"}
    assert (
        files(trained / "dual/export/best")
        == files(trained / "image/export/best")
        == model
    )
    assert files(trained / "teacher/export/best") == {
        "manifest.json",
        "open_clip_config.json",
        "open_clip_model.safetensors",
    }
    log = (trained / "chain.log").read_text()
    assert (
        "copied from the teacher and frozen: patch_embed.weight, cls_token, pos_embed"
        in log
    )
    assert "signature: distill_image[best," in log
    shutil.copy(trained / "chain.log", trained / "first.log")
    assert log.count("teacher: embedding 32 images once") == 2


def test_each_stage_keeps_what_it_freezes_and_exports_the_best_of_its_validations(
    trained,
):
    teacher = load_file(trained / "teacher/export/best/open_clip_model.safetensors")
    image = load_file(trained / "image/export/best/model.safetensors")
    text = load_file(trained / "text/export/best/model.safetensors")
    dual = load_file(trained / "dual/checkpoints/step-00000006/model.safetensors")
    assert torch.equal(image["patch_embed.weight"], teacher["visual.conv1.weight"])
    assert all(
        torch.equal(dual[f"model.text.{name}"], value) for name, value in text.items()
    )
    assert not torch.equal(dual["model.image.head.weight"], image["head.weight"])
    for name, key in (
        ("teacher", "val/retrieval_r1"),
        ("image", "val/teacher_cosine_image"),
        ("text", "val/teacher_cosine_text"),
        ("dual", "val/retrieval_r1"),
    ):
        values = [line[key] for line in lines(trained / name) if key in line]
        assert len(values) == (4 if name == "dual" else 3), (
            "a run that starts from trained towers validates them first"
        )
        assert best(trained / name) == max(values)
    losses = [
        line["loss/total"] for line in lines(trained / "image") if "loss/total" in line
    ]
    assert losses[-1] < losses[0]


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
    checked_run(config, folder, "reward_model", kill=kill)
    checked_run(config, folder, "reward_model")
    assert_same_run(folder, trained / stage)


def test_tuned_on_positives_it_is_a_model_for_pac_s(trained, tmp_path):
    folder, start = tmp_path / "tuned", trained / "teacher/export/best"
    trained_run(
        chain(trained)["pac"],
        folder,
        **{"train.trainable": "lora", "train.max_steps": 2},
    )
    logged = [line for line in lines(folder) if "loss/total" in line]
    for line in logged:
        terms = [line[f"positive/{name}"] for name in ("pairs", "images", "captions")]
        assert line["loss/total"] == pytest.approx(
            terms[0] + 0.05 * terms[1] + 0.1 * terms[2], rel=1e-5
        )
    values = [
        line["val/retrieval_r1"] for line in lines(folder) if "val/retrieval_r1" in line
    ]
    assert values[0] == pytest.approx(best(trained / "teacher"))
    losses = [line["val/loss"] for line in lines(folder) if "val/loss" in line]
    assert (len(losses), best(folder)) == (2, min(losses)), (
        "of the start and the end; lower is better"
    )
    before = load_file(start / "open_clip_model.safetensors")
    after = load_file(folder / "export/best/open_clip_model.safetensors")
    assert before.keys() == after.keys(), "updates are merged"
    row = ScenesData(**DATA["kwargs"]).split("val")[0]
    reward = PacScore(str(folder / "export/best"), prefix="")
    assert 0 <= reward(None, ["a red circle"], image=[row["image"]])[0] <= 2


def test_with_augmentation_the_teacher_sees_the_same_view(trained, tmp_path):
    config = changed(chain(trained)["image"], {"data.augment": ["horizontal", "crop"]})
    assert "images once" not in trained_run(config, tmp_path / "image").output
    smaller = {"model.kwargs.image_size": 16, "model.kwargs.patch_size": 16}
    assert "data.augment" in refused(config, tmp_path / "smaller", **smaller)


@pytest.mark.parametrize("stage", ["image", "text"])
def test_a_tower_learns_from_images_or_captions_alone(trained, tmp_path, stage):
    config = changed(chain(trained)[stage], alone(tmp_path / "data", stage))
    trained_run(config, tmp_path / "whole")
    metrics = [
        line
        for line in lines(tmp_path / "whole")
        if f"val/teacher_cosine_{stage}" in line
    ]
    assert [line["step"] for line in metrics] == [2, 4, 6]
    for line in metrics:
        values = [
            key for key in line if key.startswith("val/") and key != "val/seconds"
        ]
        assert values == [f"val/teacher_cosine_{stage}"], "there are no pairs"
    assert best(tmp_path / "whole") == max(
        line[f"val/teacher_cosine_{stage}"] for line in metrics
    )


def photos_of(
    folder: Path, of_row: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A configuration of photos in JSON lines, six of them for validation, each with ``of_row``;
    and the rows.
    """
    alone(folder, "image")
    names = [file.name for file in sorted(folder.glob("*.png"))]
    rows = [
        {"image": name, "split": "val" if n < 6 else "train"} | of_row
        for n, name in enumerate(names)
    ]
    return {"format": "jsonl", "path": str(folder / "photos.jsonl")}, rows


def write_rows(data: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    Path(data["path"]).write_text("\n".join(map(json.dumps, rows)))


def test_rows_of_other_formats_may_lack_captions_for_the_image_tower_only(
    trained, tmp_path
):
    data, rows = photos_of(tmp_path / "data", {"references": []})
    write_rows(data, rows)
    changes = {"data": data, "train.max_steps": 1}
    trained_run(chain(trained)["image"], tmp_path / "image", **changes)
    assert "images without references" in refused(
        chain(trained)["dual"], tmp_path / "dual", **changes
    )


def test_rows_that_lack_what_the_loss_reads_are_named_before_the_first_step(tmp_path):
    data, rows = photos_of(
        tmp_path / "data", {"references": ["a dog"], "negatives": [["a cat"]]}
    )
    del rows[-1]["negatives"]
    write_rows(data, rows)
    changes: dict[str, Any] = {
        "data": data,
        "negatives": {"count": 1, "source": "data"},
    }
    config, last = reward_model_config(tmp_path, "contrastive"), rows[-1]["image"]
    assert f"image '{last}' has no negatives for 'a dog'" in refused(
        config, tmp_path / "run", **changes
    )
    write_rows(data, [row | {"negatives": [[]]} for row in rows])
    changes |= {"eval.best_by": "val/hard_negatives"}
    said = refused(config, tmp_path / "run", **changes)
    assert "eval.best_by is 'val/hard_negatives', but" in said
    rows = [row | {"long_reference": "A dog. It runs."} for row in rows]
    rows[-1]["references"] = []
    write_rows(data, rows)
    changes = {
        "data": data | {"long_captions": True},
        "loss": {"short": 1.0, "pca_rank": 2},
    }
    said = refused(
        config, tmp_path / "run", **changes, **{"train.short_captions": "references"}
    )
    assert (
        f"1 of {len(rows) - 6} training images have no references besides the long one (first: "
        f"'{last}')" in said
    )


def test_another_teacher_refuses_to_resume(trained, tmp_path):
    folder, other = tmp_path / "image", tmp_path / "other"
    shutil.copytree(trained / "image", folder)
    trained_run(
        reward_model_config(other, "contrastive"),
        other,
        **{"train.max_steps": 1, "train.seed": 5},
    )
    resumed = {
        "teacher.name": str(other / "export/best"),
        "run.resume": str(folder / "checkpoints/step-00000004"),
    }
    ended = run(
        changed(chain(trained)["image"], {"run.dir": str(folder)} | resumed),
        folder,
        "reward_model",
    )
    assert ended.code == 1
    assert "'distill_image[best," in ended.output


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """The generated world as files in Karpathy's format, and the grids of a tiny encoder of them."""
    folder = tmp_path_factory.mktemp("photos")
    data, records = ScenesData(**DATA["kwargs"]), []
    (folder / "data/images").mkdir(parents=True)
    for split in ("train", "val"):
        for row in data.split(split):
            row["image"].render().save(folder / f"data/images/{row['image_id']}.png")
            sentences = [{"raw": caption} for caption in row["references"]]
            records.append(
                {
                    "imgid": row["image_id"],
                    "filename": f"{row['image_id']}.png",
                    "split": split,
                    "sentences": sentences,
                }
            )
    (folder / "data/dataset.json").write_text(json.dumps({"images": records}))
    return folder


@pytest.fixture(scope="module")
def dual(photos) -> Path:
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
    assert best(photos / "hybrid") > lines(photos / "hybrid")[0].get(
        "val/teacher_cosine_image", -1.0
    )
    score = LClipScore(backbone=str(dual))
    row = ScenesData(**DATA["kwargs"]).split("val")[0]
    assert 0 <= score([""], row["references"][:1], image=[row["image"]])[0] <= 2.5


def test_parts_with_random_weights(photos, tmp_path):
    """Image tower and text encoder in the shape of what is named, none of whose weights is used."""
    vision = {
        "image_size": 32,
        "patch_size": 16,
        "width": 32,
        "layers": 1,
        "head_width": 16,
    }
    config = pretrained_chain(photos)["dual"]
    config["model"]["image"] = {
        "encoder": "open_clip:ViT-B-32",
        "kwargs": {"vision_cfg": vision},
    }
    for part in ("image", "text"):
        config["model"][part] |= {"pretrained": False, "train_blocks": None}
    trained_run(
        config,
        tmp_path / "run",
        **{"train.max_steps": 1, "train.lr": 1e-9},
    )
    dual = PretrainedDual.from_pretrained(tmp_path / "run/export/best")
    assert dual.preprocessing.size == 32
    named = load_part(TextEncoder, config["model"]["text"]["encoder"]).state_dict()
    found = dual.text_encoder.state_dict()
    assert not any(
        torch.allclose(found[name], named[name], atol=1e-3)
        for name in named
        if "query.weight" in name
    )


@pytest.fixture(scope="module")
def positives(photos) -> Path:
    """Captions by a captioner, two samples an image, and drawings of references, by the real
    command.
    """
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, photos / "captioner")
    options = {
        "data": {
            "format": "karpathy",
            "path": str(photos / "data"),
            "image_root": "images",
        },
        "splits": ["train", "val"],
        "captions": {
            "target": "captioner",
            "kwargs": {"model": str(photos / "captioner"), "num_samples": 2},
        },
        "images": {"target": "tests.lab.unit.test_recaption:Painter"},
        "trust": ["tests.lab.unit.test_recaption:Painter"],
        "out": str(photos / "positives"),
    }
    assert (
        "| positive_captions |"
        in checked_run(options, photos / "positives", "positives").output
    )
    return photos / "positives/positives.jsonl"


def test_a_captioners_captions_tune_a_dual_of_frozen_parts(
    photos, dual, positives, tmp_path
):
    """By the captions alone."""
    config = pretrained_chain(photos)["dual"] | {
        "task": "positive_augmented",
        "loss": {"positive_images": 0.0},
        "model": {"init": str(dual)},
        "trust": ["tests.encoders_for_tests:TinyImageEncoder"],
        "data": {"format": "jsonl", "path": str(positives)},
    }
    trained_run(config, tmp_path / "tuned", **{"eval.best_by": "val/loss"})
    logged = lines(tmp_path / "tuned")
    assert best(tmp_path / "tuned") == min(
        line["val/loss"] for line in logged if "val/loss" in line
    )
    assert "positive/images" not in logged[-2]
