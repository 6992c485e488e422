"""What this environment can do, and what a run would need: versions, devices, what is missing and
what that costs.
"""

import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rl_caption.cli.configuration import file_of, program_of, read_file
from rl_caption.cli.pipeline import Wishes, make_stages, read_wishes
from rl_caption.cli.preflight import Finding, has_weights, preflight
from rl_caption.cli.programs import PROGRAMS
from rl_caption.cli.stages import Stage, load, read_pipeline
from rl_caption.cli.torchvision_remedy import FAULT, import_error, mend
from rl_caption.config.shipped import find_config
from rl_caption.runtime.errors import EXPECTED, OPTIONAL, UsageError, installed_version
from rl_caption.runtime.threads import granted_cores

NEEDED = (
    "torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy", "pillow",
    "pydantic", "jinja2", "matplotlib", "pycocoevalcap", "tqdm", "psutil", "scipy", "filelock",
)  # fmt: skip
"""Packages that every installation has."""
GB = 1e9
REINSTALL = "python -m pip install rl-caption (in a clone, make install)"
OTHER_TORCH = "reinstall torch and torchvision in matching versions: https://pytorch.org/get-started/locally/ has the command"
SMALLER = "set model.lora and model.dtype bfloat16, a smaller train.micro_batch_size, or an engine that shards (docs/scaling.md)"


def package_findings() -> Iterator[Finding]:
    """Yield the version of every package that this one uses, needed ones first."""
    for package in NEEDED:
        version = installed_version(package)
        if version is None:
            yield Finding(package, "missing", "nothing runs", True, REINSTALL)
        else:
            yield Finding(package, version)
    for package, extra, cost in OPTIONAL.values():
        version = installed_version(package)
        missing = f"{cost} (pip install 'rl-caption[{extra}]')"
        yield Finding(package, version or "missing", "" if version else missing)


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


def machine_findings() -> Iterator[Finding]:
    """Yield the interpreter, CPU, memory, disk, every GPU, and Java."""
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    cores = f"{granted_cores()} of {os.cpu_count()} processors"
    yield Finding("CPU cores", f"{cores} ({platform.platform()})")
    free = shutil.disk_usage(Path.cwd()).free / GB
    cost = "a checkpoint of a base-size captioner takes about 3 GB" if free < 5 else ""
    yield Finding("free disk space", f"{free:.1f} GB in {Path.cwd()}", cost)
    try:
        import psutil
        import torch

        from rl_caption.evaluation.toolkit import JavaError, find_java
    except (ImportError, OSError, RuntimeError) as error:
        remedy = REINSTALL if isinstance(error, ModuleNotFoundError) else OTHER_TORCH
        yield Finding("torch", "does not import", str(error), True, remedy)
        return
    yield Finding("memory", f"{psutil.virtual_memory().total / GB:.1f} GB")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            bf16 = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bf16"
        value = f"{properties.name}, {properties.total_memory / GB:.1f} GB, {bf16}"
        yield Finding(f"GPU {index}", value)
    if torch.backends.mps.is_available():
        yield Finding("GPU", "Apple (mps), shares the memory of the machine; one process only")
    elif torch.cuda.device_count() == 0:
        cost = "training runs on the CPU: enough for the demo, slow for real data sets"
        yield Finding("GPU", "none", cost)
    try:
        java = find_java()
    except JavaError as error:
        yield Finding("Java", str(error), "evaluate leaves METEOR, SPICE and Java's tokenizer out")
    else:
        yield Finding("Java", f"{java.version} ({java.path})")


SECTIONS = {
    "Packages": package_findings,
    "Image processing": torchvision_findings,
    "Machine": machine_findings,
}


def stage_findings(stages: Sequence[Stage]) -> Iterator[Finding]:
    """Yield what stages need and, where nothing is missing, whether a step of a captioner that is
    there fits the device, and the scales of its rewards.

    No weights are downloaded, and no image is decoded for a check.
    """
    fatal = False
    for finding in preflight(stages):
        fatal |= finding.fatal
        yield finding
    for stage in stages:
        if stage.program in ("xe", "scst") and not fatal:
            try:
                yield from _step_findings(stage.config)
            except EXPECTED as error:
                yield Finding("captioner", str(error), "the run does not start", True)


def _step_findings(config: Any) -> Iterator[Finding]:
    from rl_caption.config import build

    init, data = config.model.init, config.data
    if init is not None and not Path(init).exists() and config.model.name != "huggingface":
        return  # an earlier stage makes it
    build.quiet_libraries()
    rows = build.build_data(data).split("train")
    references = build.references_of(rows)
    ready = init is None or has_weights(init)
    captioner = build.build_captioner(
        config.model, references, data.cache_mb, data.tokenizer, weights=ready
    )
    yield _memory_finding(config, rows, captioner)
    if hasattr(config, "reward") and ready:
        yield _reward_finding(config, rows, captioner)


def _memory_finding(config: Any, rows: Sequence[Any], captioner: Any) -> Finding:
    """What a step holds at least, on one process without DeepSpeed, against the memory of the
    device.

    Keys and values are those of decoding, of vision-language models; activations, which depend on
    the model, come on top.
    """
    import psutil
    import torch

    train = config.train
    images = min(train.micro_batch_size or train.batch_size, len(rows))
    first_rows = [rows[number] for number in range(images)]
    parameters = list(captioner.policy.parameters())
    trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    held = {"weights": sum(parameter.nbytes for parameter in parameters)}
    held["gradients and moments"] = 3 * trained
    tokens, captions = 0, 0
    if hasattr(config, "rollout"):
        tokens, captions = config.rollout.max_new_tokens, images * (config.rollout.num_samples + 1)
        held["weights"] += trained * bool(train.kl_coef or config.monitor.kl)
    else:
        tokens = train.max_target_tokens
    if hasattr(captioner, "key_value_bytes"):
        captions = max(captions, config.eval.batch_size * (config.eval.num_beams or 1))
        held["keys and values"] = captioner.key_value_bytes(first_rows, captions, tokens)
    on_gpu = torch.cuda.is_available()
    memory = torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total
    value = ", ".join(f"{what} {size / GB:.2g} GB" for what, size in held.items())
    value += f": {sum(held.values()) / GB:.2g} of {memory / GB:.1f} GB, activations not counted"
    if sum(held.values()) <= memory:
        return Finding("memory of a step", value)
    return Finding("memory of a step", value, "it does not fit the device", True, SMALLER)


def _reward_finding(config: Any, rows: Sequence[Any], captioner: Any) -> Finding:
    """The scales of the reward's terms on references, and on samples of a captioner."""
    from accelerate import Accelerator

    from rl_caption.config import build
    from rl_caption.runtime.engines import accelerator_kwargs, usable_precision
    from rl_caption.scst.advantages import build_advantage
    from rl_caption.scst.reward_scales import sample_scores, scale_report

    tokenizer, train = config.data.tokenizer, config.train
    reward = build.build_reward(config.reward, build.references_of(rows), tokenizer=tokenizer)
    precision = usable_precision(train.mixed_precision)
    accelerator = Accelerator(mixed_precision=precision, **accelerator_kwargs())
    size = train.micro_batch_size or 16
    advantage = build_advantage(train.advantage, train.advantage_kwargs)
    decoding = build.build_decoding(config.rollout, advantage)
    sample = partial(sample_scores, captioner, decoding, train.seed, accelerator, size)
    return Finding("reward", "\n  ".join(scale_report(reward, rows, sample)))


def doctor(findings: Iterable[Finding] | None = None, command: str = "run demo") -> int:
    """Print the report, and what ``findings`` say of what a ``command`` needs.

    Returns:
        0 when the main job (and that command) can run here, 1 when something is missing.
    """
    fatal = []
    for title, section in SECTIONS.items():
        fatal += _print_section(title, section())
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
    print(f"  {launch_command(2, ['-m', 'rl_caption', *shlex.split(command)])}")
    print(f"The main job can run here. To start it: rl-caption {command}")
    return 0


USAGE = """usage: rl-caption doctor [--mend] [--config FILE [OPTIONS]]

Print versions, devices, what is missing and what that costs. Ends with 1 where the main job cannot run.

  --mend          first let torchvision load beside a CPU-only torch, if that is its fault
  --config FILE   a recipe or a pipeline: also say what it needs; options of its program may follow"""


def main(arguments: Sequence[str]) -> int:
    """Print the report, and what a recipe or a pipeline needs."""
    if "--help" in arguments:
        print(USAGE)
        return 0
    config, words = file_of([word for word in arguments if word != "--mend"])
    if "--mend" in arguments and (done := mend()[0]):
        print(f"{done}\n")
    if config is None:
        if words:
            raise UsageError(USAGE)
        return doctor(preflight(make_stages("demo", Wishes()), rows=False))
    found = program_of(read_file(find_config(config)))
    name = found if found in PROGRAMS else "scst"  # whose loader says what is wrong
    if name == "run":
        wishes = read_wishes(words, list(read_pipeline(config)))
        stages = make_stages(config, wishes)
        return doctor(stage_findings(stages), shlex.join(["run", config, *words]))
    words = ["--config", config, *words]
    stage = Stage(name, name, words, load(name, words))
    return doctor(stage_findings([stage]), shlex.join([name, *words]))


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
