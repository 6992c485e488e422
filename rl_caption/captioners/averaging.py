"""Captioners whose weights are averaged: several that were fine-tuned from one start become one of the same size."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import flatten_dict

from rewards.model_files import check_state, state_shapes
from rl_caption.captioners.base import Captioner, CaptionerError, reading
from rl_caption.captioners.ensemble import vocabulary_difference
from rl_caption.captioners.loading import load_captioner

NOT_COMPARED = ("_name_or_path", "transformers_version", "dtype", "architectures")
"""Keys of configurations that change nothing of what a model computes; nor do dropout rates in evaluation."""


class Averaged(NamedTuple):
    """A captioner of averaged weights."""

    captioner: Captioner
    weights: list[float]
    distances: list[float]
    """Of each captioner, ||theta_i - theta_1|| / ||theta_1|| over all floating-point weights: 0.03 between two runs of
    DiCO from one start, 0.38 between two of cross-entropy from random weights, whose mean is of no use."""


@torch.no_grad()
def average_weights(names: Sequence[str], weights: Sequence[float] | None = None) -> Averaged:
    """Load captioners one after the other and average them: theta = sum_i weights[i] * theta_i, summed in float64.

    With equal weights a uniform soup (Wortsman et al. 2022, arXiv 2203.05482); of captioners that were trained from one
    start on different rewards, a rewarded soup (Ramé et al. 2023, arXiv 2306.04488). Adapters are merged in exports, so
    what is averaged are the full weights. Integer buffers are those of the first.

    Args:
        names: folders of captioners or names on the hub, at least two, no name twice.
        weights: one a captioner, non-negative, of sum 1; None is the same for all.

    Raises:
        CaptionerError: fewer than two names, or one twice; weights that do not fit; captioners of another class,
            vocabulary, configuration or shape than the first. The message names what differs.
    """
    if len(names) < 2 or len(set(names)) < len(names):
        raise CaptionerError(f"models are {list(names)}: expected two or more, none of them twice")
    shares = [1 / len(names)] * len(names) if weights is None else list(weights)
    if len(shares) != len(names) or not all(share >= 0 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise CaptionerError(f"weights are {shares}: expected {len(names)} numbers of at least 0 that sum to 1")
    captioner = load_captioner(names[0])
    first = {name: tensor.clone() for name, tensor in captioner.policy.state_dict().items()}
    floats = [name for name, tensor in first.items() if tensor.is_floating_point()]
    mean = {name: first[name].double() * shares[0] for name in floats}
    distances = [0.0]
    for name, share in zip(names[1:], shares[1:], strict=True):
        state = _state_like(captioner, names[0], name)
        for key in floats:
            mean[key] += state[key].double() * share
        distances.append(_norm([state[key] - first[key] for key in floats]) / _norm([first[key] for key in floats]))
    captioner.policy.load_state_dict(first | {key: value.to(first[key].dtype) for key, value in mean.items()})
    return Averaged(captioner, shares, distances)


def _state_like(first: Captioner, first_name: str, name: str) -> dict[str, Tensor]:
    """State dict of another captioner that computes what ``first`` does, but for its weights."""
    other = load_captioner(name)
    for what, (one, two) in {
        "class": (type(first).__name__, type(other).__name__),
        "prompt": (getattr(first, "prompt", ""), getattr(other, "prompt", "")),
    }.items():
        if one != two:
            raise CaptionerError(f"{first_name!r} and {name!r} cannot be averaged: {what} {one!r} and {two!r}")
    tokens = vocabulary_difference(first_name, first, name, other)
    if tokens is not None:
        raise CaptionerError(f"captioners of different vocabularies cannot be averaged: {tokens}")
    one, two = _settings(first), _settings(other)
    for key in sorted(one.keys() | two.keys()):
        if one.get(key) != two.get(key):
            values = f"{one.get(key)!r:.80} and {two.get(key)!r:.80}"
            raise CaptionerError(f"{first_name!r} and {name!r} cannot be averaged: {key} is {values}")
    state = other.policy.state_dict()
    with reading(name):
        check_state(state, state_shapes(first.policy), f"the weights of {name!r}")
    return state


def _settings(captioner: Any) -> dict[str, Any]:
    """What decides, beside the weights, what a captioner computes: its configuration and its image processor's."""
    parts: dict[str, Any] = {
        "config": getattr(captioner.policy, "config", None),
        "images": getattr(captioner, "images", None),
    }
    known = {part: value.to_dict() for part, value in parts.items() if hasattr(value, "to_dict")}
    flat = flatten_dict(known)
    return {key: value for key, value in flat.items() if "drop" not in key and key.split(".")[-1] not in NOT_COMPARED}


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())
