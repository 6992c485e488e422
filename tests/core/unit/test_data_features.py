"""Region features: reading, refusing, padding; folders and HDF5 files."""

import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from rl_caption.data.base import DataError
from rl_caption.data.features import (
    FeatureOptions,
    Hdf5File,
    features_of,
    pad_features,
)


def regions(count, dim=4):
    return np.arange(count * dim, dtype=np.float32).reshape(count, dim)


def image(root, image_id="5", photo="5.jpg", **options):
    row = {"image_id": image_id, "image": photo, "references": []}
    file = Hdf5File(root) if root.is_file() else None
    return features_of(row, root, FeatureOptions(**options), file)


def hdf5(path, arrays):
    with h5py.File(path, "w") as file:
        for key, value in arrays.items():
            file[key] = value
    return path


def refused(features, message):
    """Both the reader and the check of headers refuse the features."""
    for read in (features.load, features.check):
        with pytest.raises(DataError, match=message):
            read()


def test_arrays_of_npz_and_npy_files(tmp_path):
    half = regions(3).astype(np.float16)
    for key in ("features", "x", "feat"):
        arrays = {key: half, "boxes": regions(3)}
        np.savez_compressed(tmp_path / "5.npz", **arrays)
        features = image(tmp_path).load(4)
        assert features.dtype == np.float32
        np.testing.assert_array_equal(features, regions(3))
        assert image(tmp_path, dim=4).check() == 4
    np.save(tmp_path / "6.npy", regions(6))
    some = image(tmp_path, "6", dim=4, max_regions=2)
    found = pickle.loads(pickle.dumps(some))
    np.testing.assert_array_equal(found.load(), regions(6)[:2])
    every = image(tmp_path, "6").load()
    assert every.shape == (6, 4)
    (tmp_path / "val2014").mkdir()
    np.savez(tmp_path / "val2014" / "COCO_5.jpg.npz", x=regions(2))
    photo = "/images/val2014/COCO_5.jpg"
    named = image(tmp_path, photo=photo, pattern="{folder}/{stem}.jpg")
    assert named.check() == 4


def test_a_grid_is_one_region_a_cell(tmp_path):
    np.savez(tmp_path / "5.npz", features=regions(6).reshape(2, 3, 4))
    np.testing.assert_array_equal(image(tmp_path, dim=4).load(4), regions(6))
    np.savez(tmp_path / "6.npz", features=regions(6).reshape(4, 2, 3))
    wrong = image(tmp_path, "6", dim=4)
    refused(wrong, r"image '6'.*is \[4, 2, 3\], expected 4")


def test_missing_features_and_wrong_options_are_refused(tmp_path):
    refused(image(tmp_path, "391895"), r"image '391895'.*391895\.npz")
    with pytest.raises(DataError, match="dim is 0"):
        FeatureOptions(dim=0)
    with pytest.raises(DataError, match=r"pattern is '\{folder\}'"):
        FeatureOptions(pattern="{folder}")


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
            root = hdf5(tmp_path / "f.hdf5", {"7": array})
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


def test_keys_of_an_hdf5_file(tmp_path):
    half = regions(5).astype(np.float16)
    path = hdf5(tmp_path / "features", {"5": half, "6/x": half, "COCO_5": half})
    np.testing.assert_array_equal(image(path, dim=4).load(4), regions(5))
    assert image(path, "6", pattern="{image_id}/x").check() == 4
    assert image(path, photo="x/COCO_5.jpg", pattern="{stem}").check() == 4
    for absent in ("4", "6"):
        refused(image(path, absent), rf"image '{absent}' \(.*, key {absent}\).*COCO_5")
    (tmp_path / "no.hdf5").write_bytes(b"not at all")
    with pytest.raises(DataError, match=r"no\.hdf5"):
        image(tmp_path / "no.hdf5").check()


def test_features_that_were_never_or_partly_written_are_refused(tmp_path):
    path = tmp_path / "f.h5"
    packed = {"chunks": (2, 3), "compression": "gzip"}
    with h5py.File(path, "w") as file:
        file.create_dataset("1", (3, 4), "f4")
        file.create_dataset("2", (3, 4), "f4", chunks=(1, 4))
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


def test_pad_features_masks_what_is_not_a_region():
    features, mask = pad_features([regions(2), regions(3), regions(1)])
    assert (features.shape, features.dtype) == ((3, 3, 4), torch.float32)
    assert mask.sum(1).tolist() == [2, 3, 1]
    assert mask[:, 0].all()
    torch.testing.assert_close(features[0, :2], torch.from_numpy(regions(2)))
    assert not features[~mask].any()
