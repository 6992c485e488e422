"""Parses captions about scenes: free text to mentions of things, relations and backgrounds.

The parser knows more wordings than the generated captions use, never fails, and counts the words it could not use.
Punctuation is optional: captions that a tokeniser stripped of it parse alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from rl_caption.data.scenes.language import plural
from rl_caption.data.scenes.world import BACKGROUNDS, COLOURS, SHAPES

_TOKEN = re.compile(r"[\w'-]+|[.,;:!?]")

NOUNS: dict[str, tuple[str | None, bool]] = {
    **{shape: (shape, False) for shape in SHAPES},
    **{plural(shape): (shape, True) for shape in SHAPES},
    **{"shape": (None, False), "object": (None, False), "thing": (None, False)},
    **{"shapes": (None, True), "objects": (None, True), "things": (None, True)},
}
"""Noun -> its shape (None for any shape) and whether it is plural."""
ADJECTIVES: dict[str, tuple[str, str]] = {
    **{colour: ("colour", colour) for colour in (*COLOURS, *BACKGROUNDS)},
    **{"gray": ("colour", "grey"), "violet": ("colour", "purple"), "turquoise": ("colour", "cyan")},
    **dict.fromkeys(("large", "big", "huge"), ("size", "large")),
    **dict.fromkeys(("small", "little", "tiny"), ("size", "small")),
    **dict.fromkeys(("plain", "solid"), ("texture", "plain")),
    **dict.fromkeys(("striped", "stripy"), ("texture", "striped")),
    **dict.fromkeys(("dotted", "spotted"), ("texture", "dotted")),
}
NUMBERS = {"one": 1, "single": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8} | {
    str(number): number for number in range(1, 10)
}
_ARTICLES = {"a", "an", "the", "this"}
_GROUNDS = {"background", "backdrop"}
_SIDES = {
    "left of": ("left of", "to the left of", "on the left of", "at the left of", "on the left side of"),
    "right of": ("right of", "to the right of", "on the right of", "at the right of", "on the right side of"),
    "above": ("above", "over", "on top of"),
    "below": ("below", "beneath", "under", "underneath"),
}
_PHRASES: dict[tuple[str, ...], tuple[str, str]] = {
    **{tuple(phrase.split()): ("relation", side) for side, phrases in _SIDES.items() for phrase in phrases},
    **{tuple(phrase.split()): ("there", "") for phrase in ("there is", "there are")},
    **dict.fromkeys((("is",), ("are",), ("is", "located"), ("are", "located")), ("be", "")),
    **dict.fromkeys((("on",), ("against",), ("in", "front", "of")), ("on", "")),
    **dict.fromkeys((("and",),), ("and", "")),
    **dict.fromkeys((("with",),), ("with", "")),
    **dict.fromkeys((("it",), ("them",)), ("pronoun", "")),
    **{
        (*article, picture, verb): ("opening", "")
        for article in ((), ("a",), ("an",), ("the",), ("this",))
        for picture in ("picture", "image", "photo")
        for verb in ("shows", "contains", "has", "of", "with")
    },
    **{("in", article, picture): ("closing", "") for article in ("the", "this") for picture in ("picture", "image")},
}
_BY_FIRST: dict[str, list[tuple[str, ...]]] = {}
for _phrase in sorted(_PHRASES, key=len, reverse=True):
    _BY_FIRST.setdefault(_phrase[0], []).append(_phrase)


@dataclass
class Chunk:
    """A run of tokens that belongs together.

    ``kind`` is thing, ground, adjectives, relation, there, be, on, and, with, pronoun, opening, closing, comma, stop
    or unknown; ``start`` and ``end`` delimit its tokens; ``bad`` counts its words that could not be used.
    """

    kind: str
    start: int
    end: int
    value: str = ""
    attributes: tuple[tuple[str, str], ...] = ()
    shape: str | None = None
    number: int | None = None
    plural: bool = False
    definite: bool = False
    bad: int = 0
    used: bool = False
    subject: Chunk | None = field(default=None, repr=False)


class Mention(NamedTuple):
    """What a caption says about one thing or several alike things.

    ``shape`` None means any shape; ``number`` is the number as a word or numeral, None where there is none;
    ``definite`` mentions ("the red circle") refer back and introduce nothing.
    """

    shape: str | None
    attributes: tuple[tuple[str, str], ...]
    number: int | None
    plural: bool
    definite: bool


class Parse(NamedTuple):
    """A parsed caption; relations are (index of subject, relation, index of object) into ``mentions``."""

    mentions: tuple[Mention, ...]
    relations: tuple[tuple[int, str, int], ...]
    backgrounds: tuple[str, ...]
    words: int
    unparsed_words: int


def tokens(caption: str) -> list[str]:
    """Return lower-case words (letters, digits, ``_ ' -``) and the punctuation ``. , ; : ! ?``; drop the rest."""
    return _TOKEN.findall(caption.lower())


@lru_cache(maxsize=8192)
def parse(caption: str) -> Parse:
    """Parse a caption. Anything is accepted; words without a use in the grammar are counted, and claim nothing."""
    words = tokens(caption)
    chunks = chunked(words)
    _connect(chunks)
    relations = related(chunks)
    things = [chunk for chunk in chunks if chunk.kind == "thing"]
    index = {id(chunk): position for position, chunk in enumerate(things)}
    total = sum(word[0] not in ".,;:!?" for word in words)
    used = sum(chunk.end - chunk.start - chunk.bad for chunk in chunks if chunk.used)
    return Parse(
        tuple(Mention(t.shape, t.attributes, t.number, t.plural, t.definite) for t in things),
        tuple((index[id(subject)], side, index[id(other)]) for subject, side, other in relations),
        tuple(value for c in chunks if c.kind == "ground" for attribute, value in c.attributes if attribute),
        total,
        total - used,
    )


def chunked(words: Sequence[str]) -> list[Chunk]:
    """Cut tokens into chunks; ``used`` is set on things and grounds only (the others need neighbours)."""
    chunks: list[Chunk] = []
    start = 0
    while start < len(words):
        chunk = _phrase_at(words, start) or _noun_phrase_at(words, start)
        chunks.append(chunk)
        start = chunk.end
    return chunks


def _phrase_at(words: Sequence[str], start: int) -> Chunk | None:
    word = words[start]
    if word in ".!?;":
        return Chunk("stop", start, start + 1)
    if word in ",:":
        return Chunk("comma", start, start + 1)
    for phrase in _BY_FIRST.get(word, ()):
        if tuple(words[start : start + len(phrase)]) == phrase:
            kind, value = _PHRASES[phrase]
            return Chunk(kind, start, start + len(phrase), value)
    return None


def _noun_phrase_at(words: Sequence[str], start: int) -> Chunk:
    """Read article, number, adjectives and noun; without a noun, the adjectives or one unknown word."""
    at = start
    article = words[at] if words[at] in _ARTICLES else None
    at += article is not None
    number = NUMBERS.get(words[at]) if at < len(words) else None
    at += number is not None
    attributes: list[tuple[str, str]] = []
    first = at
    bad = 0
    while at < len(words) and words[at] in ADJECTIVES:
        attribute = ADJECTIVES[words[at]]
        bad += attribute in attributes
        attributes.append(attribute)
        at += 1
    chunk = Chunk("unknown", start, start + 1)
    if at < len(words) and words[at] in _GROUNDS:
        colours = tuple(value for attribute, value in attributes if attribute == "colour")
        bad += sum(attribute != ("texture", "plain") for attribute in attributes) - len(colours) + (number is not None)
        chunk = Chunk("ground", start, at + 1, attributes=tuple(("colour", colour) for colour in colours), bad=bad)
        chunk.used = True
    elif at < len(words) and words[at] in NOUNS:
        shape, is_plural = NOUNS[words[at]]
        disagrees = is_plural != (number > 1) if number is not None else is_plural and article in ("a", "an", "this")
        bad += int(disagrees) + (article in ("a", "an", "this") and number is not None and words[first - 1] != "single")
        chunk = Chunk("thing", start, at + 1, "", tuple(dict.fromkeys(attributes)), shape, number, is_plural)
        chunk.definite, chunk.bad, chunk.used = article == "the", bad, True
    elif attributes and first == start:
        chunk = Chunk("adjectives", start, at, attributes=tuple(dict.fromkeys(attributes)), bad=bad)
    return chunk


_OPENS = {"thing", "ground"}
_CAN_FOLLOW: dict[str, set[str]] = {
    "there": {"thing", "ground"},
    "opening": {"thing", "ground"},
    "on": {"ground"},
    "with": {"thing", "ground"},
    "be": {"relation", "adjectives", "thing", "on", "there", "closing"},
    "and": {"thing", "ground", "relation", "adjectives", "there", "with", "on", "opening"},
}
_CAN_PRECEDE: dict[str, set[str]] = {
    "with": _OPENS | {"comma", "and", "pronoun", "closing"},
    "be": _OPENS,
    "and": _OPENS | {"adjectives", "pronoun", "comma", "closing"},
    "closing": _OPENS | {"pronoun", "be", "adjectives"},
    "pronoun": {"relation"},
}


def _connect(chunks: list[Chunk]) -> None:
    """Decide which connecting chunks have the neighbours that give them a use, and apply predicates ("is red")."""
    for position, chunk in enumerate(chunks):
        before = chunks[position - 1] if position else None
        after = chunks[position + 1] if position + 1 < len(chunks) else None
        if chunk.kind in _CAN_FOLLOW or chunk.kind in ("closing", "pronoun"):
            follows = chunk.kind not in _CAN_PRECEDE or (before is not None and before.kind in _CAN_PRECEDE[chunk.kind])
            leads = chunk.kind not in _CAN_FOLLOW or (after is not None and after.kind in _CAN_FOLLOW[chunk.kind])
            chunk.used = follows and leads
        elif chunk.kind == "adjectives":
            _predicate(chunks, position)
    for position, chunk in enumerate(chunks[1:], start=1):
        if chunk.kind == "be" and chunk.used and chunks[position + 1].kind == "thing":
            # "is" before a thing has a use after a fronted place only: "below the star is a circle".
            chunk.used = position >= 2 and chunks[position - 2].kind == "relation"


def _predicate(chunks: list[Chunk], position: int) -> None:
    """Give the adjectives of "the circle is red" or "is red and striped" to their subject."""
    chunk = chunks[position]
    before = [c for c in chunks[max(0, position - 3) : position] if c.kind not in ("and", "comma")]
    directly = len(before) >= 2 and chunks[position - 1].kind == "be"
    if directly and before[-2].kind in _OPENS:
        chunk.subject = before[-2]
    elif before and before[-1].kind == "adjectives" and before[-1].used:
        chunk.subject = before[-1].subject
    if chunk.subject is None:
        return
    ground = chunk.subject.kind == "ground"
    taken = [pair for pair in chunk.attributes if not ground or pair[0] == "colour"]
    chunk.used = True
    chunk.bad += len(chunk.attributes) - len(taken)
    chunk.subject.attributes = tuple(dict.fromkeys((*chunk.subject.attributes, *taken)))


def related(chunks: list[Chunk]) -> list[tuple[Chunk, str, Chunk]]:
    """Find subject and object of every relation, and mark those that have both as used.

    The subject is the nearest thing before; after "and" or a comma the subject of the relation before; where the
    place comes first ("above the star is a circle"), the thing after.
    """
    found: list[tuple[Chunk, str, Chunk]] = []
    topic: Chunk | None = None
    for position, chunk in enumerate(chunks):
        if chunk.kind == "thing" and (position == 0 or chunks[position - 1].kind not in ("with", "relation")):
            topic = chunk
        if chunk.kind != "relation" or position + 1 == len(chunks):
            continue
        after = chunks[position + 1]
        before = chunks[position - 1] if position else Chunk("stop", 0, 0)
        target = topic if after.kind == "pronoun" else after if after.kind == "thing" else None
        subject = _subject(chunks, position, found)
        fronted = chunks[position + 2 : position + 4]
        if (
            len(fronted) == 2
            and fronted[0].kind in ("be", "there", "comma")
            and fronted[1].kind == "thing"
            and after.kind == "thing"
            and (before.kind == "stop" or (fronted[0].kind != "comma" and before.kind not in ("be", "and")))
        ):
            subject = topic = fronted[1]
        if target is None or subject is None or subject is target:
            continue
        chunk.used = True
        found.append((subject, chunk.value, target))
    return found


def _subject(chunks: list[Chunk], position: int, found: list[tuple[Chunk, str, Chunk]]) -> Chunk | None:
    at = position - 1
    if at >= 0 and chunks[at].kind in ("and", "comma"):
        while at >= 0 and chunks[at].kind in ("and", "comma"):
            at -= 1
        if found and at >= 0 and chunks[at] is found[-1][2]:
            return found[-1][0]
    elif at >= 0 and chunks[at].kind == "be":
        at -= 1
    return chunks[at] if at >= 0 and chunks[at].kind == "thing" else None
