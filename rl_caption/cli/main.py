"""The programs: ``rl-caption NAME --config FILE --section.key value``, or ``python -m rl_caption NAME``."""

import difflib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name

from rl_caption import __version__
from rl_caption.ablation.config import AblateConfig
from rl_caption.cli.configuration import UsageError, parse, with_lists
from rl_caption.cli.programs import PROGRAMS, installed_programs
from rl_caption.config.overrides import Chain
from rl_caption.config.reward_models import RewardModelConfig
from rl_caption.config.schema import EvaluateConfig, ScstConfig, XeConfig
from rl_caption.errors import ConfigError, user_errors
from rl_caption.threads import set_threads

logger = logging.getLogger(__name__)
DESCRIBING = ("configs", "doctor", "report")
"""Programs that compute nothing, so that no variable of the environment changes what they say."""


def xe(arguments: Sequence[str]) -> int:
    """Train a captioner by cross-entropy."""
    config = parse(XeConfig, arguments, "rl-caption xe")
    from rl_caption.programs.train import train_xe

    train_xe(config)
    return 0


def scst(arguments: Sequence[str]) -> int:
    """Fine-tune a captioner by self-critical sequence training, after the runs that it starts from."""
    config = parse(ScstConfig, arguments, "rl-caption scst")
    from rl_caption.programs.train import check_images_early, check_weights_early, train_scst, train_xe
    from rl_caption.training.run_folder import is_complete

    chain = Chain.of(parse, ScstConfig, arguments, "rl-caption scst")
    warm_start = None
    if config.warm_start is not None:
        warm_start = chain.parse(XeConfig, config.warm_start, "rl-caption xe")
        folder, init = Path(warm_start.run.dir).resolve(), config.model.init
        if is_complete(folder):
            _warn_of_changes(warm_start)
            warm_start = None
        elif init is None or not (Path(init).exists() or Path(init).resolve().is_relative_to(folder)):
            written = f"{warm_start.run.dir}/export/best"
            raise ConfigError(
                f"model.init is {init!r}, but warm_start {config.warm_start} writes {written}: set it to that"
            )
    models = _reward_models_to_train(config.reward_models, chain)
    _log_from_main_process(logging.INFO, str(chain))
    if warm_start is not None or models:
        check_weights_early(config, [model.run.dir for model in models])
        check_images_early(config)
    if warm_start is not None:
        train_xe(warm_start)
    stopped = warm_start is not None and not is_complete(Path(warm_start.run.dir))  # by SIGTERM
    if not stopped and _train_reward_models(models):
        train_scst(config)
    return 0


def reward_model(arguments: Sequence[str]) -> int:
    """Train a model that scores captions, after those that it starts from."""
    config = parse(RewardModelConfig, arguments, "rl-caption reward_model")
    from rl_caption.reward_models.program import train_reward_model

    chain = Chain.of(parse, RewardModelConfig, arguments, "rl-caption reward_model")
    models = _reward_models_to_train(config.warm_start, chain, config)
    _log_from_main_process(logging.INFO, str(chain))
    if _train_reward_models(models):
        train_reward_model(config)
    return 0


def _reward_models_to_train(
    files: Sequence[str], chain: Chain, last: RewardModelConfig | None = None
) -> list[RewardModelConfig]:
    """The runs of ``files`` that are not complete, each after those that it starts from.

    All of them, and ``last``, which comes after them, are checked before any is trained.
    """
    from rl_caption.reward_models.checks import check_config, check_inputs
    from rl_caption.training.run_folder import is_complete

    found: dict[Path, RewardModelConfig] = {}

    def collect(files: Sequence[str], above: tuple[str, ...]) -> None:
        """Add a file after those that its ``warm_start`` names, but for a teacher in whose place there is another."""
        for file in files:
            if file in above:
                raise UsageError(f"warm_start is circular: {' -> '.join((*above, file))}")
            config = chain.parse(RewardModelConfig, file, "rl-caption reward_model")
            folder = Path(config.run.dir).resolve()
            if chain.replaces(config.run.dir):
                continue
            if not is_complete(folder):
                collect(config.warm_start, (*above, file))
            found.setdefault(folder, config)

    collect(files, ())
    complete = [config for folder, config in found.items() if is_complete(folder)]
    to_train = [config for config in found.values() if config not in complete]
    for config in complete:
        _warn_of_changes(config)
    for config in to_train:
        try:
            check_config(config)
        except ConfigError as error:
            raise ConfigError(f"the run {config.run.dir}, which comes first: {error}") from error
    if last is not None:
        check_config(last)
    check_inputs(to_train if last is None else [*to_train, last], complete)
    return to_train


def _train_reward_models(configs: Sequence[RewardModelConfig]) -> bool:
    """Train the models one after the other; False if stopped by SIGTERM."""
    from rl_caption.reward_models.program import train_reward_model
    from rl_caption.training.run_folder import is_complete

    for config in configs:
        train_reward_model(config)
        if not is_complete(Path(config.run.dir)):
            return False
    return True


def _warn_of_changes(config: XeConfig | RewardModelConfig) -> None:
    """Say where a complete run, which is used as it is, was made by another configuration."""
    from rl_caption.training.run_folder import changed_keys

    folder = Path(config.run.dir)
    changed = "; ".join(changed_keys(folder / "config.yaml", config))
    trained = f"was trained with another configuration and is used unchanged: {changed}"
    warning = f"WARNING: the model in {folder} {trained}. To train it again, remove the folder"
    _log_from_main_process(logging.WARNING, warning if changed else "")


def _log_from_main_process(level: int, message: str) -> None:
    if message and os.environ.get("RANK", "0") == "0":
        logger.log(level, "%s", message)


def evaluate(arguments: Sequence[str]) -> int:
    """Judge captions of a split or of a file."""
    if sum(word.partition("=")[0] == "--model" for word in arguments) > 1:
        raise UsageError("--model is given several times: for an ensemble, --models A B")
    words = with_lists(with_lists(arguments, "--compare"), "--models")
    config = parse(EvaluateConfig, words, "rl-caption evaluate")
    from rl_caption.programs.evaluate import compare_systems, evaluate_split

    print(compare_systems(config) if config.compare else evaluate_split(config))
    return 0


def ablate(arguments: Sequence[str]) -> int:
    """Train a grid of self-critical runs from one starting checkpoint and compare them."""
    config = parse(AblateConfig, arguments, "rl-caption ablate")
    from rl_caption.ablation.runner import run_ablation

    return run_ablation(config, parse)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``NAME ARGUMENTS...``; expected errors end with one clear message and code 1."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["--version"]:
        print(f"rl-caption {__version__}")
        return 0
    if not words or words[0] in ("-h", "--help"):
        with user_errors():  # for `| head`
            print("usage: rl-caption NAME ...    (or python -m rl_caption NAME ...)\n")
            print("\n".join(f"  {name:<16} {summary}" for name, (summary, *_) in PROGRAMS.items()))
            print("\nrl-caption NAME --help describes one program; rl-caption --version prints the version.")
        return 0 if words else 2
    if words[0] not in PROGRAMS:
        close = difflib.get_close_matches(words[0].removeprefix("train_").removesuffix(".py"), PROGRAMS, n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise UsageError(f"{words[0]!r} is not one of {', '.join(PROGRAMS)}{hint}")
    return run(words[0], words[1:])


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one program; errors that a user can mend are printed without a traceback."""
    from rl_caption.launch import check_environment, die_with_launcher

    set_threads()
    leave_scripts_folder()
    program = PROGRAMS[name]
    if name not in installed_programs():
        raise UsageError(f"{name} comes with the lab, the folder rl_caption/lab, which is not installed")
    with log_lines(), user_errors():
        if name not in DESCRIBING:
            check_environment(tf32=os.environ.get("NVIDIA_TF32_OVERRIDE") == "1")  # a training knows what it wants
        if program.config is None:
            return int(resolve_name(program.function)(list(arguments)) or 0)
        die_with_launcher()
        code = _run_configured(name, arguments)
        if "rl_caption.training.setup" in sys.modules:  # not every program trains, or needs torch
            sys.modules["rl_caption.training.setup"].leave_process_group()
        return code


def _run_configured(name: str, arguments: Sequence[str]) -> int:
    """Run a program that has a configuration; its modules are imported once that is read."""
    program = PROGRAMS[name]
    if program.reads_arguments:
        return int(resolve_name(program.function)(arguments))
    for option in program.lists:
        arguments = with_lists(arguments, option)
    config = parse(resolve_name(str(program.config)), arguments, f"rl-caption {name}")
    if text := resolve_name(program.function)(config):
        print(text)
    return 0


def leave_scripts_folder() -> None:
    """Take the folder of the scripts, which Python puts first, off the path: its ``evaluate.py`` hides a package."""
    folder = Path(sys.argv[0]).resolve().parent
    if sys.path and Path(sys.path[0] or ".").resolve() == folder and (folder / "scst.py").is_file():
        del sys.path[0]


@contextmanager
def log_lines() -> Iterator[None]:
    """Inside the ``with``, the package's own log lines (level INFO and above) are printed to standard error."""
    handler = logging.StreamHandler()
    # At the root: a library that logs there would otherwise put up a handler of its own, and every line come twice.
    logging.getLogger().addHandler(handler)
    for package in ("rl_caption", "rewards"):
        logging.getLogger(package).setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
