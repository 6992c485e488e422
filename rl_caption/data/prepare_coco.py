"""COCO captions with Karpathy's splits: make the checked folder that the configurations read from
the downloads.
"""

import argparse
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rewards.base import naming
from rl_caption.data.base import DataError
from rl_caption.data.checks import Findings, check_data, check_row_images
from rl_caption.data.files import Record, coco_records, read_records, write_text
from rl_caption.data.karpathy import KarpathyData
from rl_caption.data.plain_files import json_object, read_json, single_spaced

logger = logging.getLogger(__name__)

KARPATHY = "dataset_coco.json"
ANNOTATIONS = ("captions_train2014.json", "captions_val2014.json")
SOURCES = {
    KARPATHY: "https://cs.stanford.edu/people/karpathy/deepimagesent/caption_datasets.zip",
    ANNOTATIONS[0]: "http://images.cocodataset.org/annotations/annotations_trainval2014.zip",
    ANNOTATIONS[1]: "http://images.cocodataset.org/annotations/annotations_trainval2014.zip",
}
PIXELS = (
    "images: http://images.cocodataset.org/zips/train2014.zip (13 GB) and val2014.zip (6 GB), "
    "unpacked side by side; "
    "give their folder as --images"
)
REGIONS = (
    "bottom-up features: trainval.zip (10 to 100 regions) of "
    "https://github.com/peteanderson80/bottom-up-attention; "
    "rl-caption prepare_features TSV... --out FOLDER unpacks it; give that folder as --features"
)

SUBSET_HINT = "\n(a part of COCO on purpose: --subset)"
IMAGES = {"train": 113_287, "val": 5_000, "test": 5_000}
"""Images of Karpathy's splits; ``train`` has 82,783 and ``restval`` the other 30,504."""
CAPTIONS = {"train": 566_747, "val": 25_010, "test": 25_010}
"""Their captions: together 616,767, the 414,113 of train2014 and the 202,654 of val2014."""


class Official(NamedTuple):
    """One image of the official annotations."""

    file: str
    """Folder and name, such as ``val2014/COCO_val2014_000000391895.jpg``."""
    size: tuple[int, int]
    """Width and height in pixels."""
    captions: list[str]


def prepare(
    out: str | Path,
    downloads: str | Path,
    images: str | Path | None = None,
    features: str | Path | None = None,
    features_kwargs: Mapping[str, Any] | None = None,
    annotations: bool = True,
    subset: bool = False,
    fast: bool = False,
) -> dict[str, dict[str, int]]:
    """Check the downloads and write ``out``. A second call changes nothing and checks only what is
    new.

    ``out`` then holds ``dataset_coco.json`` (splits, raw captions, image sizes) and the links
    ``images`` and ``features``. Arguments are those of the command line. Without ``annotations``,
    captions are not compared with the official ones, and image sizes are unknown. Returns the
    numbers of images and captions of each split. Raises ``DataError`` with everything that is
    missing or differs, with counts and the first offenders.
    """
    out, files = Path(out), _downloads(Path(downloads), annotations)
    findings = Findings()
    records = _read_karpathy(files[KARPATHY], findings)
    counts = _count(records)
    for what, expected in (("images", IMAGES), ("captions", CAPTIONS)) if not subset else ():
        for split in {**expected, **counts[what]}:
            number, right = counts[what].get(split, 0), expected.get(split, 0)
            if number != right:
                findings.add("wrong counts", f"{split} has {number:,} {what}, expected {right:,}")
    official: dict[str, Official] = {}
    if annotations:
        for name in ANNOTATIONS:
            official |= _read_official(files[name])
        _compare_annotations(records, official, findings, subset)
    if findings:
        lines = "\n".join(f"  - {problem}" for problem in findings.values())
        raise DataError(
            f"{files[KARPATHY]} is not ready:\n{lines}" + ("" if subset else SUBSET_HINT)
        )
    _write_captions(out / KARPATHY, records, official)
    _check_inputs(out, images, features, features_kwargs or {}, fast)
    return counts


def _downloads(folder: Path, annotations: bool) -> dict[str, Path]:
    """Name -> path of the required files. Raises ``DataError`` with the missing ones and where to
    get them.
    """
    names = (KARPATHY, *ANNOTATIONS) if annotations else (KARPATHY,)
    places = {name: [folder / name, folder / "annotations" / name] for name in names}
    files = {
        name: next((place for place in both if place.is_file()), None)
        for name, both in places.items()
    }
    missing = [
        f"  - {name}, from {SOURCES[name]}" for name, place in files.items() if place is None
    ]
    if missing:
        without = (
            ", or do without the official annotations: --without_annotations" if annotations else ""
        )
        lines = "\n".join(missing)
        raise DataError(f"missing in {folder}:\n{lines}\nDownload and unpack them there{without}")
    return {name: place for name, place in files.items() if place is not None}


def _read_karpathy(path: Path, findings: Findings) -> dict[str, Record]:
    """Image id -> record, in the order of the file."""
    records: dict[str, Record] = {}
    for record in read_records(path):
        name = f"cocoid {record.image_id} ({record.filename})"
        if record.image_id in records:
            findings.add("images listed twice", name)
        if not record.references:
            findings.add("images without captions", name)
        if any(not caption.strip() for caption in record.references):
            findings.add("images with an empty caption", name)
        records[record.image_id] = record
    return records


def _split_of(record: Record) -> str:
    """The split, with ``restval`` as a part of ``train``."""
    return "train" if record.split == "restval" else record.split


def _count(records: Mapping[str, Record]) -> dict[str, dict[str, int]]:
    """Numbers of images and of captions by split: ``{"images": {...}, "captions": {...}}``."""
    counts: dict[str, dict[str, int]] = {"images": Counter(), "captions": Counter()}
    for record in records.values():
        counts["images"][_split_of(record)] += 1
        counts["captions"][_split_of(record)] += len(record.references)
    return counts


def _read_official(path: Path) -> dict[str, Official]:
    """Images by id of an official caption file; its name, ``captions_val2014.json``, has their
    folder.
    """
    folder, content = path.stem.removeprefix("captions_"), read_json(path, DataError)
    with naming(str(path), (KeyError,), DataError):
        return {
            str(image["id"]): Official(
                f"{folder}/{image['file_name']}", (image["width"], image["height"]), captions
            )
            for image, captions in coco_records(content, path)
        }


def _compare_annotations(
    records: Mapping[str, Record],
    official: Mapping[str, Official],
    findings: Findings,
    subset: bool,
) -> None:
    """Compare captions (in any order), folder and file name of every image with the official ones.

    White space is normalised: it differs at the ends of captions.
    """
    for image_id, record in records.items():
        name = f"cocoid {image_id} ({record.filename})"
        if image_id not in official:
            findings.add("images that the official annotations do not have", name)
            continue
        photo, file = official[image_id], f"{record.filepath}/{record.filename}"
        ours = Counter(map(single_spaced, record.references))
        published = Counter(map(single_spaced, photo.captions))
        if ours != published:
            here, there = [*(ours - published)], [*(published - ours)]
            findings.add(
                "images whose captions differ",
                f"{name}: {here[:1]!r:.80}, officially {there[:1]!r:.80}",
            )
        if file != photo.file:
            findings.add(
                "images whose files have other names",
                f"cocoid {image_id}: {file}, officially {photo.file}",
            )
    if not subset:
        for image_id in [annotated for annotated in official if annotated not in records]:
            findings.add("annotated images that the file does not have", f"cocoid {image_id}")


def _write_captions(
    path: Path, records: Mapping[str, Record], official: Mapping[str, Official]
) -> None:
    """Write Karpathy JSON, one image a line, so that the file can be looked at."""
    lines = []
    for image_id, record in records.items():
        item: dict[str, Any] = {
            "cocoid": int(image_id) if image_id.isdecimal() else image_id,
            "split": record.split,
            "filepath": record.filepath,
            "filename": record.filename,
            "sentences": [{"raw": caption} for caption in record.references],
        }
        if image_id in official:
            item["width"], item["height"] = official[image_id].size
        lines.append(json.dumps(item, ensure_ascii=False))
    text = '{"dataset": "coco", "images": [\n' + ",\n".join(lines) + "\n]}\n"
    if path.is_file() and path.read_bytes() == text.encode():
        logger.info("%s is up to date", path)
    else:
        write_text(path, text)
        logger.info("wrote %s (%.1f MB)", path, path.stat().st_size / 1e6)


def _check_inputs(
    out: Path,
    images: str | Path | None,
    features: str | Path | None,
    features_kwargs: Mapping[str, Any],
    fast: bool,
) -> None:
    """Link and check image files and features, and log where to get what is not there."""
    wrong = []
    for name, target, source in (("images", images, PIXELS), ("features", features, REGIONS)):
        place = _link(out, target, name)
        if place is None:
            logger.info("no %s to check. %s", name, source)
            continue
        cache, of_features = out / f".checked_{name}.json", dict[str, Any]()
        if name == "features":
            of_features = {"features_root": place, "features_kwargs": dict(features_kwargs)}
        try:
            data = KarpathyData(out / KARPATHY, "images", **of_features)
            if of_features:
                check_data(
                    data, data.splits, check_images=False, cache=cache, check_values=not fast
                )
            else:  # not for equal images in two splits: the splits are as they are published
                rows = [row for split in data.splits for row in data.split(split)]
                check_row_images(rows, "training from pixels, or a reward that", not fast, cache)
        except DataError as error:
            wrong.append(str(error))
            continue
        logger.info(
            "%s of %d images are usable", name, sum(len(data.split(split)) for split in data.splits)
        )
    if wrong:
        raise DataError("\n".join(wrong))


def _link(out: Path, source: str | Path | None, name: str) -> Path | None:
    """The path ``out / name``, made a link to ``given`` if that is not None; None where there is
    nothing.

    A folder of features and an HDF5 file get the same name, so that configurations need not tell
    them apart.
    """
    place = out / name
    if source is not None:
        target = Path(source).resolve(strict=True)
        if not os.path.lexists(place):
            place.symlink_to(target)
        elif place.resolve() != target:
            raise DataError(
                f"{place} exists and is not {target}: remove it, or leave the option out"
            )
    return place if place.exists() else None


def main(argv: list[str] | None = None) -> int:
    """Run the command line: ``prepare_coco --out data/coco [--images DIR] [--features PATH]``."""
    sources = "\n".join(f"  {name}\n    {source}" for name, source in SOURCES.items())
    parser = argparse.ArgumentParser(
        prog="rl-caption prepare_coco",
        description="Check the downloads of COCO captions and make the folder that the configurations read.",
        epilog=f"what to download:\n{sources}\n  {PIXELS}\n  {REGIONS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", default="data/coco", help="the folder to make (default: data/coco)"
    )
    parser.add_argument(
        "--downloads", help="folder of the downloaded JSON files (default: OUT/downloads)"
    )
    parser.add_argument("--images", help="folder with train2014 and val2014")
    parser.add_argument("--features", help="folder or HDF5 file of region features")
    parser.add_argument(
        "--features_kwargs", default="{}", metavar="JSON", help='such as {"dim": 2048}'
    )
    parser.add_argument(
        "--without_annotations",
        action="store_true",
        help="do not compare with the official captions",
    )
    parser.add_argument(
        "--subset", action="store_true", help="a part of COCO: do not compare the counts"
    )
    parser.add_argument(
        "--fast", action="store_true", help="do not decode images, nor read values of features"
    )
    arguments = parser.parse_args(argv)
    options = vars(arguments) | {
        "features_kwargs": json_object(arguments.features_kwargs, "--features_kwargs")
    }
    options["downloads"] = arguments.downloads or Path(arguments.out) / "downloads"
    options["annotations"] = not options.pop("without_annotations")
    counts = prepare(**options)
    for split, number in counts["images"].items():
        print(f"{split}: {number:,} images, {counts['captions'][split]:,} captions")
    print(f"{arguments.out} is ready")
    return 0
