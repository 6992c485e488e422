"""Photos captioned side by side: captions, scores, and the page in Gradio."""

import pytest
from accelerate import Accelerator
from PIL import Image

from rewards.text.degeneration import Repetition
from rewards.text.rouge import RougeL
from rl_caption.captioners.config import Decoding
from rl_caption.cli.main import run
from rl_caption.lab.config import WebConfig
from rl_caption.lab.web import build_page, make_table
from rl_caption.monitoring.config import JudgeConfig
from rl_caption.training.validation import decode_candidates
from tests.captioners_for_tests import tiny_captioner

NAMES = ["first", "<img src=x>"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(NAMES):
        captioner = tiny_captioner(seed)
        captioner.save_pretrained(captioner.policy, place / name / "export" / "best")
    return [str(place / name / "export" / "best") for name in NAMES]


@pytest.fixture(scope="module")
def table_of(paths):
    judges = {"ROUGE": JudgeConfig(target="rouge_l"), "repetition": JudgeConfig()}
    return make_table(WebConfig(models=paths, judges=judges))


@pytest.fixture
def photos(tmp_path):
    for name, colour in (("red.png", (200, 30, 30)), ("blue.png", (30, 30, 200))):
        Image.new("RGB", (16, 16), colour).save(tmp_path / name)
    return [str(tmp_path / name) for name in ("red.png", "blue.png")]


def test_captions_and_scores_are_those_of_captioners_and_rewards(table_of, photos):
    table = table_of(photos, "a red square\n\nred")
    names = ["red.png", "blue.png"]
    assert [line[:2] for line in table] == [[p, name] for name in NAMES for p in names]
    row = {
        "image_id": "x",
        "image": Image.open(photos[0]),
        "references": [],
    }
    for seed, line in enumerate(table[::2]):
        captioner = tiny_captioner(seed)
        options = captioner, captioner.policy, [row], Decoding(), Accelerator()
        caption = decode_candidates(*options)["x"][0].caption
        rouge = RougeL()(
            [""],
            [caption],
            references=[["a red square", "red"]],
        )
        assert line[2:] == [caption, *rouge, *Repetition()([""], [caption])]
    assert table_of(photos, " \n")[0][3] is None, "without references"
    assert table_of(None, "") == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--judges.cider.weight", "1"], "judges.cider"),
        (["--judges.c.target", "cider"], "kwargs.df"),
    ],
)
def test_what_is_wrong_is_said_before_it_listens(options, named, paths, capsys):
    pytest.importorskip("gradio")
    with pytest.raises(SystemExit):
        run("web", ["--models", paths[0], *options])
    assert named in capsys.readouterr().err


def test_the_page_of_gradio(table_of):
    pytest.importorskip("gradio")
    page = build_page(WebConfig(), table_of)
    assert "References" in str(page.get_config_file())
    assert not page.analytics_enabled
