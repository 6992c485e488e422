"""Published TSV files of region features to one file per image."""

import base64
import json

import numpy as np
import pytest

from rl_caption.cli.main import run_program
from rl_caption.data.base import DataError
from rl_caption.data.features import as_image_features
from rl_caption.data.prepare_features import convert_tsv


def text(array):
    return base64.b64encode(array.astype("<f4").tobytes()).decode()


def features(image_id, rows=3, dim=8):
    return np.random.default_rng(image_id).normal(size=(rows, dim)).astype(np.float32)


def line(image_id, layout, values=None):
    values = features(image_id) if values is None else values
    count, regions = len(values), text(values)
    boxes, detections = text(np.ones((count, 4))), [text(np.ones(count))] * 4
    columns = {
        "lxmert": [480, 640, *detections, count, boxes, regions],
        "bottom-up": [640, 480, count, boxes, regions],
        "vinvl": [json.dumps({"num_boxes": count, "features": regions})],
        "three columns": [count, regions],
    }
    return "\t".join(map(str, [image_id, *columns[layout]]))


def write_lines(path, *lines):
    path.write_text("\n".join(lines) + "\r\n")
    return [path]


def stored(folder, image_id):
    return as_image_features(folder / f"{image_id}.npz", str(image_id)).load(8)


def test_each_line_becomes_a_file(tmp_path):
    for layout in ("bottom-up", "lxmert", "vinvl", "three columns"):
        out = tmp_path / layout
        lines = [line(number, layout) for number in (5, 6)]
        assert convert_tsv(write_lines(tmp_path / "a.tsv", *lines), out) == 2
        np.testing.assert_array_equal(stored(out, 6), features(6))


def test_repeated_lines_are_skipped_and_files_written_over(tmp_path):
    out = tmp_path / "out"
    for seed in (6, 7):
        lines = [line(6, "vinvl", features(seed)), line(6, "vinvl")]
        assert convert_tsv(write_lines(tmp_path / "a.tsv", *lines), out) == 1
        np.testing.assert_array_equal(stored(out, 6), features(seed))


def test_a_bad_line_is_named(tmp_path):
    for bad, message in (
        ("7\t1\t2\t3", "expected 2, 3, 6 or 10 columns"),
        ("7\t640\t480\tx\tAA==\tAA==", "num_boxes and base64"),
        (line(7, "three columns")[:-8], "num_boxes"),
        (line(7, "vinvl", features(7, dim=9)), r"image '7': .*\[3, 9\], expected 8"),
        (line(7, "vinvl", np.full((3, 8), np.nan)), r"features\[0, 0\] is nan"),
        ("../7\t3\t" + text(features(7)), r"image '\.\./7'"),
    ):
        paths = write_lines(tmp_path / "a.tsv", line(5, "vinvl"), bad)
        with pytest.raises(DataError, match=rf"a\.tsv, line 2.*({message})"):
            convert_tsv(paths, tmp_path / "out")


def test_a_cut_line_before_the_whole_one(tmp_path):
    bad, other = line(6, "bottom-up")[:-9], line(7, "bottom-up")[:-9]
    whole = [line(5, "bottom-up"), bad, line(6, "bottom-up")]
    out = tmp_path / "out"
    assert convert_tsv(write_lines(tmp_path / "a.tsv", *whole), out) == 2
    paths = write_lines(tmp_path / "a.tsv", *whole, other, bad)
    with pytest.raises(DataError, match=r"a\.tsv, line 4, image '7'"):
        convert_tsv(paths, out)


def test_half_the_space_and_the_command_line(tmp_path, capsys):
    (path,) = write_lines(tmp_path / "a.tsv", line(5, "bottom-up"))
    out = tmp_path / "out"
    arguments = [str(path), f"--out={out}", "--dtype=float16"]
    assert run_program("prepare_features", arguments) == 0
    assert "1 images written" in capsys.readouterr().out
    np.testing.assert_allclose(stored(out, 5), features(5), atol=2e-3)
    large = line(6, "bottom-up", 1e6 * np.ones((3, 8)))
    with pytest.raises(DataError, match=r"not finite in float16"):
        convert_tsv(write_lines(path, large), out, dtype="float16")
