"""Reports: numbers are those of the files, whatever a user wrote is text, and what is
missing is said.
"""

import math
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from rl_caption.cli.main import run_program
from rl_caption.config.build import build_data
from rl_caption.evaluation import validation_cider
from rl_caption.programs.report.page import make_page, select_images, write_report
from rl_caption.programs.report.read import ReportError, read_run, received_data
from tests.report_for_tests import (
    DATA,
    EVIDENCE,
    LINES,
    NASTY,
    write_comparison,
    write_evaluation,
    write_lines,
    write_run,
)


class Seen(HTMLParser):
    """The elements of a page with their attributes, its text, and the cards of its gallery."""

    def __init__(self, page):
        super().__init__()
        self.elements = []
        self.text = ""
        self.feed(page)
        cards = re.findall(r"<article>(.*?)</article>", page, re.DOTALL)
        self.cards = {card["id"]: card for card in map(card_of, cards)}

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def tags(self, name):
        return sum(tag == name for tag, _ in self.elements)


def card_of(card):
    """A card of the gallery: its id, picture, references, captions by system, and
    scores in the order of the page.
    """

    def texts(pattern):
        found = re.findall(pattern, card, re.DOTALL)
        return [unescape(re.sub(r"<[^>]*>", "", part)) for part in found]

    systems, captions = texts("<dt>(.*?)</dt>"), texts("<dd><span>(.*?)</span>")
    return {
        "id": texts(r"<h4>(.*?)</h4>")[0],
        "image": next(iter(re.findall(r'<img src="([^"]*)"', card)), None),
        "references": texts(r"<li>(.*?)</li>"),
        "captions": dict(zip(systems, captions, strict=True)),
        "scores": [float(value) for value in re.findall(r"<b>([\d.]+)</b>", card)],
    }


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def run_html(run_folder):
    return make_page([run_folder])


def test_every_logged_key_has_a_chart_and_every_validation_a_row(run_html):
    text = unescape(run_html)
    for key in {key for line in LINES for key in line} - {"step"}:
        last = [line[key] for line in LINES if key in line][-1]
        assert f">{key} {100 * last if key == 'val/cider' else last:.4g}<" in text, key
    assert "val/cider (x100)</th><td>125</td><td>175</td><td>75</td>" in text


def test_the_gallery_has_pictures_references_and_the_scores_of_validation(
    run_folder, run_html
):
    cards = Seen(run_html).cards
    references = {}
    for row in build_data(received_data(DATA))["val"]:
        references[row["image_id"]] = row["references"]
    assert len(cards) == 30
    for image_id, card in cards.items():
        assert card["image"].startswith("data:image/")
        assert card["references"] == references[image_id]
    for system, step in enumerate((0, 10, 20)):
        mean = math.fsum(card["scores"][system] for card in cards.values()) / 30
        cider = validation_cider(read_run(run_folder).predictions(step), references)
        assert mean == pytest.approx(100 * cider, abs=1e-3)
    changes = [max(card["scores"]) - min(card["scores"]) for card in cards.values()]
    assert changes == sorted(changes, reverse=True)


def test_alarms_are_told_with_their_evidence(tmp_path, run_html):
    assert EVIDENCE in Seen(run_html).text
    assert "export/best is the policy of step 10, before the first alarm." in run_html
    folder = write_run(tmp_path / "run")
    write_lines(folder, [line | {"hacking/alarm": 0.0} for line in LINES])
    text = make_page([folder])
    assert "No alarm." in text
    assert "Signs of reward hacking" not in text


def test_what_a_user_wrote_is_text_and_nothing_is_loaded(tmp_path):
    folder = write_run(tmp_path / "a<b>&'c", note="<script>x</script>")
    nasty_keys = {'judge/"><script>y</script>': 1.0, "val/judge/<i>z": 2.0}
    write_lines(folder, [*LINES, {"step": 20, **nasty_keys}])
    text = make_page([folder])
    seen = Seen(text)
    assert seen.tags("script") == 0
    assert seen.tags("img") == 30
    assert not {"b>", "i>"} & {tag for tag, _ in seen.elements}
    captions = seen.cards["val-000000"]["captions"]
    assert captions["step 10 (best)"] == f"{NASTY} 10"
    assert "a<b>&'c" in seen.text
    for _, attributes in seen.elements:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert not re.findall(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text


def test_a_damaged_line_is_named_and_does_not_end_a_finished_run(tmp_path, caplog):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text(
        '{"step": 1}\n{"step": 2, "val\n{"step": 3}\n'
    )
    with pytest.raises(ReportError, match=r"metrics\.jsonl, line 2"):
        make_page([folder])
    write_report(folder, [])
    assert "line 2" in caplog.text
    assert not (folder / "report.html").exists()


def test_missing_pieces_are_said(tmp_path):
    folder = write_run(
        tmp_path / "run", data={"format": "karpathy", "path": "nowhere.json"}
    )
    text = make_page([folder])
    assert "nowhere.json" in text[text.index("No references and images are shown") :]
    card = Seen(text).cards["val-000001"]
    assert (card["image"], card["references"]) == (None, [])
    (tmp_path / "new").mkdir()
    (tmp_path / "new/config.yaml").write_text("{}")
    assert "Nothing has been logged yet." in make_page([tmp_path / "new"])


def test_images_that_changed_most_come_first():
    systems = {name: {str(i): name for i in range(100)} for name in "xy"}
    changed = {str(i): float(i in (30, 50, 90, 99)) for i in range(100)}
    scores = {"x": dict.fromkeys(changed, 0.0), "y": changed}
    ids = select_images(systems, scores, 10)
    assert ids[:4] == ["30", "50", "90", "0"], "an even sample, sorted"
    assert (len(ids), len(set(ids))) == (10, 10)


def test_evaluations_side_by_side(tmp_path):
    one = write_evaluation(tmp_path / "one", 1.0, intervals={"CIDEr": [0.9, 1.125]})
    two = write_evaluation(tmp_path / "two", 1.25, "blue", signature="OTHER")
    text = make_page([one, two])
    assert "[90.00, 112.50]" in text
    assert "signatures differ" in text
    assert "no &lt;b&gt;jar&lt;/b&gt;" in text
    assert [*Seen(text).cards["test-000000"]["captions"]] == ["one", "two"]


def test_a_comparison_shows_its_test(tmp_path):
    seen = Seen(make_page([write_comparison(tmp_path / "pair")]))
    assert "CIDEr (x100)100.00125.00+25.00+12.50 to +37.500.0010" in seen.text
    assert [*seen.cards["test-000000"]["captions"]] == ["xe", "rl"]


def test_the_program_writes_beside_the_run_or_where_it_is_told(tmp_path, capsys):
    run = write_evaluation(tmp_path / "run", 1.0)
    assert run_program("report", [str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    out = tmp_path / "deep/x"
    assert run_program("report", [str(run), f"--out={out}", "--images=3"]) == 0
    assert len(Seen((out / "report.html").read_text()).cards) == 3
