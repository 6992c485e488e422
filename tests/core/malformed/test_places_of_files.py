"""What may stand where a file of data is expected: pipes, devices, folders, odd names, other line ends, huge numbers.

Every reader meets every such place. It ends in one error that names the file, or it reads what it read before.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from rewards.clip.emscore import _read_captions
from rewards.model_files import damage, read_object
from rewards.text.chair import ObjectVocabulary, read_objects
from rewards.text.concreteness import read_concreteness
from rewards.text.document_frequency import DocumentFrequencies
from rl_caption.data.encode_features import read_record
from rl_caption.data.features import FeatureOptions, as_image_features, features_of
from rl_caption.data.files import read_captions, read_records, read_references
from rl_caption.data.jsonl import JsonLinesData
from rl_caption.data.karpathy import KarpathyData
from rl_caption.data.parts import check_settings
from rl_caption.data.prepare_features import convert_tsv
from rl_caption.data.unpaired import CaptionFile, CaptionTargets
from tests.core.malformed.test_data_files import RECORD, ROW, check_outcome, frequencies
from tests.core.unit.test_prepare_features import line

SECONDS = 30
MEMORY = 1 << 30
"""More than any of these files needs, and less than a device brings."""
TABLE = "Word\tBigram\tConc.M\ndog\t0\t4.85\nbaking soda\t1\t4.9\n"
REGIONS = np.arange(12, dtype=np.float32).reshape(3, 4)


@contextmanager
def limits() -> Iterator[None]:
    """Inside, waiting for a pipe and reading a device without end are errors of the test."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"it takes over {SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)


def rows(data: Any) -> Any:
    return {
        split: [(row["references"], row.get("prompt")) for row in data.split(split)]
        for split in data.splits
    }


def hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["5_features"] = REGIONS
        file.attrs["encoder"] = "{}"


def from_hdf5(path: Path) -> Any:
    row: Any = {"image_id": "5", "image": "5.png", "references": []}
    return features_of([row], path, FeatureOptions())[0].load(4).tolist(), read_record(path)


def converted(path: Path) -> Any:
    out = path.with_name("out")
    shutil.rmtree(out, ignore_errors=True)
    return convert_tsv([path], out), as_image_features(out / "5.npz", "5").load(8).tolist()


def regions(path: Path) -> Any:
    return as_image_features(path, "5").load(4).tolist()


def text_of(value: Any) -> Callable[[Path], Any]:
    return lambda path: path.write_text(value if isinstance(value, str) else json.dumps(value))


KARPATHY = {"dataset": "x", "images": [RECORD, RECORD | {"cocoid": 8, "split": "val"}]}
LINES = "".join(
    json.dumps(ROW | {"image_id": number, "image": f"{number}.png"}) + "\n" for number in range(3)
)
TARGETS = "".join(
    json.dumps({"caption": f"a dog {number}", "target": number}) + "\n" for number in range(40)
)
COCO = {"images": [{"id": 7}], "categories": [{"id": 1, "name": "dog"}]}
COCO |= {"annotations": [{"image_id": 7, "category_id": 1}]}
DOGS = ObjectVocabulary.read(["dog, puppy"])

Reader = tuple[str, Callable[[Path], Any], Callable[[Path], Any]]
READERS: dict[str, Reader] = {
    "karpathy": ("data.json", text_of(KARPATHY), lambda path: rows(KarpathyData(path))),
    "records": (
        "data.json",
        text_of(KARPATHY),
        lambda path: [record.references for record in read_records(path)],
    ),
    "json lines": ("data.jsonl", text_of(LINES), lambda path: rows(JsonLinesData(path))),
    "caption file": (
        "data.txt",
        text_of("a dog\na cat\n"),
        lambda path: rows(CaptionFile(path, val_fraction=0.5)),
    ),
    "targets": ("data.jsonl", text_of(TARGETS), lambda path: rows(CaptionTargets(path))),
    "captions": (
        "data.json",
        text_of([{"image_id": 7, "caption": "a dög"}]),
        lambda path: dict(read_captions(path)),
    ),
    "references": (
        "data.json",
        text_of({"7": ["a dög"], "8": ["a cat"]}),
        lambda path: dict(read_references(path)),
    ),
    "references of lines": ("data.jsonl", text_of(LINES), lambda path: dict(read_references(path))),
    "npz": ("5.npz", lambda path: np.savez(path, features=REGIONS), regions),
    "npy": ("5.npy", lambda path: np.save(path, REGIONS), regions),
    "hdf5": ("data.h5", hdf5, from_hdf5),
    "tsv": ("data.tsv", text_of(line(5, "bottom-up") + "\n"), converted),
    "tsv of objects": ("data.tsv", text_of(line(5, "vinvl") + "\n"), converted),
    "encoder": ("encoder.json", text_of({"encoder": "x"}), lambda path: read_record(path.parent)),
    "objects": (
        "data.json",
        text_of({"7": ["dog", "puppy"]}),
        lambda path: read_objects(path, DOGS),
    ),
    "objects of COCO": ("data.json", text_of(COCO), lambda path: read_objects(path, DOGS)),
    "synonyms": ("data.txt", text_of("dog, puppy\ncat\n"), ObjectVocabulary.read),
    "document frequencies": (
        "data.npz",
        lambda path: frequencies().save(path),
        DocumentFrequencies.load,
    ),
    "concreteness": ("data.txt", text_of(TABLE), read_concreteness),
    "captions of weights": ("data.txt", text_of("a dog\na cat\n"), _read_captions),
    "configuration of a model": ("config.json", text_of({"hidden_size": 3}), read_object),
    "manifest": ("manifest.json", text_of({"a": {"size": 1}}), lambda path: damage(path.parent)),
    "parts": (
        "parts.json",
        text_of({"seed": 1}),
        lambda path: check_settings(path.parent, {"seed": 1}),
    ),
}
RUN = [f"run/{name}" for name in ("config.yaml", "env.json", "metrics.jsonl", "result.json")]
RUN += [f"evaluation/{name}" for name in ("scores.json", "predictions.json", "settings.json")]
OPTIONAL = {"encoder", "manifest", "parts", *RUN}
"""What need not be there: what is no file counts as none, if it is not named."""


def occupy(path: Path, place: Callable[[Path], Any]) -> None:
    path.unlink()
    place(path)


def listen(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


PLACES: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "link to a pipe": lambda path: (os.mkfifo(path.with_name("pipe")), path.symlink_to("pipe")),
    "folder": Path.mkdir,
    "folder with files": lambda path: (path.mkdir(), (path / path.name).write_text("{}")),
    "socket": listen,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "random device": lambda path: path.symlink_to("/dev/urandom"),
    "empty device": lambda path: path.symlink_to("/dev/null"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "gone": lambda path: None,
}
"""What is no file."""
NAMES = {
    "new line": "odd\nname",
    "not UTF-8": os.fsdecode(b"odd\xff\xfename"),
    "decomposed": "oddna\u0308me",
    "brackets": "odd[1]*?name",
    "spaces": " odd  name ",
    "right to left": "odd\u202ename",
}


def huge_number(content: bytes, draw: random.Random) -> bytes:
    numbers = [*re.finditer(rb"(?<![\w.])\d+(?![\w.])", content)]
    if not numbers:
        return content
    number = draw.choice(numbers)
    return (
        content[: number.start()] + b"9" * draw.choice([309, 400, 5000]) + content[number.end() :]
    )


CONTENTS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": lambda content, draw: b"",
    "line ends of Windows": lambda content, draw: content.replace(b"\n", b"\r\n"),
    "byte order mark": lambda content, draw: b"\xef\xbb\xbf" + content,
    "two marks": lambda content, draw: b"\xef\xbb\xbf" * 2 + content,
    "UTF-16": lambda content, draw: content.decode("latin-1").encode("utf-16"),
    "Latin-1": lambda content, draw: content.replace(b"a", b"\xe4"),
    "zero bytes": lambda content, draw: content + bytes(draw.randrange(1, 99)),
    "blank lines": lambda content, draw: content + b"\n \n\n",
    "a huge number": huge_number,
    "another huge number": huge_number,
    "a third": huge_number,
    "decomposed": lambda content, draw: unicodedata.normalize(
        "NFD", content.decode("latin-1")
    ).encode("latin-1", "replace"),
    "letters of other case": lambda content, draw: content.swapcase(),
}
BINARY = (".npz", ".npy", ".h5")
SAME = {"line ends of Windows", "byte order mark", "blank lines"}
"""What must not change what is read."""


def check_places(path: Path, read: Callable[[Path], Any], optional: bool) -> int:
    """Try every place at ``path``; returns how many were tried."""
    whole = path.read_bytes()
    for name, place in PLACES.items():
        occupy(path, place)
        with limits():
            refused = check_outcome(lambda: (read(path),), path.stem, also=ValueError) is None
        assert refused or optional, name
        for entry in (path, path.with_name("pipe")):
            if entry.is_dir() and not entry.is_symlink():
                (entry / path.name).unlink(missing_ok=True)
                entry.rmdir()
            else:
                entry.unlink(missing_ok=True)
        path.write_bytes(whole)
    return len(PLACES)


def check_contents(path: Path, read: Callable[[Path], Any], seed: str) -> int:
    """Try every change of the content of ``path``; returns how many were tried."""
    whole, draw = path.read_bytes(), random.Random(seed)
    with limits():
        right = repr(read(path))
    for name, change in CONTENTS.items():
        path.write_bytes(change(whole, draw))
        with limits():
            found = check_outcome(lambda: (repr(read(path)),), path.stem, also=ValueError)
        is_same = name in SAME and path.suffix not in BINARY
        assert found is None or not is_same or found[0] == right, name
    path.write_bytes(whole)
    return len(CONTENTS)


@pytest.mark.parametrize("name", READERS)
def test_places_names_and_contents_of_a_file(tmp_path: Path, name: str) -> None:
    file, write, read = READERS[name]
    path = tmp_path / "data" / file
    path.parent.mkdir()
    write(path)
    tried = check_contents(path, read, name) + check_places(path, read, name in OPTIONAL)
    with limits():
        right = repr(read(path))
    for odd in NAMES.values():
        other = (
            tmp_path
            / odd
            / (file if path.parent.name in file or name in OPTIONAL else f"{odd}{path.suffix}")
        )
        other.parent.mkdir()
        write(other)
        with limits():
            found = check_outcome(lambda other=other: (repr(read(other)),), "odd", also=ValueError)
        assert found is None or name in ("caption file", "npz", "npy") or found[0] == right
    assert tried == len(PLACES) + len(CONTENTS)
