"""The oracle: parses a caption into claims and judges them by its scene; precision, recall and F1.

The parser knows more wordings than the generated captions use, never fails, and counts the words
that it cannot use. Punctuation is optional, so that tokenised captions parse alike. docs/scenes.md
defines claims and facts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from typing import NamedTuple

from rl_caption.data.scenes.language import plural
from rl_caption.data.scenes.world import (
    BACKGROUNDS,
    COLOURS,
    MARGIN,
    RELATIONS,
    SHAPES,
    Fact,
    Kind,
    Scene,
    Thing,
    facts,
    offset,
    relation_fact,
    relations_between,
)

_TOKEN = re.compile(r"[\w'-]+|[.,;:!?]")
PUNCTUATION = ".,;:!?"
NOUNS: dict[str, tuple[str | None, bool]] = {}
"""Noun -> its shape (None for any shape) and whether it is plural."""
for _noun in (*SHAPES, "shape", "object", "thing"):
    _shape = _noun if _noun in SHAPES else None
    NOUNS |= {_noun: (_shape, False), plural(_noun): (_shape, True)}
ADJECTIVES = {colour: ("colour", colour) for colour in (*COLOURS, *BACKGROUNDS)}
"""Adjective -> attribute and value."""
for _words, _attribute, _value in (
    ("gray", "colour", "grey"),
    ("violet", "colour", "purple"),
    ("turquoise", "colour", "cyan"),
    ("large big huge", "size", "large"),
    ("small little tiny", "size", "small"),
    ("plain solid", "texture", "plain"),
    ("striped stripy", "texture", "striped"),
    ("dotted spotted", "texture", "dotted"),
):
    ADJECTIVES |= dict.fromkeys(_words.split(), (_attribute, _value))
NUMBERS = {str(number): number for number in range(1, 10)} | {"single": 1}
for _number, _word in enumerate(
    ["one", "two", "three", "four", "five", "six", "seven", "eight"], start=1
):
    NUMBERS[_word] = _number
_PICTURES = [
    f"{article} {picture} {verb}".strip()
    for article in ("", "a", "an", "the", "this")
    for picture in ("picture", "image", "photo")
    for verb in ("shows", "contains", "has", "of", "with")
]
_WORDINGS = {
    "left of": "left of, to the left of, on the left of, at the left of, on the left side of",
    "right of": "right of, to the right of, on the right of, at the right of, on the right side of",
    "above": "above, over, on top of",
    "below": "below, beneath, under, underneath",
    "there": "there is, there are",
    "be": "is, are, is located, are located",
    "on": "on, against, in front of",
    "and": "and",
    "with": "with",
    "pronoun": "it, them",
    "opening": ", ".join(_PICTURES),
    "closing": "in the picture, in the image, in this picture, in this image",
}
"""Relation, or kind of another chunk -> its phrases."""
_PHRASES = {text: key for key, texts in _WORDINGS.items() for text in texts.split(", ")}


def _any(texts: Iterable[str]) -> str:
    return "|".join(sorted(texts, key=len, reverse=True))


_CHUNK = re.compile(
    rf"(?P<mark>[{PUNCTUATION}]) "
    rf"|(?P<phrase>{_any(_PHRASES)}) "
    rf"|((?P<article>a|an|the|this) )?((?P<number>{_any(NUMBERS)}) )?"
    rf"(?P<said>(({_any(ADJECTIVES)}) )*)(?P<noun>{_any(NOUNS)}|background|backdrop) "
    rf"|(?P<adjectives>(({_any(ADJECTIVES)}) )+)"
    rf"|\S+ "
)
"""A chunk of tokens, each followed by a space."""

_LINKS = {
    "there": ("", "thing ground"),
    "opening": ("", "thing ground"),
    "on": ("", "ground"),
    "with": ("thing ground comma and pronoun closing", "thing ground"),
    "be": ("thing ground", "relation adjectives thing on there closing"),
    "and": (
        "thing ground adjectives pronoun comma closing",
        "thing ground relation adjectives there with on opening",
    ),
    "closing": ("thing ground pronoun be adjectives", ""),
    "pronoun": ("relation", ""),
}
"""Connecting chunk -> kinds of which one has to be before it and after it; empty where all may be.
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
    """``shape``, ``colour``, ``size``, ``texture``, ``count``, ``relation``, ``background`` or
    ``repetition``.
    """
    text: str
    """What is claimed, in words."""
    true: bool
    """Whether it is true of the scene."""
    fact: Fact | None = None
    """The fact of the scene that it tells, if any."""


@dataclass
class Chunk:
    """A phrase of a caption.

    ``kind`` is thing, ground (the background), adjectives, relation, there, be, on, and, with,
    pronoun, opening, closing, comma, stop or unknown. ``bad`` counts words that could not be used.
    For a thing, ``shape`` None is any shape, ``number`` None is no number, and ``definite`` ("the
    red circle") refers back instead of introducing a thing.
    """

    kind: str
    words: list[str]
    """Its lower-case tokens."""
    value: str = ""
    attributes: tuple[tuple[str, str], ...] = ()
    shape: str | None = None
    number: int | None = None
    plural: bool = False
    definite: bool = False
    bad: int = 0
    used: bool = False
    position: int = 0
    """Index among the chunks of the caption."""
    subject: Chunk | None = field(default=None, repr=False)

    @property
    def several(self) -> bool:
        """Whether a thing is more than one, by its number or else its plural."""
        return self.number > 1 if self.number is not None else self.plural


Related = tuple[Chunk, str, Chunk]
"""Subject, relation and object."""


class Parse(NamedTuple):
    """A parsed caption."""

    things: list[Chunk]
    relations: list[Related]
    backgrounds: list[str]
    unparsed: float
    """Words that the grammar cannot use, over all words."""


def oracle(caption: str, scene: Scene) -> OracleScore:
    """Judge a caption by its scene. Accepts any string; more than 2000 captions per second.

    With C the set of distinct claims of the caption and F the facts of the scene, precision = |true
    C| / |C|, recall = |facts told by true C| / |F|, F1 = 2 P R / (P + R), each 0 where it is 0 / 0.
    A repeated claim counts once; each introduction of a thing beyond the number of such things is a
    false claim.
    """
    judged, total = claims(caption, scene), len(facts(scene))
    true = sum(claim.true for claim in judged)
    told = len(
        {claim.fact for claim in judged if claim.true and claim.fact is not None}
    )
    precision = true / len(judged) if judged else 0.0
    # From whole numbers, rounded only at the end, so that no rounding error lifts F1 above both
    # precision and recall.
    f1 = 2 * true * told / (true * total + told * len(judged)) if told else 0.0
    return OracleScore(precision, told / total, f1, parse(caption).unparsed)


def tokens(caption: str) -> list[str]:
    """Split into lower-case words (letters, digits, ``_ ' -``) and punctuation ``. , ; : ! ?``;
    drop the rest.
    """
    return _TOKEN.findall(caption.lower())


@lru_cache(maxsize=8192)
def parse(caption: str) -> Parse:
    """Parse any caption; words that the grammar cannot use are counted, and claim nothing."""
    words = tokens(caption)
    chunks = cut_chunks(words)
    _connect(chunks)
    relations = pair_things(chunks)
    grounds = [chunk for chunk in chunks if chunk.kind == "ground"]
    total = sum(word not in PUNCTUATION for word in words)
    used = sum(len(chunk.words) - chunk.bad for chunk in chunks if chunk.used)
    return Parse(
        things=[chunk for chunk in chunks if chunk.kind == "thing"],
        relations=relations,
        backgrounds=[value for ground in grounds for _, value in ground.attributes],
        unparsed=(total - used) / total if total else 0.0,
    )


def cut_chunks(words: Sequence[str]) -> list[Chunk]:
    """Cut tokens into chunks; only things and grounds are ``used`` already (the others depend on
    neighbours).
    """
    chunks = [_chunk(match) for match in _CHUNK.finditer(" ".join([*words, ""]))]
    for position, chunk in enumerate(chunks):
        chunk.position = position
    return chunks


def _chunk(match: re.Match[str]) -> Chunk:
    words, phrase = match[0].split(), match["phrase"]
    if match["mark"]:
        return Chunk("comma" if match["mark"] in ",:" else "stop", words)
    if phrase:
        key = _PHRASES[phrase]
        return Chunk("relation", words, key) if key in RELATIONS else Chunk(key, words)
    said = [
        ADJECTIVES[word]
        for word in (match["said"] or match["adjectives"] or "").split()
    ]
    attributes = tuple(dict.fromkeys(said))
    chunk = Chunk(
        "unknown", words, attributes=attributes, bad=len(said) - len(attributes)
    )
    if match["adjectives"]:
        chunk.kind = "adjectives"
    elif match["noun"] in NOUNS:
        _read_thing(chunk, match)
    elif match["noun"]:
        chunk.kind, chunk.used = "ground", True
        chunk.attributes = tuple(pair for pair in attributes if pair[0] == "colour")
        others = set(attributes) - {*chunk.attributes, ("texture", "plain")}
        chunk.bad += len(others) + bool(match["number"])
    return chunk


def _read_thing(chunk: Chunk, match: re.Match[str]) -> None:
    """Read noun, number and article of a thing; those that do not agree count as bad."""
    chunk.kind, chunk.used = "thing", True
    chunk.shape, chunk.plural = NOUNS[match["noun"]]
    chunk.number = NUMBERS.get(match["number"])
    chunk.definite = match["article"] == "the"
    singular = match["article"] in ("a", "an", "this")
    if chunk.number is None:
        chunk.bad += singular and chunk.plural
    else:
        chunk.bad += chunk.plural != (chunk.number > 1)
        chunk.bad += singular and match["number"] != "single"


def _connect(chunks: list[Chunk]) -> None:
    """Mark connecting chunks as used where their neighbours fit, and apply predicates ("is red")."""
    kinds = ["", *(chunk.kind for chunk in chunks), ""]
    for position, (chunk, before, after) in enumerate(
        zip(chunks, kinds, kinds[2:], strict=False)
    ):
        if chunk.kind in _LINKS:
            left, right = _LINKS[chunk.kind]
            fits = not left or before in left.split()
            chunk.used = fits and (not right or after in right.split())
        elif chunk.kind == "adjectives":
            _predicate(chunks, position)
        if chunk.kind == "be" and chunk.used and after == "thing":
            # "is" before a thing is used only after a fronted relation: "below the star is a
            # circle".
            chunk.used = position >= 2 and chunks[position - 2].kind == "relation"


def _predicate(chunks: list[Chunk], position: int) -> None:
    """Give the adjectives of "the circle is red" or "is red and striped" to their subject."""
    chunk, near = chunks[position], chunks[max(0, position - 3) : position]
    before = [other for other in near if other.kind not in ("and", "comma")]
    subject = None
    if (
        len(before) >= 2
        and near[-1].kind == "be"
        and before[-2].kind in ("thing", "ground")
    ):
        subject = before[-2]
    elif before and before[-1].kind == "adjectives":
        subject = before[-1].subject
    if subject is not None:
        said = chunk.attributes
        if subject.kind == "ground":
            said = tuple(pair for pair in said if pair[0] == "colour")
        chunk.subject, chunk.used = subject, True
        chunk.bad += len(chunk.attributes) - len(said)
        subject.attributes = tuple(dict.fromkeys((*subject.attributes, *said)))


def pair_things(chunks: Sequence[Chunk]) -> list[Related]:
    """Subject, relation and object of every complete relation, which is marked as used.

    The subject is the nearest thing before; after "and" or a comma, the subject of the previous
    relation; where the relation is fronted ("above the star is a circle"), the thing after.
    """
    relations: list[Related] = []
    topic: Chunk | None = None
    before = "stop"
    for position, chunk in enumerate(chunks):
        if chunk.kind == "thing" and before not in ("with", "relation"):
            topic = chunk
        if chunk.kind == "relation" and position + 1 < len(chunks):
            fronted = _fronted(before, chunks[position + 1 : position + 4])
            topic = fronted or topic
            subject = fronted or _subject(list(chunks[:position]), relations)
            after = chunks[position + 1]
            target = {"pronoun": topic, "thing": after}.get(after.kind)
            if target is not None and subject is not None and subject is not target:
                chunk.used = True
                relations.append((subject, chunk.value, target))
        before = chunk.kind
    return relations


def _fronted(before: str, after: Sequence[Chunk]) -> Chunk | None:
    """The subject of a relation that is told before it: the last thing of "above the star is a
    circle".
    """
    kinds = [chunk.kind for chunk in after]
    if kinds in (["thing", "be", "thing"], ["thing", "there", "thing"]):
        return None if before in ("be", "and") else after[2]
    return (
        after[2] if kinds == ["thing", "comma", "thing"] and before == "stop" else None
    )


def _subject(before: list[Chunk], relations: list[Related]) -> Chunk | None:
    """The thing before a relation, or the subject of the previous one."""
    if before and before[-1].kind in ("and", "comma"):
        while before and before[-1].kind in ("and", "comma"):
            before.pop()
        if relations and before and before[-1] is relations[-1][2]:
            return relations[-1][0]
    elif before and before[-1].kind == "be":
        before.pop()
    return before[-1] if before and before[-1].kind == "thing" else None


class _Referent(NamedTuple):
    """What a thing of a caption refers to.

    ``kinds`` is empty where the scene lacks its shape; a singular thing is the first of them, or
    perhaps another. ``total`` is the number of things in the scene that fit its words.
    """

    thing: Chunk
    kinds: tuple[Kind, ...] = ()
    total: int = 0

    @property
    def noun(self) -> str:
        return self.thing.shape or "object"

    @property
    def readings(self) -> list[tuple[Kind, ...]]:
        """The sets of kinds that a thing may stand for: all kinds together if plural, any one if
        singular.
        """
        if self.thing.several:
            return [self.kinds] if self.kinds else []
        return [(kind,) for kind in self.kinds]


def claims(caption: str, scene: Scene) -> list[Claim]:
    """The distinct claims of a caption, each judged."""
    parsed = parse(caption)
    referents, repeated = _resolve(parsed.things, scene.kinds)
    found: list[Claim] = []
    for thing in parsed.things:
        found += _thing_claims(referents[thing.position])
    for subject, relation, other in parsed.relations:
        ends = referents[subject.position], referents[other.position]
        found.append(_relation_claim(relation, *ends))
    for colour in parsed.backgrounds:
        fact = Fact("background", "background", colour)
        found.append(_of_fact(colour, fact, colour == scene.background))
    distinct: dict[tuple[str, str], Claim] = {}
    for claim in found:
        distinct.setdefault((claim.kind, claim.text), claim)
    again = [
        Claim("repetition", f"{name} once more", False) for name in repeated.elements()
    ]
    return [*distinct.values(), *again]


def _of_fact(text: str, fact: Fact, true: bool) -> Claim:
    """The claim of a fact."""
    return Claim(fact.kind, text, true, fact if true else None)


def _resolve(
    things: Sequence[Chunk], kinds: Sequence[Kind]
) -> tuple[dict[int, _Referent], Counter[str]]:
    """Find what each thing refers to, by its position, and how often a kind is introduced beyond
    its number of things.

    Things with the most attributes choose first, so that "a circle and a red circle" can be a blue
    and a red one.
    """
    referents: dict[int, _Referent] = {}
    introduced: Counter[str] = Counter()
    for thing in sorted(things, key=lambda thing: -len(thing.attributes)):
        options = [kind for kind in kinds if thing.shape in (None, kind.shape)]
        fitting = [
            kind
            for kind in options
            if all(getattr(kind, name) == value for name, value in thing.attributes)
        ]
        if options and not fitting:
            fitting = [max(options, key=partial(_agreement, thing))]
        total = sum(len(kind.things) for kind in fitting)
        if not thing.definite:
            fitting.sort(key=lambda kind: introduced[kind.name] >= len(kind.things))
        all_of_them = thing.several and thing.number in (None, total)
        if thing.several and not all_of_them:
            fitting = fitting[:1]
        referents[thing.position] = _Referent(thing, tuple(fitting), total)
        if thing.shape is not None and not thing.definite:
            for kind in fitting if all_of_them else fitting[:1]:
                introduced[kind.name] += len(kind.things) if all_of_them else 1
    return referents, introduced - Counter(
        {kind.name: len(kind.things) for kind in kinds}
    )


def _agreement(thing: Chunk, kind: Kind) -> int:
    """How well a kind fits a thing; colour counts more than size and texture."""
    agreed = [name for name, value in thing.attributes if getattr(kind, name) == value]
    return len(agreed) + 2 * ("colour" in agreed)


def _thing_claims(referent: _Referent) -> Iterator[Claim]:
    thing, kinds, total = referent
    if not kinds:
        # Nothing about a thing that is not there is true, and its attributes are claims of their
        # own.
        yield Claim("shape", referent.noun, False)
        for attribute, value in thing.attributes:
            yield Claim(attribute, f"{value} {referent.noun}", False)
    for kind in kinds if thing.several else kinds[:1]:
        if thing.shape is not None:
            yield _of_fact(kind.name, Fact("shape", kind.name, kind.shape), True)
        for attribute, value in thing.attributes:
            fact = Fact(attribute, kind.name, value)
            yield _of_fact(
                f"{value}: {kind.name}", fact, getattr(kind, attribute) == value
            )
    label = " ".join([value for _, value in sorted(thing.attributes)] + [referent.noun])
    number = thing.number
    if number is not None:
        claim = Claim("count", f"{number} {label}", number == total)
        if number == total > 1 and len(kinds) == 1:
            claim = claim._replace(fact=Fact("count", kinds[0].name, str(number)))
        yield claim
    elif thing.plural:
        yield Claim("count", f"several {label}", total > 1)


def _relation_claim(relation: str, first: _Referent, second: _Referent) -> Claim:
    """Judge a relation: of plural things it must hold for all, of singular ones for any that may be
    meant.
    """
    if relation in ("right of", "below"):
        relation = "left of" if relation == "right of" else "above"
        first, second = second, first
    holds = all if first.thing.several or second.thing.several else any
    for one, other in product(first.readings, second.readings):
        pairs = product(_things_of(one), _things_of(other))
        verdicts = [offset(relation, a, b) >= MARGIN for a, b in pairs if a is not b]
        if verdicts and holds(verdicts):
            fact = None
            if len(one) == len(other) == 1 and relation in relations_between(
                one[0], other[0]
            ):
                fact = relation_fact(one[0], other[0])
            return Claim(
                "relation", f"{_names(one)} {relation} {_names(other)}", True, fact
            )
    names = [
        _names(referent.kinds[:1]) or referent.noun for referent in (first, second)
    ]
    return Claim("relation", f"{names[0]} {relation} {names[1]}", False)


def _things_of(kinds: Sequence[Kind]) -> list[Thing]:
    return [thing for kind in kinds for thing in kind.things]


def _names(kinds: Sequence[Kind]) -> str:
    return " and ".join(kind.name for kind in kinds)
