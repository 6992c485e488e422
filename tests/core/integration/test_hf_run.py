"""Pretrained captioners in the programs: cross-entropy, self-critical training, a kill and a
resume, evaluation.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from rl_caption.captioners.config import Decoding
from rl_caption.captioners.huggingface import ADAPTERS_FOLDER, SETTINGS
from rl_caption.captioners.loading import load_captioner, weights_hash
from rl_caption.cli.main import main
from rl_caption.lab.config import ShareConfig
from rl_caption.lab.share import share
from rl_caption.programs.report.read import ReportError
from tests.captioners_for_tests import REFERENCES
from tests.conftest import REPOSITORY
from tests.hf_models_for_tests import PROMPT, save_model
from tests.training_for_tests import (
    Kill,
    assert_same_run,
    checked_run,
    lines,
    run,
    run_arguments,
    scst_config,
    weights,
    xe_config,
)

pytestmark = pytest.mark.slow


class Letters:
    """A judge that any change of captions moves: the number of letters, or with ``fewest`` of those
    missing to 100.
    """

    __name__ = signature = "letters"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, 100.0)

    def __init__(self, fewest: bool = False) -> None:
        self.fewest = fewest

    def __call__(
        self, prompts: Any, completions: list[str], **columns: Any
    ) -> list[float]:
        """One number a caption."""
        counts = [
            float(sum(letter.isalpha() for letter in caption))
            for caption in completions
        ]
        return [100 - count for count in counts] if self.fewest else counts


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Any]:
    """Photos of one colour, a colour a caption, in the words of the tiny models: a few steps learn
    them.
    """
    folder = tmp_path_factory.mktemp("photos")
    records = []
    for number in range(12):
        shade = (number % 4 * 80, number * 10, 255 - number % 4 * 80)
        Image.new("RGB", (20, 24), shade).save(folder / f"{number}.png")
        split = "train" if number < 8 else "val"
        records.append(
            {
                "image": f"{number}.png",
                "references": REFERENCES[number % 4],
                "split": split,
            }
        )
    (folder / "photos.jsonl").write_text(
        "\n".join(json.dumps(record) for record in records)
    )
    return {"format": "jsonl", "path": str(folder / "photos.jsonl")}


def evaluate(
    model: Path, data: dict[str, Any], folder: Path, max_new_tokens: int
) -> dict[str, str]:
    """Captions that ``evaluate`` finds with nothing but the exported folder."""
    config = {
        "model": str(model),
        "data": data,
        "split": "val",
        "metrics": ["cider"],
        "tokenizer": "python",
        "decode": {"max_new_tokens": max_new_tokens},
        "out": str(folder),
    }
    checked_run(config, folder, "evaluate")
    return captions(folder / "predictions.json")


def captions(file: Path) -> dict[str, str]:
    return {
        record["image_id"]: record["caption"] for record in json.loads(file.read_text())
    }


def validated(run_folder: Path) -> dict[str, str]:
    """Captions of the validation whose model was exported as the best, which is a trained one."""
    best = json.loads((run_folder / "result.json").read_text())["best_step"]
    assert best > 0, (
        "nothing was learned: the best model is the one that training started from"
    )
    return captions(run_folder / "eval" / f"step-{best:08d}" / "predictions.json")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    return save_model("vit_gpt2", tmp_path_factory.mktemp("vit_gpt2") / "start")


@pytest.mark.parametrize(
    ("family", "tower"), [("vit_gpt2", "encoder."), ("smolvlm", "model.vision_model.")]
)
def test_from_cross_entropy_to_self_critical_training_to_evaluation(
    family, tower, data, tmp_path
):
    pair = save_model(family, tmp_path / "start")
    model = {
        "name": "huggingface",
        "init": str(pair),
        "prompt": PROMPT,
        "freeze": [f"{tower}*"],
    }
    xe, scst = tmp_path / "xe", tmp_path / "scst"
    options: dict[str, Any] = {"train.max_steps": 12, "train.lr": 0.02, "eval.every": 6}
    checked_run(xe_config(xe, **{"model": model, "data": data, **options}), xe)
    before, after = weights(pair), weights(xe / "export/best")
    assert before.keys() == after.keys()
    changed = {name for name, value in before.items() if not value.equal(after[name])}
    assert changed
    assert not any(name.startswith(tower) for name in changed)
    learned = evaluate(xe / "export/best", data, tmp_path / "evaluation", 12)
    assert learned == validated(xe)
    sharing = ShareConfig(
        path=str(xe),
        out=str(tmp_path / "shared"),
        evaluation=str(tmp_path / "evaluation"),
    )
    assert "Split `val`" in (Path(share(sharing)) / "README.md").read_text()
    with pytest.raises(ReportError, match="not of the weights"):
        share(sharing.replace(path=str(pair), out=str(tmp_path / "shared_start")))

    options = {
        "data": data,
        "train.max_steps": 2,
        "eval.every": 1,
        "model.gradient_checkpointing": True,
    }
    options["rollout.max_new_tokens"] = 12
    checked_run(scst_config(scst, xe / "export/best", **options), scst, "scst")
    assert json.loads((scst / "export/best" / SETTINGS).read_text())["prompt"] == PROMPT
    assert {line["step"] for line in lines(scst) if "reward/total" in line} == {1, 2}
    start = captions(scst / "eval/step-00000000/predictions.json")
    assert start == learned, (
        "self-critical training starts from the captioner and prompt that were exported"
    )


@pytest.mark.parametrize(("family", "fewest"), [("blip2", False), ("qwen2_5_vl", True)])
def test_adapters_are_resumed_bit_for_bit_and_exported_into_one_plain_model(
    family, fewest, data, tmp_path
):
    pytest.importorskip("peft")
    start, whole = save_model(family, tmp_path / "start"), tmp_path / "whole"
    lora = {"r": 4, "alpha": 16.0, "dropout": 0.1, "export_adapters": True}
    model = {
        "name": "huggingface",
        "init": str(start),
        "prompt": PROMPT,
        "lora": lora,
        "gradient_checkpointing": True,
    }
    # Four steps do not raise CIDEr-D above 0; captions that change are better by this judge.
    judge = {"target": f"{__name__}:Letters", "kwargs": {"fewest": fewest}}
    monitor = {"judges": {"letters": judge}, "best_by": "letters"}
    options = {"model": model, "data": data, "train.lr": 0.05, "monitor": monitor}
    checked_run(scst_config(whole, start, **options), whole, "scst")
    killed = tmp_path / "killed"
    for kill in (Kill("rl_caption.training.run:Run.begin_step", call=3), None):
        checked_run(scst_config(killed, start, **options), killed, "scst", kill=kill)
    assert_same_run(killed, whole)
    before, after = weights(start), weights(whole / "export/best")
    assert before.keys() == after.keys(), "no trace of adapters"
    assert evaluate(
        whole / "export/best", data, tmp_path / "evaluation", 8
    ) == validated(whole)
    checkpoint = weights(whole / "checkpoints/step-00000004")
    changed = {
        name.removeprefix("model.")
        for name in checkpoint
        if "lora_B" in name and checkpoint[name].any()
    }
    assert changed
    assert all(".q_proj." in name or ".v_proj." in name for name in changed)
    alone = {
        name.removeprefix("base_model.model.")
        for name in weights(whole / "export/best" / ADAPTERS_FOLDER)
    }
    assert alone >= {name.replace(".default.", ".") for name in changed}


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl"])
def test_a_whole_vision_language_model_is_resumed_bit_for_bit(family, data, tmp_path):
    """In cross-entropy, and in DiCO from what it made; the tower is trained, too."""
    start = save_model(family, tmp_path / "start")
    model = {"name": "huggingface", "init": str(start), "prompt": PROMPT, "freeze": []}
    dico = {
        "train.objective": "dico",
        "train.advantage": "mean",
        "train.kl_coef": 0.0,
        "data": data,
    }

    def config(program: str, folder: Path) -> dict[str, Any]:
        if program == "xe":
            return xe_config(folder, model=model, data=data)
        init = tmp_path / "xe" / "export/last"
        return scst_config(folder, init, model=model | {"init": str(init)}, **dico)

    for program in ("xe", "scst"):
        whole, killed = tmp_path / program, tmp_path / f"{program}_killed"
        checked_run(config(program, whole), whole, program)
        for kill in (Kill("rl_caption.training.run:Run.begin_step", call=3), None):
            checked_run(config(program, killed), killed, program, kill=kill)
        assert_same_run(killed, whole)
    before, after = weights(start), weights(tmp_path / "scst" / "export/last")
    changed = [name for name, value in before.items() if not value.equal(after[name])]
    assert any("vision" in name or "visual" in name for name in changed)


@pytest.mark.parametrize("family", ["smolvlm", "qwen2_5_vl"])
def test_videos_are_captioned_by_several_frames(family, tmp_path):
    records = []
    for number in range(8):
        video = tmp_path / f"video{number}"
        video.mkdir()
        for frame in range(5):
            Image.new("RGB", (32, 32), (number * 20, frame * 40, 90)).save(
                video / f"{frame}.png"
            )
        split = "train" if number < 4 else "val"
        records.append(
            {"image": video.name, "references": REFERENCES[number % 4], "split": split}
        )
    (tmp_path / "videos.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = {"format": "jsonl", "path": str(tmp_path / "videos.jsonl"), "num_frames": 2}
    model = {
        "name": "huggingface",
        "init": str(save_model(family, tmp_path / "start")),
        "prompt": PROMPT,
    }
    xe, scst = tmp_path / "xe", tmp_path / "scst"
    options: dict[str, Any] = {
        "data": data,
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
    }
    checked_run(
        xe_config(
            xe,
            model=model,
            **options | {"train.max_steps": 12, "train.lr": 0.02, "eval.every": 6},
        ),
        xe,
    )
    learned = evaluate(xe / "export/best", data, tmp_path / "evaluation", 12)
    assert learned == validated(xe)
    options |= {"train.max_steps": 1, "rollout.max_new_tokens": 12}
    checked_run(scst_config(scst, xe / "export/best", **options), scst, "scst")
    assert captions(scst / "eval/step-00000000/predictions.json") == learned
    captioner = load_captioner(xe / "export/best")
    pictures = [
        len(
            captioner.preprocess(
                [{"image_id": "0", "image": frames, "references": []}]
            )["input_ids"][0]
        )
        for frames in ([Image.new("RGB", (32, 32))] * 2, [Image.new("RGB", (32, 32))])
    ]
    assert pictures[0] > pictures[1], "each frame has tokens of its own"


def test_moments_of_one_block_are_not_given_to_another_of_the_same_shapes(
    pair, data, tmp_path
):
    folder = tmp_path / "run"
    for frozen, code in ((0, 0), (1, 1)):
        model = {
            "name": "huggingface",
            "init": str(pair),
            "freeze": ["enc*", "*.w?e.*", "*.ln_f.*", f"*.h.{frozen}.*"],
        }
        options = {
            "model": model,
            "data": data,
            "train.max_steps": 1 + frozen,
            "run.resume": True,
        }
        ended = run(xe_config(folder, **options), folder)
        assert ended.code == code, ended.output
    assert "'model.decoder.transformer.h.0." in ended.output


MESSAGES = [
    {"role": "system", "content": "describe the image"},
    {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "what do you see ?"}],
    },
]


@pytest.fixture(scope="module")
def asked(data, tmp_path_factory) -> dict[str, Any]:
    """The photos, every other row with a prompt of its own."""
    file = Path(data["path"])
    records = [json.loads(line) for line in file.read_text().splitlines()]
    for record in records[::2]:
        record["prompt"] = "describe this in one sentence"
    path = file.with_name("asked.jsonl")
    path.write_text("\n".join(map(json.dumps, records)))
    return {"format": "jsonl", "path": str(path)}


@pytest.fixture(scope="module")
def answering(asked, tmp_path_factory) -> tuple[Path, Path]:
    """Folders of a cross-entropy and a self-critical run of a vision-language model that is asked
    by messages.
    """
    folder = tmp_path_factory.mktemp("answering")
    start, xe, scst = folder / "start", folder / "xe", folder / "scst"
    save_model("qwen2_5_vl", start)
    model = {"name": "huggingface", "init": str(start), "prompt": MESSAGES}
    options: dict[str, Any] = {
        "train.max_steps": 12,
        "train.lr": 0.02,
        "eval.every": 6,
        "data": asked,
    }
    checked_run(xe_config(xe, model=model, **options), xe)
    options = {
        "data": asked,
        "train.max_steps": 2,
        "eval.every": 1,
        "rollout.max_new_tokens": 12,
    }
    checked_run(scst_config(scst, xe / "export/best", **options), scst, "scst")
    return xe, scst


def test_prompts_of_rows_and_messages_are_asked_in_training_and_evaluation(
    answering, asked, tmp_path
):
    xe, scst = answering
    for folder in answering:
        assert (
            json.loads((folder / "export/best" / SETTINGS).read_text())["prompt"]
            == MESSAGES
        )
    found = evaluate(xe / "export/best", asked, tmp_path / "evaluation", 12)
    assert (
        found == validated(xe) == captions(scst / "eval/step-00000000/predictions.json")
    )
    captioner = load_captioner(xe / "export/best")
    captioner.policy.eval()
    for record in map(json.loads, Path(asked["path"]).read_text().splitlines()):
        if record["split"] == "val":
            image = Path(asked["path"]).parent / record["image"]
            prompt = (
                MESSAGES[1] | {"content": record["prompt"]}
                if "prompt" in record
                else MESSAGES[1]
            )
            row: Any = {
                "image_id": "alone",
                "image": image,
                "references": [],
                "prompt": [MESSAGES[0], prompt],
            }
            with torch.no_grad():
                ids = captioner.generate(
                    captioner.policy,
                    captioner.preprocess([row]),
                    Decoding(max_new_tokens=12),
                )
            assert captioner.decode(ids[:, 0]) == [found[record["image"]]]


def test_a_vision_language_model_is_asked_for_files_and_reported(
    answering, asked, tmp_path, capsys
):
    scst = answering[1] / "export/best"
    photo = Path(asked["path"]).with_name("9.png")
    capsys.readouterr()
    assert main(["caption", "--model", str(scst), str(photo)]) == 0
    path, _, caption = capsys.readouterr().out.strip().partition("\t")
    assert path == str(photo)
    alone = evaluate(scst, asked, tmp_path / "scst-evaluation", 24)
    assert caption == alone["9.png"], "a row without a prompt of its own"
    settings = json.loads((tmp_path / "scst-evaluation/settings.json").read_text())
    assert settings["weights"] == weights_hash(scst)
    assert main(["report", str(answering[1])]) == 0
    page = (answering[1] / "report.html").read_text()
    assert all(text in page for text in validated(answering[0]).values())


def test_a_grid_trains_a_vision_language_model(answering, asked, tmp_path):
    scst = scst_config(tmp_path / "unused", answering[0] / "export/best", data=asked)
    scst["train"] |= {"max_steps": 1, "kl_coef": 0.0}
    (tmp_path / "scst.yaml").write_text(yaml.safe_dump(scst))
    terms = {"cider": {"weight": 1.0}}
    grid = {
        "recipe": str(tmp_path / "scst.yaml"), "split": "val", "metrics": ["cider"], "tokenizer": "python",
        "cells": {name: {"terms": terms, "overrides": {"train.objective": name}} for name in ("reinforce", "dico")},
        "out": str(tmp_path / "grid"),
    }  # fmt: skip
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    words, environment = (
        ["ablate", "--config", str(tmp_path / "grid.yaml")],
        {"PYTHONPATH": str(REPOSITORY)},
    )
    ended = run_arguments(
        words, tmp_path / "log", environment=environment | {"OMP_NUM_THREADS": "1"}
    )
    assert ended.code == 0, ended.output
    before = weights(answering[0] / "export/best")
    for name in grid["cells"]:
        after = weights(tmp_path / f"grid/cells/{name}/seed0/run/export/last")
        changed = [key for key, value in after.items() if not value.equal(before[key])]
        assert changed, name
        assert not any("visual" in key for key in changed), name
