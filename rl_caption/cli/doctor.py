"""What this environment can do, and what a run would need: versions, devices, what is missing and
what that costs.
"""

import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rl_caption.cli.configuration import file_of, program_of, read_file
from rl_caption.cli.pipeline import Wishes, make_stages, read_wishes
from rl_caption.cli.preflight import Finding, preflight
from rl_caption.cli.programs import PROGRAMS
from rl_caption.cli.stages import Stage, load, read_pipeline
from rl_caption.cli.torchvision_remedy import FAULT, import_error, mend
from rl_caption.config.shipped import find_config
from rl_caption.runtime.errors import OPTIONAL, UsageError, installed_version
from rl_caption.runtime.threads import granted_cores

NEEDED = (
    "torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy", "pillow",
    "pydantic", "jinja2", "matplotlib", "pycocoevalcap", "tqdm", "psutil", "scipy", "filelock",
)  # fmt: skip
"""Packages that every installation has."""
GB = 1e9
REINSTALL = "python -m pip install rl-caption (in a clone, make install)"
OTHER_TORCH = "reinstall torch and torchvision in matching versions: https://pytorch.org/get-started/locally/ has the command"


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
        remedy = (
            f"rl-caption doctor --mend, or {OTHER_TORCH}"
            if FAULT in error
            else OTHER_TORCH
        )
        cost = "Transformers, open_clip and the accelerate command do not start"
        yield Finding(
            "torchvision", f"{version}: does not load ({error})", cost, True, remedy
        )
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
            bf16 = (
                "bf16"
                if torch.cuda.is_bf16_supported(including_emulation=False)
                else "no bf16"
            )
        value = f"{properties.name}, {properties.total_memory / GB:.1f} GB, {bf16}"
        yield Finding(f"GPU {index}", value)
    if torch.backends.mps.is_available():
        yield Finding(
            "GPU", "Apple (mps), shares the memory of the machine; one process only"
        )
    elif torch.cuda.device_count() == 0:
        cost = "training runs on the CPU: enough for the demo, slow for real data sets"
        yield Finding("GPU", "none", cost)
    try:
        java = find_java()
    except JavaError as error:
        yield Finding(
            "Java", str(error), "evaluate leaves METEOR, SPICE and Java's tokenizer out"
        )
    else:
        yield Finding("Java", f"{java.version} ({java.path})")


SECTIONS = {
    "Packages": package_findings,
    "Image processing": torchvision_findings,
    "Machine": machine_findings,
}


def doctor(stages: Sequence[Stage], command: str, rows: bool = True) -> int:
    """Print the report, and what the ``stages`` of a command need.

    Returns:
        0 when the main job and that command can run here, 1 when something is missing.
    """
    fatal = []
    for title, section in SECTIONS.items():
        fatal += _print_section(title, section())
    verdict = "The main job cannot run here"
    if not fatal:
        fatal = _print_section("Configuration", preflight(stages, rows))
        verdict = f"The main job can run here, but not yet {command}"
    if fatal:
        remedies = [
            finding.remedy or f"{finding.value} (see above)" for finding in fatal
        ]
        print(f"{verdict}: {', '.join(finding.name for finding in fatal)}.")
        print(f"To repair it: {'; then '.join(dict.fromkeys(remedies))}")
        return 1
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
            raise UsageError(f"{words[0]!r} is no option\n{USAGE}")
        return doctor(make_stages("demo", Wishes()), "run demo", rows=False)
    program = program_of(read_file(find_config(config)))
    if program == "run":
        stages = make_stages(config, read_wishes(words, list(read_pipeline(config))))
        return doctor(stages, shlex.join(["run", config, *words]))
    name = program if program in PROGRAMS else "scst"  # whose loader says what is wrong
    words = ["--config", config, *words]
    return doctor(
        [Stage(name, name, words, load(name, words))], shlex.join([name, *words])
    )


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
