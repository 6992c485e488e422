"""Reports in a real browser: no error in its console, the gallery drawn, on a desktop and on a phone."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from rl_caption.programs.report.program import main
from tests.report_for_tests import write_ablation, write_comparison, write_evaluation, write_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = os.environ.get("RL_CAPTION_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        BROWSER is None, reason=f"no browser: none of {', '.join(NAMES)} is on PATH"
    ),
]


def written(folders: list[Path], place: Path, *options: str) -> Path:
    main([*map(str, folders), "--out", str(place / "report.html"), *options])
    return place / "report.html"


def opened(page: Path, *options: str) -> tuple[str, list[str]]:
    """The document after its script ran, and what the browser wrote to its console."""
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={page.parent / 'profile'}",
        "--enable-logging=stderr",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, re.findall(r".*CONSOLE.*", done.stderr)


@pytest.mark.parametrize("kind", ["run", "ablation", "evaluations", "comparison"])
def test_the_page_works_in_a_browser(tmp_path: Path, kind: str) -> None:
    folders = {
        "run": lambda: [write_run(tmp_path / "run")],
        "comparison": lambda: [write_comparison(tmp_path / "pair")],
        "ablation": lambda: [write_ablation(tmp_path / "grid")],
        "evaluations": lambda: [
            write_evaluation(tmp_path / name, 1.0, name) for name in ("red", "blue")
        ],
    }[kind]()
    page = written(folders, tmp_path)
    document, console = opened(page, "--dump-dom", "--window-size=1280,900")
    assert console == []
    assert 'data-ready="true"' in document
    assert document.count("<article") == 24
    assert "24 shown of 30 images" in document
    assert document.count("<img") == 24
    assert '<img src="x"' not in document, "a caption became an element"
    assert document.count("<script") == 1


PROBE = """
const chart = document.querySelector("svg.chart"), form = document.forms[0], seen = [];
const press = (key) => { chart.dispatchEvent(new KeyboardEvent("keydown", { key })); seen.push(legend()); };
const legend = () => [...chart.parentElement.querySelectorAll(".at, .legend b")].map((one) => one.textContent).join();
const enter = (name, value) => { form.elements[name].value = value; form.dispatchEvent(new Event("input")); };
const first = () => seen.push(document.querySelector("article h4").textContent);
for (const key of ["Home", "ArrowRight", "End", "Escape"]) press(key);
enter("order", ""); first();
enter("metric", 1); enter("order", "fall"); first();
enter("text", "SQUARE 29"); first();
document.title = seen.join("|");
"""


def test_charts_are_read_by_keys_and_captions_sorted_and_searched(tmp_path: Path) -> None:
    page = written([write_run(tmp_path / "run")], tmp_path)
    text = re.sub(
        r"<meta http-equiv.*?>", "", page.read_text()
    )  # the page's policy forbids other scripts
    page.write_text(text.replace("</body>", f"<script>{PROBE}</script></body>"))
    document, console = opened(page, "--dump-dom")
    assert console == []
    found = re.findall(r"<title>(.*?)</title>", document)[0].split("|")
    assert found[:2] == ["step 0,0.125 (1),0.5", "step 1,0.125,0.5 (0)"], (
        "samples of step 1, a validation of step 0"
    )
    assert found[2:4] == ["step 20,0.875,0.9688", "step 20,0.8750,0.9688"]
    falls = [
        last - start
        for start, _, last in (json.loads(x)[1] for x in re.findall(r"data-scores='(.*?)'", text))
    ]
    assert found[4:] == ["val-000000", f"val-{falls.index(min(falls)):06d}", "val-000029"]


def test_an_error_of_the_page_would_be_seen(tmp_path: Path) -> None:
    page = written([write_run(tmp_path / "run")], tmp_path)
    page.write_text(
        page.read_text().replace('"use strict";', '"use strict"; throw new Error("seen");')
    )
    document, console = opened(page, "--dump-dom")
    assert 'data-ready="true"' not in document
    assert console, "neither the error nor the refusal of a changed script was written"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (500, True)])
def test_screenshot(tmp_path: Path, width: int, dark: bool) -> None:
    page = written([write_run(tmp_path / "run")], tmp_path)
    shot = tmp_path / "shot.png"
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    _, console = opened(
        page, f"--screenshot={shot}", f"--window-size={width},900", "--hide-scrollbars", scheme
    )
    assert console == []
    with Image.open(shot) as image:
        pixels = image.convert("L")
    paper = pixels.getpixel((2, 2))
    assert isinstance(paper, int)
    assert paper < 40 if dark else paper > 240
    colours = pixels.getcolors(256)
    assert colours is not None
    assert max(count for count, _ in colours) < 0.95 * width * 900, "an empty page"


def test_it_prints(tmp_path: Path) -> None:
    page = written([write_run(tmp_path / "run")], tmp_path)
    pdf = tmp_path / "report.pdf"
    _, console = opened(page, f"--print-to-pdf={pdf}")
    assert console == []
    assert pdf.read_bytes().startswith(b"%PDF")
