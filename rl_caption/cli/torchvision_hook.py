"""Define the operators that torchvision's import looks for; ``doctor --mend`` copies
this file to site-packages.

torchvision's own library defines them; where that does not load beside a CPU-only
torch, their schemas are enough.
"""

import sys


class Finder:
    """An import hook that finds nothing; it acts before the first module that needs the operators."""

    libraries: tuple = ()  # keeps the definitions alive; empty as long as nothing was repaired

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Define the operators before torchvision's module that registers kernels for them."""
        if name == "torchvision._meta_registrations":
            import torch

            if not hasattr(torch.ops.torchvision, "nms"):
                cls.libraries = (torch.library.Library("torchvision", "DEF"),)
                for operator in ("nms", "qnms"):
                    cls.libraries[0].define(
                        operator
                        + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )


sys.meta_path.insert(0, Finder)
