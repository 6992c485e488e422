"""Readers of JSON, YAML, CSV and text, whose errors name the file and the key."""

import hashlib
import json
import os
import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tqdm.auto import tqdm

from rewards.base import naming
from rewards.files import unique_keys
from rl_caption.data.base import SHOWN, DataError
from rl_caption.runtime import options
from rl_caption.runtime.options import shown as shown

check_type = partial(options.check_type, error=DataError)
"""Check that a value has a type (``rewards.options.check_type``). Raises ``DataError``."""
SPECIAL_TOKENS = re.compile(
    r"</?(?:s|w|eos|bos|sos|pad|unk|mask|start|end|endoftext|image)>|<\|[^|<>\s]{1,40}\|>|<extra_id_\d+>"
    r"|<(?:start|end)_of_\w+>|\[(?:sep|cls|pad|unk|mask|eos|bos|dec|enc|/?inst)\]|(?<!\S)##\w|[ĠĊ▁]",
    re.IGNORECASE,
)
"""Special tokens of common tokenizers, and their marks of spaces and word pieces."""
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3100-\u312f"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9d\U00020000-\U000323af]"
)
"""Letters of languages that write no spaces: Thai, Lao, Burmese, Khmer, Japanese and Chinese."""
_MARKS = re.compile(r"[<\[#ĠĊ▁]")
"""First characters of ``SPECIAL_TOKENS``, which are found faster."""


def _without_tokens(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object without ``tokens`` where it has ``raw``: they take most of the memory
    of Karpathy JSON (0.9 GB for COCO).
    """
    values = unique_keys(pairs)
    if values.get("raw") is not None:
        values.pop("tokens", None)
    return values


def parse_json(
    content: bytes | str,
    where: str | Path,
    error: type[Exception] = DataError,
    make_object: Callable[[Any], Any] = unique_keys,
) -> Any:
    """Parse JSON text in UTF-8, UTF-16 or UTF-32.

    Args:
        content: the text.
        where: the source, with which error messages begin.
        error: the exception to raise where it is not JSON, or an object repeats a key.
        make_object: makes the value of an object from its (key, value) pairs.
    """
    with naming(f"{where} is not JSON", (ValueError,), error):
        return json.loads(content, object_pairs_hook=make_object)


def parse_file(data: bytes, path: str | Path) -> Any:
    """Parse JSON, or JSON lines (several lines, the first an object) to a list. Raises
    ``DataError``.
    """
    first, _, rest = data.strip().partition(b"\n")
    if rest and first.startswith(b"{") and first.rstrip().endswith(b"}"):
        return [value for *_, value in json_lines(path, data.split(b"\n"))]
    return parse_json(data, path, make_object=_without_tokens)


def json_lines(
    path: str | Path,
    lines: Iterable[bytes] | None = None,
    error: type[Exception] = DataError,
) -> Iterator[tuple[int, str, Any]]:
    """Yield line number, ``FILE, line N`` and value of each non-empty line of JSON, of
    a file or of its ``lines``. Only a line feed ends a line. Raises ``error`` where one
    is not JSON.
    """
    with open(path, "rb") if lines is None else nullcontext(lines) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield number, where, parse_json(line, where, error)


def read_utf8(path: Path) -> str:
    """The text of a file. Raises ``DataError`` where it is not UTF-8."""
    with naming(str(path), (UnicodeDecodeError,), DataError):
        return path.read_bytes().decode("utf-8-sig")


def read_json(file: Path, error: type[Exception], value_type: Any = dict) -> Any:
    """Read a JSON file whose value has the type ``value_type`` (see ``check_type``).

    Raises ``error``, which names the file and the key, for another value, and
    ``OSError`` for an unreadable file.
    """
    content = parse_json(file.read_bytes(), file, error)
    check_type(content, value_type, str(file), error=error)
    return content


def read_yaml(file: Path, error: type[Exception]) -> Any:
    """Read a YAML file whose value is a mapping. Raises as ``read_json`` does."""
    with naming(str(file), (yaml.YAMLError, ValueError), error):
        content = yaml.safe_load(file.read_bytes())
    check_type(content, dict, str(file), error=error)
    return content


def read_log(file: Path, error: type[Exception]) -> list[dict[str, Any]]:
    """The records of the lines of ``metrics.jsonl`` or ``samples.jsonl``.

    A last line without its end, as a killed run leaves, is skipped. Raises as ``read_json`` does.
    """
    *lines, _ = file.read_bytes().split(b"\n")
    return [value for *_, value in json_lines(file, lines, error)]


def single_spaced(text: str) -> str:
    """Collapse white space to single spaces and strip it at both ends."""
    return " ".join(text.split())


def hash_text(text: str) -> int:
    """Hash a text to an integer in 0 .. 2^64 - 1, the same on every platform."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


FORMS = {
    "special": "have left-over special tokens, which count as words in every score: decode with "
    "skip_special_tokens=True, or remove them",
    "empty": "have no word and score as empty ones",
    "decomposed": "write accents apart from their letters (Unicode NFD) and others do not (NFC), so "
    "that equal words do not match: normalise all of them to NFC",
    "char": "write no spaces, so that a caption is a word or two: set the tokenizer to char "
    "(data.tokenizer, --tokenizer), or write spaces between words and set it to unicode",
}
"""Form of captions that costs scores -> what it costs, and what to do."""


class TextForms:
    """Counts captions that cost scores by their form.

    These captions have left-over special tokens, which every metric takes for words; or
    another Unicode form than others (NFD, letters and accents apart, against NFC), so
    that equal words do not match; or no word, if they are ``scored``; or no spaces
    between words, as in Chinese and Thai, so that a caption is one word.
    """

    def __init__(self) -> None:
        self.total, self.has_composed = 0, False
        self.found: dict[str, list[str]] = defaultdict(list)

    def add(self, where: str, text: str, scored: bool = False) -> None:
        """Count a text. ``where``, such as ``caption of image '1'``, names it in
        warnings.
        """
        self.total += 1
        forms = []
        if _MARKS.search(text) and SPECIAL_TOKENS.search(text):
            forms.append("special")
        if scored and not any(map(str.isalnum, text)):
            forms.append("empty")
        if not text.isascii():
            self.has_composed |= not unicodedata.is_normalized("NFD", text)
            if not unicodedata.is_normalized("NFC", text):
                forms.append("decomposed")
            if _lacks_spaces(text):
                forms.append("char")
        for form in forms:
            self.found[form].append(f"{where}: {shown(text)}")

    def warnings(self, tokenizer: str | None) -> list[str]:
        """A sentence for each problem, with its count and first texts.

        ``tokenizer`` is one of ``rewards.text.tokenize``, or None where only a model
        reads the texts.
        """
        harmless = {
            "char": {"decomposed", "char"},
            "unicode": {"decomposed"},
            None: {"char"},
        }.get(tokenizer, set())
        if not self.has_composed:
            harmless.add("decomposed")
        return [
            f"{len(self.found[form])} of {self.total} texts {sentence} "
            f"(first: {'; '.join(self.found[form][:SHOWN])})"
            for form, sentence in FORMS.items()
            if form in self.found and form not in harmless
        ]


def _lacks_spaces(text: str) -> bool:
    """Whether a text is in a script that has no spaces, and its words have more than
    six letters on average.
    """
    count = len(_UNSPACED.findall(text))
    words = sum(_UNSPACED.search(word) is not None for word in text.split())
    return 2 * count >= sum(map(str.isalnum, text)) and count > 6 * words


def progress(
    items: Iterable[Any],
    title: str,
    total: int | None = None,
) -> Iterator[Any]:
    """Yield the items; show a bar in the main process after two seconds, or a line each
    ten seconds where there is no terminal.

    ``total`` is the number of items, by default their length.
    """
    yield from tqdm(
        items,
        title,
        total,
        leave=False,
        delay=2,
        mininterval=0.1 if sys.stderr.isatty() else 10.0,
        disable=os.environ.get("RANK", "0") != "0",
    )
