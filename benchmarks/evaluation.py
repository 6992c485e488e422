"""Time of the Karpathy test table without METEOR and SPICE, by pycocoevalcap and by this package, in one run.

python benchmarks/evaluation.py DATA [--system magic_result] [--meteor]

DATA holds ``refs.json`` and ``predictions/*.json``. Both start from captions as written and end with BLEU-1 to 4,
ROUGE-L and CIDEr; pycocoevalcap in its usual way, with its Java tokeniser. Prints seconds, their ratio, and whether all
scores are equal to the last bit. ``--meteor`` compares METEOR of every system with the toolkit's, untimed. Needs Java.
"""

import argparse
import contextlib
import io
import time
from pathlib import Path

from rl_caption.data.files import read_captions, read_references
from rl_caption.evaluation import evaluate_captions

METRICS = ("bleu", "rouge", "cider")


def by_toolkit(captions: dict[str, str], references: dict[str, list[str]], meteor: bool) -> dict[str, float]:
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.meteor.meteor import Meteor
    from pycocoevalcap.rouge.rouge import Rouge
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    tokenizer = PTBTokenizer()
    gts = tokenizer.tokenize({key: [{"caption": text} for text in references[key]] for key in captions})
    res = tokenizer.tokenize({key: [{"caption": text}] for key, text in captions.items()})
    if meteor:
        return {"METEOR": Meteor().compute_score(gts, res)[0]}
    with contextlib.redirect_stdout(io.StringIO()):
        bleu, _ = Bleu(4).compute_score(gts, res)
    scores = {f"BLEU-{n + 1}": value for n, value in enumerate(bleu)}
    return scores | {"ROUGE-L": Rouge().compute_score(gts, res)[0], "CIDEr": Cider().compute_score(gts, res)[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with refs.json and predictions/*.json")
    parser.add_argument("--system", help="one file of predictions (default: all)")
    parser.add_argument("--meteor", action="store_true", help="compare METEOR, too")
    arguments = parser.parse_args()
    references = read_references(arguments.data / "refs.json", by="image_name")
    print("| system | images | pycocoevalcap, s | rl-caption, s | ratio | scores |\n|---|---:|---:|---:|---:|---|")
    for path in sorted((arguments.data / "predictions").glob(f"{arguments.system or '*'}.json")):
        captions = read_captions(path, allow_empty=True)
        started = time.perf_counter()
        mine = evaluate_captions(captions, references, metrics=METRICS).metrics
        between = time.perf_counter()
        theirs = by_toolkit(captions, references, meteor=False)
        ended = time.perf_counter()
        if arguments.meteor:
            mine |= evaluate_captions(captions, references, metrics=("meteor",)).metrics
            theirs |= by_toolkit(captions, references, meteor=True)
        unequal = [key for key, value in theirs.items() if mine[key] != value]
        equal = f"{len(theirs)} equal" if not unequal else f"differ: {', '.join(unequal)}"
        own, other = between - started, ended - between
        print(f"| {path.stem} | {len(captions)} | {other:.1f} | {own:.1f} | {own / other:.2f} | {equal} |", flush=True)


if __name__ == "__main__":
    main()
