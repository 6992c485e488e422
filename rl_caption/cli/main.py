"""Command line: the only file that knows the parser library.

``python -m rl_caption NAME --config FILE --section.key value``: a YAML file, then overrides.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from rl_caption.ablation.config import AblateConfig
from rl_caption.cli.arguments import Chain, data_overrides, odd_word, switched_on, value_at, with_lists
from rl_caption.cli.names import MODULES, SUMMARIES
from rl_caption.cli.yaml_files import ConfigFileError, load, read_mapping
from rl_caption.config.ranges import wrong_values
from rl_caption.config.schema import EvaluateConfig, ScstConfig, XeConfig
from rl_caption.errors import ConfigError
from rl_caption.meta_evaluation.config import JudgeSetConfig
from rl_caption.reward_models.config import RewardModelConfig
from rl_caption.trl.config import GrpoVlmConfig

logger = logging.getLogger(__name__)
Config = TypeVar("Config")


class UsageError(SystemExit):
    """The command line cannot be understood; ends the program with code 2 and a message."""

    def __init__(self, message: str) -> None:
        print(f"error: {message}", file=sys.stderr)
        super().__init__(2)


def parse(kind: type[Config], arguments: Sequence[str], program: str) -> Config:
    """Read a configuration from ``--config FILE`` and overrides, and check it.

    The file comes first and there is one of it: an override placed before ``--config`` would be lost silently, and a
    second file would replace whole dictionaries.

    Raises:
        UsageError: a file that is no configuration, a key that does not exist, or a value of another type.
        ConfigError: a value is null or out of its range, or does not fit another.
    """
    from rl_caption.config.checks import check

    config = read(kind, arguments, program)
    try:
        check(config)
    except ConfigError as error:
        raise ConfigError(f"{_file_of(arguments) or program}: {error}") from error
    return config


def read(kind: type[Config], arguments: Sequence[str], program: str) -> Config:
    """As ``parse``, but what one value says about another is not checked."""
    from argparse import ArgumentError

    arguments = switched_on(arguments, "--report")
    _refuse_odd_words(arguments)
    file, words = _file_of(arguments), list(arguments)
    parser: Any = _parser(kind)  # type: ignore[arg-type]  # a class is hashable
    parser.prog = program
    try:
        if file is not None:
            values = read_mapping(file)
            _refuse_values(values, kind, file)
            words = [f"--config={json.dumps(values, ensure_ascii=False)}", *words[1 if "=" in words[0] else 2 :]]
        namespace = parser.parse_args(_with_whole_dictionaries(kind, parser, words))
    except (ArgumentError, ConfigFileError, OSError) as error:
        path = re.sub(r"Group '(\S+)' does not accept option '(\S+)'", r"Option '\1.\2' is not accepted", str(error))
        place = program if file is None else f"--config {file}"
        raise UsageError(f"{place}: {path}; {program} --help lists every key") from error
    _refuse_values(namespace, kind, file or program)
    instance = parser.instantiate(namespace)
    return kind(**{name: getattr(instance, name) for name in kind.__dataclass_fields__})  # type: ignore[attr-defined]


@cache
def _parser(kind: type[Any]) -> Any:
    """The parser of a configuration class; making it takes longer than parsing."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(description=(kind.__doc__ or "").split("\n")[0], exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below")
    parser.add_class_arguments(kind, None, as_group=False)
    return parser


def _file_of(arguments: Sequence[str]) -> str | None:
    """The file of ``--config``."""
    places = [index for index, word in enumerate(arguments) if word == "--config" or word.startswith("--config=")]
    if len(places) > 1:
        raise UsageError("--config is given twice: one file, then overrides such as --train.lr 1e-5")
    if not places:
        return None
    if places[0] != 0:
        raise UsageError(f"--config must come first: {arguments[0]} before it would be lost")
    if arguments[0] == "--config" and len(arguments) < 2:
        raise UsageError("--config names no file")
    return arguments[0].partition("=")[2] if "=" in arguments[0] else arguments[1]


def _refuse_odd_words(arguments: Sequence[str]) -> None:
    wrong = odd_word(arguments)
    if wrong is not None:
        raise UsageError(wrong)


def _refuse_values(values: Any, kind: type[Any], place: str) -> None:
    wrong = list(wrong_values(values, kind))
    if wrong:
        raise ConfigError(f"{place}: {'; '.join(wrong)}")


def _with_whole_dictionaries(kind: type[Any], parser: Any, arguments: Sequence[str]) -> list[str]:
    """Replace ``--SECTION.kwargs.KEY VALUE`` by all of ``SECTION.kwargs``.

    The parser reaches into no dictionary inside another, and it does not tell apart the number 1 and the text "1" that
    a dictionary holds already.
    """
    rest: list[str] = []
    given: list[tuple[list[str], list[str], str]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        parts = option[2:].split(".") if option.startswith("--") else []
        depth = _dictionary_depth(kind, parts)
        if depth is None or depth == len(parts):
            rest.append(word)
        elif not (equals or words):
            raise UsageError(f"{word} has no value")
        else:
            given.append((parts[:depth], parts[depth:], value if equals else words.pop(0)))
    if not given:
        return rest
    before = parser.parse_args(rest)
    whole: dict[str, dict[str, Any]] = {}
    for place, keys, text in given:
        inner = whole.setdefault(".".join(place), deepcopy(value_at(before, place) or {}))
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = _argument(text)
    return [*rest, *(f"--{place}={json.dumps(values)}" for place, values in whole.items())]


def _argument(text: str) -> Any:
    """A word as YAML; as it is where that is text, too, or no YAML: ``a # b`` is no comment here."""
    try:
        value = load(text)
    except ConfigFileError:
        return text
    return text if isinstance(value, str) else value


def _dictionary_depth(kind: Any, parts: Sequence[str]) -> int | None:
    """How many of ``parts``, a dotted key of ``kind``, lead to a dictionary of free arguments (``kwargs``)."""
    for depth, part in enumerate(parts, 1):
        inner = get_type_hints(kind).get(part) if is_dataclass(kind) else (get_args(kind) or (None,))[-1]
        kind = get_args(inner)[0] if NoneType in get_args(inner) else inner  # X | None
        if kind is dict:
            return depth
    return None


def _chain(kind: type[Any], arguments: Sequence[str], program: str) -> Chain:
    rest, overrides = data_overrides(arguments)
    return Chain(read(kind, rest, program) if overrides else None, overrides)


def _parse_earlier(kind: type[Config], file: str, program: str, chain: Chain) -> Config:
    """The configuration of a run before a run."""
    arguments = ["--config", file]
    return parse(kind, [*arguments, *chain.overrides_of(file, read(kind, arguments, program))], program)


def _say(chain: Chain) -> None:
    if str(chain) and os.environ.get("RANK", "0") == "0":
        logger.info("%s", chain)


def xe(arguments: Sequence[str]) -> int:
    """Train a captioner by cross-entropy."""
    config = parse(XeConfig, arguments, "train_xe.py")
    from rl_caption.training.programs import train_xe
    from rl_caption.training.setup import leave_process_group

    train_xe(config)
    leave_process_group()
    return 0


def scst(arguments: Sequence[str]) -> int:
    """Fine-tune a captioner by self-critical sequence training."""
    config = parse(ScstConfig, arguments, "scst.py")
    from rl_caption.training.programs import check_images_early, check_weights_early, train_scst, train_xe
    from rl_caption.training.run_folder import is_complete
    from rl_caption.training.setup import leave_process_group

    stage, chain = None, _chain(ScstConfig, arguments, "scst.py")
    if config.warm_start is not None:
        stage = _parse_earlier(XeConfig, config.warm_start, "train_xe.py", chain)
        if is_complete(Path(stage.run.dir)):
            _warn_of_changes(stage)
            stage = None
    _check_start(config, stage)
    models = _reward_models_to_train(config.reward_models, chain)
    _say(chain)
    if stage is not None or models:
        check_weights_early(config, [model.run.dir for model in models])
        check_images_early(config)
    if stage is not None:
        train_xe(stage)
    stopped = stage is not None and not is_complete(Path(stage.run.dir))  # by SIGTERM
    if not stopped and _reward_models_trained(models):
        train_scst(config)
    leave_process_group()
    return 0


def _check_start(config: ScstConfig, stage: XeConfig | None) -> None:
    """Check that ``stage``, a run to come, makes the captioner that a self-critical run starts from."""
    if stage is not None:
        init = config.model.init
        if init is None or not (
            Path(init).exists() or Path(init).resolve().is_relative_to(Path(stage.run.dir).resolve())
        ):
            raise ConfigError(
                f"model.init is {init!r}, but {config.warm_start} makes {stage.run.dir}/export/best: name that"
            )


def reward_model(arguments: Sequence[str]) -> int:
    """Train a model that scores captions, after those that it starts from."""
    config = parse(RewardModelConfig, arguments, "train_reward_model.py")
    from rl_caption.reward_models.program import train_reward_model
    from rl_caption.training.setup import leave_process_group

    chain = _chain(RewardModelConfig, arguments, "train_reward_model.py")
    models = _reward_models_to_train(config.warm_start, chain, config)
    _say(chain)
    if _reward_models_trained(models):
        train_reward_model(config)
    leave_process_group()
    return 0


def _reward_models_to_train(
    paths: Sequence[str], chain: Chain, last: RewardModelConfig | None = None
) -> list[RewardModelConfig]:
    """The reward models of ``paths`` that are not there yet, after those that they start from.

    All of them, and ``last``, which comes after them, are checked before any is trained.
    """
    from rl_caption.reward_models.checks import check_config, check_inputs

    missing: dict[Path, RewardModelConfig] = {}
    complete: dict[Path, RewardModelConfig] = {}
    _collect(paths, (), chain, missing, complete)
    for stage in complete.values():
        _warn_of_changes(stage)
    to_train = [*missing.values()]
    for stage in to_train:
        try:
            check_config(stage)
        except ConfigError as error:
            raise ConfigError(f"the run {stage.run.dir}, which comes first: {error}") from error
    if last is not None:
        check_config(last)
    check_inputs(to_train if last is None else [*to_train, last], [*complete.values()])
    return to_train


def _collect(
    paths: Sequence[str],
    above: tuple[str, ...],
    chain: Chain,
    missing: dict[Path, RewardModelConfig],
    complete: dict[Path, RewardModelConfig],
) -> None:
    """Sort the runs of ``paths``, and those before them, by whether they are complete; in order of training."""
    from rl_caption.training.run_folder import is_complete

    for path in paths:
        if path in above:
            raise UsageError(f"warm_start goes round in a circle: {' -> '.join((*above, path))}")
        stage = _parse_earlier(RewardModelConfig, path, "train_reward_model.py", chain)
        folder = Path(stage.run.dir).resolve()
        if is_complete(folder):
            complete[folder] = stage
        else:
            _collect(stage.warm_start, (*above, path), chain, missing, complete)
            missing.setdefault(folder, stage)


def _reward_models_trained(stages: Sequence[RewardModelConfig]) -> bool:
    """Train the models one after the other; False if stopped by SIGTERM."""
    from rl_caption.reward_models.program import train_reward_model
    from rl_caption.training.run_folder import is_complete

    for stage in stages:
        train_reward_model(stage)
        if not is_complete(Path(stage.run.dir)):
            return False
    return True


def _warn_of_changes(stage: XeConfig | RewardModelConfig) -> None:
    """Say where a complete run, which is used as it is, was made by another configuration; from the main process."""
    from rl_caption.training.run_folder import changed_keys

    folder = Path(stage.run.dir)
    changed = changed_keys(folder / "config.yaml", stage)
    if changed and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "WARNING: the model in %s is used as it is, although it was made by another configuration: %s. Remove the "
            "folder, and it is made anew",
            folder,
            "; ".join(changed),
        )


def evaluate(arguments: Sequence[str]) -> int:
    """Judge captions of a split or of a file."""
    config = parse(EvaluateConfig, with_lists(arguments, "--compare"), "evaluate.py")
    from rl_caption.cli.evaluate import compare_systems, evaluate_split

    print(compare_systems(config) if config.compare else evaluate_split(config))
    return 0


def judge(arguments: Sequence[str]) -> int:
    """Judge metrics by how well they agree with human judgements of captions."""
    config = parse(JudgeSetConfig, arguments, "judge.py")
    from rl_caption.meta_evaluation.program import compare_with_people

    print(compare_with_people(config))
    return 0


def grpo_vlm(arguments: Sequence[str]) -> int:
    """Fine-tune a vision-language model with TRL."""
    config = parse(GrpoVlmConfig, arguments, "grpo_vlm.py")
    from rl_caption.training.setup import leave_process_group
    from rl_caption.trl.program import fine_tune

    table = fine_tune(config)
    if table:
        print(table)
    leave_process_group()
    return 0


def ablate(arguments: Sequence[str]) -> int:
    """Train a grid of self-critical runs from one starting checkpoint and compare them."""
    config = parse(AblateConfig, arguments, "ablate.py")
    from rl_caption.ablation.runner import run_ablation

    return run_ablation(config, parse)


PROGRAMS = {program.__name__: program for program in (xe, scst, reward_model, evaluate, judge, ablate, grpo_vlm)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``NAME ARGUMENTS...``; expected errors end with one clear message and code 1."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print("usage: python -m rl_caption NAME ...\n")
        print("\n".join(f"  {name:<16} {summary}" for name, summary in SUMMARIES.items()))
        print("\npython -m rl_caption NAME --help describes each.")
        return 0 if words else 2
    name, rest = words[0], words[1:]
    if name not in SUMMARIES:
        raise UsageError(f"{name!r} is not one of {', '.join(SUMMARIES)}")
    return run(name, rest)


class _LogLines(logging.Handler):
    """Prints messages to standard error, whatever that is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


@contextmanager
def log_lines() -> Iterator[None]:
    """Inside the ``with``, the package's own log lines (level INFO and above) are printed to standard error."""
    handler = _LogLines()
    # At the root: a library that logs there would otherwise put up a handler of its own, and every line come twice.
    logging.getLogger().addHandler(handler)
    for package in ("rl_caption", "rewards"):
        logging.getLogger(package).setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def find_own_modules() -> None:
    """Let ``target: my_rewards:Brevity`` find ``my_rewards.py`` in the working directory.

    The folder of the scripts, which Python puts first, is taken off the path: its ``evaluate.py`` would hide a package.
    """
    folder = Path(sys.argv[0]).resolve().parent
    if sys.path and Path(sys.path[0] or ".").resolve() == folder and (folder / "scst.py").is_file():
        del sys.path[0]
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one program; errors that a user can mend are printed without a traceback."""
    from rl_caption.errors import user_errors

    find_own_modules()
    with log_lines(), user_errors():
        if name in PROGRAMS:
            from rl_caption.launch import die_with_launcher

            die_with_launcher()
            return PROGRAMS[name](arguments)
        _refuse_odd_words(arguments)
        module: Any = importlib.import_module(MODULES[name])
        return module.main(list(arguments))
