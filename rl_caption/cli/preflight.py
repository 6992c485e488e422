"""What a command imports, fetches and reads, looked for before it begins: every program with a
configuration, pipelines and ``doctor`` ask ``preflight``.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from rewards.base import RewardError
from rewards.registry import COLUMNS, REWARDS
from rewards.registry import load as load_reward
from rl_caption.cli.programs import PROGRAMS
from rl_caption.cli.stages import Stage, is_inside, makers, path_of
from rl_caption.runtime.errors import ConfigError, UserError, not_installed

CHECKPOINTS = (".pt", ".pth", ".bin", ".safetensors", ".npz")
"""Endings of checkpoint files; a tag of open_clip has none."""
REWARD_MODULES = {
    "rewards.clip.": "open_clip",
    "rewards.text.bertscore:": "bert_score",
}
"""Beginning of a reward's class -> the optional module that it imports."""
PAIR_TASKS = ("contrastive", "positive_augmented", "specificity")
"""Tasks of ``reward_model`` that train an open_clip model, unless they name parts."""


class Finding(NamedTuple):
    """A line of the report."""

    name: str
    """What was looked at."""
    value: str
    cost: str = ""
    """What its absence costs; empty where nothing is missing."""
    fatal: bool = False
    """Whether the run, or the main job, cannot start."""
    remedy: str = ""
    """The command or key that helps."""


def preflight(stages: Sequence[Stage], rows: bool = True) -> Iterator[Finding]:
    """Yield what each stage needs: processes, extras, models and, with ``rows``, its data."""
    read: dict[str, list[Finding]] = {}
    for index, stage in enumerate(stages):
        findings = [*_process_findings(stage), *_extra_findings(stage)]
        if not any(finding.fatal for finding in findings):
            findings += _model_findings(stage, stages[:index])
        if rows and hasattr(stage.config, "train"):
            key = repr([stage.config.data, *rewards_of(stage.sections)])
            if key not in read:
                read[key] = list(_row_findings(stage))
                findings += read[key]
        for finding in findings:
            named = f"{stage.name}: {finding.name}" if len(stages) > 1 else finding.name
            yield finding._replace(name=named)


def refuse(findings: Iterable[Finding], more: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` where a finding is fatal, or with the reasons ``more``."""
    said = []
    for finding in findings:
        if finding.fatal:
            remedy = f": {finding.remedy}" if finding.remedy else ""
            said.append(f"{finding.name}: {finding.value}{remedy}")
    said += more
    if said:
        raise ConfigError(said[0] if len(said) == 1 else "\n  - ".join(["", *said]))


def _process_findings(stage: Stage) -> Iterator[Finding]:
    """Whether the launcher's processes or DeepSpeed can run the program."""
    from rl_caption.runtime.launch import processes_started

    program, started = PROGRAMS[stage.program], processes_started(os.environ)
    if started is not None and started[1] > 1 and not program.processes:
        value = f"{started[1]} processes were started ({started[0]})"
        yield Finding(
            "processes", value, fatal=True, remedy=f"{stage.program} is one process"
        )
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in (
        "1",
        "true",
        "yes",
    )
    if deepspeed and program.processes and not program.deepspeed:
        remedy = f"{stage.program} takes configs/accelerate/multi_gpu.yaml"
        yield Finding(
            "DeepSpeed", "the launcher asks for it", fatal=True, remedy=remedy
        )


def rewards_of(values: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and arguments of the package's rewards in nested tables."""
    if not isinstance(values, dict):
        return
    reward = values.get("target") or name
    if {"target", "kwargs"} <= values.keys() and reward in REWARDS:
        yield reward, values["kwargs"]
    for key, value in values.items():
        yield from rewards_of(value, key)


def modules_of(stage: Stage) -> set[str]:
    """The optional modules that a program with its configuration imports."""
    config, values = stage.config, stage.values
    modules = set(PROGRAMS[stage.program].modules)
    for reward, kwargs in rewards_of(stage.sections):
        modules |= {
            module
            for prefix, module in REWARD_MODULES.items()
            if REWARDS[reward].startswith(prefix)
        }
        if kwargs.get("endpoint"):
            modules.add("openai")
    task = str(values.get("task"))
    features = str(values.get("data.features_root"))
    needs = {
        "open_clip": task.startswith("distill")
        or (task in PAIR_TASKS and not config.model.has_parts),
        "peft": values.get("model.lora.r") is not None,
        "num2words": "smolvlm" in str(values.get("model.init")).lower(),
        "datasets": values.get("data.format") == "hub",
        "h5py": features.endswith((".h5", ".hdf5")),
        "tensorboard": "tensorboard" in (values.get("run.trackers") or ()),
    }
    return modules | {module for module, needed in needs.items() if needed}


def _extra_findings(stage: Stage) -> Iterator[Finding]:
    missing = sorted(
        module for module in modules_of(stage) if find_spec(module) is None
    )
    if missing:
        yield Finding("packages", not_installed(*missing), fatal=True)


# --- models -------------------------------------------------------------------------------------


def _model_findings(stage: Stage, before: Sequence[Stage]) -> Iterator[Finding]:
    """The models that a run starts from or scores with: on this machine, made before, or fetched."""
    config, values = stage.config, stage.values
    paths = {
        key: value
        for key, value in values.items()
        if isinstance(value, str)
        and key != "out"
        and ("/export/" in value or value.endswith(CHECKPOINTS))
    }
    if stage.program == "reward_model":
        paths |= {
            key: value for key, value in config.folders().items() if value is not None
        }
    if stage.program in ("xe", "scst") and config.model.init is not None:
        paths["model.init"] = config.model.init
    elif stage.program == "scst":
        remedy = "name a captioner, or let a pipeline train one: rl-caption run own"
        yield Finding("model.init", "not set", fatal=True, remedy=remedy)
    for key, value in paths.items():
        if path_of(value).exists():
            continue
        made = [other.name for other in before if is_inside(value, other.folder)]
        if made:
            yield Finding(key, f"{value}, which {made[-1]} makes")
        elif (
            key == "model.init"
            and stage.program != "reward_model"
            and _is_on_hub(value)
        ):
            from rewards.model_files import ask_hub

            yield from _hub_findings(key, value, ask_hub, value, "config.json")
        else:
            commands = " or ".join(f"rl-caption run {name}" for name in makers(value))
            remedy = f"{commands} makes it" if commands else ""
            yield Finding(key, f"{value!r} is not there", fatal=True, remedy=remedy)
    for key, name, tag in _dual_encoders(stage):
        from rewards.clip.backbone import ask_for_weights

        yield from _hub_findings(
            key, f"{name} with weights {tag}", ask_for_weights, name, tag
        )


def _is_on_hub(name: str) -> bool:
    from rl_caption.captioners.loading import HUB_NAME

    return HUB_NAME.fullmatch(name) is not None


def _hub_findings(
    key: str, what: str, ask: Callable[..., Any], *arguments: str
) -> Iterator[Finding]:
    """A model on the hub, which ``ask`` finds, or raises."""
    try:
        ask(*arguments)
    except (OSError, ValueError) as error:
        yield Finding(key, f"{what}: {error}", fatal=True)
    else:
        yield Finding(key, what)


def _dual_encoders(stage: Stage) -> Iterator[tuple[str, str, str]]:
    """Yield the key, the architecture and the tag of each dual encoder that open_clip loads."""
    for reward, kwargs in rewards_of(stage.sections):
        if REWARDS[reward].startswith("rewards.clip."):
            defaults = inspect.signature(load_reward(reward)).parameters
            name = kwargs.get("backbone", defaults["backbone"].default)
            tag = kwargs.get("pretrained") or ("openai" if name == "ViT-B-32" else None)
            if isinstance(name, str) and tag is not None:
                yield reward, name, tag
    for section in ("model", "teacher"):
        name, tag = (
            stage.values.get(f"{section}.{key}") for key in ("name", "pretrained")
        )
        if name and tag:
            yield section, name, tag


# --- data ---------------------------------------------------------------------------------------


def _row_findings(stage: Stage) -> Iterator[Finding]:
    """The rows that a training reads: their files are there, and what its rewards look at."""
    from rl_caption.config.build import build_data
    from rl_caption.data.checks import MISSING, check_data, check_row_images

    config, options = stage.config, stage.config.data
    try:
        data = build_data(options)
        evaluated = getattr(getattr(config, "eval", None), "split", None)
        splits = ["train", evaluated] if evaluated in data.splits else ["train"]
        report = check_data(
            data,
            splits,
            options.on_bad,
            check_pixels=False,
            check_images=options.features_root is None,
            needs=getattr(config, "needs", ("image", "text")),
            tokenizer=options.tokenizer,
        )
        train = report.good_rows_of(data).split("train")
        wanted = _columns(rewards_of(stage.sections))
        seen = [name for name, columns in wanted.items() if "image" in columns]
        if options.features_root is not None and seen and options.on_bad == "fail":
            rows = [row for split in splits for row in data.split(split)]
            check_row_images(rows, " and ".join(seen), check_pixels=False)
    except (UserError, RewardError, OSError) as error:
        takes = f". It takes {options.source}" if MISSING in str(error) else ""
        yield Finding("data", f"{error}{takes}", "the run does not start", fatal=True)
        return
    yield Finding("data", f"{len(train)} training images")
    for warning in report.warnings:
        yield Finding("captions", warning)
    for name, columns in wanted.items():
        lacking = sorted(columns - {*COLUMNS} - {*(train[0] if len(train) else ())})
        if lacking:
            yield Finding(name, f"the rows have no {', '.join(lacking)}", fatal=True)


def _columns(rewards: Iterable[tuple[str, Any]]) -> dict[str, frozenset[str]]:
    """Reward -> the columns that its class says it needs."""
    found = {name: getattr(load_reward(name), "columns", None) for name, _ in rewards}
    return {
        name: columns
        for name, columns in found.items()
        if isinstance(columns, frozenset)
    }
