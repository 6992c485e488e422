"""Malformed configurations: each is refused by one message that names the key, or read as it is written."""

import json
import math
import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

from rl_caption.cli.configuration import parse
from rl_caption.config.evaluation import EvaluateConfig
from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.config.schema import ScstConfig, XeConfig
from rl_caption.integrations.trl.config import GrpoVlmConfig
from rl_caption.lab.meta_evaluation.config import JudgeSetConfig
from rl_caption.programs.ablation.config import AblateConfig
from rl_caption.runtime.errors import ConfigError

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SHIPPED: dict[type[Any], str | None] = {
    XeConfig: "scenes_xe.yaml",
    ScstConfig: "scenes_scst_watched.yaml",
    RewardModelConfig: "reward_models/scenes_lclip.yaml",
    EvaluateConfig: "coco_evaluate.yaml",
    AblateConfig: "ablate_alpha.yaml",
    GrpoVlmConfig: "trl/grpo_vlm.yaml",
    JudgeSetConfig: None,
}
ODD: list[Any] = [
    [], [[]], {}, {"a": 1}, [None], "text", "", "1e5", "no", "null", "a\0b", "\ud800", "../..", True, False,
    0, -1, 1, 1.5, -0.0, 1e-300, 10**12, 2**63, 10**30, math.nan, math.inf, -math.inf,
]  # fmt: skip
"""What a key is set to, in place of a value that it could have."""
Words = tuple[Any, ...]


def shipped(kind: type[Any]) -> dict[str, Any]:
    name = SHIPPED[kind]
    return {"set": "scenes"} if name is None else yaml.safe_load((CONFIGS / name).read_text())


def keys_of(kind: Any) -> Iterator[tuple[Words, Any]]:
    """Every key of a configuration class, sections included, and its annotation."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        yield (name,), hint
        inner = next((option for option in (hint, *get_args(hint)) if is_dataclass(option)), None)
        if isinstance(inner, type) and get_origin(hint) is not dict:
            yield from (((name, *rest), annotation) for rest, annotation in keys_of(inner))


def changed(tree: dict[str, Any], key: Words, value: Any) -> dict[str, Any]:
    tree = deepcopy(tree)
    inner = tree
    for part in key[:-1]:
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    inner[key[-1]] = value
    return tree


def written(tree: Any) -> str:
    return yaml.safe_dump(tree, sort_keys=False)


def outcome(kind: type[Any], arguments: list[str], capsys: Any) -> tuple[Any, str]:
    """The configuration, or None and the message by which it was refused."""
    code: Any
    try:
        return parse(kind, arguments, "test"), ""
    except SystemExit as ended:
        code, message = ended.code, capsys.readouterr().err
    except ConfigError as error:  # the programs print it and end with 1
        code, message = 1, f"error: {error}"
    assert code in (1, 2)
    assert message.count("error:") == 1
    assert len(message) < 1500
    return None, message


def outcome_of_file(
    kind: type[Any], content: str | bytes, folder: Path, capsys: Any
) -> tuple[Any, str]:
    file = folder / "odd.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    config, message = outcome(kind, ["--config", str(file)], capsys)
    assert config is not None or str(file) in message
    return config, message.replace(str(folder), "")


def holds(config: Any, key: Words, value: Any) -> bool:
    """Whether the configuration has exactly this value at ``key``; a number in quotes may be the number."""
    found = asdict(config)
    for part in key:
        found = found[part]
    if isinstance(value, dict) and isinstance(found, dict):
        return value.items() <= found.items() or not value
    if isinstance(value, str) and not isinstance(found, str | list):
        value = yaml.safe_load(value) if value != "1e5" else 1e5
    found = list(found) if isinstance(found, tuple) else found
    return bool(found == value) and isinstance(found, bool) == isinstance(value, bool)


def takes_null(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.__name__)
def test_null_is_legal_or_refused_by_name(kind: type[Any], tmp_path: Path, capsys: Any) -> None:
    grid = {"base": "x", "cells": {"a": {"terms": {"cider": {}}}}}
    rest = {JudgeSetConfig: {"set": "scenes"}, AblateConfig: grid}.get(kind, {})
    for key, hint in keys_of(kind):
        config, message = outcome_of_file(kind, written(changed(rest, key, None)), tmp_path, capsys)
        assert (
            (".".join(key) in message)
            if config is None
            else takes_null(hint) and holds(config, key, None)
        ), key
        assert takes_null(hint) == ("is null" not in message), (key, message)


@pytest.mark.parametrize("kind", SHIPPED, ids=lambda kind: kind.__name__)
def test_odd_values_are_refused_by_name_or_taken_as_they_are(
    kind: type[Any], tmp_path: Path, capsys: Any
) -> None:
    draws = random.Random(kind.__name__)
    keys = [key for key, _ in keys_of(kind)]
    for key in draws.choices(keys, k=20):
        value = draws.choice(ODD)
        config, message = outcome_of_file(
            kind, written(changed(shipped(kind), key, value)), tmp_path, capsys
        )
        chooses = (
            key[-1] in ("init", "name", "task") and "there is no key" in message
        )  # keys of the other alternative
        assert key[-1] in message or chooses if config is None else holds(config, key, value), (
            key,
            value,
            message,
        )


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "empty"),
        ("train: [", "YAML"),
        ("a: 1\n---\nb: 2", "document"),
        ("data: {kwargs: {a: *nowhere}}", "nowhere"),
        ("train:\n  lr: 1.0e-4\n  seed: 1\n  lr: 2.0e-4", "line 4: train.lr"),
        ("run: {dir: a\0b}", "YAML"),
        (b"run: {dir: a\xffb}", "UTF-8"),
        (b"\xff\xfe" + "run: {dir: a}".encode("utf-16-le"), "UTF-8"),
        ("train: {null: 2}", "train"),
        ("? [a]\n: 2", "key"),
        ("run: {dir: !!python/object/apply:os.getcwd []}", "tag"),
        ("x" * 2**21, "MiB"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_files_that_are_no_configuration_are_refused(content, part, tmp_path, capsys):
    config, message = outcome_of_file(ScstConfig, content, tmp_path, capsys)
    assert config is None
    assert part in message


@pytest.mark.parametrize("name", ["nowhere.yaml", ".", "a\0b.yaml"])
def test_files_that_cannot_be_read_are_named(name: str, tmp_path: Path, capsys: Any) -> None:
    config, message = outcome(XeConfig, ["--config", str(tmp_path / name)], capsys)
    assert config is None
    assert str(tmp_path) in message


@pytest.mark.parametrize(
    "word",
    [
        *(
            f"--train.{word}"
            for word in ("lr=nan", "lr=", "seed=1.5", "seed=true", "batch_size=null")
        ),
        *("--train=null", "--train=[1]", "--train", "--train.lr", "--run.dir=a\0b"),
        *("--data.kwargs=[1]", "--data.kwargs.a", "--data.kwargs=null"),
    ],
    ids=lambda word: repr(word)[:30],
)
def test_odd_words_are_refused_by_name(word: str, capsys: Any) -> None:
    config, message = outcome(XeConfig, [word], capsys)
    assert config is None
    assert word.partition("=")[0].lstrip("-") in message


def test_text_stays_text(tmp_path: Path, capsys: Any) -> None:
    given = {
        "a": "1e5",
        "b": "no",
        "c": "null",
        "d": "[1",
        "e": ["7"],
        "f": {"g": "true"},
        "h": 7,
        "i": None,
    }
    config, _ = outcome_of_file(
        XeConfig, json.dumps({"model": {"kwargs": given}}), tmp_path, capsys
    )
    assert config.model.kwargs == given
