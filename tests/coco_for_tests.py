"""A tiny COCO: Karpathy's JSON, photos and bottom-up features, as they are downloaded."""

import numpy as np
from PIL import Image

from rl_caption.data.files import write_json

SPLITS = ["train"] * 8 + ["restval"] * 2 + ["val"] * 4 + ["test"] * 4
WORDS = ("dog", "cat", "horse", "bird")
WIDTH, HEIGHT = 32, 24


def captions_of(number):
    """Five captions with white space as Karpathy's file has it."""
    word = WORDS[number % 4]
    return [
        f"a {word} on the grass",
        f"A {word} .",
        f"the {word} is here ",
        f"one {word}  on a field",
        f"a small {word}",
    ]


def file_of(number):
    """Folder and name of a photo."""
    folder = "train2014" if SPLITS[number] == "train" else "val2014"
    return folder, f"COCO_{folder}_{100 + number:012d}.jpg"


def write_downloads(folder):
    """``dataset_coco.json``."""
    records = []
    for number, split in enumerate(SPLITS):
        place, name = file_of(number)
        sentences = [
            {"tokens": text.split(), "raw": text, "imgid": number}
            for text in captions_of(number)
        ]
        record = {
            "filepath": place,
            "sentids": [],
            "filename": name,
            "imgid": number,
            "split": split,
            "sentences": sentences,
            "cocoid": 100 + number,
        }
        records.append(record)
    write_json(folder / "dataset_coco.json", {"images": records, "dataset": "coco"})
    return folder


def write_photos(folder):
    """``train2014`` and ``val2014``."""
    for number in range(len(SPLITS)):
        place, name = file_of(number)
        (folder / place).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(
            0, 255, (HEIGHT, WIDTH, 3), np.uint8
        )
        Image.fromarray(pixels).save(folder / place / name)
    return folder


def write_features(folder, dim=2048):
    """Bottom-up features: 2 to 5 regions with boxes."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(SPLITS)):
        generator = np.random.default_rng(number)
        count = 2 + number % 4
        features = generator.normal(size=(count, dim)).astype(np.float16)
        boxes = np.tile(np.array([[1, 2, 20, 22]], np.float32), (count, 1))
        np.savez(folder / f"{100 + number}.npz", features=features, boxes=boxes)
    return folder
