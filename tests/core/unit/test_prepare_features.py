"""Published TSV files of region features to one file per image."""

import base64
import errno
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from rl_caption.data import prepare_features
from rl_caption.data.base import DataError
from rl_caption.data.features import as_image_features
from rl_caption.data.prepare_features import convert_tsv
from tests.interruptions_for_tests import interrupted


def text(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<f4").tobytes()).decode()


def features(image_id: int, rows: int = 3, dim: int = 8) -> np.ndarray:
    return np.random.default_rng(image_id).normal(size=(rows, dim)).astype(np.float32)


def line(image_id: int, layout: str, values: np.ndarray | None = None) -> str:
    values = features(image_id) if values is None else values
    count = len(values)
    if layout == "lxmert":
        detections = [text(np.ones(count))] * 4
        return "\t".join(
            map(
                str,
                [image_id, 480, 640, *detections, count, text(np.ones((count, 4))), text(values)],
            )
        )
    if layout == "bottom-up":
        return "\t".join(
            map(str, [image_id, 640, 480, count, text(np.ones((count, 4))), text(values)])
        )
    if layout == "vinvl":
        return f"{image_id}\t{json.dumps({'num_boxes': count, 'features': text(values)})}"
    return f"{image_id}\t{count}\t{text(values)}"


def test_each_line_becomes_a_file(tmp_path: Path) -> None:
    for layout in ("bottom-up", "lxmert", "vinvl", "three columns"):
        out = tmp_path / layout
        (tmp_path / "a.tsv").write_text(
            "\n".join(line(number, layout) for number in (5, 6)) + "\r\n"
        )
        assert convert_tsv([tmp_path / "a.tsv"], out) == (2, 0)
        np.testing.assert_array_equal(as_image_features(out / "6.npz", "6").load(8), features(6))
        if layout in ("bottom-up", "lxmert"):
            with np.load(out / "5.npz") as stored:
                assert stored["boxes"].shape == (3, 4)
                assert (int(stored["image_w"]), int(stored["image_h"])) == (640, 480)


def test_an_interrupted_conversion_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("\n".join(line(number, "bottom-up") for number in range(5)))
    with interrupted(np, "savez", after=2):
        convert_tsv([tmp_path / "a.tsv"], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.npz", "1.npz"]
    assert convert_tsv([tmp_path / "a.tsv"], tmp_path / "out") == (3, 2)
    assert convert_tsv([tmp_path / "a.tsv"], tmp_path / "out", dim=8) == (0, 5)
    with pytest.raises(DataError, match=r"\[3, 8\], expected \[regions, 9\]"):
        convert_tsv([tmp_path / "a.tsv"], tmp_path / "out", dim=9)


def test_features_of_other_images_with_the_same_ids_are_named_and_damaged_files_written_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.tsv").write_text("\n".join(line(number, "vinvl") for number in (5, 6, 6, 7)))
    assert convert_tsv([tmp_path / "a.tsv"], tmp_path / "out", dtype="float16") == (3, 1)
    assert convert_tsv([tmp_path / "a.tsv"], tmp_path / "out") == (0, 4), (
        "half precision of the same features"
    )
    (tmp_path / "out/._7.npz").write_bytes(b"what macOS leaves beside every file")
    for name in ("5", "7"):
        stored = (tmp_path / f"out/{name}.npz").read_bytes()
        (tmp_path / f"out/{name}.npz").write_bytes(stored[:100])
        assert convert_tsv([tmp_path / "a.tsv"], tmp_path / "out", dtype="float16") == (1, 3)
        assert (tmp_path / f"out/{name}.npz").read_bytes() == stored
    (tmp_path / "b.tsv").write_text(
        "\n".join(line(number, "vinvl", features(number + 1)) for number in (5, 6))
    )
    before = (tmp_path / "out/5.npz").read_bytes()
    with pytest.raises(DataError, match=r"b\.tsv, line 1, image '5'.*5\.npz"):
        convert_tsv([tmp_path / "b.tsv"], tmp_path / "out")
    assert (tmp_path / "out/5.npz").read_bytes() == before


def test_two_conversions_at_once_and_a_full_disk_leave_whole_files(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "a.tsv").write_text("\n".join(line(number, "vinvl") for number in (5, 6)))
    (tmp_path / "b.tsv").write_text(
        "\n".join(line(number, "vinvl", features(number + 1)) for number in (4, 6))
    )
    out, original, entered = tmp_path / "out", np.savez, []

    def other_first(file, **arrays) -> None:
        if (
            not entered
        ):  # between the start of one conversion and its first file, another writes all of its own
            entered.append(file)
            assert convert_tsv([tmp_path / "a.tsv"], out) == (2, 0)
        original(file, **arrays)

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", other_first)
        with pytest.raises(DataError, match=r"b\.tsv, line 2, image '6'.*6\.npz"):
            convert_tsv([tmp_path / "b.tsv"], out)
    np.testing.assert_array_equal(as_image_features(out / "6.npz", "6").load(8), features(6))

    def full(*_, **__) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    (tmp_path / "c.tsv").write_text(line(7, "vinvl"))
    with pytest.raises(OSError, match=r"MB.*7\.npz"):
        convert_tsv([tmp_path / "c.tsv"], out)
    assert sorted(path.name for path in out.iterdir()) == ["4.npz", "5.npz", "6.npz"]


def test_too_little_space_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = features(5, rows=100, dim=300)  # 120 kB
    (tmp_path / "a.tsv").write_text(line(5, "vinvl", values))
    usage = shutil.disk_usage(tmp_path)
    for free, dtype, enough in (
        (119_000, "float32", False),
        (121_000, "float32", True),
        (59_000, "float16", False),
    ):
        out = tmp_path / str(free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        if enough:
            assert convert_tsv([tmp_path / "a.tsv"], out, dtype=dtype) == (1, 0)
            continue
        with pytest.raises(DataError, match=re.escape(str(out))) as caught:
            convert_tsv([tmp_path / "a.tsv"], out, dtype=dtype)
        assert ("float16" in str(caught.value)) == (dtype == "float32"), (
            "half the space, where that is left to do"
        )
        assert not [*out.iterdir()]
    with pytest.raises(OSError, match=r"none\.tsv"):
        convert_tsv([tmp_path / "none.tsv"], tmp_path / "out")


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    for bad, message in (
        ("7\t1\t2\t3", "4 columns, expected 6"),
        ("7\t640\t480\tx\tAA==\tAA==", "num_boxes and base64"),
        ("7\t640\t480\t2\t%%\t%%", "num_boxes and base64"),
        (line(7, "three columns")[:-8], "num_boxes"),
        (line(7, "vinvl", features(7, dim=9)), r"image '7': .*\[3, 9\], expected \[regions, 8\]"),
        (line(7, "vinvl", np.full((3, 8), np.nan)), r"features\[0, 0\] is nan"),
        (
            "7\t640\t480\t3\t" + text(np.ones((3, 5))) + "\t" + text(features(7)),
            r"boxes are \[3, 5\]",
        ),
        ("../7\t3\t" + text(features(7)), r"image '\.\./7'"),
    ):
        (tmp_path / "a.tsv").write_text(line(5, "vinvl") + "\n" + bad + "\n")
        with pytest.raises(DataError, match=rf"a\.tsv, line 2.*({message})"):
            convert_tsv([tmp_path / "a.tsv"], tmp_path / "out")


def test_a_cut_line_before_the_whole_one(tmp_path: Path) -> None:
    bad, other = line(6, "bottom-up")[:-9], line(7, "bottom-up")[:-9]
    whole = [line(5, "bottom-up"), bad, line(6, "bottom-up")]
    (tmp_path / "a.tsv").write_text("\n".join(whole))
    assert convert_tsv([tmp_path / "a.tsv"], tmp_path / "out") == (2, 0)
    (tmp_path / "a.tsv").write_text("\n".join([*whole, other, bad]))
    with pytest.raises(DataError, match=r"a\.tsv, line 4, image '7'"):
        convert_tsv([tmp_path / "a.tsv"], tmp_path / "out")


def test_half_the_space_and_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.tsv").write_text(line(5, "bottom-up"))
    arguments = [
        str(tmp_path / "a.tsv"),
        "--out",
        str(tmp_path / "out"),
        "--dtype",
        "float16",
        "--dim",
        "8",
    ]
    assert prepare_features.main(arguments) == 0
    assert "1 images written" in capsys.readouterr().out
    np.testing.assert_allclose(
        as_image_features(tmp_path / "out/5.npz", "5").load(8), features(5), atol=2e-3
    )
    (tmp_path / "b.tsv").write_text(line(6, "bottom-up", 1e6 * np.ones((3, 8))))
    with pytest.raises(DataError, match=r"beyond float16.*float32"):
        convert_tsv([tmp_path / "b.tsv"], tmp_path / "out", dtype="float16")
