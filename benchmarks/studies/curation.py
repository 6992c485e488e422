"""A data set of which a third of the training captions is bad, and what a curated half of it has left of those.

    python -m benchmarks.studies.curation make --data data/world/dataset.json --out runs/curation/pairs.jsonl
    python -m benchmarks.studies.curation count runs/curation/*/kept.jsonl

Each training image keeps one caption, as on the web. Of three, one is bad: a title by rules (``abstract``) or the
caption of another image (``wrong``), as many of one as of the other. Rows of other splits keep all their references.
``make`` also writes beside it ``random.jsonl``, half of the training rows, drawn; and for ``concreteness``
``captions.txt``, the training captions, and ``ratings.jsonl``, 244 of them (as many as the paper's): 144 abstract ones
with 0, and 100 others with 1.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.studies.concreteness_captions import titles
from rl_caption.data.karpathy import KarpathyData


def make(data: KarpathyData, seed: int) -> list[dict]:
    """Rows of JSON lines; ``kind`` of a training row is clean, abstract or wrong."""
    rng = random.Random(seed)
    train = data.split("train")
    captions = [rng.choice(row["references"]) for row in train]
    kinds = [("clean", "clean", "abstract", "clean", "clean", "wrong")[index % 6] for index in range(len(train))]
    rng.shuffle(kinds)
    made = iter(titles(captions, kinds.count("abstract"), rng))
    rows = []
    for index, (row, kind) in enumerate(zip(train, kinds, strict=True)):
        caption = captions[index]
        if kind == "abstract":
            caption = next(made)
        while kind == "wrong" and caption in row["references"]:
            caption = captions[rng.randrange(len(captions))]
        rows.append({**kept(row), "references": [caption], "split": "train", "kind": kind})
    return rows + [{**kept(row), "split": split} for split in ("val", "test") for row in data.split(split)]


def kept(row: dict) -> dict:
    """Keys of a row that a line has; the image as an absolute path."""
    return {"image_id": row["image_id"], "image": str(Path(row["image"]).resolve()), "references": row["references"]}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("--data", type=Path, required=True, help="Karpathy JSON")
    making.add_argument("--image-root", default=None, help="folder of its images, where it names none")
    making.add_argument("--seed", type=int, default=0)
    making.add_argument("--out", type=Path, required=True)
    counting = commands.add_parser("count")
    counting.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args(argv)
    if args.command == "make":
        rows = make(KarpathyData(args.data, args.image_root), args.seed)
        train = [row for row in rows if row["split"] == "train"]
        half = {row["image_id"] for row in random.Random(args.seed + 1).sample(train, len(train) // 2)}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        drawn = [row for row in rows if row["split"] != "train" or row["image_id"] in half]
        drawing = random.Random(args.seed + 2)
        labels = [
            {"caption": row["references"][0], "rating": rating}
            for rating, count in ((0, 144), (1, 100))  # fewer of 1, so that their median is 0
            for row in drawing.sample([row for row in train if (row["kind"] != "abstract") == bool(rating)], count)
        ]
        folder = args.out.parent
        for path, chosen in ((args.out, rows), (folder / "random.jsonl", drawn), (folder / "ratings.jsonl", labels)):
            path.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
            print(f"{path}: {len(chosen):,} rows")
        (folder / "captions.txt").write_text("".join(f"{row['references'][0]}\n" for row in train), encoding="utf-8")
        return
    print("| file | rows | clean, % | abstract, % | wrong, % |\n| --- | ---: | ---: | ---: | ---: |")
    for path in args.files:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        kinds = Counter(row["kind"] for row in rows if row["split"] == "train")
        shares = " | ".join(f"{100 * kinds[kind] / kinds.total():.1f}" for kind in ("clean", "abstract", "wrong"))
        print(f"| {path} | {kinds.total():,} | {shares} |")


if __name__ == "__main__":
    main()
