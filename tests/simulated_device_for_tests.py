"""A simulated device beside the CPU, which refuses what a GPU would refuse.

A tensor of it wraps a CPU tensor, which computes. An operation on tensors of both
devices raises, and so does ``numpy()``; CPU scalars and CPU indices are taken, as on a
GPU. Autocast is a no-op. It registers torch's one private backend for the rest of the
process, so activate it in a child process.
"""

import importlib

import torch
from accelerate.state import PartialState
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

NAME = "simulated"
INDEXED = (
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
)
COPIES = ("aten::copy_", "aten::_to_copy")
REWARDS = (
    "rewards.clip.backbone",
    "rewards.clip.bottleneck",
    "rewards.frozen_model",
    "rl_caption.lab.visual_bottleneck",
)
"""Modules whose models go to ``default_device``."""


class SimulatedTensor(Tensor):
    """A tensor on the simulated device; ``inner`` is its CPU tensor."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner, requires_grad=False):
        self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
            requires_grad=requires_grad,
        )
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})

    # Methods that torch refuses for subclasses, or that need their storage.
    def tolist(self):
        return self.inner.tolist()

    def storage(self):
        return self.inner.storage()

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def data_ptr(self):
        return self.inner.data_ptr()

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = SimulatedTensor(self.inner.detach().clone(), self.requires_grad)
            copy._is_param = getattr(self, "_is_param", False)  # type: ignore[attr-defined]
            memo[id(self)] = copy
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return self.inner.__reduce_ex__(protocol)  # saved, it is a CPU tensor


class FactoryMode(TorchDispatchMode):
    """Dispatch mode for tensors that are made on the device or move to it."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled here; a check at each operation takes time

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})


def simulated(device):
    return isinstance(device, torch.device) and device.type == NAME


def compute(operator, args, kwargs):
    """Run an operation on the CPU tensors inside, and wrap its results. Raises
    ``RuntimeError`` where tensors are on both devices.
    """
    name = operator._schema.name
    leaves = tree_leaves((args, kwargs))
    own = [leaf for leaf in leaves if isinstance(leaf, SimulatedTensor)]
    inside = {id(leaf.inner): leaf for leaf in own}
    if not inside and not any(map(simulated, leaves)):
        return operator(*args, **kwargs)
    outside = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    taken = [*own]
    if name in INDEXED and isinstance(args[0], SimulatedTensor):
        taken += args[1]
    for leaf in taken:
        outside.pop(id(leaf), None)
    if inside and name not in COPIES and any(leaf.ndim for leaf in outside.values()):
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, found {NAME} and cpu"
        )

    def unwrapped(leaf):
        if isinstance(leaf, SimulatedTensor):
            return leaf.inner
        return torch.device("cpu") if simulated(leaf) else leaf

    def wrapped(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        # in place: the same tensor
        return inside[id(leaf)] if id(leaf) in inside else SimulatedTensor(leaf)

    options = tree_map(unwrapped, kwargs)
    target = kwargs.get("device")
    if name == "aten::_to_copy":
        # without it an unchanged tensor would be itself
        options["device"] = torch.device("cpu")
    result = operator(*tree_map(unwrapped, args), **options)
    if name == "aten::copy_":
        return args[0]
    if name == "aten::_to_copy" and target is not None and not simulated(target):
        return result
    return tree_map(wrapped, result)


class _Backend(_DummyBackendModule):
    """The module ``torch.simulated``."""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)


class _Hook(_DummyPrivateUse1Hook):
    def get_default_generator(self, index):
        return torch.default_generator


_LIBRARIES: list[torch.library.Library] = []
"""Kept alive: a library's registrations end with it."""


def activate():
    """Make it the device of Accelerate and of rewards' models in this process."""
    _setup_privateuseone_for_python_backend(
        NAME, backend_module=_Backend(), hook=_Hook()
    )
    for namespace, key in (
        ("_", "AutocastPrivateUse1"),
        ("_", "PrivateUse1"),
        ("aten", "PrivateUse1"),
    ):
        _LIBRARIES.append(torch.library.Library(namespace, "IMPL", key))
    autocast, others, aten = _LIBRARIES
    autocast.fallback(torch.library.fallthrough_kernel)
    # torch.tensor(values, device=...) is made without the modes.
    others.fallback(lambda operator, *args, **kwargs: compute(operator, args, kwargs))
    aten.impl(
        "empty_strided",
        lambda size, stride, dtype=None, **_: SimulatedTensor(
            torch.empty_strided(size, stride, dtype=dtype)
        ),
    )

    def copy(to, source, *_):
        return compute(torch.ops.aten.copy_.default, (to, source), {})

    aten.impl("copy_", copy)
    aten.impl("_copy_from", lambda source, to, *_: copy(to, source))
    # a parameter that moves stays itself, and tied
    torch.__future__.set_swap_module_params_on_conversion(True)
    PartialState.default_device = property(lambda state: torch.device(NAME, 0))
    for module in REWARDS:
        importlib.import_module(module).default_device = lambda device: (
            device or f"{NAME}:0"
        )
    FactoryMode().__enter__()
