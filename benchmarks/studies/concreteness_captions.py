"""Captions of photos and sentences that nobody can draw, as input of ``concreteness`` (docs/icc.md).

    python -m benchmarks.studies.concreteness_captions --photos data/flickr8k/dataset.json captions_val2017.json \
        --sentences descriptions.txt /usr/share/games/fortunes/wisdom --out runs/icc/texts

Writes ``train.txt`` (all distinct captions and sentences, for a language model), ``photos.txt`` (captions of photos),
``captions.txt`` (``--count`` of each kind and of titles by rules, shuffled) and ``ratings.jsonl``: a weak label instead
of people's ratings, 1 for a caption of a photo, 0 for another text.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

TITLES = [
    "How to choose the right {a} for your {b}",
    "{n} tips for a better {a}",
    "The best {a} of {year}: reviews and prices",
    "Buy {a} online, free shipping",
    "{A} vs. {b}: which one is worth your money?",
    "Why every {a} needs a {b}",
    "{A} insurance, financing and maintenance in {year}",
    "What does your {a} say about you?",
    "{A} {b} wholesale, suppliers and manufacturers",
    "The history of the {a}, part {n}",
    "{n} reasons to love your {a}",
    "{A} {b} - official store, sale {n}% off",
    "Everything you always wanted to know about the {a}",
    "The {a} industry report {year}",
    "Ideas for your next {a} on a budget",
    "{A} market: size, growth and forecast until {year}",
    "Frequently asked questions about {a} and {b}",
    "{A} {b} edition {year}, new, size {n}",
    "My {a} project: lessons learned",
    "Sign up for our {a} newsletter and win a {b}",
]
"""A noun of a caption does not make a text concrete: each title has nouns from captions of photos."""


def photo_captions(path: Path, splits: Sequence[str]) -> list[str]:
    """Captions of Karpathy JSON, of some splits, or of the JSON of COCO's annotations."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if "annotations" in data:
        return [row["caption"] for row in data["annotations"]]
    return [
        one["raw"] for row in data["images"] if row["split"] in splits for one in row["sentences"]
    ]


def sentences(path: Path) -> list[str]:
    """Texts of 3 to 30 words in ASCII: lines of a file, or the sentences of a file of ``fortune``, without authors."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    if "\n%\n" not in text:
        parts = text.splitlines()
    else:
        quotes = [" ".join(re.split(r"\n\s*--", quote)[0].split()) for quote in text.split("\n%\n")]
        parts = [
            part
            for quote in quotes
            for part in re.split(r"(?<=[.!?])\s+", quote)
            if part[:1].isupper()
        ]
    return [part for part in parts if 3 <= len(part.split()) <= 30 and part.isascii()]


def titles(captions: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """Titles as in web pages, by rules; nouns are words that end at least 5 captions."""
    last = Counter(
        caption.rstrip(" .").split(" ")[-1].lower() for caption in captions if caption.strip(" .")
    )
    nouns = sorted(word for word, times in last.items() if times >= 5 and word.isalpha())
    if len(nouns) < 2:
        raise SystemExit(
            f"{len(captions)} captions of which {len(nouns)} words end at least 5: titles need two"
        )
    made = []
    for _ in range(count):
        a, b = rng.sample(nouns, 2)
        values = {
            "a": a,
            "b": b,
            "A": a.capitalize(),
            "n": rng.randint(2, 40),
            "year": rng.randint(2005, 2024),
        }
        made.append(rng.choice(TITLES).format(**values))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--photos", type=Path, nargs="+", required=True, help="Karpathy JSON or COCO annotations"
    )
    parser.add_argument("--splits", nargs="+", default=["train"], help="of Karpathy JSON")
    parser.add_argument(
        "--sentences", type=Path, nargs="+", required=True, help="text files, or files of fortune"
    )
    parser.add_argument("--titles", type=int, default=2000, help="by rules")
    parser.add_argument(
        "--count",
        type=int,
        default=5000,
        help="of captions of photos, and of sentences, that are scored",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    photos = sorted(
        {
            " ".join(text.split())
            for path in args.photos
            for text in photo_captions(path, args.splits)
        }
    )
    others = sorted({sentence for path in args.sentences for sentence in sentences(path)})
    made = titles(photos, args.titles, rng)
    chosen = [(text, 1) for text in rng.sample(photos, min(args.count, len(photos)))]
    chosen += [(text, 0) for text in rng.sample(others, min(args.count, len(others))) + made]
    rng.shuffle(chosen)
    args.out.mkdir(parents=True, exist_ok=True)
    files = {
        "train.txt": [*photos, *others, *made],
        "photos.txt": photos,
        "captions.txt": [text for text, _ in chosen],
        "ratings.jsonl": [json.dumps({"caption": text, "rating": label}) for text, label in chosen],
    }
    for name, lines in files.items():
        (args.out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{args.out / name}: {len(lines):,} lines")


if __name__ == "__main__":
    main()
