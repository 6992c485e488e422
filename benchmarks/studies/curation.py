"""Make a data set in which a third of the training captions is bad, and count how many of them a selection has kept.

    python -m benchmarks.studies.curation make --data data/world/dataset.json --out runs/curation/pairs.jsonl
    python -m benchmarks.studies.curation count --pairs runs/curation/pairs.jsonl runs/curation/*/kept.jsonl

Each training image keeps one caption, as on the web, or with ``--all_captions`` all of them. A sixth of the captions is
replaced by titles that were made by rules (``abstract``), a sixth by captions of other images (``wrong``). Rows of
other splits keep all their references. ``make`` writes beside ``--out``

- ``random.jsonl``: a random half of the training captions;
- ``captions.txt`` and ``ratings.jsonl`` for ``concreteness``: the training captions, and 244 of them (as many as in the
  paper) with ratings: 144 abstract ones with 0 and 100 others with 1;
- ``scorer.jsonl``: the first ``--scorer_images`` training images with their own captions, for the training of the model
  that scores; the data set then lacks them.
"""

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.studies.concreteness_captions import titles
from rl_caption.data.karpathy import KarpathyData


def make(
    data: KarpathyData, seed: int, all_captions: bool = False, scorer_images: int = 0
) -> list[dict]:
    """The rows of the data set; ``kinds`` of a training row says whether each caption is clean, abstract or wrong."""
    rng = random.Random(seed)
    train = data.split("train")[scorer_images:]
    pairs = [
        (index, caption)
        for index, row in enumerate(train)
        for caption in (row["references"] if all_captions else [rng.choice(row["references"])])
    ]
    captions = [caption for _, caption in pairs]
    kinds = [
        ("clean", "clean", "abstract", "clean", "clean", "wrong")[number % 6]
        for number in range(len(pairs))
    ]
    rng.shuffle(kinds)
    made = iter(titles(captions, kinds.count("abstract"), rng))
    rows: list[dict] = [
        {**kept(row), "references": [], "split": "train", "kinds": []} for row in train
    ]
    for (index, caption), kind in zip(pairs, kinds, strict=True):
        if kind == "abstract":
            caption = next(made)
        while kind == "wrong" and caption in train[index]["references"]:
            caption = captions[rng.randrange(len(captions))]
        rows[index]["references"].append(caption)
        rows[index]["kinds"].append(kind)
    return rows + others(data)


def others(data: KarpathyData) -> list[dict]:
    """Rows of validation and test with all their references."""
    return [{**kept(row), "split": split} for split in ("val", "test") for row in data.split(split)]


def kept(row: dict) -> dict:
    """The keys of a row that are written; the image as an absolute path."""
    return {
        "image_id": row["image_id"],
        "image": str(Path(row["image"]).resolve()),
        "references": row["references"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("--data", type=Path, required=True, help="Karpathy JSON")
    making.add_argument(
        "--image-root", default=None, help="folder of its images, where it names none"
    )
    making.add_argument("--seed", type=int, default=0)
    making.add_argument(
        "--all_captions", action="store_true", help="all captions of an image, not one"
    )
    making.add_argument(
        "--scorer_images", type=int, default=0, help="training images kept back for scorer.jsonl"
    )
    making.add_argument("--out", type=Path, required=True)
    counting = commands.add_parser("count")
    counting.add_argument("--pairs", type=Path, required=True, help="what make wrote")
    counting.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args(argv)
    if args.command == "make":
        write(args, KarpathyData(args.data, args.image_root))
        return
    kinds = {
        (row["image_id"], caption): kind
        for row in lines(args.pairs)
        if row["split"] == "train"
        for caption, kind in zip(row["references"], row["kinds"], strict=True)
    }
    print(
        "| file | captions | clean, % | abstract, % | wrong, % |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for path in args.files:
        rows = [row for row in lines(path) if row["split"] == "train"]
        counts = Counter(
            kinds[row["image_id"], caption] for row in rows for caption in row["references"]
        )
        shares = " | ".join(
            f"{100 * counts[kind] / counts.total():.1f}" for kind in ("clean", "abstract", "wrong")
        )
        print(f"| {path} | {counts.total():,} | {shares} |")


def write(args: argparse.Namespace, data: KarpathyData) -> None:
    """The files of ``make``."""
    rows = make(data, args.seed, args.all_captions, args.scorer_images)
    train = [
        (row, number)
        for row in rows
        if row["split"] == "train"
        for number in range(len(row["references"]))
    ]
    half = {
        (row["image_id"], number)
        for row, number in random.Random(args.seed + 1).sample(train, len(train) // 2)
    }
    drawn = []
    for row in rows:
        if row["split"] == "train":
            some = [
                text
                for number, text in enumerate(row["references"])
                if (row["image_id"], number) in half
            ]
            drawn += [{**row, "references": some}] if some else []
        else:
            drawn.append(row)
    drawing = random.Random(args.seed + 2)
    labels = [
        {"caption": row["references"][number], "rating": rating}
        for rating, count in ((0, 144), (1, 100))  # fewer of 1, so that their median is 0
        for row, number in drawing.sample(
            [
                (row, number)
                for row, number in train
                if (row["kinds"][number] != "abstract") == bool(rating)
            ],
            count,
        )
    ]
    folder = args.out.parent
    folder.mkdir(parents=True, exist_ok=True)
    files = {args.out: rows, folder / "random.jsonl": drawn, folder / "ratings.jsonl": labels}
    if args.scorer_images:
        held = data.split("train")[: args.scorer_images]
        files[folder / "scorer.jsonl"] = [{**kept(row), "split": "train"} for row in held] + others(
            data
        )
    for path, chosen in files.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
        print(f"{path}: {len(chosen):,} rows")
    captions = "".join(f"{row['references'][number]}\n" for row, number in train)
    (folder / "captions.txt").write_text(captions, encoding="utf-8")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
