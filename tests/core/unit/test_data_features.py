"""Region features: reading, refusing, padding; folders and HDF5 files."""

import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from rl_caption.data.base import DataError
from rl_caption.data.checks import verify
from rl_caption.data.features import (
    FeatureOptions,
    ImageFeatures,
    features_of,
    pad_features,
)


def regions(count, dim=4):
    return np.arange(count * dim, dtype=np.float32).reshape(count, dim)


def image(root, image_id="5", file="5.jpg", **options):
    row = {"image_id": image_id, "image": file, "references": []}
    return features_of([row], root, FeatureOptions(**(options or {})))[0]


def hdf5(path, arrays):
    with h5py.File(path, "w") as file:
        for key, value in arrays.items():
            file[key] = value
    return path


def errors(features, cache):
    return [verdict.error for verdict in verify(features, 1, cache=cache).values()]


def refused(features, message):
    """Both the reader and the check of headers refuse the features."""
    for read in (features.load, features.check):
        with pytest.raises(DataError, match=message):
            read()


def test_arrays_of_npz_and_npy_files(tmp_path):
    for key, further in (
        ("features", {"boxes": regions(3)}),
        ("x", {"bbox": regions(3)}),
        ("feat", {}),
    ):
        np.savez_compressed(
            tmp_path / "5.npz", **{key: regions(3).astype(np.float16)}, **further
        )
        features = image(tmp_path).load(4)
        assert features.dtype == np.float32
        np.testing.assert_array_equal(features, regions(3))
        assert image(tmp_path, dim=4).check() == 4
    np.save(tmp_path / "6.npy", regions(6))
    found = pickle.loads(pickle.dumps(image(tmp_path, "6", dim=4, max_regions=2)))
    np.testing.assert_array_equal(found.load(), regions(6)[:2])
    assert image(tmp_path, "6").load().shape == (6, 4), (
        "all of them unless that is asked for"
    )


def test_a_grid_is_one_region_a_cell(tmp_path):
    np.savez(tmp_path / "5.npz", features=regions(6).reshape(2, 3, 4))
    np.testing.assert_array_equal(image(tmp_path, dim=4).load(4), regions(6))
    assert image(tmp_path, dim=4).check() == 4
    np.savez(tmp_path / "6.npz", features=regions(6).reshape(4, 2, 3))
    refused(
        image(tmp_path, "6", dim=4),
        r"image '6'.*is \[4, 2, 3\], expected 4",
    )


def test_missing_features_and_wrong_options_are_refused(tmp_path):
    refused(image(tmp_path, "391895"), r"image '391895'.*391895\.npz")
    for options, message in (
        ({"dim": 0}, "dim is 0"),
        ({"pattern": "{folder}"}, r"pattern is '\{folder\}'"),
    ):
        with pytest.raises(DataError, match=message):
            image(tmp_path, **options)


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".hdf5"])
def test_wrong_arrays_are_refused_by_reader_and_by_header_check(tmp_path, suffix):
    for array, message in (
        (regions(3, 5), r"image '7'.*the.*shape is \[3, 5\], expected 4"),
        (regions(4).reshape(1, 2, 2, 4), r"shape is \[1, 2, 2, 4\]"),
        (regions(0), r"shape is \[0, 4\]"),
    ):
        root = tmp_path
        if suffix == ".npz":
            np.savez(tmp_path / "7.npz", features=array)
        elif suffix == ".npy":
            np.save(tmp_path / "7.npy", array)
        else:
            root = hdf5(tmp_path / "f.hdf5", {"7_features": array})
        refused(image(root, "7", dim=4), message)
        with pytest.raises(DataError, match=message):
            image(root, "7").load(4)


@pytest.mark.parametrize("value", [np.nan, 1e300])
def test_values_that_are_not_finite_are_refused(tmp_path, value):
    array = regions(3).astype(np.float64)
    array[1, 2] = value
    np.save(tmp_path / "7.npy", array)
    with pytest.raises(DataError, match=r"image '7'.*features\[1, 2\] is"):
        image(tmp_path, "7").load(4)


@pytest.mark.parametrize("pattern", ["{}_features", "{}_grids", "{}/features", "{}"])
def test_keys_of_an_hdf5_file(tmp_path, pattern):
    rows = [{"image_id": number, "image": "", "references": []} for number in "45"]
    path = hdf5(tmp_path / "f.h5", {pattern.format(5): regions(5).astype(np.float16)})
    absent, found = features_of(rows, path, FeatureOptions(dim=4))
    np.testing.assert_array_equal(found.load(4), regions(5))
    with pytest.raises(DataError, match=rf"image '4' \(.*, key {pattern.format(4)}\)"):
        absent.load(4)


def test_hdf5_files_without_a_suffix_and_names_of_images_as_keys(tmp_path):
    path = hdf5(tmp_path / "features", {"COCO_5": regions(5)})
    assert image(path, file="x/COCO_5.jpg", pattern="{stem}").check() == 4
    refused(image(path), r"image '5'.*COCO_5")
    (tmp_path / "no.hdf5").write_bytes(b"not at all")
    with pytest.raises(DataError, match=r"no\.hdf5"):
        image(tmp_path / "no.hdf5")


def test_features_that_were_never_or_partly_written_are_refused(tmp_path):
    path = tmp_path / "f.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("1", (3, 4), "f4")
        file.create_dataset("2", (3, 4), "f4", chunks=(1, 4))
        packed = {"chunks": (2, 3), "compression": "gzip"}
        file.create_dataset("3", (3, 4), "f4", **packed)[:2] = regions(2)
        file.create_dataset("4", (3, 4), "f4", **packed)[:] = regions(3)
        file.create_dataset("5", (3, 4), "f4", chunks=(2, 4))[:] = 0
    for number, written in (("1", "0 of 1"), ("2", "0 of 3"), ("3", "2 of 4")):
        refused(image(path, number), rf"f\.h5, key {number}\).*{written} blocks")
    np.testing.assert_array_equal(image(path, "4").load(), regions(3))
    assert not image(path, "5").load().any(), "zeros that were written"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_forked_process_does_not_read_through_the_hdf5_handle_of_its_parent(tmp_path):
    path = hdf5(tmp_path / "f.hdf5", {"5": regions(5)}).resolve()
    found = image(path)
    total = found.load(4).sum()  # open here

    def descriptors():
        listed = Path("/proc/self/fd").iterdir()
        return [int(own.name) for own in listed if own.exists() and own.samefile(path)]

    (own,) = descriptors()
    os.lseek(own, 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:  # a position is shared with whoever has the same open file
        right = found.load(4).sum() == total
        for number in descriptors():
            os.lseek(number, 7, os.SEEK_SET)
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.lseek(own, 0, os.SEEK_CUR) == 0, "the parent's position has moved"
    assert found.load(4).sum() == total


def test_files_may_lie_in_a_folder_a_split(tmp_path):
    (tmp_path / "val2014").mkdir()
    np.savez(tmp_path / "val2014" / "COCO_5.jpg.npz", x=regions(2))
    assert (
        image(
            tmp_path, file="/images/val2014/COCO_5.jpg", pattern="{folder}/{stem}.jpg"
        ).check()
        == 4
    )


def test_good_headers_are_remembered_and_another_option_is_another_verdict(
    tmp_path, monkeypatch
):
    names = ("1", "2", "3")
    for name in names:
        np.save(tmp_path / f"{name}.npy", regions(2, 5 if name == "2" else 4))
    rows = [{"image_id": name, "image": "", "references": []} for name in names]
    found, cache = (
        features_of(rows, tmp_path, FeatureOptions()),
        tmp_path / "checked.json",
    )
    assert errors(found, cache) == [None] * 3
    with monkeypatch.context() as patch:
        patch.setattr(ImageFeatures, "check", None)
        assert errors(found, cache) == [None] * 3
    again = errors(features_of(rows, tmp_path, FeatureOptions(dim=7)), cache)
    assert all("expected 7" in str(error) for error in again)


def test_pad_features_masks_what_is_not_a_region():
    features, mask = pad_features([regions(2), regions(3), regions(1)])
    assert (features.shape, features.dtype) == ((3, 3, 4), torch.float32)
    assert mask.tolist() == [
        [True, True, False],
        [True, True, True],
        [True, False, False],
    ]
    torch.testing.assert_close(features[0, :2], torch.from_numpy(regions(2)))
    assert not features[~mask].any()
