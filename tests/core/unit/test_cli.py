"""The command line: what is refused before anything is loaded, and overrides that arrive."""

import signal
import subprocess
import sys

import pytest

from rl_caption.cli.configuration import (
    merged_values,
    parse,
    read_mapping,
    split_words,
)
from rl_caption.cli.main import run
from rl_caption.config.commands import CaptionConfig, EvaluateConfig
from rl_caption.config.schema import ScstConfig, XeConfig

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


def test_a_file_and_overrides(file):
    words = ["--train.lr", "1e-5", "--run.resume", "false"]
    words += ["--reward.terms.cider.weight", "0.3"]
    words += ["--reward.terms.rouge_l.kwargs.beta", "1e-1"]
    words += ["--reward.terms.cider.kwargs.n=3"]
    words += ["--reward.terms.rouge_l.kwargs.more.key", "a"]
    config = parse(ScstConfig, ["--config", file, *words], "scst")
    assert config.train.lr == 1e-5
    assert config.train.betas == (0.9, 0.98)
    assert config.train.advantage == "leave_one_out", "defaults stay"
    assert config.run.resume is False
    cider, rouge = config.reward.terms.values()
    assert (cider.weight, cider.kwargs) == (0.3, {"n": 3})
    assert (rouge.weight, rouge.kwargs) == (0.5, {"beta": 0.1, "more": {"key": "a"}})


def test_bare_switches_lists_and_positional_words():
    words = ["--metrics", "x", "y", "--report", "--trust", "a:B"]
    found = parse(EvaluateConfig, words, "evaluate")
    assert (found.metrics, found.report, found.trust) == (["x", "y"], True, ["a:B"])
    assert parse(EvaluateConfig, ["--report", "false"], "evaluate").report is False
    words = ["--model", "m", "a.jpg", "--with_greedy", "photos", "--num_samples", "2"]
    caption = parse(CaptionConfig, [*words, "--candidates", "c"], "caption")
    assert caption.photos == ["a.jpg", "photos"]
    assert (caption.model, caption.num_samples) == ("m", 2)


MISTAKES = """
--train.lrr 1                                | there is no key train.lrr: did you mean train.lr?
--learning_rate=8                            | there is no key learning_rate: did you mean train.lr?
--num_generations 8                          | num_generations: did you mean rollout.num_samples?
--reward.terms.cider.weigth 3                | cider.weigth: did you mean reward.terms.NAME.weight?
--reward.terms={cider: {wieght: 1}}          | did you mean reward.terms.NAME.weight?
--reward.terms {cider: {weight: 0}}          | reward.terms cider
--reward.terms.cider.schedule [[1, 2], [3]]  | reward.terms.cider.schedule[1]
--train.lr fast                              | train.lr is 'fast': expected a valid number
--train.lr 1e-4x                             | train.lr is '1e-4x'
--train.lr .nan                              | train.lr is nan
--train.schedule cosin                       | train.schedule is 'cosin': expected 'constant'
--train.batch_size 0                         | train.batch_size is 0: expected more than 0
--train.batch_size 1.5                       | train.batch_size is 1.5: expected a valid integer
--rollout.temperature 1e-9                   | rollout.temperature is 1e-09: expected at least 0.000001
--model.prompt a                             | there is no key model.prompt here: it is for A saved
--data {format: scenes, path: d}             | data.format scenes takes num_train, num_val, num_test
--data {format: scenes, kwargs: {image_size: 4}} | data.kwargs.image_size is 4: expected at least 16
--data.format karpaty                        | data.format is 'karpaty' (did you mean karpathy?)
--train.advantage leave_two_out              | train.advantage is 'leave_two_out' (did you mean
--train.advantage_kwargs.size 3              | train.advantage_kwargs: leave_one_out takes no options: got
--train.updates_per_rollout 2                | train.updates_per_rollout is 2
--rollout.num_samples 1                      | rollout.num_samples is 1: leave_one_out
--rollout.num_samples=1 --train.objective=risk --train.advantage=none | is 1: risk
--reward.terms.cidr.weight 1                 | reward.terms.cidr: reward is 'cidr' (did you mean cider
--monitor.best_by cidr                       | monitor.best_by is 'cidr'
--config /nowhere/a.yaml                     | '/nowhere/a.yaml' is neither a file nor a recipe
--config dmo                                 | 'dmo' is neither a file nor a recipe of the package: the nearest is demo
--config lclip_dual                          | the nearest is reward_models/lclip_dual
--config own                                 | it is for another program: rl-caption run own
--config demo_xe                             | it is for another program: rl-caption xe --config demo_xe
train.lr 1                                   | 'train.lr' is not an option: expected --section.key
--model.init /nowhere/export/best --data.format scenes | model.init: '/nowhere/export/best' is not there
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_a_mistake_is_answered_by_its_key_and_what_would_be_right(line, capsys):
    """What newcomers get wrong: key and value stand in the one line of the error."""
    arguments, message = (part.strip() for part in line.split(" | "))
    words = []
    for word in arguments.split(" "):
        inside = words and not word.startswith("--") and words[-1][-1:] in ":,"
        words[-1:] = [f"{words[-1]} {word}"] if inside else [*words[-1:], word]
    with pytest.raises(SystemExit, match="1"):
        run("scst", words)
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert message in printed
    assert printed.count("\n") == 1
    assert "Config" not in printed


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("train:\n  lr: 1\n  lr: 2\n", "line 3: lr is set twice"),
        ("a: [{b: 1, b: 2}]", "b is set twice"),
        ("[1, 2]", "[1, 2]"),
        ("", "None"),
        ("train: !!python/tuple [1]", "line 1"),
        ("train: [", "YAML"),
        ("1: 2", "no key 1: did"),
        ("base: basis.yaml", "'basis.yaml' is neither a file nor a recipe"),
    ],
)
def test_what_is_no_configuration_is_named(text, part, tmp_path, capsys):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(SystemExit, match="1"):
        run("scst", ["--config", str(tmp_path / "a.yaml")])
    assert part in capsys.readouterr().err


def test_scalars_are_those_of_yaml_1_2(tmp_path):
    scalars = {
        "1e-4": 1e-4,
        "1.5": 1.5,
        "-3": -3,
        "no": "no",
        "true": True,
        "2024-01-01": "2024-01-01",
        "1:30": "1:30",
        "null": None,
        ".inf": float("inf"),
        "1_000": 1000,
        "0x1f": "0x1f",
        "'1'": "1",
        "1.": 1.0,
    }
    (tmp_path / "a.yaml").write_text(f"a: [{', '.join(scalars)}]")
    found = read_mapping(tmp_path / "a.yaml")["a"]
    assert found == [*scalars.values()]


BASE = """
model: {min_count: 2, kwargs: {d_model: 16}}
data: {format: scenes, kwargs: {num_train: 9}}
reward: {normalize: per_term, terms: {cider: {weight: 0.5, kwargs: {n: 3}}}}
train: {lr: 0.1, epochs: 2, grad_clip_norm: 3, advantage_kwargs: {a: 1}}
"""
TERMS = "--reward.terms"
GONE = ...


@pytest.mark.parametrize(
    ("child", "words", "key", "value"),
    [
        ("train: {lr: 0.2}", [], "train.lr", 0.2),
        ("train: {lr: null}", [], "train.lr", GONE),
        ("train: {grad_clip_norm: null}", [], "train.grad_clip_norm", None),
        ("reward: {terms: {bleu: {}}}", [], "reward.terms", {"bleu": {}}),
        ("", [f"{TERMS}.cider.weight", "1"], "reward.terms.cider.weight", 1),
        ("", [f"{TERMS}.bleu.weight", "1"], "reward.terms.bleu", {"weight": 1}),
        ("", [TERMS, "{bleu: {}}"], "reward.terms", {"bleu": {}}),
        ("", [f"{TERMS}.cider", "null"], "reward.terms", {}),
        (
            "",
            [f"{TERMS}.cider.target", "bleu"],
            "reward.terms.cider",
            {"weight": 0.5, "target": "bleu"},
        ),
        (
            "",
            [TERMS, "{cider: {weight: 1}}", f"{TERMS}.cider.weight", "0.3"],
            "reward.terms",
            {"cider": {"weight": 0.3}},
        ),
        ("model: {init: a}", [], "model", {"init": "a"}),
        ("", ["--model.init", "a"], "model", {"init": "a"}),
        ("data: {format: jsonl}", [], "data", {"format": "jsonl"}),
        ("", ["--data", "{format: jsonl}"], "data", {"format": "jsonl"}),
        ("", ["--data.path", "b # c"], "data.path", "b # c"),
        ("train: {advantage_kwargs: {a: 2}}", [], "train.advantage_kwargs.a", 2),
    ],
)
def test_files_and_words_are_merged(child, words, key, value, tmp_path):
    (tmp_path / "base.yaml").write_text(BASE)
    own = f"base: base.yaml\n{child}"
    (tmp_path / "own.yaml").write_text(own)
    expected = read_mapping(tmp_path / "base.yaml")
    *sections, last = key.split(".")
    section = expected
    for name in sections:
        section = section.setdefault(name, {})
    if value is GONE:
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


def printed_by(words, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse(ScstConfig, words, "scst")
    return capsys.readouterr().out


def test_help_and_print_config(file, capsys, tmp_path):
    text = printed_by(["--help"], capsys)
    assert "--train.lr  number > 0 = 5e-06" in text
    assert "Peak learning rate of Adam." in text
    text = printed_by(["--help", "rollout"], capsys)
    assert "--rollout.temperature" in text
    assert "--train.lr" not in text
    text = printed_by(["--config", file, "--print_config"], capsys)
    (tmp_path / "b.yaml").write_text(text)
    again = parse(ScstConfig, ["--config", str(tmp_path / "b.yaml")], "scst")
    assert again == parse(ScstConfig, ["--config", file], "scst")


def test_a_mistyped_program_is_answered_by_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        run("scts", [])
    assert "did you mean scst?" in capsys.readouterr().err


def test_a_reader_that_has_gone_ends_a_program_without_a_message():
    with subprocess.Popen(
        [sys.executable, "-m", "rl_caption", "configs", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 128 + signal.SIGPIPE
