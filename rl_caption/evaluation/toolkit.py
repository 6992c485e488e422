"""BLEU, METEOR, ROUGE-L, CIDEr and SPICE of the COCO caption toolkit (pycocoevalcap) on tokenised captions.

BLEU, ROUGE-L and CIDEr are this package's, equal to the toolkit's to the last bit and faster. The tokenizer, METEOR
and SPICE are its Java programs, started by this package instead of by the toolkit: same program, same input, same
numbers, but with a time limit, without files in the package folder and without processes that outlive the call.

Everywhere here ``candidates`` maps an image id to one caption and ``references`` the same ids to their captions; a
caption is a string of tokens separated by single spaces.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from rewards.text.bleu import bleu_counts, bleu_of_counts
from rewards.text.cider import cider_d
from rewards.text.document_frequency import DocumentFrequencies
from rewards.text.rouge import rouge_l
from rl_caption.evaluation.java import Java, JavaDialogue, JavaError, find_java, run_java

logger = logging.getLogger(__name__)

Scores = dict[str, tuple[float, list[float]]]
"""Metric key -> (score of the whole set, score of each image in the order of ``candidates``)."""
Counted = tuple[Scores, NDArray[np.float64]]
"""Scores, and [N, C] what the score of the whole set is a function of, summed over images."""

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
    return bleu_counted(candidates, references)[0]


def bleu_counted(candidates: Mapping[str, str], references: Mapping[str, list[str]]) -> Counted:
    """BLEU with the counts that it adds up: [N, 10], those of ``rewards.text.bleu.bleu_counts`` for each image."""
    tokens = _split(candidates, references)
    counts = np.array([bleu_counts(candidate, own) for candidate, own in zip(*tokens, strict=True)])
    total, per_image = bleu_of_counts(counts.sum(axis=0).tolist()), [bleu_of_counts(row) for row in counts.tolist()]
    scores = {key: (total[n], [values[n] for values in per_image]) for n, key in enumerate(METRIC_KEYS["bleu"])}
    return scores, counts.astype(np.float64)


def rouge(candidates: Mapping[str, str], references: Mapping[str, list[str]]) -> Scores:
    """ROUGE-L F with beta 1.2, mean over images (Lin 2004). Range [0, 1]."""
    # Split at spaces alone, as the toolkit does here: a no-break space within a token stays.
    scores = [
        rouge_l(caption.split(" "), [text.split(" ") for text in references[image_id]])
        for image_id, caption in candidates.items()
    ]
    return {"ROUGE-L": (float(np.mean(np.array(scores))), scores)}


def cider(candidates: Mapping[str, str], references: Mapping[str, list[str]]) -> Scores:
    """CIDEr-D (n 1..4, sigma 6), which papers call CIDEr; mean over images (Vedantam et al. 2015). Range [0, 10].

    Document frequencies are those of ``references``.

    Raises:
        UndefinedMetric: one image only, no image with a reference word, or the same n-grams in the references of every
            image: every weight would be 0.
    """
    if len(candidates) < 2:
        raise UndefinedMetric("CIDEr weighs words by how many images they occur in: it needs at least 2 images, got 1")
    if not any(text for texts in references.values() for text in texts):
        raise UndefinedMetric("no reference has a word after tokenisation")
    tokens, reference_tokens = _split(candidates, references)
    df = DocumentFrequencies.from_references(reference_tokens, eos=False)
    if df.all_zero:
        raise UndefinedMetric(
            f"the references of all {len(candidates)} images have the same n-grams: no weight is left"
        )
    scores = cider_d(tokens, reference_tokens, df)
    return {"CIDEr": (float(np.mean(scores)), scores)}


def _split(
    candidates: Mapping[str, str], references: Mapping[str, list[str]]
) -> tuple[list[list[str]], list[list[list[str]]]]:
    """Tokens of N candidates and of the references of each."""
    return (
        [caption.split() for caption in candidates.values()],
        [[text.split() for text in references[image_id]] for image_id in candidates],
    )


def meteor(candidates: Mapping[str, str], references: Mapping[str, list[str]]) -> Scores:
    """METEOR 1.5 (``-l en -norm``), score of the whole set (Denkowski and Lavie 2014). Range [0, 1].

    Raises:
        JavaError: as for ``meteor_counted``.
    """
    return meteor_counted(candidates, references)[0]


def meteor_counted(candidates: Mapping[str, str], references: Mapping[str, list[str]]) -> Counted:
    """METEOR with what it adds up of each image: [N, 23], see ``confidence.meteor_of_sums``.

    Raises:
        JavaError: no Java, or the program failed or took too long (limit: 300 s plus one for every 10 images).
    """
    from pycocoevalcap.meteor.meteor import METEOR_JAR

    folder = _folder("meteor.meteor")
    arguments = ["-Xmx2G", "-jar", str(folder / METEOR_JAR), "-", "-", "-stdio", "-l", "en", "-norm"]
    limit, java = 300 + len(candidates) / 10, find_java()
    logger.info("computing METEOR of %d captions with Java %s", len(candidates), java.version)
    with JavaDialogue(java, arguments, cwd=str(folder), name="METEOR", timeout=limit) as program:
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
    counts = np.array([[float(number) for number in line.split()] for line in statistics])
    whole = (counts[:, 21] == counts[:, 0]) & (counts[:, 22] == counts[:, 1]) & (counts[:, 20] == 1)
    counts[whole, 20] = 0.0  # a caption that equals its reference has no chunks in the sums of the set
    return {"METEOR": (scores[-1], scores[:-1])}, counts


def spice(candidates: Mapping[str, str], references: Mapping[str, list[str]], jars: str | Path | None = None) -> Scores:
    """SPICE 1.0, mean F over images (Anderson et al. 2016). Range [0, 1].

    The toolkit would download its parser's models; this only uses them where they are already there.

    Args:
        candidates: image id -> tokens.
        references: image id -> tokens of each reference.
        jars: folder with ``stanford-corenlp-3.6.0.jar`` and ``stanford-corenlp-3.6.0-models.jar``; None is the
            toolkit's own folder ``spice/lib``.

    Raises:
        JavaError: no Java, no parser models, or the program failed or took too long (limit: 600 s plus one per image).
        UndefinedMetric: SPICE gave no score for an image.
    """
    folder = _folder("spice.spice")
    arguments = spice_arguments(folder, Path(jars) if jars is not None else None, find_java())
    ids = sorted(candidates)
    items = [{"image_id": image_id, "test": candidates[image_id], "refs": references[image_id]} for image_id in ids]
    with tempfile.TemporaryDirectory(prefix="spice-") as scratch:
        source, target = Path(scratch, "captions.json"), Path(scratch, "scores.json")
        source.write_text(json.dumps(items), encoding="utf-8")
        arguments += [str(source), "-out", str(target), "-subset", "-silent"]
        limit = 600 + len(ids)
        logger.info(
            "SPICE parses the captions of %d images and tells no progress; it is ended after %d s", len(ids), limit
        )
        run_java(find_java(), arguments, cwd=scratch, name="SPICE", timeout=limit)
        if not target.is_file():
            raise JavaError("SPICE ended without writing its scores")
        scores = _spice_scores(target)
    for image_id in ids:
        value = scores.get(image_id)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UndefinedMetric(f"SPICE gave {value!r} for image {image_id!r}")
    return {"SPICE": (float(np.mean([scores[i] for i in ids])), [float(scores[i]) for i in candidates])}


# SPICE's libraries look into classes of the Java runtime, which it has refused since Java 16 unless it is told so.
_OPENED = ("java.lang", "java.math", "java.net", "java.text", "java.util", "java.util.concurrent")


def spice_arguments(folder: Path, jars: Path | None, java: Java) -> list[str]:
    """The command line of SPICE up to its own arguments: memory, opened packages, class path, main class.

    Args:
        folder: the toolkit's, with ``spice-1.0.jar`` and its libraries in ``lib``.
        jars: where the parser and its models are; None is ``lib``.
        java: the runtime.

    Raises:
        JavaError: one of the parser's two jars is not there.
    """
    from pycocoevalcap.spice.get_stanford_models import JAR, SPICELIB
    from pycocoevalcap.spice.spice import SPICE_JAR

    parser = jars if jars is not None else folder / SPICELIB
    names = [f"{JAR}.jar", f"{JAR}-models.jar"]
    for name in names:
        if not (parser / name).is_file():
            where = f"the folder {str(parser)!r} (spice_jars)" if jars is not None else f"its folder spice/{SPICELIB}"
            hint = "" if jars is not None else "; name the folder that has it by --spice_jars"
            raise JavaError(f"pycocoevalcap does not ship {name}, and it is not in {where}{hint}")
    major = java.version.split(".")[0]
    opened = [] if major in ("1", "") else [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED]
    # By name, not by -jar: then the class path would be the one written into the jar, beside the toolkit.
    path = os.pathsep.join(
        [str(folder / SPICE_JAR), *(str(parser.resolve() / name) for name in names), str(folder / SPICELIB / "*")]
    )
    return ["-Xmx8G", *opened, "-cp", path, "edu.anu.spice.SpiceScorer"]


def _spice_scores(target: Path) -> dict[str, Any]:
    try:
        return {item["image_id"]: item["scores"]["All"]["f"] for item in json.loads(target.read_text("utf-8"))}
    except (ValueError, KeyError, TypeError) as error:
        raise JavaError(f"SPICE wrote something else than scores: {type(error).__name__}: {error}") from error


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

COUNTED: dict[str, Callable[[Mapping[str, str], Mapping[str, list[str]]], Counted]] = {
    "bleu": bleu_counted,
    "meteor": meteor_counted,
}
"""Metrics whose score of the whole set is not the mean over images."""

METRIC_KEYS: dict[str, tuple[str, ...]] = {
    "bleu": ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"),
    "meteor": ("METEOR",),
    "rouge": ("ROUGE-L",),
    "cider": ("CIDEr",),
    "spice": ("SPICE",),
}
"""Name of a metric -> the keys it is reported under."""


def _meteor_number(line: str) -> float:
    try:
        return float(line)
    except ValueError as error:
        raise JavaError(f"METEOR returned {line[:200]!r} where a score was expected") from error
