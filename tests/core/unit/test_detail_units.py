"""Detail units: what they concatenate to, where they may not be cut, and the grammar
and rules case by case.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rewards.text.detail_units import default_tagger, detail_units, prefixes

WORDS = [
    "a",
    "the",
    "The",
    "dog",
    "dogs",
    "red",
    "eye-level",
    "is",
    "are",
    "stands",
    "holding",
    "left",
    "of",
    "in",
    "In",
    "and",
    "or",
    "on",
    "next",
    "to",
    "that",
    "3.5",
    "1,000",
    "10:30",
    "Mr. Smith",
    "St. Paul's",
    "U.S.",
    "5 p.m.",
    "it's",
    "don't",
    "o'clock",
    "(small)",
    '"STOP"',
    "“go”",
    "woman's",
    "6 ft. tall",
    "e.g. this",
    "www.x.com",
    "&",
]
WHOLE = [
    "eye-level",
    "3.5",
    "1,000",
    "10:30",
    "Mr.",
    "St.",
    "U.S.",
    "p.m.",
    "don't",
    "o'clock",
    "e.g.",
    "it's",
]
ENDS = [".", ".", "!", "?", ",", ";", ":", "...", "", "."]

sentences = st.tuples(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=9), st.sampled_from(ENDS)
)
captions = st.lists(sentences, max_size=5).map(
    lambda found: " ".join(" ".join(words) + end for words, end in found)
)


class GivenTags:
    """A tagger that looks words up."""

    def __init__(self, **tags):
        self.tags = tags

    def __call__(self, sentences):
        return [[self.tags.get(word, ".") for word in words] for words in sentences]


@settings(max_examples=150)
@given(st.one_of(captions, st.text(max_size=60)))
@example(" \n ")
@example("...")
@example("a dog .")
@example('He said "Hi!" and left.')
def test_units_concatenate_to_the_caption(caption):
    units = detail_units(caption)
    assert "".join(units) == caption
    has_word = any(letter.isalnum() for letter in caption)
    assert all(any(letter.isalnum() for letter in unit) for unit in units) or (
        not has_word and len(units) == 1
    )
    assert units or not caption


@settings(max_examples=150)
@given(captions)
def test_no_unit_ends_inside_a_word_a_number_or_an_abbreviation(caption):
    for prefix in prefixes(detail_units(caption))[:-1]:
        rest = caption[len(prefix) :]
        assert caption.startswith(prefix)
        assert prefix == prefix.rstrip()
        assert rest[0].isspace() or rest[0] in ",;:"
        # Each token of the caption is wholly in the prefix or wholly in the rest.
        assert (
            sorted(prefix.split() + rest.split()) == sorted(caption.split())
            or rest[0] in ",;:"
        )
    for word in WHOLE:
        pieces = sum(
            unit.split().count(word)
            for unit in detail_units(f"A dog near {word} runs. A cat sits.")
        )
        assert pieces == 1, word


@pytest.mark.parametrize(
    "units",
    [
        # NP; a VP takes the noun phrases after it, a CLAUSE is NP and VP; a conjunction goes with
        # what follows
        ["a cat holds", " two fish"],
        ["a cat holds a fish"],
        ["a cat holds a fish", " and a ball"],
        # PP is one unit, unless a rule joins it
        ["a cat", " with a fish", " near a red box"],
        # a comma begins the unit that it introduces, a full stop ends its own
        ["a cat", ", a fish.", " a box."],
        # what is left over is the last unit
        ["a cat", " with very red"],
        # at most three words that begin with "the" are not a unit
        ["the red cat with a fish"],
        ["the big red cat", " with a fish"],
        # no cut before one of the words that go on
        ["a cat in a box", " near a fish"],
        ["a cat 's box", " near a fish"],
        # a sentence that begins with such a word is not cut before it has "is" or "are"
        ["in a box near a fish is a cat", " with a box"],
        ["in a box near a fish with a box"],
    ],
)
def test_grammar_and_rules_against_cutting_too_finely(units):
    words = {
        "DT": "a the",
        "NN": "cat fish box ball",
        "JJ": "red big",
        "VBZ": "holds is",
        "CD": "two",
        "CC": "and",
    }
    words |= {"IN": "with near in", "RB": "very", "POS": "'s"}
    tags = {word: tag for tag, own in words.items() for word in own.split()}
    assert detail_units("".join(units), GivenTags(**tags)) == units


def test_sentences_end_at_full_stops_and_not_at_others():
    sentences = [
        "Look!",
        " It is 3.5 m tall, by Mr. Smith of the U.S. Navy at 5 p.m. on No. 5 St. James.",
        " The dog runs...",
    ]
    sentences += [" A cat?", " He says no.", " Dogs run!"]
    text = "".join(sentences)
    # Whatever the tags, units end at the end of a sentence; without phrases, they end nowhere else.
    assert detail_units(text, GivenTags()) == sentences
    assert set(prefixes(sentences)) <= set(prefixes(detail_units(text)))


def test_a_verb_after_an_article_is_a_noun_or_an_adjective():
    tags = default_tagger()(
        [
            ["the", "left", "side"],
            ["its", "leaves"],
            ["the", "left"],
            ["this", "is", "it"],
            [],
        ]
    )
    assert [own[1] for own in tags[:4]] == ["JJ", "NNS", "NN", "VBZ"]
    assert tags[4] == []
