"""Checks before a command begins, of packages, models and data, and of the environment
(``rl-caption doctor``).
"""

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from rewards.base import RewardError
from rewards.registry import ADDRESSES, CHECKPOINTS, COLUMNS, REWARDS
from rewards.registry import load as load_reward
from rl_caption.captioners.config import HUB_NAME
from rl_caption.cli.programs import PROGRAMS
from rl_caption.cli.stages import ENCODER, Stage, make_stages, makers, starts_from
from rl_caption.cli.torchvision_remedy import FAULT, import_error, mend
from rl_caption.runtime.errors import (
    OPTIONAL,
    ConfigError,
    UsageError,
    UserError,
    installed_version,
    not_installed,
)
from rl_caption.runtime.threads import granted_cores

IMPORTS = {
    "open_clip": r"(?s)^rewards\.clip\.|task=distill|model\.image\.encoder=None.*model\.text\.encoder=None",
    "bert_score": r"\.bertscore:",
    "openai": r"\.endpoint=(?!None)",
    "peft": r"model\.lora\.r=",
    "num2words": r"(?i)model\.init=.*smolvlm",
    "datasets": r"data\.format=hub",
    "h5py": r"data\.features_root=.*\.(h5|hdf5)",
    "tensorboard": r"run\.trackers=.*tensorboard",
}
"""Optional module -> pattern of the reward class, or of the ``key=value`` of a
configuration, that imports it.
"""
DEFAULT_CLIP = "ViT-B-32"
"""Architecture of a CLIP-based reward that names none, with OpenAI's weights."""


class Finding(NamedTuple):
    """A line of the report."""

    name: str
    """Subject of the check."""
    value: str
    """Result or, where something is missing, what that costs and what helps."""
    fatal: bool = False
    """Whether the run, or the main job, cannot start."""


def preflight(stages: Sequence[Stage], rows: bool = True) -> Iterator[Finding]:
    """Yield what each stage needs: processes, extras, models and, with ``rows``, its data."""
    looked_at: list[Any] = []
    for index, stage in enumerate(stages):
        before = stages[:index]
        findings = [*_package_findings(stage), *_process_findings(stage)]
        if not findings:
            findings += _model_findings(stage, before)
        data = [stage.sections.get("data"), *rewards_of(stage.sections)]
        is_made = starts_from([stage.values.get("data.path")], before)
        is_training = hasattr(stage.config, "train")
        if rows and is_training and not is_made and data not in looked_at:
            looked_at.append(data)
            findings += _row_findings(stage)
        for finding in findings:
            yield finding._replace(name=f"{stage.name}: {finding.name}")


def refuse(findings: Iterable[Finding], more: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` where a finding is fatal, or with the reasons ``more``."""
    said = [f"{one.name}: {one.value}" for one in findings if one.fatal]
    if said or more:
        raise ConfigError("\n  - ".join([*said, *more]))


def _process_findings(stage: Stage) -> Iterator[Finding]:
    """Settings of a launcher that the program does not support."""
    from rl_caption.runtime.launch import processes_started

    program = PROGRAMS[stage.program]
    name, count = processes_started()
    if count > 1 and not program.processes:
        value = f"{name} is {count}: {stage.program} is one process"
        yield Finding("processes", value, True)
    asked = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower()
    if asked in ("1", "true", "yes") and not program.deepspeed:
        value = f"{stage.program} takes configs/accelerate/multi_gpu.yaml"
        yield Finding("DeepSpeed", value, True)


def rewards_of(values: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and arguments of the package's rewards in nested tables."""
    if not isinstance(values, dict):
        return
    reward = values.get("target") or name
    if {"target", "kwargs"} <= values.keys() and reward in REWARDS:
        yield reward, values["kwargs"]
    for key, value in values.items():
        yield from rewards_of(value, key)


def _package_findings(stage: Stage) -> Iterator[Finding]:
    """The optional modules that a stage imports and that are missing."""
    lines = [REWARDS[name] for name, _ in rewards_of(stage.sections)]
    lines += [f"{key}={value}" for key, value in stage.values.items()]
    text = "\n".join(lines)
    needs = [name for name, keys in IMPORTS.items() if re.search(keys, text, re.M)]
    needs += PROGRAMS[stage.program].modules
    missing = [name for name in dict.fromkeys(needs) if find_spec(name) is None]
    if missing:
        yield Finding("packages", not_installed(*missing), True)


def _model_findings(stage: Stage, before: Sequence[Stage]) -> Iterator[Finding]:
    """The models that a run starts from or scores with: on this machine, made before, or fetched."""
    asked = []
    for key, value in stage.values.items():
        starts = key == "model.init" and stage.program in ("xe", "scst")
        if value is None and starts and stage.program == "scst":
            advice = "name a captioner, or train one: rl-caption run own"
            yield Finding(key, f"not set: {advice}", True)
        if not isinstance(value, str) or key == "out":
            continue
        path = Path(value.removeprefix(ENCODER))
        is_model = starts or "/export/" in value or value.endswith(CHECKPOINTS)
        if not is_model or path.exists():
            continue
        if producers := starts_from([value], before):
            yield Finding(key, f"{value}, which {producers[-1]} makes")
        elif starts and HUB_NAME.fullmatch(value):
            asked.append(
                (key, value, "rewards.model_files:ask_hub", value, "config.json")
            )
        else:
            sources = [f"rl-caption run {name}" for name in makers(path)]
            sources += [ADDRESSES[path.name]] if path.name in ADDRESSES else []
            advice = f": it comes from {' or '.join(sources)}" if sources else ""
            yield Finding(key, f"{value!r} is not there{advice}", True)
    encoders = [("teacher", stage.sections.get("teacher") or {})]
    for reward, kwargs in rewards_of(stage.sections):
        if REWARDS[reward].startswith("rewards.clip."):
            encoders.append(
                (reward, {"name": kwargs.get("backbone", DEFAULT_CLIP)} | kwargs)
            )
    for key, options in encoders:
        name = options.get("name")
        tag = options.get("pretrained") or ("openai" if name == DEFAULT_CLIP else None)
        if name and tag:
            what = f"{name} with weights {tag}"
            asked.append(
                (key, what, "rewards.clip.backbone:ask_for_weights", name, tag)
            )
    for key, what, ask, *names in asked:
        try:
            resolve_name(ask)(*names)
            yield Finding(key, what)
        except (OSError, ValueError) as error:
            yield Finding(key, f"{what}: {error}", True)


def _row_findings(stage: Stage) -> Iterator[Finding]:
    """The rows of a training: whether their files and the rewards' columns are there."""
    from rl_caption.config.build import build_data
    from rl_caption.data.checks import check_data

    options = stage.config.data
    columns: dict[str, frozenset[str]] = {}
    for name, _ in rewards_of(stage.sections):
        columns[name] = getattr(load_reward(name), "columns", frozenset())
    looks = any("image" in needed for needed in columns.values())
    evaluated = str(stage.values.get("eval.split"))
    try:
        data = build_data(options)
        report = check_data(
            data,
            ["train", *{evaluated}.intersection(data)],
            options.on_bad,
            check_pixels=False,
            check_images=options.features_root is None or looks,
            needs=getattr(stage.config, "needs", ("image", "text")),
            tokenizer=options.tokenizer,
        )
    except (UserError, RewardError, OSError) as error:
        yield Finding("data", str(error), True)
        return
    yield Finding("data", str(report))
    available = {*COLUMNS, *data["train"][0]}
    for name, needed in columns.items():
        if lacking := sorted(needed - available):
            yield Finding(name, f"the rows have no {', '.join(lacking)}", True)


# --- the environment ----------------------------------------------------------------------------


REINSTALL = "python -m pip install rl-caption (in a clone, make install)"
OTHER_TORCH = "reinstall torch and torchvision in matching versions: https://pytorch.org/get-started/locally/ has the command"
USAGE = """usage: rl-caption doctor [--mend] [NAME OPTIONS]

Print versions, devices, what is missing and what that costs. Ends with 1 where the main job cannot run.

  --mend        first let torchvision load beside a CPU-only torch, if that is its fault
  NAME OPTIONS  a command, such as run own --data.path mine.jsonl: also say what it needs"""


def environment() -> Iterator[Finding]:
    """Yield packages, whether torchvision loads (a new process takes seconds), and the machine."""
    needs = {}
    for requirement in requires("rl-caption") or ():
        if "extra ==" not in requirement:
            needs[re.split(r"[^\w-]", requirement)[0]] = REINSTALL
    for package, (extra, cost) in OPTIONAL.items():
        needs[package] = f"{cost} (pip install 'rl-caption[{extra}]')"
    for package, advice in needs.items():
        version = installed_version(package)
        fatal = version is None and package not in OPTIONAL
        yield Finding(package, version or f"missing: {advice}", fatal)
    if installed_version("torchvision") and (error := import_error()):
        advice = "rl-caption doctor --mend, or " * (FAULT in error) + OTHER_TORCH
        yield Finding("torchvision", f"does not load ({error}): {advice}", True)
    yield Finding("Python", f"{sys.version} ({sys.executable})")
    yield Finding("CPU", f"{granted_cores()} cores")
    try:
        import torch

        from rl_caption.evaluation.toolkit import JavaError, java_version
    except (ImportError, OSError, RuntimeError) as failure:
        yield Finding("torch", f"does not import ({failure}): {OTHER_TORCH}", True)
        return
    for index in range(torch.cuda.device_count()):
        yield Finding(f"GPU {index}", str(torch.cuda.get_device_properties(index)))
    if not torch.cuda.is_available():
        cost = "none: training on the CPU is slow for real data sets"
        yield Finding("GPU", "mps" if torch.backends.mps.is_available() else cost)
    try:
        yield Finding("Java", java_version())
    except JavaError as failure:
        cost = "evaluate leaves METEOR, SPICE and Java's tokenizer out"
        yield Finding("Java", f"{failure}: {cost}")


def _print(findings: Iterable[Finding]) -> None:
    """Print findings as they come. Raises ``ConfigError`` where one is fatal."""
    printed = []
    for finding in findings:
        print(f"  {finding.name:<16} {finding.value}")
        printed.append(finding)
    refuse(printed)


def main(arguments: Sequence[str]) -> int:
    """Print the report, and what a command needs.

    Raises ``ConfigError`` where the main job or that command cannot run here; its
    message says what helps.
    """
    if [*arguments] == ["--help"]:
        print(USAGE)
        return 0
    words = [word for word in arguments if word != "--mend"]
    if "--mend" in arguments:
        print(mend())
    name, *options = words or ["run", "demo"]
    if name == "run" and options:
        stages, _ = make_stages(options[0], options[1:])
    elif name in PROGRAMS and PROGRAMS[name].config is not None:
        stages = [Stage(name, name, options)]
    else:
        raise UsageError(USAGE)
    command = shlex.join(["rl-caption", name, *options])
    _print(environment())
    print(f"\nConfiguration of {command}")
    _print(preflight(stages, bool(words)))
    print(f"\nIt can run here: {command}")
    return 0
