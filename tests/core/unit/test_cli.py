"""The command line: what is refused before anything is loaded, and overrides that arrive."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl_caption import __version__
from rl_caption.cli.configuration import parse, with_lists
from rl_caption.cli.main import main, run_program
from rl_caption.cli.programs import PROGRAMS
from rl_caption.config.evaluation import EvaluateConfig
from rl_caption.config.schema import JudgeConfig, RewardTerm, ScstConfig
from rl_caption.lab.config import CurateConfig, Selection
from rl_caption.programs.ablation.config import AblateConfig, AlphaConfig
from rl_caption.runtime.errors import ConfigError

FILE = """
reward:
  terms:
    cider: {weight: 0.5}
    rouge_l: {weight: 0.5, kwargs: {beta: 1.2, more: null}}
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
    overrides = [
        "--train.lr",
        "1e-5",
        "--run.resume",
        "false",
        "--reward.terms.cider.weight",
        "0.3",
    ]
    arguments = ["--reward.terms.rouge_l.kwargs.beta", "1e-1", "--reward.terms.cider.kwargs.n=3"]
    arguments += ["--reward.terms.rouge_l.kwargs.more.key", "a"]
    config = parse(ScstConfig, ["--config", file, *overrides, *arguments], "scst.py")
    assert config.train.lr == 1e-5
    assert config.train.betas == (0.9, 0.98)
    assert config.train.advantage == "leave_one_out", "defaults stay"
    assert config.run.resume is False
    assert {name: (term.weight, term.kwargs) for name, term in config.reward.terms.items()} == {
        "cider": (0.3, {"n": 3}),
        "rouge_l": (0.5, {"beta": 0.1, "more": {"key": "a"}}),
    }


def test_no_in_yaml_is_a_precision(tmp_path: Path) -> None:
    """YAML 1.1 reads it as false."""
    (tmp_path / "a.yaml").write_text("train: {mixed_precision: no}\n")
    assert (
        parse(ScstConfig, ["--config", str(tmp_path / "a.yaml")], "scst.py").train.mixed_precision
        == "no"
    )


def test_a_key_that_is_set_twice_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.yaml").write_text("train:\n  lr: 1.0e-4\n  seed: 1\n  lr: 2.0e-4\n")
    message = refused(ScstConfig, ["--config", str(tmp_path / "a.yaml")], capsys)
    assert "line 4: train.lr" in message


def test_a_term_without_options_has_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("reward: {terms: {cider: {}, bleu: {}}}\n")
    for arguments in (
        ["--config", str(tmp_path / "a.yaml")],
        ["--reward.terms={cider: {}, bleu: {}}"],
    ):
        terms = parse(ScstConfig, arguments, "scst.py").reward.terms
        assert terms == {"cider": RewardTerm(), "bleu": RewardTerm()}
    grid = ["--alpha={values: [0, 1], terms: {bleu: {}}, against: {cider: {}}}"]
    alpha = parse(AblateConfig, ["--base=demo", *grid], "ablate.py").alpha
    assert alpha == AlphaConfig([0, 1], {"bleu": RewardTerm()}, {"cider": RewardTerm()})


def test_items_on_the_command_line_take_no_options_from_the_file(file: str, tmp_path: Path) -> None:
    for words in (["--reward.terms={rouge_l: {}}"], ["--reward.terms", "{rouge_l: {}}"]):
        assert parse(ScstConfig, ["--config", file, *words], "scst.py").reward.terms == {
            "rouge_l": RewardTerm()
        }
    (tmp_path / "c.yaml").write_text("data: {path: D}\nselect: [{score: clip, top: 0.5}]")
    words = ["--config", str(tmp_path / "c.yaml"), "--select", "[{score: clip, min: 0.2}]"]
    assert parse(CurateConfig, words, "curate.py").select == [Selection("clip", min=0.2)]


def test_a_bare_switch_is_true_and_words_after_an_option_are_its_list() -> None:
    for arguments, report in (
        (["--report", "--out", "x"], True),
        (["--report", "false"], False),
        (["--report"], True),
    ):
        assert parse(EvaluateConfig, arguments, "evaluate.py").report is report
    assert with_lists(["--a", "--compare", "x", "y", "--b"], "--compare") == [
        "--a",
        '--compare=["x", "y"]',
        "--b",
    ]
    assert with_lists(["--compare=[x]"], "--compare") == ["--compare=[x]"]
    assert with_lists(["--compare=null"], "--compare") == ["--compare=null"]
    assert with_lists(["--trust=x:Y", "--a"], "--trust") == ['--trust=["x:Y"]', "--a"]


@pytest.mark.parametrize(
    ("words", "key", "owner"),
    [
        (
            ["xe", "--model.init", "a", "--model.kwargs.d_model", "3"],
            "model.kwargs",
            "random weights",
        ),
        (
            ["reward_model", "--task", "contrastive", "--loss.alpha", "2"],
            "loss.alpha",
            "specificity",
        ),
        (["evaluate", "--predictions", "p.json", "--model", "a"], "model", "captioner"),
    ],
)
def test_a_key_of_another_alternative_is_told_with_what_it_is_for(
    words, key, owner, capsys
) -> None:
    with pytest.raises(SystemExit):
        run_program(words[0], words[1:])
    assert f" {key} " in (message := capsys.readouterr().err)
    assert owner in message


def test_judges_are_named_on_the_command_line(tmp_path: Path) -> None:
    judges = "judges: {L-CLIPS: {target: l_clipscore, kwargs: {backbone: a, prefix: 'It shows '}}}"
    (tmp_path / "e.yaml").write_text(judges)
    more = [
        "--judges.L-CLIPS.kwargs.backbone",
        "b # c",
        "--judges.l_clipscore.kwargs.backbone",
        "d",
    ]
    config = parse(EvaluateConfig, ["--config", str(tmp_path / "e.yaml"), *more], "evaluate.py")
    assert config.judges == {
        "L-CLIPS": JudgeConfig("l_clipscore", {"backbone": "b # c", "prefix": "It shows "}),
        "l_clipscore": JudgeConfig(None, {"backbone": "d"}),
    }


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--reward.terms={cider: {wieght: 1}}"], "wieght"),
        (["--reward.terms.cider.kwargs.n"], "--reward.terms.cider.kwargs.n"),
        (["--reward.terms.cider.kwarg.n", "3"], "reward.terms.cider.kwargs"),
        (["--config", "F", "--reward.terms.rouge_l.kwargs.beta.x", "3"], "kwargs.beta"),
        (["--train.lr", "1", "--config", "F"], "--config"),
        (["--config", "F", "--config", "F"], "--config"),
        (["--config", "F", "--train.lrr", "1"], "train.lrr"),
        (["--config", "F", "--train.batch", "8"], "train.batch_size"),
        (["--config", "F", "--train.max_stesp", "8"], "train.max_steps"),
        (["--config", "F", "--max_stesp", "8"], "train.max_steps"),
        (["--train.learning_rate=8"], "train.lr"),
        (["--lr", "8"], "train.lr"),
        (["--train.every", "8"], "eval.every"),
        (["--reward.terms.cider.weigth", "3"], "reward.terms.cider.weight"),
        (["--confg", "F"], "confg"),
        (["--train.foo", "8"], "train.foo"),
        (["--train.grad_clip_norm", "abc"], "train.grad_clip_norm"),
        (["--train.threads=1.5"], "train.threads"),
        (["--train.betas", "3"], "train.betas"),
        (["--model.lora", "3"], "model.lora"),
        (["--reward.terms", "3"], "reward.terms"),
        (["--reward.terms.cider", "abc"], "reward.terms.cider"),
        (["--reward.terms.cider.schedule", "[[1, 2], [3]]"], "reward.terms.cider.schedule"),
        (["--warm_start", "null"], "warm_start"),
        (["--config", "/nowhere/a.yaml"], "/nowhere/a.yaml"),
    ],
)
def test_what_cannot_be_understood_is_named(
    file: str, arguments: list[str], part: str, capsys: Any
) -> None:
    message = refused(ScstConfig, [word.replace("F", file) for word in arguments], capsys)
    assert part in message
    assert "Union" not in message
    assert "class" not in message


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("trsut", "[]", "trust"),
        ("train.max_stesp", "1", "train.max_steps"),
        ("max_stesp", "1", "train.max_steps"),
        ("tain", "1", "train"),
    ],
)
def test_a_reward_model_names_the_key_that_is_wrong(
    key: str, value: str, named: str, capsys: Any
) -> None:
    arguments = ["--config", "reward_models/demo_lclip", f"--{key}", value]
    with pytest.raises(SystemExit):
        run_program("reward_model", arguments)
    message = capsys.readouterr().err
    assert key in message
    assert re.search(
        rf"\b{named}\b", message.partition("there is no key")[2].partition(key)[2] or message
    )
    assert "Union" not in message
    assert value != "null" or "[]" in message or named != key, "what an empty list is"


def test_a_reward_whose_weights_are_all_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="cider, bleu"):
        parse(ScstConfig, ["--reward.terms={cider: {weight: 0}, bleu: {weight: 0}}"], "scst.py")


@pytest.mark.parametrize("arguments", [["--help"], ["configs", "list"]])
def test_a_reader_that_has_gone_ends_a_program_without_a_message(arguments: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "rl_caption", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()  # type: ignore[union-attr]
        assert process.stderr.read() == b""  # type: ignore[union-attr]
        assert process.wait() == 128 + signal.SIGPIPE


@pytest.mark.parametrize("words", [["doctor"], ["xe", "--config", "demo_xe"], ["report", "x"]])
def test_a_working_directory_that_was_removed_is_said(
    words: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code != 0
    assert "working directory" in capsys.readouterr().err


def test_programs_are_listed(capsys: Any) -> None:
    assert main(["--help"]) == 0
    assert "self-critical" in capsys.readouterr().out
    assert main([]) == 2
    output = capsys.readouterr().out
    assert all(f"  {name} " in output for name in PROGRAMS)
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == 2
    assert "'train' is not one of run, xe, scst" in capsys.readouterr().err
    for name, near in (
        ("scstt", "scst"),
        ("train_xe", "xe"),
        ("train_reward_model.py", "reward_model"),
    ):
        with pytest.raises(SystemExit):
            main([name])
        assert f"did you mean {near}?" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split()[-1] == __version__


def test_a_variable_that_changes_numbers_ends_what_computes_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    with pytest.raises(SystemExit) as ended:
        main(["score", "--reward", "rouge_l", "--captions", "captions.json"])
    assert ended.value.code == 1
    assert "ONEDNN_DEFAULT_FPMATH_MODE" in capsys.readouterr().err
    assert main(["configs", "list"]) == 0
