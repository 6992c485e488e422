"""Reports: every number is that of the files, whatever a user wrote is text, and what is missing is said."""

from __future__ import annotations

import json
import math
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rl_caption.command_line import switched_on, with_lists
from rl_caption.evaluation import validation_cider
from rl_caption.evaluation.comparison import unique_names
from rl_caption.report import panels
from rl_caption.report.chart import (
    MAX_POINTS,
    Marks,
    Series,
    line_chart,
    number,
    running_mean,
    smoothing_window,
    ticks,
)
from rl_caption.report.errors import ReportError
from rl_caption.report.figure import figure
from rl_caption.report.folders import read_lines, read_run
from rl_caption.report.gallery import Gallery, reference_scores, selected
from rl_caption.report.glossary import METRICS_PAGE, define, definitions, definitions_note, parse_definitions
from rl_caption.report.markup import Markup, element, json_block
from rl_caption.report.page import render
from rl_caption.report.program import main, make_page, write_report
from rl_caption.report.sources import rows_of_config
from tests.report_for_tests import (
    DATA,
    EVIDENCE,
    LINES,
    NASTY,
    STATE,
    write_ablation,
    write_comparison,
    write_evaluation,
    write_run,
)


class Seen(HTMLParser):
    """Elements with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.text.append(data)

    @property
    def charts(self) -> list[dict[str, Any]]:
        """What every chart shows, its label among it."""
        found = [attributes for _, attributes in self.elements if "data-chart" in attributes]
        return [json.loads(a["data-chart"] or "") | {"label": a["aria-label"]} for a in found]

    @property
    def gallery(self) -> dict[str, Any]:
        """Data of the gallery."""
        return json.loads(self.scripts[0])


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def run_html(run_folder: Path) -> str:
    return render(make_page([run_folder]))


def drawn(seen: Seen) -> dict[tuple[str, str], list[list[float]]]:
    return {(chart["label"], one["name"]): one["points"] for chart in seen.charts for one in chart["series"]}


def test_every_logged_number_is_in_the_charts_and_no_other(run_html: str) -> None:
    points = list(drawn(Seen(run_html)).values())
    for key in {key for line in LINES for key in line} - {"step", "hacking/alarm"}:
        assert [[line["step"], line[key]] for line in LINES if key in line] in points, key
    logged = {(line["step"], value) for line in LINES for value in line.values()}
    seconds = {(line["step"], 1 / line["time/step"]) for line in LINES if "time/step" in line}
    assert {tuple(point) for one in points for point in one} <= logged | seconds


def test_validations_are_listed_in_full_precision(run_html: str) -> None:
    table = run_html[run_html.index("All 3 validations") :]
    for line in LINES:
        if "val/cider" in line:
            for value in line.values():
                assert f"<td>{value!r}</td>" in table or f">{value}</th>" in table


def test_the_alarm_is_told_with_its_evidence_and_marked(run_html: str) -> None:
    assert "Signs of reward hacking from step 20." in run_html
    assert EVIDENCE[1:] in run_html
    assert "export/best is the policy of step 10, before the first alarm." in run_html
    assert "<title>alarm, step 20</title>" in run_html


def test_a_run_without_alarm_says_so_and_one_without_monitor_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    quiet = [line | ({"hacking/alarm": 0.0} if "hacking/alarm" in line else {}) for line in LINES]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in quiet))
    text = render(make_page([folder]))
    assert "No alarm." in text
    assert "Signs of reward hacking" not in text
    unwatched = [{key: value for key, value in line.items() if key != "hacking/alarm"} for line in LINES]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in unwatched))
    text = render(make_page([folder]))
    assert "No alarm." not in text
    assert 'id="monitor"' not in text


def test_captions_are_data_and_never_markup(run_html: str) -> None:
    seen = Seen(run_html)
    assert len(seen.scripts) == 2, "the data and the page's own script; a caption opened another"
    assert not [tag for tag, _ in seen.elements if tag == "img"]
    assert not [attributes for _, attributes in seen.elements if any(name.startswith("on") for name in attributes)]
    assert seen.gallery["items"][0]["captions"] == [f"{NASTY} {step}" for step in (0, 10, 20)]
    assert seen.gallery["systems"] == ["step 0 (start)", "step 10 (best)", "step 20 (last)"]


def test_names_and_settings_of_a_user_are_escaped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a<b>&'c", note="<script>x</script>")
    evil = {"step": 21, 'judge/"><script>y</script>': 1.0, "val/judge/<i>z": 2.0}
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(evil) + "\n")
    seen = Seen(render(make_page([folder])))
    assert len(seen.scripts) == 2
    assert not [tag for tag, _ in seen.elements if tag in ("b>", "i>")]
    assert "a<b>&'c" in "".join(seen.text)


def test_json_in_a_page_cannot_end_its_element_and_says_the_same() -> None:
    block = json_block("x", [NASTY, "]]>", "<!--"])
    inner = re.fullmatch(r'<script type="application/json" id="x">(.*)</script>', block, re.DOTALL)
    assert inner is not None
    assert not set("<>&\u2028") & set(inner[1])
    assert json.loads(inner[1]) == [NASTY, "]]>", "<!--"]


def test_markup_escapes_text_and_attributes_but_not_itself() -> None:
    assert element("p", "a<b", Markup("<i>c</i>"), title='"x"') == '<p title="&quot;x&quot;">a&lt;b<i>c</i></p>'


def test_nothing_is_loaded_from_anywhere(run_html: str) -> None:
    for tag, attributes in Seen(run_html).elements:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert "@import" not in run_html
    assert not re.findall(r"url\((?!data:)", run_html)
    assert set(re.findall(r"https?://[^\s\"'<]+", run_html)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in run_html


def test_a_picture_and_references_of_every_image(run_html: str) -> None:
    items = Seen(run_html).gallery["items"]
    rows = rows_of_config(DATA, "val").rows
    assert len(items) == 30
    for item in items:
        assert item["image"].startswith("data:image/")
        assert item["references"] == rows[item["id"]]["references"]


def test_scores_of_the_gallery_are_those_of_validation_and_of_the_judges(run_folder: Path, run_html: str) -> None:
    data, rows = Seen(run_html).gallery, rows_of_config(DATA, "val").rows
    cider = data["metrics"].index("CIDEr-D")
    references = {image_id: row["references"] for image_id, row in rows.items()}
    for system, step in enumerate((0, 10, 20)):
        captions = read_run(run_folder).predictions(step)
        mean = math.fsum(item["scores"][cider][system] for item in data["items"]) / 30
        assert mean == pytest.approx(validation_cider(captions, references), abs=1e-6)
    own = data["metrics"].index("own")
    assert [item["scores"][own] for item in data["items"]] == [
        [round(index / 32 + step / 64, 6) for step in (0, 10, 20)] for index in range(30)
    ]


def test_a_run_that_is_still_being_written_is_readable(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "result.json").unlink()
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 30, "val/cid')
    text = render(make_page([folder]))
    assert "not complete" in text
    assert read_run(folder).last_step == 20
    assert Seen(text).gallery["systems"] == ["step 0 (start)", "step 20 (last)"], "the best step is not known"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 2, "val', "line 2 is not JSON"),
        ('{"val/cider": 2.0}', "line 2 has no 'step'"),
        ("[1]", "line 2 is [1]"),
        ('{"step": 2.5}', "line 2, 'step' is 2.5"),
        ('{"step": 2, "val/cider": "high"}', "line 2, 'val/cider' is 'high'"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ReportError, match=re.escape(f"{file}, {message}")):
        read_lines(file)


def test_a_whole_last_line_without_its_newline_counts(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_missing_pieces_are_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", data={"format": "karpathy", "path": "nowhere.json"})
    text = render(make_page([folder]))
    assert "No references and images are shown" in text
    assert "nowhere.json" in text
    item = Seen(text).gallery["items"][1]
    assert (item["image"], item["references"]) == (None, [])
    for file in ("config.yaml", "env.json", "result.json", "eval/step-00000010/judges.json"):
        (folder / file).unlink()
    text = render(make_page([folder]))
    assert "There is no config.yaml." in text
    assert Seen(text).charts


def test_a_run_that_has_logged_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "env.json").write_text("{}")
    assert "Nothing has been logged yet." in render(make_page([tmp_path]))


def test_a_folder_without_anything_and_mixed_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"holds no run \(config.yaml and metrics.jsonl\), no evaluation"):
        make_page([tmp_path])
    with pytest.raises(ReportError, match="is not a folder"):
        make_page([tmp_path / "absent"])
    run, evaluation = write_run(tmp_path / "run"), write_evaluation(tmp_path / "evaluation", 1.0)
    with pytest.raises(ReportError, match="folders of one kind are compared"):
        make_page([run, evaluation])


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    text = figure("x", [Series("a", [(1, 2.0), (2, math.nan), (3, math.inf)])])
    assert "2 values are not finite" in text
    assert Seen(text).charts[0]["series"][0]["points"] == [[1, 2.0]]
    assert figure("x", [Series("a", [(1, math.nan)])]) == ""


def test_ticks_are_round_numbers() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(-0.05, 0.21) == pytest.approx([-0.05, 0.0, 0.05, 0.1, 0.15, 0.2])
    assert ticks(3e-6, 9e-6) == pytest.approx([value * 1e-6 for value in range(3, 10)])


def test_numbers_for_people() -> None:
    shown = [number(value) for value in (0, 240, -0.5034, 2.5339, 1234.5, 5e-06, 12345678, math.nan)]
    assert shown == ["0", "240", "−0.5034", "2.534", "1234", "5e−6", "1.235e7", "not finite"]
    assert [number(value, 0.05) for value in (0.05, 0.1)] == ["0.05", "0.10"]


def test_running_mean_by_hand() -> None:
    points = [(0, 3.0), (1, 0.0), (2, 6.0), (3, 9.0), (4, 1.0)]
    assert running_mean(points, 3) == [(0, 3.0), (1, 3.0), (2, 5.0), (3, 16 / 3), (4, 1.0)]
    assert (smoothing_window(39), smoothing_window(40), smoothing_window(1000)) == (1, 3, 41)


def test_long_lines_are_thinned_but_keep_their_extremes() -> None:
    points = [(step, float(step % 7)) for step in range(10 * MAX_POINTS)]
    points[12345] = (12345, 1000.0)
    shown = Seen(line_chart([Series("a", points)], "x")).charts[0]["series"][0]["points"]
    assert len(shown) <= MAX_POINTS
    assert [12345, 1000.0] in shown


def test_lines_lie_where_their_numbers_are() -> None:
    """From the axis in the data: x 0..10 over 46..350, and the line's last point at the right end."""
    svg = line_chart([Series("a", [(0, 0.0), (10, 1.0)], marks=True)], "x", marks=Marks([5], 10))
    chart = Seen(svg).charts[0]
    assert (chart["x"][0], chart["x"][1]) == (0, 10)
    low, high, bottom, top = chart["y"]
    found = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert [float(x) for x, _ in found] == [46.0, 350.0]
    for (_, y), value in zip(found, (0.0, 1.0), strict=True):
        assert float(y) == pytest.approx(bottom + (value - low) / (high - low) * (top - bottom), abs=0.06)
    assert 'class="alarm" d="M198.0' in svg


def test_keys_are_defined_by_the_documentation() -> None:
    known = definitions()
    assert len(known) == len(re.findall(r"^\| `", METRICS_PAGE.read_text(), re.MULTILINE))
    assert known["policy/entropy"].unit == "nats"
    term = define("reward/cider", known)
    assert term is not None
    assert term.meaning.startswith("one term of reward.terms")
    assert define("nothing/known", known) is None
    assert parse_definitions("| `a` | see [b](c.md) `d` | s | 0 |")["a"].meaning == "see b d"


def test_a_selection_has_the_extremes_and_says_so() -> None:
    before, after = {str(i): "a" for i in range(100)}, {str(i): "b" for i in range(100)}
    changed = {str(i): float(i in (3, 50, 51, 52, 99)) for i in range(100)}
    gallery = Gallery({"x": before, "y": after}, {"m": {"x": dict.fromkeys(changed, 0.0), "y": changed}})
    ids, sentence = selected(gallery, 10)
    assert {"3", "50", "51", "52", "99"} <= set(ids)
    assert len(ids) == 10
    assert ids == sorted(ids, key=int)
    assert sentence == "10 of 100 images: the 5 whose m changed most from x to y, and an even sample of 5 others."
    assert selected(gallery, 100)[1] == "All 100 images."
    assert selected(Gallery({"x": before}), 7)[1] == "7 of 100 images: an even sample of 7 of them."


def test_one_image_has_no_scores_by_references() -> None:
    rows = rows_of_config(DATA, "val").rows
    assert reference_scores({"x": {"val-000000": "a dog"}}, rows) == {}


def test_an_ablation_shows_means_and_deviations_over_seeds(tmp_path: Path) -> None:
    folder = write_ablation(tmp_path / "grid")
    text = render(make_page([folder]))
    # 1.5 and 1.75: mean 1.625, standard deviation (n - 1) 0.1768.
    assert "162.50<small>± 17.68</small>" in text
    assert "<b>262.50</b><small>± 17.68</small>" in text
    assert "0 of 2" not in text
    assert text.count("2 of 2") == 2
    seen = Seen(text)
    alpha = drawn(seen)["CIDEr (x100): mean over seeds, start", "mean over seeds"]
    assert alpha == [[0.0, 162.5], [1.0, 262.5]]
    assert seen.gallery["systems"] == ["start", "alpha=0", "alpha=1"]
    assert drawn(seen)["CIDEr-D: alpha=0, alpha=1", "alpha=0"] == [[0, 1.25], [10, 1.75], [20, 0.75]]


def test_a_cell_without_a_result_is_named(tmp_path: Path) -> None:
    folder = write_ablation(tmp_path / "grid")
    lost = folder / "cells" / "alpha=2" / "seed0"
    lost.mkdir(parents=True)
    (lost / "scst.yaml").write_text("{}")
    assert "Missing: cells/alpha=2/seed0 has no result" in render(make_page([folder]))


def test_evaluations_side_by_side(tmp_path: Path) -> None:
    one = write_evaluation(tmp_path / "one", 1.0, intervals={"CIDEr": [0.9, 1.125]})
    two = write_evaluation(tmp_path / "two", 1.25, "blue", signature="OTHER")
    text = render(make_page([one, two]))
    assert "100.00<small>90.00 to 112.50</small>" in text
    assert "<b>125.00</b>" in text
    assert "The signatures differ" in text
    assert "no &lt;b&gt;jar&lt;/b&gt;" in text
    assert Seen(text).gallery["systems"] == ["one", "two"]


def test_a_comparison_shows_its_test(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "pair")
    text = render(make_page([folder]))
    assert "Comparison: rl against xe" in text
    row = ["CIDEr (x100)", "100.00", "125.00", "+25.00", "+12.50 to +37.50", "0.0010"]
    assert row == re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", text[text.index("CIDEr (x100)</th><td>") - 20 :])[:6]
    assert Seen(text).gallery["systems"] == ["xe", "rl"]
    (folder / "comparison.json").write_text("{}")
    with pytest.raises(ReportError, match="has no 'systems'"):
        make_page([folder])


def test_runs_side_by_side(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / name / "run") for name in "ab"]
    seen = Seen(render(make_page(paths)))
    assert seen.gallery["systems"] == ["start", "a/run", "b/run"]
    assert drawn(seen)["CIDEr-D: a/run, b/run", "b/run"] == [[0, 1.25], [10, 1.75], [20, 0.75]]
    assert unique_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]


def test_the_program_writes_beside_the_run_or_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = write_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert main([str(run), "--out", str(tmp_path / "deep" / "x.html"), "--images", "3"]) == 0
    assert len(Seen((tmp_path / "deep" / "x.html").read_text()).gallery["items"]) == 3
    with pytest.raises(SystemExit):
        main([str(run), str(run)])
    assert "name it with --out FILE" in capsys.readouterr().err


def test_references_and_images_of_files(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "e", 1.0)
    references = tmp_path / "references.json"
    references.write_text(json.dumps({f"test-{index:06d}": ["a <red> square"] for index in range(30)}))
    main([str(folder), "--references", str(references)])
    text = (folder / "report.html").read_text()
    assert "No images are shown: no folder of images was named." in text
    assert Seen(text).gallery["items"][0]["references"] == ["a <red> square"]


def test_a_report_that_cannot_be_written_does_not_end_a_finished_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text("no\nno\n")
    assert write_report(folder) is None
    assert "line 1 is not JSON" in caplog.text
    assert not (folder / "report.html").exists()


def test_a_bare_switch_is_true() -> None:
    assert switched_on(["--report"], "--report") == ["--report=true"]
    assert switched_on(["--report", "--out", "x"], "--report") == ["--report=true", "--out", "x"]
    assert switched_on(["--report", "false"], "--report") == ["--report", "false"]


def test_words_after_an_option_are_its_list() -> None:
    assert with_lists(["--a", "--compare", "x", "y", "--b"], "--compare") == ["--a", '--compare=["x", "y"]', "--b"]
    assert with_lists(["--compare", "x"], "--compare") == ['--compare=["x"]']
    assert with_lists(["--compare=[x]"], "--compare") == ["--compare=[x]"]


def test_a_reward_model_is_called_one_and_its_charts_have_names(tmp_path: Path) -> None:
    lines = [{"step": step, "loss/total": 1.0, "val/specificity": step / 8, "val/i2t_r1": 0.5} for step in (0, 4)]
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text("{task: specificity, teacher: {name: null}, train: {max_steps: 4}}")
    text = render(make_page([folder]))
    assert "Training of a reward model: one more true detail scores higher" in text
    assert "Greedy captions" not in text
    assert "the model that training started from" in text
    charts = {label.partition(":")[0]: points for (label, _), points in drawn(Seen(text)).items()}
    assert charts["Specificity"] == [[0, 0.0], [4, 0.5]]
    assert charts["Image to caption, recall at 1"] == [[0, 0.5], [4, 0.5]]


def test_a_judge_that_is_the_validations_cider_is_drawn_once(tmp_path: Path) -> None:
    folders = []
    for name in "ab":
        folders.append(write_run(tmp_path / name))
        lines = [json.loads(line) for line in (folders[-1] / "metrics.jsonl").read_text().splitlines()]
        lines = [line | ({"val/judge/cider": line["val/cider"]} if "val/cider" in line else {}) for line in lines]
        (folders[-1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for paths in (folders[:1], folders):
        titles = [title.partition(":")[0] for title, _ in drawn(Seen(render(make_page(paths))))]
        assert "CIDEr-D" in titles
        assert "cider" not in titles
    assert "cider, best validation" not in render(make_page(folders))


def test_definitions_travel_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documentation = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert METRICS_PAGE.parent.name == "report"
    assert METRICS_PAGE.read_text() == documentation.read_text()
    packaged = tomllib.loads((documentation.parents[1] / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert METRICS_PAGE.name in packaged["package-data"]["rl_caption.report"]
    lost = tmp_path / "metrics.md"
    assert definitions(lost) == {}
    monkeypatch.setattr(panels, "definitions_note", lambda: definitions_note(lost))
    assert "lacks the definitions of logged keys" in render(make_page([write_run(tmp_path / "run")]))


def test_the_state_of_the_fixture_is_that_of_a_run() -> None:
    from rl_caption.types import TrainState

    assert set(STATE) <= set(vars(TrainState()))
