"""Classes that saved models name, which are used only where the user trusts them.

A saved model's ``config.json`` comes with its weights, often from other people. It may
name a class, such as the image encoder of a dual encoder, and its arguments; importing
and calling that class runs code that the file chose. So names are compared here with
the names that the user trusts before anything is imported (docs/reliability.md). Names
that the user gives, in a configuration, on a command line or in Python, need no check.
"""

import importlib
import os
import sys
from collections.abc import Iterable
from types import ModuleType

_trusted: set[str] = set()


def trust(names: Iterable[str]) -> None:
    """Let saved models name these classes, ``package.module:Class``, in this process,
    with any arguments.
    """
    _trusted.update(names)


def check_trusted(name: str, where: str) -> None:
    """Check a name that a saved model gives, before it is imported.

    Args:
        name: ``package.module:Class``.
        where: what names it, such as ``image in FOLDER/config.json``.

    Raises:
        ValueError: the user does not trust it.
    """
    if name not in _trusted:
        raise ValueError(
            f"{where} is {name!r:.200}, which is not of this package, and a saved "
            "model must not choose what code runs. If you know and trust it, set "
            f"trust: [{name}] in the configuration, or --trust {name} "
            "(docs/reliability.md)"
        )


def import_outside(module: str) -> ModuleType:
    """Import a module that the user names, such as ``my_rewards``; also a file in the
    working directory.

    The working directory is searched last, and only once a module was asked for by
    name: in a folder from elsewhere, a file may have the name of an optional package.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    return importlib.import_module(module)
