"""A shared model is complete, and its card has the numbers of its run and evaluation."""

from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from rewards.files import load_json
from rl_caption.captioners.loading import weights_hash
from rl_caption.cli.main import run, run_program
from rl_caption.data.files import write_json
from rl_caption.training.checkpoint import seal
from tests.captioners_for_tests import tiny_captioner
from tests.clip_for_tests import tiny_student
from tests.report_for_tests import EVIDENCE, write_evaluation, write_run

INTERVALS = {
    "intervals": {"CIDEr": [1.125, 1.375]},
    "interval": "95 % bootstrap over images, 1000 resamples",
}


@pytest.fixture
def trained(tmp_path):
    """A finished run that chose step 10 of 20 and had an alarm at 20, with a captioner
    from scratch.
    """
    reward = {"terms": {"cider": {"weight": 0.5}, "ref_clipscore": {"weight": 0.5}}}
    model = {"init": "/home/somebody/runs/start"}
    folder = write_run(tmp_path / "run", reward=reward, model=model)
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, folder / "export" / "best")
    return folder


def shared(path, out, *words):
    """The card that ``share`` writes, and its text."""
    assert run_program("share", [str(path), "--out", str(out), *words]) == str(out)
    return ModelCard.load(out / "README.md"), (out / "README.md").read_text()


def judged(folder, weights, **more):
    """An evaluation of the captions of a model."""
    write_evaluation(folder, 1.25, **more)
    settings = load_json(folder / "settings.json")
    write_json(folder / "settings.json", settings | {"weights": weights})
    return str(folder)


def test_a_card_has_what_run_and_evaluation_say(trained, tmp_path):
    export = trained / "export" / "best"
    more = INTERVALS | {"decoding": "greedy, at most 24 tokens"}
    evaluation = judged(tmp_path / "evaluation", weights_hash(export), **more)
    words = ["--evaluation", evaluation, "--license", "apache-2.0"]
    card, text = shared(trained, tmp_path / "out", *words)
    assert (card.data.library_name, card.data.license) == ("rl-caption", "apache-2.0")
    assert card.data.base_model is None, "the start is no model on the hub"
    for part in (
        "[112.50, 137.50]",
        "step 10, the best validation by `val/cider`",
        "- signature: `SIG+x`",
        "- reward: 0.5 cider + 0.5 ref_clipscore",
        f"an alarm at steps 20: the reward had risen and the captions had got worse.\n- {EVIDENCE}",
    ):
        assert part in text, part
    assert "somebody" not in text, "absolute paths stay at home"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md",
        *(path.name for path in export.iterdir()),
    }


def test_what_is_missing_is_said(trained, tmp_path):
    (trained / "result.json").unlink()
    _, text = shared(trained / "export" / "best", tmp_path / "out")
    assert "there are no test scores" in text
    assert "the run was not finished" in text
    alone = (trained / "export" / "best").rename(tmp_path / "alone")
    assert "## Training" not in shared(alone, tmp_path / "more")[1]


def test_reward_models_say_how_they_score(tmp_path):
    tiny_student(tmp_path / "student")
    card, text = shared(tmp_path / "student", tmp_path / "shared")
    assert card.data.tags == ["rl-caption", "image-caption-scoring"]
    assert 'build("l_clipscore", backbone="FOLDER")' in text
    assert "test scores" not in text


def test_the_folder_is_uploaded(trained, monkeypatch, capsys):
    api = Mock()
    api.create_repo.return_value = "https://huggingface.co/somebody/captioner"
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    words = ["--repo_id=somebody/captioner", "--private", f"--out={trained}/shared"]
    assert run("share", [str(trained), *words]) == 0
    options = {"private": True, "exist_ok": True}
    api.create_repo.assert_called_once_with("somebody/captioner", **options)
    sent = api.upload_folder.call_args.kwargs["folder_path"]
    assert {"README.md", "config.json"} <= {path.name for path in sent.iterdir()}
    assert capsys.readouterr().out == "https://huggingface.co/somebody/captioner\n"


def test_nothing_is_copied_where_something_is_wrong(trained, tmp_path, capsys):
    export, out = trained / "export" / "best", tmp_path / "out"
    wrong = ["--evaluation", judged(tmp_path / "other", "0123456789")]
    (tmp_path / "empty").mkdir()
    for arguments, part in (
        ([str(tmp_path / "empty")], "empty"),
        ([str(trained), *wrong], "not of the weights"),
    ):
        with pytest.raises(SystemExit):
            run("share", [*arguments, "--out", str(out)])
        assert part in capsys.readouterr().err
    seal(export)
    (export / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        run("share", [str(trained), "--out", str(out)])
    assert "has changed since it was written" in capsys.readouterr().err
    assert not out.exists()
