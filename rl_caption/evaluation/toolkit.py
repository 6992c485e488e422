"""The Java programs of the COCO caption toolkit (pycocoevalcap): PTB tokenizer, METEOR and SPICE.

The toolkit's own classes are called. Only evaluation starts them, never training.
``candidates`` maps an image id to one caption, ``references`` the same ids to their
captions; a caption is a string of tokens separated by single spaces.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rl_caption.runtime.errors import UserError

logger = logging.getLogger(__name__)

# The tokenizer ends a line at each of these; a caption must stay on its own line.
_LINE_BREAKS = re.compile("[\n\r\x0b\x0c\u2028\u2029]")
# SPICE's libraries use reflection on these packages, which Java refuses since version 16.
_OPENED = (
    "java.lang",
    "java.math",
    "java.net",
    "java.text",
    "java.util",
    "java.util.concurrent",
)


class JavaError(UserError, RuntimeError):
    """There is no usable Java runtime, or a Java program failed. The message is the reason."""


class UndefinedMetric(ValueError):
    """A metric has no meaningful value on this input. The message is the reason."""


class Scores(NamedTuple):
    """Result of a metric function for N images; BLEU has four keys, others one."""

    values: dict[str, tuple[float, list[float]]]
    """Metric key -> (score of the set, [N] scores of single images, as in ``candidates``)."""
    counts: NDArray[np.float64] | None = None
    """Counts [N, 10] of BLEU, whose sums over images give the set's score."""


def java_version() -> str:
    """Version of the ``java`` of PATH, such as ``17.0.15``; ``JavaError`` if there is
    none or it does not run.
    """
    path = shutil.which("java")
    if path is None:
        raise JavaError("no Java runtime: 'java' is not on PATH")
    # macOS has a placeholder called java that only prints where to get Java.
    command = [path, "-version"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise JavaError(f"no Java runtime: {error}") from error
    quoted = re.search('"(.+?)"', process.stderr + process.stdout)
    return quoted.group(1) if quoted else "of an unknown version"


@contextmanager
def java_options(name: str) -> Iterator[None]:
    """Context in which Java reads UTF-8 whatever the locale, and errors of a program
    become ``JavaError``.
    """
    before = os.environ.get("JAVA_TOOL_OPTIONS")
    options = [before or "", "-Dfile.encoding=UTF-8"]
    if not java_version().startswith("1."):  # Java 8 has no --add-opens
        options += [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED]
    os.environ["JAVA_TOOL_OPTIONS"] = " ".join(options).strip()
    try:
        yield
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        raise JavaError(f"{name} failed: {type(error).__name__}: {error}") from error
    finally:
        if before is None:
            del os.environ["JAVA_TOOL_OPTIONS"]
        else:
            os.environ["JAVA_TOOL_OPTIONS"] = before


def ptb_tokenize(captions: Sequence[str]) -> list[str]:
    """Tokenise N captions with Stanford PTBTokenizer 3.4.1, without punctuation, in lower case.

    Equal to ``pycocoevalcap``'s ``PTBTokenizer`` under a UTF-8 locale, but every
    character that Java takes for a line end becomes a space. The toolkit replaces only
    ``\\n``; after any other line end, every following caption gets the tokens of its
    neighbour.
    """
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    if not captions:
        return []
    rows = {}
    for row, caption in enumerate(captions):
        text = _LINE_BREAKS.sub(" ", caption).encode("utf-8", "replace").decode()
        rows[row] = [{"caption": text}]
    with java_options("the PTB tokenizer"):
        tokens = PTBTokenizer().tokenize(rows)
        return [tokens[row][0] for row in rows]


def meteor(
    candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> Scores:
    """METEOR 1.5 (``-l en -norm``) of the set and of each image, in [0, 1]. Source:
    Denkowski and Lavie 2014.
    """
    from pycocoevalcap.meteor.meteor import Meteor

    # '|||' separates the fields of a line; the toolkit takes it out of captions alone.
    texts = {
        image_id: [
            text.replace("|||", "").replace("  ", " ") for text in references[image_id]
        ]
        for image_id in candidates
    }
    captions = {image_id: [caption] for image_id, caption in candidates.items()}
    logger.info("METEOR of %d captions with Java %s", len(captions), java_version())
    with java_options("METEOR"):
        scorer = Meteor()
        scorer.lock = threading.RLock()  # its own would wait for itself after an error
        return Scores({"METEOR": scorer.compute_score(texts, captions)})


def spice(
    candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> Scores:
    """SPICE 1.0 in [0, 1]: the mean F over images. Source: Anderson et al. 2016.

    Raises:
        JavaError: the jars of its parser are missing. The toolkit would download them;
            docs/evaluation.md says where they go.
    """
    from pycocoevalcap.spice import get_stanford_models, spice

    folder = Path(spice.__file__).parent / get_stanford_models.SPICELIB
    for name in (
        f"{get_stanford_models.JAR}.jar",
        f"{get_stanford_models.JAR}-models.jar",
    ):
        if not (folder / name).is_file():
            raise JavaError(
                f"pycocoevalcap does not ship {name}, which belongs into {folder}"
            )
    captions = {image_id: [caption] for image_id, caption in candidates.items()}
    texts = {image_id: list(references[image_id]) for image_id in candidates}
    logger.info("SPICE of %d captions, without showing progress", len(candidates))
    with java_options("SPICE"):
        mean, details = spice.Spice().compute_score(texts, captions)
    of_images = dict(zip(sorted(candidates), details, strict=True))
    scores = [float(of_images[image_id]["All"]["f"]) for image_id in candidates]
    if not np.isfinite(scores).all():
        raise UndefinedMetric("SPICE gave no score for some images")
    return Scores({"SPICE": (float(mean), scores)})
