"""Videos as data: folders of frames, animated images and video files; sampling, errors, checks,
cache keys.
"""

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rewards.base import RewardError
from rewards.files import load_json
from rewards.images import image_identity, open_image
from rewards.videos import uniform, video_frames
from rl_caption.config.schema import DataConfig
from rl_caption.data.base import DataError
from rl_caption.data.checks import check_data, check_row_images
from rl_caption.data.formats import build_data

REDS = range(0, 240, 20)
"""Red of each of 12 frames."""


def make_video(path, kind, reds=REDS):
    """Write frames of one colour each, as a folder, a GIF, a WebP or an MPEG-4 file."""
    frames = [Image.new("RGB", (32, 32), (red, 0, 0)) for red in reds]
    if kind == "folder":
        path.mkdir()
        for number, frame in enumerate(frames):
            frame.save(path / f"f{number}.png")  # f10 comes after f9
        (path / "notes.txt").write_text("no frame")
        return path
    path = path.with_suffix(f".{kind}")
    if kind == "mp4":
        av = pytest.importorskip("av", reason="PyAV is not installed")
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width = stream.height = 32
            stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_image(frame)))
            container.mux(stream.encode())
        return path
    options = {"lossless": True} if kind == "webp" else {}
    frames[0].save(
        path, save_all=True, append_images=frames[1:], duration=100, **options
    )
    return path


def test_frames_are_centres_of_equal_segments_of_the_video_or_of_a_part():
    assert uniform(12, 4) == [1, 4, 7, 10]
    assert uniform(12, 1) == [6]
    assert uniform(2, 4) == [0, 0, 1, 1]
    spans = {
        (0.5, 1.0): [7, 10],
        (0.0, 0.2): [0, 1],
        (0.4, 0.4): [4, 4],
        (1.0, 1.0): [11, 11],
    }
    assert {span: uniform(12, 2, span) for span in spans} == spans


@pytest.mark.parametrize("kind", ["folder", "gif", "webp", "mp4"])
def test_frames_of_every_kind_of_video(tmp_path, kind):
    frames = pickle.loads(
        pickle.dumps(video_frames(make_video(tmp_path / "a", kind), 4))
    )
    reds = [np.asarray(open_image(frame))[16, 16, 0] for frame in frames]
    assert np.abs(np.array(reds, int) - [20, 80, 140, 200]).max() <= (
        12 if kind == "mp4" else 0
    )
    assert open_image(frames[0]).mode == "RGB"
    same, other = video_frames(frames[0].path, 4), video_frames(frames[0].path, 5)
    assert image_identity(same) == image_identity(frames) != image_identity(other)


def test_a_changed_video_is_another_one(tmp_path):
    path = make_video(tmp_path / "a", "gif")
    frames = video_frames(path, 2)
    key, first = image_identity(frames), open_image(frames[0]).tobytes()
    make_video(tmp_path / "a", "gif", range(100, 200, 10))
    assert image_identity(frames) != key
    assert open_image(frames[0]).tobytes() != first


def test_unusable_videos_are_named(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for name in ("text.gif", "text.mp4"):
        (tmp_path / name).write_text("no video")
    for name in ("missing.gif", "empty", "text.gif", "missing.mp4"):
        with pytest.raises((RewardError, OSError), match=name):
            open_image(video_frames(tmp_path / name, 2)[1])
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ModuleNotFoundError, match="av"):
        open_image(video_frames(tmp_path / "text.mp4", 2)[1])
    monkeypatch.undo()
    pytest.importorskip("av", reason="PyAV is not installed")
    with pytest.raises(RewardError, match=r"text\.mp4'"):
        open_image(video_frames(tmp_path / "text.mp4", 2)[0])


def test_rows_have_videos_and_the_checks_read_them(tmp_path):
    kinds = {"folder": "a", "gif": "b.gif", "webp": "c.webp"}
    for kind, name in kinds.items():
        make_video(tmp_path / name.split(".")[0], kind, range(10, 250, 20 + len(name)))
    names = [*kinds.values(), "d.gif", "e"]
    (tmp_path / "d.gif").write_bytes(b"GIF89a, cut off")
    lines = [{"image": name, "references": ["a dog runs"]} for name in names]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    data = build_data(DataConfig(format="jsonl", path=str(path), num_frames=3))
    assert [len(row["image"]) for row in data.split("train")] == [3] * 5  # type: ignore[arg-type]
    cache = tmp_path / "cache.json"
    with pytest.raises(DataError, match=r"1.*/e'(.|\n)*1.*d\.gif"):
        check_data(data, ["train"], cache=cache)
    remembered = [Path(key).name for key in load_json(cache)]
    assert remembered == ["b.gif'", "c.webp'"]
    report = check_data(data, ["train"], on_bad="skip", cache=cache)
    assert list(report.kept["train"]) == [0, 1, 2]
    with pytest.raises(DataError, match="2 of 5"):
        check_row_images(data.split("train"), "the reward")


def test_the_key_of_a_frame_changes_with_each_of_its_fields(tmp_path):
    for name, last in (("a.gif", 200), ("b.gif", 201)):
        frames = [Image.new("L", (4, 4), shade) for shade in (0, 100, last)]
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    first, second = tmp_path / "a.gif", tmp_path / "b.gif"
    chosen = [
        *video_frames(first, 2),
        video_frames(first, 3)[0],
        video_frames(second, 2)[0],
    ]
    chosen += [video_frames(first, 2, span)[0] for span in ((0.0, 0.5), (0.5, 1.0))]
    assert len({frame.identity() for frame in chosen}) == len(chosen)
