"""Averaging the weights of captioners that were fine-tuned from one start, into one captioner of
the same size.
"""

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
"""Keys of configurations that do not change what a model computes; dropout rates are not compared
either.
"""


class Averaged(NamedTuple):
    """A captioner with averaged weights.

    Attributes:
        captioner: the new captioner.
        weights: share of each of those that were averaged.
        distances: for each of them ||theta_i - theta_1|| / ||theta_1||, over all floating-point
            weights. Two runs of DiCO from one start are 0.03 apart; two of cross-entropy from
            random weights 0.38, and their mean is of no use.
    """

    captioner: Captioner
    weights: list[float]
    distances: list[float]


@torch.no_grad()
def average_weights(names: Sequence[str], weights: Sequence[float] | None = None) -> Averaged:
    """Load captioners one after the other and average them: theta = sum_i weights[i] * theta_i,
    summed in float64.

    Equal weights give a uniform soup (Wortsman et al. 2022, arXiv 2203.05482); captioners that were
    trained on different rewards from one start give a rewarded soup (Ramé et al. 2023, arXiv
    2306.04488). Exports have adapters merged, so the full weights are averaged. Integer buffers are
    taken from the first captioner.

    Args:
        names: folders of captioners or names on the hub, at least two, all different.
        weights: share of each captioner, at least 0 and 1 in all; None gives all the same.

    Raises:
        CaptionerError: ``names`` or ``weights`` are not as above, or a captioner differs from the
            first in class, prompt, vocabulary, configuration or shapes; the message names what
            differs.
    """
    if len(names) < 2 or len(set(names)) < len(names):
        raise CaptionerError(f"models are {list(names)}: expected at least two different ones")
    shares = [1 / len(names)] * len(names) if weights is None else list(weights)
    if (
        len(shares) != len(names)
        or not all(share >= 0 for share in shares)
        or abs(sum(shares) - 1) > 1e-6
    ):
        raise CaptionerError(
            f"weights are {shares}: expected {len(names)} numbers of at least 0 that sum to 1"
        )
    captioner = load_captioner(names[0])
    first = {name: tensor.clone() for name, tensor in captioner.policy.state_dict().items()}
    floats = [name for name, tensor in first.items() if tensor.is_floating_point()]
    mean = {name: first[name].double() * shares[0] for name in floats}
    distances = [0.0]
    for name, share in zip(names[1:], shares[1:], strict=True):
        state = _state_like(captioner, names[0], name)
        for key in floats:
            mean[key] += state[key].double() * share
        distances.append(
            _norm([state[key] - first[key] for key in floats])
            / _norm([first[key] for key in floats])
        )
    captioner.policy.load_state_dict(
        first | {key: value.to(first[key].dtype) for key, value in mean.items()}
    )
    return Averaged(captioner, shares, distances)


def _state_like(first: Captioner, first_name: str, name: str) -> dict[str, Tensor]:
    """State dict of the captioner ``name``, which must compute the same as ``first`` but for its
    weights.
    """
    other = load_captioner(name)
    for what, (one, two) in {
        "class": (type(first).__name__, type(other).__name__),
        "prompt": (getattr(first, "prompt", ""), getattr(other, "prompt", "")),
    }.items():
        if one != two:
            raise CaptionerError(
                f"{first_name!r} and {name!r} cannot be averaged: {what} {one!r} and {two!r}"
            )
    tokens = vocabulary_difference(first_name, first, name, other)
    if tokens is not None:
        raise CaptionerError(f"captioners of different vocabularies cannot be averaged: {tokens}")
    one, two = _settings(first), _settings(other)
    for key in sorted(one.keys() | two.keys()):
        if one.get(key) != two.get(key):
            values = f"{one.get(key)!r:.80} and {two.get(key)!r:.80}"
            raise CaptionerError(
                f"{first_name!r} and {name!r} cannot be averaged: {key} is {values}"
            )
    state = other.policy.state_dict()
    with reading(name):
        check_state(state, state_shapes(first.policy), f"the weights of {name!r}")
    return state


def _settings(captioner: Any) -> dict[str, Any]:
    """Configuration of the model and of its image processor, as one flat dictionary, for
    comparison.
    """
    settings: dict[str, Any] = {
        "config": getattr(captioner.policy, "config", None),
        "images": getattr(captioner, "images", None),
    }
    plain = {file: value.to_dict() for file, value in settings.items() if hasattr(value, "to_dict")}
    flat = flatten_dict(plain)
    return {
        key: value
        for key, value in flat.items()
        if "drop" not in key and key.split(".")[-1] not in NOT_COMPARED
    }


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())
