"""The recipes at the papers' scale, with models and data made small: each trains, and what it
exports is of use.
"""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import yaml
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    SwinConfig,
    SwinModel,
    ViTImageProcessor,
)

from rewards.clip.dual import MODEL_TYPE
from rewards.clip.l_clipscore import LClipScore
from rewards.clip.specs import Specs
from rl_caption.cli.main import main
from rl_caption.cli.programs import PROGRAMS
from rl_caption.config.shipped import shipped_configs
from rl_caption.data.base import load_image
from rl_caption.data.scenes import ScenesData
from tests.clip_for_tests import TINY, noise_image, weights
from tests.docs_for_tests import ROOT, commands
from tests.encoders_for_tests import save_text_encoder, save_vit
from tests.hf_models_for_tests import save_model, with_template
from tests.reward_models_for_tests import CLIP, STUDENT, reward_model_config
from tests.training_for_tests import (
    DATA,
    changed,
    checked_run,
    run,
    run_arguments,
    write_stage,
)
from tests.zoo.language_models import byte_tokenizer, tiny_gpt2, tiny_regressor
from tests.zoo.vision_language import tiny_qwen2_vl

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
def world(tmp_path_factory) -> Path:
    """Drawings in the layouts of the published data: ShareGPT4V's JSON, and JSON lines of web
    pages.
    """
    folder = tmp_path_factory.mktemp("world")
    rows = [
        *ScenesData(**DATA["kwargs"]).split("val"),
        *ScenesData(**DATA["kwargs"]).split("train"),
    ]
    (folder / "coco").mkdir()
    conversations, pages = [], []
    for number, row in enumerate(rows):
        load_image(row["image"]).save(folder / f"coco/{number}.png")
        turns = [
            {"from": "human", "value": "<image>"},
            {"from": "gpt", "value": row["long_reference"]},
        ]
        conversations.append(
            {"id": str(number), "image": f"coco/{number}.png", "conversations": turns}
        )
        page = {
            "image": f"coco/{number}.png",
            "references": row["references"][:1],
            "split": "val" if number < 6 else "train",
        }
        pages.append(
            page | {"long_reference": row["long_reference"], "prompt": "A page"}
        )
    (folder / "sharegpt4v.json").write_text(json.dumps(conversations))
    (folder / "pages.jsonl").write_text("\n".join(map(json.dumps, pages)))
    negatives = [
        page
        | {
            "references": [page["long_reference"]],
            "negatives": [[f"No. {page['long_reference']}"]],
        }
        for page in pages
    ]
    (folder / "negatives.jsonl").write_text("\n".join(map(json.dumps, negatives)))
    teacher = reward_model_config(
        folder / "clip", "contrastive", **{"model.kwargs": CLIP}
    )
    checked_run(teacher, folder / "clip", "reward_model")
    return folder


STAGES = {
    "long_captions": ("student_image", "student_text", "student"),
    "guided": ("recaptions", "negatives", "scratch", "clip", "clip_negatives"),
    "icc": ("captioner", "dual_encoder"),
}
"""Pipeline -> those of its stages that are made small."""


def guided(world: Path, folder: Path) -> dict[str, Any]:
    """What makes the stage recaptions small, with a language model in ``folder``."""
    gpt2 = tiny_gpt2(folder / "gpt2", positions=160)
    return {
        "data.path": str(world / "pages.jsonl"),
        "model.image.kwargs": {
            "vision_cfg": {
                "image_size": 32,
                "patch_size": 16,
                "width": 32,
                "layers": 1,
                "head_width": 16,
            }
        },
        "model.text": {
            "encoder": f"transformers:{gpt2}",
            "kwargs": {"bidirectional_blocks": 1},
            "train_blocks": 1,
        },
        "model.kwargs.embed_dim": 16,
    }


def shrunken(folder: Path, **changes_of: dict[str, Any]) -> Callable[[str], Path]:
    """A function from the name of a recipe to its small copy in ``folder``, where its runs and its
    kin are, too.
    """

    shipped = shipped_configs()

    def write(name: str) -> Path:
        file = folder / f"{name}.yaml"
        pipelines = [one for one, stages in STAGES.items() if name in stages]
        if pipelines:
            text = write_stage(pipelines[0], name, file).read_text()
        else:
            text = shipped[f"reward_models/{name}"].read_text("utf-8")
        for place in ("configs/reward_models/", "configs/"):
            text = text.replace(place, f"{folder}/")
        config = changed(
            yaml.safe_load(text.replace("runs/", f"{folder}/runs/")),
            SMALL | changes_of.get(name, {}),
        )
        file.write_text(yaml.safe_dump(config))
        return file

    return write


def run_stages(folder: Path, files: dict[str, Path]) -> None:
    """Train reward models one after the other, by one command."""
    listed = {name: {"reward_model": str(file)} for name, file in files.items()}
    (folder / "pipeline.yaml").write_text(
        yaml.safe_dump({"stages": listed}, sort_keys=False)
    )
    ended = run_arguments(["run", str(folder / "pipeline.yaml")], folder / "log")
    assert ended.code == 0, ended.output


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
    write = shrunken(
        tmp_path,
        specs_long_clip=data
        | {"model": shape, "loss.pca_rank": 3, "train.freeze_positions": 8},
        specs=data,
        student_image=student,
        student_text=student,
        student=data,
    )
    names = ("specs_long_clip", "specs", "student_image", "student_text", "student")
    files = {name: write(name) for name in names}
    run_stages(tmp_path, files)
    folder = tmp_path / "runs/student/dual/export/best"
    config = json.loads((folder / "config.json").read_text())
    assert config["context_length"] == 248
    row = ScenesData(**DATA["kwargs"]).split("val")[0]
    longer = f"{row['long_reference']} {'It is a red circle. ' * 20}"
    specs = Specs(backbone=str(tmp_path / "runs/specs/model/export/best"))
    for reward in (
        specs,
        LClipScore(backbone=str(folder)),
        Specs(backbone=str(folder), truncate=True),
    ):
        first, second = reward(
            ["", ""], [row["long_reference"], longer], image=[row["image"]] * 2
        )
        assert first != second, "both read the long captions"

    other = [
        "reward_model",
        "--config",
        str(files["student"]),
        "--teacher.name",
        str(world / "clip/export/best"),
    ]
    ended = run_arguments(
        [*other, "--run.dir", str(tmp_path / "of_clip")], tmp_path / "log"
    )
    assert ended.code != 0, "the towers are of another teacher"
    assert "image_init" in ended.output


@pytest.mark.parametrize("teacher", ["pac", "guidance"])
def test_a_student_of_another_teacher(teacher, world, tmp_path):
    if teacher == "pac":
        config = reward_model_config(
            tmp_path / "teacher",
            "positive_augmented",
            **{"data.kwargs.positives": True},
        )
        config["model"] = {"init": str(world / "clip/export/best")}
        positions = 24
    else:
        config = yaml.safe_load(
            shrunken(tmp_path, recaptions=guided(world, tmp_path))(
                "recaptions"
            ).read_text()
        )
        positions = 128
    checked_run(config, Path(config["run"]["dir"]), "reward_model")
    student = {
        "data.path": str(world / "sharegpt4v.json"),
        "data.kwargs": {"val_images": 6},
    }
    tower = student | {"model.kwargs": STUDENT | {"context_length": positions}}
    teacher = {"teacher.name": f"{config['run']['dir']}/export/best"}
    towers = dict.fromkeys(("student_image", "student_text"), tower | teacher)
    write = shrunken(tmp_path, student=student | teacher, **towers)
    run_stages(tmp_path, {name: write(name) for name in (*towers, "student")})
    row = ScenesData(**DATA["kwargs"]).split("val")[0]
    score = LClipScore(backbone=str(tmp_path / "runs/student/dual/export/best"))
    captions = row["references"][:2]
    first, second = score(["", ""], captions, image=[row["image"]] * 2)
    assert first != second
    written = yaml.safe_load((tmp_path / "runs/student/text/config.yaml").read_text())
    assert written["teacher"]["name"] == f"{config['run']['dir']}/export/best"


def test_a_recipe_whose_data_are_missing_says_what_they_take_before_any_run(tmp_path):
    write = shrunken(tmp_path, specs_long_clip={"loss.pca_rank": 3})
    ended = run_arguments(
        ["reward_model", "--config", str(write("specs_long_clip"))], tmp_path / "log"
    )
    assert ended.code == 1
    for part in (
        "share-captioner_coco_lcs_sam_1246k_1107.json",
        "1.5 GB",
        "SA-1B",
    ):
        assert part in ended.output
    assert not [*tmp_path.glob("runs/**/metrics.jsonl")]


@pytest.mark.parametrize("which", ["recaptions", "scratch", "clip"])
def test_semantic_guidance_on_recaptions_and_then_on_written_negatives(
    which, world, tmp_path
):
    first = guided(world, tmp_path)
    second = {"data.path": str(world / "negatives.jsonl")}
    last = "clip_negatives" if which == "clip" else "negatives"
    if which == "recaptions":
        second["model.text.train_blocks"] = 1
    elif which == "scratch":
        first["model.text.encoder"] = save_text_encoder(tmp_path / "bert")
        del first["model.text"]
        second["model.text.train_blocks"] = None
        second["model.init"] = str(tmp_path / "runs/guided/scratch/export/best")
    else:
        start = {"init": str(world / "clip/export/best"), "context_length": 124}
        model = start | {"keep_positions": 4}
        first = {"data.path": str(world / "pages.jsonl"), "model": model}
    write = shrunken(tmp_path, **{which: first, last: second})
    run_stages(tmp_path, {name: write(name) for name in (which, last)})
    metrics = (tmp_path / f"runs/guided/{last}/metrics.jsonl").read_text()
    assert "val/hard_negatives" in metrics


def run_page(name: str, small: dict[str, Any]) -> None:
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


def test_a_clip_is_fine_tuned_on_new_captions_by_the_commands_of_the_page(
    world, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("data/web").mkdir(parents=True)
    Path("data/web/coco").symlink_to(world / "coco")
    pages = map(json.loads, (world / "pages.jsonl").read_text().splitlines())
    rows = [
        {key: page[key] for key in ("image", "references", "prompt", "split")}
        for page in pages
    ]
    Path("data/web/pages.jsonl").write_text("\n".join(map(json.dumps, rows)))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    writer = with_template(tiny_gpt2(tmp_path / "gpt2", positions=2048), template)
    small = {
        "recaption.recaptioner.kwargs.model": str(tiny_qwen2_vl(tmp_path / "vlm")),
        "recaption.recaptioner.kwargs.dtype": "float32",
        "recaption.recaptioner.kwargs.max_new_tokens": 4,
        "negatives.writer.kwargs.model": writer,
        "negatives.writer.kwargs.precision": "fp32",
        "negatives.writer.kwargs.max_new_tokens": 4,
        "clip.model.name": None,
        "clip.model.init": str(world / "clip/export/best"),
        "clip.model.context_length": 124,
        "clip.model.keep_positions": 4,
    }
    for stage in ("clip", "clip_negatives"):
        small |= {f"{stage}.{key}": value for key, value in SMALL.items()}
    run_page("configs/recaption_web.yaml", small)
    run_page("configs/negatives_web.yaml", small)
    run_page("clip_negatives", small)
    assert Path("runs/guided/clip_negatives/export/best").is_dir()


def in_parquet(folder: Path, world: Path) -> dict[str, Any]:
    """The web pages as a Parquet file for each split, with images as bytes; the changes that read
    it.
    """
    datasets = pytest.importorskip("datasets")
    pages = [
        json.loads(line) for line in (world / "pages.jsonl").read_text().splitlines()
    ]
    (folder / "data").mkdir()
    for split in ("train", "val"):
        rows = [page for page in pages if page["split"] == split]
        images = [
            {"bytes": (world / row["image"]).read_bytes(), "path": None} for row in rows
        ]
        table = datasets.Dataset.from_dict(
            {"jpg": images, "txt": [row["references"][0] for row in rows]}
        )
        table.to_parquet(folder / f"data/{split}.parquet")
    columns = {"image": "jpg", "references": "txt"}
    return {
        "data.format": "hub",
        "data.path": str(folder / "data"),
        "data.columns": columns,
    }


def test_a_dual_encoder_of_two_parts_for_filtered_data_in_parquet(world, tmp_path):
    changes = in_parquet(tmp_path, world) | {
        "model.image.encoder": save_vit(tmp_path / "vit"),
        "model.text.encoder": save_text_encoder(tmp_path / "bert"),
        "model.kwargs.context_length": 40,
    }
    config = yaml.safe_load(
        shrunken(tmp_path, dual_encoder=changes)("dual_encoder").read_text()
    )
    folder = Path(config["run"]["dir"])
    checked_run(config, folder, "reward_model")
    assert (
        json.loads((folder / "export/best/config.json").read_text())["model_type"]
        == MODEL_TYPE
    )


def test_swin_and_gpt2_are_joined_as_the_page_says_and_trained(
    world, tmp_path, monkeypatch
):
    swin = SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        window_size=4,
    )
    torch.manual_seed(0)
    SwinModel(swin).save_pretrained(tmp_path / "swin")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(
        tmp_path / "swin"
    )
    tokenizer = byte_tokenizer("<|endoftext|>", "<|endoftext|>", None, starts=False)
    end = tokenizer.eos_token_id
    shape = {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 48,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **shape)).save_pretrained(
        tmp_path / "gpt2"
    )
    tokenizer.save_pretrained(tmp_path / "gpt2")
    code = python_of("papers.md", "swin_gpt2").replace(
        "microsoft/swin-base-patch4-window7-224-in22k", str(tmp_path / "swin")
    )
    monkeypatch.chdir(tmp_path)
    exec(code.replace('"gpt2"', repr(str(tmp_path / "gpt2"))), {})
    changes = in_parquet(tmp_path, world) | {
        "model.init": str(tmp_path / "models/swin_gpt2")
    }
    config = yaml.safe_load(
        shrunken(tmp_path, captioner=changes)("captioner").read_text()
    )
    folder = Path(config["run"]["dir"])
    ended = run(config, folder, "xe")
    assert ended.code == 0, ended.output
    words = [
        "--model",
        str(folder / "export/best"),
        "--out",
        str(tmp_path / "scores"),
        "--metrics",
        "cider",
    ]
    for key, value in changes.items():
        if key.startswith("data."):
            words += [
                f"--{key}",
                json.dumps(value) if isinstance(value, dict) else value,
            ]
    ended = run_arguments(["evaluate", *words, "--split", "val"], tmp_path / "log")
    assert ended.code == 0, ended.output
    captions = json.loads((tmp_path / "scores/predictions.json").read_text())
    assert [row["image_id"] for row in captions] == [
        f"val/{number}" for number in range(6)
    ]


def write_shards(folder: Path, count: int) -> None:
    """Photos and captions in tar shards, as img2dataset writes them."""
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"train-{shard:05d}.tar", "w") as archive:
            for number in range(shard, count, 2):
                pixels = io.BytesIO()
                noise_image(number, (16, 16)).save(pixels, "JPEG")
                text = f"caption {number} of a drawing".encode()
                for suffix, data in (("jpg", pixels.getvalue()), ("txt", text)):
                    entry = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))


def test_shards_are_filtered_by_clipscore_then_icc_and_trained_on_by_one_command(
    world, tmp_path
):
    pytest.importorskip("datasets")
    write_shards(tmp_path / "laion", 2000)
    clip = {"backbone": str(world / "clip/export/best")}
    icc = {"model": str(tiny_regressor(tmp_path / "regressor"))}
    changes = {
        "clip_icc.data.path": str(tmp_path / "laion"),
        "clip_icc.data.kwargs": {
            "splits": {"train": "train[100:]", "val": "train[:100]"}
        },
        "clip_icc.data.num_workers": 0,
        "clip_icc.scores": {
            "clip": {"target": "clipscore", "kwargs": clip},
            "icc": {"target": "icc", "kwargs": icc},
        },
        "clip_icc.select": [
            {"score": "clip", "top": 0.5},
            {"score": "icc", "top": 300},
        ],
        "dual_encoder.model.image.encoder": save_vit(tmp_path / "vit"),
        "dual_encoder.model.text.encoder": save_text_encoder(tmp_path / "bert"),
        "dual_encoder.model.kwargs.context_length": 40,
    }
    changes |= {f"dual_encoder.{key}": value for key, value in SMALL.items()}
    words = [
        "run",
        "icc",
        "--only",
        "dual_encoder",
        "--run.root",
        str(tmp_path / "out"),
    ]
    for key, value in changes.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"--{key}={text}")
    ended = run_arguments(words, tmp_path / "log")
    assert ended.code == 0, ended.output
    kept = [
        json.loads(line)
        for line in (tmp_path / "out/clip_icc/kept.jsonl").read_text().splitlines()
    ]
    assert sum(row["split"] == "train" for row in kept) == 300
    report = (tmp_path / "out/clip_icc/report.md").read_text()
    assert "950 | 950" in report
    assert ",logit]" in report, "ICC ranks unclipped"
    assert (tmp_path / "out/dual_encoder/export/best/config.json").is_file()


def test_captions_of_cc3m_are_divided_as_the_paper_says(tmp_path, monkeypatch):
    folder = tmp_path / "data/cc3m_595k"
    folder.mkdir(parents=True)
    rows = [{"caption": f"caption {number}"} for number in range(594_100)]
    (folder / "metadata.json").write_text(json.dumps(rows))
    monkeypatch.chdir(tmp_path)
    exec(python_of("papers.md", "cc3m_595k"), {})
    trained, held = (
        (folder / f"{split}.txt").read_text().splitlines() for split in ("train", "val")
    )
    assert (len(trained), len(held)) == (476_000, 118_000)
    assert not {*trained} & {*held}


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
    tables = {"positional_embedding": table, "positional_embedding_res": table}
    torch.save(state | tables, "checkpoints/spec.pt")
    for words in scores:
        assert main(words[1:]) == 0, capsys.readouterr().err
    result = json.loads(Path("specs.json").read_text())
    assert result["scores"].keys() == texts.keys()
    lines = [
        json.dumps({"image": f"photos/{name}.png", "caption": text})
        for name, text in texts.items()
    ]
    Path("captions.jsonl").write_text("\n".join(lines))
    (words,) = [words for words in scores if "specs" in words]
    assert main([word.replace(".json", ".jsonl") for word in words[1:]]) == 0
    again = json.loads(Path("specs.jsonl").read_text())
    assert list(again["scores"].values()) == list(result["scores"].values())


def test_people_are_a_row_as_the_page_says(tmp_path, monkeypatch):
    captions = [f"caption {number}" for number in range(5)]
    images = [
        {
            "cocoid": number,
            "filename": "a.jpg",
            "split": "test",
            "sentences": [{"raw": text} for text in captions],
        }
        for number in range(20)
    ]
    (tmp_path / "data/coco").mkdir(parents=True)
    (tmp_path / "data/coco/dataset_coco.json").write_text(
        json.dumps({"images": images})
    )
    monkeypatch.chdir(tmp_path)
    exec(python_of("papers.md", "humans"), {})
    humans, others = (
        json.loads(Path(f"{name}.json").read_text()) for name in ("humans", "others")
    )
    assert len({row["caption"] for row in humans}) > 1
    for row in humans:
        assert sorted([row["caption"], *others[row["image_id"]]]) == captions


def python_of(page: str, word: str) -> str:
    """The one block of Python of a page that has a word."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (code,) = [
        block.partition("```")[0]
        for block in text.split("```python\n")[1:]
        if word in block.partition("```")[0]
    ]
    return code
