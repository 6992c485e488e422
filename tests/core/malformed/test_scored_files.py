"""Damaged images and captions under CLIP-based scores: one message that names the file, and no score."""

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rewards.base import RewardError
from rewards.clip.backbone import FrozenEncoder, load_frozen_encoder
from rl_caption.cli.score import score_files
from tests.clip_for_tests import ARCHITECTURE, noise_image, tiny_checkpoint

pytestmark = pytest.mark.slow

REWARDS = [
    "clipscore",
    "ref_clipscore",
    "l_clipscore",
    "ref_l_clipscore",
    "pac_s",
    "ref_pac_s",
    "retrieval",
    "specs",
]


def saved(kind: str) -> bytes:
    stream = io.BytesIO()
    noise_image(1).save(stream, kind)
    return stream.getvalue()


def png(width: int, height: int) -> bytes:
    """A file that says it is so large and has next to no pixels."""
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"x")),
    )
    chunks = [
        struct.pack(">I", len(own)) + name + own + struct.pack(">I", zlib.crc32(name + own))
        for name, own in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


IMAGES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"no image",
    "half a JPEG": lambda: saved("JPEG")[:400],
    "half a PNG": lambda: saved("PNG")[: len(saved("PNG")) // 2],
    "no pixels": lambda: png(0, 5),
    "too few pixels": lambda: png(30, 30),
    "bomb": lambda: png(60_000, 60_000),
    "SVG": lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>",
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> FrozenEncoder:
    return load_frozen_encoder(ARCHITECTURE, tiny_checkpoint(tmp_path_factory.mktemp("weights")))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """Three images with captions and references."""
    (tmp_path / "images").mkdir()
    for name in "abc":
        noise_image(ord(name)).save(tmp_path / "images" / f"{name}.png")
    captions = [{"image_id": name, "caption": f"a dog {name}"} for name in "abc"]
    (tmp_path / "captions.json").write_text(json.dumps(captions))
    (tmp_path / "references.json").write_text(json.dumps({name: ["dogs"] for name in "abc"}))
    return {name: tmp_path / f"{name}.json" for name in ("captions", "references")} | {
        "images": tmp_path / "images"
    }


@pytest.mark.parametrize("reward", REWARDS)
def test_a_damaged_image_is_named(
    encoder: FrozenEncoder, files: dict[str, Any], tmp_path: Path, reward: str
) -> None:
    assert len(score_files(reward, **files, kwargs={"backbone": encoder})["scores"]) == 3
    for content in IMAGES.values():
        (tmp_path / "images" / "b.png").write_bytes(content())
        with pytest.raises(RewardError, match=r"images/b\.png"):
            score_files(reward, **files, kwargs={"backbone": encoder}, out=tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
