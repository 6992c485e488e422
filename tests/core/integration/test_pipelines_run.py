"""Pipelines by the real command: own photos to a captioner, a new one and pretrained
ones saved as the hub has them.
"""

import json
from pathlib import Path

import pytest

from rl_caption.data.base import load_image
from rl_caption.data.scenes import ScenesData
from tests.hf_models_for_tests import save_model
from tests.training_for_tests import Ended, Kill, files, lines, run_arguments, weights
from tests.zoo.families import save_vlm

pytestmark = pytest.mark.slow

STEPS = {
    "train.max_steps": 2,
    "train.batch_size": 4,
    "train.warmup_steps": 1,
    "train.threads": 1,
}
SMALL = [
    *(
        f"--{stage}.{key}={value}"
        for stage in ("xe", "scst")
        for key, value in STEPS.items()
    ),
    *("--data.num_workers", "0", "--xe.train.max_target_tokens", "8"),
    *("--scst.rollout.max_new_tokens", "8", "--scst.report", "false"),
]


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    """A folder with ``mine.jsonl`` and its photos; the working directory."""
    monkeypatch.chdir(tmp_path)
    world = ScenesData(num_train=12, num_val=4, num_test=4, image_size=32)
    rows = []
    for split in ("train", "val", "test"):
        for row in world[split]:
            name = f"{split}-{len(rows)}.png"
            load_image(row["image"]).save(name)
            rows.append(
                {"image": name, "references": list(row["references"]), "split": split}
            )
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def start(*words: str, kill: Kill | None = None) -> Ended:
    command = ["run", *words, "--data.path", "mine.jsonl"]
    return run_arguments(command, Path("log").absolute(), kill=kill)


def checked(*words: str) -> Ended:
    ended = start(*words)
    assert ended.code == 0, ended.output
    return ended


def test_a_new_captioner_of_own_photos_killed_and_gone_on(photos):
    small = [f"--xe.model.kwargs.{key}=16" for key in ("d_model", "image_size")]
    words = ["own", *SMALL, *small, "--xe.model.min_count", "1", "--run.root", "here"]
    killed = start(*words, kill=Kill("rl_caption.training.run:Run.begin_step", 3))
    assert killed.code < 0
    assert (photos / "here/xe/result.json").exists()
    ended = checked(*words)
    assert "[1/2] finished, xe" in ended.output
    assert (
        json.loads((photos / "here/scst/result.json").read_text())["global_step"] == 2
    )
    assert "finished, scst" in checked(*words).output
    row = json.loads(Path("mine.jsonl").read_text().splitlines()[0])
    row["references"] = ["another caption"]
    load_image(ScenesData(num_train=0, num_val=0, num_test=9)["test"][8]["image"]).save(
        "new.png"
    )
    with Path("mine.jsonl").open("a") as file:
        print("\n" + json.dumps(row | {"image": "new.png", "split": "val"}), file=file)
    refused = start(*words)
    assert refused.code == 1
    for part in ("val ids", "--again xe"):
        assert part in refused.output
    checked(*words, "--again", "xe")
    assert not (photos / "runs").exists()


@pytest.mark.parametrize("family", ["blip", "vlm"])
def test_own_photos_to_a_pretrained_captioner(family, photos):
    """An encoder-decoder, and a vision-language model by LoRA, whose adapters are merged."""
    if family == "blip":
        model = save_model(family, photos / "hub")
    else:
        model = save_vlm("smolvlm", photos / "hub")
    checked(f"own_{family}", *SMALL, "--xe.model.init", str(model))
    run = photos / f"runs/own/{family}_scst"
    assert lines(run)[-1]["step"] == 2
    before, after = weights(model), weights(run / "export/last")
    common = before.keys() & after.keys()
    assert any(not after[key].equal(before[key]) for key in common)
    assert "adapter_config.json" not in files(run / "export/best")
    words = ["caption", "--model", str(run / "export/best"), "test-16.png"]
    ended = run_arguments(words, photos / "log")
    assert ended.code == 0, ended.output
