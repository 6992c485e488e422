"""Decoding for any captioner: sampling along a prefix tree, beam search, decoding as a CUDA graph.

Captions of an image that have begun with the same words are one row until they differ, and captions that have ended
leave the batch. Every token is drawn with its own random number, so the captions are those of separate decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rl_caption.captioners.base import Captioner, CaptionerError, Decoding, caption_mask, forbid, sample_tokens

COMPACT_AT = 1 / 8
"""Where no captions part, those that have ended leave once they are this fraction of the rows: it copies the cache."""
WARM_UP = 3
"""Calls before a CUDA graph is captured, in which libraries choose their kernels and allocate their workspace."""
MIN_EQUAL = 0.95
"""Fraction of captions of a new graph that must be those of the decode that was captured."""
MAX_GRAPHS = 8
"""Graphs that are kept; each holds the memory of a whole decode."""


@dataclass(frozen=True)
class Prefixes:
    """M different prefixes of captions, one level of the prefix tree, those of an image adjacent.

    Attributes:
        tokens: [M] their newest tokens.
        parent: [M] indices of the prefixes of the previous call that they extend; None: those of the same index.
        image: [M] images, ascending.
        per_image: how many every image has, where that is known without a look at values.
    """

    tokens: Tensor
    parent: Tensor | None
    image: Tensor
    per_image: int | None = None


NextLogits = Callable[[Prefixes | None], Tensor]
"""From M prefixes to logits of their next tokens [M, V]; from None, the empty prefix of every image, to [B, V]."""


@torch.no_grad()
def decode(
    captioner: Captioner,
    next_logits: NextLogits,
    images: int,
    decoding: Decoding,
    noise: Tensor | None,
    share_prefixes: bool = True,
) -> Tensor:
    """Captions of B images, as ``decoding`` asks for.

    Args:
        captioner: for its special tokens.
        next_logits: the model, which may keep a cache of the prefixes of the previous call.
        images: B.
        noise: [B, K, L] uniform numbers in [0, 1), one for each sampled token.
        share_prefixes: equal prefixes are one row; off where dropout is to differ between them.

    Returns:
        Token ids [B, K (+ 1), T], T <= L (L with ``fixed_shapes``): samples, then the greedy or beam caption; padded
        after EOS.
    """
    if decoding.num_beams > 1:
        return beam_search(captioner, next_logits, images, decoding)
    if decoding.num_samples and noise is None:
        raise ValueError("sampling needs noise [B, K, L]: one uniform number for each token")
    if decoding.fixed_shapes:
        return _decode_fixed(captioner, next_logits, images, decoding, noise)
    return _decode_tree(captioner, next_logits, images, decoding, noise, share_prefixes)


def _decode_tree(
    captioner: Captioner,
    next_logits: NextLogits,
    images: int,
    decoding: Decoding,
    noise: Tensor | None,
    share_prefixes: bool,
) -> Tensor:
    per_image, limit = decoding.captions_per_image, decoding.max_new_tokens
    logits = forbid(next_logits(None), captioner.forbidden)
    image = torch.arange(images, device=logits.device)  # of each prefix
    captions = torch.arange(images * per_image, device=logits.device)  # that have not ended
    prefix = image.repeat_interleave(per_image)  # of each caption
    ids = torch.full((len(captions), limit), captioner.pad_token_id, device=logits.device)
    for position in range(limit):
        chosen = best = logits.argmax(-1, keepdim=True)
        if noise is not None and decoding.num_samples:
            drawn = sample_tokens(logits, noise[image, :, position], decoding.temperature, best)
            chosen = torch.cat([drawn, best], dim=1)
        tokens = chosen[prefix, captions % per_image]
        ids[captions, position] = tokens
        (goes_on,) = (tokens != captioner.eos_token_id).nonzero(as_tuple=True)
        if position + 1 == limit or not len(goes_on):
            break
        captions, tokens, parent = captions[goes_on], tokens[goes_on], prefix[goes_on]
        if share_prefixes:
            vocabulary = logits.shape[-1]
            pairs, prefix = torch.unique(parent * vocabulary + tokens, return_inverse=True)
            tokens, parent = pairs % vocabulary, pairs // vocabulary
        else:
            prefix = torch.arange(len(captions), device=logits.device)
        prefixes = Prefixes(tokens, parent, image[parent])
        if len(tokens) > (1 - COMPACT_AT) * len(image) and bool((parent.diff() > 0).all()):
            # None have parted and few have ended: all rows stay, the ended ones with padding as their next token.
            in_place = torch.full_like(image, captioner.pad_token_id).index_copy_(0, parent, tokens)
            prefix, prefixes = parent[prefix], Prefixes(in_place, None, image)
        image = prefixes.image
        logits = forbid(next_logits(prefixes), captioner.forbidden)
    return ids[:, : position + 1].unflatten(0, (images, per_image))


def _decode_fixed(
    captioner: Captioner, next_logits: NextLogits, images: int, decoding: Decoding, noise: Tensor | None
) -> Tensor:
    """B·R rows to the length limit, padding included: no value decides what is computed."""
    samples, rows = decoding.num_samples, decoding.captions_per_image
    logits = forbid(next_logits(None), captioner.forbidden).unsqueeze(1).expand(-1, rows, -1)  # [B, R, V]
    image = torch.arange(images, device=logits.device).repeat_interleave(rows)
    ended = torch.zeros(images, rows, dtype=torch.bool, device=logits.device)
    # The greedy caption is drawn like the others, for nothing: leaving it out would copy the logits.
    numbers = None if noise is None else torch.nn.functional.pad(noise, (0, 0, 0, rows - samples))  # [B, R, L]
    ids: list[Tensor] = []
    for position in range(decoding.max_new_tokens):
        if position:
            prefixes = Prefixes(ids[-1].flatten(), image if position == 1 else None, image, rows)
            logits = forbid(next_logits(prefixes), captioner.forbidden).unflatten(0, (images, rows))
        chosen = best = logits.argmax(-1)
        if numbers is not None and samples:
            each = numbers[:, :, position].reshape(-1, 1)
            drawn = sample_tokens(logits.flatten(0, 1), each, decoding.temperature, best.view(-1, 1))
            chosen = torch.cat([drawn.view(images, rows)[:, :samples], best[:, samples:]], dim=1)
        ids.append(chosen.masked_fill(ended, captioner.pad_token_id))
        ended = ended | (ids[-1] == captioner.eos_token_id)
    return torch.stack(ids, dim=-1)


@torch.no_grad()
def beam_search(captioner: Captioner, next_logits: NextLogits, images: int, decoding: Decoding) -> Tensor:
    """The best caption [B, 1, T] of each of B images among ``num_beams`` W prefixes that are kept at every step.

    A finished caption is scored by its log-probability / length**``length_penalty`` (length in tokens, EOS included).
    An image is done, and leaves the batch, when no kept prefix scores better as it is than its best W finished captions
    (Transformers' ``early_stopping=False``); captions that reach the length limit count as finished.
    """
    width, limit, penalty = decoding.num_beams, decoding.max_new_tokens, decoding.length_penalty
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(images)]
    logits = next_logits(None).repeat_interleave(width, 0)
    device = logits.device
    active = torch.arange(images, device=device)  # images that are not done
    scores = torch.full((images, width), -torch.inf, device=device)
    scores[:, 0] = 0.0  # all beams are equal at first: only one counts
    prefixes = torch.empty(images, width, 0, dtype=torch.long, device=device)
    for length in range(1, limit + 1):
        logprobs = forbid(logits, captioner.forbidden).log_softmax(-1).unflatten(0, (len(active), width))
        vocabulary = logprobs.shape[-1]
        # 2 W candidates leave W that go on even if W of them end here.
        best, index = (scores.unsqueeze(-1) + logprobs).flatten(1).topk(2 * width, dim=-1)
        parent, token = index // vocabulary, index % vocabulary
        ends = token == captioner.eos_token_id
        numbers = active.tolist()
        for row, rank in ends[:, :width].nonzero().tolist():
            caption = [*prefixes[row, parent[row, rank]].tolist(), captioner.eos_token_id]
            finished[numbers[row]].append((best[row, rank].item() / length**penalty, caption))
        order = ends.long().sort(dim=-1, stable=True).indices[:, :width]  # candidates that go on, best first
        scores, parent, token = best.gather(1, order), parent.gather(1, order), token.gather(1, order)
        rows = parent + width * torch.arange(len(active), device=device).unsqueeze(1)
        prefixes = torch.cat([prefixes.flatten(0, 1)[rows], token.unsqueeze(-1)], dim=-1)
        kept = []
        for row, (image, score) in enumerate(zip(numbers, scores[:, 0].tolist(), strict=True)):
            done = finished[image] = sorted(finished[image], key=lambda item: -item[0])[:width]
            if len(done) < width or done[-1][0] < score / length**penalty:
                kept.append(row)
        active, scores, prefixes, token, rows = (part[kept] for part in (active, scores, prefixes, token, rows))
        if not kept or length == limit:
            break
        image_of = active.repeat_interleave(width)
        before = image_of if length == 1 else rows.flatten()  # at first there was one prefix an image
        logits = next_logits(Prefixes(token.flatten(), before, image_of))
    for image, values, captions in zip(active.tolist(), scores.tolist(), prefixes.tolist(), strict=True):
        pairs = zip(values, captions, strict=True)
        finished[image] += [(score / len(ids) ** penalty, ids) for score, ids in pairs]
    chosen = [torch.tensor(max(captions, key=lambda item: item[0])[1]) for captions in finished]
    padded = nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=captioner.pad_token_id)
    return padded.to(device).unsqueeze(1)


def decode_without_cache(
    captioner: Captioner, policy: nn.Module, inputs: dict[str, Tensor], decoding: Decoding, noise: Tensor | None
) -> Tensor:
    """``Captioner.generate`` by ``token_logits`` of every prefix from its first token on."""
    first = next(iter(inputs.values()))
    known = torch.empty(len(first), 0, dtype=torch.long, device=first.device)

    def next_logits(prefixes: Prefixes | None) -> Tensor:
        """Next-token logits of each prefix, all of whose tokens are decoded again."""
        nonlocal known
        given = inputs
        if prefixes is not None:
            before = known if prefixes.parent is None else known[prefixes.parent]
            known = torch.cat([before, prefixes.tokens.unsqueeze(1)], dim=1)
            given = {name: tensor[prefixes.image] for name, tensor in inputs.items()}
        ids = nn.functional.pad(known, (0, 1), value=captioner.pad_token_id)  # its logits are those of the next token
        return captioner.token_logits(policy, given, ids.unsqueeze(1))[:, 0, -1]

    if captioner.max_tokens is not None:
        decoding = replace(decoding, max_new_tokens=min(decoding.max_new_tokens, captioner.max_tokens))
    return decode(captioner, next_logits, len(first), decoding, noise, share_prefixes=not policy.training)


Decode = Callable[..., Tensor]
"""From named tensors to token ids."""
Capture = Callable[[Decode, dict[str, Tensor]], Decode]
"""From a function and an example of its arguments to one that does the same for tensors of those shapes."""


class ReplayedGenerate:
    """``Captioner.generate`` without beam search, captured for every shape of its inputs and replayed.

    A policy of a few hundred small kernels a token waits for their launches. A CUDA graph replays kernels at fixed
    addresses: it is right while neither kernels nor shapes depend on values (``Decoding.fixed_shapes``) and the weights
    stay where they are; a policy whose weights have moved is captured again. Every new graph is compared with
    the decode that it was captured from.

    Args:
        captioner: its ``generate`` looks at no value while it decodes with ``fixed_shapes``.
        capture: as a CUDA graph by default.
    """

    def __init__(self, captioner: Captioner, capture: Capture | None = None) -> None:
        self.captioner = captioner
        self.capture: Capture = capture or capture_cuda_graph
        self.graphs: dict[tuple[Any, ...], Decode] = {}
        self.addresses: tuple[int, ...] = ()

    def __call__(
        self, policy: nn.Module, inputs: dict[str, Tensor], decoding: Decoding, noise: Tensor | None
    ) -> Tensor:
        """New tokens [B, captions_per_image, T]; see ``Captioner.generate``.

        Raises:
            CaptionerError: the policy cannot be captured, a graph gives other captions than the decode that it was
                captured from, or there are more shapes of inputs than ``MAX_GRAPHS``.
            ValueError: the policy is in training mode.
        """
        if policy.training:
            raise ValueError(
                "a replayed decode needs the policy in eval mode: its dropout would be the same every time"
            )
        addresses = tuple(tensor.data_ptr() for tensor in (*policy.parameters(), *policy.buffers()))
        if addresses != self.addresses:
            self.graphs.clear()
            self.addresses = addresses
        given = inputs if noise is None else {**inputs, "noise": noise}
        shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in given.items())
        device = next(iter(given.values())).device.type
        key = (decoding, torch.is_autocast_enabled(device), shapes)
        if key not in self.graphs:
            if len(self.graphs) == MAX_GRAPHS:
                raise CaptionerError(
                    f"inputs of more than {MAX_GRAPHS} shapes, the newest {shapes}: rollout.cuda_graph needs images of "
                    "few sizes; turn it off"
                )
            self.graphs[key] = self._captured(policy, decoding, given)
        tokens = self.graphs[key](**given)
        longest = caption_mask(tokens, self.captioner.eos_token_id).flatten(0, 1).any(0).sum()
        return tokens[..., : int(longest)]

    def _captured(self, policy: nn.Module, decoding: Decoding, example: dict[str, Tensor]) -> Decode:
        def decode_fixed(noise: Tensor | None = None, **inputs: Tensor) -> Tensor:
            return self.captioner.generate(policy, inputs, replace(decoding, fixed_shapes=True), noise)

        replay = self.capture(decode_fixed, example)
        equal = (replay(**example) == decode_fixed(**example)).all(-1).double().mean().item()
        if equal < MIN_EQUAL:  # near ties may fall either way
            raise CaptionerError(
                f"of the captions that a recording gives, {equal:.0%} are those of what was recorded, expected "
                f"{MIN_EQUAL:.0%}: turn rollout.cuda_graph off"
            )
        return replay


def capture_cuda_graph(function: Decode, example: dict[str, Tensor]) -> Decode:
    """``function`` of tensors of the shapes in ``example`` as one CUDA graph.

    Raises ``CaptionerError`` where it does what cannot be captured, such as reading a value.
    """
    inputs = {name: tensor.clone() for name, tensor in example.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            function(**inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # Only this thread is kept from what cannot be captured: the loader's pins memory meanwhile.
        with _fresh_autocast_cache(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
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
def _fresh_autocast_cache() -> Iterator[None]:
    """Autocast caches casts of weights while it is on: those of a graph are its own, made anew at every replay."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
