"""Features from a frozen encoder: equal to its output on each photo, resumed, refused,
and read back by the data.
"""

import os
from types import MappingProxyType

import numpy as np
import pytest
import torch
from PIL import Image

from rewards.clip.pretrained import ImageEncoder, load_part
from rl_caption.config.commands import PrepareFeaturesConfig
from rl_caption.config.schema import DataConfig
from rl_caption.data import prepare_features
from rl_caption.data.base import DataError
from rl_caption.data.checks import check_data
from rl_caption.data.files import write_json
from rl_caption.data.formats import with_features
from rl_caption.data.rows import karpathy
from rl_caption.runtime.errors import ConfigError
from tests.clip_for_tests import noise_image
from tests.encoders_for_tests import save_vit
from tests.interruptions_for_tests import interrupted

OWN = "tests.encoders_for_tests:MeanColours"
COUNT = 5


@pytest.fixture
def dataset(tmp_path):
    """A Karpathy JSON of five photos of several sizes and modes, in ``images``, with
    ids that are not their names.
    """
    folder = tmp_path / "data"
    (folder / "images").mkdir(parents=True)
    items = []
    for number, mode in enumerate(("RGB", "P", "L", "RGBA", "LA")):
        photo = noise_image(number, (40 + 3 * number, 37), mode)
        photo.save(folder / f"images/photo{number}.png")
        item = {"filename": f"photo{number}.jpg", "imgid": 10 + number}
        item["split"] = "train" if number else "val"
        items.append(item | {"sentences": [{"raw": "a dog"}]})
    write_json(folder / "dataset_tiny.json", {"images": items})
    return folder


def options(dataset, **changed):
    files = {"image_root": "images", "image_extension": ".png"}
    return {"path": dataset, "files": files, "batch_size": 2} | changed


def encode_features(encoder, path, out, files=MappingProxyType({}), **options):
    data = DataConfig(path=str(path), **files)
    options |= {"encoder": encoder, "data": data, "out": str(out)}
    return prepare_features.encode_features(PrepareFeaturesConfig(**options))


def read(dataset, out):
    """Image id -> features [R, D], as training reads them."""
    data = with_features(karpathy(dataset, "images", ".png"), out, {})
    check_data(data, [*data])
    every = [row for rows in data.values() for row in rows]
    return {row["image_id"]: row["features"].load() for row in every}


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_features_are_the_output_of_the_encoder(tmp_path, dataset, dtype):
    encoder, out = save_vit(tmp_path / "vit"), tmp_path / "made" / "features"
    written = encode_features(encoder, out=out, dtype=dtype, **options(dataset))
    assert written == (COUNT, 0)
    network, found = load_part(ImageEncoder, encoder), read(dataset, out)
    assert sorted(found) == [str(10 + number) for number in range(COUNT)]
    tolerance = 2e-3 if dtype == "float16" else 1e-5
    for number in range(COUNT):
        photo = Image.open(dataset / f"images/photo{number}.png")
        grid = network(network.preprocessing(photo)[None])[0].flatten(0, 1)
        features = found[str(10 + number)]
        np.testing.assert_allclose(features, grid, rtol=tolerance, atol=tolerance)
    with np.load(out / "10.npz") as file:
        assert file["features"].shape == (4, 4, 16)
        assert file["features"].dtype == dtype


def test_a_killed_run_goes_on_and_images_are_added_and_replaced(tmp_path, dataset):
    out, photos = tmp_path / "part", dataset / "images"
    with interrupted(np, "savez", after=3):
        encode_features(OWN, out=out, **options(dataset))
    assert encode_features(OWN, out=out, **options(dataset)) == (2, 3)
    assert encode_features(OWN, out=out, **options(dataset)) == (0, COUNT)
    # A folder of photos is a dataset, too; their ids are their names.
    (photos / "notes.txt").write_text("no photo")
    out = tmp_path / "photos"
    assert encode_features(OWN, photos, out, kwargs={"gain": 0.5}) == (COUNT, 0)
    noise_image(9).save(photos / "new.png")
    noise_image(99).save(photos / "photo1.png")
    later = (out / "photo1.npz").stat().st_mtime + 10
    os.utime(photos / "photo1.png", (later, later))
    assert encode_features(OWN, photos, out, kwargs={"gain": 0.5}) == (2, COUNT - 1)
    names = [path.stem for path in out.glob("*.npz")]
    assert sorted(names) == ["new", *(f"photo{number}" for number in range(COUNT))]


def test_features_of_another_or_an_unknown_encoder_are_refused(tmp_path, dataset):
    first, second = (save_vit(tmp_path / f"vit{seed}", seed) for seed in range(2))
    out = tmp_path / "features"
    encode_features(first, out=out, **options(dataset))
    for encoder, changed in ((second, {}), (first, {"dtype": "float32"})):
        with pytest.raises(ConfigError, match="encoder"):
            encode_features(encoder, out=out, **options(dataset, **changed))
    save_vit(tmp_path / "vit0", seed=2)  # other weights under the same name
    with pytest.raises(ConfigError, match="weights"):
        encode_features(first, out=out, **options(dataset))
    (out / "encoder.json").unlink()
    with pytest.raises(ConfigError, match="/features "):
        encode_features(first, out=out, **options(dataset))


def test_what_cannot_be_used_is_named(tmp_path, dataset):
    out, twice = tmp_path / "out", tmp_path / "twice"
    twice.mkdir()
    for suffix in (".png", ".jpg"):
        noise_image(0).save(twice / f"a{suffix}")
    with pytest.raises(DataError, match=r"'a' is .*a\.jpg.*a\.png"):
        encode_features(OWN, twice, out)
    with pytest.raises(ConfigError, match="Identity"):
        encode_features("torch.nn:Identity", out=out, **options(dataset))
    damaged = dataset / "images/photo4.png"
    damaged.write_bytes(damaged.read_bytes()[:200])
    with pytest.raises(DataError, match=r"1 of 5 .*photo4\.png"):
        encode_features(OWN, out=out, **options(dataset))
    assert not out.exists(), "found before anything is encoded"
