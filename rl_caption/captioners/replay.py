"""Decoding as a CUDA graph: a policy of a few hundred small kernels a token waits for their launches, not for memory.

A graph is a recording of kernels with the addresses that they read and write. It is right as long as the kernels and
shapes do not depend on values (``Decoding.fixed_shapes``) and the weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rl_caption.captioners.base import Captioner, CaptionerError, Decoding, caption_mask

Decode = Callable[..., Tensor]
"""From named tensors to token ids."""
Record = Callable[[Decode, dict[str, Tensor]], Decode]
"""From a function and an example of what it is called with, to one that does the same for tensors of those shapes."""

WARM_UP = 3
"""Calls before recording, in which libraries choose their kernels and take their workspace."""
ALIKE = 0.95
"""Share of captions that a new recording must have in common with what was recorded."""
MOST = 8
"""Recordings that are kept; each holds the memory of a whole decode."""


class ReplayedGenerate:
    """``Captioner.generate`` without beam search: recorded once for every shape of its inputs, then replayed.

    Captions are those of ``Captioner.generate`` with ``Decoding.fixed_shapes``, which every new recording is compared
    with. The policy is in eval mode. A policy whose weights have moved is recorded again.

    Args:
        captioner: whose ``generate`` looks at no value while it decodes with ``fixed_shapes``.
        record: how; a CUDA graph by default.
    """

    def __init__(self, captioner: Captioner, record: Record | None = None) -> None:
        self.captioner = captioner
        self.record: Record = record or record_cuda_graph
        self.recordings: dict[tuple[Any, ...], Decode] = {}
        self.weights: tuple[int, ...] = ()

    def __call__(
        self, policy: nn.Module, inputs: dict[str, Tensor], decoding: Decoding, noise: Tensor | None
    ) -> Tensor:
        """New tokens [B, captions_per_image, T]; see ``Captioner.generate``.

        Raises:
            CaptionerError: the policy cannot be recorded, a recording gives other captions than what was recorded, or
                there are more shapes of inputs than ``MOST``.
            ValueError: the policy is in training mode: every replay would have the same dropout.
        """
        if policy.training:
            raise ValueError(
                "a replayed decode needs the policy in eval mode: its dropout would be the same every time"
            )
        addresses = tuple(tensor.data_ptr() for tensor in (*policy.parameters(), *policy.buffers()))
        if addresses != self.weights:
            self.recordings.clear()
            self.weights = addresses
        given = inputs if noise is None else {**inputs, "noise": noise}
        shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in given.items())
        device = next(iter(given.values())).device.type
        key = (decoding, torch.is_autocast_enabled(device), shapes)
        if key not in self.recordings:
            if len(self.recordings) == MOST:
                raise CaptionerError(
                    f"inputs of more than {MOST} shapes, the newest {shapes}: rollout.cuda_graph needs images of few "
                    "sizes; turn it off"
                )
            decode = self._decode(policy, decoding)
            replay = self.record(decode, given)
            _check(replay(**given), decode(**given))
            self.recordings[key] = replay
        tokens = self.recordings[key](**given)
        longest = caption_mask(tokens, self.captioner.eos_token_id).flatten(0, 1).any(0).sum()
        return tokens[..., : int(longest)]

    def _decode(self, policy: nn.Module, decoding: Decoding) -> Decode:
        def decode(noise: Tensor | None = None, **inputs: Tensor) -> Tensor:
            return self.captioner.generate(policy, inputs, replace(decoding, fixed_shapes=True), noise)

        return decode


def _check(replayed: Tensor, decoded: Tensor) -> None:
    """Compare captions [B, R, L] of a recording with those of what was recorded; near ties may fall either way."""
    same = (replayed == decoded).all(-1).double().mean().item()
    if same < ALIKE:
        raise CaptionerError(
            f"of the captions that a recording gives, {same:.0%} are those of what was recorded, expected {ALIKE:.0%}: "
            "turn rollout.cuda_graph off"
        )


def record_cuda_graph(function: Decode, example: dict[str, Tensor]) -> Decode:
    """``function`` of tensors of the shapes in ``example`` as one CUDA graph.

    Raises:
        CaptionerError: it does what cannot be recorded, such as looking at a value.
    """
    inputs = {name: tensor.clone() for name, tensor in example.items()}
    ahead = torch.cuda.Stream()
    ahead.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(ahead):
        for _ in range(WARM_UP):
            function(**inputs)
    torch.cuda.current_stream().wait_stream(ahead)
    graph = torch.cuda.CUDAGraph()
    try:
        # Only this thread is kept from what cannot be recorded: the loader's pins memory meanwhile.
        with _own_casts(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = function(**inputs)
    except RuntimeError as error:
        raise CaptionerError(
            f"decoding cannot be recorded as a CUDA graph, turn rollout.cuda_graph off: {error}"
        ) from error

    def replay(**given: Tensor) -> Tensor:
        for name, tensor in given.items():
            inputs[name].copy_(tensor)
        graph.replay()
        return output.clone()

    return replay


@contextmanager
def _own_casts() -> Iterator[None]:
    """Autocast keeps casts of weights while it is on: those of a recording are its own, made anew at every replay."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
