"""Region features: reading, refusing, padding."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_caption.data.base import DataError
from rl_caption.data.features import FeatureStore, check_feature_file, load_features, pad_features


def regions(count: int, dim: int = 4) -> np.ndarray:
    return np.arange(count * dim, dtype=np.float32).reshape(count, dim)


@pytest.mark.parametrize("key", ["features", "x", "feat"])
@pytest.mark.parametrize("box_key", ["boxes", "bbox", None])
def test_npz_keys(tmp_path: Path, key: str, box_key: str | None) -> None:
    arrays: dict[str, Any] = {key: regions(3).astype(np.float16)}
    if box_key is not None:
        arrays[box_key] = regions(3).astype(np.float64)
    np.savez_compressed(tmp_path / "5.npz", **arrays)
    features, found = FeatureStore(tmp_path, dim=4).load("5")
    assert features.dtype == np.float32
    np.testing.assert_array_equal(features, regions(3))
    if box_key is None:
        assert found is None
    else:
        assert found is not None
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, regions(3))
    assert check_feature_file(tmp_path / "5.npz", "5", 4) == 4


def test_npy_has_features_alone_and_max_regions_keeps_the_first(tmp_path: Path) -> None:
    np.save(tmp_path / "5.npy", regions(6))
    store = pickle.loads(pickle.dumps(FeatureStore(tmp_path, dim=4, max_regions=2)))
    features, boxes = store.load("5")
    np.testing.assert_array_equal(features, regions(6)[:2])
    assert boxes is None
    assert check_feature_file(tmp_path / "5.npy", "5") == 4


def test_missing_features_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"image '391895' .*no such file; expected 391895\.npz or 391895\.npy"):
        FeatureStore(tmp_path, dim=4).load("391895")
    with pytest.raises(DataError, match="is not a folder"):
        FeatureStore(tmp_path / "nothing", dim=4)
    with pytest.raises(DataError, match="at least 1"):
        FeatureStore(tmp_path, dim=0)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (regions(3, 5), r"the shape is \[3, 5\], expected \[regions, 4\]"),
        (regions(4).reshape(2, 2, 4), r"the shape is \[2, 2, 4\].*one row per cell"),
        (regions(1)[0], r"the shape is \[4\]"),
        (regions(0), "no regions"),
        (np.array([["a", "b", "c", "d"]]), "expected numbers"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_wrong_arrays_are_refused_by_reader_and_by_header_check(
    tmp_path: Path, array: np.ndarray, message: str, suffix: str
) -> None:
    path = tmp_path / f"7{suffix}"
    if suffix == ".npz":
        np.savez(path, features=array)
    else:
        np.save(path, array)
    with pytest.raises(DataError, match=message) as caught:
        load_features(path, "7", dim=4)
    assert "image '7'" in str(caught.value)
    with pytest.raises(DataError, match=message):
        check_feature_file(path, "7", dim=4)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    array = regions(3).astype(np.float64)
    array[1, 2] = value
    np.save(tmp_path / "7.npy", array)
    with pytest.raises(DataError, match=r"image '7'.*features\[1, 2\] is"):
        FeatureStore(tmp_path, dim=4).load("7")
    np.savez(tmp_path / "8.npz", x=regions(3), boxes=array)
    with pytest.raises(DataError, match=r"image '8'.*boxes\[1, 2\] is"):
        FeatureStore(tmp_path, dim=4).load("8")


def test_wrong_boxes_and_keys_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "7.npz", features=regions(3), boxes=regions(2))
    with pytest.raises(DataError, match=r"boxes are float32 \[2, 4\], expected numbers \[3, 4\]"):
        FeatureStore(tmp_path, dim=4).load("7")
    np.savez(tmp_path / "8.npz", att=regions(3))
    for read in (load_features, check_feature_file):
        with pytest.raises(DataError, match=r"holds the arrays \['att'\], expected one of features, x, feat"):
            read(tmp_path / "8.npz", "8")


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_files_that_are_cut_off_empty_or_pickled_are_refused(tmp_path: Path, suffix: str) -> None:
    whole = tmp_path / f"whole{suffix}"
    if suffix == ".npz":
        np.savez(whole, features=regions(30))
    else:
        np.save(whole, regions(30))
    cut, empty, pickled = (tmp_path / f"{name}{suffix}" for name in ("cut", "empty", "pickled"))
    cut.write_bytes(whole.read_bytes()[:200])
    empty.touch()
    objects = np.array([[{"a": 1}]], dtype=object)
    if suffix == ".npz":
        np.savez(pickled, features=objects)
    else:
        np.save(pickled, objects)
    for path in (cut, empty, pickled):
        with pytest.raises(DataError, match=f"image '{path.stem}'"):
            load_features(path, path.stem)
        with pytest.raises(DataError, match=f"image '{path.stem}'"):
            check_feature_file(path, path.stem)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "executed",))

    (tmp_path / "7.npy").write_bytes(pickle.dumps(Bomb()))
    np.save(tmp_path / "8.npy", np.array([[Bomb()]], dtype=object))
    for image_id in ("7", "8"):
        with pytest.raises(DataError):
            FeatureStore(tmp_path, dim=1).load(image_id)
    assert not (tmp_path / "executed").exists()


def test_pad_features_masks_what_is_not_a_region() -> None:
    features, mask = pad_features([regions(2), regions(3), regions(1)])
    assert features.shape == (3, 3, 4)
    assert features.dtype == torch.float32
    assert mask.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    torch.testing.assert_close(features[0, :2], torch.from_numpy(regions(2)))
    assert not features[~mask].any()


def test_pad_features_refuses_mixed_sizes_and_nothing() -> None:
    with pytest.raises(DataError, match=r"item 1 has the shape \[2, 5\]"):
        pad_features([regions(2), regions(2, 5)])
    with pytest.raises(DataError, match="item 0"):
        pad_features([regions(2)[0]])
    with pytest.raises(DataError, match="no images"):
        pad_features([])
