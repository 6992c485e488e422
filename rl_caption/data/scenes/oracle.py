"""The oracle: parses a caption into claims and judges them by its scene; precision, recall and F1.

The parser knows more wordings than the generated captions use, never fails, and counts
the words that it cannot use. Punctuation is optional, so that tokenised captions parse
alike. docs/scenes.md defines claims and facts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple

from rl_caption.data.scenes.language import plural
from rl_caption.data.scenes.world import (
    ATTRIBUTES,
    BACKGROUNDS,
    MARGIN,
    SHAPES,
    Fact,
    Kind,
    Scene,
    Thing,
    facts,
    offset,
    relation_fact,
)

_TOKEN = re.compile(r"[\w'-]+|[.,;:!?]")
PUNCTUATION = ".,;:!?"
NOUNS: dict[str, tuple[str | None, bool]] = {}
"""Noun -> its shape (None for any shape) and whether it is plural."""
for _noun in (*SHAPES, "shape", "object", "thing"):
    _shape = _noun if _noun in SHAPES else None
    NOUNS |= {_noun: (_shape, False), plural(_noun): (_shape, True)}
ADJECTIVES = {colour: ("colour", colour) for colour in BACKGROUNDS}
"""Adjective -> attribute and value."""
for _attribute, _values in ATTRIBUTES.items():
    ADJECTIVES |= {value: (_attribute, value) for value in _values}
_SYNONYMS = (
    "gray grey, violet purple, turquoise cyan, big large, huge large, little small, "
    "tiny small, solid plain, stripy striped, spotted dotted"
)
for _pair in _SYNONYMS.split(", "):
    _synonym, _value = _pair.split()
    ADJECTIVES[_synonym] = ADJECTIVES[_value]
NUMBERS = {str(number): number for number in range(1, 10)} | {"single": 1}
_WORDS = "one two three four five six seven eight"
for _number, _word in enumerate(_WORDS.split(), start=1):
    NUMBERS[_word] = _number
_RELATIONS = {
    "left of": "left",
    "right of": "right",
    "above": "above over top",
    "below": "below beneath under underneath",
}
"""Relation -> the words that decide it."""
RELATION_WORDS = {
    word: relation for relation, words in _RELATIONS.items() for word in words.split()
}

_ADJECTIVE = f"({'|'.join(ADJECTIVES)})"
_BEFORE_NOUN = f"((a|an|the|this) )?(({'|'.join(NUMBERS)}) )?({_ADJECTIVE} )*"
_PATTERNS = {
    "stop": "[.;!?]",
    "comma": "[,:]",
    "relation": "((to|on|at) the )?(left|right) of|on the (left|right) side of|"
    "above|over|on top of|below|beneath|under|underneath",
    "there": "there (is|are)",
    "be": "(is|are)( located)?",
    "on": "on|against|in front of",
    "and": "and",
    "with": "with",
    "pronoun": "it|them",
    "opening": "((a|an|the|this) )?(picture|image|photo) (shows|contains|has|of|with)",
    "closing": "in (the|this) (picture|image)",
    "thing": f"{_BEFORE_NOUN}({'|'.join(NOUNS)})",
    "ground": f"{_BEFORE_NOUN}(background|backdrop)",
    "adjectives": f"{_ADJECTIVE}( {_ADJECTIVE})*",
    "unknown": r"\S+",
}
"""Kind of a chunk -> its tokens; the first that fits is taken."""
_GROUPS = "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _PATTERNS.items())
_CHUNK = re.compile(f"(?:{_GROUPS}) ")

_FRONTED = re.compile(r"(?!be|and)\w* thing (be|there) thing|stop thing comma thing")
"""Kinds of the chunk before a relation and of three after it, the last of which is its
subject: "above the star is a circle".
"""
_SUBJECT = re.compile(r"thing( be|( and| comma)+)?$")
"""Kinds of the chunks before a relation, the last thing of which is its subject or,
after "and" or a comma, the object of the relation whose subject it shares.
"""
_PLACES = {
    "there": r" \* (thing|ground)$",
    "opening": r" \* (thing|ground)$",
    "on": r" \* ground$",
    "with": r" (thing|ground|comma|and|pronoun|closing) \* (thing|ground)$",
    # "is" before a thing only in "below the star is a circle".
    "be": r" (thing|ground) \* (relation|adjectives|on|there|closing)$"
    r"| relation (thing|ground) \* thing$",
    "and": r" (thing|ground|adjectives|pronoun|comma|closing) "
    r"\* (thing|ground|relation|adjectives|there|with|on|opening)$",
    "closing": r" (thing|ground|pronoun|be|adjectives) \*",
    "pronoun": r" relation \*",
    # "the circle is red", "is red, and striped".
    "adjectives": r" (thing|ground)( and| comma)? be \*| adjectives( and| comma)* \*",
}
"""Kind of a chunk that needs neighbours -> kinds of the three chunks before it, itself
as ``*``, and the kind of the chunk after it.
"""


class OracleScore(NamedTuple):
    """How true and how complete a caption is; all values in [0, 1]."""

    precision: float
    """True claims over all claims; 0 without claims."""
    recall: float
    """Facts of the scene told by true claims, over all its facts."""
    f1: float
    """Harmonic mean of the two; 0 where both are 0."""
    unparsed: float
    """Words that the grammar cannot use, over all words."""


class Claim(NamedTuple):
    """One checkable statement of a caption."""

    kind: str
    """``shape``, ``colour``, ``size``, ``texture``, ``count``, ``relation``,
    ``background`` or ``repetition``.
    """
    text: str
    """What is claimed, in words."""
    true: bool
    """Whether it is true of the scene."""
    fact: Fact | None = None
    """What it tells if it is true; it counts for recall where this is a fact of the scene."""


Attributes = tuple[tuple[str, str], ...]
"""Pairs of an attribute and its value."""


@dataclass(eq=False)
class Chunk:
    """A phrase of a caption.

    ``kind`` is thing, ground (the background), adjectives, relation, there, be, on,
    and, with, pronoun, opening, closing, comma, stop or unknown. For a thing, ``shape``
    None is any shape, ``number`` None is no number, and ``definite`` ("the red circle")
    refers back instead of introducing a thing.
    """

    kind: str
    words: list[str]
    """Its lower-case tokens."""
    attributes: Attributes = ()
    number: int | None = None
    several: bool = False
    """Whether a thing is more than one, by its number or else its plural."""
    relation: str = ""
    shape: str | None = None
    definite: bool = False
    used: int = 0
    """How many of its words the grammar can use."""


Related = tuple[Chunk, str, Chunk]
"""Subject, relation and object."""


def oracle(caption: str, scene: Scene) -> OracleScore:
    """Judge a caption by its scene. Accepts any string; more than 2000 captions per second.

    With C the set of distinct claims of the caption and F the facts of the scene,
    precision = |true C| / |C|, recall = |facts told by true C| / |F|, F1 = 2 P R / (P +
    R), each 0 where it is 0 / 0. A repeated claim counts once; each introduction of a
    thing beyond the number of such things is a false claim.
    """
    judged, total = claims(caption, scene), len(facts(scene))
    true = [claim.fact for claim in judged if claim.true]
    told = len(facts(scene).intersection(true))
    precision = len(true) / len(judged) if judged else 0.0
    # From whole numbers, rounded only at the end, so that no rounding error lifts F1 above both
    # precision and recall.
    both = len(true) * total + told * len(judged)
    f1 = 2 * len(true) * told / both if told else 0.0
    chunks, _ = parse(caption)
    words = sum(word not in PUNCTUATION for word in tokens(caption))
    unused = words - sum(chunk.used for chunk in chunks)
    return OracleScore(precision, told / total, f1, unused / max(words, 1))


def tokens(caption: str) -> list[str]:
    """Split into lower-case words (letters, digits, ``_ ' -``) and punctuation ``. , ;
    : ! ?``; drop the rest.
    """
    return _TOKEN.findall(caption.lower())


@lru_cache(maxsize=8192)
def parse(caption: str) -> tuple[list[Chunk], list[Related]]:
    """Parse any caption; words that the grammar cannot use claim nothing."""
    chunks = cut_chunks(tokens(caption))
    _connect(chunks)
    return chunks, pair_things(chunks)


def cut_chunks(words: Sequence[str]) -> list[Chunk]:
    """Cut tokens into chunks; only things and grounds are ``used`` already (the others
    depend on neighbours).
    """
    matches = _CHUNK.finditer(" ".join([*words, ""]))
    return [_chunk(match.lastgroup or "", match[0].split()) for match in matches]


def _chunk(kind: str, words: list[str]) -> Chunk:
    """Read the words of a chunk; what repeats or does not agree is not used."""
    said = [ADJECTIVES[word] for word in words if word in ADJECTIVES]
    numbers = [NUMBERS[word] for word in words if word in NUMBERS]
    attributes = tuple(dict.fromkeys(said))
    chunk = Chunk(kind, words, attributes)
    for word in words:
        chunk.relation = RELATION_WORDS.get(word, chunk.relation)
    useful = len(words) - len(said) + len(attributes)
    if kind == "thing":
        chunk.shape, chunk.several = NOUNS[words[-1]]
        chunk.definite = words[0] == "the"
        singular = words[0] in ("a", "an", "this")
        if numbers:
            (chunk.number,) = numbers
            useful -= chunk.several != (chunk.number > 1)
            useful -= singular and "single" not in words
            chunk.several = chunk.number > 1
        else:
            useful -= singular and chunk.several
        chunk.used = useful
    if kind == "ground":
        chunk.attributes = _colours(attributes)
        plain = ("texture", "plain") in attributes
        told = len(chunk.attributes) + plain
        chunk.used = len(words) - len(said) - len(numbers) + told
    return chunk


def _colours(attributes: Attributes) -> Attributes:
    return tuple(pair for pair in attributes if pair[0] == "colour")


def _connect(chunks: list[Chunk]) -> None:
    """Mark chunks as used where their neighbours fit, and apply predicates ("is red")."""
    kinds = ["", "", "", *(chunk.kind for chunk in chunks), ""]
    subject: Chunk | None = None
    for at, chunk in enumerate(chunks):
        context = " ".join(["", *kinds[at : at + 3], "*", kinds[at + 4]])
        fits = re.search(_PLACES.get(chunk.kind, "$^"), context)
        if chunk.kind in ("thing", "ground"):
            subject = chunk
        elif chunk.kind == "adjectives":
            subject = subject if fits else None
            if subject is not None:
                ground = subject.kind == "ground"
                said = _colours(chunk.attributes) if ground else chunk.attributes
                chunk.used = len(said)
                subject.attributes = tuple(dict.fromkeys(subject.attributes + said))
        elif fits:
            chunk.used = len(chunk.words)


def pair_things(chunks: Sequence[Chunk]) -> list[Related]:
    """Subject, relation and object of every complete relation, which is marked as used.

    The subject is the nearest thing before; after "and" or a comma, the subject of the
    previous relation; where the relation is fronted ("above the star is a circle"), the
    thing after.
    """
    relations: list[Related] = []
    topic: Chunk | None = None
    last: Chunk | None = None
    kinds = ["stop", *(chunk.kind for chunk in chunks), "", "", ""]
    for at, chunk in enumerate(chunks):
        before, after = kinds[at], kinds[at + 2 : at + 5]
        if chunk.kind == "thing":
            last = chunk
            topic = topic if before in ("with", "relation") else chunk
        elif chunk.kind == "relation" and after[0] in ("thing", "pronoun"):
            found = _SUBJECT.search(" ".join(kinds[: at + 1]))
            subject = last if found else None
            if found and found[2] and relations and last is relations[-1][2]:
                subject = relations[-1][0]
            if _FRONTED.fullmatch(" ".join([before, *after])):
                topic = subject = chunks[at + 3]
            target = chunks[at + 1] if after[0] == "thing" else topic
            if subject and target and subject is not target:
                chunk.used = len(chunk.words)
                relations.append((subject, chunk.relation, target))
    return relations


class _Referent(NamedTuple):
    """What a thing of a caption refers to."""

    names: list[str]
    """Of the kinds that a plural thing is, or of those that a singular one may be, the
    likeliest first; the noun where the scene lacks its shape.
    """
    readings: list[tuple[str, tuple[Thing, ...]]]
    """Names and things that may be meant: all kinds together if plural, any one if singular."""
    total: int
    """The number of things in the scene that fit its words."""


def claims(caption: str, scene: Scene) -> list[Claim]:
    """The distinct claims of a caption, each judged."""
    chunks, relations = parse(caption)
    things = [chunk for chunk in chunks if chunk.kind == "thing"]
    # Things with the most attributes choose first, so that "a circle and a red circle" can be a
    # blue and a red one.
    things.sort(key=lambda thing: -len(thing.attributes))
    surplus = Counter({kind: -len(kind.things) for kind in scene.kinds})
    referents = {}
    found: list[Claim] = []
    for thing in things:
        referents[thing] = _refer(thing, surplus)
        found += _thing_claims(thing, referents[thing], facts(scene))
    for subject, relation, other in relations:
        holds = all if subject.several or other.several else any
        ends = referents[subject], referents[other]
        found.append(_relation_claim(relation, *ends, holds))
    for chunk in chunks:
        if chunk.kind == "ground":
            for _, colour in chunk.attributes:
                fact = Fact("background", "background", colour)
                found.append(_of_fact(fact, facts(scene)))
    distinct: dict[tuple[str, str], Claim] = {}
    for claim in found:
        distinct.setdefault((claim.kind, claim.text), claim)
    again = [
        Claim("repetition", f"{kind.name} once more", False)
        for kind in surplus.elements()
    ]
    return [*distinct.values(), *again]


def _of_fact(fact: Fact, true: Set[Fact]) -> Claim:
    """The claim that something is a fact."""
    return Claim(fact.kind, f"{fact.subject}: {fact.value}", fact in true, fact)


def _refer(thing: Chunk, surplus: Counter[Kind]) -> _Referent:
    """Find what a thing refers to. ``surplus`` of each kind of the scene, how many more
    of its things are introduced than there are, goes up.
    """
    misfits = {
        kind: _misfit(thing, kind)
        for kind in surplus
        if thing.shape in (None, kind.shape)
    }
    least = min(misfits.values(), default=0)
    fitting = [kind for kind, misfit in misfits.items() if misfit == least]
    if least:
        fitting = fitting[:1]
    total = sum(len(kind.things) for kind in fitting)
    if not thing.definite:
        fitting.sort(key=lambda kind: surplus[kind] >= 0)
    all_of_them = thing.several and thing.number in (None, total)
    meant = fitting if all_of_them else fitting[:1]
    if thing.shape is not None and not thing.definite:
        for kind in meant:
            surplus[kind] += len(kind.things) if all_of_them else 1
    possible = meant if thing.several else fitting
    names = [kind.name for kind in possible]
    readings = [(kind.name, kind.things) for kind in possible]
    if thing.several:
        together = chain.from_iterable(kind.things for kind in possible)
        readings = [(" and ".join(names), tuple(together))]
    return _Referent(names or [str(thing.shape)], readings, total)


def _misfit(thing: Chunk, kind: Kind) -> int:
    """How badly a kind fits a thing, 0 if well; colour counts more than size and texture."""
    return sum(
        3 if name == "colour" else 1
        for name, value in thing.attributes
        if getattr(kind, name) != value
    )


def _thing_claims(
    thing: Chunk, referent: _Referent, true: Set[Fact]
) -> Iterator[Claim]:
    """Claims of shape, attributes and number. Nothing about a thing that is not there is true."""
    names, _, total = referent
    said = thing.attributes
    if thing.shape is not None:
        said = ("shape", thing.shape), *said
    for name in names if thing.several else names[:1]:
        for attribute, value in said:
            yield _of_fact(Fact(attribute, name, value), true)
    values = sorted(value for _, value in thing.attributes)
    label = " ".join([*values, thing.shape or "object"])
    if thing.number is not None:
        fact = Fact("count", names[0], str(thing.number))
        right = thing.number == total
        yield Claim("count", f"{thing.number} {label}", right, fact)
    elif thing.several:
        yield Claim("count", f"several {label}", total > 1)


def _relation_claim(
    relation: str,
    first: _Referent,
    second: _Referent,
    holds: Callable[[Iterable[bool]], bool],
) -> Claim:
    """Judge a relation, which ``holds`` by ``all`` or ``any`` of the pairs of things."""
    if relation in ("right of", "below"):
        relation = "left of" if relation == "right of" else "above"
        first, second = second, first
    pairs = product(first.readings, second.readings)
    for (name, things), (other_name, others) in pairs:
        verdicts = [
            offset(relation, one, other) >= MARGIN
            for one, other in product(things, others)
            if one is not other
        ]
        if verdicts and holds(verdicts):
            fact = relation_fact(name, other_name) if all(verdicts) else None
            return Claim("relation", f"{name} {relation} {other_name}", True, fact)
    text = f"{first.names[0]} {relation} {second.names[0]}"
    return Claim("relation", text, False)
