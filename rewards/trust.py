"""Classes that saved models name: those of this package are used, others only where the user trusts them.

A saved model's ``config.json`` comes with its weights, often from other people. It may name a class, such as the image
encoder of a dual encoder, and its arguments; whoever imports and calls what stands there runs that file. So names are
compared here before anything is imported (docs/reliability.md). Names that the user gives, in a configuration, on a
command line or in Python, need no check.
"""

import importlib
import logging
import os
import sys
from collections.abc import Iterable
from types import ModuleType

logger = logging.getLogger(__name__)
SHIPPED = frozenset({"rl_caption.captioners.image_encoder:CaptionerImage"})
"""Classes of this package that a saved model may name."""
_trusted: set[str] = set()


def trust(names: Iterable[str]) -> None:
    """Let saved models name these classes, ``package.module:Class``, in this process, with any arguments.

    Raises:
        ValueError: a name of another form.
    """
    for name in names:
        if not all(name.partition(":")[::2]):
            raise ValueError(
                f"trust has {name!r}: expected package.module:Class, as a saved model names it"
            )
        _trusted.add(name)


def trusted_names() -> frozenset[str]:
    """The names that were passed to ``trust``."""
    return frozenset(_trusted)


def check_trusted(name: str, where: str) -> None:
    """Check a name that a saved model gives, before it is imported.

    Args:
        name: ``package.module:Class``.
        where: what names it, such as ``image in FOLDER/config.json``.

    Raises:
        ValueError: it is neither of this package nor trusted.
    """
    if name not in SHIPPED | _trusted:
        raise ValueError(
            f"{where} is {name!r:.200}, which is not of this package, and a saved model must not choose what code "
            f"runs. If you know and trust it, set trust: [{name}] in the configuration, or --trust {name} "
            "(docs/reliability.md)"
        )


def import_outside(module: str) -> ModuleType:
    """Import a module that the user names, such as ``my_rewards``; also a file in the working directory.

    The working directory is searched, last and from then on, where the module is not found otherwise, and a log line
    says so: in a folder from elsewhere, a file may have the name of an optional package. Raises as
    ``importlib.import_module``.
    """
    package, folder = module.partition(".")[0], os.getcwd()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        other = (missing.name or "").partition(".")[0] != package
        if other or package in ("rewards", "rl_caption") or folder in sys.path:
            raise
    sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError:
        sys.path.remove(folder)
        raise
    if os.environ.get("RANK", "0") == "0":
        logger.info("%s is imported from the working directory, %s", package, folder)
    return imported
