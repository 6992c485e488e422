"""Videos as data: folders of frames, animated images and video files; sampling, errors,
checks, cache keys.
"""

import pickle
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
from rl_caption.data.files import write_json_lines
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
    assert uniform(12, 2, (0.5, 1.0)) == [7, 10]
    assert uniform(12, 2, (0.4, 0.4)) == [4, 4]
    assert uniform(12, 2, (1.0, 1.0)) == [11, 11]


@pytest.mark.parametrize("kind", ["folder", "gif", "webp", "mp4"])
def test_frames_of_every_kind_of_video(tmp_path, kind):
    path = make_video(tmp_path / "a", kind)
    frames = pickle.loads(pickle.dumps(video_frames(path, 4)))
    reds = [np.asarray(open_image(frame))[16, 16, 0] for frame in frames]
    tolerance = 12 if kind == "mp4" else 0
    np.testing.assert_allclose(reds, [20, 80, 140, 200], atol=tolerance)
    assert image_identity(video_frames(path, 4)) == image_identity(frames)


def test_a_changed_video_is_another_one(tmp_path):
    path = make_video(tmp_path / "a", "gif")
    frames = video_frames(path, 2)
    key, first = image_identity(frames), open_image(frames[0]).tobytes()
    make_video(tmp_path / "a", "gif", range(100, 200, 10))
    assert image_identity(frames) != key
    assert open_image(frames[0]).tobytes() != first


def test_unusable_videos_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("text.gif", "text.mp4"):
        (tmp_path / name).write_text("no video")
    for name in ("missing.gif", "empty", "text.gif", "missing.mp4"):
        with pytest.raises((RewardError, OSError), match=name):
            open_image(video_frames(tmp_path / name, 2)[1])
    pytest.importorskip("av", reason="PyAV is not installed")
    with pytest.raises(RewardError, match=r"text\.mp4'"):
        open_image(video_frames(tmp_path / "text.mp4", 2)[0])


def test_rows_have_videos_and_the_checks_read_them(tmp_path):
    make_video(tmp_path / "a", "folder")
    make_video(tmp_path / "b", "gif", range(10, 250, 30))
    (tmp_path / "c.gif").write_bytes(b"GIF89a, cut off")
    names = ["a", "b.gif", "c.gif", "d"]
    lines = [{"image": name, "references": ["a dog runs"]} for name in names]
    path = tmp_path / "data.jsonl"
    write_json_lines(path, lines)
    data = build_data(DataConfig(format="jsonl", path=str(path), num_frames=3))
    assert [len(row["image"]) for row in data["train"]] == [3] * 4
    cache = tmp_path / "cache.json"
    with pytest.raises(DataError, match=r"1.*/d'(.|\n)*1.*c\.gif"):
        check_data(data, ["train"], cache=cache)
    assert [Path(key).name for key in load_json(cache)] == ["b.gif'"]
    report = check_data(data, ["train"], on_bad="skip", cache=cache)
    assert list(report.kept["train"]) == [0, 1]
    with pytest.raises(DataError, match="2 of 4"):
        check_row_images(data["train"], "the reward")


def test_the_key_of_a_frame_changes_with_each_of_its_fields(tmp_path):
    first = make_video(tmp_path / "a", "gif")
    second = make_video(tmp_path / "b", "gif", range(1, 241, 20))
    chosen = [*video_frames(first, 2), *video_frames(first, 3)[:1]]
    chosen += video_frames(second, 2)[:1]
    chosen += video_frames(first, 1, (0.0, 0.5)) + video_frames(first, 1, (0.5, 1.0))
    assert len({frame.identity() for frame in chosen}) == 6
