"""Damaged and hostile data files: one error that a user can mend, which names the file, or what is read is right.

Damage is drawn from fixed seeds. Whatever is no error of ``EXPECTED`` is a defect, and so is an error without
the name of the file, or memory that the file's size does not explain.
"""

import gzip
import io
import json
import os
import pickle
import random
import shutil
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

from rewards.registry import build as build_term
from rewards.text.document_frequency import DocumentFrequencies, load_legacy_pickle
from rl_caption.config.schema import XeConfig
from rl_caption.data.base import load_image
from rl_caption.data.features import FeatureOptions, as_image_features, features_of
from rl_caption.data.file_checks import ImageFile, check_image_file
from rl_caption.data.jsonl import JsonLinesData
from rl_caption.data.karpathy import KarpathyData
from rl_caption.data.unpaired import CaptionFile
from rl_caption.runtime.errors import EXPECTED
from rl_caption.training.checkpoint import read_state, seal
from rl_caption.training.run_folder import changed_keys, drop_after
from tests.report_for_tests import write_run

MEMORY = 100 << 20
DEEP = "[" * 100_000 + "]" * 100_000
DAMAGE = [
    *enumerate(
        ("cut", "cut", "cut", "flip", "flip", "flip", "flip", "zeros", "twice", "gzip", "tail")
    )
]
"""Seed and kind of damage."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]  # Pillow's, of damaged metadata


def check_outcome(read: Callable[[], Any], *named: str, also: type[Exception] | None = None) -> Any:
    """What ``read`` returns; None where it raised an error that a user can mend, with all of ``named`` in it."""
    try:
        return read()
    except (*EXPECTED, *filter(None, [also])) as error:
        raised = error
    # Of a ValueError, not its kinds: those are a library's.
    assert type(raised) is also or isinstance(raised, EXPECTED), repr(raised)
    assert [name for name in named if name not in str(raised)] == [], str(raised)
    assert len(str(raised)) < 3000, str(raised)[:300]
    return None


@contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def damaged(content: bytes, kind: str, seed: int) -> bytes:
    draw = random.Random(f"{kind} {seed}")
    place = draw.randrange(1, max(2, len(content)))
    if kind == "cut":
        return content[:place]
    if kind == "flip":
        return (
            content[:place]
            + bytes([content[place] ^ 1 << draw.randrange(8)])
            + content[place + 1 :]
        )
    if kind == "zeros":
        return content[:place] + bytes(8) + content[place + 8 :]
    if kind == "gzip":
        return gzip.compress(content)
    return content * 2 if kind == "twice" else content + draw.randbytes(9)


# --- images -----------------------------------------------------------------------------------------------------------


def picture(kind: str) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    if kind == "PPM":  # 16 bits a pixel, which Pillow writes only from version 11 on
        return b"P5 20 24 65535\n" + (pixels[..., 0].astype(">u2") * 257).tobytes()
    image = Image.fromarray(pixels)
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    image.save(buffer, kind, **({"exif": exif} if kind in ("JPEG", "PNG", "WEBP", "TIFF") else {}))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "GIF", "BMP", "WEBP", "PPM"])
def test_damaged_images(tmp_path: Path, kind: str) -> None:
    path, whole = tmp_path / f"image.{kind.lower()}", picture(kind)
    path.write_bytes(whole)
    right = load_image(path).tobytes()
    for seed, damage in DAMAGE:
        path.write_bytes(damaged(whole, damage, seed))
        image = check_outcome(lambda: load_image(path), path.name)
        assert image is None or image.mode == "RGB"
        verdict = check_image_file(ImageFile(str(path)))
        if verdict.error is not None:
            assert path.name in verdict.error
        elif kind == "PNG" and image is not None:  # the one with checksums
            assert image.tobytes() == right
        assert image is not None or verdict.error is not None, "what is checked can be loaded"


def huge_png(path: Path) -> None:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )


REFUSED_IMAGES: dict[str, Callable[[Path], Any]] = {
    "empty.png": lambda path: path.write_bytes(b""),
    "text.jpg": lambda path: path.write_text("not an image"),
    "page.png": lambda path: path.write_text("<html>404</html>"),
    "pipe.png": os.mkfifo,
    "folder.png": lambda path: path.mkdir(),
    "absent.png": lambda path: None,
    "link.png": lambda path: path.symlink_to("/dev/zero"),
    "loop.png": lambda path: path.symlink_to(path),
    "float.tif": lambda path: Image.fromarray(
        np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    ).save(path),
    "huge.png": huge_png,
    "npy.png": lambda path: np.save(path.open("wb"), np.zeros(3)),
}


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    for name, make in REFUSED_IMAGES.items():
        make(tmp_path / name)
        assert check_outcome(lambda name=name: load_image(tmp_path / name), name) is None
        assert name in str(check_image_file(ImageFile(str(tmp_path / name))).error)


# --- data sets --------------------------------------------------------------------------------------------------------

RECORD: dict[str, Any] = {"filename": "a.jpg", "filepath": "images", "split": "train", "cocoid": 7}
RECORD |= {"sentences": [{"raw": "a dog"}, {"tokens": ["a", "cat"]}]}
ROW: dict[str, Any] = {
    "image": "a.jpg",
    "references": ["a dog", "a cat"],
    "split": "train",
    "image_id": 7,
}
ROW |= {
    "prompt": "a",
    "long_reference": "a long text",
    "positive_captions": ["a dog"],
    "positive_images": ["b.jpg"],
}
WRONG = [
    "null",
    "true",
    "7",
    "-1.5",
    "NaN",
    '""',
    '"x\\u0000y"',
    '"x\\ud800y"',
    "[]",
    "[[1]]",
    "[null]",
    "{}",
]
WRONG += ['{"raw": 1}', "9" * 5000, '"' + "x" * 1000 + '"', "1e999", "[" * 990 + "]" * 990, DEEP]


def replaced(value: Any, key: str, text: str) -> str:
    """JSON in which the value of the first ``key`` is ``text`` as it stands."""
    marked = json.dumps(value)
    place = marked.index(json.dumps(key)) + len(json.dumps(key)) + 2
    _, end = json.JSONDecoder().raw_decode(marked, place)
    return marked[:place] + text + marked[end:]


def check_rows(data: Any) -> None:
    """Check the rows of what was read, if anything was."""
    for split in data.splits if data is not None else ():
        split.encode()
        for row in data.split(split):
            texts = [row["image_id"], str(row["image"]), *row["references"]]
            texts += [row[key] for key in ("prompt", "long_reference") if key in row]
            texts += [
                text
                for key in ("positive_captions", "positive_images")
                for text in row.get(key, [])
            ]
            assert all(isinstance(text, str) for text in texts)
            assert "\0" not in "".join(texts)
            "".join(texts).encode()
            assert row["image_id"]


FORMATS: dict[str, tuple[Callable[[Path], Any], Callable[[str], str]]] = {
    "karpathy": (KarpathyData, lambda record: '{"dataset": "x", "images": [' + record + "]}"),
    "jsonl": (JsonLinesData, lambda row: row + "\n"),
}
PLACES = [("karpathy", key) for key in ("images", *RECORD, "raw", "tokens")] + [
    ("jsonl", key) for key in ROW
]


@pytest.mark.parametrize(("format", "key"), PLACES)
def test_wrong_values(tmp_path: Path, format: str, key: str) -> None:
    path = tmp_path / f"data.{format}"
    for text in WRONG:
        if format == "karpathy":
            content = replaced(
                {"dataset": "x", "images": [RECORD, RECORD | {"cocoid": 8}]}, key, text
            )
            named = (
                ["images[0]"] if len(text) < 2000 and key != "images" and "]]]" not in text else []
            )
        else:
            content, named = (
                json.dumps(ROW | {"image": "b.jpg"}) + "\n" + replaced(ROW, key, text) + "\n",
                ["line 2"],
            )
        path.write_text(content)
        check_rows(check_outcome(lambda: FORMATS[format][0](path), path.name, *named))


@pytest.mark.parametrize(("format", "item"), [("karpathy", RECORD), ("jsonl", ROW)])
def test_damage_keys_that_are_there_twice_and_other_encodings(tmp_path, format, item):
    path, (read, whole) = tmp_path / f"data.{format}", FORMATS[format]
    for seed, damage in DAMAGE:
        path.write_bytes(damaged(whole(json.dumps(item)).encode(), damage, seed))
        check_rows(check_outcome(lambda: read(path), path.name))
    for key in [*item][:3]:
        path.write_text(whole(f'{{"{key}": "x", {json.dumps(item)[1:]}'))
        assert check_outcome(lambda: read(path), path.name, repr(key)) is None
    text = json.dumps(
        item | {"sentences": [{"raw": "ein Möwenpaar"}], "references": ["ein Möwenpaar"]},
        ensure_ascii=False,
    )
    for encoding in ("utf-16", "utf-32", "latin-1", "utf-8-sig"):
        path.write_bytes(whole(text).encode(encoding))
        found = check_outcome(lambda: read(path), path.name)
        assert found is None or found.split("train")[0]["references"] == ["ein Möwenpaar"]


def test_damaged_captions(tmp_path: Path) -> None:
    path, whole = (
        tmp_path / "captions.tsv",
        "\n".join(f"ein Höhlenbär {i}\thttp://{i}" for i in range(40)).encode(),
    )
    for seed, damage in DAMAGE:
        path.write_bytes(damaged(whole, damage, seed))
        found = check_outcome(lambda: CaptionFile(path, column=0, val_fraction=0.3), path.name)
        assert found is None or all(
            len(row["references"]) == 1 for name in found.splits for row in found.split(name)
        )


# --- document frequencies ---------------------------------------------------------------------------------------------


def frequencies() -> DocumentFrequencies:
    captions = [[["a", "dog", "runs", str(number % 7)], ["the", "möwe"]] for number in range(40)]
    return DocumentFrequencies.from_references(captions, eos=True)


def test_damaged_document_frequencies(tmp_path: Path) -> None:
    path, right = tmp_path / "df.npz", frequencies()
    right.save(path)
    whole = path.read_bytes()
    for seed, damage in [*DAMAGE, *((seed, "flip") for seed in range(100, 140))]:
        path.write_bytes(damaged(whole, damage, seed))
        found = check_outcome(lambda: DocumentFrequencies.load(path), path.name, also=ValueError)
        assert found is None or (dict(found.table.items()), repr(found)) == (
            dict(right.table.items()),
            repr(right),
        )


def npy(
    array: np.ndarray | None = None, header: bytes = b"", version: bytes = b"\x01\x00"
) -> bytes:
    if array is not None:
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()
    size = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header))
    return b"\x93NUMPY" + version + size + header


def shaped(shape: str, kind: str = "<f4") -> bytes:
    return b"{'descr': '%s', 'fortran_order': False, 'shape': (%s), }\n" % (
        kind.encode(),
        shape.encode(),
    )


HEADERS: dict[str, bytes] = {
    "1e12 rows": npy(header=shaped("1000000000000, 2048")) + bytes(100),
    "more than 64 bits": npy(header=shaped("99999999999999999999, 99999999999999")),
    "negative": npy(header=shaped("-1, 4")) + bytes(16),
    "nested": npy(header=b"(" * 5000),
    "no dict": npy(header=b"{[]: 1}"),
    "objects": npy(np.array([["a"], [1]], dtype=object)),
    "text": npy(np.array([["a", "b"]])),
    "complex": npy(np.ones((2, 4), np.complex64)),
    "nothing": npy(np.zeros((0, 4), np.float32)),
    "five axes": npy(np.zeros((1, 1, 1, 2, 4), np.float32)),
    "nan": npy(np.full((2, 4), np.nan, np.float32)),
    "beyond float32": npy(np.full((2, 4), 1e300)),
    "pickle": pickle.dumps({"features": [1.0]}),
    "empty": b"",
}


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def test_absurd_arrays_in_document_frequencies(tmp_path: Path) -> None:
    path = tmp_path / "df.npz"
    frequencies().save(path)
    with zipfile.ZipFile(path) as archive:
        members = {
            info.filename.removesuffix(".npy"): archive.read(info) for info in archive.infolist()
        }
    absurd = [("header", array) for array in HEADERS.values()]
    for member in ("vocabulary", "ngrams_2", "counts_2", "fingerprint"):
        absurd += [
            (member, array) for name, array in HEADERS.items() if name != "nested"
        ]  # a second of NumPy's parser
    for member, array in absurd:
        zipped(path, **members | {member: array})
        with bounded_memory():
            assert (
                check_outcome(lambda: DocumentFrequencies.load(path), path.name, also=ValueError)
                is None
            )


def test_an_archive_that_expands_beyond_reason(tmp_path: Path) -> None:
    """An ``.npz`` of 1 MB whose array of features takes 256 MB."""
    size = 1 << 28
    with (
        zipfile.ZipFile(tmp_path / "7.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("features.npy", "w", force_zip64=True) as file,
    ):
        file.write(npy(header=shaped(f"{size // 8192}, 2048")))
        for _ in range(size >> 24):
            file.write(bytes(1 << 24))
    shutil.copy(tmp_path / "7.npz", tmp_path / "df.npz")
    with bounded_memory():
        assert (
            check_outcome(lambda: as_image_features(tmp_path / "7.npz", "7").load(), "7.npz")
            is None
        )
        assert (
            check_outcome(
                lambda: DocumentFrequencies.load(tmp_path / "df.npz"), "df.npz", also=ValueError
            )
            is None
        )


def deep_tuple() -> bytes:
    return b"\x80\x02}X\x12\x00\x00\x00document_frequencyX\x07\x00\x00\x00ref_len".replace(
        b"X\x07", b"}sX\x07"
    ) + (b"N" + b"\x85" * 20_000 + b"s.")


def laughs() -> list[Any]:
    made: list[Any] = []
    for _ in range(40):
        made = [made, made]
    return made


GOOD = {("a",): 3.0, ("a", "dog"): 2.0}
PICKLES: dict[str, bytes] = {
    **{
        name: pickle.dumps({"document_frequency": counts, "ref_len": length}, protocol=2)
        for name, counts, length in (
            ("a count of 400 digits", {("a",): 10**400}, 100),
            ("no number", GOOD, float("nan")),
            ("true", GOOD, True),
            ("nested lists", GOOD, laughs()),
            ("counts that nest", {("a",): laughs()}, 100),
            ("more than there are", {("a",): 500.0}, 100),
            ("words that are numbers", {(1, 2): 2.0}, 100),
        )
    },
    "a persistent id": b"Pid\n.",
    "nested tuples": deep_tuple(),
    "text of 2^40 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",
    "protocol 9": b"\x80\x09N.",
    "an npz": b"PK\x03\x04",
}


def test_hostile_pickles(tmp_path: Path) -> None:
    path = tmp_path / "df.p"
    for name, content in PICKLES.items():
        path.write_bytes(content)
        assert (
            check_outcome(lambda: load_legacy_pickle(path), path.name, also=ValueError) is None
        ), name
        assert (
            check_outcome(lambda: build_term("cider", df=str(path)), path.name, also=ValueError)
            is None
        ), name


# --- features ---------------------------------------------------------------------------------------------------------

IMAGE: Any = {"image_id": "7", "image": "7.jpg", "references": []}
FEATURES = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)


@pytest.mark.parametrize("packed", [True, False])
def test_absurd_headers_of_features(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("7.npz" if packed else "7.npy")
    for name, array in HEADERS.items():
        if packed:
            zipped(path, features=array)
        else:
            path.write_bytes(array)
        (item,) = features_of([IMAGE], tmp_path, FeatureOptions())
        with bounded_memory():
            assert check_outcome(item.load, path.name, "'7'") is None
            assert check_outcome(item.check, path.name, "'7'") is None or name in (
                "nan",
                "beyond float32",
            )


@pytest.mark.parametrize("kind", ["npz", "stored.npz", "npy", "hdf5"])
def test_damaged_features(tmp_path: Path, kind: str) -> None:
    path, options = tmp_path / f"7.{kind}", FeatureOptions()
    if kind == "hdf5":
        with h5py.File(path, "w") as file:
            file["7"] = FEATURES
    elif kind == "npy":
        np.save(path, FEATURES)
    elif kind == "npz":
        np.savez_compressed(path, features=FEATURES)
    else:
        np.savez(path, features=FEATURES)
        options = FeatureOptions(pattern="{image_id}.stored")
    whole = path.read_bytes()
    for seed, damage in DAMAGE:
        path.write_bytes(damaged(whole, damage, seed))
        root = path if kind == "hdf5" else tmp_path
        found = check_outcome(
            lambda root=root: features_of([IMAGE], root, options)[0].load(), path.name
        )
        assert found is None or (found.dtype == np.float32 and np.isfinite(found).all())
        if found is not None and kind.endswith("npz"):
            assert found.tolist() == FEATURES.tolist()


def test_absurd_sizes_of_images_and_hdf5_that_was_never_written(tmp_path: Path) -> None:
    for number, shape in enumerate([(10**12, 2048), (2**40, 2**20), (200_000, 2048)]):
        path = tmp_path / f"{number}.hdf5"
        with h5py.File(path, "w") as file:
            file.create_dataset("7", shape, dtype="f4", chunks=(1, 2048))
        (item,) = features_of([IMAGE], path, FeatureOptions())
        assert check_outcome(item.load, path.name, "'7'") is None
    boxes = np.array([[0, 0, 2, 2], [1, 1, 3, 3], [0, 1, 2, 3]], np.float32)
    for side in (np.nan, np.inf, 0.0, -4.0, [1, 2], "text"):
        np.savez(tmp_path / "7.npz", features=FEATURES, boxes=boxes, image_w=side, image_h=4.0)
        (item,) = features_of([IMAGE], tmp_path, FeatureOptions(box_features="normalised"))
        assert (
            check_outcome(item.load, "7.npz", "'7'")
            is check_outcome(item.check, "7.npz", "'7'")
            is None
        )


# --- run folders ------------------------------------------------------------------------------------------------------

OTHER = [None, True, 3, -1.5, "text", [], [1], {}, {"a": {"b": [1]}}, [[[]]]]


def leaves(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in JSON: of a list to its first."""
    yield path
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content[:1]):
            yield from leaves(value, (*path, key))


def with_value(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = content.copy()
    changed[path[0]] = with_value(content[path[0]], path[1:], value)
    return changed


LINES = [
    "",
    "null",
    "[]",
    '{"step": "1"}',
    '{"step": null}',
    '{"step": true}',
    '{"step": 1.5}',
    '{"val/cider": 1}',
]
LINES += [
    '{"step": 1, "hacking/alarm": "yes"}',
    '{"step": 1, "hacking/alarm": [1]}',
    '{"step": 1, "x": null}',
    DEEP,
]
LINES += [
    '{"step": 1, "step": 2}',
    '{"step": ' + "9" * 5000 + "}",
    '{"step": 1',
    "\0\0\0",
    "\x1f\x8b",
    '"\\ud800"',
]


@pytest.mark.parametrize("end", ["", '\n{"step": 2}\n'])
def test_other_lines_of_metrics(tmp_path: Path, end: str) -> None:
    run = write_run(tmp_path / "run")
    log = run / "metrics.jsonl"
    for line in LINES:
        log.write_text('{"step": 0, "hacking/alarm": 0.0}\n' + line + end)
        before = log.read_bytes()
        if check_outcome(lambda: drop_after(log, 1) is None, "metrics.jsonl", "line 2") is None:
            assert log.read_bytes() == before
        else:
            assert all(json.loads(kept)["step"] <= 1 for kept in log.read_text().splitlines())


STATE = {
    "global_step": 4,
    "metric": "val/cider",
    "best_metric": 1.0,
    "best_step": 2,
    "notes": {},
    "stopped": None,
}


@pytest.mark.parametrize("key", [*STATE, "processes", "signature", "unknown", None])
def test_other_values_in_the_state_of_a_checkpoint(tmp_path: Path, key: str | None) -> None:
    for value in OTHER:
        content = json.dumps(value if key is None else STATE | {key: value})
        (tmp_path / "trainer_state.json").write_text(content)
        seal(tmp_path)
        found = check_outcome(
            lambda: read_state(tmp_path), "trainer_state.json", *([repr(key)] if key else [])
        )
        types = (
            None
            if found is None
            else [type(found.global_step), type(found.notes), type(found.signature)]
        )
        assert types in (None, [int, dict, str])


YAML = ["", "[]", "a: [", "\0", "? [a]\n: 1", "&a [*a]", "\xff", "[" * 200]
YAML += ["!!python/object/apply:os.system ['touch x']"]


def test_other_configurations_of_a_run(tmp_path: Path) -> None:
    for text in YAML:
        (tmp_path / "config.yaml").write_bytes(text.encode("latin-1"))
        found = check_outcome(
            lambda: changed_keys(tmp_path / "config.yaml", XeConfig()), "config.yaml"
        )
        assert found is None or all(isinstance(line, str) for line in found)
