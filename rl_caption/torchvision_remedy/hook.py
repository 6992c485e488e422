"""Lets ``import torchvision`` succeed beside a CPU-only torch; copied into an environment's site-packages.

Where the package index offers torchvision only as a CUDA build, its compiled library cannot be loaded beside a CPU-only
torch, and ``import torchvision`` ends in ``operator torchvision::nms does not exist``: two operators are missing whose
schemas that library would have defined. Programs that never filter boxes need no more than the schemas. This module
waits for that one failure, defines the two schemas and imports torchvision again. Where torchvision loads natively it
does nothing, and a program that does not import torchvision pays one string comparison per import.

It stands alone (only ``os`` and ``sys``, which are loaded anyway), because a ``.pth`` file imports it at every start of
the interpreter. The environment variable ``RL_CAPTION_TORCHVISION_REMEDY=off`` switches it off.
"""

import os
import sys

TYPE_CHECKING = False  # what typing would say, without the cost of importing it
if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
OFF_SWITCH = "RL_CAPTION_TORCHVISION_REMEDY"

libraries: list[object] = []
"""Keeps the operator definitions alive; empty as long as the hook has not acted in this process."""


def is_missing_operator(error: RuntimeError) -> bool:
    """Whether ``error`` is the one failure that defining operator schemas repairs."""
    text = str(error)
    return "operator torchvision::" in text and "does not exist" in text


def define_operators() -> None:
    """Define the schemas of ``nms`` and ``qnms``, once per process."""
    if not libraries:
        import torch.library

        library = torch.library.Library("torchvision", "DEF")
        library.define("nms" + SCHEMA)
        library.define("qnms" + SCHEMA)
        libraries.append(library)


class SecondAttemptLoader:
    """Loads torchvision as its own loader does; on the missing operator, defines it and loads once more."""

    def __init__(self, native: "Loader") -> None:
        self.native = native

    def __getattr__(self, name: str) -> object:
        return getattr(self.native, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self.native.create_module(spec)

    def exec_module(self, module: "ModuleType") -> None:
        """Import natively; where the operators are missing, define them and import again from the start."""
        module.__loader__ = self.native
        if module.__spec__ is not None:
            module.__spec__.loader = self.native
        untouched = dict(module.__dict__)
        try:
            self.native.exec_module(module)
        except RuntimeError as error:
            if not is_missing_operator(error):
                raise
            for name in [name for name in sys.modules if name.startswith("torchvision.")]:
                del sys.modules[name]
            module.__dict__.clear()
            module.__dict__.update(untouched)
            define_operators()
            self.native.exec_module(module)


class TorchvisionFinder:
    """Hands ``torchvision`` to the finder that would have found it, with its loader wrapped."""

    def find_spec(self, name: str, path: object = None, target: "ModuleType | None" = None) -> "ModuleSpec | None":
        """Find ``torchvision`` as any finder would, and wrap its loader; leave every other name alone."""
        if name != "torchvision":
            return None
        for finder in list(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if isinstance(finder, TorchvisionFinder) or find_spec is None:
                continue
            spec = find_spec(name, path, target)
            if spec is not None:
                # A namespace package (an empty folder of that name) has no loader of its own to wrap.
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = SecondAttemptLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


def activate() -> None:
    """Put the finder first, once, unless it is switched off."""
    if os.environ.get(OFF_SWITCH, "").lower() in ("off", "0", "false"):
        return
    if not any(type(finder).__name__ == "TorchvisionFinder" for finder in sys.meta_path):
        sys.meta_path.insert(0, TorchvisionFinder())


activate()
