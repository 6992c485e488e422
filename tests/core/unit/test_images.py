"""Images of every kind become the RGB pixels that a viewer shows, or are refused by name."""

import os
import re

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from rewards.base import RewardError
from rewards.clip.preprocessing import Preprocessing, pixels
from rewards.images import image_identity, list_images, open_image
from rl_caption.data.checks import ImageFile, verify
from tests.clip_for_tests import noise_image

RAMP = np.linspace(0, 255, 12).astype(np.uint8).reshape(3, 4)
COLOURS = np.stack([RAMP, 255 - RAMP, RAMP // 2], axis=-1)


def saved(path, image, **options):
    image.save(path, **options)
    return path


SIXTEEN = Image.fromarray(RAMP.astype(np.uint16) * 257)
GREY = {
    "16.png": SIXTEEN,
    "16.tif": SIXTEEN,
    "32.tif": Image.fromarray(RAMP.astype(np.int32) * 257),
    "la.png": Image.merge("LA", [Image.fromarray(RAMP)] * 2),
    "l.png": Image.fromarray(RAMP),
}


def test_grey_of_any_depth_is_grey(tmp_path):
    paths = [saved(tmp_path / name, image) for name, image in GREY.items()]
    (tmp_path / "16.pgm").write_bytes(
        b"P5 4 3 65535\n" + (RAMP.astype(np.uint16) * 257).astype(">u2").tobytes()
    )
    for path in (*paths, tmp_path / "16.pgm"):
        image = open_image(path)
        assert image.mode == "RGB"
        assert np.asarray(image).tolist() == np.stack([RAMP] * 3, axis=-1).tolist(), (
            path.name
        )


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "PA", "1", "CMYK", "RGBX"])
def test_colours_of_any_mode_are_those_of_the_image(tmp_path, mode):
    original = Image.fromarray(COLOURS)
    if mode == "1":
        white = np.where(RAMP > 100, 255, 0).astype(np.uint8)
        original = Image.fromarray(np.stack([white] * 3, axis=-1))
    image = original.convert(mode)
    if mode in ("P", "PA"):
        indices = np.arange(12, dtype=np.uint8).reshape(3, 4)
        image = Image.fromarray(indices).convert("P")
        image.putpalette(COLOURS.tobytes())
        image = image.convert(mode)
    images = [image]
    if mode not in ("PA", "RGBX"):  # which no format stores
        suffix = "tif" if mode == "CMYK" else "png"
        images.append(Image.open(saved(tmp_path / f"a.{suffix}", image)))
    for own in images:
        found = open_image(own)
        assert np.asarray(found).tolist() == np.asarray(original).tolist()
        assert found is not own, "a caller may draw on it"


def test_numbers_of_an_unknown_range_are_refused_by_name(tmp_path):
    for kind, values in (
        (np.float32, RAMP / 255.0),
        (np.int32, RAMP),
        (np.float32, RAMP * -257.0),
    ):
        path = saved(tmp_path / "float.tif", Image.fromarray(values.astype(kind)))
        with pytest.raises(RewardError, match=r"float\.tif.*(.*F|.*I)"):
            open_image(path)


@pytest.mark.parametrize("kind", ["png", "jpg", "tif"])
def test_a_photo_stands_the_way_its_orientation_says(tmp_path, kind):
    upright = Image.fromarray(np.kron(COLOURS, np.ones((16, 16, 1), np.uint8)))
    flip = Image.Transpose  # the transposition that undoes each orientation, and makes it but for the quarter turns
    ways = [None, flip.FLIP_LEFT_RIGHT, flip.ROTATE_180, flip.FLIP_TOP_BOTTOM]
    ways += [flip.TRANSPOSE, flip.ROTATE_90, flip.TRANSVERSE, flip.ROTATE_270]
    for orientation, way in enumerate(ways, start=1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored = upright if way is None else upright.transpose(way)
        path = saved(tmp_path / f"a.{kind}", stored, exif=exif)
        image = open_image(path)
        assert image.size == upright.size
        assert np.abs(np.asarray(image, int) - np.asarray(upright, int)).mean() < (
            4 if kind == "jpg" else 0.01
        )
        with Image.open(path) as opened:
            again = open_image(open_image(opened))
        assert again.tobytes() == image.tobytes(), "turned once"
        assert image_identity(again) == image_identity(image)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_part_of_the_cache_key_where_it_changes_the_pixels(mode):
    opaque = noise_image(1).convert(mode)
    other = opaque.copy()
    other.putalpha(noise_image(2, opaque.size).convert("L"))
    prepare = Preprocessing(8)
    assert not torch.equal(pixels(opaque, prepare), pixels(other, prepare))
    assert (
        image_identity(opaque) == image_identity(opaque.copy()) != image_identity(other)
    )


def test_an_animation_gives_its_first_frame_and_a_list_of_frames_is_refused(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    several = {"save_all": True, "append_images": frames[1:]}
    for kind in ("gif", "png", "tif"):
        path = saved(tmp_path / f"a.{kind}", frames[0], **several)
        assert open_image(path).getpixel((1, 1)) == (255, 0, 0)
    with pytest.raises(RewardError, match="2 frames"):
        open_image(frames)  # type: ignore[arg-type]


def test_what_is_no_image_is_refused_by_name(tmp_path):
    (tmp_path / "text.png").write_text("not an image")
    for path in (tmp_path / "text.png", tmp_path, tmp_path / "absent.png"):
        with pytest.raises(RewardError, match=re.escape(repr(str(path)))):
            open_image(path)
    (verdict,) = verify([ImageFile(str(tmp_path / "text.png"))]).values()
    assert "text.png'" in verdict.error


def test_a_bomb_and_an_image_that_is_cut_off_are_refused(tmp_path, monkeypatch):
    path = saved(tmp_path / "noise.png", noise_image(0, (64, 64)))
    (tmp_path / "cut.png").write_bytes(path.read_bytes()[:3000])
    with (
        Image.open(tmp_path / "cut.png") as image,
        pytest.raises(RewardError, match="PngImageFile"),
    ):
        open_image(image)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    monkeypatch.setattr(ImageOps, "exif_transpose", None)  # before it is decoded
    with pytest.raises(RewardError, match=r"noise\.png.*4096"):
        open_image(path)


def test_images_in_folders_are_those_with_a_suffix_that_are_not_hidden(tmp_path):
    names = ["b.PNG", "a/2.jpg", "a/10.jpg", "._b.PNG", ".trash/c.png"]
    for name in (*names, "notes.txt", "png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    found = [str(path.relative_to(tmp_path)) for path in list_images(tmp_path)]
    assert found == ["b.PNG", "a/10.jpg", "a/2.jpg"]
    (flat,) = list_images(tmp_path, recursive=False)
    assert flat.name == "b.PNG"
    (own,) = list_images(tmp_path / ".trash")
    assert own.name == "c.png", "the folder itself may be hidden"


@pytest.mark.parametrize("replace", ["written to", "replaced"])
def test_a_file_of_equal_size_and_time_is_another_image(tmp_path, replace):
    path, other = (
        saved(tmp_path / f"{seed}.bmp", noise_image(seed, (8, 8))) for seed in (1, 2)
    )
    os.utime(path, ns=(10**9, 10**9))
    before, status = image_identity(path), path.stat()
    copy = tmp_path / "copy.bmp"
    copy.write_bytes(path.read_bytes())
    assert image_identity(copy) == before, "content decides"
    if replace == "replaced":
        os.replace(other, path)
    else:
        path.write_bytes(other.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert image_identity(path) != before


def test_the_key_of_an_image_changes_with_its_pixels_mode_and_shape():
    grey = Image.fromarray(RAMP)
    others = [grey.convert("RGB"), Image.fromarray(RAMP.reshape(4, 3))]
    others.append(Image.fromarray(RAMP + 1))
    keys = {image_identity(image) for image in (grey, *others)}
    assert len(keys) == 4
    assert image_identity(grey.copy()) == image_identity(grey)
