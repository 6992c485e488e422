"""Part-of-speech taggers behind one call: tokens of sentences in, Penn Treebank tags out.

``BrillTagger`` is the default: its lexicon and rules come with the package ``textblob``, nothing is downloaded. The
others wrap NLTK and spaCy where their models are installed. docs/detail_units.md says how well they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

Sentence = Sequence[str]
"""Tokens of one sentence: words, clitics such as ``'s``, and punctuation marks; none is empty or has white space."""


class Tagger(Protocol):
    """Tags sentences. Plain and picklable, so that worker processes can be given one."""

    def __call__(self, sentences: Sequence[Sentence]) -> list[list[str]]:
        """Return a Penn Treebank tag (``NN``, ``VBZ``, ``IN``, ...) for each token of each sentence."""
        ...


_BEFORE_NOUNS = frozenset(["a", "an", "the", "its", "his", "her", "their"])
_NEVER_AFTER_THESE = frozenset(["is", "are", "was", "were", "has", "have", "had", "be", "been", "being"])


class BrillTagger:
    """TextBlob's lexicon, with Brill's rules for unknown words and for context (Brill, ANLP 1992).

    The most frequent tag of a word in newspapers is often not that in captions: ``left``, ``leaves`` and ``light``
    come out as verbs. So a verb right after an article or a possessive becomes a noun, or before a noun an adjective.

    Raises:
        ImportError: ``textblob`` is not installed; on the first call.
    """

    def __call__(self, sentences: Sequence[Sentence]) -> list[list[str]]:
        """Return a tag for each token of each sentence."""
        return [_after_articles(words, _brill_tags(words)) for words in sentences]


def _brill_tags(words: Sentence) -> list[str]:
    if not words:
        return []
    # A slash separates word and tag in the library's text format.
    found = _pattern_tagger().tag(" ".join(word.replace("/", "-") for word in words), tokenize=False)
    return _checked("BrillTagger", words, [tag for _, tag in found])


@cache
def _pattern_tagger() -> Any:
    from textblob.taggers import PatternTagger

    return PatternTagger()


def _after_articles(words: Sentence, tags: list[str]) -> list[str]:
    """Make nouns and adjectives of verbs that follow an article or a possessive."""
    tags = list(tags)
    for index in range(1, len(tags)):
        verb = tags[index].startswith("VB") and words[index].lower() not in _NEVER_AFTER_THESE
        if verb and words[index - 1].lower() in _BEFORE_NOUNS:
            before_noun = index + 1 < len(tags) and tags[index + 1][:2] in ("NN", "JJ")
            tags[index] = "JJ" if before_noun else "NNS" if tags[index] == "VBZ" else "NN"
    return tags


class NltkTagger:
    """NLTK's averaged perceptron, the tagger of the released segmentation of SPECS.

    Raises:
        LookupError: NLTK's data ``averaged_perceptron_tagger_eng`` is not installed; on the first call.
    """

    def __call__(self, sentences: Sequence[Sentence]) -> list[list[str]]:
        """Return a tag for each token of each sentence."""
        import nltk

        return [[tag for _, tag in tagged] for tagged in nltk.pos_tag_sents([list(words) for words in sentences])]


class SpacyTagger:
    """The tagger of an installed spaCy pipeline.

    Args:
        model: package of the pipeline.

    Raises:
        ImportError, OSError: spaCy or the pipeline is not installed; on the first call.
    """

    def __init__(self, model: str = "en_core_web_sm") -> None:
        self.model = model

    def __call__(self, sentences: Sequence[Sentence]) -> list[list[str]]:
        """Return a tag for each token of each sentence."""
        from spacy.tokens import Doc

        pipeline = _spacy_pipeline(self.model)
        documents = pipeline.pipe([Doc(pipeline.vocab, words=list(words)) for words in sentences])
        return [
            _checked(self.model, words, [token.tag_ for token in document])
            for words, document in zip(sentences, documents, strict=True)
        ]


@cache
def _spacy_pipeline(model: str) -> Any:
    import spacy

    return spacy.load(model, exclude=["parser", "ner", "lemmatizer", "attribute_ruler", "senter"])


def _checked(tagger: str, words: Sentence, tags: list[str]) -> list[str]:
    if len(tags) != len(words):
        raise ValueError(f"{tagger} returned {len(tags)} tags for the {len(words)} tokens {' '.join(words)!r:.200}")
    return tags


DEFAULT_TAGGER = BrillTagger()
"""Needs no download."""
