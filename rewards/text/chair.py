"""CHAIR: objects that a caption mentions and its image does not have (Rohrbach et al., EMNLP 2018)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rewards.base import (
    RewardError,
    as_texts,
    checked_scores,
    naming,
    reference_lists,
    required_column,
)
from rewards.files import load_json
from rewards.options import check_values
from rewards.text.ptb_rules import names
from rewards.text.tokenize import TOKENIZER, tokenize

Measure = Literal["precision", "caption", "recall"]
_IRREGULAR = {
    "people": "person",
    "children": "child",
    "mice": "mouse",
    "geese": "goose",
    "feet": "foot",
}
_ANIMALS = names("bird cat dog horse sheep cow elephant bear zebra giraffe animal cub")
_MODIFIERS = {"baby": _ANIMALS, "adult": _ANIMALS, "passenger": ("jet", "train")}
"""A word that before such a noun is no object of its own, as in the published code."""
_TOILETS = ("toilet", "toilets")
_SEATS = ("seat", "seats")
"""Words beside which, anywhere in the caption, such words are no chairs, as in the published code.
"""
_ES = ("ses", "xes", "zes", "ches", "shes", "oes")


@dataclass(frozen=True)
class ObjectVocabulary:
    """The objects of a vocabulary, and the words for them.

    Args:
        names: phrase (a tuple of words in the singular) -> name of the object.
    """

    names: Mapping[tuple[str, ...], str]

    @classmethod
    def read(cls, path: str | Path | Sequence[str]) -> ObjectVocabulary:
        """Read the published format: one line per object with its name and its synonyms, separated
        by commas.

        Args:
            path: the file, or its lines.

        Raises:
            ValueError: the file cannot be read or names no object, or two objects have the same
                word.
        """
        synonyms: dict[tuple[str, ...], str] = {}
        lines: Sequence[str] = ()
        if isinstance(path, str | Path):
            with naming(f"synonyms {str(path)!r} cannot be read"):
                lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        else:
            lines = path
        for number, line in enumerate(lines, start=1):
            phrases = [tuple(tokenize(phrase)) for phrase in line.split(",")]
            for phrase in filter(None, phrases):
                other = synonyms.setdefault(phrase, " ".join(phrases[0]))
                if other != " ".join(phrases[0]):
                    raise ValueError(
                        f"{path}, line {number}: a word for {other!r} already"
                    )
        if not synonyms:
            raise ValueError(
                f"synonyms {str(path)!r} has no object: expected lines: bicycle, bike"
            )
        return cls(synonyms)

    def mentions(self, caption: str) -> list[str]:
        """The objects that a caption mentions, once per mention; of overlapping phrases the longest
        counts.
        """
        words = tokenize(caption)
        objects = []
        at = 0
        if any(word in _TOILETS for word in words):
            words = [word for word in words if word not in _SEATS]
        longest = max(map(len, self.names))
        while at < len(words):
            following = _singulars(words[at + 1]) if at + 1 < len(words) else []
            if any(noun in _MODIFIERS.get(words[at], ()) for noun in following):
                at += 1
                continue
            for length in range(min(longest, len(words) - at), 0, -1):
                name = self._name(words[at : at + length])
                if name is not None:
                    objects.append(name)
                    at += length
                    break
            else:
                at += 1
        return objects

    def names_of(
        self, lists: Iterable[Collection[str]], source: str
    ) -> list[frozenset[str]]:
        """For each list of words, the set of objects that they stand for.

        Raises ``ValueError``, with a message that begins with ``source``, for a word that is not in
        the vocabulary.
        """
        found = []
        for words in lists:
            names = set()
            for word in words:
                name = self._name(tokenize(word) or [""])
                if name is None:
                    raise ValueError(f"{source} {word!r}, which is not in synonyms")
                names.add(name)
            found.append(frozenset(names))
        return found

    def _name(self, words: Sequence[str]) -> str | None:
        for last in _singulars(words[-1]):
            name = self.names.get((*words[:-1], last))
            if name is not None:
                return name
        return None


def _singulars(word: str) -> list[str]:
    """A word, and what may be its singular."""
    candidates = [word]
    if word in _IRREGULAR:
        candidates.append(_IRREGULAR[word])
    if word.endswith("men"):
        candidates.append(f"{word[:-3]}man")
    if word.endswith(_ES):
        candidates.append(word[:-2])
    for plural, singular in (("ies", "y"), ("ves", "f"), ("ves", "fe"), ("s", "")):
        if word.endswith(plural) and len(word) > len(plural) + 1:
            candidates.append(word.removesuffix(plural) + singular)
    return candidates


def read_objects(
    path: str | Path, vocabulary: ObjectVocabulary
) -> dict[str, frozenset[str]]:
    """Read which objects are in each image: JSON ``{image_id: [object, ...]}`` or COCO's instance
    annotations.

    Raises:
        ValueError: the file cannot be read, has neither format, or names an object that is not in
            the vocabulary.
    """
    with naming(f"objects {str(path)!r} cannot be read"):
        content = load_json(path)
    objects: dict[str, set[str]] = {}
    where = f"objects {str(path)!r} is neither {{image_id: [object, ...]}} nor COCO's instances"
    with naming(where, (AttributeError, KeyError, TypeError)):
        if "annotations" in content and "categories" in content:
            categories = {
                record["id"]: record["name"] for record in content["categories"]
            }
            objects = {str(record["id"]): set() for record in content.get("images", ())}
            for record in content["annotations"]:
                objects.setdefault(str(record["image_id"]), set()).add(
                    categories[record["category_id"]]
                )
        else:
            objects = {
                str(image_id): {*map(str, names)} for image_id, names in content.items()
            }
    named = vocabulary.names_of(objects.values(), f"objects {str(path)!r} has")
    return dict(zip(objects, named, strict=True))


class ChairCounts(NamedTuple):
    """Counts that CHAIR is computed from, for one caption or summed over several."""

    hallucinated_mentions: float
    """Mentions of objects that are not in the image."""
    mentions: float
    """Mentions of objects."""
    hallucinated_captions: float
    """Captions with at least one hallucinated mention."""
    mentioned_objects: float
    """Distinct objects of the image that the caption mentions."""
    objects: float
    """Distinct objects of the image."""


def chair_counts(mentions: Sequence[str], objects: Collection[str]) -> ChairCounts:
    """The counts of a caption, from the objects that it mentions and those of its image."""
    wrong = [name not in objects for name in mentions]
    told = set(mentions) & set(objects)
    return ChairCounts(sum(wrong), len(wrong), any(wrong), len(told), len(set(objects)))


class Chair:
    """How few of the objects that a caption mentions are hallucinated, in [0, 1]; as a judge or a
    term of a reward.

    An object is in the image if ``objects`` lists it or, with ``references``, if a reference of the
    image mentions it. A caption without objects has precision 1, so a policy may learn to mention none:
    combine it with ``recall`` or CIDEr-D. Captions are English, tokenised as for CIDEr-D.

    Args:
        synonyms: file of objects and the words for them (``ObjectVocabulary.read``), or a list of
            its lines.
        objects: file of the objects in each image (``read_objects``), or None.
        references: whether objects that references mention are in the image.
        measure: ``precision``: fraction of mentions that are in the image; ``caption``: 1 if all
            are, else 0 (the mean over captions is 1 - CHAIR-s); ``recall``: fraction of the image's
            objects that the caption mentions.

    Raises:
        ValueError: a file or an argument is wrong.
    """

    __name__ = "chair"
    bounds = (0.0, 1.0)
    tokenizer = TOKENIZER

    def __init__(
        self,
        synonyms: str | Sequence[str],
        objects: str | None = None,
        references: bool = True,
        measure: Measure = "precision",
    ) -> None:
        check_values(Measure, measure=measure)
        if objects is None and not references:
            raise ValueError(
                "objects is None and references is False: nothing is in an image"
            )
        self.vocabulary = ObjectVocabulary.read(synonyms)
        self.objects = (
            None if objects is None else read_objects(objects, self.vocabulary)
        )
        self.references = references
        self.measure = measure
        sources = {}  # column -> where objects come from
        if self.objects is not None:
            pairs = [
                (image_id, sorted(names)) for image_id, names in self.objects.items()
            ]
            sources["image_id"] = f"file[{_digest(pairs)}]"
        if references:
            sources["references"] = "references"
        self.columns = frozenset(sources)
        count = len(set(self.vocabulary.names.values()))
        words = _digest(self.vocabulary.names.items())
        self.source = f"{count} objects[{words}] of {'+'.join(sources.values())}"
        self.signature = f"CHAIR[{measure},{self.source}]"
        self._known: dict[tuple[str, ...], frozenset[str]] = {}

    def objects_of(self, count: int, columns: dict[str, Any]) -> list[frozenset[str]]:
        """The objects in the image of each of ``count`` rows.

        Raises:
            RewardError: an image is not in the file.
        """
        objects = [frozenset[str]()] * count
        if self.objects is not None:
            ids = list(
                map(str, required_column(columns, "image_id", self.__name__, count))
            )
            missing = [image_id for image_id in ids if image_id not in self.objects]
            if missing:
                raise RewardError(
                    f"reward 'chair': objects has no image {missing[0]!r}"
                )
            objects = [self.objects[image_id] for image_id in ids]
        if self.references:
            lists = reference_lists(columns, self.__name__, count)
            mentioned = map(self._mentions, lists)
            objects = [
                before | names for before, names in zip(objects, mentioned, strict=True)
            ]
        return objects

    def _mentions(self, captions: tuple[str, ...]) -> frozenset[str]:
        if captions not in self._known:
            mentions = chain.from_iterable(map(self.vocabulary.mentions, captions))
            self._known[captions] = frozenset(mentions)
        return self._known[captions]

    def counts(
        self, completions: Sequence[Any], columns: dict[str, Any]
    ) -> list[ChairCounts]:
        """The counts of N captions. Raises as a call."""
        texts = as_texts(completions)
        mentions = map(self.vocabulary.mentions, texts)
        return list(map(chair_counts, mentions, self.objects_of(len(texts), columns)))

    def __call__(
        self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any
    ) -> list[float]:
        """Score N captions. Raises ``RewardError`` if a column is missing, or as ``objects_of``."""
        scores = list(map(self._score, self.counts(completions, columns)))
        return checked_scores(self, scores, len(completions))

    def _score(self, counts: ChairCounts) -> float:
        if self.measure == "recall":
            return counts.mentioned_objects / counts.objects if counts.objects else 1.0
        if self.measure == "caption":
            return float(not counts.hallucinated_captions)
        return (
            1 - counts.hallucinated_mentions / counts.mentions
            if counts.mentions
            else 1.0
        )


def _digest(content: Iterable[tuple[Any, Any]]) -> str:
    """The start of the SHA-256 of pairs, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(content)).encode()).hexdigest()[:8]
