"""Judges a caption against the scene it describes: precision, recall and F1 over facts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rl_caption.data.scenes.grammar import Mention, Parse, parse
from rl_caption.data.scenes.world import (
    INVERSE,
    Fact,
    Kind,
    Scene,
    facts,
    holds,
    relation_fact,
    relations_between,
)


class OracleScore(NamedTuple):
    """How true and how complete a caption is; each value is within [0, 1].

    Attributes:
        precision: true claims / claims; 0 without claims.
        recall: facts told / facts of the scene.
        f1: harmonic mean of the two; 0 when both are 0.
        unparsed: share of the words that the grammar has no use for; 0 for an empty caption.
    """

    precision: float
    recall: float
    f1: float
    unparsed: float


class Claim(NamedTuple):
    """One checkable statement of a caption. ``fact`` is the scene's fact that it tells, None where it tells none."""

    kind: str
    text: str
    true: bool
    fact: Fact | None


def oracle(caption: str, scene: Scene) -> OracleScore:
    """Judge a caption by the truth. Accepts any string, at more than 2000 captions per second.

    With C the set of distinct claims of the caption and F the facts of the scene,
    precision = |true C| / |C|, recall = |facts told by true C| / |F|, F1 = 2 P R / (P + R).
    A claim repeated counts once; a thing introduced more often than there are such things adds a false claim each
    time. docs/scenes.md defines claims and facts.
    """
    parsed = parse(caption)
    judged = _claims(parsed, scene.kinds, scene.background)
    true = sum(claim.true for claim in judged)
    told = {claim.fact for claim in judged if claim.true and claim.fact is not None}
    total = len(facts(scene))
    precision = true / len(judged) if judged else 0.0
    recall = len(told) / total
    # Of whole numbers and rounded once, so that F1 never exceeds the larger of the two by a rounding error.
    f1 = 2 * true * len(told) / (true * total + len(told) * len(judged)) if told else 0.0
    unparsed = parsed.unparsed_words / parsed.words if parsed.words else 0.0
    return OracleScore(precision, recall, f1, unparsed)


def claims(caption: str, scene: Scene) -> list[Claim]:
    """Return the distinct claims of a caption with the verdict on each, for reports."""
    return _claims(parse(caption), scene.kinds, scene.background)


class _Referent(NamedTuple):
    """What a mention is about.

    ``kinds`` is empty where the scene has no such shape; a singular mention means the first and might mean the others.
    ``total`` is the number of things that the mention's words fit.
    """

    kinds: tuple[Kind, ...]
    total: int


def _claims(parsed: Parse, kinds: Sequence[Kind], background: str) -> list[Claim]:
    referents, repeated = _resolve(parsed.mentions, kinds)
    found: dict[tuple[str, str], Claim] = {}
    for mention, referent in zip(parsed.mentions, referents, strict=True):
        for claim in _mention_claims(mention, referent):
            found.setdefault(claim[:2], claim)
    for subject, relation, other in parsed.relations:
        claim = _relation_claim(
            relation,
            (parsed.mentions[subject], referents[subject]),
            (parsed.mentions[other], referents[other]),
        )
        found.setdefault(claim[:2], claim)
    for colour in parsed.backgrounds:
        true = colour == background
        claim = Claim("background", colour, true, Fact("background", "background", colour) if true else None)
        found.setdefault(claim[:2], claim)
    for name, times in repeated.items():
        for number in range(times):
            found["repetition", f"{name} {number}"] = Claim("repetition", f"{name} once more", False, None)
    return list(found.values())


def _resolve(mentions: Sequence[Mention], kinds: Sequence[Kind]) -> tuple[list[_Referent], dict[str, int]]:
    """Find what each mention is about, and how often each kind was introduced beyond its number of things.

    The most specific mentions choose first, so that "a circle and a red circle" can be a blue and a red one.
    """
    referents = [_Referent((), 0)] * len(mentions)
    introduced: dict[str, int] = {}
    for index in sorted(range(len(mentions)), key=lambda index: -len(mentions[index].attributes)):
        mention = mentions[index]
        candidates = [kind for kind in kinds if mention.shape is None or kind.shape == mention.shape]
        if not candidates:
            continue
        fitting = [kind for kind in candidates if _matches(kind, mention)]
        if not fitting:
            fitting = [max(candidates, key=lambda kind: _agreement(kind, mention))]
        total = sum(len(kind.things) for kind in fitting)
        if not mention.definite:
            fitting.sort(key=lambda kind: introduced.get(kind.name, 0) >= len(kind.things))
        all_of_them = _several(mention) and mention.number in (None, total)
        if _several(mention) and not all_of_them:
            fitting = fitting[:1]
        referents[index] = _Referent(tuple(fitting), total)
        if mention.shape is not None and not mention.definite:
            for kind in fitting if all_of_them else fitting[:1]:
                introduced[kind.name] = introduced.get(kind.name, 0) + (len(kind.things) if all_of_them else 1)
    present = {kind.name: len(kind.things) for kind in kinds}
    return referents, {name: times - present[name] for name, times in introduced.items() if times > present[name]}


def _matches(kind: Kind, mention: Mention) -> bool:
    return all(getattr(kind, attribute) == value for attribute, value in mention.attributes)


def _agreement(kind: Kind, mention: Mention) -> int:
    """Colour identifies a thing better than size and texture do."""
    return sum(
        (3 if attribute == "colour" else 1)
        for attribute, value in mention.attributes
        if getattr(kind, attribute) == value
    )


def _mention_claims(mention: Mention, referent: _Referent) -> Iterator[Claim]:
    noun = mention.shape or "object"
    if not referent.kinds:
        # Nothing about a thing that is not there is true, and its attributes are claims of their own.
        yield Claim("shape", noun, False, None)
        for attribute, value in mention.attributes:
            yield Claim(attribute, f"{value} {noun}", False, None)
    for kind in referent.kinds if _several(mention) else referent.kinds[:1]:
        if mention.shape is not None:
            yield Claim("shape", kind.name, True, Fact("shape", kind.name, kind.shape))
        for attribute, value in mention.attributes:
            true = getattr(kind, attribute) == value
            fact = Fact(attribute, kind.name, value) if true else None
            yield Claim(attribute, f"{value}: {kind.name}", true, fact)
    if mention.number is not None or mention.plural:
        yield _count_claim(mention, referent)


def _count_claim(mention: Mention, referent: _Referent) -> Claim:
    label = " ".join([value for _, value in sorted(mention.attributes)] + [mention.shape or "object"])
    if mention.number is None:
        return Claim("count", f"several {label}", referent.total > 1, None)
    true = referent.total == mention.number
    fact = None
    if true and len(referent.kinds) == 1 and mention.number > 1:
        fact = Fact("count", referent.kinds[0].name, str(mention.number))
    return Claim("count", f"{mention.number} {label}", true, fact)


def _relation_claim(relation: str, first: tuple[Mention, _Referent], second: tuple[Mention, _Referent]) -> Claim:
    """Judge a relation between all things that plural mentions mean, or between any that singular ones may mean."""
    if relation in ("right of", "below"):
        relation, first, second = INVERSE[relation], second, first
    every = _several(first[0]) or _several(second[0])
    for one in _readings(*first):
        for other in _readings(*second):
            pairs = [(a, b) for x in one for y in other for a in x.things for b in y.things if a is not b]
            verdicts = (holds(relation, a, b) for a, b in pairs)
            if pairs and (all(verdicts) if every else any(verdicts)):
                single = len(one) == len(other) == 1 and one != other
                fact = None
                if single and relation in relations_between(one[0], other[0]):
                    fact = relation_fact(one[0], other[0])
                return Claim("relation", f"{_names(one)} {relation} {_names(other)}", True, fact)
    names = [_names(referent.kinds[:1]) or mention.shape or "object" for mention, referent in (first, second)]
    return Claim("relation", f"{names[0]} {relation} {names[1]}", False, None)


def _readings(mention: Mention, referent: _Referent) -> list[tuple[Kind, ...]]:
    """Return the sets of kinds that a mention may stand for: all kinds together if plural, any one if singular."""
    if _several(mention):
        return [referent.kinds] if referent.kinds else []
    return [(kind,) for kind in referent.kinds]


def _names(kinds: Sequence[Kind]) -> str:
    return " and ".join(kind.name for kind in kinds)


def _several(mention: Mention) -> bool:
    """Return whether a mention means more than one thing; its number, where it has one, decides."""
    return mention.number > 1 if mention.number is not None else mention.plural
