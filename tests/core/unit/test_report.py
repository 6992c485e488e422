"""Reports: every number is that of the files, whatever a user wrote is text, and what is missing is said."""

import json
import math
import re
import shutil
import tomllib
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rewards.text.cider import CIDER_DIFFERENCES, CIDER_SCALE
from rl_caption.evaluation import validation_cider
from rl_caption.programs.report import charts
from rl_caption.programs.report.charts import (
    DIGIT,
    MAX_POINTS,
    METRICS_PAGE,
    Series,
    define,
    definitions,
    figure,
    number,
    running_mean,
)
from rl_caption.programs.report.gallery import rows_of_config, select_images
from rl_caption.programs.report.pages import render
from rl_caption.programs.report.program import main, make_page, write_report
from rl_caption.programs.report.read import ReportError, read_run
from tests.conftest import REPOSITORY
from tests.report_for_tests import (
    DATA,
    EVIDENCE,
    LINES,
    NASTY,
    write_ablation,
    write_comparison,
    write_evaluation,
    write_lines,
    write_run,
)


class Seen(HTMLParser):
    """Elements with their attributes, the text outside of scripts, charts, and cards of the gallery."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        charts = [attributes for _, attributes in self.elements if "data-chart" in attributes]
        self.charts = [
            json.loads(a["data-chart"] or "") | {"label": a["aria-label"]} for a in charts
        ]
        self.lines = {
            (c["label"].partition(":")[0], name): points
            for c in self.charts
            for name, points in c["series"]
        }
        self.items = [
            item_of(card) for card in re.findall(r"<article (.*?)</article>", page, re.DOTALL)
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem != "script":
            self.text += data

    def tags(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.elements)


def item_of(card: str) -> dict[str, Any]:
    """A card of the gallery: image, references, scores by metric and system, and captions by system."""

    def texts(pattern: str) -> list[str]:
        return [
            unescape(re.sub(r"<[^>]*>", "", found))
            for found in re.findall(pattern, card, re.DOTALL)
        ]

    return {
        "id": texts(r"<h4>(.*?)</h4>")[0],
        "image": next(iter(re.findall(r'<img src="([^"]*)"', card)), None),
        "references": texts(r"<li>(.*?)</li>"),
        "scores": json.loads(re.findall(r"data-scores='(.*?)'", card)[0]),
        "captions": dict(
            zip(texts("<dt>(.*?)</dt>"), texts("<dd><span>(.*?)</span>"), strict=True)
        ),
    }


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "mine")


@pytest.fixture(scope="module")
def run_html(run_folder: Path) -> str:
    return render(make_page([run_folder]))


def test_every_logged_number_is_shown_and_no_other(run_folder: Path, run_html: str) -> None:
    points = list(Seen(run_html).lines.values())
    for key in {key for line in LINES for key in line} - {"step", "hacking/alarm"}:
        factor = 100 if key == "val/cider" else 1
        assert [[line["step"], factor * line[key]] for line in LINES if key in line] in points, key
    logged = {
        (x["step"], 100 * v if key == "val/cider" else v) for x in LINES for key, v in x.items()
    }
    assert {tuple(point) for one in points for point in one} <= logged
    table = run_html[run_html.index("All 3 validations") :]
    for line in LINES:
        if "val/cider" in line:
            assert all(
                f"<td>{value!r}</td>" in table for key, value in line.items() if key != "step"
            )
    assert render(make_page([run_folder])) == run_html


def test_alarms_are_told_with_their_evidence_and_marked(tmp_path: Path, run_html: str) -> None:
    assert EVIDENCE[1:] in Seen(run_html).text
    assert "export/best is the policy of step 10, before the first alarm." in run_html
    assert "<title>alarm, step 20</title>" in run_html
    folder = write_run(tmp_path / "run")
    write_lines(
        folder,
        [line | ({"hacking/alarm": 0.0} if "hacking/alarm" in line else {}) for line in LINES],
    )
    text = render(make_page([folder]))
    assert "No alarm." in text
    assert "Signs of reward hacking" not in text
    write_lines(
        folder,
        [{key: value for key, value in line.items() if key != "hacking/alarm"} for line in LINES],
    )
    assert 'id="monitor"' not in render(make_page([folder]))


def test_what_a_user_wrote_is_text_and_never_markup(tmp_path: Path, run_html: str) -> None:
    folder = write_run(tmp_path / "a<b>&'c", note="<script>x</script>")
    write_lines(
        folder, [*LINES, {"step": 21, 'judge/"><script>y</script>': 1.0, "val/judge/<i>z": 2.0}]
    )
    hostile = render(make_page([folder]))
    for seen in (Seen(run_html), Seen(hostile)):
        assert seen.tags("script") == 1, "a caption or name opened another"
        assert seen.tags("img") == 30
        assert not {"b>", "i>"} & {tag for tag, _ in seen.elements}
        assert not [
            attributes
            for _, attributes in seen.elements
            if any(name.startswith("on") for name in attributes)
        ]
        names = ("step 0 (start)", "step 10 (best)", "step 20 (last)")
        assert seen.items[0]["captions"] == {
            name: f"{NASTY} {step}" for name, step in zip(names, (0, 10, 20), strict=True)
        }
    assert "a<b>&'c" in Seen(hostile).text


def test_nothing_is_loaded_from_anywhere(run_html: str) -> None:
    for _, attributes in Seen(run_html).elements:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert not re.findall(r"@import|url\((?!data:)|https?://", run_html)
    assert "default-src 'none'" in run_html


def test_the_gallery_has_pictures_references_and_the_scores_of_validation(
    run_folder: Path, run_html: str
) -> None:
    items, rows = Seen(run_html).items, rows_of_config(DATA, "val").rows
    assert len(items) == 30
    for item in items:
        assert item["image"].startswith("data:image/")
        assert item["references"] == rows[item["id"]]["references"]
    references = {image_id: row["references"] for image_id, row in rows.items()}
    for system, step in enumerate((0, 10, 20)):
        mean = math.fsum(item["scores"][0][system] for item in items) / 30
        cider = validation_cider(read_run(run_folder).predictions(step), references)
        assert mean == pytest.approx(100 * cider, abs=1e-6)
    expected = [[round(index / 32 + step / 64, 6) for step in (0, 10, 20)] for index in range(30)]
    assert [item["scores"][2] for item in items] == expected, (
        "of the judge 'own', after CIDEr-D and ROUGE-L"
    )
    assert "there is a <mark>large</mark> <mark>large</mark> red square 7" in run_html


def test_a_run_that_is_still_being_written_is_readable(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "result.json").unlink()
    with (folder / "metrics.jsonl").open("a") as log:
        log.write('{"step": 30, "val/cid')
    text = render(make_page([folder]))
    assert "not complete" in text
    assert read_run(folder).last_step == 20
    assert [*Seen(text).items[0]["captions"]] == ["step 0 (start)", "step 20 (last)"], (
        "the best step is not known"
    )
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    assert read_run(folder).last_step == 2, "a whole last line without its newline counts"


def test_a_damaged_line_is_named_and_does_not_end_a_finished_run(
    tmp_path: Path, caplog: Any
) -> None:
    folder = write_run(tmp_path / "run")
    for line in ('{"step": 2, "val', '{"step": 2, "val/cider": "high"}'):
        (folder / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
        with pytest.raises(ReportError, match=r"metrics\.jsonl, line 2"):
            make_page([folder])
    assert write_report(folder, []) is None
    assert "line 2" in caplog.text
    assert not (folder / "report.html").exists()


def test_missing_pieces_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", data={"format": "karpathy", "path": "nowhere.json"})
    text = render(make_page([folder]))
    assert "nowhere.json" in text[text.index("No references and images are shown") :]
    item = Seen(text).items[1]
    assert (item["image"], item["references"]) == (None, [])
    for file in ("config.yaml", "env.json", "result.json", "eval/step-00000010/judges.json"):
        (folder / file).unlink()
    monkeypatch.setattr(charts, "definitions", list)
    text = render(make_page([folder]))
    assert "There is no config.yaml." in text
    assert "lacks the definitions of logged keys" in text
    assert Seen(text).charts
    (tmp_path / "new").mkdir()
    for file in ("config.yaml", "env.json"):
        (tmp_path / "new" / file).write_text("{}")
    assert "Nothing has been logged yet." in render(make_page([tmp_path / "new"]))


def test_an_error_names_the_section_that_is_wrong(run_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    for content, part in (("eval: 3", "'eval' is 3"), ("data: null", "'data' is None")):
        (folder / "config.yaml").write_text(content)
        with pytest.raises(ReportError, match=f"config.yaml, {part}"):
            make_page([folder])


def test_a_folder_without_anything_and_mixed_folders_are_refused(
    run_folder: Path, tmp_path: Path
) -> None:
    for folders, part in (
        ([tmp_path], r"no run \(config\.yaml"),
        ([tmp_path / "absent"], "absent is"),
        ([run_folder, write_evaluation(tmp_path / "evaluation", 1.0)], r"mine \(run\)"),
    ):
        with pytest.raises(ReportError, match=part):
            make_page(folders)


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    text = figure("x", [Series("a", [(1, 2.0), (2, math.nan), (3, math.inf)])])
    assert "2 values are not finite" in text
    assert Seen(text).lines["x", "a"] == [[1, 2.0]]
    assert figure("x", [Series("a", [(1, math.nan)])]) == ""


@pytest.mark.parametrize(
    "y", [[-1e308, 1e308], [5e-324, 5e-324], [0.0, 5e-324], [-1e-300, 1e-300], [1.0, 1 + 2**-52]]
)
def test_values_at_the_ends_of_what_a_float_holds_are_drawn_or_left_out(y: list[float]) -> None:
    text = figure("x", [Series("a", [(1, y[0]), (2, y[1]), (3, 1.0)])])
    assert ("2 values are not finite" in text) == (y[1] > 1e100)
    assert Seen(text).lines["x", "a"][-1] == [3, 1.0]
    assert "nan" not in figure("x", [Series("a", [(1, y[0]), (2, y[1])])])


def test_numbers_for_people() -> None:
    shown = [
        number(value) for value in (0, 240, -0.5034, 2.5339, 1234.5, 5e-06, 12345678, math.nan)
    ]
    assert shown == ["0", "240", "−0.5034", "2.534", "1234", "5e−6", "1.235e7", "not finite"]
    assert [number(value, 12.5) for value in (0.05, 12.0)] == ["0.05", "12.00"]


def test_running_mean_by_hand() -> None:
    points = [(0, 3.0), (1, 0.0), (2, 6.0), (3, 9.0), (4, 1.0)]
    assert running_mean(points, 3) == [(0, 3.0), (1, 3.0), (2, 5.0), (3, 16 / 3), (4, 1.0)]


def test_long_lines_are_thinned_but_keep_their_extremes() -> None:
    points = [(step, float(step % 7)) for step in range(10 * MAX_POINTS)]
    points[12345] = (12345, 1000.0)
    shown = Seen(figure("x", [Series("a", points)])).lines["x", "a"]
    assert len(shown) <= MAX_POINTS
    assert [12345, 1000.0] in shown


def test_lines_lie_where_their_numbers_are() -> None:
    for points in ([(0, 0.0), (10, 1.0)], [(-7, 5.0), (3, -2.5)], [(-(10**18), 0.0)]):
        svg = figure("x", [Series("a", points, dots=True)], alarms=[5], best=10)
        chart = Seen(svg).charts[0]
        drawn = [
            tuple(map(float, found)) for found in re.findall(r'cx="([-\d.]+)" cy="([\d.]+)"', svg)
        ]
        for place, point in zip(drawn, points, strict=True):
            for coordinate, value, axis in zip(place, point, "xy", strict=True):
                low, high, start, end = chart[axis]
                assert coordinate == pytest.approx(
                    start + (value - low) / (high - low) * (end - start), abs=0.06
                )
                assert min(start, end) <= coordinate <= max(start, end)


def test_keys_are_defined_by_the_documentation_which_travels_with_the_package() -> None:
    packaged = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    files = {
        path for path in METRICS_PAGE.parent.rglob("*.*") if path.suffix not in (".py", ".pyc")
    }
    patterns = packaged["rl_caption.programs.report"]
    assert {path for pattern in patterns for path in METRICS_PAGE.parent.glob(pattern)} == files
    page = (REPOSITORY / "docs/metrics.md").read_text()
    assert METRICS_PAGE.read_text() == page
    assert len(definitions()) == len(re.findall(r"^\| `", page, re.MULTILINE))
    found = [define(key) for key in ("policy/entropy", "reward/cider", "nothing/known")]
    assert [one and one.unit for one in found] == ["nats", "reward", None]


def test_a_selection_has_the_extremes_and_says_so() -> None:
    systems = {name: {str(i): name for i in range(100)} for name in "xy"}
    changed = {str(i): float(i in (3, 50, 51, 52, 99)) for i in range(100)}
    scores = {"m": {"x": dict.fromkeys(changed, 0.0), "y": changed}}
    ids, sentence = select_images(systems, scores, 10)
    assert {"3", "50", "51", "52", "99"} <= set(ids)
    assert len(ids) == 10
    assert ids == sorted(ids, key=int)
    assert (
        sentence
        == "10 of 100 images: the 5 whose m changed most from x to y, and an even sample of 5 others."
    )
    assert select_images(systems, scores, 100)[1] == "All 100 images."
    assert select_images(systems, {}, 7)[1] == "7 of 100 images: an even sample of 7 of them."


def test_an_ablation_shows_means_and_deviations_over_seeds(tmp_path: Path) -> None:
    folder = write_ablation(tmp_path / "grid")
    lost = folder / "cells" / "alpha=2" / "seed0"
    lost.mkdir(parents=True)
    (lost / "scst.yaml").write_text("{}")
    write_evaluation(
        folder / "cells/alpha=3/seed0/test_last", 1.0
    )  # of a cell that is no longer in the grid
    (folder / "cells/alpha=3/seed0/scst.yaml").write_text("{}")
    write_evaluation(folder / "cells/alpha=1/seed0/val_last", 9.0)  # made since the table
    text = render(make_page([folder]))
    # 1.5 and 1.75: mean 1.625, standard deviation (n - 1) 0.1768.
    assert "162.50<small>± 17.68</small>" in text
    assert "<b>262.50</b><small>± 17.68</small>" in text
    assert text.count("2 of 2") == 2
    assert "Missing: cells/alpha=2/seed0 has no result" in text
    assert "alpha=3" not in text
    seen = Seen(text)
    assert seen.lines["CIDEr (x100)", "mean over seeds"] == [[0.0, 162.5], [1.0, 262.5]]
    assert [*seen.items[0]["captions"]] == ["start", "alpha=0", "alpha=1"]
    assert seen.lines["CIDEr-D (x100)", "alpha=0"] == [[0, 125.0], [10, 175.0], [20, 75.0]]


def test_evaluations_side_by_side(tmp_path: Path) -> None:
    one = write_evaluation(tmp_path / "one", 1.0, intervals={"CIDEr": [0.9, 1.125]})
    two = write_evaluation(tmp_path / "two", 1.25, "blue", signature="OTHER")
    text = render(make_page([one, two]))
    assert "100.00<small>90.00 to 112.50</small>" in text
    assert "<b>125.00</b>" in text
    assert "The signatures differ" in text
    assert "no &lt;b&gt;jar&lt;/b&gt;" in text
    assert [*Seen(text).items[0]["captions"]] == ["one", "two"]


def test_a_comparison_shows_its_test(tmp_path: Path) -> None:
    seen = Seen(render(make_page([write_comparison(tmp_path / "pair")])))
    assert "Comparison: rl against xe" in seen.text
    assert "CIDEr (x100)100.00125.00+25.00+12.50 to +37.500.0010" in seen.text
    assert [*seen.items[0]["captions"]] == ["xe", "rl"]


def test_runs_side_by_side_and_a_judge_that_is_the_validations_cider_is_drawn_once(
    tmp_path: Path,
) -> None:
    folders = [write_run(tmp_path / name / "run") for name in "ab"]
    for folder in folders:
        write_lines(
            folder,
            [x | ({"val/judge/cider": x["val/cider"]} if "val/cider" in x else {}) for x in LINES],
        )
    seen = Seen(render(make_page(folders)))
    assert [*seen.items[0]["captions"]] == ["start", "a/run", "b/run"]
    assert seen.lines["CIDEr-D (x100)", "b/run"] == [[0, 125.0], [10, 175.0], [20, 75.0]]
    assert re.search(r"CIDEr-D, 0 to 1000, times 100\s*125175175", seen.text), (
        "step 0, and the best of each"
    )
    assert "cider" not in {title for title, _ in seen.lines}


def test_a_reward_model_is_called_one_and_its_charts_have_names(tmp_path: Path) -> None:
    write_lines(
        tmp_path,
        [{"step": step, "loss/total": 1.0, "val/specificity": step / 8} for step in (0, 4)],
    )
    (tmp_path / "config.yaml").write_text(
        "{task: specificity, teacher: {name: null}, train: {max_steps: 4}}"
    )
    seen = Seen(render(make_page([tmp_path])))
    assert "Training of a reward model: specificity" in seen.text
    assert "Greedy captions" not in seen.text
    assert seen.lines["Specificity", "validation"] == [[0, 0.0], [4, 0.5]]


def test_the_program_writes_beside_the_run_or_where_it_is_told(tmp_path: Path, capsys: Any) -> None:
    run = write_evaluation(tmp_path / "run", 1.0)
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert main([str(run), "--out", str(tmp_path / "deep" / "x.html"), "--images", "3"]) == 0
    assert len(Seen((tmp_path / "deep" / "x.html").read_text()).items) == 3
    for options, part in (
        ([str(run)], "--out FILE"),
        (["--image_folder", "photos"], "--image_folder"),
        (["--split", "val"], "--split"),
        (["--references", "r.json", "--config", "c.yaml"], "--references"),
    ):
        with pytest.raises(SystemExit):
            main([str(run), *options])
        assert part in capsys.readouterr().err.partition("error: ")[2], (
            "an option that would do nothing is refused"
        )


def test_references_and_images_of_files(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "e", 1.0)
    references = tmp_path / "references.json"
    names = [
        {"image_id": i, "image_name": f"test-{i:06d}", "captions": ["a <red> square"]}
        for i in range(30)
    ]
    own = folder / "predictions.json"
    for content, key in (
        ({one["image_name"]: one["captions"] for one in names}, "image_id"),
        (names, "image_name"),
    ):
        references.write_text(json.dumps(content))
        own.write_text(own.read_text().replace("image_id", key))
        main([str(folder), "--references", str(references)])
        text = (folder / "report.html").read_text()
        assert "No images are shown: no folder of images was named." in text
        assert Seen(text).items[0]["references"] == ["a <red> square"]
    references.write_text(
        json.dumps([*names, {"image_id": 31, "image_name": "not captioned", "captions": ["a"]}])
    )
    for one in names:
        Image.new("RGB", (8, 8)).save(tmp_path / f"{one['image_name']}.png")
    main([str(folder), "--references", str(references), "--image_folder", str(tmp_path)])
    assert "No images are shown" not in (folder / "report.html").read_text()


@pytest.mark.parametrize(("weight", "other"), [(1.0, None), (0.5, "brevity")])
def test_a_page_has_one_scale_of_cider_and_says_why_reward_and_validation_differ(
    weight, other, tmp_path
) -> None:
    terms = {"cider": {"weight": weight}} | ({other: {"weight": 0.5}} if other else {})
    folder = write_run(tmp_path / "mine", reward={"terms": terms})
    values = {"val/reward": 1.5, "val/reward/cider": 1.5, "val/judge/cider": 0.5}
    if other:
        values |= {"val/reward": 0.875}
    lines: list[dict[str, Any]] = [
        {"step": 0, "val/cider": 0.25, **values},
        {"step": 10, "val/cider": 0.375, **values},
    ]
    write_lines(
        folder, [*lines, {"step": 10, "reward/total": values["val/reward"], "reward/cider": 1.5}]
    )
    (folder / "result.json").write_text(
        json.dumps({"metric": "val/cider", "best_step": 10, "global_step": 10})
    )
    html = render(make_page([folder]))
    seen = Seen(html)
    assert seen.lines["CIDEr-D (x100)", "validation"] == [[0, 25.0], [10, 37.5]]
    assert seen.lines["cider (x100)", "validation"] == [[0, 50.0], [10, 50.0]]
    total = seen.lines["Reward" if other else "Reward (x100)", "validation"]
    assert total == [[0, 0.875 if other else 150.0], [10, 0.875 if other else 150.0]]
    if other:
        assert seen.lines["Term cider (x100)", "validation"] == [[0, 150.0], [10, 150.0]]
    assert CIDER_SCALE in seen.text
    assert CIDER_DIFFERENCES in seen.text
    shown = html[: html.index("All 2 validations")]
    assert not re.findall(r"<td>(?:0\.25|0\.2500|1\.5|1\.500)</td>", shown)


@pytest.mark.parametrize(
    "y", [[1.2e-4, 1.45e-4], [-0.00125, -0.0011], [1.234e6, 1.3e6], [0.4, 1.5], [-1.5e-7, 2e-7]]
)
@pytest.mark.parametrize("last", [100, 123456, 1500000])
def test_no_label_of_a_chart_is_cut_or_touches_another(y: list[float], last: int) -> None:
    svg = str(figure("Loss", [Series("total", [(0, y[0]), (last, y[1])])]))
    below: list[tuple[float, float]] = []
    for attributes, text in re.findall(r"<text ([^>]*)>([^<]*)</text>", svg):
        place = dict(re.findall(r'([\w-]+)="([^"]*)"', attributes))
        width = DIGIT * len(text)
        start = float(place["x"]) - width * {"end": 1.0, "middle": 0.5}.get(
            place.get("text-anchor", ""), 0.0
        )
        assert 0 <= start <= start + width <= 360, text
        if text and place["y"] == "182":  # below the axis
            below.append((start, start + width))
    assert all(before[1] <= after[0] for before, after in pairwise(sorted(below)))
