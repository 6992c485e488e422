"""Do COCO captions in Karpathy's splits have the right counts, and are they the official ones?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rl_caption.data.check_report import SHOWN
from rl_caption.data.json_stream import stream_lists
from rl_caption.data.karpathy import Record, read_record

IMAGES = {"train": 113_287, "val": 5_000, "test": 5_000}
"""Images of Karpathy's splits; ``train`` has 82,783 and ``restval`` the other 30,504."""
CAPTIONS = {"train": 566_747, "val": 25_010, "test": 25_010}
"""Their captions: together 616,767, the 414,113 of train2014 and the 202,654 of val2014."""


class OfficialImage(NamedTuple):
    """What an official caption file says of an image."""

    file: str
    """Folder and name, such as ``val2014/COCO_val2014_000000391895.jpg``."""
    size: tuple[int, int]
    """Width and height in pixels."""


@dataclass
class Findings:
    """Kinds of problem with counts and the first offenders."""

    counts: dict[str, int] = field(default_factory=dict)
    offenders: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, offender: str) -> None:
        """Count one more of a kind; the first are named."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        named = self.offenders.setdefault(kind, [])
        if len(named) < SHOWN:
            named.append(offender)

    def __str__(self) -> str:
        lines = []
        for kind, count in self.counts.items():
            more = f", and {count - SHOWN} more" if count > SHOWN else ""
            lines.append(f"  - {count} {kind}: {'; '.join(self.offenders[kind])}{more}")
        return "\n".join(lines)


def read_records(path: Path, findings: Findings) -> dict[str, Record]:
    """Read Karpathy JSON: image id -> record, in the order of the file."""
    records: dict[str, Record] = {}
    for _, index, item in stream_lists(path, ["images"]):
        record = read_record(item, f"{path}, images[{index}]")
        if record.image_id in records:
            findings.add("images listed twice", f"cocoid {record.image_id} ({record.filename})")
        if not record.references:
            findings.add("images without captions", f"cocoid {record.image_id} ({record.filename})")
        if any(not caption.strip() for caption in record.references):
            findings.add("images with an empty caption", f"cocoid {record.image_id} ({record.filename})")
        records[record.image_id] = record
    return records


def split_of(record: Record) -> str:
    """The split, with ``restval`` as a part of ``train``."""
    return "train" if record.split == "restval" else record.split


def count(records: Mapping[str, Record]) -> dict[str, dict[str, int]]:
    """Numbers of images and of captions by split: ``{"images": {...}, "captions": {...}}``."""
    images: dict[str, int] = {}
    captions: dict[str, int] = {}
    for record in records.values():
        split = split_of(record)
        images[split] = images.get(split, 0) + 1
        captions[split] = captions.get(split, 0) + len(record.references)
    return {"images": images, "captions": captions}


def compare_counts(counts: Mapping[str, Mapping[str, int]], findings: Findings) -> None:
    """Compare with the whole of COCO."""
    for what, expected in (("images", IMAGES), ("captions", CAPTIONS)):
        for split in {**expected, **counts[what]}:
            number, right = counts[what].get(split, 0), expected.get(split, 0)
            if number != right:
                findings.add("wrong counts", f"{split} has {number:,} {what}, expected {right:,}")


def read_annotations(
    path: Path, captions: dict[str, list[str]], images: dict[str, OfficialImage], findings: Findings
) -> None:
    """Add what an official caption file says: captions and images by image id.

    The folder of its images is in its name: ``captions_val2014.json``.
    """
    folder = path.stem.removeprefix("captions_")
    for key, index, item in stream_lists(path, ["images", "annotations"]):
        where = f"{path.name}, {key}[{index}]"
        if key == "images":
            try:
                size = int(item["width"]), int(item["height"])
                images[str(item["id"])] = OfficialImage(f"{folder}/{item['file_name']}", size)
            except (TypeError, KeyError, ValueError):
                findings.add("images without id, file_name, width and height", f"{where} is {item!r:.80}")
            continue
        try:
            captions.setdefault(str(item["image_id"]), []).append(_plain(item["caption"]))
        except (TypeError, KeyError, AttributeError):
            findings.add("annotations without image_id and caption", f"{where} is {item!r:.80}")


def _plain(caption: str) -> str:
    """A caption with single spaces: Karpathy's file has other white space at line ends than the official one."""
    return " ".join(caption.split())


def compare_captions(
    records: Mapping[str, Record], official: Mapping[str, Sequence[str]], findings: Findings, subset: bool
) -> None:
    """Compare every image's captions with the official ones, in any order and whatever their white space."""
    for image_id, record in records.items():
        name = f"cocoid {image_id} ({record.filename})"
        if image_id not in official:
            findings.add("images that the official annotations do not have", name)
            continue
        ours, theirs = (Counter(map(_plain, captions)) for captions in (record.references, official[image_id]))
        if ours != theirs:
            here, there = ([*more] for more in (ours - theirs, theirs - ours))
            findings.add("images whose captions differ", f"{name}: {here[:1]!r:.80}, officially {there[:1]!r:.80}")
    for image_id in official:
        if image_id not in records and not subset:
            findings.add("annotated images that the file does not have", f"cocoid {image_id}")


def compare_files(records: Mapping[str, Record], official: Mapping[str, OfficialImage], findings: Findings) -> None:
    """Compare the folder and name of every image's file with the official ones."""
    for image_id, record in records.items():
        ours = f"{record.filepath}/{record.filename}"
        if image_id in official and ours != official[image_id].file:
            findings.add(
                "images whose files have other names",
                f"cocoid {image_id}: {ours}, officially {official[image_id].file}",
            )
