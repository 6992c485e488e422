"""Photos captioned side by side: captions, scores, what cannot be read, and the page in Gradio."""

import re
from html import unescape
from pathlib import Path

import pytest
from PIL import Image

from rewards.text.degeneration import Repetition
from rewards.text.rouge import RougeL
from rl_caption.captioners.config import Decoding
from rl_caption.cli.main import run
from rl_caption.config.schema import JudgeConfig
from rl_caption.lab.config import WebConfig
from rl_caption.lab.web import SideBySide, build_page, launch_options, load_models
from rl_caption.training.validation import decode_candidates
from tests.captioners_for_tests import tiny_captioner

NAMES = ["first", "<img src=x>"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(NAMES):
        captioner = tiny_captioner(seed)
        captioner.save_pretrained(captioner.policy, place / name / "export" / "best")
    return [str(place / name / "export" / "best") for name in NAMES]


@pytest.fixture(scope="module")
def models(paths: list[str]) -> SideBySide:
    judges = {"ROUGE": JudgeConfig(target="rouge_l"), "repetition": JudgeConfig()}
    return load_models(WebConfig(models=paths, judges=judges))


@pytest.fixture
def photos(tmp_path: Path) -> list[str]:
    for name, colour in (("red.png", (200, 30, 30)), ("blue.png", (30, 30, 200))):
        Image.new("RGB", (16, 16), colour).save(tmp_path / name)
    return [str(tmp_path / name) for name in ("red.png", "blue.png")]


def test_captions_and_scores_are_those_of_captioners_and_rewards(
    models: SideBySide, photos: list[str]
) -> None:
    page = models.page(photos, "a red square\n\nred")
    found = re.findall(r"<dt>(.*?)</dt>\n<dd><span>(.*?)</span>\n<small>(.*?)</small>", page, re.S)
    assert [unescape(name) for name, _, _ in found] == NAMES * 2
    for seed, name in enumerate(NAMES):
        captioner = tiny_captioner(seed)
        row = {"image_id": "x", "image": Image.open(photos[0]), "references": []}
        decoded = decode_candidates(
            captioner, captioner.policy, [row], Decoding(), models.accelerator
        )
        caption = decoded["x"][0].caption
        shown = {
            re.sub("<.*?>", "", text): scores for of, text, scores in found if unescape(of) == name
        }
        assert caption in shown
        rouge = RougeL()([""], [caption], references=[["a red square", "red"]])[0]
        repetition = Repetition()([""], [caption])[0]
        assert [float(value) for value in re.findall(r"<b>(.*?)</b>", shown[caption])] == [
            pytest.approx(rouge, abs=5e-4),
            pytest.approx(repetition, abs=5e-4),
        ]
    assert "ROUGE" not in models.page(photos, " \n"), "without references"


def test_a_photo_that_cannot_be_read_is_named_and_the_others_go_on(
    models: SideBySide, photos: list[str], tmp_path: Path
) -> None:
    (tmp_path / "<b>broken.jpg").write_text("no image")
    page = models.page([*photos, str(tmp_path / "<b>broken.jpg")], "")
    assert page.count("<article>") == 2
    assert "&lt;b&gt;broken.jpg" in page
    assert not re.search("<b>broken|<script", page)
    assert str(tmp_path) not in page
    assert "<article>" not in models.page([], "")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "models"),
        (["--judges.cider.weight", "1"], "judges.cider"),
        (["--judges.cider.target", "cider"], "kwargs.df"),
        (["--judges.diversity.target", "diversity"], "judges.diversity"),
    ],
)
def test_what_is_wrong_is_said_before_it_listens(options, named, paths, capsys) -> None:
    pytest.importorskip("gradio")
    with pytest.raises(SystemExit):
        run("web", [*(["--models", paths[0]] if options else []), *options])
    assert named in capsys.readouterr().err


def test_the_page_of_gradio_has_no_place_elsewhere(models: SideBySide) -> None:
    gradio = pytest.importorskip("gradio")
    blocks = build_page(models)
    config = str(blocks.get_config_file())
    assert "References" in config
    assert not blocks.analytics_enabled
    options = launch_options(WebConfig(models=["x"]))
    assert (options["server_name"], options["share"]) == ("127.0.0.1", False)
    assert not re.findall(r"https?://(?!www.w3.org)", options["theme"]._get_theme_css())
    assert options["app_kwargs"]["middleware"][0].kwargs["allowed_hosts"][0] == "127.0.0.1"
    assert launch_options(WebConfig(models=["x"], host="0.0.0.0"))["server_name"] == "0.0.0.0"
    assert gradio.__version__
