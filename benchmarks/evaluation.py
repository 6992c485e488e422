"""The Karpathy test table without METEOR and SPICE, by this package and by pycocoevalcap, in one run.

    python -m benchmarks.evaluation [DATA] [--system magic_result] [--commands] [--images 5000] [--json FILE]

DATA holds ``refs.json`` and ``predictions/*.json``; without it captions are random words, as many as the Karpathy test
split has. Both start from captions as written and end with BLEU-1 to 4, ROUGE-L and CIDEr; pycocoevalcap tokenises with
Java. The detail says whether all scores are equal to the last bit. ``--commands`` times whole commands instead, imports
and files included: ``evaluate`` (with its intervals), ``evaluate --compare`` (with its test) and ``score --reward
cider``, each against a Python process that computes the same metrics of the same files with pycocoevalcap. Needs Java.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import Measurement, Timing, command, compared, timed
from rewards.text.tokenize import _scan
from rl_caption.data.files import read_captions, read_references
from rl_caption.evaluation import JavaError, evaluate_captions, find_java

METRICS = ("bleu", "rouge", "cider")
IMAGES = 5000
"""Of the Karpathy test split, with five references each."""
Captions = dict[str, str]
References = dict[str, list[str]]


def by_package(captions: Captions, references: References) -> dict[str, float]:
    """Scores of this package, with the tokenizer's cache empty, as a program finds it."""
    _scan.cache_clear()
    return evaluate_captions(captions, references, metrics=METRICS).metrics


def by_toolkit(captions: Captions, references: References) -> dict[str, float]:
    """Scores of pycocoevalcap, under this package's names."""
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    tokenizer = PTBTokenizer()
    written = tokenizer.tokenize(
        {key: [{"caption": text} for text in references[key]] for key in captions}
    )
    found = tokenizer.tokenize({key: [{"caption": text}] for key, text in captions.items()})
    with contextlib.redirect_stdout(io.StringIO()):
        bleu, _ = Bleu(4).compute_score(written, found)
    scores = {f"BLEU-{n + 1}": value for n, value in enumerate(bleu)}
    return scores | {
        "ROUGE-L": Rouge().compute_score(written, found)[0],
        "CIDEr": Cider().compute_score(written, found)[0],
    }


def generated(images: int) -> tuple[Captions, References]:
    """A caption and five references of each image; some words of the caption are those of a reference."""
    draw = np.random.default_rng(0)
    letters = list("etaoinshrdlu")
    words = ["".join(draw.choice(letters, draw.integers(2, 9))) for _ in range(9000)]

    def sentence() -> list[str]:
        drawn = [
            words[number % len(words)] for number in draw.zipf(1.4, draw.integers(8, 13)).tolist()
        ]
        return ["A", *drawn[:4], *(["and"] if draw.random() < 0.8 else [","]), *drawn[4:], "."]

    references, captions = {}, {}
    for number in range(images):
        own = [sentence() for _ in range(5)]
        references[str(number)] = [" ".join(each[:-1]) + each[-1] for each in own]
        captions[str(number)] = " ".join([*own[draw.integers(5)][:7], *sentence()[7:]]).lower()
    return captions, references


def systems_of(
    data: str | Path | None, system: str | None, images: int
) -> list[tuple[str, Captions, References]]:
    """Name, captions and references of every system."""
    if data is None:
        return [("generated captions", *generated(images))]
    references = read_references(Path(data, "refs.json"), by="image_name")
    files = sorted(Path(data, "predictions").glob(f"{system or '*'}.json"))
    if not files:
        raise SystemExit(f"there is no {system or '*'}.json in {Path(data, 'predictions')}")
    return [(path.stem, read_captions(path, allow_empty=True), references) for path in files]


TOOLKIT = """
import importlib, json, sys
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

metrics, references, *systems = sys.argv[1:]
references = json.load(open(references))
tokenizer = PTBTokenizer()
written = tokenizer.tokenize({key: [{"caption": text} for text in texts] for key, texts in references.items()})
for system in systems:
    rows = json.load(open(system))
    found = tokenizer.tokenize({row["image_id"]: [{"caption": row["caption"]}] for row in rows})
    for name in metrics.split(","):
        scorer = getattr(importlib.import_module(f"pycocoevalcap.{name.lower()}.{name.lower()}"), name)()
        print(name, scorer.compute_score(written, found)[0])
"""
"""A program that judges files with pycocoevalcap."""


def run_command(arguments: Sequence[str]) -> None:
    """Run a Python process to its end."""
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


def command_rows(
    name: str, captions: Captions, references: References, timing: Timing, folder: Path
) -> list[Measurement]:
    """Whole commands on the same files, in pairs."""
    files = [str(folder / f"{part}.json") for part in ("references", "a", "b")]
    rows = [{"image_id": key, "caption": text} for key, text in captions.items()]
    for file, content in zip(
        files, ({key: references[key] for key in captions}, rows, rows[::-1]), strict=True
    ):
        Path(file).write_text(json.dumps(content))
    known, first, second = files
    evaluate = [
        "evaluate",
        "--metrics",
        ",".join(METRICS),
        "--references",
        known,
        "--out",
        str(folder),
    ]
    score = ["score", "--reward", "cider", "--references", known, "--captions", first]
    pairs = {
        "evaluate": ([*evaluate, "--predictions", first], ["Bleu,Rouge,Cider", known, first]),
        "evaluate --compare": (
            [*evaluate, "--compare", first, second],
            ["Bleu,Rouge,Cider", known, first, second],
        ),
        "score --reward cider": (score, ["Cider", known, first]),
    }
    found = []
    for words, (ours, theirs) in pairs.items():
        variants: dict[str, Callable[[], object]] = {
            f"{words}, {name}": partial(run_command, ["-m", "rl_caption", *ours]),
            "pycocoevalcap as a program": partial(run_command, ["-c", TOOLKIT, *theirs]),
        }
        times = timed(variants, Timing("cpu", timing.repeats), f"{words}, {name}")
        found.append(compared(times, *variants, note=f"; {len(captions)} images"))
    return found


def compare(captions: Captions, references: References) -> str:
    """Whether both give the same scores."""
    ours, theirs = by_package(captions, references), by_toolkit(captions, references)
    unequal = [key for key, value in theirs.items() if ours[key] != value]
    return f"differ: {', '.join(unequal)}" if unequal else f"{len(theirs)} scores equal to the bit"


def measure(
    timing: Timing,
    images: int = IMAGES,
    data: str | None = None,
    system: str | None = None,
    commands: bool = False,
) -> Iterator[Measurement]:
    """Time both on every system; elapsed time, because the toolkit's tokenizer is a process of its own."""
    try:
        find_java()
    except JavaError as error:
        raise SystemExit(f"pycocoevalcap's tokenizer needs Java: {error}") from error
    for name, captions, references in systems_of(data, system, images):
        if commands:
            with tempfile.TemporaryDirectory() as folder:
                yield from command_rows(name, captions, references, timing, Path(folder))
            continue
        note = f"; {len(captions)} images, {compare(captions, references)}"
        variants: dict[str, Callable[[], object]] = {
            f"evaluation, {name}": partial(by_package, captions, references),
            "pycocoevalcap with Java": partial(by_toolkit, captions, references),
        }
        times = timed(variants, Timing("cpu", timing.repeats), f"evaluation, {name}")
        yield compared(times, *variants, note=note)


if __name__ == "__main__":
    options = {"system": None, "commands": False, "images": IMAGES}
    command(__doc__, measure, repeats=1, operand="data", **options)
