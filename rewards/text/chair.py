"""CHAIR: objects that a caption mentions and its image does not have (Rohrbach et al., EMNLP 2018)."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rewards.base import RewardError, as_texts, checked_scores, reference_lists, required_column
from rewards.text.tokenize import TOKENIZER, tokenize

Measure = Literal["precision", "caption", "recall"]
_IRREGULAR = {"people": "person", "children": "child", "mice": "mouse", "geese": "goose", "feet": "foot"}
_ANIMALS = frozenset(
    ["bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "animal", "cub"]
)
_MODIFIERS = {"baby": _ANIMALS, "adult": _ANIMALS, "passenger": frozenset(["jet", "train"])}
"""A word that before such a noun is no object of its own, as in the published code."""


@dataclass(frozen=True)
class ObjectVocabulary:
    """Objects and the words for them.

    Args:
        names: phrase of words in the singular -> object.
    """

    names: Mapping[tuple[str, ...], str]

    @classmethod
    def read(cls, path: str | Path) -> ObjectVocabulary:
        """Read the published format: a line for each object, its name first, then its synonyms, with commas.

        Raises:
            ValueError: the file cannot be read, or two objects have the same word.
        """
        names: dict[tuple[str, ...], str] = {}
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ValueError(f"synonyms {str(path)!r} cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            phrases = [tuple(tokenize(phrase)) for phrase in line.split(",")]
            for phrase in filter(None, phrases):
                known = names.setdefault(phrase, " ".join(phrases[0]))
                if known != " ".join(phrases[0]):
                    raise ValueError(f"{path}, line {number}: {' '.join(phrase)!r} is a word for {known!r} already")
        if not names:
            raise ValueError(f"synonyms {str(path)!r} has no object: expected lines such as: bicycle, bike")
        return cls(names)

    def mentions(self, caption: str) -> list[str]:
        """The objects of a caption, one for each mention; of overlapping phrases the longest."""
        words, found, at = tokenize(caption), [], 0
        longest = max(map(len, self.names))
        while at < len(words):
            following = _singulars(words[at + 1]) if at + 1 < len(words) else []
            if not _MODIFIERS.get(words[at], frozenset()).isdisjoint(following):
                at += 1
                continue
            for length in range(min(longest, len(words) - at), 0, -1):
                name = self._name(words[at : at + length])
                if name is not None:
                    found.append(name)
                    # The seat of a toilet is no chair.
                    at += length + (name == "toilet" and words[at + length : at + length + 1] == ["seat"])
                    break
            else:
                at += 1
        return found

    def _name(self, words: Sequence[str]) -> str | None:
        for last in _singulars(words[-1]):
            name = self.names.get((*words[:-1], last))
            if name is not None:
                return name
        return None


def _singulars(word: str) -> list[str]:
    """A word, and what may be its singular."""
    found = [word]
    if word in _IRREGULAR:
        found.append(_IRREGULAR[word])
    if word.endswith("men"):
        found.append(f"{word[:-3]}man")
    for plural, singular in (("ies", "y"), ("ves", "f"), ("ves", "fe"), ("es", ""), ("s", "")):
        if word.endswith(plural) and len(word) > len(plural) + 1:
            found.append(word.removesuffix(plural) + singular)
    return found


def read_objects(path: str | Path, vocabulary: ObjectVocabulary) -> dict[str, frozenset[str]]:
    """Image id -> the objects in it: JSON ``{image_id: [object, ...]}``, or COCO's instance annotations.

    Raises:
        ValueError: the file cannot be read, is neither, or names an object that the vocabulary lacks.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"objects {str(path)!r} cannot be read: {error}") from error
    found: dict[str, set[str]] = {}
    try:
        if "annotations" in content and "categories" in content:
            categories = {each["id"]: each["name"] for each in content["categories"]}
            found = {str(each["id"]): set() for each in content.get("images", ())}
            for each in content["annotations"]:
                found.setdefault(str(each["image_id"]), set()).add(categories[each["category_id"]])
        else:
            found = {str(image_id): {*map(str, names)} for image_id, names in content.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"objects {str(path)!r} is neither {{image_id: [object, ...]}} nor COCO's instances: {error!r}"
        ) from error
    named = {name: vocabulary._name(tokenize(name) or [""]) for names in found.values() for name in names}
    unknown = sorted(name for name, known in named.items() if known is None)
    if unknown:
        raise ValueError(f"objects {str(path)!r} has {unknown[0]!r} ({len(unknown)} such), which synonyms lacks")
    return {image_id: frozenset(str(named[name]) for name in names) for image_id, names in found.items()}


class ChairScores(NamedTuple):
    """Of a set of captions; each in [0, 1]."""

    chair_i: float
    """Hallucinated mentions of objects over all mentions."""
    chair_s: float
    """Captions with a hallucinated object over all captions."""
    recall: float
    """Objects of the images that their captions mention over all objects of the images."""


def chair(mentions: Sequence[Sequence[str]], objects: Sequence[Collection[str]]) -> ChairScores:
    """CHAIR of N captions: the objects that each mentions, and those of its image. Raises ``ValueError`` for none."""
    if not mentions:
        raise ValueError("CHAIR needs at least one caption")
    wrong = [[name not in known for name in own] for own, known in zip(mentions, objects, strict=True)]
    told = [len(set(own) & set(known)) for own, known in zip(mentions, objects, strict=True)]
    total = sum(map(len, wrong))
    return ChairScores(
        sum(map(sum, wrong)) / total if total else 0.0,
        sum(map(any, wrong)) / len(wrong),
        sum(told) / max(1, sum(len(set(known)) for known in objects)),
    )


class Chair:
    """How few of a caption's objects are hallucinated, in [0, 1]; as a judge or a term of a reward.

    An object is in the image if ``objects`` has it there or, with ``references``, a reference of the image mentions it
    (the published code counts both). A caption without objects has precision 1, so that a policy may learn to name
    none: put ``recall`` or CIDEr-D beside it.

    Args:
        synonyms: file of objects and their words (``ObjectVocabulary.read``).
        objects: file of the objects in each image (``read_objects``); None takes those of the references alone.
        references: count what references mention.
        measure: ``precision``, mentions that are in the image over all mentions; ``caption``, 1 where all are, else 0
            (the mean over captions is 1 - CHAIR-s); ``recall``, objects of the image that are mentioned over all of it.

    Captions are English, tokenised as for CIDEr-D.

    Raises:
        ValueError: a file or an argument is wrong.
    """

    __name__ = "chair"
    bounds = (0.0, 1.0)
    tokenizer = TOKENIZER

    def __init__(
        self, synonyms: str, objects: str | None = None, references: bool = True, measure: Measure = "precision"
    ) -> None:
        if measure not in get_args(Measure):
            raise ValueError(f"measure is {measure!r}: expected one of {', '.join(get_args(Measure))}")
        if objects is None and not references:
            raise ValueError("objects is None and references is False: one of them says what is in an image")
        self.vocabulary = ObjectVocabulary.read(synonyms)
        self.objects = None if objects is None else read_objects(objects, self.vocabulary)
        self.references, self.measure = references, measure
        self._known: dict[tuple[str, ...], frozenset[str]] = {}

    @property
    def columns(self) -> frozenset[str]:
        """``image_id`` where a file has the objects, ``references`` where those count."""
        return frozenset(["image_id"] * (self.objects is not None) + ["references"] * self.references)

    @property
    def signature(self) -> str:
        """Measure, number of objects, and where they come from."""
        sources = "+".join(["file"] * (self.objects is not None) + ["references"] * self.references)
        return f"CHAIR[{self.measure},{len(set(self.vocabulary.names.values()))} objects of {sources}]"

    def objects_of(self, count: int, columns: dict[str, Any]) -> list[frozenset[str]]:
        """The objects in the images of N rows. Raises ``RewardError`` where an image is not in the file."""
        found = [frozenset[str]()] * count
        if self.objects is not None:
            ids = [str(image_id) for image_id in required_column(columns, "image_id", self.__name__, count)]
            missing = [image_id for image_id in ids if image_id not in self.objects]
            if missing:
                raise RewardError(f"reward 'chair': objects has no image {missing[0]!r} ({len(missing)} such rows)")
            found = [self.objects[image_id] for image_id in ids]
        if self.references:
            lists = reference_lists(columns, self.__name__, count)
            found = [own | self._mentioned(captions) for own, captions in zip(found, lists, strict=True)]
        return found

    def _mentioned(self, captions: tuple[str, ...]) -> frozenset[str]:
        if captions not in self._known:
            self._known[captions] = frozenset(_flat(map(self.vocabulary.mentions, captions)))
        return self._known[captions]

    def __call__(self, prompts: Sequence[Any] | None, completions: Sequence[Any], **columns: Any) -> list[float]:
        """Score N captions. Raises ``RewardError`` where a column lacks, or an image's objects are not known."""
        texts = as_texts(completions)
        pairs = zip(map(self.vocabulary.mentions, texts), self.objects_of(len(texts), columns), strict=True)
        return checked_scores(self, [self._score(mentions, known) for mentions, known in pairs], len(texts))

    def _score(self, mentions: Sequence[str], known: Collection[str]) -> float:
        if self.measure == "recall":
            return len(set(mentions) & set(known)) / len(known) if known else 1.0
        right = sum(name in known for name in mentions)
        if self.measure == "caption":
            return float(right == len(mentions))
        return right / len(mentions) if mentions else 1.0


def _flat(lists: Iterable[Sequence[str]]) -> Iterable[str]:
    return (item for items in lists for item in items)
