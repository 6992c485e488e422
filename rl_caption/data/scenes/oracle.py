"""The oracle: parses a caption into claims and judges them by its scene; precision, recall and F1.

The parser knows the words and the forms of the generated captions, never fails, and
counts the words that it cannot use. Punctuation is optional, so that tokenised captions
parse alike. docs/scenes.md defines claims and facts.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain, product
from typing import NamedTuple

from rl_caption.data.scenes.language import NUMBERS, plural, wordings
from rl_caption.data.scenes.world import (
    ATTRIBUTES,
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
)

_TOKEN = re.compile(r"[\w'-]+|[.,;:!?]")
NOUNS = {
    noun: shape
    for shape in (*SHAPES, "shape", "object")
    for noun in (shape, plural(shape))
}
"""Noun -> its singular; "shape" and "object" mean any shape."""
ADJECTIVES = {
    wording: (attribute, value)
    for attribute, values in (*ATTRIBUTES.items(), ("colour", BACKGROUNDS))
    for value in values
    for wording in wordings(value)
}
"""Adjective -> attribute and value."""
_RELATIONS = {
    wording: relation for relation in RELATIONS for wording in wordings(relation)
}
"""Wording of a relation -> relation."""

_ADJECTIVE = f"({'|'.join(ADJECTIVES)})"
_NOUN = f"({'|'.join(NOUNS)})"
_COLOUR = f"({'|'.join((*COLOURS, *BACKGROUNDS))})"
_DESCRIBED = f"({_ADJECTIVE} )*({_NOUN}|background)"
_PATTERNS = {
    "stop": "[.,;:!?]",
    "relation": "|".join(_RELATIONS),
    "there": "there (is|are)",
    "opening": "((a|an|the) )?picture (shows|has)",
    "be": "is|are",
    "on": "on|against|in front of",
    "and": "and",
    "with": "with",
    "pronoun": "it|them",
    "thing": f"((a|an|the|(the )?({'|'.join(NUMBERS[1:])})) )?({_ADJECTIVE} )*{_NOUN}",
    # "the background is grey"
    "ground": f"((a|an|the) )?({_ADJECTIVE} )*background( is {_COLOUR}(?! {_DESCRIBED}))?",
    "adjectives": f"{_ADJECTIVE}( {_ADJECTIVE})*",
    "unknown": r"\S+",
}
"""Kind of a chunk -> its tokens; the first that fits is taken."""
_GROUPS = "|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _PATTERNS.items())
_CHUNK = re.compile(f"(?:{_GROUPS}) ")
_FORMS = {
    "<(there|opening)> (thing|ground)": (),
    "<on> ground": (),
    "(thing|ground) <with> (thing|ground)": (),
    "thing <be> (relation|adjectives|on)|relation thing <be> thing": (),
    "(thing|ground|adjectives|pronoun) <and> (thing|ground|relation|there|opening)": (),
    "relation <pronoun>": (),
    "thing be <adjectives>": (-2,),
    "thing with thing <relation> pronoun": (-1, -3),
    "thing <relation> thing": (-1, 1),
    "thing (be|and) <relation> thing": (-2, 1),
    # Has the subject of the relation before it: "and above the star".
    "relation thing and <relation> thing": (-3, 1),
    # "above the star is a circle", which takes the place of another reading
    "(?<!be )(?<!and )<relation> thing (be|there) thing": (3, 1),
}
"""Pattern of a chunk's kind, in ``<>``, and its neighbours' -> offsets of the chunks
that it is about. For kinds that need neighbours.
"""


class OracleScore(NamedTuple):
    """Truth and completeness of a caption; all values in [0, 1]."""

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
    """The claim in words."""
    true: bool
    """Whether it is true of the scene."""
    fact: Fact | None = None
    """Fact that it tells; counts for recall where the claim is true and the scene has
    it.
    """


@dataclass(eq=False)
class Chunk:
    """A phrase of a caption.

    ``kind`` is thing, ground (the background), adjectives, relation, there, opening,
    be, on, and, with, pronoun, stop or unknown. For a thing, ``shape`` "" is any shape,
    ``number`` 0 is no number, and ``definite`` ("the red circle") refers back
    instead of introducing a thing.
    """

    kind: str
    words: list[str]
    """Its lower-case tokens."""
    attributes: dict[tuple[str, str], None]
    """Pairs of an attribute and its value."""
    number: int = 0
    several: bool = False
    """Whether a thing is more than one, by its number or else its plural."""
    relation: str = ""
    shape: str = ""
    definite: bool = False
    about: list["Chunk"] = field(default_factory=list)
    """Subject and object of a relation, or the thing that adjectives describe."""
    used: bool = False
    """Whether the grammar can use it where it is."""
    useful: int = 0
    """Number of its words that the grammar then uses."""


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
    precision = len(true) / max(len(judged), 1)
    # From whole numbers, rounded only at the end, so that no rounding error lifts F1 above both
    # precision and recall.
    both = len(true) * total + told * len(judged)
    f1 = 2 * len(true) * told / max(both, 1)
    chunks = [chunk for chunk in parse(caption) if chunk.kind != "stop"]
    words = sum(len(chunk.words) for chunk in chunks)
    unused = words - sum(chunk.useful for chunk in chunks if chunk.used)
    return OracleScore(precision, told / total, f1, unused / max(words, 1))


def tokens(caption: str) -> list[str]:
    """Split into lower-case words (letters, digits, ``_ ' -``) and punctuation ``. , ;
    : ! ?``; drop the rest.
    """
    return _TOKEN.findall(caption.lower())


@lru_cache(maxsize=8192)
def parse(caption: str) -> list[Chunk]:
    """Parse any caption; words that the grammar cannot use claim nothing."""
    chunks = cut_chunks(tokens(caption))
    kinds = ["", "", "", *(chunk.kind for chunk in chunks), "", "", ""]
    for at, chunk in enumerate(chunks):
        around = kinds[at : at + 7]
        around[3] = f"<{chunk.kind}>"
        for form, places in _FORMS.items():
            if re.search(form, " ".join(around)):
                ends = [chunks[at + place].about[:1] for place in places]
                if all(ends):
                    chunk.used, chunk.about = True, list(chain(*ends))
                    for thing in chunk.about:
                        thing.attributes |= chunk.attributes
    return chunks


def cut_chunks(words: Iterable[str]) -> list[Chunk]:
    """Cut tokens into chunks. So far, only things and grounds are ``used``."""
    matches = _CHUNK.finditer(" ".join(words) + " ")
    return [_chunk(match.lastgroup or "", match[0].split()) for match in matches]


def _chunk(kind: str, words: list[str]) -> Chunk:
    """Read the words of a chunk; what repeats or does not agree is not used."""
    said = [ADJECTIVES[word] for word in words if word in ADJECTIVES]
    told = [pair for pair in said if kind != "ground" or pair[0] == "colour"]
    chunk = Chunk(kind, words, dict.fromkeys(told))
    chunk.relation = _RELATIONS.get(" ".join(words), "")
    chunk.used = kind in ("thing", "ground")
    chunk.useful = len(words) - len(said) + len(chunk.attributes)
    if kind == "thing":
        chunk.about = [chunk]
        noun = NOUNS[words[-1]]
        chunk.shape = noun if noun in SHAPES else ""
        chunk.definite = words[0] == "the"
        chunk.several = is_plural = noun != words[-1]
        for number, word in enumerate(NUMBERS):
            if word in words:
                chunk.number, chunk.several = number, number > 1
        # "two circle", "a circles"
        chunk.useful -= is_plural != (chunk.several and words[0] not in ("a", "an"))
    return chunk


_Readings = list[dict[str, tuple[Thing, ...]]]
"""What a thing may refer to, the likeliest first: names of kinds -> their things. All
kinds together if plural, one if singular; the shape alone where the scene lacks it.
"""


def claims(caption: str, scene: Scene) -> list[Claim]:
    """The distinct claims of a caption, each judged."""
    chunks, true = parse(caption), facts(scene)
    things = [chunk for chunk in chunks if chunk.kind == "thing"]
    # Things with the most attributes choose first, so that "a circle and a red circle" can be a
    # blue and a red one.
    things.sort(key=lambda thing: -len(thing.attributes))
    surplus = Counter({kind: -len(kind.things) for kind in scene.kinds})
    readings: dict[Chunk, _Readings] = {}
    all_claims: list[Claim] = []
    for thing in things:
        readings[thing], total = _refer(thing, surplus)
        all_claims += _thing_claims(thing, list(readings[thing][0]), total, true)
    for chunk in chunks:
        if chunk.kind == "ground":
            for _, colour in chunk.attributes:
                all_claims.append(_of_fact(true, "background", "background", colour))
        elif chunk.relation and chunk.used:
            all_claims.append(_relation_claim(chunk, readings))
    # The first of claims that say the same counts.
    distinct = {(claim.kind, claim.text): claim for claim in reversed(all_claims)}
    again = [
        Claim("repetition", f"{kind.name} once more", False)
        for kind in surplus.elements()
    ]
    return [*distinct.values(), *again]


def _of_fact(true: Set[Fact], kind: str, subject: str, value: str) -> Claim:
    """The claim that something is a fact."""
    fact = Fact(kind, subject, value)
    return Claim(kind, f"{subject}: {value}", fact in true, fact)


def _refer(thing: Chunk, surplus: Counter[Kind]) -> tuple[_Readings, int]:
    """Find what a thing refers to, and the number of things that fit its words.

    Adds the introduced things to ``surplus``: for each kind of the scene, the number of
    things introduced less the number there.
    """
    kinds = [kind for kind in surplus if thing.shape in ("", kind.shape)]
    kinds.sort(key=partial(_misfit, thing))
    fitting = [kind for kind in kinds if not _misfit(thing, kind)] or kinds[:1]
    total = sum(len(kind.things) for kind in fitting)
    if not thing.definite:
        fitting.sort(key=lambda kind: surplus[kind] >= 0)
    all_of_them = thing.several and thing.number in (0, total)
    meant = fitting if all_of_them else fitting[:1]
    if thing.shape and not thing.definite:
        for kind in meant:
            surplus[kind] += len(kind.things) if all_of_them else 1
    possible = [meant] if thing.several else [[kind] for kind in fitting]
    readings = [
        {kind.name: kind.things for kind in kinds} for kinds in possible if kinds
    ]
    return readings or [{thing.shape: ()}], total


def _misfit(thing: Chunk, kind: Kind) -> int:
    """How badly a kind fits a thing, 0 if well; colour counts more than size and texture."""
    return sum(
        3 if name == "colour" else 1
        for name, value in thing.attributes
        if getattr(kind, name) != value
    )


def _thing_claims(
    thing: Chunk, names: list[str], total: int, true: Set[Fact]
) -> Iterator[Claim]:
    """Claims of shape, attributes and number about kinds with these names. No claim
    about a thing that is not there is true.
    """
    said = list(thing.attributes)
    values = sorted(value for _, value in said)
    if thing.shape:
        said.append(("shape", thing.shape))
    for name, (attribute, value) in product(names, said):
        yield _of_fact(true, attribute, name, value)
    if thing.number or thing.several:
        count = str(thing.number or "several")
        text = " ".join([count, *values, thing.shape or "object"])
        right = total == thing.number if thing.number else total > 1
        yield Claim("count", text, right, Fact("count", names[0], count))


def _relation_claim(chunk: Chunk, readings: Mapping[Chunk, _Readings]) -> Claim:
    """Judge a relation: between all things if one end is plural, otherwise between any."""
    relation, ends = chunk.relation, chunk.about
    if relation in ("right of", "below"):
        relation = "left of" if relation == "right of" else "above"
        ends = ends[::-1]
    is_plural = any(thing.several for thing in ends)
    judged = []
    for one, other in product(*(readings[thing] for thing in ends)):
        name, other_name = " and ".join(one), " and ".join(other)
        pairs = product(chain(*one.values()), chain(*other.values()))
        verdicts = [
            offset(relation, *pair) >= MARGIN for pair in pairs if pair[0] != pair[1]
        ]
        holds = any(verdicts) and (all(verdicts) or not is_plural)
        fact = relation_fact(name, other_name) if all(verdicts) else None
        text = f"{name} {relation} {other_name}"
        judged.append(Claim("relation", text, holds, fact))
    return max(judged, key=lambda claim: claim.true)
