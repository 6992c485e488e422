"""Videos by the real commands: a dual encoder over frames, a captioner over frames, SCST on
EMScore, evaluation.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rewards.clip.backbone import load_frozen_encoder
from rewards.clip.encoder import CachedEncoder
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.transformer import TransformerCaptioner
from rl_caption.config.schema import DataConfig
from rl_caption.data.formats import build_data
from rl_caption.data.loader import Collate, augment
from rl_caption.data.scenes import ScenesData
from tests.captioners_for_tests import REFERENCES, tiny_captioner, tiny_rows
from tests.reward_models_for_tests import reward_model_config
from tests.training_for_tests import checked_run, lines, scst_config, xe_config

pytestmark = pytest.mark.slow

SHORT = {"train.max_steps": 1, "eval.every": 1}


def video_rows(frames: int, count: int = 3) -> list[Any]:
    images = tiny_rows(count * frames)
    return [
        {
            "image_id": f"video-{n}",
            "image": tuple(row["image"] for row in images[n * frames : (n + 1) * frames]),
            "references": REFERENCES[n],
        }
        for n in range(count)
    ]


@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_a_captioner_reads_frames_in_their_order(tmp_path: Path, stem: str) -> None:
    captioner = tiny_captioner(num_frames=3, patch_stem=stem)
    rows = video_rows(3)
    inputs = captioner.preprocess(rows)
    assert inputs["pixel_values"].shape == (3, 3, 3, 16, 16)
    frame = captioner.policy.encoder.embedding.frame
    frame.data.normal_(std=1.0)
    states = captioner.policy.encoder(**inputs).last_hidden_state
    assert states.shape == (3, 3 * 4, 32)
    backwards = [{**row, "image": row["image"][::-1]} for row in rows]
    assert not torch.allclose(
        captioner.policy.encoder(**captioner.preprocess(backwards)).last_hidden_state, states
    )
    captioner.cached.clear()
    still = tiny_captioner(patch_stem=stem)
    assert "encoder.embedding.frame" not in still.policy.state_dict()
    embedded = captioner.policy.encoder.embedding(inputs["pixel_values"])
    one = (
        captioner.policy.encoder.embedding.stem(inputs["pixel_values"][:, 1])
        .flatten(2)
        .transpose(1, 2)
    )
    assert torch.allclose(
        embedded[:, 4:8], one + captioner.policy.encoder.embedding.position + frame[1], atol=1e-6
    )
    captioner.save_pretrained(captioner.policy, tmp_path)
    again = TransformerCaptioner.from_pretrained(tmp_path)
    decoding = Decoding(max_new_tokens=8)
    assert torch.equal(
        again.generate(again.policy, again.preprocess(rows), decoding),
        captioner.generate(captioner.policy, inputs, decoding),
    )


def test_all_frames_of_a_video_are_seen_in_the_same_view() -> None:
    captioner, names = tiny_captioner(num_frames=3), ("horizontal", "crop", "rotate")
    rows = video_rows(3)
    pixels = captioner.preprocess(rows)["pixel_values"]
    found = Collate(captioner, augmentations=names, seed=3)([(row, 5) for row in rows]).inputs[
        "pixel_values"
    ]
    for row, frames, views in zip(rows, pixels, found, strict=True):
        for frame, view in zip(frames, views, strict=True):
            assert torch.allclose(augment(frame, names, 3, 5, row["image_id"]), view, atol=1e-6)


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
    """A dual encoder and a captioner of videos, hardly trained."""
    folder = tmp_path_factory.mktemp("runs")
    teacher = reward_model_config(folder / "teacher", "contrastive", **videos)
    checked_run(teacher, folder / "teacher", "reward_model")
    shape = {"model.kwargs.num_frames": 3, "model.kwargs.image_size": 32, **SHORT}
    checked_run(xe_config(folder / "xe", **videos, **shape), folder / "xe")
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


def test_scst_on_animated_files_with_a_video_reward(
    trained: Path, videos: dict[str, Any], tmp_path: Path
) -> None:
    folder, captioner = tmp_path / "run", trained / "xe" / "export" / "best"
    reward = {
        "emscore": {
            "weight": 1.0,
            "kwargs": {"backbone": str(trained / "teacher" / "export" / "best")},
        }
    }
    checked_run(
        scst_config(folder, captioner, **videos, **{"reward.terms": reward, **SHORT}),
        folder,
        "scst",
    )
    scores = [line["reward/emscore"] for line in lines(folder) if "reward/emscore" in line]
    assert scores
    assert all(-0.5 <= score <= 1 for score in scores)
    assert (folder / "report.html").is_file()
