"""The oracle: parses a caption into claims and judges them by its scene; precision, recall and F1.

The parser knows more wordings than the generated captions use, never fails, and counts the words that it cannot use.
Punctuation is optional, so that tokenised captions parse alike. docs/scenes.md defines claims and facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from rewards.base import RewardError
from rewards.images import ImageSource
from rl_caption.data.scenes.language import plural
from rl_caption.data.scenes.moving import (
    DIRECTIONS,
    MovingScene,
    Phrase,
    done,
    moving_facts,
    phrase_at,
)
from rl_caption.data.scenes.render import SceneImage
from rl_caption.data.scenes.world import (
    BACKGROUNDS,
    COLOURS,
    MARGIN,
    SHAPES,
    Fact,
    Kind,
    Scene,
    facts,
    offset,
    relation_fact,
    relations_between,
)

_TOKEN = re.compile(r"[\w'-]+|[.,;:!?]")
PUNCTUATION = ".,;:!?"

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
NUMBERS = {
    "one": 1,
    "single": 1,
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
} | {str(number): number for number in range(1, 10)}
_ARTICLES = {"a", "an", "the", "this"}
_RELATION_PHRASES = {
    "left of": (
        "left of",
        "to the left of",
        "on the left of",
        "at the left of",
        "on the left side of",
    ),
    "right of": (
        "right of",
        "to the right of",
        "on the right of",
        "at the right of",
        "on the right side of",
    ),
    "above": ("above", "over", "on top of"),
    "below": ("below", "beneath", "under", "underneath"),
}
_PHRASES: dict[tuple[str, ...], tuple[str, str]] = {
    **{
        tuple(text.split()): ("relation", relation)
        for relation, texts in _RELATION_PHRASES.items()
        for text in texts
    },
    **dict.fromkeys((("there", "is"), ("there", "are")), ("there", "")),
    **dict.fromkeys((("is",), ("are",), ("is", "located"), ("are", "located")), ("be", "")),
    **dict.fromkeys((("on",), ("against",), ("in", "front", "of")), ("on", "")),
    **{
        ("and",): ("and", ""),
        ("with",): ("with", ""),
        ("it",): ("pronoun", ""),
        ("them",): ("pronoun", ""),
    },
    **{
        (*article, picture, verb): ("opening", "")
        for article in ((), ("a",), ("an",), ("the",), ("this",))
        for picture in ("picture", "image", "photo")
        for verb in ("shows", "contains", "has", "of", "with")
    },
    **{
        ("in", article, picture): ("closing", "")
        for article in ("the", "this")
        for picture in ("picture", "image")
    },
}
_BY_FIRST: dict[str, list[tuple[str, ...]]] = {}
for _phrase in sorted(_PHRASES, key=len, reverse=True):
    _BY_FIRST.setdefault(_phrase[0], []).append(_phrase)


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


class SceneObjects:
    """An exact detector of the shapes in generated scenes, for the reward ``chair`` (docs/rewards.md)."""

    signature = "scenes"

    def __call__(self, images: Sequence[ImageSource]) -> list[frozenset[str]]:
        """Sets of the ``SHAPES`` in N images. Raises ``RewardError`` for images of no generated scene."""
        for image in images:
            if not isinstance(image, SceneImage):
                raise RewardError(
                    f"the image {image!r:.80} is of no generated scene, whose objects would be known"
                )
        return [frozenset(thing.shape for thing in image.scene.things) for image in images]  # type: ignore[union-attr]


class Claim(NamedTuple):
    """One checkable statement of a caption."""

    kind: str
    """``shape``, ``colour``, ``size``, ``texture``, ``count``, ``relation``, ``background`` or ``repetition``; of a
    moving scene also ``direction``, ``event``, ``motion`` (without a direction) or ``collision``."""
    text: str
    """What is claimed, in words."""
    true: bool
    """Whether it is true of the scene."""
    fact: Fact | None
    """The fact of the scene that it tells, if any."""


@dataclass
class Chunk:
    """A phrase of a caption: tokens ``start`` to ``end``, exclusive.

    ``kind`` is thing, ground (the background), adjectives, relation, there, be, on, and, with, pronoun, opening,
    closing, comma, stop or unknown. ``bad`` counts words that could not be used. For a thing, ``shape`` None is any
    shape, ``number`` None is no number, and ``definite`` ("the red circle") refers back instead of introducing a thing.
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
    position: int = 0
    """Index among the chunks of the caption."""
    subject: Chunk | None = field(default=None, repr=False)

    @property
    def several(self) -> bool:
        """Whether a thing is more than one, by its number or else its plural."""
        return self.number > 1 if self.number is not None else self.plural


class Parse(NamedTuple):
    """A parsed caption; relations are (index of subject, relation, index of object) into ``things``."""

    things: tuple[Chunk, ...]
    relations: tuple[tuple[int, str, int], ...]
    backgrounds: tuple[str, ...]
    words: int
    unparsed_words: int


def oracle(caption: str, scene: Scene | MovingScene) -> OracleScore:
    """Judge a caption by its scene. Accepts any string; more than 2000 captions per second.

    With C the set of distinct claims of the caption and F the facts of the scene,
    precision = |true C| / |C|, recall = |facts told by true C| / |F|, F1 = 2 P R / (P + R), each 0 where it is 0 / 0.
    A repeated claim counts once; each introduction of a thing beyond the number of such things is a false claim.
    """
    if isinstance(scene, MovingScene):
        moving = _without_motions(caption)
        parsed, judged, total = parse(moving.rest), claims(caption, scene), len(moving_facts(scene))
        words, unparsed_words = moving.words, parsed.unparsed_words + moving.unparsed_words
    else:
        parsed, judged, total = parse(caption), claims(caption, scene), len(facts(scene))
        words, unparsed_words = parsed.words, parsed.unparsed_words
    true = sum(claim.true for claim in judged)
    told = {claim.fact for claim in judged if claim.true and claim.fact is not None}
    precision = true / len(judged) if judged else 0.0
    recall = len(told) / total
    # From whole numbers, rounded only at the end, so that no rounding error lifts F1 above both precision and recall.
    f1 = 2 * true * len(told) / (true * total + len(told) * len(judged)) if told else 0.0
    unparsed = unparsed_words / words if words else 0.0
    return OracleScore(precision, recall, f1, unparsed)


def tokens(caption: str) -> list[str]:
    """Split into lower-case words (letters, digits, ``_ ' -``) and punctuation ``. , ; : ! ?``; drop the rest."""
    return _TOKEN.findall(caption.lower())


@lru_cache(maxsize=8192)
def parse(caption: str) -> Parse:
    """Parse any caption; words that the grammar cannot use are counted, and claim nothing."""
    words = tokens(caption)
    chunks = cut_chunks(words)
    _connect(chunks)
    relations = pair_things(chunks)
    things = [chunk for chunk in chunks if chunk.kind == "thing"]
    index = {thing.position: number for number, thing in enumerate(things)}
    total = sum(word[0] not in PUNCTUATION for word in words)
    used = sum(chunk.end - chunk.start - chunk.bad for chunk in chunks if chunk.used)
    return Parse(
        tuple(things),
        tuple(
            (index[subject.position], relation, index[other.position])
            for subject, relation, other in relations
        ),
        tuple(
            value
            for c in chunks
            if c.kind == "ground"
            for attribute, value in c.attributes
            if attribute
        ),
        total,
        total - used,
    )


def cut_chunks(words: Sequence[str]) -> list[Chunk]:
    """Cut tokens into chunks; only things and grounds are ``used`` already (the others depend on neighbours)."""
    chunks: list[Chunk] = []
    start = 0
    while start < len(words):
        chunk = _phrase_at(words, start) or _noun_phrase_at(words, start)
        chunk.position = len(chunks)
        chunks.append(chunk)
        start = chunk.end
    return chunks


def _phrase_at(words: Sequence[str], start: int) -> Chunk | None:
    word = words[start]
    if word in PUNCTUATION:
        return Chunk("comma" if word in ",:" else "stop", start, start + 1)
    for phrase in _BY_FIRST.get(word, ()):
        if tuple(words[start : start + len(phrase)]) == phrase:
            role, value = _PHRASES[phrase]
            return Chunk(role, start, start + len(phrase), value)
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
    noun = words[at] if at < len(words) else ""
    distinct = tuple(dict.fromkeys(attributes))
    if noun in ("background", "backdrop"):
        colours = tuple(attribute for attribute in attributes if attribute[0] == "colour")
        bad += len(set(distinct) - {*colours, ("texture", "plain")}) + (number is not None)
        return Chunk("ground", start, at + 1, attributes=colours, bad=bad, used=True)
    if noun in NOUNS:
        shape, is_plural = NOUNS[noun]
        disagrees = (
            is_plural != (number > 1)
            if number is not None
            else is_plural and article in ("a", "an", "this")
        )
        bad += int(disagrees) + (
            article in ("a", "an", "this") and number is not None and words[first - 1] != "single"
        )
        return Chunk(
            "thing",
            start,
            at + 1,
            "",
            distinct,
            shape,
            number,
            is_plural,
            article == "the",
            bad,
            used=True,
        )
    if attributes and first == start:
        return Chunk("adjectives", start, at, attributes=distinct, bad=bad)
    return Chunk("unknown", start, start + 1)


_NAMED = {"thing", "ground"}
_CAN_FOLLOW: dict[str, set[str]] = {
    "there": _NAMED,
    "opening": _NAMED,
    "on": {"ground"},
    "with": _NAMED,
    "be": {"relation", "adjectives", "thing", "on", "there", "closing"},
    "and": _NAMED | {"relation", "adjectives", "there", "with", "on", "opening"},
}
_CAN_PRECEDE: dict[str, set[str]] = {
    "with": _NAMED | {"comma", "and", "pronoun", "closing"},
    "be": _NAMED,
    "and": _NAMED | {"adjectives", "pronoun", "comma", "closing"},
    "closing": _NAMED | {"pronoun", "be", "adjectives"},
    "pronoun": {"relation"},
}


def _connect(chunks: list[Chunk]) -> None:
    """Mark connecting chunks as used where their neighbours fit, and apply predicates ("is red")."""
    for position, chunk in enumerate(chunks):
        before = chunks[position - 1].kind if position else ""
        after = chunks[position + 1].kind if position + 1 < len(chunks) else ""
        if chunk.kind in _CAN_FOLLOW or chunk.kind in _CAN_PRECEDE:
            follows = chunk.kind not in _CAN_PRECEDE or before in _CAN_PRECEDE[chunk.kind]
            leads = chunk.kind not in _CAN_FOLLOW or after in _CAN_FOLLOW[chunk.kind]
            chunk.used = follows and leads
        elif chunk.kind == "adjectives":
            _predicate(chunks, position)
    for position, chunk in enumerate(chunks[1:], start=1):
        if chunk.kind == "be" and chunk.used and chunks[position + 1].kind == "thing":
            # "is" before a thing is used only after a fronted relation: "below the star is a circle".
            chunk.used = position >= 2 and chunks[position - 2].kind == "relation"


def _predicate(chunks: list[Chunk], position: int) -> None:
    """Give the adjectives of "the circle is red" or "is red and striped" to their subject."""
    chunk = chunks[position]
    before = [c for c in chunks[max(0, position - 3) : position] if c.kind not in ("and", "comma")]
    if len(before) >= 2 and chunks[position - 1].kind == "be" and before[-2].kind in _NAMED:
        chunk.subject = before[-2]
    elif before and before[-1].kind == "adjectives" and before[-1].used:
        chunk.subject = before[-1].subject
    if chunk.subject is None:
        return
    ground = chunk.subject.kind == "ground"
    pairs = [pair for pair in chunk.attributes if not ground or pair[0] == "colour"]
    chunk.used = True
    chunk.bad += len(chunk.attributes) - len(pairs)
    chunk.subject.attributes = tuple(dict.fromkeys((*chunk.subject.attributes, *pairs)))


def pair_things(chunks: list[Chunk]) -> list[tuple[Chunk, str, Chunk]]:
    """Subject, relation and object of every complete relation, which is marked as used.

    The subject is the nearest thing before; after "and" or a comma, the subject of the previous relation; where the
    relation is fronted ("above the star is a circle"), the thing after.
    """
    relations: list[tuple[Chunk, str, Chunk]] = []
    topic: Chunk | None = None
    for position, chunk in enumerate(chunks):
        if chunk.kind == "thing" and (
            position == 0 or chunks[position - 1].kind not in ("with", "relation")
        ):
            topic = chunk
        if chunk.kind != "relation" or position + 1 == len(chunks):
            continue
        after = chunks[position + 1]
        before = chunks[position - 1].kind if position else "stop"
        target = topic if after.kind == "pronoun" else after if after.kind == "thing" else None
        subject = _subject(chunks, position, relations)
        fronted = chunks[position + 2 : position + 4]
        if (
            len(fronted) == 2
            and fronted[0].kind in ("be", "there", "comma")
            and fronted[1].kind == "thing"
            and after.kind == "thing"
            and (before == "stop" or (fronted[0].kind != "comma" and before not in ("be", "and")))
        ):
            subject = topic = fronted[1]
        if target is None or subject is None or subject is target:
            continue
        chunk.used = True
        relations.append((subject, chunk.value, target))
    return relations


def _subject(
    chunks: list[Chunk], position: int, relations: list[tuple[Chunk, str, Chunk]]
) -> Chunk | None:
    at = position - 1
    if at >= 0 and chunks[at].kind in ("and", "comma"):
        while at >= 0 and chunks[at].kind in ("and", "comma"):
            at -= 1
        if relations and at >= 0 and chunks[at] is relations[-1][2]:
            return relations[-1][0]
    elif at >= 0 and chunks[at].kind == "be":
        at -= 1
    return chunks[at] if at >= 0 and chunks[at].kind == "thing" else None


class _Referent(NamedTuple):
    """What a thing of a caption refers to.

    ``kinds`` is empty where the scene lacks its shape; a singular thing is the first of them, or perhaps another.
    ``total`` is the number of things in the scene that fit its words.
    """

    kinds: tuple[Kind, ...]
    total: int


def claims(caption: str, scene: Scene | MovingScene) -> list[Claim]:
    """The distinct claims of a caption, each judged."""
    if isinstance(scene, MovingScene):
        return _moving_claims(caption, scene)
    parsed = parse(caption)
    referents, repeated = _resolve(parsed.things, scene.kinds)
    all_claims = [
        claim
        for pair in zip(parsed.things, referents, strict=True)
        for claim in _thing_claims(*pair)
    ]
    for subject, relation, other in parsed.relations:
        one, two = ((parsed.things[index], referents[index]) for index in (subject, other))
        all_claims.append(_relation_claim(relation, one, two))
    for colour in parsed.backgrounds:
        true = colour == scene.background
        all_claims.append(
            Claim(
                "background",
                colour,
                true,
                Fact("background", "background", colour) if true else None,
            )
        )
    again = [name for name, times in repeated.items() for _ in range(times)]
    return [
        *_distinct(all_claims),
        *(Claim("repetition", f"{name} once more", False, None) for name in again),
    ]


def _distinct(claims: Iterable[Claim]) -> list[Claim]:
    """Of claims of the same kind and text, the first."""
    first: dict[tuple[str, str], Claim] = {}
    for claim in claims:
        first.setdefault((claim.kind, claim.text), claim)
    return list(first.values())


def _resolve(
    things: Sequence[Chunk], kinds: Sequence[Kind]
) -> tuple[list[_Referent], dict[str, int]]:
    """Find what each thing refers to, and how often each kind is introduced beyond its number of things.

    Things with the most attributes choose first, so that "a circle and a red circle" can be a blue and a red one.
    """
    referents = [_Referent((), 0)] * len(things)
    introduced: dict[str, int] = {}
    for index in sorted(range(len(things)), key=lambda index: -len(things[index].attributes)):
        thing = things[index]
        options = [group for group in kinds if thing.shape is None or group.shape == thing.shape]
        if not options:
            continue
        fitting = [
            group
            for group in options
            if all(getattr(group, name) == value for name, value in thing.attributes)
        ]
        if not fitting:
            fitting = [max(options, key=lambda group: _agreement(group, thing))]
        total = sum(len(group.things) for group in fitting)
        if not thing.definite:
            fitting.sort(key=lambda group: introduced.get(group.name, 0) >= len(group.things))
        all_of_them = thing.several and thing.number in (None, total)
        if thing.several and not all_of_them:
            fitting = fitting[:1]
        referents[index] = _Referent(tuple(fitting), total)
        if thing.shape is not None and not thing.definite:
            for group in fitting if all_of_them else fitting[:1]:
                introduced[group.name] = introduced.get(group.name, 0) + (
                    len(group.things) if all_of_them else 1
                )
    present = {group.name: len(group.things) for group in kinds}
    return referents, {
        name: times - present[name] for name, times in introduced.items() if times > present[name]
    }


def _agreement(group: Kind, thing: Chunk) -> int:
    """How well a kind fits a thing; colour counts more than size and texture."""
    return sum(
        3 if name == "colour" else 1
        for name, value in thing.attributes
        if getattr(group, name) == value
    )


def _thing_claims(thing: Chunk, referent: _Referent) -> Iterator[Claim]:
    noun = thing.shape or "object"
    if not referent.kinds:
        # Nothing about a thing that is not there is true, and its attributes are claims of their own.
        yield Claim("shape", noun, False, None)
        for attribute, value in thing.attributes:
            yield Claim(attribute, f"{value} {noun}", False, None)
    for group in referent.kinds if thing.several else referent.kinds[:1]:
        if thing.shape is not None:
            yield Claim("shape", group.name, True, Fact("shape", group.name, group.shape))
        for attribute, value in thing.attributes:
            true = getattr(group, attribute) == value
            yield Claim(
                attribute,
                f"{value}: {group.name}",
                true,
                Fact(attribute, group.name, value) if true else None,
            )
    label = " ".join([value for _, value in sorted(thing.attributes)] + [noun])
    if thing.number is not None:
        true, fact = referent.total == thing.number, None
        if true and len(referent.kinds) == 1 and thing.number > 1:
            fact = Fact("count", referent.kinds[0].name, str(thing.number))
        yield Claim("count", f"{thing.number} {label}", true, fact)
    elif thing.plural:
        yield Claim("count", f"several {label}", referent.total > 1, None)


def _relation_claim(
    relation: str, first: tuple[Chunk, _Referent], second: tuple[Chunk, _Referent]
) -> Claim:
    """Judge a relation: of plural things it must hold for all, of singular ones for any that may be meant."""
    if relation in ("right of", "below"):
        relation, first, second = {"right of": "left of", "below": "above"}[relation], second, first
    every = first[0].several or second[0].several
    for one in _readings(*first):
        for other in _readings(*second):
            pairs = [
                (a, b) for x in one for y in other for a in x.things for b in y.things if a is not b
            ]
            verdicts = (offset(relation, a, b) >= MARGIN for a, b in pairs)
            if pairs and (all(verdicts) if every else any(verdicts)):
                single = len(one) == len(other) == 1 and one != other
                told = single and relation in relations_between(one[0], other[0])
                fact = relation_fact(one[0], other[0]) if told else None
                return Claim("relation", f"{_names(one)} {relation} {_names(other)}", True, fact)
    names = [
        _names(referent.kinds[:1]) or thing.shape or "object" for thing, referent in (first, second)
    ]
    return Claim("relation", f"{names[0]} {relation} {names[1]}", False, None)


def _readings(thing: Chunk, referent: _Referent) -> list[tuple[Kind, ...]]:
    """The sets of kinds that a thing may stand for: all kinds together if plural, any one if singular."""
    if thing.several:
        return [referent.kinds] if referent.kinds else []
    return [(group,) for group in referent.kinds]


def _names(kinds: Sequence[Kind]) -> str:
    return " and ".join(group.name for group in kinds)


class _Motion(NamedTuple):
    """A phrase of motion and the indices of the caption's things that it is about."""

    phrase: Phrase
    subjects: tuple[int, ...]
    other: int | None
    """The thing that is hit, where it is not among the subjects."""


class _Split(NamedTuple):
    """A caption without its phrases of motion, to be parsed as one of a still scene, and these phrases."""

    rest: str
    motions: tuple[_Motion, ...]
    words: int
    """Number of words of the whole caption."""
    unparsed_words: int
    """Number of words in phrases without a subject."""


@lru_cache(maxsize=8192)
def _without_motions(caption: str) -> _Split:
    """Separate the phrases of motion from a caption; "while" and "as" become "and".

    The subject of a phrase is the nearest thing before it; for a plural verb, all things listed there.
    """
    words, rest = tokens(caption), list[str]()
    phrases: list[tuple[int, int, Phrase]] = []
    at = 0
    while at < len(words):
        motion = phrase_at(words, at)
        if motion is None:
            rest.append("and" if words[at] in ("while", "as") else words[at])
            at += 1
        else:
            phrases.append((len(rest), *motion))
            at += motion[0]
    text = " ".join(rest)
    things = parse(text).things
    motions, unparsed = [], 0
    for place, length, phrase in phrases:
        before = [index for index, thing in enumerate(things) if thing.end <= place]
        after = [index for index, thing in enumerate(things) if thing.start >= place]
        subjects = before[-1:]
        if phrase.form == "plural" or (phrase.form == "participle" and phrase.event == "collides"):
            cuts = [end for end, _, _ in phrases if end < place]
            while subjects and subjects[0] and _listed_with(things, subjects[0], rest, cuts):
                subjects.insert(0, subjects[0] - 1)
        is_pair = phrase.event != "collides" or len(subjects) == 2
        if not subjects or not (is_pair or after):
            unparsed += length
            continue
        motions.append(_Motion(phrase, tuple(subjects), None if is_pair else after[0]))
    return _Split(text, tuple(motions), sum(word[0] not in PUNCTUATION for word in words), unparsed)


def _listed_with(
    things: Sequence[Chunk], index: int, rest: Sequence[str], cuts: Sequence[int]
) -> bool:
    """Whether a thing and the previous one are joined by "and" or a comma, without a phrase of motion between."""
    end, start = things[index - 1].end, things[index].start
    return (
        set(rest[end:start]) <= {"and", ","}
        and end < start
        and not any(end <= cut <= start for cut in cuts)
    )


def _moving_claims(caption: str, scene: MovingScene) -> list[Claim]:
    """Claims of the still scene, whose relations must be true at the start and at the end; then those of motion."""
    split = _without_motions(caption)
    at_end = claims(split.rest, scene.at(1))
    judged = []
    for claim in claims(split.rest, scene.start):
        if claim.kind == "relation":
            claim = Claim("relation", claim.text, claim in at_end and claim.true, None)
        judged.append(claim)
    things = parse(split.rest).things
    referents, _ = _resolve(things, scene.kinds)
    moved = (
        claim
        for motion in split.motions
        for claim in _motion_claims(motion, things, referents, scene)
    )
    return [*judged, *_distinct(moved)]


def _motion_claims(
    motion: _Motion, things: Sequence[Chunk], referents: Sequence[_Referent], scene: MovingScene
) -> Iterator[Claim]:
    event, direction, _ = motion.phrase

    def meant(thing: int) -> list[int]:
        """Indices of the things of the scene that a thing of the caption may be."""
        return [scene.kinds.index(group) for group in referents[thing].kinds]

    def check_claim(aspect: str, thing: int, value: str, facts_of: dict[int, Fact]) -> Claim:
        """A claim that is true if it holds for any thing that may be meant; ``facts_of`` has its fact for each."""
        names = [scene.kinds[index].name for index in meant(thing)] or [
            things[thing].shape or "object"
        ]
        for index, fact in facts_of.items():
            if fact in done(scene, index):
                return Claim(aspect, f"{scene.kinds[index].name} {value}", True, fact)
        return Claim(aspect, f"{names[0]} {value}", False, None)

    if event == "collides":
        one = motion.subjects[0]
        other = motion.subjects[1] if motion.other is None else motion.other
        pairs = {
            a: Fact("collision", " / ".join(sorted((scene.kinds[a].name, scene.kinds[b].name))), "")
            for b in meant(other)
            for a in meant(one)
            if a != b and scene.collision is not None and {a, b} == set(scene.collision)
        }
        yield check_claim(
            "collision", one, f"collides with {things[other].shape or 'object'}", pairs
        )
        return
    for thing in motion.subjects:
        if event in ("enters", "leaves"):
            facts = {index: Fact("event", scene.kinds[index].name, event) for index in meant(thing)}
            yield check_claim("event", thing, event, facts)
        if direction:
            facts = {
                index: Fact("direction", scene.kinds[index].name, direction)
                for index in meant(thing)
            }
            yield check_claim(
                "direction",
                thing,
                f"goes {direction}" if direction in DIRECTIONS else "stays",
                facts,
            )
        elif event == "moves":
            moves = [index for index in meant(thing) if scene.motions[index].direction]
            yield check_claim("motion", thing, "moves", {})._replace(true=bool(moves))
