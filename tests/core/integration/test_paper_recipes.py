"""The recipes at the papers' scale, with models and data made small: each trains, and
what it exports is of use.
"""

import json
from pathlib import Path

import open_clip
import pytest
import torch
import yaml

from rewards.clip.l_clipscore import LClipScore
from rewards.clip.specs import Specs
from rl_caption.cli.main import main
from rl_caption.cli.programs import PROGRAMS
from rl_caption.config.shipped import shipped_configs
from rl_caption.data.base import load_image
from rl_caption.data.scenes import ScenesData
from tests.clip_for_tests import TINY, noise_image, weights
from tests.docs_for_tests import ROOT, commands
from tests.encoders_for_tests import save_text_encoder
from tests.hf_models_for_tests import save_model
from tests.reward_models_for_tests import CLIP, STUDENT, reward_model_config
from tests.training_for_tests import (
    DATA,
    changed,
    checked_arguments,
    checked_run,
    write_pipeline,
    write_stage,
)
from tests.zoo.language_models import tiny_gpt2

pytestmark = pytest.mark.slow

SMALL = {
    "data.num_workers": 0,
    "train.max_steps": 2,
    "train.batch_size": 8,
    "train.micro_batch_size": 4,
    "train.warmup_steps": 1,
    "train.threads": 1,
    "eval.every": 1,
    "eval.batch_size": 4,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Drawings in the layouts of the published data: ShareGPT4V's JSON, and JSON lines
    of web pages.
    """
    folder = tmp_path_factory.mktemp("world")
    data = ScenesData(**DATA["kwargs"])
    rows = [*data["val"], *data["train"]]
    (folder / "coco").mkdir()
    conversations = []
    pages = []
    negatives = []
    for number, row in enumerate(rows):
        image = f"coco/{number}.png"
        long = row["long_reference"]
        load_image(row["image"]).save(folder / image)
        turns = [
            {"from": "human", "value": "<image>"},
            {"from": "gpt", "value": long},
        ]
        conversations.append(
            {
                "id": str(number),
                "image": image,
                "conversations": turns,
            }
        )
        page = {
            "image": image,
            "references": row["references"][:1],
            "split": "val" if number < 6 else "train",
            "long_reference": long,
            "prompt": "A page",
        }
        pages.append(page)
        false = {
            "references": [long],
            "negatives": [[f"No. {long}"]],
        }
        negatives.append(page | false)
    (folder / "sharegpt4v.json").write_text(json.dumps(conversations))
    write_lines(folder / "pages.jsonl", pages)
    write_lines(folder / "negatives.jsonl", negatives)
    teacher = reward_model_config(folder / "clip", "contrastive")
    checked_run(teacher, folder / "clip", "reward_model")
    return folder


def write_lines(file, rows):
    file.write_text("\n".join(map(json.dumps, rows)))


STAGES = {
    "long_captions": ("student_image", "student_text", "student"),
    "guided": ("recaptions", "negatives", "scratch", "clip", "clip_negatives"),
}
"""Pipeline -> those of its stages that are made small."""


def guided(world, folder):
    """What makes the stage recaptions small, with a language model in ``folder``."""
    gpt2 = tiny_gpt2(folder / "gpt2", positions=160)
    return {
        "data.path": str(world / "pages.jsonl"),
        "model.image.kwargs": {"vision_cfg": CLIP["vision_cfg"]},
        "model.text": {
            "encoder": f"transformers:{gpt2}",
            "kwargs": {"bidirectional_blocks": 1},
            "train_blocks": 1,
        },
        "model.kwargs.embed_dim": 16,
    }


def shrunken(folder, **changes_of):
    """A function from the name of a recipe to its small configuration, whose runs and
    kin are in ``folder``.
    """
    shipped = shipped_configs()

    def small(name):
        pipelines = [one for one, stages in STAGES.items() if name in stages]
        if pipelines:
            text = write_stage(pipelines[0], name, folder / "stage.yaml").read_text()
        else:
            text = shipped[f"reward_models/{name}"].read_text("utf-8")
        for place in ("configs/reward_models/", "configs/"):
            text = text.replace(place, f"{folder}/")
        config = yaml.safe_load(text.replace("runs/", f"{folder}/runs/"))
        return changed(config, SMALL | changes_of.get(name, {}))

    return small


def run_stages(folder, names, **changes_of):
    """Train reward models one after the other, by one command."""
    small = shrunken(folder, **changes_of)
    stages = {name: ("reward_model", small(name)) for name in names}
    pipeline = write_pipeline(folder, **stages)
    checked_arguments(["run", str(pipeline)], folder / "log")


def scores_differ(reward, row, captions):
    first, second = reward(["", ""], captions, image=[row["image"]] * 2)
    return first != second


def test_specs_and_a_student_of_it_with_as_many_positions(world, tmp_path):
    data = {
        "data.path": str(world / "sharegpt4v.json"),
        "data.kwargs": {"val_images": 6},
    }
    student = data | {"model.kwargs": STUDENT | {"context_length": 248}}
    shape = {
        "init": str(world / "clip/export/best"),
        "context_length": 248,
        "keep_positions": 8,
    }
    run_stages(
        tmp_path,
        ("specs_long_clip", "specs", "student_image", "student_text", "student"),
        specs_long_clip=data
        | {
            "model": shape,
            "loss.pca_rank": 3,
            "train.freeze_positions": 8,
        },
        specs=data,
        student_image=student,
        student_text=student,
        student=data,
    )
    folder = tmp_path / "runs/student/dual/export/best"
    row = ScenesData(**DATA["kwargs"])["val"][0]
    long = row["long_reference"]
    captions = [long, f"{long} {'It is a red circle. ' * 20}"]
    for reward in (
        Specs(backbone=str(tmp_path / "runs/specs/model/export/best")),
        LClipScore(backbone=str(folder)),
        Specs(backbone=str(folder), truncate=True),
    ):
        assert scores_differ(reward, row, captions), "both read the long captions"


@pytest.mark.parametrize("which", ["recaptions", "scratch"])
def test_semantic_guidance_on_recaptions_and_then_on_written_negatives(
    which, world, tmp_path
):
    first = guided(world, tmp_path)
    second = {"data.path": str(world / "negatives.jsonl")}
    if which == "recaptions":
        second["model.text.train_blocks"] = 1
    else:
        first["model.text.encoder"] = save_text_encoder(tmp_path / "bert")
        del first["model.text"]
        second["model.text.train_blocks"] = None
        second["model.init"] = str(tmp_path / "runs/guided/scratch/export/best")
    stages = {which: first, "negatives": second}
    run_stages(tmp_path, stages, **stages)
    metrics = (tmp_path / "runs/guided/negatives/metrics.jsonl").read_text()
    assert "val/hard_negatives" in metrics


def run_page(name, small):
    """Run the commands of the page with a word, in this folder, with further options."""
    for command in commands(ROOT / "docs/papers.md"):
        words = command.words
        if name not in words or words[0] != "rl-caption":
            continue
        for key, value in small.items():
            stage = key.partition(".")[0]
            if words[1] == stage or (words[1] == "run" and stage not in PROGRAMS):
                option = key.removeprefix(f"{words[1]}.")
                text = value if isinstance(value, str) else json.dumps(value)
                words = [*words, f"--{option}={text}"]
        assert main(words[1:]) == 0, words


def test_a_student_of_coco_in_an_afternoon_by_the_commands_of_the_page(
    world, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    images = [
        {
            "cocoid": number,
            "filename": f"{number}.png",
            "split": ("test", "val", "train")[min(number // 3, 2)],
            "sentences": [{"raw": f"drawing {number}"}],
        }
        for number in range(14)
    ]
    Path("data/coco").mkdir(parents=True)
    Path("data/coco/images").symlink_to(world / "coco")
    Path("data/coco/dataset_coco.json").write_text(json.dumps({"images": images}))
    small = {
        "lclip.teacher.name": str(world / "clip/export/best"),
        "lclip.teacher.pretrained": None,
        "lclip.teacher.precision": "fp32",
        "lclip.model.kwargs": STUDENT,
        "mix.model.init": str(save_model("blip", tmp_path / "blip")),
        "mix.rollout.max_new_tokens": 4,
    }
    for stage in ("lclip", "mix"):
        small |= {f"{stage}.{key}": value for key, value in SMALL.items()}
    run_page("lclip_coco", small)
    student = LClipScore(backbone="runs/lclip_coco/lclip/export/best")
    (score,) = student([""], ["drawing 0"], image=["data/coco/images/0.png"])
    assert 0 <= score <= 2.5
    model = ["--model", "runs/lclip_coco/mix/export/best"]
    words = ["evaluate", "--config", "coco_evaluate_photos", *model]
    assert main([*words, "--metrics", "cider", "--bootstrap", "10"]) == 0


def test_released_weights_score_captions_by_the_commands_of_the_page(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "ViT-B-32", TINY)
    Path("photos").mkdir()
    texts = {"a": "a dog", "b": "two cats"}
    for number, name in enumerate(texts):
        noise_image(number).save(f"photos/{name}.png")
    references = {name: [f"{text} outside"] for name, text in texts.items()}
    Path("captions.json").write_text(json.dumps(texts))
    Path("references.json").write_text(json.dumps(references))
    page = commands(ROOT / "docs/papers.md")
    scores = [
        one.words
        for one in page
        if "--captions captions.json" in one.text and "checkpoints/" in one.text
    ]
    assert len(scores) == 3
    for words in scores:
        with pytest.raises(SystemExit):
            main(words[1:])
        assert "https://" in capsys.readouterr().err

    Path("checkpoints").mkdir()
    state = weights()
    torch.save({"state_dict": state}, "checkpoints/clip_ViT-B-32.pth")
    table = torch.randn(248, 16, generator=torch.Generator().manual_seed(1))
    tables = {
        "positional_embedding": table,
        "positional_embedding_res": table,
    }
    torch.save(state | tables, "checkpoints/spec.pt")
    for words in scores:
        assert main(words[1:]) == 0, capsys.readouterr().err
    result = json.loads(Path("specs.json").read_text())
    assert result["scores"].keys() == texts.keys()
