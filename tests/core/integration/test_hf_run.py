"""Pretrained captioners in the programs: cross-entropy, self-critical training, a kill
and a resume, evaluation.
"""

import json
from pathlib import Path

import pytest
from PIL import Image

from rl_caption.captioners.config import Decoding
from rl_caption.captioners.huggingface import SETTINGS
from rl_caption.captioners.loading import load_captioner
from tests.captioners_for_tests import REFERENCES, captions_of
from tests.hf_models_for_tests import save_model
from tests.training_for_tests import (
    Kill,
    assert_same_run,
    checked_run,
    read_json,
    scst_config,
    steps,
    weights,
    xe_config,
)
from tests.zoo.language_models import PROMPT

pytestmark = pytest.mark.slow

LEARNING = {"train.max_steps": 12, "train.lr": 0.02, "eval.every": 6}
"""Options of cross-entropy that learn the photos."""
STEP = "rl_caption.training.run:Run.begin_step"


class Letters:
    """A judge that any change of captions moves: the number of letters, or with
    ``fewest`` of those missing to 100.
    """

    __name__ = signature = "letters"
    columns = frozenset()
    bounds = (0.0, 100.0)

    def __init__(self, fewest=False):
        self.fewest = fewest

    def __call__(self, prompts, completions, **columns):
        """One number a caption."""
        counts = [float(sum(map(str.isalpha, caption))) for caption in completions]
        return [100 - count for count in counts] if self.fewest else counts


def write_rows(file, rows):
    """Write JSON lines; returns the section ``data`` that reads them."""
    file.write_text("\n".join(map(json.dumps, rows)))
    return {"format": "jsonl", "path": str(file)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Photos of one colour, a colour a caption, in the words of the tiny models: a few
    steps learn them. Also videos of such frames, and photos of which every other has a
    prompt of its own.
    """
    folder = tmp_path_factory.mktemp("photos")
    rows = []
    videos = []
    for number in range(12):
        row = {
            "references": REFERENCES[number % 4],
            "split": "train" if number < 8 else "val",
        }
        shade = (number % 4 * 80, number * 10, 255 - number % 4 * 80)
        Image.new("RGB", (20, 24), shade).save(folder / f"{number}.png")
        rows.append(row | {"image": f"{number}.png"})
        (folder / f"video{number}").mkdir()
        for frame in range(3):
            image = Image.new(
                "RGB",
                (32, 32),
                (number * 20, frame * 40, 90),
            )
            image.save(folder / f"video{number}/{frame}.png")
        videos.append(row | {"image": f"video{number}"})
    found = {
        "photos": write_rows(folder / "photos.jsonl", rows),
        "videos": write_rows(folder / "videos.jsonl", videos) | {"num_frames": 2},
    }
    for row in rows[::2]:
        row["prompt"] = "describe this in one sentence"
    return found | {"asked": write_rows(folder / "asked.jsonl", rows)}


def evaluate(model, data, folder, max_new_tokens):
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
    return captions(folder)


def captions(folder):
    """Image id -> caption, of an evaluation or a validation."""
    records = read_json(folder / "predictions.json")
    return {record["image_id"]: record["caption"] for record in records}


def validated(run_folder):
    """Captions of the validation whose model was exported as the best, which is a trained one."""
    best = read_json(run_folder)["best_step"]
    assert best > 0, "nothing was learned: the best model is the starting one"
    return captions(run_folder / "eval" / f"step-{best:08d}")


def changed_weights(before, after):
    """Names of the weights that differ between two folders that have the same names."""
    one = weights(before)
    other = weights(after)
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not value.equal(other[name])]


def killed_in_its_third_step(config, folder):
    """Run to the kill, then to the end."""
    for kill in (Kill(STEP, call=3), None):
        checked_run(config, folder, "scst", kill=kill)


@pytest.mark.parametrize(
    ("family", "tower", "kind"),
    [
        ("vit_gpt2", "encoder.", "photos"),
        ("smolvlm", "model.vision_model.", "videos"),
    ],
)
def test_from_cross_entropy_to_self_critical_training_to_evaluation(
    family, tower, kind, data, tmp_path
):
    start = save_model(family, tmp_path / "start")
    model = {
        "name": "huggingface",
        "init": str(start),
        "prompt": PROMPT,
    }
    model["freeze"] = [f"{tower}*"]
    xe = tmp_path / "xe"
    scst = tmp_path / "scst"
    checked_run(xe_config(xe, model=model, data=data[kind], **LEARNING), xe)
    changed = changed_weights(start, xe / "export/best")
    assert changed
    assert not any(name.startswith(tower) for name in changed)
    learned = evaluate(
        xe / "export/best",
        data[kind],
        tmp_path / "evaluation",
        12,
    )
    assert learned == validated(xe)
    options = {
        "data": data[kind],
        "train.max_steps": 2,
        "eval.every": 1,
        "model.gradient_checkpointing": True,
        "rollout.max_new_tokens": 12,
    }
    checked_run(
        scst_config(scst, xe / "export/best", **options),
        scst,
        "scst",
    )
    assert read_json(scst / "export/best" / SETTINGS)["prompt"] == PROMPT
    assert steps(scst, "reward/total") == [1, 2]
    # It starts from the captioner and prompt that were exported.
    assert captions(scst / "eval/step-00000000") == learned


@pytest.mark.parametrize(("family", "fewest"), [("blip2", False), ("qwen2_5_vl", True)])
def test_adapters_are_resumed_bit_for_bit_and_exported_into_one_plain_model(
    family, fewest, data, tmp_path
):
    pytest.importorskip("peft")
    start = save_model(family, tmp_path / "start")
    whole = tmp_path / "whole"
    lora = {"r": 4, "alpha": 16.0, "dropout": 0.1}
    model = {
        "name": "huggingface",
        "init": str(start),
        "prompt": PROMPT,
        "lora": lora,
        "gradient_checkpointing": True,
    }
    # Four steps do not raise CIDEr-D above 0; captions that change are better by this judge.
    judge = {"target": f"{__name__}:Letters", "kwargs": {"fewest": fewest}}
    options = {
        "model": model,
        "data": data["photos"],
        "train.lr": 0.05,
        "monitor": {"judges": {"letters": judge}, "best_by": "letters"},
    }
    checked_run(scst_config(whole, start, **options), whole, "scst")
    killed = tmp_path / "killed"
    killed_in_its_third_step(scst_config(killed, start, **options), killed)
    assert_same_run(killed, whole)
    best = whole / "export/best"
    assert weights(start).keys() == weights(best).keys(), "no trace of adapters"
    found = evaluate(
        best,
        data["photos"],
        tmp_path / "evaluation",
        8,
    )
    assert found == validated(whole)


def test_a_whole_vision_language_model_is_resumed_bit_for_bit(data, tmp_path):
    """In DiCO; the tower is trained, too."""
    start = save_model("qwen2_5_vl", tmp_path / "start")
    model = {
        "name": "huggingface",
        "init": str(start),
        "prompt": PROMPT,
        "freeze": [],
    }
    dico = {
        "model": model,
        "data": data["photos"],
        "train.objective": "dico",
        "train.advantage": "mean",
        "train.kl_coef": 0.0,
    }
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    checked_run(scst_config(whole, start, **dico), whole, "scst")
    killed_in_its_third_step(scst_config(killed, start, **dico), killed)
    assert_same_run(killed, whole)
    changed = changed_weights(start, whole / "export/last")
    assert any("visual" in name for name in changed)


QUESTION = [{"type": "image"}, {"type": "text", "text": "what do you see ?"}]
MESSAGES = [
    {"role": "system", "content": "describe the image"},
    {"role": "user", "content": QUESTION},
]


def test_prompts_of_rows_and_messages_are_asked_in_training_and_evaluation(
    data, tmp_path
):
    asked = data["asked"]
    xe = tmp_path / "xe"
    start = save_model("qwen2_5_vl", tmp_path / "start")
    model = {
        "name": "huggingface",
        "init": str(start),
        "prompt": MESSAGES,
    }
    checked_run(xe_config(xe, model=model, data=asked, **LEARNING), xe)
    assert read_json(xe / "export/best" / SETTINGS)["prompt"] == MESSAGES
    found = evaluate(xe / "export/best", asked, tmp_path / "evaluation", 12)
    assert found == validated(xe)
    captioner = load_captioner(xe / "export/best")
    captioner.policy.eval()
    photos = Path(asked["path"]).parent
    for record in map(json.loads, Path(asked["path"]).read_text().splitlines()):
        if record["split"] == "val":
            content = record.get("prompt", QUESTION)
            row = {
                "image_id": "alone",
                "image": photos / record["image"],
                "references": [],
                "prompt": [MESSAGES[0], MESSAGES[1] | {"content": content}],
            }
            inputs = captioner.preprocess([row])
            decoding = Decoding(max_new_tokens=12)
            ids = captions_of(captioner, inputs, decoding)
            assert captioner.decode(ids[:, 0]) == [found[record["image"]]]
