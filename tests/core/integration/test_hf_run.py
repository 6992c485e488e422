"""Pretrained captioners in the programs: cross-entropy, self-critical training, a kill and a resume, evaluation."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rl_caption.captioners.huggingface import ADAPTERS_FOLDER, SETTINGS
from rl_caption.captioners.loading import weights_hash
from rl_caption.lab.share import share
from rl_caption.programs.report.read import ReportError
from tests.captioners_for_tests import REFERENCES
from tests.hf_models_for_tests import PROMPT, save_model
from tests.training_for_tests import (
    Kill,
    assert_same_run,
    checked_run,
    lines,
    run,
    scst_config,
    weights,
    xe_config,
)

pytestmark = pytest.mark.slow


class Letters:
    """A judge that any change of captions moves: the number of letters, or with ``fewest`` of those missing to 100."""

    __name__ = signature = "letters"
    columns: frozenset[str] = frozenset()
    bounds = (0.0, 100.0)

    def __init__(self, fewest: bool = False) -> None:
        self.fewest = fewest

    def __call__(self, prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        """One number a caption."""
        counts = [float(sum(letter.isalpha() for letter in caption)) for caption in completions]
        return [100 - count for count in counts] if self.fewest else counts


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Photos of one colour, a colour a caption, in the words of the tiny models: a few steps learn them."""
    folder = tmp_path_factory.mktemp("photos")
    records = []
    for number in range(12):
        shade = (number % 4 * 80, number * 10, 255 - number % 4 * 80)
        Image.new("RGB", (20, 24), shade).save(folder / f"{number}.png")
        split = "train" if number < 8 else "val"
        records.append({"image": f"{number}.png", "references": REFERENCES[number % 4], "split": split})
    (folder / "photos.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    return {"format": "jsonl", "path": str(folder / "photos.jsonl")}


def evaluate(model: Path, data: dict[str, Any], folder: Path, max_new_tokens: int) -> dict[str, str]:
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
    return {record["image_id"]: record["caption"] for record in json.loads(file.read_text())}


def validated(run_folder: Path) -> dict[str, str]:
    """Captions of the validation whose model was exported as the best, which is a trained one."""
    best = json.loads((run_folder / "result.json").read_text())["best_step"]
    assert best > 0, "nothing was learned: the best model is the one that training started from"
    return captions(run_folder / "eval" / f"step-{best:08d}" / "predictions.json")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("vit_gpt2", tmp_path_factory.mktemp("vit_gpt2") / "start")


@pytest.mark.parametrize(("family", "tower"), [("vit_gpt2", "encoder."), ("smolvlm", "model.vision_model.")])
def test_from_cross_entropy_to_self_critical_training_to_evaluation(family, tower, data, tmp_path):
    pair = save_model(family, tmp_path / "start")
    model = {"name": "huggingface", "init": str(pair), "prompt": PROMPT, "freeze": [f"{tower}*"]}
    xe, scst = tmp_path / "xe", tmp_path / "scst"
    options: dict[str, Any] = {"train.max_steps": 12, "train.lr": 0.02, "eval.every": 6}
    ended = checked_run(xe_config(xe, **{"model": model, "data": data, **options}), xe)
    assert re.search(rf"{re.escape(tower)}\*.*prompt {PROMPT!r}", ended.output)
    before, after = weights(pair), weights(xe / "export/best")
    assert before.keys() == after.keys()
    changed = {name for name, value in before.items() if not value.equal(after[name])}
    assert changed
    assert not any(name.startswith(tower) for name in changed)
    learned = evaluate(xe / "export/best", data, tmp_path / "evaluation", 12)
    assert learned == validated(xe)
    card = Path(share(xe, out=tmp_path / "shared", evaluation=tmp_path / "evaluation")) / "README.md"
    assert "4 captions of split `val` of `photos.jsonl`" in card.read_text()
    with pytest.raises(ReportError, match=weights_hash(pair)[:8]):
        share(pair, out=tmp_path / "shared_start", evaluation=tmp_path / "evaluation")

    options = {"data": data, "train.max_steps": 2, "eval.every": 1, "model.gradient_checkpointing": True}
    options["rollout.max_new_tokens"] = 12
    checked_run(scst_config(scst, xe / "export/best", **options), scst, "scst")
    assert json.loads((scst / "export/best" / SETTINGS).read_text())["prompt"] == PROMPT
    assert {line["step"] for line in lines(scst) if "reward/total" in line} == {1, 2}
    start = captions(scst / "eval/step-00000000/predictions.json")
    assert start == learned, "self-critical training starts from the captioner and prompt that were exported"


@pytest.mark.parametrize(("family", "fewest"), [("blip2", False), ("qwen2_5_vl", True)])
def test_adapters_are_resumed_bit_for_bit_and_exported_into_one_plain_model(family, fewest, data, tmp_path):
    pytest.importorskip("peft")
    start, whole = save_model(family, tmp_path / "start"), tmp_path / "whole"
    lora = {"r": 4, "alpha": 16.0, "dropout": 0.1, "export_adapters": True}
    model = {"name": "huggingface", "init": str(start), "prompt": PROMPT, "lora": lora, "gradient_checkpointing": True}
    # Four steps do not raise CIDEr-D above 0; captions that change are better by this judge.
    judge = {"target": f"{__name__}:Letters", "kwargs": {"fewest": fewest}}
    monitor = {"judges": {"letters": judge}, "best_by": "letters"}
    options = {"model": model, "data": data, "train.lr": 0.05, "monitor": monitor}
    checked_run(scst_config(whole, start, **options), whole, "scst")
    killed = tmp_path / "killed"
    for kill in (Kill("rl_caption.training.loop:Trainer._step", call=3), None):
        checked_run(scst_config(killed, start, **options), killed, "scst", kill=kill)
    assert_same_run(killed, whole)
    before, after = weights(start), weights(whole / "export/best")
    assert before.keys() == after.keys(), "no trace of adapters"
    assert evaluate(whole / "export/best", data, tmp_path / "evaluation", 8) == validated(whole)
    checkpoint = weights(whole / "checkpoints/step-00000004")
    changed = {name.removeprefix("model.") for name in checkpoint if "lora_B" in name and checkpoint[name].any()}
    assert changed
    assert all(".q_proj." in name or ".v_proj." in name for name in changed)
    alone = {name.removeprefix("base_model.model.") for name in weights(whole / "export/best" / ADAPTERS_FOLDER)}
    assert alone >= {name.replace(".default.", ".") for name in changed}


def test_moments_of_one_block_are_not_given_to_another_of_the_same_shapes(pair, data, tmp_path):
    folder = tmp_path / "run"
    for frozen, code in ((0, 0), (1, 1)):
        model = {"name": "huggingface", "init": str(pair), "freeze": ["enc*", "*.w?e.*", "*.ln_f.*", f"*.h.{frozen}.*"]}
        options = {"model": model, "data": data, "train.max_steps": 1 + frozen, "run.resume": True}
        ended = run(xe_config(folder, **options), folder)
        assert ended.code == code, ended.output
    assert "are trained in the checkpoint or in this run only, such as 'model.decoder.transformer.h.0." in ended.output
