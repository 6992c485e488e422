"""Videos by the real commands: a dual encoder over frames."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.encoder import CachedEncoder
from rl_caption.config.schema import DataConfig
from rl_caption.data.formats import build_data
from rl_caption.data.scenes import ScenesData
from tests.reward_models_for_tests import reward_model_config
from tests.training_for_tests import checked_run, lines

pytestmark = pytest.mark.slow


def written_videos(folder: Path) -> dict[str, Any]:
    """Animated PNG files of scenes that are shifted twice, as ``data``."""
    folder.mkdir()
    world = ScenesData(24, 8, 0, 0, image_size=32, captions_per_image=3, positives=True)
    lines = []
    for split in ("train", "val"):
        for row in world.split(split):
            first, *others = [frame.render() for frame in row["positive_images"]]
            name = f"{row['image_id']}.png"
            first.save(folder / name, save_all=True, append_images=others)
            lines.append({"image": name, "references": row["references"], "split": split})
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return {"data": {"format": "jsonl", "path": str(folder / "data.jsonl"), "num_frames": 3}}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return written_videos(tmp_path_factory.mktemp("data") / "videos")


@pytest.fixture(scope="module")
def trained(videos: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dual encoder of videos, hardly trained."""
    folder = tmp_path_factory.mktemp("runs")
    teacher = reward_model_config(folder / "teacher", "contrastive", **videos)
    checked_run(teacher, folder / "teacher", "reward_model")
    return folder


def test_the_encoder_that_was_trained_scores_as_it_was_trained(
    trained: Path, videos: dict[str, Any]
) -> None:
    """Retrieval by the mean of the frames' embeddings, as validation of the training computed it."""
    rows = build_data(DataConfig(**videos["data"])).split("val")
    cached = CachedEncoder(load_frozen_encoder(str(trained / "teacher" / "export" / "best")))
    frames = cached.embed_images([row["image"] for row in rows])
    texts = [(index, text) for index, row in enumerate(rows) for text in row["references"]]
    captions = cached.embed_texts([text for _, text in texts])
    nearest = (captions @ frames.T).argmax(axis=1)
    recall = float(np.mean(nearest == [index for index, _ in texts]))
    by_step = {
        line["step"]: line for line in lines(trained / "teacher") if "val/retrieval_r1" in line
    }
    best = json.loads((trained / "teacher" / "result.json").read_text())["best_step"]
    assert by_step[best]["val/t2i_r1"] == pytest.approx(recall, abs=1e-6)
