"""Beam search over any captioner that decodes step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_caption.captioners.base import Decoding, forbid
from rl_caption.captioners.decoding import Prefixes, Tokens


@torch.no_grad()
def beam_search(
    next_logits: Callable[[Prefixes | None], Tensor],
    batch: int,
    decoding: Decoding,
    special: Tokens,
) -> Tensor:
    """The best caption of each of B images among ``num_beams`` W that are kept at every step.

    A finished caption is scored by its log-probability / length**``length_penalty`` (length in tokens, EOS included).
    An image is done, and leaves the batch, when no kept prefix scores better as it is than its best W finished captions
    (Transformers' ``early_stopping=False``); captions that reach the length limit count as finished.

    Args:
        next_logits: from W prefixes of each image that goes on to logits of their next tokens [.., V]; from None to
            those of the first tokens [B, V].
        batch: B.
        decoding: W, length limit L, length penalty.
        special: end, padding, and what is never chosen.

    Returns:
        Token ids [B, 1, T], T <= L, padded after EOS.
    """
    width, limit, penalty = decoding.num_beams, decoding.max_new_tokens, decoding.length_penalty
    finished: list[list[tuple[float, list[int]]]] = [[] for _ in range(batch)]
    logits = next_logits(None).repeat_interleave(width, 0)
    device = logits.device
    images = torch.arange(batch, device=device)  # those that go on
    scores = torch.full((batch, width), -torch.inf, device=device)
    scores[:, 0] = 0.0  # all beams are equal at first: only one counts
    prefixes = torch.empty(batch, width, 0, dtype=torch.long, device=device)
    for length in range(1, limit + 1):
        logprobs = forbid(logits, special.forbidden).log_softmax(-1).unflatten(0, (len(images), width))
        vocabulary = logprobs.shape[-1]
        # 2 W candidates leave W that go on even if W of them end here.
        best, index = (scores.unsqueeze(-1) + logprobs).flatten(1).topk(2 * width, dim=-1)
        origin, token = index // vocabulary, index % vocabulary
        ends = token == special.eos
        going_on = images.tolist()
        for place, rank in ends[:, :width].nonzero().tolist():
            caption = [*prefixes[place, origin[place, rank]].tolist(), special.eos]
            finished[going_on[place]].append((best[place, rank].item() / length**penalty, caption))
        order = ends.long().sort(dim=-1, stable=True).indices[:, :width]  # candidates that go on, best first
        scores, origin, token = best.gather(1, order), origin.gather(1, order), token.gather(1, order)
        rows = origin + width * torch.arange(len(images), device=device).unsqueeze(1)
        prefixes = torch.cat([prefixes.flatten(0, 1)[rows], token.unsqueeze(-1)], dim=-1)
        left = []
        for place, (image, score) in enumerate(zip(going_on, scores[:, 0].tolist(), strict=True)):
            kept = finished[image] = sorted(finished[image], key=lambda item: -item[0])[:width]
            if len(kept) < width or kept[-1][0] < score / length**penalty:
                left.append(place)
        images, scores, prefixes, token, rows = (part[left] for part in (images, scores, prefixes, token, rows))
        if not left or length == limit:
            break
        image = images.repeat_interleave(width)
        before = image if length == 1 else rows.flatten()  # at first there was one prefix an image
        logits = next_logits(Prefixes(token.flatten(), before, image))
    for image, values, captions in zip(images.tolist(), scores.tolist(), prefixes.tolist(), strict=True):
        pairs = zip(values, captions, strict=True)
        finished[image] += [(score / len(ids) ** penalty, ids) for score, ids in pairs]
    return _best(finished, special.pad, device).unsqueeze(1)


def _best(finished: list[list[tuple[float, list[int]]]], pad: int, device: torch.device) -> Tensor:
    """Token ids [B, T] of each image's caption of the highest score, padded."""
    chosen = [max(captions, key=lambda item: item[0])[1] for captions in finished]
    longest = max(len(ids) for ids in chosen)
    return torch.tensor([ids + [pad] * (longest - len(ids)) for ids in chosen], device=device)
