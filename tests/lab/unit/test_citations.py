"""Every citation in the docs, in the sources and in CITATION.cff agrees with one table of papers."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rewards.registry import available
from rl_caption.lab.share import NO_PAPER, PAPERS, PAPERS_OF, cite
from tests.docs_for_tests import PAGES, ROOT

YEAR = r"\(?((?:19|20)\d\d)\b"
NAME = r"[A-Z][\w'-]+"
ET_AL = re.compile(
    rf"({NAME}) et al\.\]?(?:, \"([^\"]+)\")?((?:(?! et al\.)[^|;]){{0,70}}?\b{YEAR})?"
)
PAIR = re.compile(
    rf"((?:{NAME}, )*{NAME}) and ({NAME}),? (?:\"([^\"]+)\",? )?(?:[A-Z]{{3,}} )?{YEAR}"
)
TITLE = re.compile(
    rf"\"([A-Z][^\"]{{15,130}})\"(?: \([\w-]+\))?,? (?:[A-Z][\w ]{{2,30}}? )?(?:\d[\d()]*, )?{YEAR}"
)
SOURCES = sorted(
    path
    for folder in ("rl_caption", "rewards", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)


def letters(title: str) -> str:
    """A title without what its spellings differ in."""
    return re.sub(r"\W", "", title).lower()


def surnames(paper: dict[str, Any]) -> list[str]:
    """The authors that the table names."""
    return [name.removesuffix(" et al.") for name in paper["authors"].split(", ")]


def problems(text: str) -> Iterator[str]:
    """Citations that are not in the table."""

    def check(
        citation: str, authors: list[str], title: str | None, year: str | None
    ) -> Iterator[str]:
        rows = [paper for paper in PAPERS.values() if surnames(paper)[: len(authors)] == authors]
        if year is not None:
            rows = [paper for paper in rows if str(paper["year"]) == year]
        if title is not None:
            rows = [paper for paper in rows if letters(title) in letters(paper["title"])]
        if not rows:
            yield citation

    for match in ET_AL.finditer(text):
        yield from check(match.group(), [match[1]], match[2], match[4])
    for match in PAIR.finditer(text):
        yield from check(match.group(), [*match[1].split(", "), match[2]], match[3], match[4])
    for match in TITLE.finditer(text):
        yield from check(match.group(), [], match[1], match[2])
    for match in re.finditer(r"arXiv ([\d.]+\d)", text):
        rows = [paper for paper in PAPERS.values() if paper.get("arxiv") == match[1]]
        if (
            not rows
            or surnames(rows[0])[0] not in text[max(0, match.start() - 250) : match.start()]
        ):
            yield match.group()


@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_citations_are_those_of_the_table(path: Path) -> None:
    text = re.sub(r"\s*\n[ #]*", " ", path.read_text(encoding="utf-8"))
    assert list(problems(text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "ICC (Alper et al. 2024)",
        "Sarto et al. 2022",
        'Hessel et al., "CLIPScore: a metric without references", EMNLP 2021',
        "Wang and Chang 2019",
        '"Self-critical training of captioners", CVPR 2017',
        "Rennie et al. 2017 (arXiv 1612.00564)",
        "Hessel et al. 2021 (arXiv 1612.00563)",
    ],
)
def test_a_wrong_citation_is_noticed(text: str) -> None:
    assert list(problems(text))


def test_the_citation_file_agrees_with_the_table() -> None:
    rows = {letters(paper["title"]): paper for paper in PAPERS.values()}
    for reference in yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))[
        "references"
    ]:
        paper = rows[letters(reference["title"])]
        authors = [
            author["family-names"] for author in reference["authors"] if "family-names" in author
        ]
        assert authors == surnames(paper)[: len(authors)], paper
        assert {"name": "others"} in reference["authors"] or len(authors) == len(surnames(paper)), (
            paper
        )
        arxiv = f"https://arxiv.org/abs/{paper['arxiv']}" if "arxiv" in paper else None
        assert (reference["year"], reference.get("url")) == (paper["year"], arxiv), paper
        if "conference" in reference:
            assert reference["conference"]["name"] == paper["venue"]


def test_every_reward_has_a_paper_or_none_on_purpose() -> None:
    for name in {name.removeprefix("ref_") for name in available()} - {*NO_PAPER}:
        assert cite(*PAPERS_OF.get(name, (name,)))
