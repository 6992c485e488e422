"""The Python tokenizer against the toolkit's, and what tokens change in published scores (docs/evaluation.md).

    python -m benchmarks.studies.tokenizer_agreement DATA [--stream 500000] [--spaces]

DATA is a folder with ``coco_val2017_captions``, ``coco_karpathy_test``, ``flickr8k`` and ``long_captions``. Prints as
Markdown how many captions of each are outside of the tested class (``rewards.text.tokenize.is_tested``), and how many
have other tokens than by Java; the same for strings of up to three characters and ``--stream`` random odd strings.
``--spaces`` prints instead what PTB tokens change in the scores of four systems against plain white space. Needs Java.
"""

import argparse
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from rewards.text import ptb_rules
from rewards.text.tokenize import is_tested, tokenize, tokenize_lines
from rl_caption.data.files import read_captions, read_references
from rl_caption.evaluation import evaluate_captions, ptb_tokenize
from rl_caption.evaluation.results import markdown

KEYS = ("BLEU-1", "BLEU-4", "ROUGE-L", "CIDEr")
WORDS = """
    a an the man dog A The Man DOG NYC iPhone McDonald's dogs' can't cannot gonna it's o'clock 'em '90s t-shirt
    black-and-white 10-year-old and/or w/ no. st. mr. u.s. a.m. b. p.m. etc. vs. ft. 3.5 .5 1,000 12:30 1/2 $5.50 £20
    50% 2nd 90s 5pm 4x4 30° #1 ½ café naïve Straße foo_bar rock'n'roll Y'all O'Brien “hi” ‘ok’ don’t 😀 ☺ ™ … -- ...
    """.split()  # noqa: SIM905
ENTITIES = """
    &amp; &AMP; &Amp; &nbsp; &NBSP; &apos; &Apos; &quot; &Quot; &eacute; &Eacute; &EACUTE; &agrave; &uuml; &ntilde;
    &ccedil; &copy; &reg; &hellip; &mdash; &ndash; &md; &ldquo; &rsquo; &lt; &gt; &LT; &#39; &#x27; &#160; &HT; &qc;
    &odq; &amp &nbsp & ;
    """.split()  # noqa: SIM905
ADDRESSES = """
    @ me@x.com @home :// http://a.b/c https://x.org www. www.a.com a.com b.net x.org/d .com a.doc file.txt <b> </b>
    <br/> <a href='x'> <!-- --> <?xml < > +41 (044) 0445 66778 ++ 1999-12-31
    """.split()  # noqa: SIM905
ABBREVIATED = sorted(
    f"{word}."
    for word in (
        *ptb_rules.ABBREVIATIONS,
        *ptb_rules.CAPITALISED_ABBREVIATIONS,
        *ptb_rules.NUMBERED_ABBREVIATIONS,
    )
)
PAIRS = [chr(number) for number in (*range(0x20, 0x7F), *range(0xA1, 0x180))] + list(
    "\t\xa0–—‘’“”•…′″€™→☺😀\ufe0f\u200d"
)
TELLING = list("adsmtnxTAS015 .,:;-'\"`/\\()[&$%#*!?<>=_^~+|’“\té½😀")
GAPS = [" ", " ", " ", "", "", "\t", "\xa0", "-", "/", ", ", ". "]


def texts_of(content: object) -> Iterator[str]:
    """Every string with a space, at any depth of a JSON value."""
    if isinstance(content, str):
        yield from [content] if " " in content else []
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from texts_of(value)


def corpora(data: Path) -> Iterator[tuple[str, list[str]]]:
    """Name and captions of each file."""
    annotations = json.loads(
        (data / "coco_val2017_captions" / "captions_val2017.json").read_text()
    )["annotations"]
    yield "coco_val2017_captions", [annotation["caption"] for annotation in annotations]
    karpathy = data / "coco_karpathy_test"
    references = read_references(karpathy / "refs.json", by="image_name")
    yield (
        "coco_karpathy_test, references",
        [text for texts in references.values() for text in texts],
    )
    for path in sorted((karpathy / "predictions").glob("*.json")):
        yield (
            f"coco_karpathy_test, {path.stem}",
            list(read_captions(path, allow_empty=True).values()),
        )
    lines = (data / "flickr8k" / "Flickr8k.token.txt").read_text(encoding="utf-8").splitlines()
    yield "flickr8k", [line.split("\t", 1)[1] for line in lines]
    for path in sorted((data / "long_captions").glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        yield f"long_captions, {path.stem}", list(texts_of(rows))


def odd_strings(count: int, seed: int = 0) -> list[str]:
    """Strings of up to seven pieces: words, entities, abbreviations, numbers, clitics, addresses, signs."""
    draw = random.Random(seed)
    heads = "dog it they I ca wo Y O d rock man is A B M AT R Q".split()  # noqa: SIM905
    tails = "s S m d re ve ll t T n em clock 80s M T B 90 til tis".split()  # noqa: SIM905

    def number() -> str:
        parts = [
            "".join(draw.choices("0123456789", k=draw.randint(1, 4)))
            for _ in range(draw.randint(1, 3))
        ]
        sign = draw.choice(["", "", "-", "+", "$", "£", "€"])
        units = ["", "", "st", "th", "%", "pm", "mm", "s", "x5", "°"]
        return sign + draw.choice([*".,:/- \xa0", ""]).join(parts) + draw.choice(units)

    def abbreviation() -> str:
        word = draw.choice(ABBREVIATED)
        return draw.choice([word, word.upper(), word.capitalize(), word[:-1]])

    kinds: list[tuple[float, Callable[[], str]]] = [
        (0.3, lambda: draw.choice(WORDS)),
        (0.12, lambda: draw.choice(ENTITIES)),
        (0.12, abbreviation),
        (0.12, number),
        (0.12, lambda: draw.choice(heads) + draw.choice("'’`&+-./") + draw.choice(tails)),
        (0.06, lambda: draw.choice(ADDRESSES)),
        (0.16, lambda: "".join(draw.choices(PAIRS, k=draw.randint(1, 4)))),
    ]
    weights, makers = zip(*kinds, strict=True)

    def string() -> str:
        pieces = draw.choices(makers, weights, k=draw.randint(0, 7))
        return "".join(make() + draw.choice(GAPS) for make in pieces)

    return [string() for _ in range(count)]


def row(name: str, texts: list[str], *, lines: bool) -> str:
    """One line of the table. ``lines``: as one file, where the next line matters; else only the tested class."""
    outside = sum(not is_tested(text, in_lines=lines) for text in texts)
    if not lines:
        texts = [text for text in texts if is_tested(text)]
    mine = tokenize_lines(texts) if lines else [" ".join(tokenize(text)) for text in texts]
    found = ptb_tokenize(texts, timeout=1000)
    different = sum(
        a != (b if lines else " ".join(b.split())) for a, b in zip(mine, found, strict=True)
    )
    return f"| {name} | {len(texts):,} | {outside:,} | {different} |"


def agreement(data: Path, stream: int) -> None:
    """Print how many texts have other tokens than by Java."""
    print(
        "| text | compared | outside of the tested class | tokens differ |\n| --- | ---: | ---: | ---: |"
    )
    for name, texts in corpora(data):
        print(row(f"{name}, as a file", texts, lines=True), flush=True)
    pairs = [
        "".join(pair) for length in (0, 1, 2) for pair in itertools.product(PAIRS, repeat=length)
    ]
    print(row("every string of up to two characters", pairs, lines=False), flush=True)
    triples = ["".join(triple) for triple in itertools.product(TELLING, repeat=3)]
    print(
        row(f"every string of three of {len(TELLING)} characters", triples, lines=False), flush=True
    )
    if stream:
        print(row("random odd strings", odd_strings(stream), lines=False))


def spaces(data: Path) -> None:
    """Print the scores of four systems by PTB tokens against plain white space."""
    lines = []
    karpathy = data / "coco_karpathy_test"
    references = read_references(karpathy / "refs.json", by="image_name")
    for path in sorted((karpathy / "predictions").glob("*.json")):
        captions = read_captions(path, allow_empty=True)
        plain = {image_id: caption.lower() for image_id, caption in captions.items()}
        known = {image_id: [text.lower() for text in references[image_id]] for image_id in captions}
        ptb, split = (
            evaluate_captions(
                texts, refs, metrics=("bleu", "rouge", "cider"), tokenizer=tokenizer
            ).metrics
            for texts, refs, tokenizer in ((captions, references, "auto"), (plain, known, "none"))
        )
        cells = [f"{100 * ptb[key]:.2f} ({100 * (ptb[key] - split[key]):+.2f})" for key in KEYS]
        lines.append([path.stem, *cells])
    print(markdown(["system, x100 (PTB - white space)", *KEYS], lines))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder of the data sets")
    parser.add_argument("--stream", type=int, default=100_000, help="random odd strings")
    parser.add_argument(
        "--spaces", action="store_true", help="scores by PTB tokens against plain white space"
    )
    arguments = parser.parse_args()
    if arguments.spaces:
        spaces(arguments.data)
    else:
        agreement(arguments.data, arguments.stream)


if __name__ == "__main__":
    main()
