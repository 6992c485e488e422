"""The caption tokeniser against recorded and live output of the COCO toolkit's Java tokeniser."""

import random
from html.entities import html5
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

from rewards.files import load_json
from rewards.text import ptb_rules
from rewards.text.tokenize import is_tested, tokenize, tokenize_lines
from rl_caption.evaluation import ptb_tokenize
from tests.captions_for_tests import needs_java

GOLDEN = load_json(Path(__file__).parents[1] / "golden" / "ptb_tokens.json")

WORDS = """
    a an the man dog's dogs' can't cannot gonna it's they're o'clock 'em '90s t-shirt black-and-white 10-year-old
    and/or w/ 3.5 1,000 12:30 5pm 1/2 no. st. mr. u.s. a.m. b. p.m. etc. vs. ft. café naïve 5% $5 #1 6' & + * @home
    (red) [sic] "stop" 'go' `go` -- - ... . , ; : ! ? man, street. dog; what?! half-eaten two-story; end...
    foo_bar o'neil ya'll rock'n'roll http://a.example/b a.example.com street.the
    """.split()  # noqa: SIM905


ODD_WORDS = """
    a an the man dog A The Man DOG NYC iPhone McDonald's dogs' can't cannot gonna it's o'clock 'em '90s t-shirt
    black-and-white 10-year-old and/or w/ no. st. mr. u.s. a.m. b. p.m. etc. vs. ft. 3.5 .5 1,000 12:30 1/2 $5.50 £20
    50% 2nd 90s 5pm 4x4 30° #1 ½ café naïve Straße foo_bar rock'n'roll Y'all O'Brien “hi” ‘ok’ don’t 😀 ☺ ™ … -- ...
    """.split()  # noqa: SIM905
ENTITIES = """
    &amp; &AMP; &Amp; &nbsp; &NBSP; &apos; &Apos; &quot; &Quot; &eacute; &Eacute; &EACUTE; &agrave; &uuml; &ntilde;
    &ccedil; &copy; &reg; &hellip; &mdash; &ndash; &md; &ldquo; &rsquo; &lt; &gt; &LT; &#39; &#x27; &#160; &HT; &qc;
    &odq; &amp &nbsp & ;
    """.split()  # noqa: SIM905
ADDRESSES = """
    @ me@x.com @home :// http://a.b/c https://x.org www. www.a.com a.com b.net x.org/d .com a.doc file.txt <b> </b>
    <br/> <a href='x'> <!-- --> <?xml < > +41 (044) 0445 66778 ++ 1999-12-31
    """.split()  # noqa: SIM905
ABBREVIATED = sorted(
    f"{word}."
    for word in (
        *ptb_rules.ABBREVIATIONS,
        *ptb_rules.CAPITALISED_ABBREVIATIONS,
        *ptb_rules.NUMBERED_ABBREVIATIONS,
    )
)
PAIRS = [chr(number) for number in (*range(0x20, 0x7F), *range(0xA1, 0x180))] + list(
    "\t\xa0–—‘’“”•…′″€™→☺😀\ufe0f\u200d"
)
GAPS = [" ", " ", " ", "", "", "\t", "\xa0", "-", "/", ", ", ". "]


def odd_strings(count, seed=0):
    """Strings of up to seven pieces: words, entities, abbreviations, numbers, clitics,
    addresses, signs.
    """
    draw = random.Random(seed)
    heads = "dog it they I ca wo Y O d rock man is A B M AT R Q".split()  # noqa: SIM905
    tails = "s S m d re ve ll t T n em clock 80s M T B 90 til tis".split()  # noqa: SIM905

    def number():
        parts = [
            "".join(draw.choices("0123456789", k=draw.randint(1, 4)))
            for _ in range(draw.randint(1, 3))
        ]
        sign = draw.choice(["", "", "-", "+", "$", "£", "€"])
        units = ["", "", "st", "th", "%", "pm", "mm", "s", "x5", "°"]
        return sign + draw.choice([*".,:/- \xa0", ""]).join(parts) + draw.choice(units)

    def abbreviation():
        word = draw.choice(ABBREVIATED)
        return draw.choice([word, word.upper(), word.capitalize(), word[:-1]])

    kinds = [
        (0.3, lambda: draw.choice(ODD_WORDS)),
        (0.12, lambda: draw.choice(ENTITIES)),
        (0.12, abbreviation),
        (0.12, number),
        (
            0.12,
            lambda: draw.choice(heads) + draw.choice("'’`&+-./") + draw.choice(tails),
        ),
        (0.06, lambda: draw.choice(ADDRESSES)),
        (0.16, lambda: "".join(draw.choices(PAIRS, k=draw.randint(1, 4)))),
    ]
    weights, makers = zip(*kinds, strict=True)

    def string():
        pieces = draw.choices(makers, weights, k=draw.randint(0, 7))
        return "".join(make() + draw.choice(GAPS) for make in pieces)

    return [string() for _ in range(count)]


def test_recorded_sentences():
    for case in GOLDEN["cases"]:
        assert tokenize(case["text"]) == case["tokens"]
    # callers may change what they get
    tokenize("the dog's ball").append("x")
    assert tokenize("the dog's ball") == ["the", "dog", "'s", "ball"]


@given(st.lists(st.sampled_from(WORDS), max_size=12))
def test_tokens_of_tokens_are_the_tokens(words):
    tokens = tokenize(" ".join(words))
    assert tokenize(" ".join(tokens)) == tokens


@given(
    st.lists(st.sampled_from([*WORDS, "Then", "A", "Miss."]), min_size=1, max_size=8),
    st.sampled_from(" \t\n\r"),
)
def test_white_space_around_and_between_does_not_count(words, space):
    found = tokenize(space + space.join(words) + space)
    assert found == tokenize(" ".join(words))


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        ("reads K.|A dog|reads K.|a dog|vitamin c", "k|dog|k.|dog|c"),
        ("figure no.|5 dogs|casino.|7|(no.|8", "no.|dogs|casino|7|no.|8"),
        ("reads K.||The dog|no.| |5", "k||dog|no||5"),
    ],
)
def test_lines_look_at_the_lines_below(lines, last):
    found = tokenize_lines(lines.split("|"))
    assert [tokens.split(" ")[-1] for tokens in found] == last.split("|")


INSIDE = [
    "",
    "a man's dog, 3.5 m long!",
    "“café” – 50% off… 😀\ufe0f",
    "the U.S. flag",
    "a near miss.",
    "10,000-seat",
    "two pizza's.",
    "a t.v.\n",
    "AT&amp;T at a&nbsp;caf&eacute;",
    "see a.example.com",
    "me@x",
    "http://x",
    "<b>bold</b>",
    "a.b-st.",
    "10 1/2",
    "+41-55-66",
]
OUTSIDE = ["猫", "x\xady", "one\rtwo"]


def test_the_class_of_captions_that_were_compared():
    assert [text for text in (*INSIDE, *OUTSIDE) if is_tested(text)] == INSIDE


ENDS = "no. No. fig. ca. p. K. x-K. (K. 1K. no.| casino. piano U.S. pp. a.no. x,no. $K. ...K. 's. t.v. it't. 39mm/u.s."
NEXT_LINES = [
    "5 dogs",
    " 5 dogs",
    "A dog",
    "a dog",
    " A dog",
    "A",
    "The.",
    "Mr. X",
    "Then",
    "-5",
    "½",
    "",
]


def assert_equal(texts, found, expected):
    for text, one, other in zip(texts, found, expected, strict=True):
        assert one == other, text


@needs_java
def test_ends_of_lines_equal_the_live_toolkit():
    lines = []
    for start in ("", "x ", "x. "):
        for end in ENDS.split():
            for following in NEXT_LINES:
                lines += [start + end.replace("|", " "), following]
    assert all(map(is_tested, lines))
    assert_equal(lines, tokenize_lines(lines), ptb_tokenize(lines))


@needs_java
def test_odd_captions_equal_the_live_toolkit():
    """Entities, abbreviations, numbers, currencies, clitics, quotes, addresses, markup,
    emoji, accents, nothing.
    """
    captions = odd_strings(10_000)
    tested = [caption for caption in captions if is_tested(caption)]
    assert len(tested) > 0.75 * len(captions)
    # As a file, where the next line counts and no-break spaces stay.
    assert_equal(tested, tokenize_lines(tested), ptb_tokenize(tested))
    # The full stop of a last word such as `K.` or `no.` depends on the next line.
    alone = []
    for text in tested:
        found = [tokenize_lines([text, line])[0] for line in ("", "5", "The dog")]
        if len(set(found)) == 1:
            alone.append(text)
    expected = [text.split() for text in ptb_tokenize(alone)]
    assert_equal(alone, map(tokenize, alone), expected)


@needs_java
def test_every_named_entity_equals_the_live_toolkit():
    patterns = ("xx &{} yy", "A&{}M", "caf&{}", "9&{}5", "&{}s")
    texts = [pattern.format(name) for pattern in patterns for name in sorted(html5)]
    assert_equal(texts, tokenize_lines(texts), ptb_tokenize(texts))


def coco(folder):
    content = load_json(folder / "coco_val2017_captions" / "captions_val2017.json")
    return [row["caption"].replace("\n", " ") for row in content["annotations"]]


def flickr8k(folder):
    file = folder / "flickr8k" / "Flickr8k.token.txt"
    lines = file.read_text(encoding="utf-8").splitlines()
    return [line.split("\t", 1)[1] for line in lines]


@needs_java
@pytest.mark.parametrize(("captions_of", "count"), [(coco, 25014), (flickr8k, 40460)])
def test_real_captions_equal_the_live_toolkit(captions_of, count, shared_data):
    captions = captions_of(shared_data)
    assert len(captions) >= count
    given = {0: [{"caption": caption} for caption in captions]}
    expected = PTBTokenizer().tokenize(given)[0]
    assert_equal(captions, tokenize_lines(captions), expected)
