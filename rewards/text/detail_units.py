"""Detail units of captions: the pieces that each add one detail (Chen et al., SPECS, EMNLP 2025).

A caption is split into sentences and tokens, which get part-of-speech tags; a chunk
grammar over tags finds phrases; a unit ends where a phrase or a sentence ends; three
rules join units that say nothing alone. docs/rewards.md gives the grammar, the rules,
and where this departs from the paper and its released code.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from tqdm.auto import tqdm

from rewards.base import RewardError, optional
from rewards.text.ptb_rules import (
    ABBREVIATIONS,
    NUMBERED_ABBREVIATIONS,
    SENTENCE_OPENERS,
    TITLES,
    names,
)

CONTINUATIONS = frozenset(
    names("behind in under on to above left right next up down out of 's is")
)
"""A unit does not end before these words, nor while the sentence begins with one of
them and has no verb yet.
"""
_VERBS = frozenset(["is", "are"])
_MAX_THE_WORDS = 3

# Chunk grammar: applied in this order, each pattern from left to right and greedily, over one
# letter per node: Determiner, adJective, Noun, Verb, preposItion, Conjunction, x any other tag;
# then n NP, v VP, p PP, c CLAUSE, k CONJ.
_GRAMMAR = (
    ("n", re.compile("D?J*N+")),
    ("v", re.compile("V[npc]*")),
    ("p", re.compile("In")),
    ("c", re.compile("nv")),
    ("k", re.compile("C[nvpc]+")),
)
_LETTERS = {"JJ": "J", "NN": "N", "VB": "V", "IN": "I", "CC": "C", "DT": "D"}
_ENDS_UNIT = frozenset("nvpc")

_TOKEN = re.compile(
    r"['’](?:s|re|ve|ll|d|m)\b"  # clitics
    r"|\d+(?:[.,:/]\d+)+"  # 3.5, 1,000, 10:30
    r"|(?:[^\W\d_]\.){2,}"  # U.S.
    # eye-level, and/or, www.site.com, o'clock
    r"|\w+(?:[-/&.@]\w+|['’](?!(?:s|re|ve|ll|d|m)\b)\w+)*"
    r"|\.\.+|[^\w\s]"
)
_MAY_HAVE_STOP = ABBREVIATIONS.union(NUMBERED_ABBREVIATIONS)
_SEPARATORS = frozenset(",;:")
_STOPS = frozenset([".", "!", "?", "…"])
_CLOSERS = frozenset("\"'”’)]}»")
_BEFORE_NOUNS = names("a an the its his her their")
_NEVER_NOUNS = names("is are was were has have had be been being")


Tagger: TypeAlias = Callable[[Sequence[Sequence[str]]], list[list[str]]]
"""Returns a Penn Treebank tag (``NN``, ``VBZ``, ``IN``, ...) for each token of each
sentence. Tokens are words, clitics such as ``'s``, and punctuation marks; none is empty
or has white space.
"""


@cache
def default_tagger() -> Tagger:
    """TextBlob's lexicon, with Brill's rules for unknown words and for context (Brill, ANLP 1992).

    The lexicon comes from newspapers, so in captions ``left``, ``leaves`` and ``light``
    are tagged as verbs. A verb directly after an article or a possessive is therefore
    retagged: as an adjective if a noun follows, else as a noun. Raises ``RewardError``
    if the package ``textblob`` is not installed.
    """
    module = optional(
        "textblob.taggers", "detail units need", "'rl-caption[specs]'", RewardError
    )
    pattern = module.PatternTagger()

    def tag(sentences: Sequence[Sequence[str]]) -> list[list[str]]:
        """Part of speech of each word of each sentence."""
        tagged = []
        for words in sentences:
            # A slash separates word and tag in the library's text format.
            text = " ".join(words).replace("/", "-")
            pairs = pattern.tag(text, tokenize=False) if words else []
            tags = [tag for _, (_, tag) in zip(words, pairs, strict=True)]
            tagged.append(_after_articles(words, tags))
        return tagged

    return tag


def _after_articles(words: Sequence[str], tags: list[str]) -> list[str]:
    """Make nouns and adjectives of verbs that follow an article or a possessive."""
    for index in range(1, len(tags)):
        verb = tags[index].startswith("VB") and words[index].lower() not in _NEVER_NOUNS
        if verb and words[index - 1].lower() in _BEFORE_NOUNS:
            before_noun = index + 1 < len(tags) and tags[index + 1][:2] in ("NN", "JJ")
            tags[index] = (
                "JJ" if before_noun else "NNS" if tags[index] == "VBZ" else "NN"
            )
    return tags


class _Token(NamedTuple):
    text: str
    start: int
    end: int


def detail_units(caption: str, tagger: Tagger | None = None) -> list[str]:
    """Cut one caption into detail units; ``tagger`` None means ``default_tagger()``.

    The concatenated units are exactly ``caption``: white space before a unit belongs to
    it. No unit ends inside a word, a number or an abbreviation. Each unit has a letter
    or a digit; a caption that has neither is a single unit. An empty caption has no
    units.
    """
    return list(_cached_units(caption)) if tagger is None else _units(caption, tagger)


def detail_units_of(captions: Sequence[str]) -> list[list[str]]:
    """Cut N captions into detail units, with a progress bar.

    Raises ``RewardError`` where ``textblob`` is not installed.
    """
    tagger = default_tagger()
    bar = tqdm(captions, "detail units", unit="caption", delay=2, disable=None)
    return [_units(caption, tagger) for caption in bar]


def prefixes(units: Sequence[str]) -> list[str]:
    """The U growing captions of U units: the first unit, the first two, ..., the complete caption."""
    return ["".join(units[: count + 1]) for count in range(len(units))]


@lru_cache(maxsize=16384)
def _cached_units(caption: str) -> tuple[str, ...]:
    return tuple(_units(caption, default_tagger()))


def _units(caption: str, tagger: Tagger) -> list[str]:
    sentences = list(_sentences(caption))
    tags = tagger([_texts(sentence) for sentence in sentences])
    cuts: list[int] = []
    for words, labels in zip(sentences, tags, strict=True):
        cuts += _sentence_cuts(caption, words, labels)
    bounds = [0, *cuts[:-1], len(caption)] if caption else []
    units: list[str] = []
    for start, end in pairwise(bounds):
        piece = caption[start:end]
        if units and not (_has_word(piece) and _has_word(units[-1])):
            units[-1] += piece
        else:
            units.append(piece)
    return units


def word_class(tag: str) -> str:
    """The grammar's letter for a Penn Treebank tag: one of D, J, N, V, I, C and x (any other)."""
    return _LETTERS.get(tag[:2], "x")


def _texts(tokens: Sequence[_Token]) -> list[str]:
    return [token.text.replace("’", "'") for token in tokens]


def _has_word(text: str) -> bool:
    return any(letter.isalnum() for letter in text)


def _sentences(caption: str) -> Iterator[list[_Token]]:
    """Yield the tokens of each sentence."""
    tokens = [
        _Token(match.group(), *match.span()) for match in _TOKEN.finditer(caption)
    ]
    begin = 0
    index = 0
    while index < len(tokens):
        index += 1
        if not _is_sentence_end(tokens, index - 1):
            continue
        while index < len(tokens) and _closes(tokens, index):
            index += 1
        if index == len(tokens) or tokens[index].start > tokens[index - 1].end:
            yield tokens[begin:index]
            begin = index
    if begin < len(tokens):
        yield tokens[begin:]


def _is_sentence_end(tokens: Sequence[_Token], index: int) -> bool:
    """Whether a token is a stop that ends a sentence; full stops of numbers and
    abbreviations do not.
    """
    token = tokens[index]
    if token.text != "." or index == 0 or index + 1 == len(tokens):
        return token.text in _STOPS or token.text.startswith("..")
    before = tokens[index - 1]
    after = tokens[index + 1]
    word = before.text.lower()
    if before.end < token.start or not (word in _MAY_HAVE_STOP or len(word) == 1):
        return True
    if word in NUMBERED_ABBREVIATIONS:
        return not after.text[0].isdigit()
    return (
        word not in TITLES
        and after.text[0].isupper()
        and after.text.lower() in SENTENCE_OPENERS
    )


def _closes(tokens: Sequence[_Token], index: int) -> bool:
    """Whether a token is a stop or a closing mark that is attached to the token before it."""
    attached = index > 0 and tokens[index].start == tokens[index - 1].end
    return attached and (tokens[index].text in _CLOSERS or tokens[index].text in _STOPS)


def _sentence_cuts(
    caption: str, tokens: Sequence[_Token], tags: Sequence[str]
) -> list[int]:
    """Offsets in ``caption`` at which units of one sentence end, the end of the sentence last."""
    words = [text.lower() for text in _texts(tokens)]
    cuts = []
    for end in _phrase_ends(tags):
        while end < len(tokens) and _closes(tokens, end):
            end += 1
        if (
            end < len(tokens)
            and _may_begin(caption, tokens[end])
            and not _joins(words, end)
        ):
            cuts.append(
                tokens[end - 1].end
            )  # white space goes to the unit that follows it
    return [*cuts, tokens[-1].end]


def _may_begin(caption: str, token: _Token) -> bool:
    """Whether a unit may begin with a token: after white space, or with a separator
    before white space.
    """
    after_space = caption[token.start - 1 : token.start].isspace()
    return after_space or (
        token.text in _SEPARATORS and caption[token.end : token.end + 1].isspace()
    )


def _phrase_ends(tags: Sequence[str]) -> list[int]:
    """Token positions after which a top-level NP, VP, PP or CLAUSE ends."""
    letters = "".join(map(word_class, tags))
    ends = list(range(1, len(tags) + 1))
    for symbol, pattern in _GRAMMAR:
        matches = list(pattern.finditer(letters))
        for match in reversed(matches):
            ends[match.start() : match.end()] = [ends[match.end() - 1]]
        letters = pattern.sub(symbol, letters)
    return [
        end for end, letter in zip(ends, letters, strict=True) if letter in _ENDS_UNIT
    ]


def _joins(words: Sequence[str], end: int) -> bool:
    """The paper's three rules against cutting too finely, for a cut of a sentence
    before its word ``end``.
    """
    so_far = words[:end]
    if so_far[0] == "the" and len(so_far) <= _MAX_THE_WORDS:
        return True
    if words[end] in CONTINUATIONS:
        return True
    return so_far[0] in CONTINUATIONS and _VERBS.isdisjoint(so_far)
