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
from pathlib import Path
from typing import Any, TypeVar

from rl_caption.ablation.config import AblateConfig
from rl_caption.command_line import switched_on, with_lists
from rl_caption.config import EvaluateConfig, ScstConfig, XeConfig
from rl_caption.judging.config import JudgeSetConfig
from rl_caption.program_names import MODULES, SUMMARIES
from rl_caption.reward_models.config import RewardModelConfig
from rl_caption.trl_captioning.config import GrpoVlmConfig

logger = logging.getLogger(__name__)
Config = TypeVar("Config")


class UsageError(SystemExit):
    """The command line cannot be understood; ends the program with code 2 and a message."""

    def __init__(self, message: str) -> None:
        print(f"error: {message}", file=sys.stderr)
        super().__init__(2)


def parse(kind: type[Config], arguments: Sequence[str], program: str) -> Config:
    """Read a configuration from ``--config FILE`` and overrides; unknown keys and bad values end the program.

    The file comes first and there is one of it: an override placed before ``--config`` would be lost silently, and a
    second file would replace whole dictionaries.
    """
    from argparse import ArgumentError

    from jsonargparse import ArgumentParser

    arguments = switched_on(arguments, "--report")
    places = [index for index, word in enumerate(arguments) if word == "--config" or word.startswith("--config=")]
    if len(places) > 1:
        raise UsageError("--config is given twice: one file, then overrides such as --train.lr 1e-5")
    if places and places[0] != 0:
        raise UsageError(f"--config must come first: {arguments[0]} before it would be lost")
    parser = ArgumentParser(prog=program, description=(kind.__doc__ or "").split("\n")[0], exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file with any of the keys below")
    parser.add_class_arguments(kind, None, as_group=False)
    try:
        namespace = parser.parse_args(_with_whole_kwargs(parser, arguments))
    except ArgumentError as error:
        path = re.sub(r"Group '(\S+)' does not accept option '(\S+)'", r"Option '\1.\2' is not accepted", str(error))
        raise UsageError(f"{' '.join(arguments[:2])}: {path}; {program} --help lists every key") from error
    instance = parser.instantiate(namespace)
    values = {name: getattr(instance, name) for name in kind.__dataclass_fields__}  # type: ignore[attr-defined]
    return kind(**values)


_ONE_ARGUMENT = re.compile(r"--([\w.]+)\.([^.=]+)\.kwargs\.([^.=]+)(?:=(.*))?", re.DOTALL)
"""``--TABLE.NAME.kwargs.KEY``, as in ``--judges.l_clipscore.kwargs.backbone``."""


def _with_whole_kwargs(parser: Any, arguments: Sequence[str]) -> list[str]:
    """Replace ``--TABLE.NAME.kwargs.KEY VALUE`` by all of NAME's ``kwargs``, where TABLE holds things by their names.

    The parser does not reach into a dictionary of something that stands in a dictionary itself.
    """
    from jsonargparse import ArgumentParser

    rest, given, words, defaults = [], [], list(arguments), parser.get_defaults()
    while words:
        word = words.pop(0)
        found = _ONE_ARGUMENT.fullmatch(word)
        if not found or not isinstance(defaults.get(found[1]), dict) or (found[4] is None and not words):
            rest.append(word)
        else:
            given.append((found[1], found[2], found[3], words.pop(0) if found[4] is None else found[4]))
    if not given:
        return rest
    before = parser.parse_args(rest)
    value = ArgumentParser(exit_on_error=False)
    value.add_argument("--value", type=Any)
    whole: dict[str, dict[str, Any]] = {}
    for table, name, key, text in given:
        known = before[table].get(name)
        kwargs = whole.setdefault(f"--{table}.{name}.kwargs", dict(known.kwargs or {}) if known else {})
        kwargs[key] = value.parse_args([f"--value={text}"]).value
    return [*rest, *(f"{option}={json.dumps(kwargs)}" for option, kwargs in whole.items())]


def xe(arguments: Sequence[str]) -> int:
    """Train a captioner by cross-entropy."""
    config = parse(XeConfig, arguments, "train_xe.py")
    from rl_caption.programs import train_xe
    from rl_caption.stage import leave_process_group

    train_xe(config)
    leave_process_group()
    return 0


def scst(arguments: Sequence[str]) -> int:
    """Fine-tune a captioner by self-critical sequence training."""
    config = parse(ScstConfig, arguments, "scst.py")
    from rl_caption.programs import check_images_early, check_weights_early, train_scst, train_xe
    from rl_caption.run_folder import is_complete
    from rl_caption.stage import leave_process_group

    stage = None
    if config.warm_start is not None:
        stage = parse(XeConfig, ["--config", config.warm_start], "train_xe.py")
        if is_complete(Path(stage.run.dir)):
            _warn_of_changes(stage)
            stage = None
    _check_start(config, stage)
    models = _reward_models_to_train(config.reward_models)
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
    """Check what a self-critical run asks for before ``stage``, which makes its captioner, is trained."""
    from rl_caption.build import ConfigError
    from rl_caption.config_checks import out_of_range

    wrong = out_of_range(config)
    if stage is not None:
        wrong += [f"{config.warm_start}: {line}" for line in out_of_range(stage)]
        init = config.model.init
        if init is None or not (
            Path(init).exists() or Path(init).resolve().is_relative_to(Path(stage.run.dir).resolve())
        ):
            wrong.append(
                f"model.init is {init!r}, but {config.warm_start} makes {stage.run.dir}/export/best: name that"
            )
    if wrong:
        raise ConfigError("; ".join(wrong))


def reward_model(arguments: Sequence[str]) -> int:
    """Train a model that scores captions, after those that it starts from."""
    config = parse(RewardModelConfig, arguments, "train_reward_model.py")
    from rl_caption.reward_models.program import train_reward_model
    from rl_caption.stage import leave_process_group

    if _reward_models_trained(_reward_models_to_train(config.warm_start, config)):
        train_reward_model(config)
    leave_process_group()
    return 0


def _reward_models_to_train(paths: Sequence[str], last: RewardModelConfig | None = None) -> list[RewardModelConfig]:
    """The reward models of ``paths`` that are not there yet, after those that they start from.

    All of them, and ``last``, which comes after them, are checked before any is trained.
    """
    from rl_caption.build import ConfigError
    from rl_caption.reward_models.checks import check_config, check_inputs

    missing: dict[Path, RewardModelConfig] = {}
    complete: dict[Path, RewardModelConfig] = {}
    _collect(paths, (), missing, complete)
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
    missing: dict[Path, RewardModelConfig],
    complete: dict[Path, RewardModelConfig],
) -> None:
    """Sort the runs of ``paths``, and those before them, by whether they are complete; in order of training."""
    from rl_caption.run_folder import is_complete

    for path in paths:
        if path in above:
            raise UsageError(f"warm_start goes round in a circle: {' -> '.join((*above, path))}")
        stage = parse(RewardModelConfig, ["--config", path], "train_reward_model.py")
        folder = Path(stage.run.dir).resolve()
        if is_complete(folder):
            complete[folder] = stage
        else:
            _collect(stage.warm_start, (*above, path), missing, complete)
            missing.setdefault(folder, stage)


def _reward_models_trained(stages: Sequence[RewardModelConfig]) -> bool:
    """Train the models one after the other; False if stopped by SIGTERM."""
    from rl_caption.reward_models.program import train_reward_model
    from rl_caption.run_folder import is_complete

    for stage in stages:
        train_reward_model(stage)
        if not is_complete(Path(stage.run.dir)):
            return False
    return True


def _warn_of_changes(stage: XeConfig | RewardModelConfig) -> None:
    """Say where a complete run, which is used as it is, was made by another configuration; from the main process."""
    from rl_caption.run_folder import changed_keys

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
    from rl_caption.evaluate import compare_systems, evaluate_split

    print(compare_systems(config) if config.compare else evaluate_split(config))
    return 0


def judge(arguments: Sequence[str]) -> int:
    """Judge metrics by how well they agree with human judgements of captions."""
    config = parse(JudgeSetConfig, arguments, "judge.py")
    from rl_caption.judging.people import judge_metrics_by_people

    print(judge_metrics_by_people(config))
    return 0


def grpo_vlm(arguments: Sequence[str]) -> int:
    """Fine-tune a vision-language model with TRL."""
    config = parse(GrpoVlmConfig, arguments, "grpo_vlm.py")
    from rl_caption.stage import leave_process_group
    from rl_caption.trl_captioning.program import fine_tune

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
        module: Any = importlib.import_module(MODULES[name])
        return module.main(list(arguments))
