"""BLEU, METEOR, ROUGE-L, CIDEr and SPICE of the COCO caption toolkit (pycocoevalcap) on tokenised captions.

BLEU, ROUGE-L and CIDEr are the toolkit's own classes. The tokenizer, METEOR and SPICE are its Java programs, started
by this package instead of by the toolkit: same program, same input, same numbers, but with a time limit, without files
in the package folder and without processes that outlive the call.

Everywhere here ``candidates`` maps an image id to one caption and ``references`` the same ids to their captions; a
caption is a string of tokens separated by single spaces.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rl_caption.evaluation.java import JavaDialogue, JavaError, find_java, run_java

Scores = dict[str, tuple[float, list[float]]]
"""Metric key -> (score of the whole set, score of each image in the order of ``candidates``)."""

# The tokenizer program reads all of these as the end of a line; a caption must stay on its own line.
_LINE_BREAKS = re.compile("[\n\r\x0b\x0c\u2028\u2029]")


def _folder(module: str) -> Path:
    file = importlib.import_module(f"pycocoevalcap.{module}").__file__
    assert file is not None
    return Path(file).resolve().parent


def ptb_tokenize(captions: Sequence[str], *, timeout: float | None = None) -> list[str]:
    """Tokenise captions as the toolkit does: Stanford PTBTokenizer 3.4.1, lower case, punctuation removed.

    Equal to ``pycocoevalcap.tokenizer.ptbtokenizer.PTBTokenizer`` under a UTF-8 locale, except that every character
    that Java takes for a line end becomes a space (the toolkit replaces only ``\\n``, and after any other one gives
    every following caption the tokens of its neighbour).

    Args:
        captions: N captions as people or models wrote them.
        timeout: seconds until the program is killed; by default 60 plus one for every 1000 captions.

    Returns:
        N strings of tokens separated by single spaces.

    Raises:
        JavaError: no Java, or the program failed or took too long.
    """
    from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS, STANFORD_CORENLP_3_4_1_JAR

    if not captions:
        return []
    jar = _folder("tokenizer.ptbtokenizer") / STANFORD_CORENLP_3_4_1_JAR
    arguments = ["-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer"]
    arguments += ["-preserveLines", "-lowerCase", "-encoding", "utf-8"]
    text = "".join(_LINE_BREAKS.sub(" ", caption) + "\n" for caption in captions)
    limit = 60 + len(captions) / 1000 if timeout is None else timeout
    lines = run_java(find_java(), arguments, text=text, name="the PTB tokenizer", timeout=limit).split("\n")
    if len(lines) != len(captions) + 1 or lines[-1]:
        raise JavaError(f"the PTB tokenizer returned {len(lines) - 1} lines for {len(captions)} captions")
    dropped = frozenset(PUNCTUATIONS)
    return [" ".join(word for word in line.rstrip().split(" ") if word not in dropped) for line in lines[:-1]]


def bleu(candidates: Mapping[str, str], references: Mapping[str, list[str]]) -> Scores:
    """BLEU-1..4, closest reference length, over the whole set (Papineni et al. 2002). Range [0, 1]."""
    from pycocoevalcap.bleu.bleu import Bleu

    totals, per_image = Bleu(4).compute_score(references, _single(candidates), verbose=0)
    return {f"BLEU-{n}": _as_floats(totals[n - 1], per_image[n - 1]) for n in range(1, 5)}


def rouge(candidates: Mapping[str, str], references: Mapping[str, list[str]]) -> Scores:
    """ROUGE-L F with beta 1.2, mean over images (Lin 2004). Range [0, 1]."""
    from pycocoevalcap.rouge.rouge import Rouge

    return {"ROUGE-L": _as_floats(*Rouge().compute_score(references, _single(candidates)))}


def cider(candidates: Mapping[str, str], references: Mapping[str, list[str]]) -> Scores:
    """CIDEr-D (n 1..4, sigma 6), which papers call CIDEr; mean over images (Vedantam et al. 2015). Range [0, 10].

    Document frequencies are those of ``references``.

    Raises:
        UndefinedMetric: one image only, or no image with a reference word: every weight would be 0.
    """
    from pycocoevalcap.cider.cider import Cider

    if len(candidates) < 2:
        raise UndefinedMetric("CIDEr weighs words by how many images they occur in: it needs at least 2 images, got 1")
    if not any(text for texts in references.values() for text in texts):
        raise UndefinedMetric("no reference has a word after tokenisation")
    return {"CIDEr": _as_floats(*Cider().compute_score(references, _single(candidates)))}


def meteor(candidates: Mapping[str, str], references: Mapping[str, list[str]]) -> Scores:
    """METEOR 1.5 (``-l en -norm``), score of the whole set (Denkowski and Lavie 2014). Range [0, 1].

    Raises:
        JavaError: no Java, or the program failed or took too long (limit: 300 s plus one for every 10 images).
    """
    from pycocoevalcap.meteor.meteor import METEOR_JAR

    folder = _folder("meteor.meteor")
    arguments = ["-Xmx2G", "-jar", str(folder / METEOR_JAR), "-", "-", "-stdio", "-l", "en", "-norm"]
    limit = 300 + len(candidates) / 10
    with JavaDialogue(find_java(), arguments, cwd=str(folder), name="METEOR", timeout=limit) as program:
        statistics = []
        for image_id, caption in tqdm(candidates.items(), desc="METEOR", unit="caption", disable=None):
            # '|||' separates the fields of a line, so that it cannot occur within one.
            fields = [text.replace("|||", "").replace("  ", " ") for text in [*references[image_id], caption]]
            program.write(" ||| ".join(["SCORE", *fields]))
            answer = program.read()
            if not answer[:1].isdigit():
                raise JavaError(f"METEOR cannot score image {image_id!r}, caption {caption!r:.80}: {answer[:200]}")
            statistics.append(answer)
        program.write(" ||| ".join(["EVAL", *statistics]))
        scores = [_meteor_number(program.read()) for _ in range(len(statistics) + 1)]
    return {"METEOR": (scores[-1], scores[:-1])}


def spice(candidates: Mapping[str, str], references: Mapping[str, list[str]]) -> Scores:
    """SPICE 1.0, mean F over images (Anderson et al. 2016). Range [0, 1].

    The toolkit would download its parser's models; this only uses them where they are already there.

    Raises:
        JavaError: no Java, no parser models, or the program failed or took too long (limit: 600 s plus one per image).
        UndefinedMetric: SPICE gave no score for an image.
    """
    from pycocoevalcap.spice.get_stanford_models import JAR, SPICELIB
    from pycocoevalcap.spice.spice import SPICE_JAR

    folder = _folder("spice.spice")
    for jar in (f"{JAR}.jar", f"{JAR}-models.jar"):
        if not (folder / SPICELIB / jar).is_file():
            raise JavaError(f"pycocoevalcap does not ship {jar}, and it is not in its folder spice/{SPICELIB}")
    java = find_java()
    ids = sorted(candidates)
    items = [{"image_id": image_id, "test": candidates[image_id], "refs": references[image_id]} for image_id in ids]
    with tempfile.TemporaryDirectory(prefix="spice-") as scratch:
        source, target = Path(scratch, "captions.json"), Path(scratch, "scores.json")
        source.write_text(json.dumps(items), encoding="utf-8")
        arguments = ["-Xmx8G", "-jar", str(folder / SPICE_JAR), str(source), "-out", str(target), "-subset", "-silent"]
        run_java(java, arguments, cwd=str(folder), name="SPICE", timeout=600 + len(ids))
        if not target.is_file():
            raise JavaError("SPICE ended without writing its scores")
        scores = {item["image_id"]: item["scores"]["All"]["f"] for item in json.loads(target.read_text("utf-8"))}
    for image_id in ids:
        value = scores.get(image_id)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UndefinedMetric(f"SPICE gave {value!r} for image {image_id!r}")
    return {"SPICE": (float(np.mean([scores[i] for i in ids])), [float(scores[i]) for i in candidates])}


class UndefinedMetric(ValueError):
    """A metric has no meaningful value on this input. The message is the reason."""


SCORERS: dict[str, Callable[[Mapping[str, str], Mapping[str, list[str]]], Scores]] = {
    "bleu": bleu,
    "meteor": meteor,
    "rouge": rouge,
    "cider": cider,
    "spice": spice,
}
"""Name of a metric -> function, in the order that papers print."""

METRIC_KEYS: dict[str, tuple[str, ...]] = {
    "bleu": ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"),
    "meteor": ("METEOR",),
    "rouge": ("ROUGE-L",),
    "cider": ("CIDEr",),
    "spice": ("SPICE",),
}
"""Name of a metric -> the keys it is reported under."""


def _single(candidates: Mapping[str, str]) -> dict[str, list[str]]:
    return {image_id: [caption] for image_id, caption in candidates.items()}


def _as_floats(total: float, per_image: Sequence[float]) -> tuple[float, list[float]]:
    return float(total), [float(value) for value in per_image]


def _meteor_number(line: str) -> float:
    try:
        return float(line)
    except ValueError as error:
        raise JavaError(f"METEOR returned {line[:200]!r} where a score was expected") from error
