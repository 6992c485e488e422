"""Decoding for any captioner: sampling along a prefix tree, and (diverse) beam search.

Captions of an image that begin with the same tokens are one row of the batch until they differ, and
captions that have ended leave it. Every token is drawn with its own random number, so this changes
no caption.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rewards.text.degeneration import bad_ending
from rewards.text.tokenize import tokenize
from rl_caption.captioners.config import Decoding
from rl_caption.captioners.tokens import (
    FORBIDDEN_LOGIT,
    Generated,
    forbid,
    sample_tokens,
)

if TYPE_CHECKING:
    from rl_caption.captioners.base import Captioner

Processor = Callable[[Tensor, Tensor], Tensor]
"""Changes the logits or log-probabilities [N, V] of the next tokens, given the tokens of the
captions so far [N, t], without BOS and prompt. It is called as Transformers' ``LogitsProcessor``
is.
"""

COMPACT_AT = 1 / 8
"""Ended captions leave the batch at once where captions part, because the cache is copied anyway;
elsewhere when they are this fraction of the rows.
"""


@dataclass(frozen=True)
class Prefixes:
    """M different prefixes of captions, one level of the prefix tree; those of an image are
    adjacent.

    Attributes:
        tokens: [M] the newest token of each.
        parent: [M] index of the prefix of the previous call that each extends; None stands for 0,
            1, ..., M - 1.
        image: [M] index of the image of each, ascending.
    """

    tokens: Tensor
    parent: Tensor | None
    image: Tensor

    def extend(self, earlier: Tensor) -> Tensor:
        """All tokens [M, t + 1] of the prefixes, from the tokens ``earlier`` [., t] of those of the
        previous call.
        """
        before = earlier if self.parent is None else earlier[self.parent]
        return torch.cat([before, self.tokens.unsqueeze(1)], dim=1)


NextLogits = Callable[[Prefixes | None], Tensor]
"""Returns the logits [M, V] of the tokens that follow M prefixes. None stands for the empty prefix
of every image and gives [B, V].
"""


@torch.no_grad()
def decode_with_scores(
    captioner: Captioner,
    next_logits: NextLogits,
    images: int,
    decoding: Decoding,
    noise: Tensor | None,
    share_prefixes: bool = True,
) -> Generated:
    """Decode captions of B images by sampling, arg max or beam search.

    Args:
        captioner: gives the special tokens and, for ``remove_bad_endings``, the words of tokens.
        next_logits: the model, which may keep a cache of the prefixes of the previous call.
        images: B.
        noise: [B, K, L] uniform numbers in [0, 1), one for each sampled token.
        share_prefixes: compute equal prefixes of an image once; off where dropout should differ
            between them.

    Returns:
        Token ids [B, R, T] padded after EOS, T <= L: K samples, then
        the greedy caption. With beam search the R best captions and their scores.

    Raises:
        ValueError: samples are to be drawn and ``noise`` is None.
    """
    if decoding.num_beams > 1:
        return beam_search(captioner, next_logits, images, decoding)
    if decoding.num_samples and noise is None:
        raise ValueError(
            "sampling needs noise [B, K, L]: one uniform number for each token"
        )
    return Generated(
        _decode_tree(captioner, next_logits, images, decoding, noise, share_prefixes),
        None,
    )


def constraints(captioner: Captioner, decoding: Decoding) -> list[Processor]:
    """Processors that depend on the tokens before: repeated n-grams, repeated trigrams, bad
    endings.
    """
    from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

    processors: list[Processor] = []
    if decoding.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(decoding.no_repeat_ngram_size))
    if decoding.block_trigrams:
        processors.append(partial(penalise_trigrams, alpha=decoding.block_trigrams))
    if decoding.remove_bad_endings:
        decode = captioner.decode
        eos = captioner.eos_token_id
        processors.append(partial(refuse_bad_endings, decode=decode, eos_token_id=eos))
    return processors


def penalise_trigrams(tokens: Tensor, logits: Tensor, alpha: float) -> Tensor:
    """Lower the logit of a token that would repeat a trigram by 0.693 ``alpha`` for each earlier
    occurrence of it.

    As self-critical.pytorch's ``block_trigrams``, where alpha is 2 and 0.693 stands for ln 2.
    """
    if tokens.shape[1] < 3:
        return logits
    trigrams = tokens.unfold(1, 3, 1)  # [N, t - 2, 3]
    repeated = (trigrams[..., :2] == tokens[:, None, -2:]).all(-1)
    return logits.scatter_add(1, trigrams[..., 2], repeated * (-0.693 * alpha))


def refuse_bad_endings(
    tokens: Tensor,
    logits: Tensor,
    decode: Callable[[Tensor], list[str]],
    eos_token_id: int,
) -> Tensor:
    """Set the logit of EOS to -inf where the caption so far ends in one of ``BAD_ENDINGS`` or has
    no word.

    The first token is left alone. Captions are compared by words, whatever tokens those are made
    of. After self-critical.pytorch's ``remove_bad_endings``.
    """
    if not tokens.shape[1]:
        return logits
    bad = torch.tensor(
        [bad_ending(tokenize(text)) for text in decode(tokens)], device=logits.device
    )
    logits = logits.clone()
    logits[bad, eos_token_id] = -torch.inf
    return logits


def draw_tokens(
    logits: Tensor, noise: Tensor, decoding: Decoding, best: Tensor
) -> Tensor:
    """Draw K tokens [N, K] from each of the distributions of ``logits`` [N, V] by ``noise`` [N, K];
    ``best`` [N, 1] is the arg max. Top-k and top-p truncate them in the order of Transformers.
    """
    from transformers.generation.logits_process import (
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    if not decoding.top_k and decoding.top_p == 1:
        return sample_tokens(logits, noise, decoding.temperature, best)
    left: Any = logits / decoding.temperature
    if decoding.top_k:
        left = TopKLogitsWarper(decoding.top_k)(None, left)  # type: ignore[arg-type]
    if decoding.top_p < 1:
        left = TopPLogitsWarper(decoding.top_p)(None, left)  # type: ignore[arg-type]
    return sample_tokens(left, noise, 1.0)


def _decode_tree(
    captioner: Captioner,
    next_logits: NextLogits,
    images: int,
    decoding: Decoding,
    noise: Tensor | None,
    share_prefixes: bool,
) -> Tensor:
    per_image = decoding.captions_per_image
    limit = decoding.max_new_tokens
    processors = constraints(captioner, decoding)
    logits = next_logits(None)
    image = torch.arange(images, device=logits.device)  # of each prefix
    prefix = image.repeat_interleave(per_image)  # of each caption
    captions = torch.arange(len(prefix), device=logits.device)  # that have not ended
    ids = torch.full((len(prefix), limit), captioner.pad_token_id, device=logits.device)
    for position in range(limit):
        for process in processors:
            # A caption of each prefix; rows of captions that have ended are not read.
            owner = torch.zeros_like(image).scatter_(0, prefix, captions)
            logits = process(ids[owner, :position], logits.float())
        logits = forbid(logits, captioner.forbidden)
        chosen = best = logits.argmax(-1, keepdim=True)
        if noise is not None and decoding.num_samples:
            drawn = draw_tokens(logits, noise[image, :, position], decoding, best)
            chosen = torch.cat([drawn, best], dim=1)
        tokens = chosen[prefix, captions % per_image]
        ids[captions, position] = tokens
        (goes_on,) = (tokens != captioner.eos_token_id).nonzero(as_tuple=True)
        if position + 1 == limit or not len(goes_on):
            break
        captions = captions[goes_on]
        tokens = tokens[goes_on]
        parent = prefix[goes_on]
        if share_prefixes:
            vocabulary = logits.shape[-1]
            pairs = parent * vocabulary + tokens
            pairs, prefix = torch.unique(pairs, return_inverse=True)
            tokens = pairs % vocabulary
            parent = pairs // vocabulary
        else:
            prefix = torch.arange(len(captions), device=logits.device)
        prefixes = Prefixes(tokens, parent, image[parent])
        many = len(tokens) > (1 - COMPACT_AT) * len(image)
        if many and bool((parent.diff() > 0).all()):
            # None have parted and few have ended: all rows stay, the ended ones with padding as
            # their next token.
            padding = torch.full_like(image, captioner.pad_token_id)
            prefix = parent[prefix]
            prefixes = Prefixes(padding.index_copy_(0, parent, tokens), None, image)
        image = prefixes.image
        logits = next_logits(prefixes)
    return ids[:, : position + 1].unflatten(0, (images, per_image))


@torch.no_grad()
def beam_search(
    captioner: Captioner, next_logits: NextLogits, images: int, decoding: Decoding
) -> Generated:
    """The R best captions of each of B images, by beam search of width W in G groups of W / G
    beams.

    A finished caption is scored by its log-probability / length**``length_penalty`` (length in
    tokens, EOS included). A group is done when its best W / G finished captions score at least as
    high as the best of its open beams does at its present length (Transformers'
    ``early_stopping=False``). Captions that reach the length limit count as finished. An image
    whose groups are done leaves the batch.

    Groups make it diverse beam search with Hamming diversity (Vijayakumar et al., "Diverse Beam
    Search for Improved
    Description of Complex Scenes", AAAI 2018): a token loses ``diversity_penalty`` of
    log-probability for each beam of an earlier group that continues with it at the same step. As in
    Transformers, the penalties stay in the scores. Tokens that constraints exclude have probability
    0; the others are not renormalised.
    """
    width = decoding.num_beams
    groups = decoding.num_beam_groups
    each = width // groups
    limit = decoding.max_new_tokens
    processors = constraints(captioner, decoding)
    logits = next_logits(None).repeat_interleave(width, 0)
    device = logits.device
    eos = captioner.eos_token_id
    active = torch.arange(images, device=device)  # images that are not done
    scores = torch.full((images, groups, each), -torch.inf, device=device)
    best_scores = scores.double()
    best = torch.full((*scores.shape, limit), captioner.pad_token_id, device=device)
    prefixes = best.clone()
    scores[..., 0] = 0.0  # all beams are equal at first: only one of a group counts
    going = scores[..., 0] == 0  # groups that are not done
    for length in range(1, limit + 1):
        divisor = length**decoding.length_penalty
        logprobs = forbid(logits, captioner.forbidden).log_softmax(-1)
        for process in processors:
            logprobs = process(prefixes[..., : length - 1].flatten(0, 2), logprobs)
        logprobs = logprobs.unflatten(0, scores.shape)
        taken = torch.zeros_like(logprobs[:, 0, 0])  # by how many earlier groups
        kept: list[list[Tensor]] = []
        for group in range(groups):
            penalty = decoding.diversity_penalty * taken.unsqueeze(1)
            found, parent, token = _best_extensions(
                scores[:, group], logprobs[:, group] - penalty
            )
            counted = going[:, group, None].expand(-1, each)
            ends = (token == eos) & found.isfinite()
            ended = prefixes[:, group].take_along_dim(parent[:, :each, None], 1)
            ended[..., length - 1] = eos
            ended_scores = found[:, :each].double() / divisor
            best_scores[active, group], best[active, group] = _best_of(
                best_scores[active, group],
                best[active, group],
                ended_scores.where(ends[:, :each] & counted, -torch.inf),
                ended,
            )
            order = ends.long().sort(dim=-1, stable=True).indices[:, :each]
            kept.append([some.gather(1, order) for some in (found, parent, token)])
            taken.scatter_add_(1, kept[-1][2], counted.float())
        scores, parent, token = (
            torch.stack(some, 1) for some in zip(*kept, strict=True)
        )
        going &= best_scores[active, :, -1] < scores[..., 0].double() / divisor
        prefixes = prefixes.take_along_dim(parent.unsqueeze(-1), 2)
        prefixes[..., length - 1] = token
        first = torch.arange(0, len(active) * width, each, device=device)
        rows = parent + first.view(-1, groups, 1)
        stay = going.any(1)
        active, going, scores, prefixes, token, rows = (
            some[stay] for some in (active, going, scores, prefixes, token, rows)
        )
        if not len(active) or length == limit:
            break
        image_of = active.repeat_interleave(width)
        # At first there was one prefix an image.
        before = image_of if length == 1 else rows.flatten()
        logits = next_logits(Prefixes(token.flatten(), before, image_of))
    scores = (scores.double() / divisor).where(going.unsqueeze(-1), -torch.inf)
    best_scores[active], best[active] = _best_of(
        best_scores[active], best[active], scores, prefixes
    )
    count = decoding.num_return_sequences
    order = best_scores.flatten(1).argsort(dim=-1, descending=True, stable=True)
    order = order[:, :count]
    captions = best.flatten(1, 2).take_along_dim(order.unsqueeze(-1), 1)
    best_scores = best_scores.flatten(1).gather(1, order)
    return Generated(captions[..., :length], best_scores.float())


def _best_extensions(scores: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The 2 W best extensions of W beams by one token, so that W stay open even if W end.

    From ``scores`` [A, W] and ``logprobs`` [A, W, V]: scores, beams and tokens [A, 2 W], best
    first; extensions by a forbidden token have the score -inf.
    """
    extended = (scores.unsqueeze(-1) + logprobs).flatten(1)
    best, index = extended.topk(2 * scores.shape[1], dim=-1)
    best = best.masked_fill(best < FORBIDDEN_LOGIT / 2, -torch.inf)
    vocabulary = logprobs.shape[-1]
    return best, index // vocabulary, index % vocabulary


def _best_of(
    scores: Tensor, captions: Tensor, new_scores: Tensor, new: Tensor
) -> tuple[Tensor, Tensor]:
    """The best C of captions [..., C, L] with ``scores`` [..., C] and of ``new`` ones, best first;
    of equal ones the first.
    """
    count = scores.shape[-1]
    scores, order = torch.cat([scores, new_scores], -1).sort(
        dim=-1, descending=True, stable=True
    )
    order = order[..., :count].unsqueeze(-1)
    return scores[..., :count], torch.cat([captions, new], -2).take_along_dim(order, -2)


def select_rows(inputs: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """The inputs of some rows of a batch, in order."""
    return {name: value[rows] for name, value in inputs.items()}


def logits_without_cache(
    captioner: Captioner, policy: nn.Module, inputs: dict[str, Tensor]
) -> NextLogits:
    """``Captioner.next_logits`` without a cache: ``token_logits`` of all tokens of every prefix."""
    first = next(iter(inputs.values()))
    earlier = torch.empty(len(first), 0, dtype=torch.long, device=first.device)

    def next_logits(prefixes: Prefixes | None) -> Tensor:
        """Logits [P, V] after all tokens of each of P prefixes."""
        nonlocal earlier
        expanded = inputs
        if prefixes is not None:
            earlier = prefixes.extend(earlier)
            expanded = select_rows(inputs, prefixes.image)
        # The logits of padding are those of the next token.
        ids = nn.functional.pad(earlier, (0, 1), value=captioner.pad_token_id)
        return captioner.token_logits(policy, expanded, ids.unsqueeze(1))[:, 0, -1]

    return next_logits
