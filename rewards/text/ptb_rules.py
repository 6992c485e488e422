"""Token classes of the Penn Treebank tokenizer that the COCO caption toolkit uses, as
regular expressions.

They reproduce what the tokenizer (Stanford CoreNLP 3.4.1, ``-lowerCase``) does, as seen
from its output: word lists and character ranges by trying all words and characters, the
rest on real captions and on captions with random changes. What captions do not hold
(phone numbers with a country code, exotic entities and addresses) is left out.

``rewards.text.tokenize`` takes the class with the longest match at each position,
lookahead included, and among equally long ones the first.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeAlias


def names(text: str) -> tuple[str, ...]:
    """Split a word list, written as one text, at white space."""
    return tuple(text.split())


TITLES = names("""
    adj adm adv alex assoc asst atty attys ave brig capt cf cie cmdr col comdr cpl dept det dr drs elec ens ft gen
    gov govs hon insp invt jos lieut lt maj messrs mfg mlle mme mr mrs ms msgr mt mtg natl pfc ph pres prof profs
    pvt rep reps rev sen sens sfc sgt spc st ste supt supts treas vs wm
    """)
"""Words that stand before a name and keep a following full stop, whatever their case."""

CLOSING_ABBREVIATIONS = names("""
    al ala apr ariz assn aug bancorp bhd bldg blvd bros calif co colo conn corp cos ct dak dec esq est etc ext feb
    fla fri ga inc ind intl jan jr jul jun kan kans ky ltd mar md mich minn mo mon mont neb nev nov oct okla penn
    plc ppte pptes ppty pptys pte ptes pty ptys rd rt sep sept seq sq sr sys tel tenn thu thurs tue tues univ va vt
    wed wis wisc wyo
    """)
"""Words that keep a following full stop and may end a sentence, such as months, states
and kinds of companies.
"""

ABBREVIATIONS = frozenset([*TITLES, *CLOSING_ABBREVIATIONS])

CAPITALISED_ABBREVIATIONS = names("Ark Az Del Ill La Mass Miss Ore Pa Tex Wash")
"""Words that keep a full stop only when they begin with a capital: ``Miss. Jones``, but
``a near miss.``
"""

NUMBERED_ABBREVIATIONS = names("art ca fig figs no nos op pp prop")
"""Words that keep a full stop only before a number: ``No. 5``, but ``no. it``."""

SENTENCE_OPENERS = names("""
    a about according additionally after an as at but he her here however if in it last many more now once one other
    our she since so some such that the their then there these they this we what when while yet you
    """)
"""Words that, capitalised after ``X. ``, show that the full stop ends a sentence, so
that ``X`` loses it.
"""

SPLIT_WORDS = frozenset(["cannot", "gonna", "gotta", "lemme", "gimme", "wanna"])
"""Words written as one and counted as two; the first has three letters."""

FILE_ENDINGS = names("""
    bat bmp c cgi class cpp dll doc docx exe gif gz h htm html jar java jpeg jpg mov mp3 pdf php pl png ppt ps py sql
    tar txt wav x xml zip
    """)

_SYMBOL_RANGES = """
    24-26 2a-2c 3a-3e 5c 5e 60 7c 7e a1 a5-a9 ac ae-b4 b6-b9 bf d7 f7 37e 387 589 5be 5c0 5c3 5c6 5f3-5f4 600-603
    606-60c 614 61b 61e-61f 66a 66d 6d4 700-70d 7f6-7f8 964-965 e3f e4f 1fbd 2016-2017 201a 201e-2023 2030-2038 203b
    203e-2042 2044 2070 2074-207e 2080-208e 20a4 2100-2101 2103-2106 2108-2109 2114 2116-2118 211e-2123 2125 2127 2129
    212e 213a-213b 2140-2144 214a-214d 214f 2155-215e 2190-24b5 24d0-2bff 3001-3002 3012 30fb ff01-ff0f ff1a-ff20
    ff3b-ff40 ff5b-ff65 ffe0-ffe1 ffe5-ffe6
    """
"""Characters (hexadecimal) that are a token each. Any other character outside all token
classes is dropped.
"""

_MARK_RANGES = """
    ad 2c2-2c5 2d2-2df 2e5-2eb 2ed 2ef-36f 375 378-379 384-385 3f6 483-487 55a-55f 591-5bd 5bf 5c1-5c2 5c4-5c5 5c7
    615-61a 64b-65e 670 6d6-6e4 6e7-6ed 6fd-6fe 70f 711 730-74c 7a6-7b0 7eb-7f3 900-903 93c 93e-94e 951-955 962-963
    981-983 9bc 9be-9c4 9c7-9c8 9cb-9cd 9d7 9e2-9e3 a01-a03 a3c a3e-a4f a81-a83 abc abe-acf b82 bbe-bc2 bc6-bc8
    bca-bcd c01-c03 c3e-c56 d3e-d44 d46-d48 e31 e34-e3a e47-e4e eb1 eb4-ebc ec8-ecd
    """
"""Modifier signs and combining marks that count as letters."""


Write: TypeAlias = Callable[[str], str | None]
"""Function from the matched text to the text that the tokenizer prints; None drops it.
"""


def _characters(ranges: str) -> set[int]:
    numbers: set[int] = set()
    for bounds in ranges.split():
        first, _, last = bounds.partition("-")
        numbers.update(range(int(first, 16), int(last or first, 16) + 1))
    return numbers


def _as_class_body(numbers: set[int]) -> str:
    """A set of code points as the inside of a character class."""
    firsts = sorted(number for number in numbers if number - 1 not in numbers)
    lasts = sorted(number for number in numbers if number + 1 not in numbers)
    return "".join(
        f"\\u{first:04x}-\\u{last:04x}"
        for first, last in zip(firsts, lasts, strict=True)
    )


def _any_of(words: Iterable[str]) -> str:
    return "(?:" + "|".join(sorted(words, key=len, reverse=True)) + ")"


def _any_case(words: Iterable[str]) -> str:
    """The words in any case, but for one letter of ``mfg``, ``mtg``, ``pte`` and the
    like, which has to be small.
    """
    return f"(?i:{re.sub('(?<=[|:]m)[ft](?=g)|(?<=[|:p]pt)[ey]', lambda letter: f'(?-i:{letter[0]})', _any_of(words))})"


SLASHED_FRACTIONS = {"¼": "1/4", "½": "1/2", "¾": "3/4", "⅓": "1/3", "⅔": "2/3"}
_CURRENCY = {"¢": "cents", "£": "#", "¤": "$", "₠": "$", "€": "$", "\x80": "$"}
_BRACKETS = {
    "(": "-lrb-",
    ")": "-rrb-",
    "[": "-lsb-",
    "]": "-rsb-",
    "{": "-lcb-",
    "}": "-rcb-",
}
_QUOTES = dict(zip("\u2018\u201b\u2039\x91\u2019\u203a\x92", "````'''", strict=True)) | {
    "\u201c": "``", "\xab": "``", "\x93": "``", "\u201d": "''", "\xbb": "''", "\x94": "''"
}  # fmt: skip
_ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">"}
_AMPERSAND = re.compile("&amp;", re.IGNORECASE)


def _drop(text: str) -> None:
    return None


def _punctuation(text: str) -> str:
    return "."  # the caption toolkit removes it


def _quotes(text: str) -> str:
    return "".join(_QUOTES.get(sign, sign) for sign in text.replace("&apos;", "'"))


def _rounds(text: str) -> str:
    return text.replace("(", "-lrb-").replace(")", "-rrb-")


def _ampersands(text: str) -> str:
    return _AMPERSAND.sub("&", text)


@cache
def token_classes() -> tuple[tuple[re.Pattern[str], Write], ...]:
    """Return the token classes (how one is found, how it is written) by precedence; the
    first call takes 50 ms.
    """
    symbols = _characters(_SYMBOL_RANGES)
    letters = {
        number for number in range(0x10000) if chr(number).isalpha()
    } - symbols | _characters(_MARK_RANGES)
    digits = {
        number for number in range(0x10000) if unicodedata.category(chr(number)) == "Nd"
    }
    names = {
        "L": f"[{_as_class_body(letters)}]",
        "A": f"[{_as_class_body(letters | digits)}]",
        "Q": "(?:['\u2019\x92]|(?i:&apos;))",
        "QX": "(?:['\u2019\x92`\u2018\u201b\x91]|(?i:&apos;))",
        "H": "[-_\u058a\u2010\u2011]",
        "SP": "[ \\t\xa0\u2000-\u200a\u3000]",
        "NL": "[ \\t\n\xa0\u2000-\u200a\u3000]",
    }
    names["PART"] = "(?:[dDoOlL]{QX}{A})?{A}+".format(**names)
    head = f"(?:{names['L']}|{_ACCENTED})"
    tail = f"(?:{names['A']}|{_ACCENTED})*"
    names |= {"LE": head, "AE": tail.removesuffix("*")}
    names["WORD"] = rf"{head}{tail}(?:[.!?]{head}{tail})*"
    rules = (*_addresses(), *_words(), *_numbers(), *_signs(symbols))
    name = re.compile("<([A-Z]+)>")
    classes = []
    for rule in rules:
        pattern, write = (rule, str) if isinstance(rule, str) else rule
        pattern = name.sub(lambda tag: names[tag[1]], pattern)
        classes.append((re.compile(pattern), write))
    return tuple(classes)


# In the patterns below <L> is a letter, <LE> a letter or the entity of one, <A> and <AE> the same
# or a digit, <Q> an apostrophe, <QX> an apostrophe or quote, <H> a joining hyphen, <SP> a space,
# <NL> a space or line end. A group named "ahead" is looked at and not consumed; it counts for the
# length.
_CLITIC = "<Q>(?:[msdMSD]|[rR][eE]|[vV][eE]|[lL][lL])"
# an entity that counts as a letter; only these, and in any case
_ACCENTED = "(?i:&[aeiou](?:acute|grave|uml);)"
_NAME = r"[A-Za-z][A-Za-z0-9:._-]*"
# of marked-up text
_TAG = rf"""</?{_NAME}(?: +{_NAME}(?:=["'][^"']*["'])?)* */?>|<[!?][A-Za-z-][^>\n]*>"""
_Rules: TypeAlias = list[str | tuple[str, Write]]
"""Patterns, or pairs of a pattern and the ``Write`` function that rewrites its match.
"""


def _addresses() -> _Rules:
    last = r'[^ \t\n"<>|(){}.!?,-]'
    pair = "[\U00010000-\U0010ffff]"  # two characters for the toolkit's tokeniser
    path = rf"""/(?:[^ \t\n"<>|()]+{last}|{pair})"""
    host = (
        r"""[^ \t\n\r\f"`'<>|.!?(){},-_$]"""  # `,-_` is a range: no digits, no capitals
    )
    label = r'[^\s"<>|(){}.]'  # between the dots of a mail address
    return [
        _TAG,
        rf'https?://(?:[^ \t\n"<>|(){{}}]+{last}|{pair})',
        rf'(?i:www)\.(?:[^ \t\n\r\f"<>|.!?(){{}},]+\.)+[A-Za-z]{{2,4}}(?:{path})?',
        rf"{host}+(?:\.{host}+)*\.(?i:com|net|org|edu)(?:{path})?",
        rf"(?:<|(?i:&lt;))?[A-Za-z0-9](?:{label}|\.)*@{label}+(?:\.{label}+)*>?",
    ]


def _words() -> _Rules:
    free_words = _any_of(
        [
            "c<Q>mon",
            "e<Q>er",
            "s<Q>mores",
            "ev<Q>ry",
            "li<Q>l",
            "nat<Q>l",
            "nor<Q>easter",
            "o<QX>o",
        ]
    )
    fixed_words = _any_of(["cap<Q>n", "c<Q>est", "dunkin<Q>", "somethin<Q>", "ol<Q>"])
    free_apostrophes = _any_of(
        ["<Q>em", "<Q>till?", "<Q>cause", "<Q>[2-9]0s", "<Q>n<Q>?"]
    )
    split_heads = _any_of(
        f"{word[:3]}(?={word[3:]}[^A-Za-z0-9])" for word in SPLIT_WORDS
    )
    abbreviations = rf"(?:(?i:(?:ed|ph)\.d)|{_any_case(ABBREVIATIONS)})\."
    capitalised = (
        "(?:" + "|".join(f"{w[0]}(?i:{w[1:]})" for w in CAPITALISED_ABBREVIATIONS) + ")"
    )
    hyphenated = r"[A-Za-z0-9][A-Za-z0-9.,\xad]*(?:-(?:[A-Za-z](?:\.[A-Za-z])+\.|[A-Za-z0-9\xad]+))+"
    company = r"[A-Z]+(?:(?:(?i:&amp;)|[+&])[A-Z]+)+"
    return [
        r"'[tT](?P<ahead>(?i:is|was))",
        rf"<WORD>(?P<ahead>{_CLITIC})",
        r"[A-HJ-XZn]<QX><L><L>+",
        r"<L>+[aeiouyAEIOUY]<QX>[aeiouA-Z]<L>*",
        r"[A-Za-z]*[A-MO-Za-mo-z](?P<ahead>[nN]<QX>[tT])",
        (rf"{_CLITIC}(?P<ahead>[^A-Za-z]|$)", _quotes),
        (r"[nN]<QX>[tT](?P<ahead>[^A-Za-z]|$)", _quotes),
        rf"(?i:{free_words}|{fixed_words}|{free_apostrophes})",
        r"[yY]<Q>(?P<ahead><L>)",
        r"[lLdDjJ]<Q>",
        r"<Q>[0-9][0-9](?P<ahead><SP>|$)",
        r"-(?i:lrb|rrb|lcb|rcb|lsb|rsb)-|(?i:pro-|anti-)",
        r"(?i:c\+\+|c#|f#)",
        r"<WORD>",
        rf"(?i:{split_heads})(?P<ahead>[a-zA-Z]+[^A-Za-z0-9])",
        rf"(?:{_any_case(CLOSING_ABBREVIATIONS)}|(?i:(?:ed|ph)\.d)|{capitalised})\.(?P<ahead>[\s\S]{{2}})",
        r"<PART>(?:<H><PART>)*",
        *(
            (rf"{word}\.(?P<ahead>[,;:\u3001])", _ampersands)
            for word in (company, hyphenated, "<WORD>", "<PART>(?:<H><PART>)*")
        ),
        hyphenated,
        (company, _ampersands),
        r"[A-Za-z0-9]+(?:-[A-Za-z]+){0,2}(?:\\?/[A-Za-z0-9]+(?:-[A-Za-z]+){0,2}){1,2}",
        rf"[A-Za-z](?P<ahead>\.<NL>+(?:(?=[A-Z])(?i:{_any_of(SENTENCE_OPENERS)}|m[rs]\.)|{_TAG})<NL>)",
        rf"{abbreviations}|{capitalised}\.|[A-Za-z](?:\.[A-Za-z])*\.",
        rf"(?i:{_any_of(NUMBERED_ABBREVIATIONS)})\.(?P<ahead><NL>?\d)",
        rf"<AE>+(?:\.<AE>+)*\.(?i:{_any_of(FILE_ENDINGS)})(?P<ahead><SP>|[.?!,]|$)",
    ]


def _numbers() -> _Rules:
    return [
        r"[-+]?(?:\d*(?:[.:,\u066b\u066c]\d+)+|\d+)",
        r"(?:\d{1,4}[- \xa0])?\d{1,4}(?:\\?/|\u2044)\d{1,4}",
        r"\d{1,2}[-/]\d{1,2}[-/]\d{2,4}",
        # Telephone numbers: two or three groups of digits and a last one, which may follow at once.
        (
            r"(?:\(\d{2,3}\)[ \xa0]?|(?:\+\+?)?(?:\d{2,4}[- \xa0]){1,2})\d{3,4}[- \xa0]?\d{3,5}",
            _rounds,
        ),
        (f"[{''.join(SLASHED_FRACTIONS)}]", SLASHED_FRACTIONS.__getitem__),
    ]


def _signs(symbols: set[int]) -> _Rules:
    mouth = re.escape("()[]{|\\@dDpPO")
    eye = r"[-^=~<>x']"
    return [
        r"@[a-zA-Z_][a-zA-Z_0-9]*",
        r"#<LE>+",
        (rf"[<>]?[:;=][-o*']?[{mouth}](?P<ahead>[^A-Za-z0-9]|$)", _rounds),
        (rf"{eye}_{eye}|\({eye}[-_.]?{eye}\)|\([\^=~<>x']-`\)", _rounds),
        r"[A-Z]*\$",
        r"[?!]+",
        r"\*+|(?:\\\*){1,3}|@+|_+|#+",
        r"<<|>>",
        (r"-+", lambda text: text if len(text) > 4 else "--"),
        (f"[{''.join(_CURRENCY)}]", _CURRENCY.__getitem__),
        (r"[()\[\]{}]", _BRACKETS.__getitem__),
        # Dashes, dots and straight quotes are punctuation that the caption toolkit removes.
        (r"(?i:&nbsp;)", _drop),
        (
            r"[\u2013-\u2015\x96\x97]|(?i:&(?:md|[mn]dash);)|\.{3,5}|(?:\.[ "
            r"\xa0]){2,4}\.|[.\u2026]",
            _punctuation,
        ),
        (r"\"|&quot;|''", _punctuation),
        (r"[`\u2018-\u201f\u2039\u203a\xab\xbb\x91-\x94]{1,2}", _quotes),
        # An apostrophe before a word is a quote, so that a clitic or 'n is not read into it.
        (r"'(?P<ahead>[A-Za-z][^ \t\n\r\xa0])", _punctuation),
        (_CLITIC, _quotes),
        (r"(?i:&(?:amp|lt|gt);)", lambda text: _ENTITIES[text.lower()]),
        (r"&apos;", _punctuation),
        r"&#[0-9]+;|(?i:&(?:ht|tl|ur|lr|q[clr]|[oc]dq|quot|apos);)",
        rf"[{_as_class_body(symbols)}/%+]",
    ]
