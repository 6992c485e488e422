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
        lines: Any = path
        if isinstance(path, str | Path):
            with naming(f"synonyms {str(path)!r} cannot be read"):
                lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        for number, line in enumerate(lines, start=1):
            phrases = [tuple(tokenize(phrase)) for phrase in line.split(",")]
            for phrase in filter(None, phrases):
                name = " ".join(phrases[0])
                other = synonyms.setdefault(phrase, name)
                if other != name:
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

    def name_of(self, word: str) -> str:
        """The object that a word or a phrase stands for. Raises ``ValueError`` for a word that is
        not in the vocabulary.
        """
        name = self._name(tokenize(word) or [""])
        if name is None:
            raise ValueError(f"{word!r} is not in synonyms")
        return name

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
    objects: dict[str, set[str]] = {}
    expected = "expected {image_id: [object, ...]} or COCO's instances"
    kinds = (OSError, ValueError, AttributeError, KeyError, TypeError)
    with naming(f"objects {str(path)!r} cannot be read, {expected}", kinds):
        content = load_json(path)
        if "annotations" in content and "categories" in content:
            categories = {one["id"]: one["name"] for one in content["categories"]}
            objects = {str(one["id"]): set() for one in content.get("images", ())}
            for record in content["annotations"]:
                own = objects.setdefault(str(record["image_id"]), set())
                own.add(categories[record["category_id"]])
        else:
            objects = {str(key): set(map(str, own)) for key, own in content.items()}
        return {
            image_id: frozenset(map(vocabulary.name_of, words))
            for image_id, words in objects.items()
        }


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
            pairs = ((key, sorted(names)) for key, names in self.objects.items())
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
            ids = required_column(columns, "image_id", self.__name__, count)
            for row, image_id in enumerate(map(str, ids)):
                if image_id not in self.objects:
                    raise RewardError(
                        f"reward 'chair': objects has no image {image_id!r}"
                    )
                objects[row] = self.objects[image_id]
        if self.references:
            for row, texts in enumerate(reference_lists(columns, self.__name__, count)):
                objects[row] |= self._mentions(texts)
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
        return 1 - counts.hallucinated_mentions / (counts.mentions or 1)


def _digest(content: Iterable[tuple[Any, Any]]) -> str:
    """The start of the SHA-256 of pairs, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(content)).encode()).hexdigest()[:8]
