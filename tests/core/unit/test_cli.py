"""The command line: what is refused before anything is loaded, and overrides that arrive."""

import signal
import subprocess
import sys

import pytest

from rl_caption import __version__
from rl_caption.cli.configuration import (
    merged_values,
    parse,
    read_mapping,
    split_words,
)
from rl_caption.cli.main import main
from rl_caption.cli.programs import PROGRAMS
from rl_caption.config.commands import CaptionConfig, EvaluateConfig
from rl_caption.config.schema import ScstConfig, XeConfig
from rl_caption.runtime.errors import ConfigError

FILE = """
reward:
  terms:
    cider: {weight: 0.5}
    rouge_l: {weight: 0.5, kwargs: {beta: 1.2, more: null}}
train: {lr: 1.0e-3, betas: [0.9, 0.98]}
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "a.yaml").write_text(FILE)
    return str(tmp_path / "a.yaml")


def refused(kind, arguments):
    with pytest.raises(ConfigError) as error:
        parse(kind, arguments, "scst.py")
    return str(error.value)


def test_a_file_and_overrides(file):
    overrides = [
        "--train.lr",
        "1e-5",
        "--run.resume",
        "false",
        "--reward.terms.cider.weight",
        "0.3",
    ]
    arguments = [
        "--reward.terms.rouge_l.kwargs.beta",
        "1e-1",
        "--reward.terms.cider.kwargs.n=3",
    ]
    arguments += ["--reward.terms.rouge_l.kwargs.more.key", "a"]
    config = parse(ScstConfig, ["--config", file, *overrides, *arguments], "scst.py")
    assert config.train.lr == 1e-5
    assert config.train.betas == (0.9, 0.98)
    assert config.train.advantage == "leave_one_out", "defaults stay"
    assert config.run.resume is False
    assert {
        name: (term.weight, term.kwargs) for name, term in config.reward.terms.items()
    } == {
        "cider": (0.3, {"n": 3}),
        "rouge_l": (0.5, {"beta": 0.1, "more": {"key": "a"}}),
    }


def test_bare_switches_lists_and_positional_words():
    words = ["--metrics", "x", "y", "--report", "--trust", "a:B"]
    evaluate = parse(EvaluateConfig, words, "evaluate.py")
    found = (evaluate.metrics, evaluate.report, evaluate.trust)
    assert found == (["x", "y"], True, ["a:B"])
    assert parse(EvaluateConfig, ["--report", "false"], "evaluate.py").report is False
    words = ["--model", "m", "a.jpg", "--with_greedy", "photos", "--num_samples", "2"]
    caption = parse(CaptionConfig, [*words, "--candidates", "c"], "caption")
    assert caption.photos == ["a.jpg", "photos"]
    assert (caption.model, caption.num_samples) == ("m", 2)


MISTAKES = [
    (["--train.lrr", "1"], "train.lrr", "train.lr"),
    (["--train.learning_rate=8"], "train.learning_rate", "train.lr"),
    (["--num_generations", "8"], "num_generations", "rollout.num_samples"),
    (
        ["--reward.terms.cider.weigth", "3"],
        "reward.terms.cider.weigth",
        "terms.NAME.weight",
    ),
    (["--reward.terms={cider: {wieght: 1}}"], "reward.terms.cider.wieght", "weight"),
    (["--train.lr", "fast"], "train.lr", "'fast'"),
    (["--train.lr", ".nan"], "train.lr", "nan"),
    (["--train.schedule", "cosin"], "train.schedule", "'cosine'"),
    (["--model.prompt", "a"], "model.prompt", "saved"),
    (
        ["--reward.terms.cider.schedule", "[[1, 2], [3]]"],
        "reward.terms.cider.schedule[1]",
        "",
    ),
    (["--rollout.num_samples", "1"], "rollout.num_samples", "leave_one_out"),
    (
        ["--train.advantage_kwargs.size", "3"],
        "train.advantage_kwargs.size",
        "leave_one_out",
    ),
    (["--config", "/nowhere/a.yaml"], "/nowhere/a.yaml", ""),
    (["--config", "dmo"], "'dmo'", "the nearest are demo"),
    (["--config", "own"], "own", "rl-caption run own"),
    (["train.lr", "1"], "train.lr", "--"),
    (["--train.batch_size", "0"], "train.batch_size is 0", "more than 0"),
    (["--data", "{format: scenes, path: d}"], "data.path", "'d'"),
    (
        ["--data", "{format: scenes, kwargs: {image_size: 4}}"],
        "data.kwargs.image_size is 4",
        "at least 16",
    ),
    (
        ["--rollout.num_samples=1", "--train.objective=risk", "--train.advantage=none"],
        "rollout.num_samples is 1",
        "train.objective risk",
    ),
    (
        ["--train.updates_per_rollout", "2"],
        "train.updates_per_rollout is 2",
        "ppo_clip",
    ),
    (["--rollout.temperature", "1e-9"], "rollout.temperature is 1e-09", "0.000001"),
    (["--reward.terms", "{cider: {weight: 0}}"], "reward.terms cider", "weight 0"),
]


@pytest.mark.parametrize(("arguments", "key", "named"), MISTAKES)
def test_a_mistake_is_answered_by_its_key_and_what_would_be_right(
    file, arguments, key, named
):
    try:
        message = refused(ScstConfig, [word.replace("F", file) for word in arguments])
    except FileNotFoundError as error:
        message = str(error)
    assert key in message
    assert named in message
    assert "Union" not in message
    assert "Config" not in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train:\n  lr: 1\n  lr: 2\n", "line 3: lr is set twice"),
        ("[1, 2]", "[1, 2]"),
        ("", "None"),
        ("a: [{b: 1, b: 2}]", "b is set twice"),
        ("train: !!python/tuple [1]", "line 1"),
        ("train: [", "YAML"),
        ("1: 2", "line 1"),
    ],
)
def test_what_is_no_configuration_is_named(text, part, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    message = refused(ScstConfig, ["--config", str(tmp_path / "a.yaml")])
    assert part in message
    assert "a.yaml" in message


def test_scalars_are_those_of_yaml_1_2(tmp_path):
    text = "[1e-4, 1.5, -3, no, yes, true, 2024-01-01, 1:30, null, .inf, 1_000, 0x1f, '1', 1.]"
    (tmp_path / "a.yaml").write_text(f"a: {text}")
    found = read_mapping(tmp_path / "a.yaml")["a"]
    assert found == [
        *(1e-4, 1.5, -3, "no", "yes", True, "2024-01-01", "1:30", None, float("inf")),
        *(1000, "0x1f", "1", 1.0),
    ]


BASE = """
model: {min_count: 2, kwargs: {d_model: 16}}
data: {format: scenes, kwargs: {num_train: 9}}
reward: {normalize: per_term, terms: {cider: {weight: 0.5, kwargs: {n: 3}}}}
train: {lr: 0.1, epochs: 2, grad_clip_norm: 3}
monitor: {judges: {bleu: {}}}
"""


@pytest.mark.parametrize(
    ("child", "words", "changes"),
    [
        ("train: {lr: 0.2}", [], {"train.lr": 0.2}),
        ("train: {lr: null}", [], {"train.lr": ...}),
        ("train: {grad_clip_norm: null}", [], {"train.grad_clip_norm": None}),
        ("monitor: null", [], {"monitor": ...}),
        ("reward: {terms: {bleu: {}}}", [], {"reward.terms": {"bleu": {}}}),
        (
            "reward: {terms: {}}",
            ["--reward.terms.bleu.weight", "1"],
            {"reward.terms": {"bleu": {"weight": 1}}},
        ),
        ("{}", ["--reward.terms.cider.weight", "1"], {"reward.terms.cider.weight": 1}),
        (
            "{}",
            ["--reward.terms.bleu.weight", "1"],
            {"reward.terms.bleu": {"weight": 1}},
        ),
        ("{}", ["--reward.terms.cider", "null"], {"reward.terms": {}}),
        (
            "{}",
            ["--reward.terms.cider.target", "bleu"],
            {"reward.terms.cider": {"weight": 0.5, "target": "bleu"}},
        ),
        ("model: {init: a}", [], {"model": {"init": "a"}}),
        ("{}", ["--model.init", "a"], {"model": {"init": "a"}}),
        ("model: {kwargs: {d_model: 8}}", [], {"model.kwargs": {"d_model": 8}}),
        (
            "data: {format: jsonl, path: a}",
            [],
            {"data": {"format": "jsonl", "path": "a"}},
        ),
        ("{}", ["--data.kwargs.num_train", "5"], {"data.kwargs.num_train": 5}),
        ("{}", ["--data.path", "b # c"], {"data.path": "b # c"}),
        (
            "{}",
            [
                "--reward.terms",
                "{cider: {weight: 1}}",
                "--reward.terms.cider.weight",
                "0.3",
            ],
            {"reward.terms": {"cider": {"weight": 0.3}}},
        ),
    ],
)
def test_files_and_words_are_merged(child, words, changes, tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "own.yaml").write_text(
        f"base: base.yaml\n{child}" if child != "{}" else "base: base.yaml"
    )
    expected = read_mapping(tmp_path / "base.yaml")
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = expected
        for name in sections:
            section = section.setdefault(name, {})
        if value is ...:
            del section[last]
        else:
            section[last] = value
    options = split_words(ScstConfig, words)
    assert merged_values(ScstConfig, tmp_path / "own.yaml", options) == expected


def test_several_base_files_are_read_left_to_right(tmp_path):
    (tmp_path / "a.yaml").write_text("train: {lr: 0.1, seed: 1}")
    (tmp_path / "b.yaml").write_text("train: {lr: 0.2}")
    (tmp_path / "own.yaml").write_text(
        "base: [demo_xe, a.yaml, b.yaml]\ntrain: {epochs: 3}"
    )
    values = merged_values(XeConfig, tmp_path / "own.yaml")
    assert values["data"] == merged_values(XeConfig, "demo_xe")["data"]
    train = values["train"]
    assert (train["lr"], train["seed"], train["epochs"]) == (0.2, 1, 3)


def test_help_and_print_config(file, capsys, tmp_path):
    with pytest.raises(SystemExit):
        parse(ScstConfig, ["--help"], "scst")
    text = capsys.readouterr().out
    assert "--train.lr  number > 0 = 5e-06" in text
    with pytest.raises(SystemExit):
        parse(ScstConfig, ["--help", "rollout"], "scst")
    assert "--rollout.temperature" in (text := capsys.readouterr().out)
    assert "--train.lr" not in text
    with pytest.raises(SystemExit):
        parse(ScstConfig, ["--config", file, "--print_config"], "scst")
    (tmp_path / "b.yaml").write_text(capsys.readouterr().out)
    again = parse(ScstConfig, ["--config", str(tmp_path / "b.yaml")], "scst")
    assert again == parse(ScstConfig, ["--config", file], "scst")


def test_a_reader_that_has_gone_ends_a_program_without_a_message():
    with subprocess.Popen(
        [sys.executable, "-m", "rl_caption", "configs", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()  # type: ignore[union-attr]
        assert process.stderr.read() == b""  # type: ignore[union-attr]
        assert process.wait() == 128 + signal.SIGPIPE


def test_programs_are_listed(capsys):
    assert main(["--help"]) == 0
    assert "self-critical" in capsys.readouterr().out
    assert main([]) == 2
    output = capsys.readouterr().out
    assert all(f"  {name} " in output for name in PROGRAMS)
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == 2
    assert "'train' is not one of run, xe, scst" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["scstt"])
    assert "did you mean scst?" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split()[-1] == __version__
