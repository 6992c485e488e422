"""What the Python tokeniser changes in published scores, against the toolkit's Java tokeniser.

python benchmarks/tokenizer_agreement.py DATA [--meteor]

DATA holds ``refs.json`` (``[{"image_name", "captions"}]``) and ``predictions/*.json`` (rows of ``image_name`` and
``caption``). Prints Markdown: how many captions get other tokens, and each score (x100) with both tokenisers, as the
value with Java and, in brackets, what Python adds. Needs Java.
"""

import argparse
from pathlib import Path

from rewards.text.tokenize import tokenize
from rl_caption.data.files import read_captions, read_references
from rl_caption.evaluation import Evaluation, evaluate_captions, ptb_tokenize

KEYS = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr")


def agreement(name: str, captions: list[str]) -> str:
    pairs = [(java.split(), tokenize(text)) for java, text in zip(ptb_tokenize(captions), captions, strict=True)]
    different = [(" ".join(java), " ".join(python)) for java, python in pairs if java != python]
    examples = "; ".join(f"`{java}` / `{python}`" for java, python in different[:3])
    return f"| {name} | {len(captions)} | {len(different)} | {examples or 'none'} |"


def difference(key: str, java: Evaluation, python: Evaluation) -> str:
    a, b = 100 * java.metrics[key], 100 * python.metrics[key]
    return f"{a:.4f} ({b - a:+.4f})" if b != a else f"{a:.4f} (=)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with refs.json and predictions/*.json")
    parser.add_argument("--meteor", action="store_true", help="METEOR too (about 20 s a system and tokeniser)")
    arguments = parser.parse_args()
    references = read_references(arguments.data / "refs.json", by="image_name")
    systems = {path.stem: read_captions(path) for path in sorted((arguments.data / "predictions").glob("*.json"))}
    print("| text | captions | tokens differ | first of them (Java / Python) |\n| --- | ---: | ---: | --- |")
    print(agreement("references", [text for texts in references.values() for text in texts]))
    for name, captions in systems.items():
        print(agreement(name, list(captions.values())))
    keys = [key for key in KEYS if key != "METEOR" or arguments.meteor]
    metrics = ("bleu", "rouge", "cider", "meteor") if arguments.meteor else ("bleu", "rouge", "cider")
    print(f"\n| system, x100 (Python - Java) | {' | '.join(keys)} |\n| --- |{' ---: |' * len(keys)}")
    for name, captions in systems.items():
        java = evaluate_captions(captions, references, metrics=metrics, tokenizer="java")
        python = evaluate_captions(captions, references, metrics=metrics, tokenizer="python")
        print(f"| {name} | {' | '.join(difference(key, java, python) for key in keys)} |")


if __name__ == "__main__":
    main()
