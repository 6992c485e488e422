"""What this environment can do: versions, devices, Java, what is missing and what that costs."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_caption.cli.torchvision_remedy import FAULT, import_error, mend
from rl_caption.runtime.errors import OPTIONAL, installed_version
from rl_caption.runtime.threads import granted_cores

if TYPE_CHECKING:
    from rl_caption.captioners.base import Captioner
    from rl_caption.config.overrides import Chain
    from rl_caption.config.schema import ModelConfig, ScstConfig, XeConfig
    from rl_caption.data.base import Row

NEEDED = {
    "torch": "nothing runs",
    "transformers": "nothing runs",
    "accelerate": "nothing trains",
    "tokenizers": "captions cannot be turned into tokens",
    "safetensors": "checkpoints can be neither written nor read",
    "numpy": "nothing runs",
    "pillow": "images cannot be read",
    "jsonargparse": "configurations cannot be read",
    "jinja2": "reports cannot be written",
    "matplotlib": "reports cannot be written",
    "pycocoevalcap": "evaluate has no BLEU, METEOR, ROUGE-L and CIDEr",
    "tqdm": "nothing runs",
    "psutil": "nothing runs",
    "scipy": "no monitor of reward hacking, and no correlations in judge",
    "filelock": "nothing trains: a run folder belongs to one process",
}
"""Package that every installation has -> what is not possible without it."""
NO_JAVA = "METEOR, SPICE and the PTB tokenizer are left out of evaluate; training does not use Java"
NO_START = "the run does not start"
GB = 1e9
LITTLE_DISK_GB = 5.0
REINSTALL = "python -m pip install rl-caption (in a clone, make install)"
OTHER_TORCH = "reinstall torch and torchvision in matching versions: https://pytorch.org/get-started/locally/ has the command"
OWN_START = (
    "train a captioner with rl-caption xe --config own_xe --data.path mine.jsonl, then give "
    "--model.init runs/own/xe/export/best"
)


class Finding(NamedTuple):
    """A line of the report: what was looked at, what was found, what its absence costs ("" where
    nothing is missing), whether it keeps the main job from running, and the command or key that
    helps.
    """

    name: str
    value: str
    cost: str = ""
    fatal: bool = False
    remedy: str = ""


def package_findings() -> Iterator[Finding]:
    """Yield the version of every package that this one uses, needed ones first."""
    costs = {
        package: f"{cost} (pip install 'rl-caption[{extra}]')"
        for package, extra, cost in OPTIONAL.values()
    }
    for package, cost in (NEEDED | costs).items():
        version = installed_version(package)
        fatal = version is None and package in NEEDED
        yield Finding(
            package,
            version or "missing",
            "" if version else cost,
            fatal,
            REINSTALL if fatal else "",
        )


def torchvision_findings() -> Iterator[Finding]:
    """Yield whether torchvision loads; a new process tries it, which takes 2 to 5 seconds."""
    version = installed_version("torchvision")
    if version is None:
        yield Finding("torchvision", "not installed; no program needs it")
    elif error := import_error():
        remedy = f"rl-caption doctor --mend, or {OTHER_TORCH}" if FAULT in error else OTHER_TORCH
        cost = "Transformers, open_clip and the accelerate command do not start"
        yield Finding("torchvision", f"{version}: does not load ({error})", cost, True, remedy)
    else:
        yield Finding("torchvision", f"{version}: loads")


def device_findings() -> Iterator[Finding]:
    """Yield the CPU, the memory and every GPU with its memory and whether it computes in bf16."""
    yield Finding(
        "CPU cores", f"{granted_cores()} of {os.cpu_count()} processors ({platform.machine()})"
    )
    if importlib.util.find_spec("psutil"):
        import psutil

        yield Finding("memory", f"{psutil.virtual_memory().total / GB:.1f} GB")
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        yield Finding("torch", "does not import", f"{error}", True, OTHER_TORCH)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16"
        yield Finding(
            f"GPU {index}", f"{properties.name}, {properties.total_memory / GB:.1f} GB, {bf16}"
        )
    if torch.backends.mps.is_available():
        yield Finding("GPU", "Apple (mps), shares the memory of the machine; one process only")
    elif torch.cuda.device_count() == 0:
        yield Finding(
            "GPU", "none", "training runs on the CPU: enough for the demo, slow for real data sets"
        )


def java_findings() -> Iterator[Finding]:
    """Yield the Java runtime and the Java programs of the caption toolkit."""
    # Imported here, like all that is not the standard library: the report is wanted most where
    # packages are missing.
    try:
        from rl_caption.evaluation.toolkit import JavaError, find_java
    except ImportError as error:
        yield Finding(
            "evaluate", "does not start", f"no captions can be scored: {error}", True, REINSTALL
        )
        return
    try:
        java = find_java()
    except JavaError as error:
        yield Finding("Java", str(error), NO_JAVA)
    else:
        yield Finding("Java", f"{java.version} ({java.path})")
    spec = importlib.util.find_spec("pycocoevalcap")
    if spec is None or not spec.submodule_search_locations:
        return
    jars = Path(next(iter(spec.submodule_search_locations))) / "spice" / "lib"
    if not list(jars.glob("stanford-corenlp-*-models.jar")):
        download = "python -m pycocoevalcap.spice.get_stanford_models downloads 0.4 GB for it"
        yield Finding("SPICE", "its models are missing", f"left out of evaluate; {download}")


def machine_findings() -> Iterator[Finding]:
    """Yield the interpreter, the compiler (DeepSpeed builds operators at first use) and the space
    for runs.
    """
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", platform.platform())
    compiler = os.environ.get("CXX") or next(
        filter(None, map(shutil.which, ("g++", "c++", "clang++"))), ""
    )
    try:
        process = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=20, check=True
        )
        yield Finding("C++ compiler", f"{process.stdout.strip()} ({compiler})".splitlines()[0])
    except (OSError, subprocess.SubprocessError) as error:
        cost = "DeepSpeed cannot build its own operators; nothing else compiles anything"
        yield Finding("C++ compiler", f"missing: {error}" if compiler else "missing", cost)
    free = shutil.disk_usage(Path.cwd()).free / GB
    cost = (
        ""
        if free >= LITTLE_DISK_GB
        else "a checkpoint of a base-size captioner with its optimizer takes about 3 GB"
    )
    yield Finding("free disk space", f"{free:.1f} GB in {Path.cwd()}", cost)


SECTIONS = {
    "Machine": machine_findings,
    "Packages": package_findings,
    "Image processing": torchvision_findings,
    "Devices": device_findings,
    "Evaluation": java_findings,
}


def config_findings(config: XeConfig | ScstConfig, chain: Chain) -> Iterator[Finding]:
    """Yield what a training of a captioner would start from: data, captioner and the memory of a
    step; of ``scst`` also the scales of its reward's terms.

    Nothing is written but visual tokens of samples (``model.cache_dir``), no weights are
    downloaded, images are not decoded for a check, and what does not exist yet is named. ``chain``
    is the command line.
    """
    from rl_caption.config import build
    from rl_caption.config.schema import ScstConfig
    from rl_caption.data.base import DataError
    from rl_caption.data.checks import check_data

    build.quiet_libraries()
    options = config.data
    rows: Sequence[Row] = ()
    try:
        data = build.build_data(options)
        with_images = options.features_root is None
        report = check_data(
            data, ["train"], options.on_bad, check_pixels=False, check_images=with_images
        )
        rows = report.good_rows_of(data).split("train")
    except (DataError, OSError, build.ConfigError) as error:
        yield Finding("data", str(error), NO_START, fatal=True)
    else:
        yield Finding("data", f"{len(rows)} training images")
    findings, captioner = _captioner_findings(config, chain, rows)
    yield from findings
    if isinstance(config, ScstConfig) and rows:
        yield _reward_finding(config, rows, captioner)


def _captioner_findings(
    config: XeConfig | ScstConfig, chain: Chain, rows: Sequence[Row]
) -> tuple[list[Finding], Captioner | None]:
    """Lines about the captioner that the run starts from and about the memory of a step; and the
    captioner, or None where its weights are not there yet or a step does not fit.
    """
    from rl_caption.captioners.base import CaptionerError
    from rl_caption.config import build
    from rl_caption.data.base import DataError

    try:
        start, model = _start_finding(config, chain)
        if model is None or not rows:
            return [start], None
        ready = _has_weights(model)
        references, data = build.references_of(rows), config.data
        captioner = build.build_captioner(
            model, references, data.cache_mb, data.tokenizer, weights=ready
        )
        build.check_positions(captioner, *_caption_length(config))
        memory = _memory_finding(config, rows, captioner)
    except (CaptionerError, DataError, OSError, build.ConfigError) as error:
        return [Finding("captioner", str(error), NO_START, fatal=True)], None
    return [start, memory], captioner if ready and not memory.fatal else None


def _start_finding(
    config: XeConfig | ScstConfig, chain: Chain
) -> tuple[Finding, ModelConfig | None]:
    """A line about the captioner that the run starts from; and its model, or None where it is not
    there yet.
    """
    from rl_caption.cli.earlier_runs import warm_start_to_train
    from rl_caption.config.schema import ScstConfig

    model, start = config.model, config.model.init
    is_scst = isinstance(config, ScstConfig)
    cost = "no scales on its samples" if is_scst else ""
    if start is None and is_scst:
        return Finding("captioner", "model.init is not set", NO_START, True, OWN_START), None
    if start is None:
        return Finding("captioner", "a new one, with random weights"), model
    if _has_weights(model):
        return Finding("captioner", start), model
    if (
        isinstance(config, ScstConfig)
        and config.warm_start is not None
        and warm_start_to_train(config.warm_start, config, chain) is not None
    ):
        value = f"{start} does not exist yet; the run makes it by {config.warm_start}"
        return Finding("captioner", value, cost), None
    if model.name != "huggingface":
        value = f"model.init {start} does not exist"
        return Finding("captioner", value, NO_START, True, OWN_START), None
    return Finding("captioner", f"{start}: the run downloads its weights", cost), model


def _has_weights(model: ModelConfig) -> bool:
    """Whether the captioner is new, or its weights are in a folder or in the cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    from rl_caption.captioners.loading import HUB_NAME

    if model.init is None or Path(model.init).exists():
        return True
    files = (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    )
    return HUB_NAME.fullmatch(model.init) is not None and any(
        isinstance(try_to_load_from_cache(model.init, file), str) for file in files
    )


def _memory_finding(config: XeConfig | ScstConfig, rows: Sequence[Row], captioner: Any) -> Finding:
    """What a step or a validation holds at least, on one process without DeepSpeed, against the
    memory of the device.

    Keys and values are those of decoding, of vision-language models; activations, which depend on
    the model, come on top.
    """
    import psutil
    import torch

    from rl_caption.config import build
    from rl_caption.config.schema import ScstConfig
    from rl_caption.scst.advantages import build_advantage
    from rl_caption.scst.objectives import build_objective

    images = config.train.micro_batch_size or config.train.batch_size
    first_rows = [rows[number] for number in range(min(images, len(rows)))]
    compares = False
    if isinstance(config, ScstConfig):
        options = config.train
        objective = build_objective(
            options.objective, options.objective_kwargs, options.loss_reduction, options.kl_coef
        )
        compares = getattr(objective, "needs_reference", False) or config.monitor.kl
        advantage = build_advantage(options.advantage, options.advantage_kwargs)
        captions = build.build_decoding(config.rollout, advantage).captions_per_image
    else:
        captions = config.train.captions_per_image or max(
            len(row["references"]) for row in first_rows
        )
    parameters = list(captioner.policy.parameters())
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    held = {
        "weights": sum(parameter.nbytes for parameter in parameters) + compares * trained,
        "gradients and moments": 3 * trained,
    }
    if hasattr(captioner, "key_value_bytes"):
        captions = max(images * captions, config.eval.batch_size * (config.eval.num_beams or 1))
        held["keys and values"] = captioner.key_value_bytes(
            first_rows, captions, _caption_length(config)[1]
        )
    on_gpu = torch.cuda.is_available()
    memory = torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total
    total = sum(held.values())
    value = ", ".join(f"{what} {size / GB:.2g} GB" for what, size in held.items())
    value += f": {total / GB:.2g} of {memory / GB:.1f} GB, activations not counted"
    if total <= memory:
        return Finding("memory of a step", value)
    remedy = "set model.lora and model.dtype bfloat16, a smaller train.micro_batch_size, or an engine that shards"
    return Finding(
        "memory of a step", value, "it does not fit the device", True, f"{remedy} (docs/scaling.md)"
    )


def _caption_length(config: XeConfig | ScstConfig) -> tuple[str, int]:
    """The key that limits the tokens of a caption, and its value."""
    from rl_caption.config.schema import XeConfig

    if isinstance(config, XeConfig):
        return "train.max_target_tokens", config.train.max_target_tokens
    return "rollout.max_new_tokens", config.rollout.max_new_tokens


def _reward_finding(
    config: ScstConfig, rows: Sequence[Row], captioner: Captioner | None
) -> Finding:
    """The scales of the reward's terms on references, and on samples of a captioner."""
    from accelerate import Accelerator

    from rewards.base import RewardError
    from rl_caption.config import build
    from rl_caption.runtime.engines import accelerator_kwargs, usable_precision
    from rl_caption.scst.advantages import build_advantage
    from rl_caption.scst.reward_scales import sample_scores, scale_report

    size = config.train.micro_batch_size or 16
    try:
        reward = build.build_reward(
            config.reward, build.references_of(rows), tokenizer=config.data.tokenizer
        )
        train = config.train
        advantage = build_advantage(train.advantage, train.advantage_kwargs)
        decoding = build.build_decoding(config.rollout, advantage)
        precision = usable_precision(config.train.mixed_precision)
        accelerator = Accelerator(mixed_precision=precision, **accelerator_kwargs())
        sample = None
        if captioner is not None:
            sample = partial(
                sample_scores, captioner, decoding, config.train.seed, accelerator, size
            )
        return Finding("reward", "\n  ".join(scale_report(reward, rows, sample)))
    except (build.ConfigError, RewardError) as error:
        kwargs = [term.kwargs for term in config.reward.terms.values()]
        models = [str(one[key]) for one in kwargs for key in ("backbone", "head") if key in one]
        absent = any(name in str(error) and not Path(name).exists() for name in models)
        if config.reward_models and absent:
            value = f"{error}; the run first trains the models of {', '.join(config.reward_models)}"
            return Finding("reward", value, "no scales of its terms")
        return Finding("reward", str(error), "the run does not start until this exists", fatal=True)


def doctor(findings: Iterable[Finding] | None = None, run: str = "scst --config demo") -> int:
    """Print the report, and what ``findings`` say of the configuration of a ``run``.

    Returns:
        0 when the main job (and that run) can run here, 1 when something that it needs is missing.
    """
    fatal = [
        finding
        for title, section in SECTIONS.items()
        for finding in _print_section(title, section())
    ]
    verdict = "The main job cannot run here"
    if not fatal and findings is not None:
        fatal = _print_section("Configuration", findings)
        verdict = "The main job can run here, but not yet with this configuration"
    if fatal:
        remedies = [finding.remedy or f"{finding.value} (see above)" for finding in fatal]
        print(f"{verdict}: {', '.join(finding.name for finding in fatal)}.")
        print(f"To repair it: {'; then '.join(dict.fromkeys(remedies))}")
        return 1
    from rl_caption.runtime.launch import launch_command

    print("Two processes that train together on this machine:")
    print(f"  {launch_command(2, ['-m', 'rl_caption', 'scst', '--config', 'demo'])}")
    print(f"The main job can run here. To start it: rl-caption {run}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run ``doctor`` as a program: ``doctor [--mend] [--config FILE [--section.key VALUE ...]]``."""
    parser = argparse.ArgumentParser(
        prog="rl-caption doctor",
        description="Print versions, devices, Java, what is missing and what that costs. Ends with 1 when the main job "
        "cannot run, else with 0.",
        epilog="With a configuration, overrides such as --reward.terms.cider.weight 0.3 may follow it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a configuration to check; of xe and scst, also say what a run would start from and whether a step fits "
        "the device; of scst, measure each reward term on references and samples (seconds to a "
        "minute)",
    )
    parser.add_argument(
        "--mend",
        action="store_true",
        help="first let torchvision load beside a CPU-only torch, by a file in this environment, if that is its fault",
    )
    options, overrides = parser.parse_known_args(argv)
    if options.mend and (done := mend()[0]):
        print(f"{done}\n")
    if options.config is None:
        if overrides:
            parser.error(f"unrecognized arguments: {' '.join(overrides)}")
        return doctor()
    from rl_caption.cli.configuration import find_program, parse, with_lists
    from rl_caption.cli.programs import PROGRAMS
    from rl_caption.config.overrides import Chain

    arguments = ["--config", options.config, *overrides]
    name = find_program(arguments, default="scst")
    for option in PROGRAMS[name].lists:
        arguments = with_lists(arguments, option)
    options_class = resolve_name(str(PROGRAMS[name].config))
    chain = Chain(parse, options_class, arguments, "rl-caption doctor")
    config = parse(options_class, chain.arguments, "rl-caption doctor")
    findings: Iterable[Finding] = [Finding("configuration", f"of {name}, valid")]
    if name in ("xe", "scst"):
        findings = config_findings(config, chain)
    return doctor(findings, shlex.join([name, *arguments]))


def _print_section(title: str, findings: Iterable[Finding]) -> list[Finding]:
    """Print findings as they come; return the fatal ones."""
    print(title)
    fatal = []
    for finding in findings:
        print(f"  {finding.name:<16} {finding.value}")
        if finding.cost:
            print(f"  {'':<16} -> {finding.cost}")
        fatal += [finding] if finding.fatal else []
    print()
    return fatal
