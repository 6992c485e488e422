"""The command line: what is refused before anything is loaded, and overrides that arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_caption.cli import SUMMARIES, main, parse
from rl_caption.config import EvaluateConfig, JudgeConfig, ScstConfig, XeConfig

FILE = """
reward:
  terms:
    cider: {weight: 0.5}
    rouge_l: {weight: 0.5, kwargs: {beta: 1.2}}
train: {lr: 1.0e-3, betas: [0.9, 0.98]}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "a.yaml").write_text(FILE)
    return str(tmp_path / "a.yaml")


def refused(kind: type[Any], arguments: list[str], capsys: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(kind, arguments, "scst.py")
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    return message


def test_a_file_and_overrides(file: str) -> None:
    config = parse(ScstConfig, ["--config", file, "--train.lr", "1e-5", "--run.resume", "false"], "scst.py")
    assert config.train.lr == 1e-5
    assert config.train.betas == (0.9, 0.98)
    assert config.train.advantage == "leave_one_out", "defaults stay"
    assert config.run.resume is False
    assert {name: term.weight for name, term in config.reward.terms.items()} == {"cider": 0.5, "rouge_l": 0.5}
    assert config.reward.terms["rouge_l"].kwargs == {"beta": 1.2}


def test_one_term_of_the_reward_can_be_overridden(file: str) -> None:
    config = parse(ScstConfig, ["--config", file, "--reward.terms.cider.weight", "0.3"], "scst.py")
    assert {name: term.weight for name, term in config.reward.terms.items()} == {"cider": 0.3, "rouge_l": 0.5}


def test_one_argument_of_a_term_can_be_overridden(file: str) -> None:
    arguments = ["--reward.terms.rouge_l.kwargs.beta", "1e-1", "--reward.terms.cider.kwargs.n=3", "--train.lr", "0.5"]
    config = parse(ScstConfig, ["--config", file, *arguments], "scst.py")
    assert {name: (term.weight, term.kwargs) for name, term in config.reward.terms.items()} == {
        "cider": (0.5, {"n": 3}),
        "rouge_l": (0.5, {"beta": 0.1}),
    }
    assert config.train.lr == 0.5


def test_judges_are_named_on_the_command_line(tmp_path: Path) -> None:
    judges = "judges: {L-CLIPS: {target: l_clipscore, kwargs: {backbone: a, prefix: 'It shows '}}}"
    (tmp_path / "e.yaml").write_text(judges)
    more = ["--judges.L-CLIPS.kwargs.backbone", "b # c", "--judges.l_clipscore.kwargs.backbone", "d"]
    config = parse(EvaluateConfig, ["--config", str(tmp_path / "e.yaml"), *more], "evaluate.py")
    assert config.judges == {
        "L-CLIPS": JudgeConfig("l_clipscore", {"backbone": "b # c", "prefix": "It shows "}),
        "l_clipscore": JudgeConfig(None, {"backbone": "d"}),
    }


def test_no_file_is_all_defaults() -> None:
    assert parse(XeConfig, [], "train_xe.py") == XeConfig()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--reward.terms.cider.kwargs.n"], "--reward.terms.cider.kwargs.n"),
        (["--reward.terms.cider.kwarg.n", "3"], "kwarg.n"),
        (["--train.lr", "1", "--config", "F"], "--config must come first: --train.lr"),
        (["--config", "F", "--config", "F"], "--config is given twice"),
        (["--config=F", "--config", "F"], "--config is given twice"),
        (["--config", "F", "--train.lrr", "1"], "--train.lrr"),
        (["--config", "F", "--train.advantage", "best"], "leave_one_out"),
        (["--config", "F", "--train.batch_size", "many"], "train.batch_size"),
        (["--config", "/nowhere/a.yaml"], "/nowhere/a.yaml"),
    ],
)
def test_what_cannot_be_understood_is_named(file: str, arguments: list[str], part: str, capsys: Any) -> None:
    assert part in refused(ScstConfig, [word.replace("F", file) for word in arguments], capsys)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train: {learning_rate: 1}", "train.learning_rate"),
        ("trian: {lr: 1}", "trian.lr"),
        ("train: {lr: fast}", "train.lr"),
        ("reward: {terms: {cider: {wieght: 1}}}", "wieght"),
        ("train: [", "a.yaml"),
    ],
)
def test_mistakes_in_the_file_are_named(file: str, text: str, part: str, capsys: Any) -> None:
    Path(file).write_text(text)
    assert part in refused(ScstConfig, ["--config", file], capsys)


def test_programs_are_listed(capsys: Any) -> None:
    assert main(["--help"]) == 0
    assert "self-critical" in capsys.readouterr().out
    assert main([]) == 2
    output = capsys.readouterr().out
    assert all(f"  {name} " in output for name in SUMMARIES)


def test_an_unknown_program_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == 2
    assert "'train' is not one of xe, scst" in capsys.readouterr().err
