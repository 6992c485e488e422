"""Errors that a user can mend, printed as one message instead of a traceback."""

import importlib.metadata
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import rewards.base


class UserError(Exception):
    """Base of the errors that a user can mend: the message names what is wrong, and
    what would be right.
    """


class UsageError(SystemExit):
    """The command line cannot be understood; ends the program with code 2 and a message."""

    def __init__(self, message: str) -> None:
        print(f"error: {message}", file=sys.stderr)
        super().__init__(2)


class ConfigError(UserError, ValueError):
    """A configuration is not usable; the message names the key, the value, and what would be right."""


class CaptionerError(UserError, ValueError):
    """A saved captioner cannot be used; the message names the folder and what is wrong with it."""


config_errors = partial(
    rewards.base.naming, kinds=(ValueError, TypeError, OSError), error=ConfigError
)
"""Context ``config_errors(key)``: errors in the arguments and files of a key become a
``ConfigError``.
"""


naming = partial(rewards.base.naming, error=ConfigError, kept=(ConfigError,))
"""Context ``naming(where)``: a ``ValueError`` or ``OSError`` becomes a ``ConfigError``
that begins with ``where``.
"""
KEPT = (UserError, rewards.base.RewardError)
"""Errors whose messages already name what is wrong."""
errors_of_user_code = partial(
    rewards.base.errors_of_user_code, error=ConfigError, kept=KEPT
)
"""Context ``errors_of_user_code(where)``: exceptions of a user's code become a
``ConfigError``; see ``rewards.base``.
"""
EXPECTED = (*KEPT, OSError)
"""Errors that end a program with one message and without a traceback."""


OPTIONAL = {
    "open_clip_torch": ("clip", "no CLIP-based rewards, no reward models, no demo"),
    "peft": ("peft", "no LoRA (model.lora, and lora of grpo_vlm)"),
    "trl": ("trl", "no grpo_vlm; this package's own trainer does not use it"),
    "deepspeed": ("deepspeed", "no ZeRO sharding over several GPUs (Linux only)"),
    "tensorboard": (
        "tensorboard",
        "no TensorBoard logs; metrics.jsonl is written all the same",
    ),
    "h5py": (
        "features",
        "region features in HDF5 files cannot be read; folders of .npz and .npy can",
    ),
    "bert_score": ("bertscore", "no BERTScore"),
    "openai": (
        "language",
        "no language models behind endpoints; local ones are there",
    ),
    "textblob": ("specs", "captions are not cut into details (SPECS)"),
    "pandas": (
        "lab",
        "curate and concreteness, which keep tables of captions, do not run",
    ),
    "datasets": (
        "hub",
        "data.format hub (also Parquet, CSV, tar shards) cannot be read",
    ),
    "num2words": ("vlm", "the processor of SmolVLM cannot be loaded"),
    "fastapi": ("serve", "no server of rewards (serve)"),
    "uvicorn": ("serve", "no server of rewards (serve)"),
    "gradio": ("web", "no page of captions in the browser (web)"),
    "torchmetrics": ("torchmetrics", "rewards are no metrics of torchmetrics"),
    "av": (
        "video",
        "no video files; folders of frames and animated images are read all the same",
    ),
}
"""Optional package -> the extra that installs it (docs/installation.md), and what is
missing without it.
"""
EXTRAS = {"open_clip": "clip", "timm": "clip"} | {
    package: extra for package, (extra, _) in OPTIONAL.items()
}
"""Optional module -> the extra that installs it."""


def not_installed(*modules: str) -> str:
    """A sentence for the user: optional modules that are missing, and the command that
    installs them.
    """
    extras = ",".join(sorted({EXTRAS[module] for module in modules}))
    return f"{' and '.join(modules)} not installed: pip install 'rl-caption[{extras}]'"


def installed_version(package: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@contextmanager
def user_errors() -> Iterator[None]:
    """Context that ends the program with code 1 and a message for an expected error,
    for an error in code that the configuration names, and for a missing optional
    package, whose extra the message names.

    A call of ``sys.exit`` in a user's code ends it in the same way, whatever the code.
    Where the reader of the output has gone (``| head``), it ends without a message,
    with the code of SIGPIPE. Anything else is a defect and is raised.
    """
    try:
        with errors_of_user_code(
            rewards.base.TARGETS, kept=(*KEPT, ModuleNotFoundError)
        ):
            yield
        sys.stdout.flush()
    except (ImportError, RuntimeError, ValueError, *EXPECTED) as error:
        if isinstance(error, BrokenPipeError):
            output = select.poll()
            output.register(sys.stdout, 0)  # errors alone
            if output.poll(0):  # else another pipe broke
                # where Python flushes the rest at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit(128 + signal.SIGPIPE)
        message = _message(error)
        if not message:
            raise
        print(f"error: {message}", file=sys.stderr)
        sys.exit(1)


def _message(error: BaseException) -> str:
    """Message about an error for the user; empty for a defect."""
    module = (getattr(error, "name", None) or "").partition(".")[0]
    # Transformers, open_clip and timm import torchvision.
    if "operator torchvision::" in "".join(traceback.format_exception(error)):
        return "torchvision does not load beside this torch: run rl-caption doctor --mend, or install another torch"
    if isinstance(error, ModuleNotFoundError) and module in EXTRAS:
        return not_installed(module)
    is_configuration = type(error).__module__.startswith("pydantic")  # made in code
    return str(error) if is_configuration or isinstance(error, EXPECTED) else ""
