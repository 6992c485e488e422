"""What tests ask of an error's message: the key, file, row or value that it names, and no sentence."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
SENTENCE = re.compile(
    r"(?<![\w.'/\\-])[a-z]+(?:'[a-z]+)?(?:[,;:]? [a-z]+(?:'[a-z]+)?){2,}(?![\w'/=(\\-]|\.\w)"
)
"""Three words in a row, in lower case, that are no part of a key, a path or a quoted value."""


def texts(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings in an expression, those between the braces of an f-string among them."""
    yield from (
        part
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    )


def values_of(names: list[str], rows: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield name and value of each row of a table, of ``parametrize`` or of a loop."""
    for row in rows.elts if isinstance(rows, ast.List | ast.Tuple) else ():
        cells = row.elts if isinstance(row, ast.Tuple) and len(names) > 1 else [row]
        yield from zip(names, cells, strict=False)


def table(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a loop or a ``parametrize`` binds, with each of their values."""
    if isinstance(node, ast.For):
        targets = node.target.elts if isinstance(node.target, ast.Tuple) else [node.target]
        yield from values_of([ast.unparse(target) for target in targets], node.iter)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize":
        names = [name.value for name in texts(node.args[0])]
        yield from values_of(
            [word for name in names for word in re.findall(r"\w+", name)], node.args[1]
        )


def patterns(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each pattern of ``pytest.raises``, also of those in tables of the same test."""
    for test in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]:
        matches = [
            node.value
            for node in ast.walk(test)
            if isinstance(node, ast.keyword) and node.arg == "match"
        ]
        used = {
            node.id for match in matches for node in ast.walk(match) if isinstance(node, ast.Name)
        }
        cells = [value for node in ast.walk(test) for name, value in table(node) if name in used]
        yield from (
            (text.lineno, text.value) for node in [*matches, *cells] for text in texts(node)
        )


@pytest.mark.parametrize(
    "file", sorted(TESTS.rglob("*.py")), ids=lambda file: str(file.relative_to(TESTS))
)
def test_no_pattern_is_a_sentence(file: Path) -> None:
    sentences = {
        f"line {line}: {text}" for line, text in patterns(file.read_text()) if SENTENCE.search(text)
    }
    assert not sentences, "name the key, the file, the row or the value alone"


def test_sentences_are_found_where_they_stand() -> None:
    source = """
@pytest.mark.parametrize(("key", "message"), [("a", "data.path is not set"), ("b", "data.path")])
def test_it(key, message):
    for value, part in ((1, "not a number at all"), (2, "'a b c'")):
        with pytest.raises(ValueError, match=rf"{message}.* cannot be read {part}"):
            read(value, "this is the name of a file")
"""
    found = [text for _, text in patterns(source) if SENTENCE.search(text)]
    assert sorted(found) == [".* cannot be read ", "data.path is not set", "not a number at all"]


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string that is raised, logged or printed; values in it are ``1``."""
    for node in ast.walk(ast.parse(source)):
        says = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "info",
            "warning",
            "error",
            "print",
        )
        if isinstance(node, ast.Raise) or says:
            inner = {
                id(part)
                for text in ast.walk(node)
                if isinstance(text, ast.JoinedStr)
                for part in text.values
            }
            for text in ast.walk(node):
                if isinstance(text, ast.JoinedStr):
                    yield (
                        text.lineno,
                        "".join(
                            p.value if isinstance(p, ast.Constant) else "1" for p in text.values
                        ),
                    )  # type: ignore[misc]
                elif (
                    isinstance(text, ast.Constant)
                    and isinstance(text.value, str)
                    and id(text) not in inner
                ):
                    yield text.lineno, text.value


WRONG_ENGLISH = re.compile(
    r"(?<![\w-])(?P<word>[a-z]{2,}) (?P=word)\b"  # a word twice
    r"|\ba (?!one\b|once\b|eu|uni|use|us[ae]|u\b)[aeiou][a-z]"  # "a image"
    r"|\b[Aa]n (?!hour|honest|heir|nn\b|[a-z]\b|[a-z]-)[b-df-hj-np-tv-z][a-z]"  # "an photo"
    r"|[a-z] ?[,;:] ?[,;:] | [,;] |\b(?:is are|are is|expected expected)\b"
)


def test_messages_are_english() -> None:
    """What can be told without a reader: articles, words and marks that are there twice."""
    package = TESTS.parent
    for file in [*package.glob("rl_caption/**/*.py"), *package.glob("rewards/**/*.py")]:
        wrong = {
            f"line {line}: {text}"
            for line, text in messages(file.read_text())
            if WRONG_ENGLISH.search(text)
        }
        assert not wrong, file
    for text in ("a image", "the the", "an photo", "it is , then"):
        assert WRONG_ENGLISH.search(text), text
