"""Caption tokens as the COCO caption toolkit makes them, without Java; and tokens of
captions in other languages.

The toolkit (pycocoevalcap) pipes captions through Stanford CoreNLP 3.4.1's
``PTBTokenizer`` and removes a fixed list of punctuation tokens. It lower-cases, splits
clitics (``dog 's``, ``do n't``), keeps hyphenated words and abbreviations (``st.``)
undivided, and writes brackets as ``-lrb-`` and ``-rrb-``, which the toolkit does not
remove.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from rewards.base import leaf_rewards
from rewards.text.ptb_rules import (
    ABBREVIATIONS,
    NUMBERED_ABBREVIATIONS,
    SPLIT_WORDS,
    token_classes,
)

TOKENIZER = "ptb"
"""Name of this tokenisation in document frequencies and signatures."""

PUNCTUATION = frozenset(
    ["''", "'", "``", "`", "-LRB-", "-RRB-", "-LCB-", "-RCB-", *".?!,:;-", "--", "..."]
)
"""Tokens that the toolkit removes. It looks for upper-case bracket names among
lower-cased tokens: brackets stay.
"""

_MAY_KEEP_STOP = ABBREVIATIONS.union(NUMBERED_ABBREVIATIONS)
_EASY_CAPTION = re.compile(
    r"(?:[A-Za-z]+(?:-[A-Za-z]+)*(?:, | +|$))*(?:([A-Za-z]+)[ ]*\.)?\s*"
)
_EASY_WORD = re.compile(
    r"(?:[A-Za-z]+(?:-[A-Za-z]+)*|[A-Za-z]+[0-9][A-Za-z0-9]*)(?=,?(?: |$))"
)
_TESTED_CHARACTERS = re.compile(
    "[\t\n -~\xa0-\xac\xae-\xb1\xb4-\xb8\xba-\u0148\u014a-\u017f\u200d\u2013-\u2015\u2018-\u201e\u2022\u2026"
    "\u2032\u2033\u20ac\u2122\u2190-\u21ff\u2500-\u27bf\ufe0f\U0001f000-\U0001faff]*"
)
MOST_PLAIN_WORDS = 100_000
_plain_words: set[str] = set()
"""Words seen so far that are a token wherever they occur between spaces, as most words
of a policy's captions are.
"""
_LAST_WORD = re.compile(r"[A-Za-z]\.\s*\Z")
_SPACES = re.compile("[ \t][ \t\xa0\u2000-\u200a\u3000]*|\n")
"""A run of spaces. One that begins with a no-break space may be the beginning of an address."""
_LINE_BREAK = re.compile("[\n\r\x0b\x0c\u2028\u2029]")


def tokenize(text: str) -> list[str]:
    """Split a caption into lower-case tokens without punctuation; line breaks count as spaces.

    Equal to ``PTBTokenizer().tokenize`` of pycocoevalcap 1.2 followed by ``str.split``,
    for the captions that were compared (``is_tested``), unless they end in a single
    letter or a word such as ``no`` with a full stop (``tokenize_lines``). A token of
    the toolkit may contain a no-break space, as in ``10 1/2``: its BLEU and CIDEr split
    there, as this function does; its ROUGE-L and METEOR do not. Tokenising the tokens
    again gives the same tokens, except for a few that depend on capitals or neighbours
    (``M&Ms``, ``Miss.``, ``y'all``) and runs of curly quotes.
    """
    words = text.split()
    if _plain_words.issuperset(words) and " ".join(words) == text:
        return words
    easy = _easy_tokens(text)
    if easy is not None:
        return easy
    return " ".join(token for token in _scan(text) if token not in PUNCTUATION).split()


def _easy_tokens(text: str) -> list[str] | None:
    """Tokens of a caption of plain words, with at most a full stop at its end; None for
    any other caption.
    """
    easy = _EASY_CAPTION.fullmatch(text)
    if easy is None:
        return None
    words = text.replace(",", " ").lower().split()
    last = easy.group(1)
    if last is not None:
        if len(last) == 1 or last.lower() in _MAY_KEEP_STOP or last[0].isupper():
            return None
        words = [word for word in (*words[:-1], words[-1].rstrip(".")) if word]
    if not SPLIT_WORDS.isdisjoint(words):
        return None
    if last is None and len(_plain_words) < MOST_PLAIN_WORDS:
        _plain_words.update(words)
    return words


def is_tested(text: str) -> bool:
    """Whether ``text`` belongs to the captions on which ``tokenize_lines`` was compared
    with the toolkit's tokenizer.

    These consist of Latin letters, digits, ASCII signs, typographic quotes, dashes and
    symbols, and emoji (see docs/evaluation.md). Most other captions are tokenised
    equally, too.
    """
    return _TESTED_CHARACTERS.fullmatch(text) is not None


def tokenize_lines(captions: Sequence[str]) -> list[str]:
    """Tokenise captions as the toolkit does, which writes them to one file, a line each.

    Returns the tokens of each caption joined by spaces; a token may contain a no-break
    space (see ``tokenize``). In a file the tokenizer looks beyond the end of a line. A
    caption that ends in a single letter (``... that reads K.``) keeps its full stop
    unless the next caption begins with a word such as ``A`` or ``The``. One that ends
    in ``no.``, ``fig.`` and the like keeps it if the next caption begins with a digit.
    ``tokenize``, which sees a single caption, keeps the full stop in the first case and
    drops it in the second.
    """
    tokens = []
    following = ""
    for caption in reversed(captions):
        line = _LINE_BREAK.sub(" ", caption)
        words = _easy_tokens(line)
        if words is None:
            scanned = " ".join(
                _scan(line, following if _LAST_WORD.search(line) else "")
            )
            words = [
                token
                for token in scanned.rstrip().split(" ")
                if token not in PUNCTUATION
            ]
        tokens.append(" ".join(words))
        following = (
            line if line.strip() else f"{line}\n{following}"
        )  # it looks beyond empty lines
    return tokens[::-1]


@lru_cache(maxsize=65536)
def _scan(text: str, following: str = "") -> tuple[str, ...]:
    """All tokens of a caption, punctuation included; ``following`` are the lines after it."""
    text = _LINE_BREAK.sub(" ", text).replace("\xad", "")
    has_address = "@" in text
    length = len(text)
    text = f"{text}\n{following}\n" if following else f"{text}\n"
    position = 0
    tokens = []
    while position < length:
        space = _SPACES.match(text, position)
        if space is not None:
            position = space.end()
            continue
        word = None if has_address else _EASY_WORD.match(text, position, length)
        if word is not None and word.group().lower() not in SPLIT_WORDS:
            tokens.append(word.group())
            position = word.end()
            continue
        written, position = _longest_token(text, position)
        if written is not None:
            tokens.append(written)
    return tuple(token.lower().replace(" ", "\xa0") for token in tokens)


def _longest_token(text: str, position: int) -> tuple[str | None, int]:
    """Text to write for the token at ``position`` (None: nothing), and where the next
    token starts.
    """
    longest = position
    end = position + 1
    write = None
    for pattern, write_this in token_classes():
        match = pattern.match(text, position)
        if match is not None and match.end() > longest:
            longest = match.end()
            end = match.end()
            write = write_this
            if pattern.groups and match.lastindex:
                end = match.start(match.lastindex)
    return (write(text[position:end]) if write is not None else None), end


class _Characters(dict[int, str]):
    """A table for ``str.translate`` before a text is split at spaces, filled as characters are met.

    ``divided`` are beginnings of Unicode names of characters that are tokens of their own.
    """

    def __init__(self, divided: Sequence[str] = ()) -> None:
        self._divided = tuple(divided)

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        name = unicodedata.name(character, "")
        written = " "
        if (category == "Cf" and character != "\u200b") or name.startswith(
            "VARIATION SELECTOR"
        ):
            # joiners, direction marks and soft hyphens lie within words; a zero-width space ends
            # one
            written = ""
        elif category[0] in "LMN":
            written = f" {character} " if name.startswith(self._divided) else character
        self[code] = written
        return written


_WORD_CHARACTERS = _Characters()
_CJK_CHARACTERS = _Characters(
    ["CJK ", "HIRAGANA", "KATAKANA", "IDEOGRAPHIC", "BOPOMOFO"]
)


def unicode_words(text: str) -> list[str]:
    """Split a caption of a language that is written with spaces into lower-case words:
    runs of letters, marks, digits.

    The text is normalised by NFKC first, so that full-width letters, ligatures and
    decomposed accents compare equal. Combining marks (Hindi vowel signs, Arabic short
    vowels) belong to words. Symbols and punctuation, including apostrophes and hyphens,
    end a word and are removed. There is no stemming and no language-specific rule.
    """
    return (
        unicodedata.normalize("NFKC", text).lower().translate(_WORD_CHARACTERS).split()
    )


def cjk_characters(text: str) -> list[str]:
    """As ``unicode_words``, but every Chinese character, kana and bopomofo letter is a
    token of its own.

    Runs of other letters and digits are words: ``2只cat`` becomes ``2``, ``只``, ``cat``.
    So are Korean words, which are written with spaces.
    """
    return (
        unicodedata.normalize("NFKC", text).lower().translate(_CJK_CHARACTERS).split()
    )


def join_cjk(tokens: Iterable[str]) -> str:
    """Join tokens of ``cjk_characters`` to a text, with spaces between words but not
    next to Chinese or Japanese.
    """
    text = ""
    for token in tokens:
        if text and not (_is_divided(text[-1]) or _is_divided(token[0])):
            text += " "
        text += token
    return text


def _is_divided(character: str) -> bool:
    return len(_CJK_CHARACTERS[ord(character)]) == 3


TOKENIZERS: dict[str, Callable[[str], list[str]]] = {
    TOKENIZER: tokenize,
    "unicode": unicode_words,
    "char": cjk_characters,
    "none": str.split,
}
"""Tokenizers by the name in signatures and document frequencies; ``none`` is for text
that is tokenised already.
"""


def tokenizer_of(name: str) -> Callable[[str], list[str]]:
    """The function of this name in ``TOKENIZERS``. Raises ``ValueError`` for an unknown name."""
    if name not in TOKENIZERS:
        raise ValueError(f"tokenizer is {name!r}: expected {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]


def untested_texts(reward: Any, texts: Iterable[str]) -> str:
    """Part of a signature that says how many texts may be tokenised otherwise than by
    the toolkit (``is_tested``).

    Empty if there is no such text, or if no term of ``reward`` uses the tokenizer ``ptb``.
    """
    if not any(
        getattr(inner, "tokenizer", None) == TOKENIZER for inner in leaf_rewards(reward)
    ):
        return ""
    tested = [is_tested(text) for text in texts]
    others = tested.count(False)
    if not others:
        return ""
    return f"+PTB-python[{others} of {len(tested)} texts not compared with Java]"
