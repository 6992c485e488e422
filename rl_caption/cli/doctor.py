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
from typing import TYPE_CHECKING, Any, NamedTuple

from rl_caption.runtime.errors import OPTIONAL, installed_version
from rl_caption.runtime.threads import granted_cores

if TYPE_CHECKING:
    from rl_caption.captioners.base import Captioner
    from rl_caption.config.schema import ScstConfig
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
    "pycocoevalcap": "evaluate has no BLEU, METEOR, ROUGE-L and CIDEr",
    "tqdm": "nothing runs",
    "psutil": "nothing runs",
    "scipy": "no monitor of reward hacking, and no correlations in judge",
    "filelock": "nothing trains: a run folder belongs to one process",
}
"""Package that every installation has -> what is not possible without it."""
TAGGER_DATA = "averaged_perceptron_tagger_eng"
NO_JAVA = "METEOR, SPICE and the PTB tokenizer are left out of evaluate; training does not use Java"
NO_START = "the run does not start"
GB = 1e9
LITTLE_DISK_GB = 5.0
REINSTALL = "python -m pip install rl-caption (in a clone, make install)"
OTHER_TORCH = (
    "reinstall torch and torchvision in matching versions: https://pytorch.org/get-started/locally/ has the command"
)
TORCHVISION_REMEDY = "in a clone of rl-caption: python scripts/torchvision_remedy.py"
OWN_START = (
    "train a captioner with rl-caption xe --config own_xe --data.path mine.jsonl, then give "
    "--model.init runs/own/xe/export/best"
)


class Finding(NamedTuple):
    """A line of the report: what was looked at, what was found, what its absence costs ("" where nothing is missing),
    whether it keeps the main job from running, and the command or key that mends it."""

    name: str
    value: str
    cost: str = ""
    fatal: bool = False
    remedy: str = ""


def package_findings() -> Iterator[Finding]:
    """Yield the version of every package that this one uses, needed ones first."""
    costs = {package: f"{cost} (pip install 'rl-caption[{extra}]')" for package, extra, cost in OPTIONAL.values()}
    for package, cost in (NEEDED | costs).items():
        version = installed_version(package)
        fatal = version is None and package in NEEDED
        yield Finding(package, version or "missing", "" if version else cost, fatal, REINSTALL if fatal else "")


def torchvision_findings() -> Iterator[Finding]:
    """Yield whether torchvision loads; a new process tries it, which takes 2 to 5 seconds."""
    version = installed_version("torchvision")
    if version is None:
        yield Finding("torchvision", "not installed; no program needs it")
    elif error := torchvision_error():
        remedy = f"{OTHER_TORCH}, or {TORCHVISION_REMEDY}" if "operator torchvision::" in error else OTHER_TORCH
        cost = "Transformers, open_clip and the accelerate command do not start"
        yield Finding("torchvision", f"{version}: does not load ({error})", cost, True, remedy)
    else:
        yield Finding("torchvision", f"{version}: loads")


def torchvision_error() -> str:
    """The last line of what ``import torchvision`` prints in a new process; empty when it succeeds."""
    command = [sys.executable, "-P", "-c", "import torchvision"]  # -P: not a folder of that name that lies here
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    message = process.stderr.strip() or f"ended with {process.returncode} without a message"
    return message.splitlines()[-1] if process.returncode else ""


def device_findings() -> Iterator[Finding]:
    """Yield the CPU, the memory and every GPU with its memory and whether it computes in bf16."""
    yield Finding("CPU cores", f"{granted_cores()} of {os.cpu_count()} processors ({platform.machine()})")
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
        yield Finding(f"GPU {index}", f"{properties.name}, {properties.total_memory / GB:.1f} GB, {bf16}")
    if torch.backends.mps.is_available():
        yield Finding("GPU", "Apple (mps), shares the memory of the machine; one process only")
    elif torch.cuda.device_count() == 0:
        yield Finding("GPU", "none", "training runs on the CPU: enough for the demo, slow for real data sets")


def java_findings() -> Iterator[Finding]:
    """Yield the Java runtime and the Java programs of the caption toolkit."""
    # Imported here, like all that is not the standard library: the report is wanted most where packages are missing.
    try:
        from rl_caption.evaluation.toolkit import JavaError, find_java
    except ImportError as error:
        yield Finding("evaluate", "does not start", f"no captions can be scored: {error}", True, REINSTALL)
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
    toolkit = Path(next(iter(spec.submodule_search_locations)))
    spice = ["spice-1.0.jar", "lib/stanford-corenlp-3.6.0.jar", "lib/stanford-corenlp-3.6.0-models.jar"]
    download = "python -m pycocoevalcap.spice.get_stanford_models downloads 0.4 GB for it"
    for name, folder, jars, cost in (
        ("PTB tokenizer", "tokenizer", ["stanford-corenlp-3.4.1.jar"], "no PTB tokenizer"),
        ("METEOR", "meteor", ["meteor-1.5.jar"], "METEOR is left out of evaluate"),
        ("SPICE", "spice", spice, f"SPICE is left out of evaluate; {download}"),
    ):
        missing = [Path(jar).name for jar in jars if not (toolkit / folder / jar).is_file()]
        finding = f"missing: {', '.join(missing)}" if missing else ", ".join(Path(jar).name for jar in jars)
        yield Finding(name, finding, cost if missing else "")


def tagger_findings() -> Iterator[Finding]:
    """Yield whether NLTK's tagger has its data; the default tagger of detail units, TextBlob's, brings its own."""
    try:
        import nltk

        path = nltk.data.find(f"taggers/{TAGGER_DATA}")
    except (ImportError, LookupError):
        cost = f"no NltkTagger, only the default tagger (python -m nltk.downloader {TAGGER_DATA})"
        yield Finding("NLTK tagger", f"{TAGGER_DATA} is missing", cost)
    else:
        yield Finding("NLTK tagger", str(path))


def machine_findings() -> Iterator[Finding]:
    """Yield the interpreter, the compiler (DeepSpeed builds operators at first use) and the space for runs."""
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", platform.platform())
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), "")
    try:
        process = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=True)
        yield Finding("C++ compiler", f"{process.stdout.strip()} ({compiler})".splitlines()[0])
    except (OSError, subprocess.SubprocessError) as error:
        cost = "DeepSpeed cannot build its own operators; nothing else compiles anything"
        yield Finding("C++ compiler", f"missing: {error}" if compiler else "missing", cost)
    free = shutil.disk_usage(Path.cwd()).free / GB
    cost = "" if free >= LITTLE_DISK_GB else "a checkpoint of a base-size captioner with its optimizer takes about 3 GB"
    yield Finding("free disk space", f"{free:.1f} GB in {Path.cwd()}", cost)


SECTIONS = {
    "Machine": machine_findings,
    "Packages": package_findings,
    "Image processing": torchvision_findings,
    "Devices": device_findings,
    "Evaluation": java_findings,
    "Details of captions": tagger_findings,
}


def config_findings(config: ScstConfig) -> Iterator[Finding]:
    """Yield what a self-critical run would start from: data, captioner, and the scales of its reward's terms.

    Nothing is written, images are not decoded for a check, and what does not exist yet is named.
    """
    from rl_caption.config import build
    from rl_caption.data.base import DataError
    from rl_caption.data.checks import check_data

    build.quiet_libraries()
    try:
        data = build.build_data(config.data)
        with_images = config.data.features_root is None
        report = check_data(data, ["train"], config.data.on_bad, check_pixels=False, check_images=with_images)
        rows = report.good_rows_of(data).split("train")
    except (DataError, build.ConfigError) as error:
        yield Finding("data", str(error), NO_START, fatal=True)
        return
    yield Finding("data", f"{len(rows)} training images")
    finding, captioner = _captioner_finding(config, build.references_of(rows))
    yield finding
    if hasattr(captioner, "key_value_bytes"):  # of a vision-language model
        yield _memory_finding(config, rows, captioner)
    yield _reward_finding(config, rows, captioner)


def _captioner_finding(config: ScstConfig, references: list[list[str]]) -> tuple[Finding, Captioner | None]:
    """A line about the captioner that the run starts from; and the captioner, or None where it is not there yet."""
    from rl_caption.captioners.base import CaptionerError
    from rl_caption.config import build

    start = config.model.init
    if start is None:
        return Finding("captioner", "model.init is not set", NO_START, True, OWN_START), None
    if not Path(start).exists() and config.model.name != "huggingface":
        if config.warm_start is None:
            return Finding("captioner", f"model.init {start} does not exist", NO_START, True, OWN_START), None
        finding = f"{start} does not exist yet; the run makes it by {config.warm_start}"
        return Finding("captioner", finding, "no scales on its samples"), None
    try:
        captioner = build.build_captioner(config.model, references, config.data.cache_mb, config.data.tokenizer)
        build.check_positions(captioner, "rollout.max_new_tokens", config.rollout.max_new_tokens)
    except (CaptionerError, build.ConfigError) as error:
        return Finding("captioner", str(error), NO_START, fatal=True), None
    return Finding("captioner", start), captioner


def _memory_finding(config: ScstConfig, rows: Sequence[Row], captioner: Any) -> Finding:
    """What a step holds at least, on one process without DeepSpeed, against the memory of the device.

    Keys and values are those of sampling; activations, which depend on the model, come on top.
    """
    import psutil
    import torch

    from rl_caption.config import build
    from rl_caption.scst.objectives import build_objective

    train, decoding = config.train, build.build_decoding(config)
    images = min(train.micro_batch_size or train.batch_size, len(rows))
    objective = build_objective(train.objective, train.objective_kwargs, train.loss_reduction, train.kl_coef)
    parameters = list(captioner.policy.parameters())
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    held = {
        "weights": sum(parameter.nbytes for parameter in parameters)
        + getattr(objective, "needs_reference", False) * trained,
        "gradients and moments": 3 * trained,
        "keys and values": captioner.key_value_bytes(
            [rows[number] for number in range(images)], decoding.captions_per_image, decoding.max_new_tokens
        ),
    }
    on_gpu = torch.cuda.is_available()
    memory = torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total
    total = sum(held.values())
    value = ", ".join(f"{what} {size / GB:.2g} GB" for what, size in held.items())
    value += f": {total / GB:.2g} of {memory / GB:.1f} GB, activations not counted"
    if total <= memory:
        return Finding("memory of a step", value)
    remedy = "set model.lora and model.dtype bfloat16, a smaller train.micro_batch_size, or an engine that shards"
    return Finding("memory of a step", value, "it does not fit the device", True, f"{remedy} (docs/scaling.md)")


def _reward_finding(config: ScstConfig, rows: Sequence[Row], captioner: Captioner | None) -> Finding:
    """The scales of the reward's terms on references, and on samples of a captioner."""
    from accelerate import Accelerator

    from rewards.base import RewardError
    from rl_caption.config import build
    from rl_caption.runtime.engines import accelerator_kwargs, usable_precision
    from rl_caption.scst.reward_scales import sample_scores, scale_report

    size = config.train.micro_batch_size or 16
    try:
        reward = build.build_reward(config.reward, build.references_of(rows), tokenizer=config.data.tokenizer)
        decoding = build.build_decoding(config)
        precision = usable_precision(config.train.mixed_precision)
        accelerator = Accelerator(mixed_precision=precision, **accelerator_kwargs())
        sample = None
        if captioner is not None:
            sample = partial(sample_scores, captioner, decoding, config.train.seed, accelerator, size)
        return Finding("reward", "\n  ".join(scale_report(reward, rows, sample)))
    except (build.ConfigError, RewardError) as error:
        kwargs = [term.kwargs for term in config.reward.terms.values()]
        models = [str(arguments[key]) for arguments in kwargs for key in ("backbone", "head") if key in arguments]
        if config.reward_models and any(name in str(error) and not Path(name).exists() for name in models):
            finding = f"the run first trains the models of {', '.join(config.reward_models)}"
            return Finding("reward", f"{error}; {finding}", "no scales of its terms")
        return Finding("reward", str(error), "the run does not start until this exists", fatal=True)


def doctor(config: ScstConfig | None = None, name: str = "demo") -> int:
    """Print the report, and what the self-critical run of ``config``, which ``--config NAME`` reads, would start from.

    Returns:
        0 when the main job (and the run of ``config``) can run here, 1 when something that it needs is missing.
    """
    fatal = [finding for title, section in SECTIONS.items() for finding in _print_section(title, section())]
    if fatal:
        print(f"The main job cannot run here: {_told(fatal)}")
        return 1
    from rl_caption.runtime.launch import launch_command

    fatal = [] if config is None else _print_section("Configuration", config_findings(config))
    if fatal:
        print(f"The main job can run here, but not yet with this configuration: {_told(fatal)}")
        return 1
    print("Two processes that train together on this machine:")
    print(f"  {launch_command(2, ['-m', 'rl_caption', 'scst', '--config', 'demo'])}")
    print(f"The main job can run here. To start it: rl-caption scst --config {name}")
    return 0


def _told(fatal: Sequence[Finding]) -> str:
    """The names of findings, and what mends them."""
    remedies = list(dict.fromkeys(finding.remedy or f"{finding.value} (see above)" for finding in fatal))
    return f"{', '.join(finding.name for finding in fatal)}.\nTo mend it: {'; then '.join(remedies)}"


def main(argv: list[str] | None = None) -> int:
    """Run ``doctor`` as a program: ``doctor [--config FILE [--section.key VALUE ...]]``."""
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
        help="a configuration of scst: say what its run would start from, and measure each reward term on references "
        "and on samples of the captioner (seconds to a minute)",
    )
    options, overrides = parser.parse_known_args(argv)
    if options.config is None:
        if overrides:
            parser.error(f"unrecognized arguments: {' '.join(overrides)}")
        return doctor()
    from rl_caption.cli.configuration import parse
    from rl_caption.config.schema import ScstConfig

    config = parse(ScstConfig, ["--config", options.config, *overrides], "rl-caption doctor")
    return doctor(config, shlex.join([options.config, *overrides]))


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
