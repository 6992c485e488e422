"""A shared model is complete, loads where it is said to, and its card has the numbers of its run and no others."""

import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from transformers import GenerationConfig

from rl_caption.captioners.config import Decoding
from rl_caption.captioners.loading import load_captioner, weights_hash
from rl_caption.cli.caption import caption_files
from rl_caption.cli.main import run
from rl_caption.lab.share import main
from tests.captioners_for_tests import tiny_captioner
from tests.clip_for_tests import noise_image, tiny_student
from tests.hf_models_for_tests import PROMPT, save_model, tiny_hf_captioner
from tests.report_for_tests import EVIDENCE, write_evaluation, write_run

INTERVALS = {
    "intervals": {"CIDEr": [1.125, 1.375]},
    "interval": "95 % bootstrap over images, 1000 resamples",
}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A finished run that chose step 10 of 20 and had an alarm at 20, with a captioner from scratch."""
    reward = {
        "terms": {
            "cider": {"weight": 0.5},
            "ref_clipscore": {"weight": 0.5, "schedule": [[0, 0.0], [20, 1.0]]},
        }
    }
    model = {"init": "/home/somebody/runs/start"}
    folder = write_run(tmp_path / "run", reward=reward, model=model, rollout={"max_new_tokens": 24})
    captioner = tiny_captioner()
    captioner.save_pretrained(captioner.policy, folder / "export" / "best")
    return folder


def shared(path: Path, out: Path, *words: str) -> tuple[ModelCard, str]:
    """The card that ``share`` writes, and its text."""
    assert main([str(path), "--out", str(out), *words]) == 0
    return ModelCard.load(out / "README.md"), (out / "README.md").read_text()


def record(evaluation: Path, **source: Any) -> Path:
    """Note in the settings of an evaluation whose captions it is of."""
    settings = json.loads((evaluation / "settings.json").read_text())
    (evaluation / "settings.json").write_text(json.dumps(settings | source))
    return evaluation


def refusal(arguments: list[str], capsys: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        run("share", arguments)
    assert ended.value.code == 1
    return str(capsys.readouterr().err)


def test_a_card_has_what_run_and_evaluation_say(trained: Path, tmp_path: Path) -> None:
    judged = write_evaluation(
        tmp_path / "evaluation", 1.25, **INTERVALS, decoding="greedy, at most 24 tokens"
    )
    record(judged, weights=weights_hash(trained / "export" / "best"))
    card, text = shared(
        trained, tmp_path / "out", "--evaluation", str(judged), "--license", "apache-2.0"
    )
    results = {
        result.metric_type: (result.metric_name, result.metric_value)
        for result in card.data.eval_results
    }
    assert results == {
        "cider": ("CIDEr (x100)", 125.0),
        "bleu": ("BLEU-4 (x100)", 31.25),
        "L-CLIPS": ("L-CLIPS", 0.625),
    }
    assert {(result.dataset_name, result.dataset_split) for result in card.data.eval_results} == {
        ("scenes", "test")
    }
    assert (card.data.library_name, card.data.pipeline_tag, card.data.license) == (
        "rl-caption", "image-to-text", "apache-2.0",
    )  # fmt: skip
    assert card.data.datasets == ["scenes"]
    assert card.data.metrics == ["cider", "bleu"]
    assert card.data.base_model is None, "the start is no model on the hub"
    for part in (
        "| CIDEr (x100) | 125.00 | 112.50 to 137.50 |",
        "| BLEU-4 (x100) | 31.25 | – |",
        "95 % bootstrap over images, 1000 resamples",
        "SPICE was not computed: no <b>jar</b>",
        "step 10, the best validation by `val/cider`",
        "| reward signature | `SIG+x` |",
        "0.5 cider + 0.5 ref_clipscore; the weight of ref_clipscore is multiplied by 0 at step 0, 1 at step 20",
        "| CIDEr-D (x100) | 125 | 175 |",
        "Decoding: greedy, at most 24 tokens.",
        f"at 1 of 3 validations: steps 20. The reward had risen and the captions had got worse.\n- step 20: {EVIDENCE}",
        "- cider: Vedantam, Zitnick and Parikh",
        "- ref_clipscore: Hessel et al.",
        "Rennie et al.",
    ):
        assert part in text
    assert "somebody" not in text, "absolute paths stay at home"
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert copied == {path.name for path in (trained / "export" / "best").iterdir()} | {"README.md"}
    assert "lclip" not in text
    assert "not known here" not in text


def test_an_evaluation_that_does_not_say_whose_captions_it_is_of_gives_no_results_of_the_model(
    trained, tmp_path
):
    old = write_evaluation(tmp_path / "old", 1.25)
    card, text = shared(trained, tmp_path / "out", "--evaluation", str(old))
    assert card.data.eval_results is None
    assert card.data.metrics is None
    assert "Whose captions these are is not known here" in text
    assert "| CIDEr (x100) | 125.00 |" in text


def test_what_is_missing_is_said(trained: Path, tmp_path: Path) -> None:
    (trained / "metrics.jsonl").unlink()
    (trained / "result.json").unlink()
    (trained / "env.json").write_text("{}")
    card, text = shared(trained / "export" / "best", tmp_path / "out")
    assert card.data.eval_results is None
    for part in (
        "No evaluation was given: there are no test scores.",
        "the run was not finished",
        "which step it is of was not recorded",
        "Nothing is known of it: the run has no record of the monitor.",
        "| software | not recorded |",
        "No licence was named",
    ):
        assert part in text
    alone = tmp_path / "alone"
    (trained / "export" / "best").rename(alone)
    _, text = shared(alone, tmp_path / "more")
    assert "how this model was trained is not known here" in text
    assert not re.search("## (Reward hacking|Training|Citation)", text)


def test_models_of_transformers_load_by_the_lines_of_their_card_without_this_package(
    tmp_path, monkeypatch, capsys
):
    noise_image(1).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    for family, prompt in (("blip", ""), ("git", ""), ("vit_gpt2", ""), ("blip2", PROMPT)):
        captioner = tiny_hf_captioner(family, tmp_path / family, prompt)
        captioner.save_pretrained(captioner.policy, tmp_path / f"{family}-export")
        folder = tmp_path / f"{family}-shared"
        card, text = shared(tmp_path / f"{family}-export", folder)
        assert card.data.library_name == "transformers"
        (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        captions = caption_files(
            [str(folder)], [tmp_path / "photo.jpg"], Decoding(max_new_tokens=24)
        )
        expected = prompt + "".join(captions.texts().values())
        capsys.readouterr()
        with monkeypatch.context() as hidden:
            for module in ["rl_caption", "rewards", *sys.modules]:
                if module.partition(".")[0] in ("rl_caption", "rewards"):
                    hidden.setitem(sys.modules, module, None)  # importing it is an error
            exec(compile(code.replace("FOLDER", str(folder)), "README.md", "exec"), {})
        # Without spaces: this package joins the parts of "man's", and has them single.
        assert "".join(capsys.readouterr().out.split()) == "".join(expected.split())


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        ("florence2", "<DETAILED_CAPTION>"),
        ("paligemma", "caption en"),
        ("qwen2_5_vl", "a photo of"),
        (
            "smolvlm",
            [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "describe"}, {"type": "image"}],
                }
            ],
        ),
    ],
)
def test_vision_language_models_answer_their_prompt_by_the_lines_of_their_card(
    family, prompt, tmp_path, monkeypatch, capsys
):
    noise_image(1).save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    captioner = load_captioner(save_model(family, tmp_path / "start"), prompt=prompt)
    captioner.save_pretrained(captioner.policy, tmp_path / "export")
    # ``generate`` follows the model's settings, this package does not.
    settings = GenerationConfig.from_pretrained(tmp_path / "export")
    suppressed = sorted({*captioner.forbidden} - {settings.forced_bos_token_id})
    settings.update(do_sample=False, top_k=50, repetition_penalty=1.0, no_repeat_ngram_size=0)
    settings.update(suppress_tokens=suppressed, eos_token_id=captioner.eos_token_id)
    settings.save_pretrained(tmp_path / "export")
    card, text = shared(tmp_path / "export", tmp_path / "shared")
    assert card.data.pipeline_tag == (
        "image-to-text" if family == "florence2" else "image-text-to-text"
    )
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    length = (
        22 if family == "florence2" else 24
    )  # ``generate`` counts the two tokens that its captions start with
    (expected,) = (
        caption_files(["shared"], [Path("photo.jpg")], Decoding(max_new_tokens=length))
        .texts()
        .values()
    )
    capsys.readouterr()
    exec(compile(code.replace("FOLDER", "shared"), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if family == "paligemma":
        printed = printed.removeprefix(prompt)
    assert "".join(printed.split()) == "".join(expected.split()) != ""


def test_the_folder_is_uploaded(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    api, sent = Mock(), set[str]()
    api.create_repo.return_value = "https://huggingface.co/somebody/captioner"
    api.upload_folder.side_effect = lambda folder_path, **_: sent.update(
        path.name for path in folder_path.iterdir()
    )
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    assert run("share", [str(trained), "--repo_id", "somebody/captioner", "--private"]) == 0
    api.create_repo.assert_called_once_with("somebody/captioner", private=True, exist_ok=True)
    assert api.upload_folder.call_args.kwargs["repo_id"] == "somebody/captioner"
    assert {"README.md", "config.json", "model.safetensors"} <= sent
    assert capsys.readouterr().out == "https://huggingface.co/somebody/captioner\n"


def test_a_reward_model_says_how_it_scores(tmp_path: Path) -> None:
    for name, file, content, library, parts in (
        (
            "student",
            "config.json",
            {"model_type": "l_clip"},
            "rl-caption",
            ('build("l_clipscore", backbone=', "2507.08710"),
        ),
        (
            "tower",
            "config.json",
            {"model_type": "l_clip_text"},
            "rl-caption",
            ("text tower of an L-CLIP", "distill_dual"),
        ),
        (
            "open_clip",
            "open_clip_config.json",
            {"model_cfg": {}},
            "open_clip",
            (
                'create_model_from_pretrained("local-dir:FOLDER")',
                'build("clipscore", prefix="", backbone=',
            ),
        ),
    ):
        export = tmp_path / name
        export.mkdir()
        (export / "model.safetensors").write_bytes(b"")
        (export / file).write_text(json.dumps(content))
        card, text = shared(export, tmp_path / f"{name}-shared")
        assert (card.data.library_name, card.data.tags) == (
            library,
            ["rl-caption", "image-caption-scoring"],
        )
        assert all(part in text for part in parts)
        assert "test scores" not in text


def test_nothing_is_copied_where_something_is_missing(
    trained: Path, tmp_path: Path, capsys: Any
) -> None:
    export, out = trained / "export" / "best", tmp_path / "out"
    other = record(write_evaluation(tmp_path / "evaluation", 1.0), weights="0123456789")
    members = [weights_hash(export), "0123456789"]
    ensemble = record(write_evaluation(tmp_path / "ensemble", 1.0), weights=members)
    file = record(write_evaluation(tmp_path / "file", 1.0), predictions="abcdef")
    (tmp_path / "empty").mkdir()
    tiny_student(tmp_path / "student")
    for arguments, part in (
        ([str(trained)], "neither --out FOLDER nor --repo_id USER/NAME"),
        ([str(tmp_path / "empty"), "--out", str(out)], "empty has neither export/best"),
        (
            [str(trained), "--out", str(tmp_path / "evaluation")],
            "exists and is not an empty folder",
        ),
        (
            [str(trained), "--out", str(out), "--evaluation", str(other)],
            f"the weights of {export} are {weights_hash(export)[:8]}",
        ),
        (
            [str(trained), "--out", str(out), "--evaluation", str(ensemble)],
            "an ensemble of 2 models",
        ),
        (
            [str(trained), "--out", str(out), "--evaluation", str(file)],
            "captions in a file (SHA-256 abcdef)",
        ),
        (
            [str(tmp_path / "student"), "--out", str(out), "--evaluation", str(other)],
            "student is not a captioner",
        ),
        ([str(trained), "--out", str(out), "--repo_id", "captioner"], "expected USER/NAME"),
    ):
        assert part in refusal(arguments, capsys)
    (export / "model.safetensors").unlink()
    assert "no weights" in refusal([str(trained), "--out", str(out)], capsys)
    assert not out.exists()


def test_a_full_disk_leaves_no_half_of_a_model(
    trained: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(ModelCard, "save", Mock(side_effect=OSError(28, "No space left on device")))
    before = sorted(path.name for path in tmp_path.iterdir())
    message = refusal([str(trained), "--out", str(tmp_path / "out")], capsys)
    assert "No space left" in message
    assert str(tmp_path / "out") in message
    assert sorted(path.name for path in tmp_path.iterdir()) == before
