"""The Java programs of the COCO caption toolkit (pycocoevalcap): the PTB tokenizer, METEOR and SPICE.

Same programs and same input as the toolkit's own Python classes, so the same numbers, but under a time limit, without
files in the package folder, and without processes that outlive the call. Only evaluation starts them, never training.

``candidates`` maps an image id to one caption, ``references`` the same ids to their captions; a caption is a string of
tokens separated by single spaces.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm.auto import tqdm

from rl_caption.runtime.errors import UserError

logger = logging.getLogger(__name__)

# The tokenizer ends a line at each of these; a caption must stay on its own line.
_LINE_BREAKS = re.compile("[\n\r\x0b\x0c\u2028\u2029]")
# SPICE's libraries use reflection on these packages, which Java has refused since version 16 unless they are opened.
_OPENED = ("java.lang", "java.math", "java.net", "java.text", "java.util", "java.util.concurrent")


class JavaError(UserError, RuntimeError):
    """There is no usable Java runtime, or a Java program failed or took too long. The message is the reason."""


class UndefinedMetric(ValueError):
    """A metric has no meaningful value on this input. The message is the reason."""


class Java(NamedTuple):
    """A Java runtime that answered ``java -version``: absolute path, and version, such as ``17.0.15``."""

    path: str
    version: str


class Scores(NamedTuple):
    """What one metric function returns for N images; BLEU has four keys, the others one."""

    values: dict[str, tuple[float, list[float]]]
    """Metric key -> (score of the whole set, [N] scores of single images in the order of ``candidates``)."""
    counts: NDArray[np.float64] | None = None
    """[N, C] statistics of which the set's score is a function after summing over images; None where it is a mean."""


def find_java() -> Java:
    """Return the ``java`` of PATH; ``JavaError`` if there is none or it does not run."""
    path = shutil.which("java")
    if path is None:
        raise JavaError("no Java runtime: 'java' is not on PATH")
    return Java(path, _version(path))


@functools.cache
def _version(path: str) -> str:
    # macOS has a placeholder called java that only prints where to get Java.
    try:
        process = subprocess.run(
            [path, "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"no Java runtime: {path} -version failed: {error}") from error
    output = (process.stderr or process.stdout).decode(errors="replace").strip()
    if process.returncode != 0 or not output:
        raise JavaError(
            f"no Java runtime: {path} -version ended with {process.returncode}: {output[:200]}"
        )
    first = output.splitlines()[0]
    return first.split('"')[1] if first.count('"') >= 2 else first


class JavaProgram:
    """A Java program as a subprocess with pipes; a context manager, after which the process and its children are gone.

    It leads a session of its own, which is killed as a whole after ``timeout`` seconds. Standard error goes to a
    temporary file, so that it cannot block on a full pipe. Every failure is a ``JavaError`` that begins with ``name``.
    """

    def __init__(
        self, arguments: Sequence[str], *, name: str, timeout: float, cwd: str | None = None
    ) -> None:
        self._command = [find_java().path, "-Dfile.encoding=UTF-8", *arguments]
        self._name, self._timeout, self._cwd = name, timeout, cwd
        self._expired = False

    def __enter__(self) -> JavaProgram:
        self._errors = tempfile.TemporaryFile()
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=pipe,
                stdout=pipe,
                stderr=self._errors,
                cwd=self._cwd,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise JavaError(f"{self._name} did not start: {error}") from error
        self._timer = threading.Timer(self._timeout, self._expire)
        self._timer.daemon = True
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(
                    BrokenPipeError
                ):  # buffered input of a process that is gone
                    stream.close()

    def run(self, text: str = "") -> str:
        """Send ``text`` as standard input and return all of standard output after the program has ended with 0."""
        output, _ = self._process.communicate(text.encode("utf-8", "replace"))
        if self._expired or self._process.returncode != 0:
            raise self._failure("ended with status {}")
        return output.decode("utf-8", "replace")

    def ask(self, line: str) -> str:
        """Send one line and return the next line of output."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode("utf-8", "replace") + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("stopped answering (status {})") from error
        return self.read()

    def read(self) -> str:
        """Return the next line of output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._failure("stopped answering (status {})")
        return line.decode("utf-8", "replace").strip()

    def _expire(self) -> None:
        self._expired = True
        self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            if not hasattr(os, "killpg"):
                return self._process.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _failure(self, how: str) -> JavaError:
        self._kill()
        status = self._process.wait()
        if self._expired:
            return JavaError(f"{self._name} was not done after {self._timeout:g} s and was ended")
        self._errors.seek(0)
        lines = [
            line.strip()
            for line in self._errors.read().decode("utf-8", "replace").splitlines()
            if line.strip()
        ]
        return JavaError(
            f"{self._name} {how.format(status)}: {'; '.join(lines[-3:])[:400] or 'it printed no reason'}"
        )


def _folder(module: str) -> Path:
    """Folder of a module of pycocoevalcap, which holds its jars."""
    return Path(str(importlib.import_module(f"pycocoevalcap.{module}").__file__)).resolve().parent


def ptb_tokenize(captions: Sequence[str], *, timeout: float | None = None) -> list[str]:
    """Tokenise N captions with Stanford PTBTokenizer 3.4.1: lower case, punctuation removed, joined by single spaces.

    Equal to ``pycocoevalcap.tokenizer.ptbtokenizer.PTBTokenizer`` under a UTF-8 locale, except that every character
    that Java takes for a line end becomes a space (the toolkit replaces only ``\\n``; after any other one, every
    following caption gets the tokens of its neighbour). ``timeout`` is in seconds, by default 60 + N / 1000.
    """
    from pycocoevalcap.tokenizer.ptbtokenizer import PUNCTUATIONS, STANFORD_CORENLP_3_4_1_JAR

    if not captions:
        return []
    jar = _folder("tokenizer.ptbtokenizer") / STANFORD_CORENLP_3_4_1_JAR
    arguments = ["-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer"]
    arguments += ["-preserveLines", "-lowerCase", "-encoding", "utf-8"]
    text = "".join(_LINE_BREAKS.sub(" ", caption) + "\n" for caption in captions)
    limit = 60 + len(captions) / 1000 if timeout is None else timeout
    with JavaProgram(arguments, name="the PTB tokenizer", timeout=limit) as program:
        lines = program.run(text).split("\n")
    if len(lines) != len(captions) + 1 or lines[-1]:
        raise JavaError(
            f"the PTB tokenizer returned {len(lines) - 1} lines for {len(captions)} captions"
        )
    dropped = frozenset(PUNCTUATIONS)
    return [
        " ".join(word for word in line.rstrip().split(" ") if word not in dropped)
        for line in lines[:-1]
    ]


def meteor(candidates: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> Scores:
    """METEOR 1.5 (``-l en -norm``) of the whole set and of each image (Denkowski and Lavie 2014). Range [0, 1].

    The counts are the program's 23 statistics of each image (``confidence.meteor_of_sums``). The time limit is 300 s
    plus 0.1 s for each image.
    """
    from pycocoevalcap.meteor.meteor import METEOR_JAR

    folder = _folder("meteor.meteor")
    arguments = [
        "-Xmx2G",
        "-jar",
        str(folder / METEOR_JAR),
        "-",
        "-",
        "-stdio",
        "-l",
        "en",
        "-norm",
    ]
    logger.info(
        "computing METEOR of %d captions with Java %s", len(candidates), find_java().version
    )
    with JavaProgram(
        arguments, cwd=str(folder), name="METEOR", timeout=300 + len(candidates) / 10
    ) as program:
        lines = []
        for image_id, caption in tqdm(
            candidates.items(), desc="METEOR", unit="caption", disable=None
        ):
            # '|||' separates the fields of a line, so it cannot occur within one.
            fields = [
                text.replace("|||", "").replace("  ", " ")
                for text in [*references[image_id], caption]
            ]
            lines.append(program.ask(" ||| ".join(["SCORE", *fields])))
            if not lines[-1][:1].isdigit():
                raise JavaError(
                    f"METEOR cannot score image {image_id!r}, caption {caption!r:.80}: {lines[-1][:200]}"
                )
        answers = [program.ask(" ||| ".join(["EVAL", *lines])), *(program.read() for _ in lines)]
    try:
        *scores, total = map(float, answers)
    except ValueError as error:
        raise JavaError(f"METEOR returned something other than scores: {error}") from error
    counts = np.array([[float(number) for number in line.split()] for line in lines])
    exact = (counts[:, 21] == counts[:, 0]) & (counts[:, 22] == counts[:, 1]) & (counts[:, 20] == 1)
    counts[exact, 20] = (
        0.0  # a caption that equals its reference adds no chunk to the sums of the set
    )
    return Scores({"METEOR": (total, scores)}, counts)


def spice(
    candidates: Mapping[str, str],
    references: Mapping[str, Sequence[str]],
    jars: str | Path | None = None,
) -> Scores:
    """SPICE 1.0, mean F over images (Anderson et al. 2016). Range [0, 1].

    ``jars`` is the folder of the parser and its models (``stanford-corenlp-3.6.0.jar``, ``...-models.jar``), by default
    the toolkit's own ``spice/lib``. Nothing is downloaded. The time limit is 600 s plus 1 s for each image.
    """
    folder, ids = _folder("spice.spice"), sorted(candidates)
    arguments = spice_arguments(
        folder, Path(jars) if jars is not None else None, find_java().version
    )
    items = [
        {"image_id": image_id, "test": candidates[image_id], "refs": references[image_id]}
        for image_id in ids
    ]
    limit = 600 + len(ids)
    logger.info(
        "SPICE parses the captions of %d images without showing progress; it is stopped after %d s",
        len(ids),
        limit,
    )
    with tempfile.TemporaryDirectory(prefix="spice-") as scratch:
        source, target = Path(scratch, "captions.json"), Path(scratch, "scores.json")
        source.write_text(json.dumps(items), encoding="utf-8")
        arguments += [str(source), "-out", str(target), "-subset", "-silent"]
        with JavaProgram(arguments, cwd=scratch, name="SPICE", timeout=limit) as program:
            program.run()
        if not target.is_file():
            raise JavaError("SPICE ended without writing its scores")
        try:
            f_scores = {
                item["image_id"]: item["scores"]["All"]["f"]
                for item in json.loads(target.read_text("utf-8"))
            }
        except (ValueError, KeyError, TypeError) as error:
            raise JavaError(
                f"SPICE wrote something other than scores: {type(error).__name__}: {error}"
            ) from error
    for image_id in ids:
        value = f_scores.get(image_id)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise UndefinedMetric(f"SPICE gave {value!r} for image {image_id!r}")
    return Scores(
        {
            "SPICE": (
                float(np.mean([f_scores[i] for i in ids])),
                [float(f_scores[i]) for i in candidates],
            )
        }
    )


def spice_arguments(folder: Path, jars: Path | None, version: str) -> list[str]:
    """Return SPICE's command line up to its own arguments: memory, opened packages, class path, main class.

    ``folder`` is the toolkit's, with ``spice-1.0.jar`` and libraries in ``lib``; ``jars`` as for ``spice``; ``version``
    is that of Java. ``JavaError`` where one of the parser's two jars is missing.
    """
    from pycocoevalcap.spice.get_stanford_models import JAR, SPICELIB
    from pycocoevalcap.spice.spice import SPICE_JAR

    parser = jars if jars is not None else folder / SPICELIB
    names = [f"{JAR}.jar", f"{JAR}-models.jar"]
    for name in names:
        if not (parser / name).is_file():
            where = (
                f"the folder {str(parser)!r} (spice_jars)"
                if jars is not None
                else f"its folder spice/{SPICELIB}"
            )
            hint = "" if jars is not None else "; name the folder that has it by --spice_jars"
            raise JavaError(f"pycocoevalcap does not ship {name}, and it is not in {where}{hint}")
    opened = [
        f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED
    ]  # unknown to Java 8 and older ("1.8")
    # By class name, not by -jar: the jar's own class path names the toolkit's folder.
    path = [
        str(folder / SPICE_JAR),
        *(str(parser.resolve() / name) for name in names),
        str(folder / SPICELIB / "*"),
    ]
    before = [] if version.split(".")[0] in ("1", "") else opened
    return ["-Xmx8G", *before, "-cp", os.pathsep.join(path), "edu.anu.spice.SpiceScorer"]
